"""The layout in which kernels read weights of 4 bits: a weight comes back from it, and it is what they expect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from packed_weights import random_packed

from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import (
    CODE_BITS,
    CODE_BYTES,
    SMALL_SCALE,
    device_layout,
    from_device_layout,
    layout_refusal,
    to_device_layout,
)
from edgellm.kernels.quantization.packed_weight import WeightFormat


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None])
@pytest.mark.parametrize(("rows", "columns"), [(8, 128), (19, 520), (3, 8), (24, 2560)])
def test_a_weight_comes_back(rows: int, columns: int, group: int | None, zeros: bool, dtype: str) -> None:
    for size in (0.01, 3.0):
        weight = random_packed(rows, columns, group, zeros, dtype, size)
        layout, data = to_device_layout(weight)
        assert (data.shape, data.dtype, layout.small) == (
            layout.shape,
            np.uint8,
            size < 1 and dtype == "float16" and not zeros,
        )
        found = from_device_layout(layout, data)
        assert found.format == weight.format
        np.testing.assert_array_equal(found.codes, weight.codes)
        np.testing.assert_array_equal(found.scales, weight.scales)
        if zeros:
            np.testing.assert_array_equal(found.zeros, weight.zeros)
        else:
            assert found.zeros is None


def test_a_code_stands_where_the_kernels_look_for_it() -> None:
    weight = random_packed(16, 256, 64, False, "float16")
    _, data = to_device_layout(weight)
    for row, column in ((0, 0), (9, 1), (15, 255), (3, 134), (12, 70)):
        words = np.ascontiguousarray(data[row // 8, column // 128, :CODE_BYTES]).view(np.uint32).reshape(32, 4)
        word = int(words[row % 8 * 4 + column % 32 // 8, column % 128 // 32])
        bit = CODE_BITS[column % 8]
        turned = word >> bit | word << 32 - bit
        assert turned & 15 == weight.codes[row, column]


def test_scales_and_zero_points_follow_the_codes() -> None:
    weight = random_packed(16, 256, 64, True, "float16")
    _, data = to_device_layout(weight)
    own = np.ascontiguousarray(data[1, 1, CODE_BYTES:]).view(np.float16).reshape(8, 2, 2)
    np.testing.assert_array_equal(own[..., 0], weight.scales[8:, 2:])
    np.testing.assert_array_equal(own[..., 1], -16.0 - weight.zeros[8:, 2:])


def test_scales_are_small_up_to_where_two_to_the_eighteenth_of_them_is_finite() -> None:
    weight = random_packed(8, 128, 128, False, "float16")
    for factor, small in ((1.0, True), (-1.0, True), (1.001, False)):
        weight.scales[0, 0] = np.float16(SMALL_SCALE * factor)
        layout, data = to_device_layout(weight)
        assert layout.small is small
        assert np.isfinite(np.ascontiguousarray(data[..., CODE_BYTES:]).view(np.float16)).all()


def test_what_kernels_do_not_take_is_refused() -> None:
    plain = WeightFormat("int4", 128, False, "float16")
    assert layout_refusal(plain, "float16") is None
    for changes, words in (
        ({"codes": "int8"}, "codes of int4"),
        ({"group": 96}, "groups of 32"),
        ({"group": 16}, "groups of 32"),
        ({"dtype": "bfloat16"}, "rounded"),
        ({"permuted": True}, "own order"),
        ({"scaled": True}, "own order"),
    ):
        assert words in (layout_refusal(replace(plain, **changes), "float16") or "")
    weight = random_packed(8, 128, 128, False, "float16")
    weight.scales[0, 0] = 0.1
    with pytest.raises(KernelError, match="no numbers of float16"):
        device_layout(weight)
