"""Weights of 4 bits in the kernels' layout, made on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_device import device_copy
from packed_weights import random_packed

from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import tail_bytes, to_device_layout
from edgellm.kernels.quantization.shuffle import shuffle

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros"), [(8, 128, 128, False), (19, 520, 32, True), (130, 264, None, True)]
)
def test_the_layout_is_made_on_the_device(gpu, rows: int, columns: int, group: int | None, zeros: bool) -> None:
    weight = random_packed(rows, columns, group, zeros, "float16")
    layout, expected = to_device_layout(weight)
    tails = device_copy(gpu, np.ascontiguousarray(tail_bytes(weight, layout)))
    data = gpu.empty(layout.shape, "uint8")
    pairs = weight.codes[:, ::2] | weight.codes[:, 1::2] << 4
    for codes in (weight.codes, pairs):
        own = device_copy(gpu, np.ascontiguousarray(codes))
        gpu.upload(data, np.full(layout.shape, 255, np.uint8))
        shuffle(gpu.kernel_module, layout, own, tails, data)()
        np.testing.assert_array_equal(gpu.download(data), expected)


def test_codes_of_another_weight_are_refused(gpu) -> None:
    weight = random_packed(8, 128, 128, False, "float16")
    layout, data = to_device_layout(weight)
    codes, tails = device_copy(gpu, weight.codes[:7].copy()), device_copy(gpu, tail_bytes(weight, layout).copy())
    with pytest.raises(KernelError, match="no weight of 8 rows"):
        shuffle(gpu.kernel_module, layout, codes, tails, device_copy(gpu, data))
