"""Steps of many tokens by hand-written kernels: prompts, and what a draft takes of them.

Linear layers of any number of rows, the norms before them as launches of their own, and attention without scores in
memory. A row has the bits that it has in a decode step: sums have one order, and what a token sees counts alone. Steps
of few rows among them, as those behind the rows that are selected, go to the kernels of few or many rows.
"""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.kernel_executors import ManyRows, StepKernels
from edgellm.engines.backends.kernel_steps import packed_layout, ring_refusal, step_refusal, step_rows
from edgellm.engines.backends.recurrent_steps import UNGATED, gated_heads
from edgellm.engines.model.program import LAST_SEEN, Add, Attention, LinearResidual, NormLinear, Program, Step
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, LinearWeights, NormedInput
from edgellm.kernels.decode.geometries import norm_shared_bytes
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows, RotaryPart, RowScales, prefill_refusal
from edgellm.kernels.prefill.launcher import attention_bytes
from edgellm.kernels.quantization.device_layout import DeviceLayout


class PromptRows(ManyRows):
    """Runs a program's steps on bound arrays by the kernels of prompts."""

    name = "kernels of prompts"
    most_rows = 65_535
    many_tokens = True
    #: The steps whose tokens see all before them: there is no mask to read.
    phases = ("prefill", "accept")

    @classmethod
    def _step_refusal(cls, step: Step, program: Program) -> str | None:
        shape = program.shape
        if isinstance(step, Attention):
            return prefill_refusal(*step.heads, shape.kv_cache == "int8") or ring_refusal(shape)
        if isinstance(step, Add) and isinstance(step.other, str):
            return None
        return step_refusal(step, program)

    @classmethod
    def _memory_refusal(cls, step: Step, program: Program, limit: int) -> str | None:
        if packed_layout(step, program) is not None and not _is_large(step, program):
            return super()._memory_refusal(step, program, limit)
        needed = cls._shared_bytes(step, program, limit)
        if needed > limit:
            return f"a block needs {needed} bytes of shared memory, of the GPU it has {limit}"
        return None

    @classmethod
    def _shared_bytes(cls, step: Step, program: Program, limit: int) -> int:
        if isinstance(step, Attention):
            size = step.heads[2]
            return attention_bytes(size, 2 if size <= 128 else 1, program.shape.kv_cache == "int8")
        if not _is_large(step, program):
            return super()._shared_bytes(step, program, limit)
        return norm_shared_bytes(step.linear.weight.shape[1]) if isinstance(step, NormLinear) else 0

    @classmethod
    def _clocks(cls, step: NormLinear | LinearResidual, program: Program, gpu: Capacity) -> float:
        """Nothing else takes steps of many tokens: there is nothing to compare."""
        return 0.0

    def launches(self, step: Step, next_early: bool) -> list[Any]:
        """See `FewRows.launches`."""
        if isinstance(step, Add):
            added = NormedInput(self._array(str(step.other)), None)
            return [self._kernels.few.norm_residual(added, self._array(step.value), self._array(step.output))]
        return super().launches(step, next_early)

    def _norm_linear(self, step: NormLinear, next_early: bool) -> list[Any]:
        if not _is_large(step, self._program):
            return super()._norm_linear(step, next_early)
        kernels, linear, output = self._kernels.any_rows, self._weights(step.linear), self._array(step.output)
        as_given = linear.adapters is not None or linear.arranged is None  # A multiplies what is not arranged
        x, launches = self._together(step, True, next_early, None if as_given else linear.arranged)
        launches += self._low_products(x, linear)
        if as_given:
            launches += self._arranged(x, linear)
        if step.gated:
            return [*launches, kernels.gate_up(x, linear, step.activation, output)]
        return [*launches, kernels.linear(x, linear, output, step.scale)]

    def _linear_residual(self, step: LinearResidual) -> list[Any]:
        if not _is_large(step, self._program):
            return super()._linear_residual(step)
        x, linear = self._array(step.value), self._weights(step.linear)
        launches = [*self._low_products(x, linear), *self._arranged(x, linear)]
        return [*launches, *self._added(step, x, linear, self._kernels.any_rows)]

    def _low_products(self, x: Array, linear: LinearWeights, *selected: Array) -> list[Any]:
        if selected or linear.adapters is None:
            return super()._low_products(x, linear, *selected)
        return [self._kernels.any_rows.low_products(x, linear)]

    def _attention(self, step: Attention) -> list[Any]:
        if not step.gated:
            return self._prompt_attention(step, self._array(step.value))
        recurrent, value, ungated = self._kernels.recurrent, self._rows(step.value), self._rows(UNGATED)
        heads = gated_heads(step)
        return [
            recurrent.separate_gates(value, heads, ungated),
            *self._prompt_attention(step, ungated),
            recurrent.sigmoid_gate(value, heads, self._rows(step.output)),
        ]

    def _rows(self, name: str) -> Array:
        """A value [B, T, width]."""
        return self._array(name).reshape(self._program.shape.batch, self._program.shape.tokens, -1)

    def _prompt_attention(self, step: Attention, qkv: Array) -> list[Any]:
        """The launches of one layer's attention; `qkv` has query, key and value heads."""
        prefill, array, norms = self._kernels.prefill, self._array, None
        qkv = qkv.reshape(self._program.shape.batch, self._program.shape.tokens, -1)
        if step.q_norm is not None and step.k_norm is not None:
            query, key = (array(norm.weight.name) for norm in (step.q_norm, step.k_norm))
            norms = HeadNorms(query, key, step.q_norm.epsilon, step.q_norm.offset)
        rotary = array("rope_rotary_cos_sin") if step.rotary else None
        part = None if rotary is None else RotaryPart(step.rotary_first, step.rotary)
        keys, values, *scales = map(array, step.state(self._program.shape).names)
        rows = KeyValueRows(keys, values, array("kvcache_start_index"), step.window or 0)
        row_scales = RowScales(*scales) if scales else None
        context = self._rows(step.output)  # which is written over the queries
        given = context, rows, step.scale, context, row_scales
        return [
            prefill.prepare_heads(qkv, norms, rotary, rows, row_scales, part, context),
            prefill.attention_ahead(*given, array(LAST_SEEN)) if step.looks_ahead else prefill.causal_attention(*given),
        ]


def load_prompts(program: Program, kernels: StepKernels, step: int) -> None:
    """Compile and load what prompts of each number of tokens need, in steps of so many up to the program's, but for
    packed weights, of which not all is known before they are there: see `load_packed_prompts`."""
    shape, dtype = program.shape, kernels.any_rows.dtype
    kinds = {(each.heads, each.window is not None, each.looks_ahead) for each in program.attentions}
    for tokens in _token_counts(program, step):
        for (heads, _, size), window, ahead in kinds:
            kernels.prefill.load(dtype, size, tokens, shape.batch * heads, shape.kv_cache == "int8", window, ahead)
    _load_layers(program, kernels, step, are_packed=False)


def load_packed_prompts(program: Program, kernels: StepKernels, step: int) -> None:
    """The same of the linear layers whose weights are packed as the program says, now that they are loaded."""
    _load_layers(program, kernels, step, are_packed=True)


def _load_layers(program: Program, kernels: StepKernels, step: int, are_packed: bool) -> None:
    layers = {_layer(each, program) for each in program.steps if _is_large(each, program)}
    counts = [tokens * program.shape.batch for tokens in _token_counts(program, step)]
    for rows in (rows for rows in counts if rows > MAX_TILED_ROWS):
        for name, weight, low_rows, packed in layers:
            if are_packed == (packed is not None):
                kernels.any_rows.load(name, rows, weight, low_rows > 0, packed)
            if low_rows and not are_packed:
                kernels.any_rows.load("low_products", rows, (low_rows, weight[1]))


def _token_counts(program: Program, step: int) -> list[int]:
    """Those of prompts in steps of so many tokens, up to the program's."""
    return sorted({*range(step, program.shape.tokens, step), program.shape.tokens})


def _layer(step: Step, program: Program) -> tuple[str, tuple[int, int], int, DeviceLayout | None]:
    """The kernels' method for a linear layer, its weight's shape, the rows of its adapters' A in all places, and how it
    is packed, if it is."""
    assert isinstance(step, NormLinear | LinearResidual)
    name = "linear_residual" if isinstance(step, LinearResidual) else "gate_up" if step.gated else "linear"
    adapted, (rows, columns) = program.adapted.get(step.linear.name), step.linear.weight.shape
    low_rows = 0 if adapted is None else program.shape.lora_slots * len(adapted.modules) * program.shape.lora_rank
    return name, (rows, columns), low_rows, packed_layout(step, program)


def _is_large(step: Step, program: Program) -> bool:
    """Whether a linear layer has more rows than other kernels take."""
    return isinstance(step, NormLinear | LinearResidual) and step_rows(step, program) > MAX_TILED_ROWS
