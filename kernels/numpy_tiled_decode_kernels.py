"""The kernels of steps of up to 64 tokens in NumPy, float32: the twins of `CudaTiledKernels`, their definition.

The norms stand alone here; `linear_residual` is that of `numpy_decode_kernels`, whose `attention` serves them, too.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels import numpy_decode_kernels as single
from edgellm.kernels.numpy_decode_kernels import linear_residual

__all__ = ["gate_up", "linear", "linear_residual", "norm"]


def norm(
    hidden: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    output: np.ndarray,
    features: np.ndarray | None = None,
    place: int = 0,
    keeps_raw: bool = False,
) -> None:
    """`output` [R, C] = rms_norm(hidden [R, K]) in its first K columns, zeros in the others.

    `features` [R, n K] gets the norm, or `hidden` itself if `keeps_raw`, in its columns from `place` K on.
    """
    columns = len(norm_weight)
    rows = hidden.reshape(-1, columns)
    output[:, columns:] = 0
    output[:, :columns] = single.rms_norm(rows, norm_weight, epsilon)
    single.write_features(features, place, rows if keeps_raw else output[:, :columns])


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, output: np.ndarray) -> None:
    """`output` [R, N] = the first K columns of x [R, C] times the transpose of `weight` [N, K], plus `bias` [N]."""
    output.reshape(-1, len(weight))[...] = single.linear(x[:, : weight.shape[1]], weight, bias)


def gate_up(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, output: np.ndarray) -> None:
    """`output` [R, F] = silu(gate) * up of x [R, C], whose first K count; `weight` [2F, K]: gate, up."""
    output[...] = single.silu_mul(single.linear(x[:, : weight.shape[1]], weight, bias))
