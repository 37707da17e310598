"""The kernels of mixtures of experts in NumPy, float32: they define what
`CudaSortedExperts` computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from decode_twins import gated, product, rows_of, write
from device_weights import from_device_layout
from launched_twins import launched

from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.experts.choice import chosen_experts, sigmoid
from edgellm.kernels.experts.contract import (
    MAX_PAIRS,
    Activation,
    Addition,
    Choice,
    ExpertWeights,
    Routed,
    SortedPairs,
    check_pairs,
    check_sorted,
)
from edgellm.kernels.numpy_launch import NumpyLaunch
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight


class NumpyExperts:
    """See `edgellm.kernels.experts.contract`."""

    @launched
    def choose(self, choice: Choice, routed: Routed) -> None:
        """To `routed` what each row chooses."""
        routing, scores, correction, shared, own, scales = choice
        ids, weights = chosen_experts(rows_of(scores), routing, correction, scales)
        if own is not None:
            is_own = (own[0] <= ids) & (ids < own[1])
            ids, weights = np.where(is_own, ids - own[0], -1), np.where(is_own, weights, 0)
        write(routed.expert_ids, ids)
        write(routed.expert_weights, weights)
        if shared is not None and routed.shared_weights is not None:
            x, gate = shared
            write(routed.shared_weights, sigmoid(rows_of(x) @ gate.reshape(-1, 1)))

    @launched
    def gate_up(
        self, x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights, how: Activation, output: np.ndarray
    ) -> None:
        """`output` [R, k I] compute = what each row's experts make of x [R, H] by their matrices [2 I, H], or [I, H]
        where they have no gates; `how`: of the sums."""
        inner = activated(_products(rows_of(x)[:, None], expert_ids, experts), how)
        write(output, inner.reshape(len(inner), -1))

    @launched
    def down(self, x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights, output: np.ndarray) -> None:
        """`output` [R, k N] float32 = what each row's experts make of their own x, of [R, k I]."""
        given = x.reshape(*expert_ids.reshape(-1, expert_ids.shape[-1]).shape, -1)
        products = _products(given, expert_ids, experts)
        write(output, products.reshape(len(products), -1))

    def down_add(
        self, x: np.ndarray, experts: ExpertWeights, products: np.ndarray, addition: Addition, counters: np.ndarray
    ) -> NumpyLaunch:
        """`down` to `products`, then `add`. `counters` uint32 [R, `counter_words`] are zero before and after."""

        def compute() -> None:
            self.down(x, addition.routed.expert_ids, experts, products)()
            self.add(products, addition)()

        return NumpyLaunch(compute)

    @launched
    def add(self, outputs: np.ndarray, addition: Addition) -> None:
        """The `addition` of what is in `outputs` [R, k N] float32."""
        routed, residual, output, scale, shared = addition
        weights = rows_of(routed.expert_weights)
        each, total = outputs.reshape(*weights.shape, -1), np.zeros(rows_of(output).shape, np.float32)
        for place in range(weights.shape[1]):
            own = weights[:, place, None]
            total += np.where(own == 0, 0, own * each[:, place])
        if shared is not None:
            share = 1 if routed.shared_weights is None else routed.shared_weights.reshape(-1, 1)
            total += share * rows_of(shared)
        total *= np.float32(scale)
        write(output, total if residual is None else rows_of(residual) + total)

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
        self, x: np.ndarray, sorted_pairs: SortedPairs, experts: ExpertWeights, how: Activation, output: np.ndarray
    ) -> NumpyLaunch:
        """`gate_up` of the pairs in the tiles: of the rows of x [R, H], to `output` [R, k I]."""
        width = experts.shape[0] // how.sums
        check_sorted(sorted_pairs, output.size // width, experts.experts)
        results = output.reshape(-1, width)

        def product(place: np.ndarray, ids: np.ndarray, found: np.ndarray) -> NumpyLaunch:
            return self.gate_up(rows_of(x)[sorted_pairs.rows[place]], ids, experts, how, found)

        return _of_sorted(sorted_pairs, results, product)

    def sorted_down(
        self, x: np.ndarray, sorted_pairs: SortedPairs, experts: ExpertWeights, output: np.ndarray
    ) -> NumpyLaunch:
        """`down` of the pairs in the tiles: from x [R, k I] to `output` [R, k N] float32."""
        check_sorted(sorted_pairs, output.size // experts.shape[0], experts.experts)
        given, results = x.reshape(-1, experts.shape[1]), output.reshape(-1, experts.shape[0])

        def product(place: np.ndarray, ids: np.ndarray, found: np.ndarray) -> NumpyLaunch:
            return self.down(given[sorted_pairs.pairs[place]], ids, experts, found)

        return _of_sorted(sorted_pairs, results, product)


def _of_sorted(
    given: SortedPairs, results: np.ndarray, product: Callable[[np.ndarray, np.ndarray, np.ndarray], NumpyLaunch]
) -> NumpyLaunch:
    """What puts the pairs in the tiles at their places in `results`, by a `product` of so many of them as it takes: of
    their places in the tiles, the ids [.., 1] of their experts, and where it gives its rows."""

    def compute() -> None:
        tile = given.pairs.size // given.expert.size
        own = np.flatnonzero(given.pairs[: given.tiles[0] * tile] >= 0)
        for first in range(0, len(own), MAX_PAIRS):
            place = own[first : first + MAX_PAIRS]
            found = np.empty((len(place), results.shape[1]), np.float32)
            product(place, given.expert[place // tile, None], found)()
            results[given.pairs[place]] = found

    return NumpyLaunch(compute)


def activated(sums: np.ndarray, how: Activation) -> np.ndarray:
    """[.., I] of sums [.., 2 I], or [.., I] without gates."""
    if how.kind == "squared":
        return np.square(np.maximum(sums, 0))
    if how.kind == "gated":
        return gated(sums, how.gate)
    gate, up = np.minimum(sums[..., ::2], how.limit), np.clip(sums[..., 1::2], -how.limit, how.limit)
    return (up + 1) * gate * sigmoid(np.float32(1.702) * gate)


def _products(x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights) -> np.ndarray:
    """[R, k, N] of x [R, k or 1, K], each by its row's k-th expert, NaN where that is none."""
    ids = expert_ids.reshape(-1, expert_ids.shape[-1])
    check_pairs(*ids.shape)
    weight, bias = experts.linear.weight, experts.linear.bias
    if isinstance(weight, PackedMatrix):
        weight = from_device_layout(weight.layout, weight.data)
    if isinstance(weight, PackedWeight):
        weight = weight.values()
    matrices = weight.reshape(experts.experts, *experts.shape)
    biases = None if bias is None else bias.reshape(experts.experts, -1)
    found = np.full((*ids.shape, experts.shape[0]), np.nan, np.float32)
    given = np.broadcast_to(x, (*ids.shape, x.shape[-1]))
    for expert in np.unique(ids[ids >= 0]).tolist():
        own = ids == expert
        layer = LinearWeights(matrices[expert], None if biases is None else biases[expert])
        found[own] = product(given[own], layer)
    return found
