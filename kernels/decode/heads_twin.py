"""What NumPy computes of heads, in operations and as kernels do: norms, the order of pairs that rotate, caps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels.decode.contract import SQUARE_SUMS


def pairs_apart(x: np.ndarray, rotary: int) -> np.ndarray:
    """Of the first `rotary` elements of the last axis those of even numbers, then those of odd ones, then the rest."""
    return np.concatenate((x[..., :rotary:2], x[..., 1:rotary:2], x[..., rotary:]), axis=-1)


def square_sums(parts: Sequence[np.ndarray], counted: Sequence[bool]) -> np.ndarray:
    """[.., at least `SQUARE_SUMS`]: the sums of the squares of each of the parts [.., K], 0 where it is not counted."""
    found = np.zeros((*parts[0].shape[:-1], max(SQUARE_SUMS, len(parts))), parts[0].dtype)
    for place in np.flatnonzero(counted).tolist():
        found[..., place] = np.square(parts[place]).sum(axis=-1)
    return found


def rms_norm(
    x: np.ndarray, weight: np.ndarray | np.float32, epsilon: float, offset: float = 0.0, mean: np.ndarray | None = None
) -> np.ndarray:
    """x / sqrt(mean(x^2) + epsilon) * (weight + offset) over the last axis (Zhang and Sennrich 2019); `mean`: that of
    all columns [.., 1], where x are some of them."""
    factors = weight + np.float32(offset) if offset else weight
    mean = (x * x).mean(axis=-1, keepdims=True) if mean is None else mean
    return x / np.sqrt(mean + np.float32(epsilon)) * factors


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    """cap tanh(x / cap), float32 (Gemma 2)."""
    result = x / np.float32(cap)
    np.tanh(result, out=result)
    result *= np.float32(cap)
    return result
