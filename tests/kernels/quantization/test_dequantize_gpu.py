"""Weights of 4 bits as dense matrices on the GPU: the bits of `PackedWeight.values`."""

from __future__ import annotations

import numpy as np
import pytest
from packed_weights import compute_bits, packed_copy, random_packed

from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.dequantize import dequantize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
def test_values_are_those_of_the_packed_weight(gpu, group: int | None, zeros: bool, dtype: str) -> None:
    for rows, columns, size in ((8, 128, 3.0), (19, 520, 0.01), (130, 1032, 0.2)):
        weight = random_packed(rows, columns, group, zeros, dtype, size)
        expected = compute_bits(weight.values(), dtype)[0]
        packed, values = packed_copy(gpu, weight), gpu.empty((rows, columns), dtype)
        gpu.upload(values, np.full_like(expected, 0xFFFF if dtype == "bfloat16" else np.nan))
        dequantize(gpu.kernel_module, packed, values)()
        np.testing.assert_array_equal(gpu.download(values).view(np.uint16), expected.view(np.uint16))


def test_overlapping_launches_have_all_written_when_the_last_is_done(gpu) -> None:
    weights = [random_packed(520, 1024, 64, False, "float16", seed=seed) for seed in range(4)]
    packed = [packed_copy(gpu, weight) for weight in weights]
    values = [gpu.empty((520, 1024), "float16") for _ in weights]
    launches = [dequantize(gpu.kernel_module, *pair) for pair in zip(packed, values, strict=True)]
    for launch in launches[1:]:
        launch.overlap_previous()
    for _ in range(3):
        for array in values:
            gpu.upload(array, np.zeros(array.shape, np.float16))
        for launch in launches:
            launch()
        for array, weight in zip(values, weights, strict=True):
            np.testing.assert_array_equal(gpu.download(array), weight.values())


def test_values_of_another_weight_are_refused(gpu) -> None:
    packed = packed_copy(gpu, random_packed(8, 128, 128, False, "float16"))
    for shape, dtype in (((8, 136), "float16"), ((8, 128), "bfloat16")):
        with pytest.raises(KernelError, match=r"cannot hold a weight float16 \[8, 128\]"):
            dequantize(gpu.kernel_module, packed, gpu.empty(shape, dtype))
