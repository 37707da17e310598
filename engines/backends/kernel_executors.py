"""The executors of programs by hand-written kernels: which steps each can run, and by which launches.

Kernels of few rows norm inside their linear layers: every block of a layer norms for itself, which is fastest for up to
a dozen rows where kernels overlap, but takes shared memory for whole rows. Kernels of many rows have the norms as
launches of their own, for all blocks of the linear layer that follows. Either gives a row the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from edgellm.engines.backends.kernel_steps import (
    JOINED_INPUTS,
    UNNORMED,
    attention_shape,
    comes_rounded,
    module_rows,
    most_rows,
    packed_layout,
    step_refusal,
    step_rows,
)
from edgellm.engines.backends.recurrent_steps import (
    RECURRENT,
    UNGATED,
    gated_heads,
    recurrent_launches,
    recurrent_refusal,
)
from edgellm.engines.model.adapted_projections import SCALES
from edgellm.engines.model.program import Program
from edgellm.engines.model.steps import (
    Attention,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Norm,
    NormLinear,
    NormParts,
    Scale,
    SideBySide,
    Step,
)
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode.attention import attention_shared_bytes
from edgellm.kernels.decode.contract import (
    MAX_ROWS,
    MAX_TILED_ROWS,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    Kept,
    LinearAdapters,
    LinearWeights,
    NormedInput,
    padded_columns,
    padded_ranks,
)
from edgellm.kernels.decode.geometries import linear_residual_shared_bytes, norm_linear_shared_bytes, norm_shared_bytes
from edgellm.kernels.decode.packed_rows import MAX_NORMED_ROWS, packed_clocks, packed_refusal
from edgellm.kernels.decode.tiled_linear import tiled_shared_bytes
from edgellm.kernels.decode.tilings import NORM_CLOCKS, Capacity, fastest, few_rows_clocks, many_rows_clocks
from edgellm.kernels.quantization.device_layout import DeviceLayout, InputPermutation


class StepKernels(NamedTuple):
    """The kernels in a GPU's memory, or their NumPy twins: of few rows, and of many; the GPU; and what a program may
    need beside them: kernels of recurrent layers, of linear layers of any number of rows, and of prompts' attention."""

    few: Any
    many: Any
    gpu: Capacity = Capacity()
    recurrent: Any = None
    any_rows: Any = None
    prefill: Any = None


class FewRows:
    """Runs a program's steps on bound arrays by the kernels of few rows."""

    name = "kernels of few rows"
    most_rows = MAX_ROWS
    #: Whether attention is that of prompts.
    many_tokens = False

    def __init__(
        self,
        kernels: StepKernels,
        program: Program,
        arrays: Callable[[str], Array],
        lows: Iterator[tuple[Array, Array]],
        limit: int,
    ) -> None:
        """`arrays` gives the array of a tensor at the engine's edge, or of a value; `lows` what each linear layer with
        adapters has of `LinearAdapters.low` and `next_low`; `limit` is the shared memory of a block, in bytes."""
        self._kernels, self._program, self._array, self._lows, self._limit = kernels, program, arrays, lows, limit

    @classmethod
    def refusal(cls, program: Program, limit: int) -> str | None:
        """Why this executor cannot run a program where blocks may have so much shared memory, None if it can."""
        rows = most_rows(program)
        if rows > cls.most_rows:
            return f"{cls.name} take up to {cls.most_rows} rows, not {rows}"
        for step in program.steps:
            reason = cls._step_refusal(step, program) or cls._memory_refusal(step, program, limit)
            if reason is not None:
                return f"{cls.name} cannot run {step.title}: {reason}"
        return None

    @classmethod
    def _step_refusal(cls, step: Step, program: Program) -> str | None:
        return step_refusal(step, program)

    @classmethod
    def _memory_refusal(cls, step: Step, program: Program, limit: int) -> str | None:
        if (layout := packed_layout(step, program)) is not None:
            return packed_refusal(step_rows(step, program), layout, limit)
        if isinstance(step, RECURRENT):
            return recurrent_refusal(step, program, limit)
        if (needed := cls._shared_bytes(step, program, limit)) <= limit:
            return None
        return f"{step_rows(step, program)} rows need {needed} bytes of shared memory, a block of the GPU has {limit}"

    @classmethod
    def _shared_bytes(cls, step: Step, program: Program, limit: int) -> int:
        rows, shape = step_rows(step, program), program.shape
        if isinstance(step, Attention):
            return attention_shared_bytes(attention_shape(step, shape))
        if isinstance(step, NormLinear) and cls.prepares_inside(step, program):
            count = len(step.inputs)
            widths = [step.linear.weight.shape[1] // count] * count
            return norm_linear_shared_bytes(rows, widths, limit, step.gated, _ranks(program))
        if isinstance(step, NormLinear | LinearResidual):
            return linear_residual_shared_bytes(rows, limit, _ranks(program))
        return 0

    @classmethod
    def prepares_inside(cls, step: NormLinear, program: Program) -> bool:
        """Whether one kernel norms the inputs of a linear layer, or rounds one without norms, and multiplies them."""
        if step.selects or len(step.inputs) > 1 or step.inputs[0].norms:
            return cls.norms_inside(step)
        return step.gated or not comes_rounded(step.inputs[0].value, program)

    @classmethod
    def clocks(cls, program: Program, gpu: Capacity) -> float:
        """An estimate of the GPU's time for the linear layers of a program."""
        layers = (step for step in program.steps if isinstance(step, NormLinear | LinearResidual))
        return sum(cls._clocks(step, program, gpu) for step in layers)

    @classmethod
    def _clocks(cls, step: NormLinear | LinearResidual, program: Program, gpu: Capacity) -> float:
        if (layout := packed_layout(step, program)) is not None:
            return _packed_clocks(step, layout, program, gpu)
        inside = isinstance(step, NormLinear) and cls.prepares_inside(step, program)
        width, columns = step.linear.weight.shape
        clocks = few_rows_clocks(step_rows(step, program), width, columns, inside, gpu)
        return clocks if inside else clocks + _norm_count(step) * NORM_CLOCKS

    @staticmethod
    def norms_inside(step: NormLinear) -> bool:
        """Whether one kernel norms the inputs of a linear layer and multiplies them."""
        return not step.selects and len(step.inputs) <= 2 and all(len(given.norms) == 1 for given in step.inputs)

    def launches(self, step: Step, next_early: bool) -> list[Any]:
        """The launches of a step. `next_early` False: what overlaps the last of them starts when its predecessor is
        done."""
        if isinstance(step, Attention):
            return self._attention(step)
        if isinstance(step, RECURRENT):
            return recurrent_launches(step, self._program, self._kernels.recurrent, self._array)
        if isinstance(step, Scale):
            return [self._kernels.few.scale_rows(self._array(step.value), step.factor, self._array(step.output))]
        if isinstance(step, LinearResidual):
            return self._linear_residual(step)
        if isinstance(step, SideBySide):
            return self._side_by_side(step)
        if isinstance(step, NormParts):
            return [self._kernels.few.norm_parts(self._parts(Input(step.value, step.norms)), next_early)]
        assert isinstance(step, NormLinear)
        return self._norm_linear(step, next_early)

    def _side_by_side(self, step: SideBySide) -> list[Any]:
        output = self._array(step.output)
        output, launches, column = output.reshape(-1, output.shape[-1]), [], 0
        for part in (NormedInput(self._array(value), None) for value in step.values):
            launches.append(self._kernels.few.norm(part, output, column))
            column += part.columns
        return launches

    def _norm_linear(self, step: NormLinear, next_early: bool) -> list[Any]:
        few, linear, output = self._kernels.few, self._weights(step.linear), self._array(step.output)
        if step.selects:
            return self._selected(step, linear)
        if linear.is_packed:
            return self._packed_linear(step, linear, next_early)
        if not self.prepares_inside(step, self._program):
            x, launches = self._together(step, padded=False)
            return [*launches, few.linear_residual(x, linear, None, output, step.scale)]
        inputs = [part for given in step.inputs for part in self._parts(given)]
        if step.gated:
            return [few.norm_gate_up(inputs[0], linear, step.activation, output)]
        return [few.norm_linear(inputs, linear, output, step.scale, self._kept(step.keep), next_early)]

    def _packed_linear(self, step: NormLinear, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The launches by the kernels of few packed rows, which norm the fewest themselves, or by those of many."""
        few, output, rows = self._kernels.few, self._array(step.output), step_rows(step, self._program)
        inside = norms_packed(step, self._program, rows) and linear.arranged is None
        if not few.takes(linear, rows, normed=inside and bool(step.inputs[0].norms)):
            return self._normed_apart(step, linear, next_early)
        if not inside:
            x, launches = self._together(step, False, next_early, linear.arranged)
            if step.gated:
                return [*launches, few.norm_gate_up(NormedInput(x, None), linear, step.activation, output)]
            return [*launches, few.linear_residual(x, linear, None, output, step.scale)]
        (normed,) = self._parts(step.inputs[0])
        if step.gated:
            return [few.norm_gate_up(normed, linear, step.activation, output)]
        return [few.norm_linear([normed], linear, output, step.scale, self._kept(step.keep), next_early)]

    def _normed_apart(self, step: NormLinear, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The launches by the kernels of many rows."""
        many, output = self._kernels.many, self._array(step.output)
        products = linear.adapters is not None  # of inputs that are not arranged yet
        x, launches = self._together(step, True, next_early, None if products else linear.arranged)
        if products:
            launches += [*self._low_products(x, linear), *self._arranged(x, linear)]
        if step.gated:
            return [*launches, many.gate_up(x, linear, step.activation, output)]
        return [*launches, many.linear(x, linear, output, step.scale)]

    def _selected(self, step: NormLinear, linear: LinearWeights) -> list[Any]:
        """The launches of a layer that takes some of the rows that are normed."""
        x, launches = self._together(step, padded=False)
        selected = self._array("last_token_ids")
        launches += [*self._low_products(x, linear, selected), *self._arranged(x, linear)]
        kernels = self._few_or_many(step, linear)
        return [
            *launches,
            kernels.linear_residual(x, linear, None, self._array(step.output), step.scale, None, selected),
        ]

    def _copy_kept(self, keep: Keep, values: Array) -> Any:
        rows, width = values.size // values.shape[-1], values.shape[-1]
        any_place = self._array(JOINED_INPUTS)[: rows * width].reshape(rows, width)
        return self._kernels.few.norm(NormedInput(values, None), any_place, 0, self._kept(keep))

    def _few_or_many(self, step: NormLinear | LinearResidual, linear: LinearWeights) -> Any:
        """The kernels that multiply what is not normed by them."""
        if not linear.is_packed:
            return self._unnormed_kernels(step)
        takes = self._kernels.few.takes(linear, step_rows(step, self._program), normed=False)
        return self._kernels.few if takes else self._kernels.many

    def _unnormed_kernels(self, step: NormLinear | LinearResidual) -> Any:
        return self._kernels.few

    def _linear_residual(self, step: LinearResidual) -> list[Any]:
        selected, linear = (self._array("last_token_ids"),) if step.selects else (), self._weights(step.linear)
        x = self._array(step.value)
        launches = [*self._low_products(x, linear, *selected), *self._arranged(x, linear)]
        if step.selects and step.keep is not None:  # features are those of all rows
            launches.append(self._copy_kept(step.keep, self._array(step.residual)))
            step = replace(step, keep=None)
        return [*launches, *self._added(step, x, linear, self._few_or_many(step, linear), *selected)]

    def _added(
        self, step: LinearResidual, x: Array, linear: LinearWeights, kernels: Any, *selected: Array
    ) -> list[Any]:
        """The launches that multiply inputs which are arranged, and add what that gives."""
        residual, output = self._array(step.residual), self._array(step.output)
        if step.norm is None:
            return [kernels.linear_residual(x, linear, residual, output, step.scale, self._kept(step.keep), *selected)]
        rows, width = step_rows(step, self._program), linear.weight.shape[0]
        given = self._array(UNNORMED)[: rows * width].reshape(rows, width)
        normed = NormedInput(given, self._array(step.norm.weight.name), step.norm.epsilon, step.norm.offset)
        return [
            kernels.linear_residual(x, linear, None, given, step.scale, None, *selected),
            self._kernels.few.norm_residual(normed, residual, output, *selected),
        ]

    def _arranged(self, x: Array, linear: LinearWeights) -> list[Any]:
        """What arranges inputs where they are: nothing else reads what a layer's predecessor leaves for it."""
        if linear.arranged is None:
            return []
        inputs = NormedInput(x, None, width=linear.weight.shape[1])
        return [self._kernels.few.norm(inputs, x, arranged=linear.arranged)]

    def _low_products(self, x: Array, linear: LinearWeights, *selected: Array) -> list[Any]:
        """What makes the products of adapters' A, which kernels of packed layers do not make themselves."""
        if not linear.is_packed or linear.adapters is None:
            return []
        return [self._kernels.many.low_products(x, linear, *selected)]

    def _attention(self, step: Attention) -> list[Any]:
        if not step.gated:
            return [self._plain_attention(step, self._array(step.value))]
        recurrent, shape = self._kernels.recurrent, self._program.shape
        value, ungated, context = (
            self._array(name).reshape(shape.batch, shape.tokens, -1) for name in (step.value, UNGATED, step.output)
        )
        return [
            recurrent.separate_gates(value, gated_heads(step), ungated),
            self._plain_attention(step, self._array(UNGATED)),
            recurrent.sigmoid_gate(value, gated_heads(step), context),
        ]

    def _plain_attention(self, step: Attention, qkv: Array) -> Any:
        array = self._array
        mask = None if self._program.shape.phase == "decode" else array("attention_mask")
        q_norm, k_norm = (None if norm is None else array(norm.weight.name) for norm in (step.q_norm, step.k_norm))
        epsilon, offset = (step.q_norm.epsilon, step.q_norm.offset) if step.q_norm is not None else (0.0, 0.0)
        part = (step.rotary_first, step.rotary) if step.rotary else None
        k_cache, v_cache, *scales = map(array, step.state(self._program.shape).names)
        k_scale, v_scale = scales or (None, None)
        return self._kernels.few.attention(
            qkv,
            AttentionWeights(q_norm, k_norm, epsilon, offset, step.scale, step.rotary > 0, part),
            AttentionStep(
                array("rope_rotary_cos_sin"),
                array("kvcache_start_index"),
                mask,
                *(k_cache, v_cache, step.masks_all),
                *(k_scale, v_scale, step.window),
            ),
            AttentionScratch(array("partial"), array("counters")),
            array(step.output),
        )

    def _together(
        self, step: NormLinear, padded: bool, next_early: bool = True, arranged: InputPermutation | None = None
    ) -> tuple[Array, list[Any]]:
        """The inputs of a linear layer side by side [R, K] (`padded`: zeros behind, as `padded_columns`), and the
        launches that bring them there, each normed, and `arranged`."""
        given, is_rounded = step.inputs[0], comes_rounded(step.inputs[0].value, self._program)
        if len(step.inputs) == 1 and not given.norms and is_rounded and step.keep is None and arranged is None:
            return self._array(given.value), []
        columns, values = step.linear.weight.shape[1], self._array(step.inputs[-1].value)
        rows, width = values.size // values.shape[-1], padded_columns(columns) if padded else columns
        packed = self._array(JOINED_INPUTS)[: rows * width].reshape(rows, width)
        parts: list[tuple[NormedInput, Keep | None]] = []
        for given in step.inputs:
            parts += [(part, None) for part in self._parts(given)]
        if step.keep is not None:
            parts[-1] = (parts[-1][0], step.keep)
        launches, column, at_once = [], 0, arranged if len(parts) == 1 else None
        for number, (part, keep) in enumerate(parts):
            early = next_early or number > 0
            launches.append(self._kernels.few.norm(part, packed, column, self._kept(keep), early, at_once))
            column += part.width or part.values.shape[-1]
        whole = NormedInput(packed, None, width=columns)
        if arranged is not None and at_once is None:
            launches.append(self._kernels.few.norm(whole, packed, arranged=arranged))
        return packed, launches

    def _parts(self, given: Input) -> list[NormedInput]:
        if not given.norms:
            return [NormedInput(self._array(given.value), None)]
        parts, first = [], 0
        for norm in given.norms:
            width = norm.weight.shape[0]
            parts.append(self._normed(given.value, norm)._replace(first=first, width=width))
            first += width
        return parts

    def _normed(self, value: str, norm: Norm) -> NormedInput:
        return NormedInput(self._array(value), self._array(norm.weight.name), norm.epsilon, norm.offset)

    def _weights(self, linear: Linear) -> LinearWeights:
        bias = None if linear.bias is None else self._array(linear.bias.name)
        return LinearWeights(self._array(linear.weight.name), bias, self._adapters(linear))

    def _adapters(self, linear: Linear) -> LinearAdapters | None:
        adapted, shape = self._program.adapted.get(linear.name), self._program.shape
        if adapted is None:
            return None
        a, b = (self._array(name) for name, _ in adapted.edge(shape.lora_slots, shape.lora_rank))
        return LinearAdapters(a, b, self._array(SCALES), module_rows(adapted), *next(self._lows))

    def _kept(self, keep: Keep | None) -> Kept | None:
        return None if keep is None else Kept(self._array(keep.target), keep.place, keep.raw)


class ManyRows(FewRows):
    """The same by the kernels of many rows; what has few rows and no norm goes to the kernels of few."""

    name = "kernels of many rows"
    most_rows = MAX_TILED_ROWS

    @classmethod
    def _shared_bytes(cls, step: Step, program: Program, limit: int) -> int:
        if isinstance(step, NormLinear):
            return max(norm_shared_bytes(step.linear.weight.shape[1]), tiled_shared_bytes(limit))
        if isinstance(step, LinearResidual) and not _streams(step, program, limit):
            return tiled_shared_bytes(limit)
        return super()._shared_bytes(step, program, limit)

    def _norm_linear(self, step: NormLinear, next_early: bool) -> list[Any]:
        linear = self._weights(step.linear)
        if step.selects:
            return self._selected(step, linear)
        return (self._packed_linear if linear.is_packed else self._normed_apart)(step, linear, next_early)

    @classmethod
    def _clocks(cls, step: NormLinear | LinearResidual, program: Program, gpu: Capacity) -> float:
        many = _many_clocks(step, program, gpu)
        few = isinstance(step, LinearResidual) and _streams(step, program, gpu.shared_limit)
        return min(many, super()._clocks(step, program, gpu)) if few else many

    def _unnormed_kernels(self, step: NormLinear | LinearResidual) -> Any:
        choices = [_many_clocks, FewRows._clocks][: 1 + _streams(step, self._program, self._limit)]
        clocks = fastest(choices, lambda clocks, gpu: clocks(step, self._program, gpu), self._kernels.gpu)
        return self._kernels.many if clocks is _many_clocks else self._kernels.few


#: A class of executors.
Executor = type[FewRows]


def _streams(step: NormLinear | LinearResidual, program: Program, limit: int) -> bool:
    """Whether the kernels of few rows take a layer."""
    rows = step_rows(step, program)
    return rows <= MAX_ROWS and linear_residual_shared_bytes(rows, limit, _ranks(program)) <= limit


def _many_clocks(step: NormLinear | LinearResidual, program: Program, gpu: Capacity) -> float:
    """An estimate for a layer by the kernels of many rows, with the norms before it."""
    gated, adapted = isinstance(step, NormLinear) and step.gated, step.linear.name in program.adapted
    width, columns = step.linear.weight.shape
    if (layout := packed_layout(step, program)) is not None:
        return _packed_clocks(step, layout, program, gpu)
    clocks = many_rows_clocks(step_rows(step, program), width, columns, gpu, gated, adapted)
    return clocks + _norm_count(step) * NORM_CLOCKS


def _packed_clocks(step: NormLinear | LinearResidual, layout: DeviceLayout, program: Program, gpu: Capacity) -> float:
    """The same of a packed layer, which both executors compute alike."""
    rows = step_rows(step, program)
    norms = 0 if isinstance(step, NormLinear) and norms_packed(step, program, rows) else _norm_count(step)
    return packed_clocks(rows, layout, gpu) + norms * NORM_CLOCKS


def norms_packed(step: NormLinear, program: Program, rows: int) -> bool:
    """Whether one kernel norms or rounds so many rows of input of a packed layer and multiplies them."""
    return len(step.inputs) == 1 and FewRows.prepares_inside(step, program) and rows <= MAX_NORMED_ROWS


def _ranks(program: Program) -> int:
    return padded_ranks(program.shape.lora_slots, program.shape.lora_rank)


def _norm_count(step: NormLinear | LinearResidual) -> int:
    """Launches that bring the inputs of a layer together, where it does not norm them itself."""
    return sum(max(1, len(given.norms)) for given in step.inputs) if isinstance(step, NormLinear) else 0
