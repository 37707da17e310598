"""The bits of bfloat16, which NumPy does not have: uint16, the upper half of a float32."""

from __future__ import annotations

import numpy as np


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Float32 values as bfloat16 (bits, uint16), rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits  # cannot wrap but for NaN, which is replaced below
    rounded >>= 16
    result = rounded.astype(np.uint16)
    nan = np.isnan(bits.view(np.float32))
    if nan.any():  # a payload in the lower half alone would round to infinity; the quiet bit keeps it a NaN
        result[nan] = (bits[nan] >> 16).astype(np.uint16) | 0x0040
    return result.reshape(np.shape(values))


def float32_of(values: np.ndarray) -> np.ndarray:
    """Values of a compute dtype in float32; uint16 holds the bits of bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def store_rounded(values: np.ndarray, target: np.ndarray) -> None:
    """Set `target` of a compute dtype (uint16: bfloat16) from float32 values of its shape, or that broadcast to it."""
    if target.dtype == np.uint16:
        target[...] = bfloat16_bits(values)
    else:
        np.copyto(target, values, casting="same_kind")
