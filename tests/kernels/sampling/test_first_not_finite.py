"""The kernel that finds infinities and NaN: its twin by definition, and the kernel against its twin on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_device import cuda_device, device_copy, load_kernels
from gpu_timing import microseconds

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.twin import NumpySampling, first_not_finite

TWIN = NumpySampling()
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
#: Of one value, around a load of 16 bytes, a warp, a block, what the twin looks at together, the kernel's largest grid.
SIZES = (1, 2, 7, 8, 9, 15, 31, 33, 255, 1021, 4099, 131_071, 131_073, 1_000_003)
#: The largest finite value, the smallest numbers, both zeros.
EXTREMES = {"float32": np.finfo(np.float32).max, "float16": 65504.0, "bfloat16": 3.3895314e38}


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values in a format, bfloat16 as its bits."""
    return bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def finite_values(size: int, dtype: str) -> np.ndarray:
    """Random ones, the extremes among them."""
    values = np.random.default_rng(size).normal(size=size).astype(np.float32)
    extremes = [EXTREMES[dtype], -EXTREMES[dtype], 0.0, -0.0, 1e-45, -1e-45]
    values[: len(extremes)] = extremes[:size]
    return stored(values, dtype)


def bad_values(dtype: str) -> np.ndarray:
    """Both infinities, and NaN of both signs with the largest and the smallest payload, quiet and signalling."""
    bits = {"float32": (32, 0x7F800000), "float16": (16, 0x7C00), "bfloat16": (16, 0x7F80)}[dtype]
    sign, infinity = 1 << (bits[0] - 1), bits[1]
    patterns = [infinity, infinity + 1, sign - 1]
    patterns += [pattern + sign for pattern in patterns]
    whole = np.array(patterns, np.uint32 if bits[0] == 32 else np.uint16)
    return whole if dtype == "bfloat16" else whole.view(dtype)


def found(values: np.ndarray) -> int:
    index = np.array([77], np.int64)
    TWIN.first_not_finite(values, index)
    return int(index[0])


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_the_first_bad_value_is_found_wherever_it_is(dtype: str, size: int) -> None:
    good = finite_values(size, dtype)
    assert found(good) == -1
    for place in {0, size // 3, size // 2, size - 1, max(0, size - 2)}:
        for value in bad_values(dtype):
            values = good.copy()
            values[place] = value
            assert found(values) == place
            values[place:] = value
            assert found(values) == place


def test_every_number_of_16_bits_is_told_as_numpy_does() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    half, brain = bits.view(np.float16), (bits.astype(np.uint32) << 16).view(np.float32)
    for values, exact in ((half, half), (bits, brain)):
        told = [first_not_finite(values[index : index + 1]) == -1 for index in range(len(bits))]
        np.testing.assert_array_equal(told, np.isfinite(exact))


def test_no_values_and_unaligned_ones() -> None:
    assert found(np.empty(0, np.float16)) == -1
    memory = np.zeros(41, np.uint8)
    values = memory[1:].view(np.float32)  # as a tensor may lie in a file
    assert first_not_finite(values) == -1
    values[9] = np.inf
    assert first_not_finite(values) == 9


@pytest.mark.parametrize(
    ("values", "index", "message"),
    [
        (np.zeros(3, np.int32), np.zeros(1, np.int64), "values is int32; expected float32 or float16 or bfloat16"),
        (np.zeros((3, 2), np.float32), np.zeros(1, np.int64), r"values has shape \[3, 2\]; expected \[N\]"),
        (np.zeros(6, np.float32)[::2], np.zeros(1, np.int64), "values is not C-contiguous"),
        (np.zeros(3, np.float32), np.zeros(1, np.int32), "index is int32; expected int64"),
        (np.zeros(3, np.float32), np.zeros(2, np.int64), r"index has shape \[2\]; expected \[1\]"),
    ],
)
def test_wrong_arguments_are_refused(values: np.ndarray, index: np.ndarray, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        TWIN.first_not_finite(values, index)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """A CUDA context with a stream, and the kernels loaded into it."""
    with cuda_device() as device:
        load_kernels(device)
        yield device


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("size", [*SIZES, 20_000_003])
def test_the_kernel_equals_its_twin_from_any_element_on(gpu: Any, dtype: str, size: int) -> None:
    """Neighbours on both sides are bad: the kernel must not look at them. One result for each start, read at once."""
    starts = (0, 1, 3, 5, 8)
    if size > 1_000_003:
        starts = (5,)
    places = sorted({0, size // 3, size - 1})
    for place in (*places, None):
        values = np.full(size + 16, bad_values(dtype)[0])
        expected, arrays = [], []
        index = gpu.zeros((len(starts),), "int64")
        for start in starts:
            values[start : start + size] = finite_values(size, dtype)
            if place is not None:
                values[start + place : start + size : 1 + size // 5] = bad_values(dtype)[place % 6]
            expected.append(found(values[start : start + size].copy()))
            arrays.append(device_copy(gpu, values)[start : start + size])
            values[start : start + size] = bad_values(dtype)[0]
        for number, array in enumerate(arrays):
            gpu.kernels.first_not_finite(array, index[number : number + 1])
        assert gpu.download(index).tolist() == expected == [-1 if place is None else place] * len(starts)


@pytest.mark.gpu
@DTYPES
def test_all_bad_and_no_values_on_a_gpu(gpu: Any, dtype: str) -> None:
    index = gpu.zeros((2,), "int64")
    array = device_copy(gpu, np.full(999_999, bad_values(dtype)[-1]))
    gpu.kernels.first_not_finite(array[1:], index[:1])
    gpu.kernels.first_not_finite(DeviceArray(array.pointer, (0,), dtype, array.owner), index[1:])
    assert gpu.download(index).tolist() == [0, -1]
    with pytest.raises(KernelError, match="index is int32"):
        gpu.kernels.first_not_finite(array, gpu.zeros((1,), "int32"))


@pytest.mark.gpu
@pytest.mark.alone
def test_the_kernel_reads_at_the_speed_of_memory(gpu: Any) -> None:
    values, other = gpu.zeros((1 << 28,), "float16"), gpu.empty((1 << 28,), "float16")
    index = gpu.zeros((1,), "int64")
    taken = microseconds(gpu, lambda: gpu.kernels.first_not_finite(values, index), "first_not_finite")
    copied = microseconds(gpu, lambda: gpu.copy(other, values), "copy")
    print(f"512 MiB: {taken:.0f} us, {values.nbytes / taken / 1e6:.2f} TB/s; a copy of them {copied:.0f} us")
    assert taken < copied
