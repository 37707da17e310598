"""Random weights of 4 to 8 bits, their copies on the GPU, and values of a compute dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from device_weights import to_device_layout
from gpu_device import device_copy

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.quantization.device_layout import InputPermutation, PackedMatrix
from edgellm.kernels.quantization.packed_weight import (
    LEVEL_COLUMNS,
    Codes,
    Levels,
    PackedWeight,
    WeightFormat,
    code_values,
    rounded,
)
from edgellm.kernels.sampling.launcher import SharedTable


def compute_bits(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values rounded to a compute dtype: as arrays of the device have them (bfloat16: uint16), and as float32."""
    if dtype == "float16":
        rounded = values.astype(np.float16)
        return rounded, rounded.astype(np.float32)
    if dtype == "float32":
        return values, values
    bits = bfloat16_bits(values)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def assert_same_bits(found: np.ndarray, expected: np.ndarray, signed_zeros: bool = True) -> None:
    """Two arrays of 16-bit floats have the same bits; unless `signed_zeros`, a zero of either sign is one."""
    both = [each.view(np.uint16).copy() for each in (found, expected)]
    for each in both:
        each[(each == 0x8000) & (not signed_zeros)] = 0
    np.testing.assert_array_equal(*both)


def random_packed(
    rows: int,
    columns: int,
    group: int | None,
    zeros: bool,
    dtype: str,
    size: float = 0.01,
    seed: int = 0,
    codes: Codes = "int4",
) -> PackedWeight:
    """With every code, scales of `dtype` between a tenth of `size` and `size`."""
    random, format = np.random.default_rng(seed), WeightFormat(codes, group, zeros, dtype)
    scales = random.uniform(size / 10, size, (rows, format.groups(columns))).astype(np.float32)
    stored = random.integers(0, 1 << format.bits, (rows, columns)).astype(np.uint8)
    if codes == "fp8":
        stored[stored & 127 == 127] ^= 1  # no number
    points = random.integers(0, 1 << format.bits, scales.shape).astype(np.uint8) if zeros else None
    return PackedWeight(format, stored, rounded(scales, dtype), points)


#: The formats of tensors in GGUF files, by their types.
GGUF_FORMATS = {
    "q4_0": WeightFormat("int4", 32, False, "float32", scaling="float16"),
    "q4_1": WeightFormat("int4", 32, False, "float32", minima=True, scaling="float16"),
    "q5_0": WeightFormat("int5", 32, False, "float32", scaling="float16"),
    "q5_1": WeightFormat("int5", 32, False, "float32", minima=True, scaling="float16"),
    "q8_0": WeightFormat("int8", 32, False, "float32", scaling="float16"),
    "q4_k": WeightFormat("int4", 32, False, "float32", minima=True, scaling="levels"),
    "q5_k": WeightFormat("int5", 32, False, "float32", minima=True, scaling="levels"),
    "q6_k": WeightFormat("int6", 16, False, "float32", scaling="levels"),
    "iq4_nl": WeightFormat("iq4", 32, False, "float32", scaling="float16"),
    "iq4_xs": WeightFormat("iq4", 32, False, "float32", scaling="levels"),
    "mxfp4": WeightFormat("fp4", 32, False, "float32", scaling="powers"),
}


def random_of(format: WeightFormat, rows: int, columns: int, size: float = 0.01, seed: int = 0) -> PackedWeight:
    """A weight of a format without zero points with every code, and scales of either sign up to about `size`."""
    random, parts = np.random.default_rng(seed), 2 if format.minima else 1
    shape = rows, format.groups(columns), parts
    stored = random.integers(0, 1 << format.bits, (rows, columns)).astype(np.uint8)
    levels = None
    if format.scaling == "levels":
        factors = random.uniform(-size / 64, size / 64, (rows, -(-columns // LEVEL_COLUMNS), parts)).astype(np.float16)
        levels = Levels(factors, random.integers(-128, 128, shape).astype(np.int8))
        assert format.group is not None
        scales = levels.products(format.group)
    elif format.scaling == "powers":
        stored[stored == 8] = 0  # there is no negative zero
        scales = np.ldexp(np.float32(1), random.integers(-3, 3, shape) + int(np.log2(size)))
    else:
        scales = rounded(random.uniform(-size, size, shape).astype(np.float32), "float16")
    minima = np.ascontiguousarray(scales[..., 1]) if format.minima else None
    return PackedWeight(format, stored, np.ascontiguousarray(scales[..., 0]), minima=minima, levels=levels)


def rescaled(weight: PackedWeight, dtype: str) -> PackedWeight:
    """A weight with other scales, numbers of `dtype`, whatever the dtype is that it is rounded in."""
    return replace(weight, scales=rounded(weight.scales * np.float32(1.2345678), dtype))


def with_factors(weight: PackedWeight, numbers: tuple[float, ...], divides: bool) -> PackedWeight:
    """A weight whose scales are 8-bit floats times, or divided by, one number of float32 for as many rows each."""
    random, values = np.random.default_rng(1), code_values("fp8")[:127]
    scales = values[random.integers(0, 127, weight.scales.shape)]
    wholes = np.repeat(np.float32(numbers), -(-len(scales) // len(numbers)))[: len(scales), None]
    return replace(weight, scales=scales / wholes if divides else scales * wholes)


def in_pieces(weight: PackedWeight, count: int) -> list[PackedWeight]:
    """The rows of a weight without levels, as so many GPUs have those of a table."""
    ends = [len(weight.codes) * number // count for number in range(count + 1)]
    return [
        replace(
            weight,
            codes=weight.codes[begin:end],
            scales=weight.scales[begin:end],
            zeros=None if weight.zeros is None else weight.zeros[begin:end],
        )
        for begin, end in pairwise(ends)
    ]


def shared_table(gpu: Any, pieces: Sequence[DeviceArray | PackedMatrix]) -> SharedTable:
    """A table in pieces, for kernels of a GPU."""
    places = gpu.empty((len(pieces),), "uint64")
    gpu.upload(places, np.array([piece.pointer for piece in pieces], np.uint64))
    return SharedTable(tuple(pieces), places)


def packed_copy(gpu: Any, weight: PackedWeight, dtype: str | None = None) -> PackedMatrix:
    """A weight in the layout of the kernels of a compute dtype (None: its own), in the memory of the GPU."""
    layout, data = to_device_layout(weight, dtype)
    inputs = InputPermutation.of(weight)
    own = inputs and InputPermutation(*(None if each is None else device_copy(gpu, each) for each in inputs))
    return PackedMatrix(layout, device_copy(gpu, data), own)
