"""Which experts of a mixture each token goes through, how much of each it takes, and gpt-oss's activation."""

from __future__ import annotations

import numpy as np

from edgellm.engines.backends.numpy_activations import ACTIVATIONS
from edgellm.engines.model.config import Mixture


def chosen_experts(
    given: np.ndarray, mixture: Mixture, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The ids [rows, chosen] of the experts that each row goes through, rising, and its shares of them, in the dtype of
    what the router has `given`, [rows, experts].

    A row with NaN among what was given has shares of NaN, so that its logits say so; the other rows are as they are.
    """
    if mixture.scores == "sigmoid":
        scores = ACTIVATIONS["sigmoid"](given)
    else:
        scores = np.exp(given - given.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    judged = scores if correction is None else scores + correction
    order = np.argsort(-judged, axis=1, kind="stable")  # of equal ones the lower id comes first
    ids = np.sort(order[:, : mixture.chosen], axis=1)
    shares = np.take_along_axis(scores, ids, axis=1)
    if mixture.normalized:
        shares /= shares.sum(axis=1, keepdims=True) + shares.dtype.type(mixture.epsilon)
    shares *= shares.dtype.type(mixture.scale)
    shares[np.isnan(given).any(axis=1)] = np.nan
    return ids, shares


def clamped(gate_up: np.ndarray, limit: float) -> np.ndarray:
    """gpt-oss's activation of rows [.., 2 I] in which gate and up alternate: [.., I]; see `Mixture.limit`."""
    gate = np.minimum(gate_up[..., ::2], limit)
    up = np.clip(gate_up[..., 1::2], -limit, limit)
    return (up + 1) * (gate * ACTIVATIONS["sigmoid"](gate * gate.dtype.type(1.702)))
