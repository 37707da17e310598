"""Recurrent layers by kernels, of steps of few rows and of prompts alike."""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation, too_large
from edgellm.engines.backends.steps.launching import Launching
from edgellm.engines.model.program import Program
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, ShortConvolution
from edgellm.kernels.arrays import Array
from edgellm.kernels.recurrent import contract
from edgellm.kernels.recurrent.launcher import delta_bytes


class ConvolveColumns(Implementation[ShortConvolution]):
    """Short convolutions."""

    keeps_dtype = True

    def refusal(self, step: ShortConvolution, program: Program, limit: int) -> str | None:
        if (nodes := _nodes(program)) > contract.MAX_NODES:
            return f"short convolutions take trees of up to {contract.MAX_NODES} nodes, not {nodes}"
        if step.activation not in (None, "silu") or (step.gated and step.activation is not None):
            return f"the activation {step.activation} has no kernel"
        return contract.convolution_refusal(step.width)

    def launches(self, step: ShortConvolution, run: Launching, next_early: bool) -> list[Any]:
        convolution = contract.Convolution(
            run.array(step.weight.name), step.activation == "silu", step.gated, step.first
        )
        bias, (before, *when) = run.found(step.bias), _state(step, run)
        value, output = run.sequences(step.value), run.sequences(step.output)
        return [run.kernels.recurrent.short_convolution(value, convolution, bias, before, output, *when)]


class UpdateMatrices(Implementation[GatedDelta]):
    """Gated delta rules."""

    keeps_dtype = True
    gates: Any = contract.DeltaGates
    rule = "gated_delta"

    def refusal(self, step: GatedDelta, program: Program, limit: int) -> str | None:
        nodes = _nodes(program)
        refused = contract.delta_refusal(step.heads, step.sizes, nodes)
        return refused or too_large(delta_bytes(step.sizes[0], program.shape.tokens, nodes > 1), limit)

    def launches(self, step: GatedDelta, run: Launching, next_early: bool) -> list[Any]:
        gates = self.gates(*(run.array(getattr(step, name).name) for name in step.numbers), step.first)
        value, projected, output = map(run.sequences, (step.value, step.gates, step.output))
        before, *when = _state(step, run)
        return [getattr(run.kernels.recurrent, self.rule)(value, projected, gates, before, output, *when)]


class UpdateSpaces(UpdateMatrices):
    """Selective scans."""

    gates = contract.ScanGates
    rule = "selective_scan"


class NormGated(Implementation[GatedNorm]):
    """Norms of heads, times a gate, and norms behind gates."""

    keeps_dtype = True

    def refusal(self, step: GatedNorm, program: Program, limit: int) -> str | None:
        if step.norm.bias is not None or step.norm.offset:
            return "there is no kernel for layer norms, or norms with an offset, that are gated"
        size = step.norm.weight.shape[0]
        return contract.group_refusal(size // step.heads) if step.gates_first else contract.norm_refusal(size)

    def launches(self, step: GatedNorm, run: Launching, next_early: bool) -> list[Any]:
        of_norm = run.array(step.norm.weight.name), step.norm.epsilon, step.first
        (value, gate, output), kernels = map(run.sequences, (step.value, step.gate, step.output)), run.kernels.recurrent
        if step.squares is not None:
            place, whole = step.shared
            of_part, squares = contract.PartNorm(*of_norm[:2], whole), run.sequences(step.squares)
            return [kernels.gated_part(value, gate, step.first, place, of_part, squares, output)]
        if step.gates_first:
            return [kernels.gated_group_norm(value, gate, contract.GroupNorm(*of_norm, step.heads), output)]
        return [kernels.gated_norm(value, gate, contract.GatedHeadNorm(*of_norm), output)]


def _nodes(program: Program) -> int:
    """Nodes of the tree that a step takes, 1 where its tokens are a chain."""
    return program.shape.tokens if "node_parents" in program.inputs else 1


def _state(step: ShortConvolution | GatedDelta, run: Launching) -> tuple[Array | None, ...]:
    """A layer's state before the step; the parents of its nodes, what is kept for a commit, and how many tokens count,
    each where the engine has it."""
    program, array, state = run.program, run.array, step.state(run.program.shape)
    (before,), kept = (array(name) for name in state.names), state.kept_names[-1]
    return (
        before,
        array("node_parents") if "node_parents" in program.inputs else None,
        array(kept) if kept in program.outputs else None,
        array("state_tokens") if "state_tokens" in program.inputs else None,
    )
