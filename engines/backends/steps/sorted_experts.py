"""Mixtures of experts by kernels of many rows: pairs of rows and experts are sorted by expert in front of the gates and
ups, and those of an expert multiplied together; a pair has the bits that the kernels of few rows give it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgellm.engines.backends.steps.experts import DownPairs, GateUpPairs, addition_of, weights_of
from edgellm.engines.backends.steps.implementation import Implementation, packed_layout, step_rows
from edgellm.engines.backends.steps.launching import Launching, StepKernels
from edgellm.engines.model.expert_steps import DownExperts, GateUpExperts
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.kernels.decode.contract import MAX_TILED_ROWS
from edgellm.kernels.experts.contract import SortedPairs, rows_of_tiles, sorted_pairs, sorted_words
from edgellm.kernels.quantization.device_layout import DeviceLayout

_OfExperts = GateUpExperts | DownExperts


class _Sorted(Implementation[Any]):
    """What both layers share: the sorted pairs, which the first one's launches make."""

    name = "kernels of experts of prompts"

    def suits(self, step: _OfExperts, program: Program) -> bool:
        return step_rows(step, program) > MAX_TILED_ROWS

    def loads(self, step: _OfExperts, program: Program) -> tuple[Any, ...]:
        layout, mixture = packed_layout(step, program), step.mixture
        own = replace(layout, rows=step.matrix[0]) if isinstance(layout, DeviceLayout) else None
        return step.how, mixture.experts, mixture.chosen, step.matrix, own

    def load(self, what: tuple[Any, ...], program: Program, kernels: StepKernels, tokens: int) -> None:
        (how, experts, chosen, matrix, layout), rows = what, tokens * program.shape.batch
        if rows > MAX_TILED_ROWS:
            kernels.experts.load(how, rows * chosen, experts, matrix, layout)

    @staticmethod
    def _sizes(step: _OfExperts, program: Program) -> tuple[int, int, int]:
        pairs, experts = step_rows(step, program) * step.mixture.chosen, step.mixture.experts
        return pairs, experts, rows_of_tiles(pairs, experts)

    def _pairs(self, step: _OfExperts, run: Launching) -> SortedPairs:
        sizes = self._sizes(step, run.program)
        return sorted_pairs(run.array(_words_of(step))[: sorted_words(*sizes)], *sizes)


class GateUpSorted(_Sorted, GateUpPairs):
    """Sorts, then multiplies by gates and ups, with their activation."""

    def scratch(self, step: GateUpExperts, program: Program) -> Edge:
        words = (sorted_words(*self._sizes(step, program)),), "int32"
        return super().scratch(step, program) | {_words_of(step): words}

    def launches(self, step: GateUpExperts, run: Launching, next_early: bool) -> list[Any]:
        given, ids, output = map(run.array, (step.value, step.ids, step.output))
        kernels, pairs = run.kernels.experts, self._pairs(step, run)
        product = kernels.sorted_gate_up(given, pairs, weights_of(step, run), step.how, output)
        return [kernels.sort(ids, step.mixture.experts, pairs), product]


class DownSorted(_Sorted, DownPairs):
    """The products of the pairs as they were sorted, and their sums in the order of the experts' ids."""

    def _added(self, step: DownExperts, run: Launching) -> list[Any]:
        given, products, kernels = run.array(step.value), run.array(step.products), run.kernels.experts
        product = kernels.sorted_down(given, self._pairs(step, run), weights_of(step, run), products)
        return [product, kernels.add(products, addition_of(step, run))]


def _words_of(step: _OfExperts) -> str:
    """Where the sorted pairs are, of both layers of a mixture."""
    return f"{step.ids}_sorted"
