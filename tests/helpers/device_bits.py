"""Values as a device holds them in a compute dtype: float16, or bfloat16 as its bits in uint16."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 rounded to nearest even, as the bits that the device holds."""
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """What these bits stand for, in float32."""
    if dtype == "float16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def stored(arrays: dict[str, np.ndarray], dtype: str, wide: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Arrays by their names as the device holds them; those of the names `wide`, and integers, as they are."""
    return {
        name: to_bits(array, dtype) if array.dtype == np.float32 and name not in wide else array
        for name, array in arrays.items()
    }


def widened(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """What is `stored` in the dtype, in float32, for the twins of kernels."""
    return {name: from_bits(array, dtype) if array.dtype.itemsize == 2 else array for name, array in arrays.items()}


def rounded(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The values of a model as its dtype holds them, in float32."""
    return {
        name: from_bits(to_bits(array, dtype), dtype) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Not a number in what was found makes the result not a number, which is within no tolerance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
