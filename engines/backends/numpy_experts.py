"""Mixtures of experts with NumPy: which experts each token goes through, and the sum of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm.engines.backends.numpy_nonlinear import ACTIVATIONS
from edgellm.engines.model.config import Mixture
from edgellm.kernels.experts.twin import chosen_experts

#: The matrices of all experts (`ExpertMatrices`), and their biases [E, N].
_Layer = tuple[Any, np.ndarray | None]


def mixed(
    mixture: Mixture,
    x: np.ndarray,
    given: np.ndarray,
    correction: np.ndarray | None,
    gate_up: _Layer,
    down: _Layer,
    linear: Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray],
    own: tuple[int, int] | None = None,
) -> np.ndarray:
    """What `Operations.experts` says, by `linear`: expert by expert in the order of their ids, all rows of `x` that
    chose one together. Where `own` experts alone are there, what these give."""
    first, last = own or (0, mixture.experts)

    def through(rows: np.ndarray, layer: _Layer, expert: int) -> np.ndarray:
        matrices, biases = layer
        return linear(rows, matrices.of(expert - first), None if biases is None else biases[expert - first])

    rows = x.reshape(-1, x.shape[-1])
    ids, shares = chosen_experts(given.reshape(len(rows), -1), mixture.routing, correction)
    total = np.zeros_like(rows)
    for expert in np.unique(ids[(ids >= first) & (ids < last)]).tolist():
        row, place = np.nonzero(ids == expert)
        inner = _activated(through(rows[row], gate_up, expert), mixture)
        total[row] += shares[row, place, None] * through(inner, down, expert)
    return total.reshape(x.shape)


def _activated(gate_up: np.ndarray, mixture: Mixture) -> np.ndarray:
    """silu(gate) up of rows [.., 2 I], gate first: [.., I]. With a limit gate and up alternate: see `Mixture.limit`.
    Experts without gates give relu(up)^2 of rows [.., I]."""
    if not mixture.gated:
        return ACTIVATIONS["relu_squared"](gate_up)
    limit = mixture.limit
    if not limit:
        gate, up = np.split(gate_up, 2, axis=-1)
        return ACTIVATIONS["silu"](gate) * up
    gate = np.minimum(gate_up[..., ::2], limit)
    up = np.clip(gate_up[..., 1::2], -limit, limit)
    return (up + 1) * (gate * ACTIVATIONS["sigmoid"](gate * gate.dtype.type(1.702)))
