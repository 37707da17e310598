"""Attention to rows behind a token's own on the GPU: against its twin, bit for bit however it is tiled, and where
there is no such row that of causal attention."""

from __future__ import annotations

import numpy as np
import pytest
from ahead_cases import CASES, AheadCase
from device_bits import from_bits, relative, stored, widened
from gpu_device import device_copy
from prefill_twin import NumpyPrefill

from edgellm.kernels.prefill.launcher import CudaPrefill

pytestmark = pytest.mark.gpu

#: As in `test_prefill_attention_gpu.py`; rows of int8 are rounded to other values now and then.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
SCALES = ("k_scale", "v_scale")


def context_of(gpu, case: AheadCase, arrays: dict[str, np.ndarray], **options: int) -> np.ndarray:
    """The context of both kernels as uint16."""
    device = {key: device_copy(gpu, array) for key, array in arrays.items()}
    case.run(CudaPrefill(gpu.kernel_module), device, **options)
    return gpu.download(device["context"]).view(np.uint16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_its_twin(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = stored(case.arrays(), dtype, SCALES)
    found = context_of(gpu, case, arrays)
    wide = widened(arrays, dtype)
    case.run(NumpyPrefill(), wide)
    values = from_bits(found.view(np.float16) if dtype == "float16" else found, dtype)
    assert relative(values, wide["context"]) < TOLERANCE[dtype] * (4 if case.int8 else 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.size <= 128])
def test_every_tiling_gives_the_same_bits(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = stored(case.arrays(), dtype, SCALES)
    np.testing.assert_array_equal(*(context_of(gpu, case, arrays, tiles=tiles) for tiles in (1, 2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_a_token_that_sees_nothing_behind_it_has_the_bits_of_causal_attention(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = stored(case.arrays(), dtype, SCALES)
    ahead, causal = context_of(gpu, case, arrays), context_of(gpu, case, arrays, causal=True)
    same = arrays["last_seen"] == arrays["start"][:, None] + np.arange(case.tokens)
    np.testing.assert_array_equal(ahead[same], causal[same])
    assert (ahead[~same] != causal[~same]).any(axis=-1).all()
