"""Attention of prefill steps on the GPU: against its twin, and bit for bit however a prompt is cut."""

from __future__ import annotations

import numpy as np
import pytest
from device_bits import from_bits, relative, stored, to_bits, widened
from gpu_device import device_copy
from prefill_cases import CASES, Case
from prefill_twin import NumpyPrefill

from edgellm.kernels.prefill.launcher import CudaPrefill

pytestmark = pytest.mark.gpu

#: Queries, weights and results are rounded to the dtype once each: by half its spacing at most, 2^-11 and 2^-8 of a
#: value. Twice the bound of one of them.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def run_on_device(gpu, case: Case, arrays: dict[str, np.ndarray], **tiling: int) -> dict[str, np.ndarray]:
    """All arguments after both kernels, 16-bit elements as uint16."""
    device = {key: device_copy(gpu, array) for key, array in arrays.items()}
    case.run(CudaPrefill(gpu.kernel_module), device, **tiling)
    found = {key: gpu.download(array) for key, array in device.items()}
    return {key: array if array.dtype == np.int32 else array.view(np.uint16) for key, array in found.items()}


def values_of(array: np.ndarray, dtype: str) -> np.ndarray:
    """16-bit elements in float32."""
    return from_bits(array.view(np.float16) if dtype == "float16" else array, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_its_twin(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = stored(case.arrays(), dtype)
    found = run_on_device(gpu, case, arrays)
    wide = widened(arrays, dtype)
    case.run(NumpyPrefill(), wide)
    for b, start in enumerate(case.starts):
        new = slice(start, start + case.tokens)
        for key in ("k_cache", "v_cache"):
            assert relative(values_of(found[key][b, :, new], dtype), wide[key][b, :, new]) < TOLERANCE[dtype], key
            others = np.r_[0:start, new.stop : case.rows]
            np.testing.assert_array_equal(found[key][b][:, others], arrays[key].view(np.uint16)[b][:, others])
    # What is left of differences is the twin's unrounded queries and keys: large scores multiply them.
    factor = max(1.0, case.largest)
    assert relative(values_of(found["context"], dtype), wide["context"]) < factor * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.size <= 128])
def test_every_tiling_gives_the_same_bits(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = stored(case.arrays(), dtype)
    one, two = (run_on_device(gpu, case, arrays, tiles=tiles)["context"] for tiles in (1, 2))
    np.testing.assert_array_equal(one, two)


def cut(gpu, case: Case, arrays: dict[str, np.ndarray], sizes: tuple[int, ...], stale: float, dtype: str) -> np.ndarray:
    """The context of one sequence's tokens, prefilled in chunks of `sizes`; rows not yet written hold `stale`."""
    kernels, start, results = CudaPrefill(gpu.kernel_module), case.starts[0], []
    caches = {}
    for key in ("k_cache", "v_cache"):
        values = arrays[key].copy()
        values[:, :, start:] = to_bits(np.full(values[:, :, start:].shape, stale, np.float32), dtype)
        caches[key] = device_copy(gpu, values)
    done = 0
    for size in sizes:
        chunk = {key: np.ascontiguousarray(arrays[key][:, done : done + size]) for key in ("qkv", "queries", "context")}
        if case.rotary:
            chunk["rotary"] = np.ascontiguousarray(arrays["rotary"][:, done : done + size])
        chunk["start"] = np.array([start + done], np.int32)
        device = {key: device_copy(gpu, array) for key, array in chunk.items()}
        Case((start + done,), size, case.heads, case.kv_heads, case.size, case.rotary, case.rows).run(
            kernels, device | caches
        )
        results.append(gpu.download(device["context"]).view(np.uint16)[0])
        done += size
    return np.concatenate(results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("start", [0, 37, 128])
def test_a_row_has_the_same_bits_however_its_prompt_was_cut(gpu, size: int, start: int, dtype: str) -> None:
    case = Case((start,), 300, 4, 2, size, 16)
    arrays = stored(case.arrays(), dtype)
    values = arrays["qkv"][:, :, (case.heads + case.kv_heads) * size :]  # of which a query sees some and not others
    values[:, ::7] = to_bits(np.full(values[:, ::7].shape, 3e4, np.float32), dtype)
    whole = cut(gpu, case, arrays, (300,), 0.0, dtype)
    for sizes in ((1, 299), (128, 128, 44), (64, 1, 63, 100, 72), (13,) * 23 + (1,)):
        for stale in (0.0, 6e4):
            np.testing.assert_array_equal(cut(gpu, case, arrays, sizes, stale, dtype), whole, err_msg=str(sizes))


def test_repeats_its_bits(gpu) -> None:
    case = Case((1000,), 500, 32, 8, 64, 64, 1600)
    arrays = stored(case.arrays(), "float16")
    first = run_on_device(gpu, case, arrays)["context"]
    for _ in range(5):
        np.testing.assert_array_equal(run_on_device(gpu, case, arrays)["context"], first)
