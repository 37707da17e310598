"""Mixtures of experts by kernels: the steps that `Experts` becomes."""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation, step_rows
from edgellm.engines.backends.steps.launching import Launching
from edgellm.engines.model.expert_steps import ChooseExperts, DownExperts, GateUpExperts
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.kernels.decode.contract import MAX_TILED_ROWS
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.experts.contract import (
    MAX_PAIRS,
    Addition,
    Choice,
    ExpertWeights,
    Routed,
    experts_refusal,
    matrix_refusal,
)
from edgellm.kernels.experts.launcher import counter_words, expert_way
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.row_runs import PackedLayout

#: What counts how many of a launch's blocks are done.
COUNTERS = "expert_counters"


class ChooseByRow(Implementation[ChooseExperts]):
    """Chooses for each row by itself."""

    name = "kernels of experts"

    def refusal(self, step: ChooseExperts, program: Program, limit: int) -> str | None:
        return experts_refusal(step.mixture.experts, step.mixture.chosen)

    def scratch(self, step: ChooseExperts, program: Program) -> Edge:
        names = step.output, step.shares, step.shared_shares
        return {name: program.kinds[name] for name in names[: 2 + (step.gate is not None)]}

    def launches(self, step: ChooseExperts, run: Launching, next_early: bool) -> list[Any]:
        array, gate = run.array, step.gate
        shared = None if gate is None else (array(step.given), array(gate.weight.name))
        routed = _routed(run, step.output, step.shares, None if gate is None else step.shared_shares)
        scores, correction, scales = array(step.scores), run.found(step.correction), run.found(step.scales)
        choice = Choice(step.mixture.routing, scores, correction, shared, step.own, scales)
        return [run.kernels.experts.choose(choice, routed)]


class _Pairs(Implementation[Any]):
    """Multiplies pairs of a row and an expert. Few rows that chose the same expert share its weights; of more rows each
    reads them."""

    name = "kernels of experts"

    def refusal(self, step: GateUpExperts | DownExperts, program: Program, limit: int) -> str | None:
        layout, rows = program.packed.get(step.linear.weight.name), step_rows(step, program)
        gated = step.how.kind == "gated"
        refused = matrix_refusal(*step.matrix, gated, _one(layout))
        if refused is None and rows * step.mixture.chosen > MAX_PAIRS:
            refused = f"pairs of rows and experts are up to {MAX_PAIRS}, not {rows * step.mixture.chosen}"
        gpu, active = Capacity(shared_limit=limit), min(rows * step.mixture.chosen, step.mixture.experts)
        if refused is None and expert_way(rows, active, step.matrix, gated, _one(layout), gpu) is None:
            refused = f"blocks have no room for experts {list(step.matrix)} in {limit} bytes of shared memory"
        return refused


class GateUpPairs(_Pairs):
    """Gates and ups, with their activation."""

    keeps_dtype = True

    def launches(self, step: GateUpExperts, run: Launching, next_early: bool) -> list[Any]:
        given, ids, output = map(run.array, (step.value, step.ids, step.output))
        return [run.kernels.experts.gate_up(given, ids, weights_of(step, run), step.how, output)]


class DownPairs(_Pairs):
    """The products of all pairs, and their sums in the order of the experts' ids: of few rows in one launch."""

    def counters(self, step: DownExperts, program: Program) -> Edge:
        rows, width = self._rows_of(step, program)
        return {COUNTERS: ((rows, counter_words(width)), "uint32")} if rows <= MAX_TILED_ROWS else {}

    def scratch(self, step: DownExperts, program: Program) -> Edge:
        products = (step_rows(step, program), step.mixture.chosen * step.matrix[0]), "float32"
        return super().scratch(step, program) | {step.products: products}

    def launches(self, step: DownExperts, run: Launching, next_early: bool) -> list[Any]:
        return [*run.keeping(step), *self._added(step, run)]

    def _added(self, step: DownExperts, run: Launching) -> list[Any]:
        given, products = run.array(step.value), run.array(step.products)
        kernels, weights, addition = run.kernels.experts, weights_of(step, run), addition_of(step, run)
        if step_rows(step, run.program) <= MAX_TILED_ROWS:
            return [kernels.down_add(given, weights, products, addition, run.array(COUNTERS))]
        return [kernels.down(given, addition.routed.expert_ids, weights, products), kernels.add(products, addition)]


def weights_of(step: GateUpExperts | DownExperts, run: Launching) -> ExpertWeights:
    """The weights of a layer of all experts."""
    return ExpertWeights(run.weights(step.linear), step.mixture.experts)


def addition_of(step: DownExperts, run: Launching) -> Addition:
    """What the products of a row's experts are added to."""
    routed = _routed(run, step.ids, step.shares, step.shared_shares)
    return Addition(routed, run.found(step.residual), run.array(step.output), step.scale, run.found(step.shared))


def _routed(run: Launching, ids: str, shares: str, shared_shares: str | None) -> Routed:
    return Routed(run.array(ids), run.array(shares), run.found(shared_shares))


def _one(layout: PackedLayout | None) -> DeviceLayout | None:
    assert layout is None or isinstance(layout, DeviceLayout)  # of experts that have several formats none is packed
    return layout
