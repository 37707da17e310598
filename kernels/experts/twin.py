"""The kernels of mixtures of experts in NumPy, float32: they define what `CudaExperts` computes."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.decode.contract import Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.numpy_twins import NumpyDecodeKernels, NumpyLaunch, gated, product, rows_of, write
from edgellm.kernels.experts.contract import ExpertWeights, Routed, Routing, check_pairs
from edgellm.kernels.quantization.device_layout import PackedMatrix, from_device_layout
from edgellm.kernels.quantization.packed_weight import PackedWeight


class NumpyExperts:
    """See `edgellm.kernels.experts.contract`."""

    def choose(
        self,
        scores: np.ndarray,
        routing: Routing,
        routed: Routed,
        correction: np.ndarray | None = None,
        shared: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> NumpyLaunch:
        """What each row of `scores` [R, E] float32 chooses. `correction` float32 [E]. `shared`: rows [R, H] and the
        gate [1, H] of the expert that every row goes through, compute: sigmoid of their product is its share."""

        def compute() -> None:
            ids, weights = chosen_experts(rows_of(scores), routing, correction)
            write(routed.expert_ids, ids)
            write(routed.expert_weights, weights)
            if shared is not None and routed.shared_weights is not None:
                x, gate = shared
                write(routed.shared_weights, _sigmoid(rows_of(x) @ gate.reshape(-1, 1)))

        return NumpyLaunch(compute)

    def route(
        self,
        normed: NormedInput,
        router: LinearWeights,
        kept: Kept,
        scores: np.ndarray,
        routing: Routing,
        routed: Routed,
        counters: np.ndarray,
        correction: np.ndarray | None = None,
        shared: tuple[np.ndarray, np.ndarray] | None = None,
        next_early: bool = True,
    ) -> NumpyLaunch:
        """`NumpyDecodeKernels.norm_linear` of what is `normed`, to `scores`, and what `choose` makes of them.
        `counters` uint32: the first is zero before and after."""
        scored = NumpyDecodeKernels().norm_linear([normed], router, scores, 1.0, kept)
        return _one_after_the_other(scored, self.choose(scores, routing, routed, correction, shared))

    def gate_up(
        self, x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights, limit: float, output: np.ndarray
    ) -> NumpyLaunch:
        """`output` [R, k I] compute = what each row's experts make of x [R, H]: silu(gate) up of their matrices
        [2 I, H], gates, then ups. With a `limit` (gpt-oss) gates and ups alternate, gates are at most the limit, ups
        within it both ways, and it is (up + 1) gate sigmoid(1.702 gate)."""

        def compute() -> None:
            products = _products(rows_of(x)[:, None], expert_ids, experts)
            inner = clamped(products, limit) if limit else gated(products, "silu")
            write(output, inner.reshape(len(inner), -1))

        return NumpyLaunch(compute)

    def down(self, x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights, output: np.ndarray) -> NumpyLaunch:
        """`output` [R, k N] float32 = what each row's experts make of their own x, of [R, k I]."""

        def compute() -> None:
            given = x.reshape(*expert_ids.reshape(-1, expert_ids.shape[-1]).shape, -1)
            products = _products(given, expert_ids, experts)
            write(output, products.reshape(len(products), -1))

        return NumpyLaunch(compute)

    def down_add(
        self,
        x: np.ndarray,
        experts: ExpertWeights,
        products: np.ndarray,
        routed: Routed,
        residual: np.ndarray,
        output: np.ndarray,
        counters: np.ndarray,
        scale: float = 1.0,
        shared: np.ndarray | None = None,
    ) -> NumpyLaunch:
        """`down` to `products`, then `add`. `counters` uint32 [R, `counter_words`] are zero before and after."""
        multiplied = self.down(x, routed.expert_ids, experts, products)
        return _one_after_the_other(multiplied, self.add(products, routed, residual, output, scale, shared))

    def add(
        self,
        outputs: np.ndarray,
        routed: Routed,
        residual: np.ndarray,
        output: np.ndarray,
        scale: float = 1.0,
        shared: np.ndarray | None = None,
    ) -> NumpyLaunch:
        """`output` [R, N] float32 = residual [R, N] + scale (sum over k in order of weight times what is in `outputs`
        [R, k N] float32, then the shared weight times `shared` [R, N] float32)."""

        def compute() -> None:
            weights = rows_of(routed.expert_weights)
            each, total = outputs.reshape(*weights.shape, -1), np.zeros(rows_of(residual).shape, np.float32)
            for place in range(weights.shape[1]):
                total += weights[:, place, None] * each[:, place]
            if shared is not None and routed.shared_weights is not None:
                total += routed.shared_weights.reshape(-1, 1) * rows_of(shared)
            write(output, rows_of(residual) + np.float32(scale) * total)

        return NumpyLaunch(compute)


def chosen_experts(
    given: np.ndarray, routing: Routing, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids [R, k] int32, rising, and weights [R, k] of the experts that rows choose of what the router has `given`,
    [R, E]. NaN is less than all else."""
    if routing.sigmoid:
        scores = _sigmoid(given)
    else:
        scores = np.exp(given - given.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    judged = scores if correction is None else scores + correction
    order = np.argsort(-judged, axis=1, kind="stable")  # of equal ones the lower id comes first
    ids = np.sort(order[:, : routing.chosen], axis=1)
    weights = np.take_along_axis(scores, ids, axis=1)
    if routing.normalized:
        weights = weights / (weights.sum(axis=1, keepdims=True) + np.float32(routing.epsilon))
    weights = weights * np.float32(routing.scale)
    weights[np.isnan(given).any(axis=1)] = np.nan
    return ids.astype(np.int32), weights


def clamped(gate_up: np.ndarray, limit: float) -> np.ndarray:
    """gpt-oss's activation of gates and ups [.., 2 I], which alternate: see `NumpyExperts.gate_up`."""
    gate, up = np.minimum(gate_up[..., ::2], limit), np.clip(gate_up[..., 1::2], -limit, limit)
    return (up + 1) * gate * _sigmoid(np.float32(1.702) * gate)


def _one_after_the_other(*launches: NumpyLaunch) -> NumpyLaunch:
    def compute() -> None:
        for launch in launches:
            launch()

    return NumpyLaunch(compute)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _products(x: np.ndarray, expert_ids: np.ndarray, experts: ExpertWeights) -> np.ndarray:
    """[R, k, N] of x [R, k or 1, K], each by its row's k-th expert."""
    ids = expert_ids.reshape(-1, expert_ids.shape[-1])
    check_pairs(*ids.shape)
    weight, bias = experts.linear.weight, experts.linear.bias
    if isinstance(weight, PackedMatrix):
        weight = from_device_layout(weight.layout, weight.data)
    if isinstance(weight, PackedWeight):
        weight = weight.values()
    matrices = weight.reshape(experts.experts, *experts.shape)
    biases = None if bias is None else bias.reshape(experts.experts, -1)
    found, given = np.empty((*ids.shape, experts.shape[0]), np.float32), np.broadcast_to(x, (*ids.shape, x.shape[-1]))
    for expert in np.unique(ids).tolist():
        own = ids == expert
        layer = LinearWeights(matrices[expert], None if biases is None else biases[expert])
        found[own] = product(given[own], layer)
    return found
