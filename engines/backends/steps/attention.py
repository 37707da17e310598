"""Attention by kernels: of steps of few tokens, whose scores may be masked, and of prompts, whose tokens see all before
them, or in an image all of it."""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.steps.implementation import PROMPT_PHASES, Implementation, step_rows, too_large
from edgellm.engines.backends.steps.launching import Launching, StepKernels
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import LAST_SEEN, Attention
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode import contract
from edgellm.kernels.decode.attention_geometries import (
    AttentionShape,
    attention_counters,
    attention_partials,
    attention_shared_bytes,
)
from edgellm.kernels.prefill.contract import RING_STEP, HeadNorms, KeyValueRows, RotaryPart, RowScales
from edgellm.kernels.prefill.launcher import AttentionKind, attention_bytes
from edgellm.kernels.recurrent.contract import GatedHeads

#: Where gated attention finds its heads without the gates, and where parts of a row's keys leave what they found.
UNGATED, PARTIAL = "qkv without gates", "partial"
#: What counts the blocks that are done with a row's keys.
COUNTERS = "counters"


class _AnyAttention(Implementation[Attention]):
    """What both ways share: the gate of each head."""

    def scratch(self, step: Attention, program: Program) -> Edge:
        rows, width = self._rows_of(step, program)
        if not width:  # rows alone are written
            return {}
        found: Edge = {step.output: ((rows, width), "compute")}
        if step.gated:
            found[UNGATED] = ((rows, program.kinds[step.value][0][-1] - width), "float32")
        return found

    def launches(self, step: Attention, run: Launching, next_early: bool) -> list[Any]:
        if not step.gated:
            return self._attention(step, run, run.array(step.value))
        recurrent, heads, value = run.kernels.recurrent, GatedHeads(*step.heads), run.sequences(step.value)
        return [
            recurrent.separate_gates(value, heads, run.sequences(UNGATED)),
            *self._attention(step, run, run.array(UNGATED)),
            recurrent.sigmoid_gate(value, heads, run.sequences(step.output)),
        ]

    def _attention(self, step: Attention, run: Launching, qkv: Array) -> list[Any]:
        raise NotImplementedError


class FewTokens(_AnyAttention):
    """Attention of decode steps and trees: keys are shared among blocks, whose results are then joined."""

    name = "kernels of few tokens"
    reads_mask = True

    def suits(self, step: Attention, program: Program) -> bool:
        few = step_rows(step, program) <= contract.MAX_TILED_ROWS and program.shape.tokens <= contract.MAX_TOKENS
        return few and not step.looks_ahead and step.heads[0] > 0

    def refusal(self, step: Attention, program: Program, limit: int) -> str | None:
        shape = program.shape
        refused = contract.attention_refusal(*step.heads, shape.kv_cache == "int8") or _layer_refusal(step, shape)
        return refused or too_large(attention_shared_bytes(_attention_shape(step, shape)), limit)

    def scratch(self, step: Attention, program: Program) -> Edge:
        partials = attention_partials(_attention_shape(step, program.shape))
        return super().scratch(step, program) | {PARTIAL: ((partials,), "float32")}

    def counters(self, step: Attention, program: Program) -> Edge:
        return {COUNTERS: ((attention_counters(_attention_shape(step, program.shape)),), "uint32")}

    def _attention(self, step: Attention, run: Launching, qkv: Array) -> list[Any]:
        array = run.array
        mask = None if run.program.shape.phase == "decode" else array("attention_mask")
        q_norm, k_norm = (None if norm is None else array(norm.weight.name) for norm in (step.q_norm, step.k_norm))
        epsilon, offset = (step.q_norm.epsilon, step.q_norm.offset) if step.q_norm is not None else (0.0, 0.0)
        part = (step.rotary_first, step.rotary) if step.rotary else None
        k_cache, v_cache, *scales = map(array, step.state(run.program.shape).names)
        k_scale, v_scale = scales or (None, None)
        attention = run.kernels.few.attention(
            qkv,
            contract.AttentionWeights(
                *(q_norm, k_norm, epsilon, offset, step.scale, step.rotary > 0, part, run.found(step.sinks)),
                *(step.query_columns, step.neighbours, step.norms_behind, step.cap, step.norms_values),
            ),
            contract.AttentionStep(
                array("rope_rotary_cos_sin"),
                array("kvcache_start_index"),
                mask,
                *(k_cache, v_cache, step.masks_all),
                *(k_scale, v_scale, step.window),
            ),
            contract.AttentionScratch(array(PARTIAL), array(COUNTERS)),
            array(step.output),
        )
        return [attention]


class PromptTokens(_AnyAttention):
    """Attention of any number of tokens that see all before them; queries stand where the context will."""

    name = "kernels of prompts"

    def suits(self, step: Attention, program: Program) -> bool:
        return program.shape.phase in PROMPT_PHASES

    def refusal(self, step: Attention, program: Program, limit: int) -> str | None:
        shape, size = program.shape, step.heads[2]
        refused = contract.attention_refusal(*step.heads, shape.kv_cache == "int8", None) or _layer_refusal(step, shape)
        if step.sinks is not None and step.looks_ahead:
            refused = "it has attention sinks, and tokens see those behind them"
        return refused or too_large(attention_bytes(size, 2 if size <= 128 else 1, shape.kv_cache == "int8"), limit)

    def _attention(self, step: Attention, run: Launching, qkv: Array) -> list[Any]:
        prefill, array, norms = run.kernels.prefill, run.array, None
        shape = run.program.shape
        qkv = qkv.reshape(shape.batch, shape.tokens, -1)
        if step.k_norm is not None:
            query, key = (array(norm.weight.name) for norm in (step.q_norm or step.k_norm, step.k_norm))
            norms = HeadNorms(query, key, step.k_norm.epsilon, step.k_norm.offset, step.norms_behind, step.norms_values)
        rotary = array("rope_rotary_cos_sin") if step.rotary else None
        columns = step.rotary_first, step.rotary, step.query_columns
        part = None if rotary is None else RotaryPart(*columns, step.neighbours)
        keys, values, *scales = map(array, step.state(shape).names)
        rows = KeyValueRows(keys, values, array("kvcache_start_index"), step.window or 0)
        row_scales = RowScales(*scales) if scales else None
        if not step.heads[0]:
            return [prefill.prepare_heads(qkv, norms, rotary, rows, row_scales, part, None)]
        context = run.sequences(step.output)
        given = context, rows, step.scale, context, row_scales
        if step.looks_ahead:
            attention = prefill.attention_ahead(*given, array(LAST_SEEN), step.cap)
        else:
            attention = prefill.causal_attention(*given, run.found(step.sinks), step.cap)
        return [prefill.prepare_heads(qkv, norms, rotary, rows, row_scales, part, context), attention]

    def loads(self, step: Attention, program: Program) -> tuple[Any, ...]:
        heads, _, size = step.heads
        if not heads:
            return ()
        return heads, size, step.window is not None, step.looks_ahead, step.sinks is not None, step.cap > 0

    def load(self, what: tuple[Any, ...], program: Program, kernels: StepKernels, tokens: int) -> None:
        (heads, size, *kinds), shape = what, program.shape
        kind = AttentionKind(shape.kv_cache == "int8", *kinds)
        kernels.prefill.load(kernels.any_rows.dtype, size, tokens, shape.batch * heads, kind)


def _layer_refusal(step: Attention, shape: EngineShape) -> str | None:
    """What no kernel of attention does, whatever the heads are: other parts of heads that are rotated, other rings of
    windows. None if there is nothing."""
    size, columns = step.heads[2], (step.rotary, step.rotary_first, step.query_columns)
    if step.rotary and (step.rotary > size or any(each % 4 for each in columns)):
        return f"a multiple of 4 of a head's elements is rotated, at most all {size}, not {step.rotary}"
    if shape.window_rows % RING_STEP:
        return f"rings of windows have a multiple of {RING_STEP} rows, not {shape.window_rows}"
    return None


def _attention_shape(step: Attention, shape: EngineShape) -> AttentionShape:
    """What the attention of a layer works on."""
    rows, window = (shape.kv_rows, 0) if step.window is None else (shape.window_rows, step.window)
    return AttentionShape(shape.batch, shape.tokens, *step.heads, rows, shape.kv_cache == "int8", window)
