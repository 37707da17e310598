"""Rows of KV caches in 8 bits: the definition that the kernels follow.

A row x of keys or values of one head, as the compute dtype holds it, becomes integers q and a float32 scale s =
max|x| / 127, q = x / s rounded to nearest, ties to even: every division is that of IEEE float32, and |q| is at most
127. A row whose s would be below the smallest normal number is zeros with scale 0. A row with an infinity or a NaN has
zeros and the scale max|x| / 127, infinite or NaN, so that what reads it is NaN.

It is read as s q without rounding: scores are (query . q) s, and a weight p counts as p s before it meets q. Integers
up to 127 are exact in float16 and bfloat16, so that tensor cores multiply q itself.
"""

from __future__ import annotations

import numpy as np

#: The largest integer.
LARGEST = 127
_SMALLEST_SCALE = np.finfo(np.float32).tiny


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., D], rounded to float32, as [..., D] int8 and scales [..., 1] float32."""
    x = x.astype(np.float32)
    scales = np.abs(x).max(axis=-1, keepdims=True) / np.float32(LARGEST)
    scales[scales < _SMALLEST_SCALE] = 0
    usable = (scales > 0) & np.isfinite(scales)
    quotients = np.divide(x, scales, out=np.zeros_like(x), where=usable)
    return np.rint(quotients, out=quotients).astype(np.int8), scales


def write_rows(place: tuple, x: np.ndarray, rows: np.ndarray, scales: np.ndarray | None) -> None:
    """Put x [..., D] float32 at a place of a cache's `rows` [..., D], quantized where there are `scales` [..., 1]."""
    if scales is None:
        rows[place] = x
    else:
        rows[place], scales[place] = quantize_rows(x)


def write_ring_rows(sequence: int, start: int, x: np.ndarray, rows: np.ndarray, scales: np.ndarray | None) -> None:
    """The same of x [n, T, D], at most C rows, from row `start` modulo C of one of a cache's sequences [B, n, C, D] on,
    and behind the last row from row 0 on."""
    capacity = rows.shape[2]
    start %= capacity
    before = capacity - start
    for first, part in ((start, x[:, :before]), (0, x[:, before:])):
        if part.shape[1]:
            write_rows((sequence, slice(None), slice(first, first + part.shape[1])), part, rows, scales)
