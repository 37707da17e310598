"""Attention of sounds to what was before, in NumPy, float32: it defines what the kernels of these names compute."""

from __future__ import annotations

import math

import numpy as np

from edgellm.kernels.decode.heads_twin import capped

#: Queries that are taken together.
_QUERIES = 256


def local_attention(
    qkv: np.ndarray, relative: np.ndarray, first: int, past: int, cap: float, scale: np.ndarray
) -> np.ndarray:
    """What `EncoderKernels.local_attention` puts into its context."""
    rows, width, size = len(qkv), qkv.shape[1] // 3, len(scale)
    query, key, value = qkv.reshape(rows, 3, -1, size).swapaxes(0, 1)  # [R, n, D] each
    query = query * (np.logaddexp(0, scale) / np.float32(math.sqrt(size) * math.log(2)))
    key = key * np.float32(math.log(1 + math.e) / math.log(2))
    positions = relative[:past, first : first + width].reshape(past, 1, -1, size)
    weights = np.full((past, *query.shape[:2]), -np.inf, np.float32)
    for back in range(min(past, rows)):
        scores = (query[back:] * (key[: rows - back] + positions[back])).sum(axis=2)
        weights[back, back:] = capped(scores, cap)
    weights = np.exp(weights - weights.max(axis=0))
    weights /= weights.sum(axis=0)
    summed = np.zeros_like(query)
    for back in range(min(past, rows)):
        summed[back:] += weights[back, back:, :, None] * value[: rows - back]
    return summed.reshape(rows, width)


def past_attention(heads: np.ndarray, kept: np.ndarray, first: int, past: int, scale: float) -> np.ndarray:
    """What `EncoderKernels.past_attention` puts into its context [R, n D]; `kept` is written, too."""
    _, count, rows, size = heads.shape
    seen, places = np.arange(first - min(first, past - 1), first), kept.shape[2]
    keys, values = np.concatenate((kept[:, :, seen % places], heads[1:]), axis=2)
    kept[:, :, np.arange(first, first + rows) % places] = heads[1:]
    context = np.empty((rows, count, size), np.float32)
    for begin in range(0, rows, _QUERIES):
        end, least = min(begin + _QUERIES, rows), max(0, begin + len(seen) - past + 1)
        own = slice(least, end + len(seen))
        scores = heads[0, :, begin:end] @ keys[:, own].swapaxes(1, 2) * np.float32(scale)
        distances = np.arange(begin, end)[:, None] + len(seen) - np.arange(own.start, own.stop)
        scores[:, (distances < 0) | (distances >= past)] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        context[begin:end] = (weights @ values[:, own]).swapaxes(0, 1)
    return context.reshape(rows, count * size)
