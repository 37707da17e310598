"""Mixtures of experts for many rows in NumPy: the twin of `CudaSortedExperts`, which defines what it computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edgellm.kernels.decode.numpy_twins import NumpyLaunch
from edgellm.kernels.experts.contract import MAX_PAIRS, ExpertWeights
from edgellm.kernels.experts.prompt_contract import SortedPairs, check_sorted
from edgellm.kernels.experts.twin import NumpyExperts


class NumpySortedExperts(NumpyExperts):
    """`NumpyExperts`, and what many rows take: see `edgellm.kernels.experts.prompt_contract`."""

    def sort(self, expert_ids: np.ndarray, experts: int, sorted_pairs: SortedPairs) -> NumpyLaunch:
        """`sorted_pairs` of `expert_ids` [R, k] int32. A pair whose id no expert has is in none of the tiles."""
        tile, chosen = check_sorted(sorted_pairs, expert_ids.size, experts), expert_ids.shape[-1]

        def compute() -> None:
            ids, place = expert_ids.reshape(-1), 0
            for expert in range(experts):
                own = np.flatnonzero(ids == expert)
                end = place + -(-len(own) // tile) * tile
                sorted_pairs.pairs[place:end] = sorted_pairs.rows[place:end] = -1
                sorted_pairs.pairs[place : place + len(own)] = own
                sorted_pairs.rows[place : place + len(own)] = own // chosen
                sorted_pairs.expert[place // tile : end // tile] = expert
                place = end
            sorted_pairs.tiles[0] = place // tile

        return NumpyLaunch(compute)

    def sorted_gate_up(
        self, x: np.ndarray, sorted_pairs: SortedPairs, experts: ExpertWeights, limit: float, output: np.ndarray
    ) -> NumpyLaunch:
        """`NumpyExperts.gate_up` of the pairs in the tiles: of the rows of x [R, H], to `output` [R, k I]."""
        check_sorted(sorted_pairs, output.size * 2 // experts.shape[0], experts.experts)
        given, results = x.reshape(-1, x.shape[-1]), output.reshape(-1, experts.shape[0] // 2)

        def compute() -> None:
            for own, ids in _parts_of(sorted_pairs):
                found = np.empty((len(own), results.shape[1]), np.float32)
                self.gate_up(given[sorted_pairs.rows[own]], ids, experts, limit, found)()
                results[sorted_pairs.pairs[own]] = found

        return NumpyLaunch(compute)

    def sorted_down(
        self, x: np.ndarray, sorted_pairs: SortedPairs, experts: ExpertWeights, output: np.ndarray
    ) -> NumpyLaunch:
        """`NumpyExperts.down` of the pairs in the tiles: from x [R, k I] to `output` [R, k N] float32."""
        check_sorted(sorted_pairs, output.size // experts.shape[0], experts.experts)
        given, results = x.reshape(-1, experts.shape[1]), output.reshape(-1, experts.shape[0])

        def compute() -> None:
            for own, ids in _parts_of(sorted_pairs):
                found = np.empty((len(own), results.shape[1]), np.float32)
                self.down(given[sorted_pairs.pairs[own]], ids, experts, found)()
                results[sorted_pairs.pairs[own]] = found

        return NumpyLaunch(compute)


def _parts_of(given: SortedPairs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The places of what the tiles hold, and the ids [.., 1] of their experts, so many that `NumpyExperts` takes."""
    tile = given.pairs.size // given.expert.size
    own = np.flatnonzero(given.pairs[: given.tiles[0] * tile] >= 0)
    for first in range(0, len(own), MAX_PAIRS):
        part = own[first : first + MAX_PAIRS]
        yield part, given.expert[part // tile, None]
