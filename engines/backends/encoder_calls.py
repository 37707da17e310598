"""The program of an encoder of images or speech as calls of kernels, on places in memory: the tensors at the engine's
edge, and buffers that live as long as something reads them.

The residual stream is float32, whatever the model's dtype is, and so is what a linear layer gives; what one takes is in
the model's dtype, its rows in eights of columns. What a plan takes and gives is as wide and of the dtypes as steps say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from edgellm.engines.backends.encoder_places import Call, Place, laid_out
from edgellm.engines.model import encoder_steps as kinds
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import Run, planned_runs, segment_of, segment_shape
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, Linear, LinearResidual, Norm, Normed, NormLinear, Reshape, Step
from edgellm.kernels.arrays import ITEM_SIZES
from edgellm.kernels.decode.contract import ACTIVATIONS as GATE_ACTIVATIONS
from edgellm.kernels.encoder.contract import (
    ACTIVATIONS,
    MAX_HEAD_SIZE,
    MAX_NORM_WIDTH,
    NO_ACTIVATION,
    WIDTH_STEP,
    Convolution,
    heads_refusal,
    local_refusal,
    padded_width,
)
from edgellm.kernels.encoder.launcher import attention_bytes

#: The most rows of a linear layer.
MOST_ROWS = 65_536
#: The calls that are linear layers, and that of a plan: it gets the plan's shape, the names of its tensors, and these.
LINEAR_CALLS, PLANNED = ("linear", "activated", "gate_up", "linear_residual"), "planned"


class EncoderCalls:
    """The calls of a program, in order, and its buffers: `places` gives of each where it begins in scratch of `nbytes`,
    whose elements of "compute" take two bytes, or four with `wide`.

    `rounds`: the kernels of linear layers apply activations and round (`activated`), which takes a launch more else.
    """

    def __init__(
        self, program: Program, planned: Collection[str] = (), wide: bool = False, rounds: bool = True
    ) -> None:
        """`planned` are the titles of steps that TensorRT runs."""
        self._program, self._wide, self._rounds = program, wide, rounds
        self._sizes: list[int] = []
        self._values: dict[str, Place] = {}
        for name, (shape, dtype) in program.inputs.items():
            rows = shape if dtype == "bool" else shape[1:]
            self._values[name] = Place(name, (math.prod(rows),) if dtype in ("bool", "int32") else rows, dtype)
        self.calls: list[Call] = []
        self._kinds: Edge = dict(program.inputs)  # of all values, as steps declare them
        runs = {run[0]: (run, plan) for run, plan in planned_runs(program, planned).items()}
        for number, step in enumerate(program.steps):
            if number in runs:
                self._run_plan(*runs[number])
            elif step.title not in planned:
                self._values[step.output] = _KINDS[type(step)][0](self, step, number)
            self._kinds |= step.results(self._kinds, program.shape, "float32")
        for name in program.outputs:
            if self._values[name].memory != name:
                self._call("copy_rows", self._values[name], None, self._output(name), 0)
        self.places, self.nbytes = laid_out(self.calls, self._sizes)

    def _call(self, kernel: str, *arguments: Any) -> Any:
        """Gives the last argument: of most kernels where they write."""
        self.calls.append(Call(kernel, arguments))
        return arguments[-1]

    def _buffer(self, shape: tuple[int, ...], dtype: str) -> Place:
        item = (4 if self._wide else 2) if dtype == "compute" else ITEM_SIZES[dtype]
        self._sizes.append(math.prod(shape) * item)
        return Place(len(self._sizes) - 1, shape, dtype)

    def _output(self, name: str) -> Place:
        shape, dtype = self._program.outputs[name]
        return Place(name, shape[1:], dtype)

    def _target(self, name: str, shape: tuple[int, ...], dtype: str) -> Place:
        """Where a kernel that rounds its results puts them: the engine's output, or a buffer."""
        return self._output(name) if name in self._program.outputs else self._buffer(shape, dtype)

    def _weight(self, spec: WeightSpec, shape: tuple[int, ...] | None = None) -> Place:
        return Place(spec.name, shape or spec.shape, "compute")

    def _exact(self, name: str) -> Place:
        """A value without zeros behind its rows, from now on."""
        value, width = self._values[name], self._kinds[name][0][-1]
        if value.shape[1] != width:
            self._values[name] = self._first_columns(value, width, value.dtype)
        return self._values[name]

    def _first_columns(self, value: Place, width: int, dtype: str) -> Place:
        """The first columns of rows, which a convolution reads that has one place a row."""
        output = self._buffer((value.shape[0], width), dtype)
        return self._call("unfold", value, Convolution(width, value.shape[0], 1, 1, 1, 1, 0, 0), output)

    def _run_plan(self, run: Run, plan: Run) -> None:
        """The call of the plan of a run, which is that of the first run that does the same. It takes whole arrays."""
        segment, given = segment_of(self._program, run), dict[str, Place]()
        for name, (shape, dtype) in segment.program.edge.items():
            whole = segment.name_in_whole(name)
            if name in segment.program.outputs:
                place = self._values[whole] = self._target(whole, shape[1:], dtype)
            else:
                place = self._values.get(whole, Place(whole, shape, dtype))  # or a weight
                if (place.size, place.dtype, place.first) != (math.prod(shape), dtype, 0):
                    place = self._first_columns(place, shape[-1], dtype)
            given[name] = replace(place, shape=shape)
        self._call(PLANNED, segment_shape(self._program, plan), tuple(given), *given.values())

    def _in_place(self, name: str, number: int) -> Place:
        """Where the result of a step goes that adds to a value: the value's own buffer where no later step reads that,
        else one of its own."""
        place = self._values[name]
        others = [other for other, each in self._values.items() if each.memory == place.memory]
        is_own = place.dtype == "float32" and not isinstance(place.memory, str)
        if is_own and not any(self._readers(other, number) or other in self._program.outputs for other in others):
            return place
        return self._buffer(place.shape, "float32")

    def _readers(self, name: str, number: int) -> list[Step]:
        """The later steps that read a value before it is written anew."""
        found = []
        for step in self._program.steps[number + 1 :]:
            if name in step.reads:
                found.append(step)
            if name in step.writes:
                break
        return found

    def _is_rounded(self, step: NormLinear, number: int) -> bool:
        """Whether nothing is lost where a linear layer rounds: its output is an activation's or the engine's, or heads
        are taken from it that are not turned."""
        readers = self._readers(step.output, number)
        if step.activation is not None or step.output in self._program.outputs:
            return True
        return all(isinstance(each, kinds.EncoderAttention) and each.rotary is None for each in readers)

    def _normed_to(self, value: Place, norm: Norm, output: Place) -> Place:
        bias = None if norm.bias is None else self._weight(norm.bias)
        return self._call("norm", value, self._weight(norm.weight), bias, norm.epsilon, norm.offset, output)

    def _operand(self, inputs: tuple[Input, ...], linear: Linear) -> Place:
        """The inputs of a linear layer side by side, normed, in the model's dtype, in eights of columns."""
        first, columns = self._values[inputs[0].value], padded_width(linear.weight.shape[1])
        if len(inputs) == 1 and not inputs[0].norms and first.dtype == "compute" and first.shape[1] == columns:
            return first
        operand, column = self._buffer((first.shape[0], columns), "compute"), 0
        for given in inputs:
            value = first if len(inputs) == 1 else self._exact(given.value)
            if given.norms:
                self._normed_to(value, given.norms[0], operand)
            else:
                self._call("copy_rows", value, None, operand, column)
            column += value.shape[1]
        return operand

    def _norm_linear(self, step: NormLinear, number: int) -> Place:
        x, width = self._operand(step.inputs, step.linear), step.linear.weight.shape[0]
        if step.gated:
            output = self._buffer((x.shape[0], padded_width(width // 2)), "compute")
            return self._call("gate_up", x, step.linear, step.activation, output)
        shape = x.shape[0], padded_width(width)
        if self._rounds and step.scale == 1.0 and self._is_rounded(step, number):
            activation = NO_ACTIVATION if step.activation is None else ACTIVATIONS[step.activation]
            return self._call("activated", x, step.linear, activation, self._target(step.output, shape, "compute"))
        summed = self._buffer(shape, "float32")
        self._call("linear", x, step.linear, summed, step.scale)
        if step.activation is None:
            return summed
        return self._activated(summed, step.activation)

    def _activated(self, value: Place, activation: str) -> Place:
        output = self._buffer((value.shape[0], padded_width(value.shape[1])), "compute")
        return self._call("activate", value, ACTIVATIONS[activation], output)

    def _linear_residual(self, step: LinearResidual, number: int) -> Place:
        assert step.residual is not None  # encoders have no ranks
        x, residual = self._operand((Input(step.value),), step.linear), self._values[step.residual]
        output = self._in_place(step.residual, number)
        self._call("linear_residual", x, step.linear, residual, output, step.scale)
        return output

    def _attention(self, step: kinds.EncoderAttention, number: int) -> Place:
        qkv, (count, window) = self._values[step.value], step.windows
        rotary, mask = (None if name is None else self._values[name] for name in (step.rotary, step.mask))
        heads = self._buffer((3, step.heads, count * window, step.head_size), "compute")
        self._call("prepare_heads", qkv, rotary, heads)
        context = self._buffer((count * window, step.heads * step.head_size), "compute")
        if step.past:
            kept = self._values[kinds.KEPT_ROWS]
            own = replace(kept, shape=kept.shape[1:], first=step.layer * math.prod(kept.shape[1:]))
            given = own, self._values[kinds.FIRST_ROW], step.past, step.head_size**-0.5
            return self._call("past_attention", heads, *given, context)
        return self._call("attention", heads, window, mask, step.head_size**-0.5, context)

    def _add(self, step: Add, number: int) -> Place:
        added = self._weight(step.other) if isinstance(step.other, WeightSpec) else self._exact(step.other)
        return self._call("add_rows", self._exact(step.value), added, self._in_place(step.value, number))

    def _scaled_residual(self, step: kinds.ScaledResidual, number: int) -> Place:
        arguments = self._values[step.residual], self._values[step.value], self._weight(step.weight)
        return self._call("add_scaled_rows", *arguments, self._in_place(step.residual, number))

    def _normed(self, step: Normed, number: int) -> Place:
        value = self._values[step.value]
        return self._normed_to(value, step.norm, self._buffer(value.shape, "float32"))

    def _gather(self, step: kinds.Gather, number: int) -> Place:
        value, rows = self._values[step.value], self._values[step.rows]
        width = padded_width(value.shape[1]) if value.dtype == "compute" else value.shape[1]
        output = self._target(step.output, (rows.size, width), value.dtype)
        self._call("copy_rows", value, rows, output, 0)
        return output

    def _prepend(self, step: kinds.Prepend, number: int) -> Place:
        value = self._exact(step.value)
        rows, width = value.shape
        output = self._buffer((rows + 1, width), "float32")
        self._call("copy_rows", self._weight(step.row, (1, width)), None, replace(output, shape=(1, width)), 0)
        self._call("copy_rows", value, None, replace(output, shape=(rows, width), first=width), 0)
        return output

    def _drop_first(self, step: kinds.DropFirst, number: int) -> Place:
        value = self._values[step.value]
        return replace(value, shape=(step.rows, value.shape[1]), first=value.first + value.shape[1])

    def _average_pool(self, step: kinds.AveragePool, number: int) -> Place:
        output = self._buffer((step.means, step.width), "float32")
        return self._call("average_pool", self._exact(step.value), step.side, step.size, output)

    def _clip(self, step: kinds.Clip, number: int) -> Place:
        """Rounded where linear layers alone take it."""
        values = [self._exact(name) for name, _ in step.parts]
        rounds = all(each.multiplies is not None for each in self._readers(step.output, number))
        width = sum(value.shape[1] for value in values)
        output, column = self._buffer((values[0].shape[0], width), "compute" if rounds else "float32"), 0
        for value, (_, bounds) in zip(values, step.parts, strict=True):
            self._call("clip_rows", value, self._weight(bounds), output, column)
            column += value.shape[1]
        return output

    def _clipped_gate(self, step: kinds.ClippedGate, number: int) -> Place:
        gate, value = self._exact(step.gate), self._exact(step.value)
        bounds, activation = map(self._weight, step.bounds), ACTIVATIONS[step.activation]
        return self._call("clipped_gate", gate, value, *bounds, activation, self._buffer(gate.shape, "compute"))

    def _normed_heads(self, step: kinds.NormedHeads, number: int) -> Place:
        value, weights = self._values[step.value], (self._weight(norm.weight) for norm in step.norms)
        return self._call("normed_heads", value, *weights, step.norms[0].epsilon, self._buffer(value.shape, "float32"))

    def _standard_norm(self, step: kinds.StandardNorm, number: int) -> Place:
        value, factors = self._exact(step.value), (step.factor, step.epsilon)
        standard = (None, None) if step.standard is None else map(self._weight, step.standard)
        return self._call("standard_norm", value, *standard, *factors, self._buffer(value.shape, "float32"))

    def _centered_norm(self, step: kinds.CenteredNorm, number: int) -> Place:
        value, mask = self._values[step.value], None if step.mask is None else self._values[step.mask]
        output = self._buffer((value.shape[0], step.weight.shape[0]), "compute")
        return self._call("centered_norm", value, self._weight(step.weight), mask, step.epsilon, output)

    def _normed_residual(self, step: kinds.NormedResidual, number: int) -> Place:
        output, weight = self._in_place(step.residual, number), self._weight(step.norm.weight)
        given = self._values[step.value], weight, step.norm.epsilon, self._values[step.residual]
        return self._call("add_normed", *given, step.share, output)

    def _gated_convolution(self, step: kinds.GatedConvolution, number: int) -> Place:
        value, (width, _), norm = self._values[step.value], step.weight.shape, step.norm
        output = self._buffer((value.shape[0], width), "compute")
        weights = self._weight(step.weight), self._weight(norm.weight)
        return self._call("gated_convolution", value, *weights, norm.epsilon, output)

    def _local_attention(self, step: kinds.LocalAttention, number: int) -> Place:
        qkv, scale = self._values[step.value], self._weight(step.scale)
        context = self._buffer((qkv.shape[0], step.heads * step.scale.shape[0]), "compute")
        given = qkv, self._values[step.relative], step.first, step.past, step.cap
        return self._call("local_attention", *given, scale, context)

    def _unfold(self, step: kinds.Unfold, number: int) -> Place:
        columns = padded_width(step.channels * math.prod(step.kernel))
        given = Convolution(step.channels, *step.grid[1:], *step.kernel, step.stride, *step.padding)
        return self._call("unfold", self._values[step.value], given, self._buffer((step.places, columns), "compute"))

    def _product(self, step: kinds.Product, number: int) -> Place:
        value = self._exact(step.value)
        output = self._target(step.output, (value.shape[0], step.weight.shape[1]), "compute")
        return self._call("product", value, self._weight(step.weight), step.scale, output)


def encoder_refusals(program: Program, shared_limit: int) -> dict[str, str]:
    """The steps of an encoder that kernels do not run where blocks may have `shared_limit` bytes of shared memory, by
    title, and why."""
    found = dict[str, str]()
    for step in program.steps:
        _, refused = _KINDS.get(type(step), (None, lambda step, limit: "encoders have no kernel for it"))
        width = program.outputs.get(step.output, ((0,), ""))[0][-1]
        if (refusal := refused(step, shared_limit) or _width_refusal(width)) is not None:
            found.setdefault(step.title, refusal)
    return found


def _attention_refusal(step: kinds.EncoderAttention, limit: int) -> str | None:
    if (refusal := heads_refusal(step.head_size)) is not None:
        return refusal
    if step.qk_norms is not None:
        return "norms of queries and keys have no kernel"
    if step.past:
        return None
    needed = attention_bytes(step.head_size, step.windows[1])
    return None if needed <= limit else f"it needs {needed} bytes of shared memory, a block has {limit}"


def _residual_refusal(step: LinearResidual, limit: int) -> str | None:
    if step.norm is not None or step.keep is not None or step.selects:
        return "encoders keep and choose no rows, and norm nothing before it is added"
    return _width_refusal(step.linear.weight.shape[0])


def _norm_linear_refusal(step: NormLinear, limit: int) -> str | None:
    if step.keep is not None or step.selects:
        return "encoders keep and choose no rows"
    if step.norms and len(step.inputs) + len(step.norms) > 2:
        return "inputs side by side are taken as they are"
    if (step.gated or step.activation is not None) and (refusal := _activation_refusal(step.activation, step.gated)):
        return refusal
    return next((refusal for refusal in map(_norm_refusal, step.norms) if refusal is not None), None)


def _activation_refusal(activation: str | None, gated: bool) -> str | None:
    known, how = (GATE_ACTIVATIONS, " with a gate") if gated else (ACTIVATIONS, "")
    return None if activation in known else f"the activation {activation} has no kernel{how}"


def _norm_refusal(norm: Norm) -> str | None:
    width = norm.weight.shape[0]
    return _width_refusal(width) or (None if width <= MAX_NORM_WIDTH else f"norms take up to {MAX_NORM_WIDTH} columns")


def _plain_norm_refusal(norm: Norm) -> str | None:
    return "it norms by a weight alone" if norm.bias is not None or norm.offset else _norm_refusal(norm)


def _width_refusal(width: int) -> str | None:
    return f"widths must be multiples of {WIDTH_STEP}, not {width}" if width % WIDTH_STEP else None


def _most_refusal(count: int, most: int, what: str) -> str | None:
    return None if count <= most else f"{count} {what}, up to {most}"


def _taken(step: Step, limit: int) -> None:
    """Kernels run all steps of this kind."""


#: Of each kind of step what makes its calls, and gives the place of its output, and why kernels do not run it, if so.
_KINDS: dict[type, tuple[Callable[[EncoderCalls, Any, int], Place], Callable[[Any, int], str | None]]] = {
    NormLinear: (EncoderCalls._norm_linear, _norm_linear_refusal),
    LinearResidual: (EncoderCalls._linear_residual, _residual_refusal),
    Add: (EncoderCalls._add, _taken),
    Normed: (EncoderCalls._normed, lambda step, limit: _norm_refusal(step.norm)),
    Reshape: (lambda calls, step, number: replace(calls._exact(step.value), shape=step.shape[1:]), _taken),
    kinds.EncoderAttention: (EncoderCalls._attention, _attention_refusal),
    kinds.ScaledResidual: (EncoderCalls._scaled_residual, lambda step, limit: _width_refusal(step.weight.shape[0])),
    kinds.Gather: (EncoderCalls._gather, _taken),
    kinds.Prepend: (EncoderCalls._prepend, _taken),
    kinds.DropFirst: (EncoderCalls._drop_first, _taken),
    kinds.AveragePool: (EncoderCalls._average_pool, _taken),
    kinds.Product: (EncoderCalls._product, _taken),
    kinds.Clip: (EncoderCalls._clip, _taken),
    kinds.ClippedGate: (EncoderCalls._clipped_gate, lambda step, limit: _activation_refusal(step.activation, False)),
    kinds.NormedHeads: (EncoderCalls._normed_heads, lambda step, limit: heads_refusal(step.head_size)),
    kinds.StandardNorm: (EncoderCalls._standard_norm, _taken),
    kinds.Unfold: (EncoderCalls._unfold, lambda step, limit: _most_refusal(step.places, MOST_ROWS, "places")),
    kinds.Activate: (
        lambda calls, step, number: calls._activated(calls._values[step.value], step.activation),
        lambda step, limit: _activation_refusal(step.activation, False),
    ),
    kinds.CenteredNorm: (
        EncoderCalls._centered_norm,
        lambda step, limit: _most_refusal(step.weight.shape[0], MAX_HEAD_SIZE, "channels"),
    ),
    kinds.NormedResidual: (EncoderCalls._normed_residual, lambda step, limit: _plain_norm_refusal(step.norm)),
    kinds.GatedConvolution: (EncoderCalls._gated_convolution, lambda step, limit: _plain_norm_refusal(step.norm)),
    kinds.LocalAttention: (
        EncoderCalls._local_attention,
        lambda step, limit: local_refusal(step.past, step.scale.shape[0]),
    ),
}
