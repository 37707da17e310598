"""Conversions between float32, float16 and bfloat16. NumPy has no bfloat16: its bits are uint16 here."""

from __future__ import annotations

import numpy as np

#: The formats that models are computed in, and the NumPy type that holds one.
STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


def float32_into(values: np.ndarray, dtype: str, target: np.ndarray) -> None:
    """Write `values` of `dtype` (a key of `STORAGE`) to `target` float32 of the same shape; always exact."""
    if dtype == "bfloat16":  # the upper half of a float32
        bits = target.view(np.uint32)
        np.copyto(bits, values)
        bits <<= 16
    else:
        np.copyto(target, values)


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


def convert(values: np.ndarray, source: str, target: str) -> tuple[np.ndarray, int]:
    """`values` of format `source` in format `target` (keys of `STORAGE`), rounded once to nearest, ties to even.

    Also returns how many finite values became infinite because the target cannot hold them.
    """
    if source == target:
        return values, 0
    exact = np.empty(values.shape, np.float32)
    float32_into(values, source, exact)
    if target == "float32":
        return exact, 0
    if target == "bfloat16":
        result = bfloat16_bits(exact)
        infinite = (result & 0x7FFF) == 0x7F80
    else:
        with np.errstate(over="ignore"):
            result = exact.astype(np.float16)
        infinite = np.isinf(result)
    overflowed = int(np.count_nonzero(infinite & np.isfinite(exact))) if infinite.any() else 0
    return result, overflowed
