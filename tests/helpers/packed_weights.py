"""Random weights of 4 bits, their copies on the GPU, and values of a compute dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu_device import device_copy

from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.quantization.device_layout import PackedMatrix, to_device_layout
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat


def compute_bits(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values rounded to a compute dtype: as arrays of the device have them (bfloat16: uint16), and as float32."""
    if dtype == "float16":
        rounded = values.astype(np.float16)
        return rounded, rounded.astype(np.float32)
    if dtype == "float32":
        return values, values
    bits = bfloat16_bits(values)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def random_packed(
    rows: int, columns: int, group: int | None, zeros: bool, dtype: str, size: float = 0.01, seed: int = 0
) -> PackedWeight:
    """With every code, scales between a tenth of `size` and `size`."""
    random, format = np.random.default_rng(seed), WeightFormat("int4", group, zeros, dtype)
    scales = random.uniform(size / 10, size, (rows, format.groups(columns))).astype(np.float32)
    codes = random.integers(0, 16, (rows, columns)).astype(np.uint8)
    points = random.integers(0, 16, scales.shape).astype(np.uint8) if zeros else None
    return PackedWeight(format, codes, compute_bits(scales, dtype)[1], points)


def packed_copy(gpu: Any, weight: PackedWeight) -> PackedMatrix:
    """A weight in the kernels' layout, in the memory of the GPU."""
    layout, data = to_device_layout(weight)
    return PackedMatrix(layout, device_copy(gpu, data))
