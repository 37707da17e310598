"""Heads made ready for attention by NumPy, in decode steps and in prompts: norms and rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels.decode.contract import SQUARE_SUMS

#: Of queries and of keys.
_Both = tuple[np.ndarray, np.ndarray]


def heads_made_ready(
    heads: _Both,
    norms: _Both | None,
    turns: _Both | None,
    epsilon: float,
    offset: float,
    neighbours: bool,
    norms_behind: bool,
) -> list[np.ndarray]:
    """Query and key heads [R, n, D], normed by weights [D] and rotated by `turns` [R, rotary], each by its own."""
    made = list(heads)
    for is_behind in (False, True):
        if norms is not None and norms_behind == is_behind:
            made = [rms_norm(x, weight, epsilon, offset) for x, weight in zip(made, norms, strict=True)]
        if turns is not None and not is_behind:
            apart = [pairs_apart(x, turns[0].shape[-1]) if neighbours else x for x in made]
            made = [rotary_embedding(x, own) for x, own in zip(apart, turns, strict=True)]
    return made


def pairs_apart(x: np.ndarray, rotary: int) -> np.ndarray:
    """Of the first `rotary` elements of the last axis those of even numbers, then those of odd ones, then the rest."""
    return np.concatenate((x[..., :rotary:2], x[..., 1:rotary:2], x[..., rotary:]), axis=-1)


def rotary_embedding(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of each head of [R, n, D] by [R, rotary], cosine half then sine half.

    Element j is paired with element j + R/2.
    """
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine, rest), axis=-1)


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
