"""Which experts rows choose, in NumPy: it defines what the kernel of the choice computes."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.experts.contract import Routing


def chosen_experts(
    given: np.ndarray, routing: Routing, correction: np.ndarray | None = None, scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids [R, k] int32, rising, of the experts that rows choose, and their weights [R, k], in the dtype of what the
    router has `given`, [R, E].

    A row with NaN among what was given has weights of NaN, so that its logits say so; the other rows are as they are.
    """
    if routing.sigmoid:
        scores = sigmoid(given)
    else:
        scores = np.exp(given - given.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    judged = scores if correction is None else scores + correction
    order = np.argsort(-judged, axis=1, kind="stable")  # of equal ones the lower id comes first
    ids = np.sort(order[:, : routing.chosen], axis=1)
    weights = np.take_along_axis(scores, ids, axis=1)
    if routing.normalized:
        weights = weights / (weights.sum(axis=1, keepdims=True) + weights.dtype.type(routing.epsilon))
    weights = weights * weights.dtype.type(routing.scale)
    if scales is not None:
        weights = weights * scales[ids]
    weights[np.isnan(given).any(axis=1)] = np.nan
    return ids.astype(np.int32), weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) of each element, in the dtype of x."""
    with np.errstate(over="ignore"):  # exp of a large number: infinity, and the result is 0
        return 1 / (1 + np.exp(-x))
