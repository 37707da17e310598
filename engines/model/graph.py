"""Runs a program by operations: NumPy computes them at once, TensorRT makes a network of them.

Every kind of step is told once here, in terms of `Operations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from edgellm.engines.model import steps
from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.encoder_graph import ENCODER_STEPS
from edgellm.engines.model.operations import Operations, Scoring, Tensor
from edgellm.engines.model.program import Program
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.row_steps import TokenInputs
from edgellm.engines.model.states import PRESENT
from edgellm.kernels.decode.contract import SQUARE_SUMS, TOKEN_SHARE

#: Raise this when the network of a program changes though the program does not: plans are then rebuilt.
NETWORK_VERSION = 3


class ProgramGraph(Generic[Tensor]):
    """A program's steps as calls on `operations`; `run` makes them."""

    def __init__(self, operations: Operations[Tensor], program: Program) -> None:
        self.operations: Operations[Tensor] = operations
        self._program = program
        self._steps = [(_RUN[type(step)], step) for step in program.steps]
        self.to_residual = operations.to_float32 if program.wide_residual else operations.to_compute
        residuals = {step.adds_to for step in program.steps if step.adds_to is not None}
        self._state_names = {id(step): step.state(program.shape).names for step in program.stateful}
        self._streams = sorted(residuals & program.inputs.keys())  # norm and residual then share one cast
        # Of a run, by name: inputs and what steps wrote; weights and adapters; what steps keep, by its places.
        self.values: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self._kept: dict[str, dict[int, Tensor]] = {}

    def run(self) -> None:
        """Take the inputs, compute, and give out the outputs."""
        operations, program = self.operations, self._program
        values = {name: operations.input(name, shape, dtype) for name, (shape, dtype) in program.values.items()}
        values |= {name: self.to_residual(values[name]) for name in self._streams}
        self.values, self._kept = values, {}
        self.weights = {name: operations.weight(name, shape) for name, shape in program.matrices.items()}
        for run, step in self._steps:
            if (output := run(self, step)) is not None:
                values[step.output] = output
        for name, parts in self._kept.items():
            ordered = [parts[place] for place in sorted(parts)]
            values[name] = operations.concatenate(ordered, axis=2) if len(ordered) > 1 else ordered[0]
        for name, (_, dtype) in program.outputs.items():
            to_own = operations.to_float32 if dtype == "float32" else operations.to_compute
            operations.output(name, to_own(values[name]))

    def _norm(self, x: Tensor, norm: steps.Norm | None) -> Tensor:
        """x itself where there is no norm."""
        if norm is None:
            return x
        weight = self.weights[norm.weight.name]
        if norm.bias is None:
            return self.operations.rms_norm(x, weight, norm.epsilon, norm.offset)
        return self.operations.layer_norm(x, weight, self.weights[norm.bias.name], norm.epsilon)

    def _linear(self, x: Tensor, linear: steps.Linear) -> Tensor:
        """A linear layer, with LoRA adapters where the engine has them."""
        weights, shape = self.weights, self._program.shape
        bias = None if linear.bias is None else weights[linear.bias.name]
        x = self.operations.to_compute(x)
        y = self.operations.linear(x, weights[linear.weight.name], bias)
        adapted = self._program.adapted.get(linear.name)
        if adapted is None:
            return y
        a, b = (weights[name] for name, _ in adapted.edge(shape.lora_slots, shape.lora_rank))
        return self.operations.adapt(y, x, a, b, self.values[SCALES])

    def _input(self, given: steps.Input) -> Tensor:
        x = self.values[given.value]
        if len(given.norms) < 2:
            return self._norm(x, given.norms[0]) if given.norms else x
        return self.normed_parts(x, given.norms)

    def normed_parts(self, x: Tensor, norms: tuple[steps.Norm, ...], rest: int = 0) -> Tensor:
        """x [B, T, ..] with a part for each norm, and `rest` columns behind them as they are."""
        sizes = [norm.weight.shape[0] for norm in norms]
        parts = self.operations.split(x, [*sizes, rest] if rest else sizes, axis=2)
        normed = [self._norm(part, norm) for part, norm in zip(parts, norms, strict=False)]
        return self.operations.concatenate(normed + parts[len(norms) :], axis=2)

    def _keep(self, keep: steps.Keep, x: Tensor) -> None:
        self._kept.setdefault(keep.target, {})[keep.place] = x
        self.values[keep.target] = x

    def _norm_linear(self, step: steps.NormLinear) -> Tensor:
        operations = self.operations
        inputs = [self._input(given) for given in step.inputs]
        if step.keep is not None:
            raw = step.keep.raw
            self._keep(step.keep, operations.to_compute(self.values[step.inputs[-1].value]) if raw else inputs[-1])
        x = operations.concatenate(inputs, axis=2) if len(inputs) > 1 else inputs[0]
        if step.selects:
            x = operations.gather_rows(x, self.values["last_token_ids"])
        y = self._linear(x, step.linear)
        if step.activation is not None:
            y = operations.gated(y, step.activation) if step.gated else operations.activation(y, step.activation)
        if step.through is not None:
            width, whole = (self._program.kinds[each][0][-1] for each in (step.output, step.through))
            sizes = step.first, width, whole - step.first - width
            through = operations.split(self.values[step.through], sizes, axis=2)[1]
            y = operations.to_compute(operations.multiply(operations.to_float32(y), operations.to_float32(through)))
        if step.scale != 1.0:
            y = operations.scale(operations.to_float32(y), step.scale)
        if step.cap:
            y = operations.activation(operations.scale(operations.to_float32(y), 1 / step.cap), "tanh")
            y = operations.scale(y, step.cap)
        if step.into is not None:
            width, whole = step.linear.weight.shape[0], self._program.kinds[step.into][0][-1]
            behind = operations.split(self.values[step.into], (width, whole - width), axis=2)[1]
            y = operations.concatenate((y, operations.to_compute(behind)), axis=2)
        return y

    def _linear_residual(self, step: steps.LinearResidual | steps.AddResidual) -> Tensor:
        operations, values = self.operations, self.values
        y = values[step.value]
        if step.residual is None:  # one rank's part
            return self._linear(operations.gather_rows(y, values["last_token_ids"]) if step.selects else y, step.linear)
        residual = self.to_residual(values[step.residual])
        if step.keep is not None:
            self._keep(step.keep, operations.to_compute(residual))
        if step.selects:
            residual = operations.gather_rows(residual, values["last_token_ids"])
        if step.linear is not None:
            y = operations.gather_rows(y, values["last_token_ids"]) if step.selects else y
            y = self._linear(y, step.linear)
        y = self.to_residual(y)
        if step.scale != 1.0:
            y = operations.scale(y, step.scale)
        if step.norm is not None:
            y = self.to_residual(self._norm(y, step.norm))
        y = operations.add(residual, y)
        return y if step.factor is None else operations.multiply(y, self.weights[step.factor.name])

    def _reduce(self, step: steps.Reduce) -> Tensor:
        operations, y = self.operations, self.operations.reduce(self.values[step.value])
        y = y if step.scale == 1.0 else operations.scale(self.to_residual(y), step.scale)
        if step.residual is None:
            return y
        residual = self.to_residual(self.values[step.residual])
        if step.keep is not None:
            self._keep(step.keep, operations.to_compute(residual))
        return operations.add(residual, self.to_residual(y))

    def _experts(self, step: steps.Experts) -> Tensor:
        operations, weights = self.operations, self.weights
        residual = None if step.residual is None else self.to_residual(self.values[step.residual])
        if step.keep is not None and residual is not None:
            self._keep(step.keep, operations.to_compute(residual))
        x = operations.to_compute(self._input(step.given))
        scored = x if step.scored is None else operations.to_compute(self._input(step.scored))
        scores = operations.to_float32(self._linear(scored, step.router))
        if step.scored is not None:
            scores = operations.scale(scores, step.router.weight.shape[1] ** -0.5)
        correction, scales = (None if each is None else weights[each.name] for each in (step.correction, step.scales))
        layers = step.gate_up, step.down
        biases = [None if each.bias is None else weights[each.bias.name] for each in layers]
        gate_up, down = ((weights[each.weight.name], bias) for each, bias in zip(layers, biases, strict=True))
        given = self._linear(x, step.latent[0]) if step.latent else x
        y = operations.experts(step, given, (scores, correction, scales), gate_up, down)
        if step.latent:
            y = self._linear(operations.to_compute(y), step.latent[1])
        y = self.to_residual(y)
        if step.shared:
            first, second, *gates = step.shared
            sums, is_gated = self._linear(x, first), step.mixture.gated
            inner = operations.gated(sums, "silu") if is_gated else operations.activation(sums, "relu_squared")
            of_all = operations.to_float32(self._linear(inner, second))
            for gate in gates:
                share = operations.activation(operations.to_float32(self._linear(x, gate)), "sigmoid")
                of_all = operations.multiply(of_all, share)
            y = operations.add(y, self.to_residual(of_all))
        if step.scale != 1.0:
            y = operations.scale(y, step.scale)
        return y if residual is None else operations.add(residual, y)

    def _attention(self, step: steps.Attention) -> Tensor | None:
        operations, given = self.operations, self.values
        heads, kv_heads, size = step.heads
        if not heads:
            self._write_rows(step)
            return None
        projected, gate = operations.to_compute(given[step.value]), None
        if step.gated:
            pairs, rest = operations.split(projected, (2 * heads * size, 2 * kv_heads * size), axis=2)
            query, gate = operations.split(operations.split_heads(pairs, heads), (size, size), axis=3)
            rest = operations.split_heads(rest, 2 * kv_heads)
            qkv = operations.concatenate((query, rest), axis=1)
        else:
            qkv = operations.split_heads(projected, heads + 2 * kv_heads)
        if step.q_norm is not None or step.query_columns:
            query, key, value = operations.split(qkv, (heads, kv_heads, kv_heads), axis=1)
            if not step.norms_behind:
                query, key = self._norm(query, step.q_norm), self._norm(key, step.k_norm)
            if step.rotary:
                query = operations.rotary_embedding(query, self._rotary_rows(step, step.query_columns))
                key = operations.rotary_embedding(key, self._rotary_rows(step))
            if step.norms_behind:
                query, key = self._norm(query, step.q_norm), self._norm(key, step.k_norm)
        else:  # one rotation serves queries and keys
            rotated, value = operations.split(qkv, (heads + kv_heads, kv_heads), axis=1)
            if step.rotary:
                rotated = operations.pairs_apart(rotated, step.rotary) if step.neighbours else rotated
                rotated = operations.rotary_embedding(rotated, self._rotary_rows(step))
            query, key = operations.split(rotated, (heads, kv_heads), axis=1)
        if step.norms_values:
            assert step.k_norm is not None
            value = operations.rms_norm(value, None, step.k_norm.epsilon)
        mask, start = given["attention_mask"], given["kvcache_start_index"]
        caches = self._update_rows(step, key, value)
        scoring = Scoring(step.scale, step.cap, None if step.sinks is None else self.weights[step.sinks.name])
        if step.looks_ahead:
            seen = given[steps.LAST_SEEN]
            context = operations.attention_ahead(query, caches, start, seen, step.window, scoring)
        elif step.window is None:
            context = operations.attention(query, caches, mask, scoring)
        else:
            context = operations.window_attention(query, caches, mask, start, step.window, scoring)
        if gate is not None:
            context = operations.multiply(context, operations.activation(gate, "sigmoid"))
        return operations.merge_heads(context)

    def _write_rows(self, step: steps.Attention) -> None:
        """Keys and values of a step without query heads."""
        operations, kv_heads = self.operations, step.heads[1]
        both = operations.split_heads(self.values[step.value], 2 * kv_heads)
        key, value = operations.split(both, (kv_heads, kv_heads), axis=1)
        key = self._norm(key, step.k_norm)
        self._update_rows(
            step, operations.rotary_embedding(key, self._rotary_rows(step)) if step.rotary else key, value
        )

    def _update_rows(self, step: steps.Attention, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The layer's rows, and their scales if they have such, with new keys and values."""
        operations, given, names = self.operations, self.values, self._state_names[id(step)]
        start, wraps = given["kvcache_start_index"], step.window is not None
        keys, values, *scales = (given[name] for name in names)
        key_scales, value_scales = scales or (None, None)
        keys = operations.kv_cache_update(keys, key, start, key_scales, wraps)
        values = operations.kv_cache_update(values, value, start, value_scales, wraps)
        for name, tensor in zip(names, (keys, values, *scales), strict=True):
            operations.output(PRESENT + name, tensor)
        return keys, values, *scales

    def _rotary_rows(self, step: steps.Attention, further: int = 0) -> Tensor:
        """The columns of the rotary rows that the layer takes, or those so many `further` on; cut once for all layers
        that take the same."""
        name, given = "rope_rotary_cos_sin", self.values
        width = self._program.inputs[name][0][-1]
        if width == step.rotary:
            return given[name]
        first = step.rotary_first + further
        part = f"{name}.{first}"
        if part not in given:
            sizes = [size for size in (first, step.rotary, width - first - step.rotary) if size]
            given[part] = self.operations.split(given[name], sizes, axis=2)[1 if first else 0]
        return given[part]

    def _short_convolution(self, step: ShortConvolution) -> None:
        given, (columns,) = self.values, self._state_names[id(step)]
        weight, bias = self.weights[step.weight.name], None if step.bias is None else self.weights[step.bias.name]
        (kept,) = step.state(self._program.shape).kept_names
        given[step.output], given[kept] = self.operations.short_convolution(
            step, given[step.value], given[columns], weight, bias, given.get("node_parents"), given.get("state_tokens")
        )
        self._say_committed(step)

    def _update_matrices(self, step: GatedDelta) -> None:
        given, weights, (matrices,) = self.values, self.weights, self._state_names[id(step)]
        _, kept = step.state(self._program.shape).kept_names  # the rows are kept under their own name
        given[step.output], given[kept] = self.operations.update_matrices(
            step,
            given[step.value],
            given[step.gates],
            given[matrices],
            tuple(weights[getattr(step, name).name] for name in step.numbers),
            given.get("node_parents"),
            given.get("state_tokens"),
        )
        self._say_committed(step)

    def _silu_of(self, gate: str, first: int, value: str) -> Tensor:
        """What multiplies a value: of a gate's columns from `first` on."""
        operations, width = self.operations, self._program.kinds[value][0][-1]
        ends = [size for size in (first, width) if size]
        own = operations.split(self.values[gate], ends, axis=2)[len(ends) - 1]
        return operations.activation(operations.to_float32(own), "silu")

    def _square_sums(self, step: steps.SquareSums) -> Tensor:
        operations, value = self.operations, self.values[step.value]
        if step.gate is not None:
            value = operations.multiply(value, self._silu_of(step.gate, step.first, step.value))
        return operations.square_sums(value, step.widths, step.counted)

    def _gated_norm(self, step: GatedNorm) -> Tensor:
        operations, value = self.operations, self.values[step.value]
        gate, weight = self._silu_of(step.gate, step.first, step.value), self.weights[step.norm.weight.name]
        if step.squares is not None:
            place, whole = step.shared
            squares = operations.split(self.values[step.squares], [place, 1], axis=2)[1]
            gated = operations.multiply(value, gate)
            return operations.to_compute(operations.rms_norm_of_ranks(gated, weight, squares, whole, step.norm))
        if step.gates_first:
            width = self._program.kinds[step.value][0][-1]
            parts = operations.split_heads(operations.multiply(value, gate), step.heads)
            weight = operations.reshape(weight, (step.heads, 1, width // step.heads))
            normed = operations.merge_heads(operations.rms_norm(parts, weight, step.norm.epsilon, 0.0))
            return operations.to_compute(normed)
        normed = operations.merge_heads(self._norm(operations.split_heads(value, step.heads), step.norm))
        return operations.to_compute(operations.multiply(operations.to_float32(normed), gate))

    def _say_committed(self, step: steps.Stateful) -> None:
        """Give out the states of a step that took its tokens into them."""
        if "state_tokens" in self._program.inputs:
            for name in self._state_names[id(step)]:
                self.operations.output(PRESENT + name, self.values[name])

    def _add(self, step: steps.Add) -> Tensor:
        operations, other = self.operations, step.other
        if isinstance(other, WeightSpec):
            added = operations.reshape(self.weights[other.name], (1, *other.shape))
        else:
            added = self.values[other]
        return operations.add(self.to_residual(self.values[step.value]), self.to_residual(added))

    def _norm_parts(self, step: steps.NormParts) -> Tensor:
        width = self._program.kinds[step.value][0][-1]
        widths = [norm.weight.shape[0] for norm in step.norms]
        x, rest = self.operations.to_compute(self.values[step.value]), width - sum(widths)
        if step.squares is None:
            return self.normed_parts(x, step.norms, rest)
        *parts, behind = self.operations.split(x, [*widths, rest], axis=2)
        sums = self.operations.split(self.values[step.squares], [1] * SQUARE_SUMS, axis=2)
        normed = [
            self.operations.rms_norm_of_ranks(part, self.weights[norm.weight.name], squares, whole, norm)
            for part, norm, squares, whole in zip(parts, step.norms, sums, step.wholes, strict=False)
        ]
        return self.operations.concatenate([*normed, behind], axis=2)

    def _token_inputs(self, step: TokenInputs) -> Tensor:
        operations, (width,) = self.operations, step.norm.weight.shape
        x, rows = (operations.to_float32(self.values[each]) for each in step.reads)
        parts = self._program.kinds[step.value][0][-1] // width
        normed = operations.to_float32(operations.merge_heads(self._norm(operations.split_heads(x, parts), step.norm)))
        return operations.scale(operations.add(normed, operations.scale(rows, step.scale)), TOKEN_SHARE)


#: What computes each kind of step: it gives the step's output, or puts out nothing and returns None.
_RUN: dict[type, Callable[[ProgramGraph[Any], Any], Any]] = {
    **ENCODER_STEPS,
    steps.Scale: lambda graph, step: graph.operations.scale(graph.to_residual(graph.values[step.value]), step.factor),
    steps.Add: ProgramGraph._add,
    steps.Normed: lambda graph, step: graph._norm(graph.values[step.value], step.norm),
    steps.NormParts: ProgramGraph._norm_parts,
    steps.NormLinear: ProgramGraph._norm_linear,
    steps.LinearResidual: ProgramGraph._linear_residual,
    steps.Reduce: ProgramGraph._reduce,
    steps.SquareSums: ProgramGraph._square_sums,
    steps.Assemble: lambda graph, step: graph.operations.assemble(graph.values[step.value]),
    steps.AddResidual: ProgramGraph._linear_residual,
    steps.Experts: ProgramGraph._experts,
    steps.Attention: ProgramGraph._attention,
    ShortConvolution: ProgramGraph._short_convolution,
    GatedDelta: ProgramGraph._update_matrices,
    SelectiveScan: ProgramGraph._update_matrices,
    GatedNorm: ProgramGraph._gated_norm,
    steps.Reshape: lambda graph, step: graph.operations.reshape(graph.values[step.value], step.shape),
    steps.SideBySide: lambda graph, step: graph.operations.concatenate(
        [graph.operations.to_compute(graph.values[each]) for each in step.values], axis=2
    ),
    TokenInputs: ProgramGraph._token_inputs,
}
