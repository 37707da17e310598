"""Recurrent layers by hand-written kernels, of steps of few rows and between the engines of long prompts: which steps
they are, which the kernels refuse, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from edgellm.engines.model.program import Program
from edgellm.engines.model.steps import Attention, GatedDelta, GatedNorm, ShortConvolution, Stateful, Step
from edgellm.kernels.arrays import Array
from edgellm.kernels.recurrent.contract import (
    MAX_NODES,
    Convolution,
    DeltaGates,
    GatedHeadNorm,
    GatedHeads,
    RecurrentKernels,
    convolution_refusal,
    delta_refusal,
    norm_refusal,
)
from edgellm.kernels.recurrent.launcher import delta_bytes

#: What TensorRT has no operation for, and the norm that comes with it.
RECURRENT = (ShortConvolution, GatedDelta, GatedNorm)
#: Where gated attention finds its heads without the gates.
UNGATED = "qkv without gates"


def recurrent_refusal(step: Step, program: Program, shared_limit: int | None = None) -> str | None:
    """Why no kernel runs a step of these, or None if one does; `shared_limit`: where blocks may have so much shared
    memory."""
    shape = program.shape
    nodes = shape.tokens if "node_parents" in program.inputs else 1
    if isinstance(step, ShortConvolution):
        if nodes > MAX_NODES:
            return f"short convolutions take trees of up to {MAX_NODES} nodes, not {nodes}"
        if step.activation not in (None, "silu") or (step.gated and step.activation is not None):
            return f"the activation {step.activation} has no kernel"
        return convolution_refusal(step.width)
    if isinstance(step, GatedDelta):
        refusal = delta_refusal(step.heads, step.sizes, nodes)
        if refusal is not None or shared_limit is None:
            return refusal
        needed = delta_bytes(step.sizes[0], shape.tokens, nodes > 1)
        return (
            None if needed <= shared_limit else f"it needs {needed} bytes of shared memory, a block has {shared_limit}"
        )
    if isinstance(step, GatedNorm):
        if step.norm.bias is not None or step.norm.offset:
            return "there is no kernel for layer norms, or norms with an offset, that are gated"
        return norm_refusal(step.norm.weight.shape[0])
    return None


def recurrent_launches(
    step: Step, program: Program, kernels: RecurrentKernels, array: Callable[[str], Array]
) -> list[Any]:
    """The launches of a step; `array` gives what a value, a weight or a tensor at the edge is in memory."""

    def rows(name: str) -> Array:
        return array(name).reshape(program.shape.batch, program.shape.tokens, -1)

    if isinstance(step, GatedNorm):
        norm = GatedHeadNorm(array(step.norm.weight.name), step.norm.epsilon, step.first)
        return [kernels.gated_norm(rows(step.value), rows(step.gate), norm, rows(step.output))]
    assert isinstance(step, ShortConvolution | GatedDelta)
    state = step.state(program.shape)
    (before,), kept = (array(name) for name in state.names), state.kept_names[-1]
    when = (
        array("node_parents") if "node_parents" in program.inputs else None,
        array(kept) if kept in program.outputs else None,
        array("state_tokens") if "state_tokens" in program.inputs else None,
    )
    if isinstance(step, GatedDelta):
        gates = DeltaGates(array(step.a_log.name), array(step.dt_bias.name), step.first)
        return [kernels.gated_delta(rows(step.value), rows(step.gates), gates, before, rows(step.output), *when)]
    convolution = Convolution(array(step.weight.name), step.activation == "silu", step.gated)
    bias = None if step.bias is None else array(step.bias.name)
    return [kernels.short_convolution(rows(step.value), convolution, bias, before, rows(step.output), *when)]


def gated_heads(step: Attention) -> GatedHeads:
    """How the heads of gated attention stand in what was projected."""
    return GatedHeads(*step.heads)


def layer_begins(steps: tuple[Step, ...]) -> Iterator[tuple[int, int]]:
    """Places of steps and layers: where what touches a layer's states begins, with the step before its first one that
    has any, which makes what that one takes."""
    known: set[int] = set()
    for place, step in enumerate(steps):
        if isinstance(step, Stateful) and step.index not in known:
            known.add(step.index)
            yield place - 1, step.index
