"""The kernels of prompts with images, in NumPy, against their definitions written out as loops."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.rotary import mrope_axes
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.errors import KernelError
from edgellm.kernels.images.twin import NumpyImages

KERNELS = NumpyImages()
IMAGE = 7


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("first_row", [0, 2, 4, 9, -2, -30])
def test_image_tokens_take_rows_in_order(dtype: type, first_row: int) -> None:
    random = np.random.default_rng(3)
    image_rows = random.integers(0, 1000, (5, 3)).astype(dtype)
    token_ids = np.array([[1, IMAGE, IMAGE, 2, IMAGE, -1, IMAGE, IMAGE, IMAGE]], np.int32)
    before = random.integers(0, 1000, (1, 9, 3)).astype(dtype)
    target, inserted = before.copy(), np.array([10], np.int32)
    KERNELS.insert_image_rows(image_rows, token_ids, target, inserted, IMAGE, first_row)
    row, taken = first_row, 0
    for token in range(9):
        expected = before[0, token]
        if token_ids[0, token] == IMAGE:
            if 0 <= row < 5:
                expected, taken = image_rows[row], taken + 1
            row += 1
        assert target[0, token].tolist() == expected.tolist()
    assert inserted.tolist() == [10 + taken]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_each_column_follows_its_axis(dtype: type) -> None:
    random = np.random.default_rng(4)
    table = random.standard_normal((9, 6)).astype(np.float32)
    positions = np.array([[0, 4, -1, 8], [1, 20, 3, 2], [7, 5, 6, 0]], np.int32)
    axes = np.array([0, 1, 2, 2, 1, 0], np.int32)
    rows = np.zeros((1, 4, 6), dtype)
    KERNELS.mrope_rotary_rows(positions, axes, table, rows)
    for token in range(4):
        for column in range(6):
            position = min(max(int(positions[axes[column], token]), 0), 8)
            value = table[position, column : column + 1]
            expected = bfloat16_bits(value) if dtype is np.uint16 else value.astype(dtype)
            assert rows[0, token, column] == expected[0]


def test_three_equal_positions_are_a_plain_rotary_row() -> None:
    random = np.random.default_rng(5)
    table = random.standard_normal((40, 16)).astype(np.float32)
    positions = np.tile(np.arange(5, 12, dtype=np.int32), (3, 1))
    rows = np.zeros((1, 7, 16), np.float32)
    KERNELS.mrope_rotary_rows(positions, random.integers(0, 3, 16).astype(np.int32), table, rows)
    np.testing.assert_array_equal(rows[0], table[5:12])


def test_sections_name_the_axes_of_the_frequencies() -> None:
    config = DecoderConfig("x", 9, 9, 9, 1, 1, 1, 16, 9, 1e-5, 10000.0, 16, "float32", True, mrope_section=(2, 3, 3))
    assert mrope_axes(config).tolist() == [0, 0, 1, 1, 1, 2, 2, 2] * 2
    interleaved = DecoderConfig(
        "x", 9, 9, 9, 1, 1, 1, 16, 9, 1e-5, 1e4, 16, "float32", True, mrope_section=(4, 2, 2), mrope_interleaved=True
    )
    assert mrope_axes(interleaved).tolist() == [0, 1, 2, 0, 1, 2, 0, 0] * 2


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(KernelError, match="target has shape"):
        KERNELS.insert_image_rows(
            np.zeros((2, 3), np.float32), np.zeros((1, 4), np.int32), np.zeros((1, 4, 5), np.float32),
            np.zeros(1, np.int32), IMAGE, 0,
        )  # fmt: skip
    with pytest.raises(KernelError, match="axes has shape"):
        KERNELS.mrope_rotary_rows(
            np.zeros((3, 4), np.int32), np.zeros((1, 6), np.int32), np.zeros((9, 6), np.float32),
            np.zeros((1, 4, 6), np.float32),
        )  # fmt: skip
