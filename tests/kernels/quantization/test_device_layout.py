"""The layout in which kernels read weights of 4 to 8 bits: a weight comes back from it, and it is what they expect."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_weights import from_device_layout, to_device_layout
from packed_weights import GGUF_FORMATS, random_of, random_packed, rescaled, with_factors

from edgellm.kernels.bfloat16 import bfloat16_bits, float32_of
from edgellm.kernels.quantization.code_words import TURNS, UPPER_TURNS
from edgellm.kernels.quantization.device_layout import (
    SMALL_SCALE,
    DeviceLayout,
    _are_of,
    _bits,
    device_layout,
    layout_refusal,
)
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight, WeightFormat

#: Codes, group, zero points.
FORMATS: tuple[tuple[Codes, int | None, bool], ...] = (
    *(("int4", group, zeros) for group in (16, 32, 48, 64, 96, 128, 256, None) for zeros in (False, True)),
    *(("int8", group, zeros) for group in (16, 64, 128, None) for zeros in (False, True)),
    *(("fp8", group, False) for group in (64, 128, None)),
    ("fp4", 16, False),
)


def came_back(layout: DeviceLayout, data: np.ndarray, weight: PackedWeight) -> None:
    """Asserts that a layout holds a weight."""
    assert (data.shape, data.dtype) == (layout.shape, np.uint8)
    found = from_device_layout(layout, data)
    assert found.format == weight.format
    np.testing.assert_array_equal(found.codes, weight.codes)
    np.testing.assert_array_equal(found.scales, weight.scales)
    for name in ("zeros", "minima"):
        given, own = getattr(weight, name), getattr(found, name)
        assert (own is None) == (given is None)
        if given is not None:
            np.testing.assert_array_equal(own, given)
    assert (found.levels is None) == (weight.levels is None)
    for own, given in zip(found.levels or (), weight.levels or (), strict=True):
        assert own.dtype == given.dtype
        np.testing.assert_array_equal(own, given)


@pytest.mark.parametrize("others", [[], [0.0], [-1.0], [2.0**-15], [1 + 2.0**-20], [65519.0]])
def test_scales_of_16_bits_are_seen_and_rounded_as_others_are(others: list[float]) -> None:
    """All numbers that a dtype has, by themselves and beside one that is not seen to be of it."""
    beside = np.array(others, np.float32)
    halves = np.concatenate([np.arange(0x400, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32), beside])
    assert _are_of("float16", halves) == (not others)
    np.testing.assert_array_equal(_bits(halves, "float16"), halves.astype(np.float16).view(np.uint16))
    brains = np.concatenate([float32_of(np.arange(0x7F80, dtype=np.uint16)), beside])
    assert _are_of("bfloat16", brains) == (others not in ([1 + 2.0**-20], [65519.0]))
    np.testing.assert_array_equal(_bits(brains, "bfloat16"), bfloat16_bits(brains))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("codes", "group", "zeros"), FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(8, 128), (19, 520), (3, 8), (24, 2560)])
def test_a_weight_comes_back(rows: int, columns: int, codes: Codes, group: int | None, zeros: bool, dtype: str) -> None:
    for size in (0.01, 3.0):
        weight = random_packed(rows, columns, group, zeros, dtype, size, codes=codes)
        layout, data = to_device_layout(weight)
        assert layout.small == (size < 1 and (codes, dtype, zeros) == ("int4", "float16", False))
        came_back(layout, data, weight)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("codes", "group", "zeros"), FORMATS[::3])
def test_a_weight_of_another_dtype_comes_back(
    codes: Codes, group: int | None, zeros: bool, dtype: str, compute: str
) -> None:
    for scale_dtype in ("float16", "bfloat16", "float32"):
        weight = rescaled(random_packed(19, 520, group, zeros, dtype, codes=codes), scale_dtype)
        layout, data = to_device_layout(weight, compute)
        assert layout.compute == compute
        came_back(layout, data, weight)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", GGUF_FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(8, 128), (19, 544), (3, 32), (24, 2560)])
def test_a_weight_of_a_gguf_file_comes_back(rows: int, columns: int, kind: str, compute: str) -> None:
    format = GGUF_FORMATS[kind]
    for size in (0.01, 3.0):
        weight = random_of(format, rows, columns, size)
        layout, data = to_device_layout(weight, compute)
        came_back(layout, data, weight)
        # As much as is planned before scales are read.
        planned = DeviceLayout(format, rows, columns, dtype=compute, multiplied="float32")
        assert (layout.compute, layout.block_bytes) == (compute, planned.block_bytes)
        assert layout.small == ((kind, compute, size) == ("q4_0", "float16", 0.01))


@pytest.mark.parametrize("codes", ["int4", "int5", "int6"])
def test_minima_of_any_numbers_come_back(codes: Codes) -> None:
    format = WeightFormat(codes, 64, False, "float32", minima=True)
    weight = rescaled(random_of(format, 19, 520), "float32")
    layout, data = to_device_layout(weight, "float16")
    assert (layout.kind, layout.block_bytes) == ("wide", layout.code_bytes + 8 * 2 * 2 * 4)
    came_back(layout, data, weight)


@pytest.mark.parametrize("codes", TURNS)
def test_a_code_stands_where_the_kernels_look_for_it(codes: Codes) -> None:
    group = {"fp4": 16, "int5": 32, "int6": 32}.get(codes, 64)
    weight = random_packed(16, 256, group, False, "float16", codes=codes)
    layout, data = to_device_layout(weight)
    words = np.ascontiguousarray(data[..., : layout.code_bytes]).view(np.uint32)
    lower, upper = words[..., : 1024 // len(TURNS[codes])], words[..., 1024 // len(TURNS[codes]) :]
    for row, column in ((0, 0), (9, 1), (15, 255), (3, 134), (12, 70), (8, 100)):
        step, lane = column % 128 // 32, row % 8 * 4 + column % 32 // 8
        piece, place = (0, step) if len(TURNS[codes]) == 8 else (step // 2, step % 2 * 2 + column % 8 // 4)
        block = row // 8, column // 128
        found = [(lower[block].reshape(-1, 32, 4)[piece, lane, place], TURNS[codes][column % len(TURNS[codes])])]
        if upper.size:
            own, turns = upper[block].reshape(32, -1)[lane], UPPER_TURNS[codes]
            found.append((own[step * 8 // len(turns)], turns[(step * 8 + column % 8) % len(turns)]))
        code = 0
        for word, (low, turn, high, more) in found:
            code |= turned_right(int(word), turn) & low | turned_right(int(word), more) & high
        assert code == weight.codes[row, column]


def turned_right(word: int, bits: int) -> int:
    return word >> bits | word << 32 - bits


@pytest.mark.parametrize(("codes", "turns"), [*TURNS.items(), *UPPER_TURNS.items()])
def test_codes_of_a_word_share_no_bit(codes: Codes, turns: tuple[tuple[int, int, int, int], ...]) -> None:
    pieces = [piece for low, turn, high, more in turns for piece in ((low, turn), (high, more))]
    taken = [(bit + turn) % 32 for bits, turn in pieces for bit in range(8) if bits >> bit & 1]
    assert sorted(taken) == list(range(32))


def test_scales_and_zero_points_follow_the_codes() -> None:
    weight = random_packed(16, 256, 64, True, "float16")
    layout, data = to_device_layout(weight)
    own = np.ascontiguousarray(data[1, 1, layout.code_bytes :]).view(np.float16).reshape(8, 2, 2)
    np.testing.assert_array_equal(own[..., 0], weight.scales[8:, 2:])
    np.testing.assert_array_equal(own[..., 1], -16.0 - weight.zeros[8:, 2:])


def test_scales_of_groups_of_16_stand_by_halves_of_a_step() -> None:
    weight = rescaled(random_packed(8, 128, 16, False, "bfloat16", codes="fp4"), "float32")
    layout, data = to_device_layout(weight)
    own = np.ascontiguousarray(data[0, 0, layout.code_bytes :]).view(np.float32).reshape(8, 2, 4)
    np.testing.assert_array_equal(own, 2.0**14 * weight.scales.reshape(8, 4, 2).swapaxes(1, 2))


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("numbers", [(3.1e-4,), (0.0123, 0.5, 0.0071), (1 / 2000, 1 / 1500, 1 / 900)])
def test_scales_of_8_bits_and_their_factors_come_back(numbers: tuple[float, ...], divides: bool) -> None:
    numbers = tuple(1 / number for number in numbers) if divides else numbers
    weight = with_factors(random_packed(57, 1040, 16, False, "bfloat16", codes="fp4"), numbers, divides)
    assert (weight.scales == 0).any()
    layout, data = to_device_layout(weight, "float16")
    assert (layout.has_factors, layout.block_bytes) == (True, 512 + 8 * 16)
    assert layout.shape == replace(layout, factored=None).shape  # as planned without the scales
    came_back(layout, data, weight)
    own = np.ascontiguousarray(data[0, 0, 512:]).view(np.float32).reshape(8, 4)
    np.testing.assert_array_equal(
        own[:, :2], np.ascontiguousarray(data[0, 3, 512:]).view(np.float32).reshape(8, 4)[:, :2]
    )
    assert (own[:, 1] != 0).all() == divides


def test_scales_that_no_factors_give_are_kept_in_32_bits() -> None:
    for weight in (
        rescaled(random_packed(8, 128, 16, False, "bfloat16", codes="fp4"), "float32"),
        with_factors(random_packed(5, 128, 16, False, "bfloat16", codes="fp4"), (0.1, 0.2123, 0.3, 0.7, 0.9), False),
    ):
        layout, data = to_device_layout(weight)
        assert (layout.has_factors, layout.product) == (False, "float32")
        came_back(layout, data, weight)
    negative = with_factors(random_packed(8, 128, 16, False, "bfloat16", codes="fp4"), (0.1,), False)
    negative.scales[0] *= -1
    came_back(*to_device_layout(negative), negative)


def test_scales_are_small_up_to_where_two_to_the_eighteenth_of_them_is_finite() -> None:
    weight = random_packed(8, 128, 128, False, "float16")
    for factor, small in ((1.0, True), (-1.0, True), (1.001, False)):
        weight.scales[0, 0] = np.float16(SMALL_SCALE * factor)
        layout, data = to_device_layout(weight)
        assert layout.small is small
        assert np.isfinite(np.ascontiguousarray(data[..., layout.code_bytes :]).view(np.float16)).all()


@pytest.mark.parametrize(
    ("codes", "dtype", "compute", "scale", "product"),
    [
        ("int4", "float16", "float16", 0.25, "float16"),
        ("int4", "float16", "float16", 0.1, "float32"),
        ("int8", "float16", "bfloat16", 0.25, "float16"),
        ("int8", "float32", "bfloat16", 0.25, "bfloat16"),
        ("int8", "float32", "bfloat16", 0.1, "float32"),
        ("fp8", "float16", "float16", 255.0, "float16"),
        ("fp8", "float16", "float16", 256.0, "float32"),
        ("fp8", "bfloat16", "bfloat16", 255.0, "bfloat16"),
        ("fp8", "bfloat16", "bfloat16", 256.0, "float32"),
    ],
)
def test_products_are_of_the_dtype_that_holds_their_scales(
    codes: Codes, dtype: str, compute: str, scale: float, product: str
) -> None:
    weight = random_packed(8, 128, 16, False, dtype, codes=codes)
    weight.scales[:] = np.float32(scale)
    layout = device_layout(weight, compute)
    assert (layout.product, layout.compute) == (product, compute)
    assert layout.block_bytes == layout.code_bytes + 64 * (4 if product == "float32" else 2)


def test_what_kernels_do_not_take_is_refused() -> None:
    plain = WeightFormat("int4", 128, False, "float16")
    assert layout_refusal(plain, "float16") is None
    for changes, dtype, words in (({"group": 24}, "float16", "multiples of 16"), ({}, "float32", "not in float32")):
        assert words in (layout_refusal(replace(plain, **changes), dtype) or "")
