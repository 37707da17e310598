"""Rounding to integers, against a search that tries everything in the plainest way."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engines.quantizer.arithmetic import NUMPY
from edgellm.engines.quantizer.rounding import BLIND_CLIPPING, CLIPPING, quantize_rows, rounded, unbiased
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

COLUMNS = 96


def codes_of(weights: np.ndarray, scale: float, zero: int, bits: int) -> list[int]:
    return [min(max(round(float(value) / scale) + zero, 0), (1 << bits) - 1) for value in weights]


def error_of(weights: np.ndarray, scale: float, zero: int, bits: int, factor: np.ndarray) -> float:
    values = np.array([(code - zero) * scale for code in codes_of(weights, scale, zero, bits)])
    return float(np.square((values - weights.astype(np.float64)) @ factor).sum())


def least_error(weights: np.ndarray, format: WeightFormat, factor: np.ndarray) -> float:
    """Over every share of the clipping with either sign or, with zero points, the nearest and its neighbours."""
    bits = format.bits
    last, errors = (1 << bits) - 1, []
    low, high = min(float(weights.min()), 0.0), max(float(weights.max()), 0.0)
    for share in CLIPPING:
        if not format.zeros:
            largest = np.float32(np.abs(weights).max()) / np.float32((1 << bits - 1) - 1)
            scale = float(rounded(np.array([largest * np.float32(share)]), format.dtype)[0])
            errors += [error_of(weights, each, 1 << bits - 1, bits, factor) for each in (scale, -scale)]
            continue
        largest = (np.float32(high) - np.float32(low)) / np.float32(last)
        scale = float(rounded(np.array([largest * np.float32(share)]), format.dtype)[0])
        zero = round(-low * share / scale)
        errors += [error_of(weights, scale, min(max(zero + step, 0), last), bits, factor) for step in (-1, 0, 1)]
    return min(errors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("codes", "group"), [("int4", 32), ("int8", None)])
@pytest.mark.parametrize("kind", ["none", "diagonal", "whole"])
def test_each_group_has_the_least_error_that_there_is(
    codes: Codes, group: int | None, zeros: bool, dtype: str, kind: str
) -> None:
    random, format = np.random.default_rng(5), WeightFormat(codes, group, zeros, dtype)
    weights = random.standard_normal((3, COLUMNS)).astype(np.float32) + np.float32(0.4)
    size = group or COLUMNS
    counts = COLUMNS // size
    factors = None
    matrices = np.broadcast_to(np.eye(size), (counts, size, size))
    if kind == "diagonal":
        factors = random.random(COLUMNS).astype(np.float32) * 3
        matrices = np.stack([np.diag(part) for part in factors.reshape(counts, size)])
    elif kind == "whole":
        matrices = factors = random.standard_normal((counts, size, size)).astype(np.float32)
    packed = quantize_rows(weights, format, factors)
    assert packed.codes.dtype == np.uint8 and packed.scales.shape == (3, counts)
    assert (packed.zeros is None) == (not zeros)
    for row in range(3):
        for place in range(counts):
            part = slice(place * size, (place + 1) * size)
            scale = float(packed.scales[row, place])
            zero = 1 << format.bits - 1 if packed.zeros is None else int(packed.zeros[row, place])
            assert packed.codes[row, part].tolist() == codes_of(weights[row, part], scale, zero, format.bits)
            found = error_of(weights[row, part], scale, zero, format.bits, matrices[place])
            expected = least_error(weights[row, part], format, matrices[place])
            assert found <= expected * (1 + 1e-4)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("codes", "group"), [("int4", 32), ("int8", None)])
@pytest.mark.parametrize("kind", ["none", "diagonal", "whole"])
def test_unbiased_scales_leave_no_error_along_the_weights(
    codes: Codes, group: int | None, zeros: bool, kind: str
) -> None:
    """Heavy tails, which the search clips: without them values are shorter than the weights."""
    random, format = np.random.default_rng(6), WeightFormat(codes, group, zeros, "float32")
    weights = random.standard_t(4, (300, COLUMNS)).astype(np.float32)
    weights[5] = 0
    size = group or COLUMNS
    factors, matrices = None, np.broadcast_to(np.eye(size), (COLUMNS // size, size, size))
    if kind == "diagonal":
        factors = random.random(COLUMNS).astype(np.float32) * 3
        matrices = np.stack([np.diag(part) for part in factors.reshape(-1, size)])
    elif kind == "whole":
        matrices = factors = random.standard_normal((COLUMNS // size, size, size)).astype(np.float32)
    searched = quantize_rows(weights, format, factors)
    packed = unbiased(weights, searched, factors)
    assert np.array_equal(packed.codes, searched.codes)

    def products(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        seen = np.einsum("rgk,gkl->rgl", values.reshape(300, -1, size).astype(np.float64), matrices)
        wanted = np.einsum("rgk,gkl->rgl", weights.reshape(300, -1, size).astype(np.float64), matrices)
        return (seen * wanted).sum(-1), (wanted * wanted).sum(-1)

    before, whole = products(searched.values())
    after, _ = products(packed.values())
    np.testing.assert_allclose(after, whole, rtol=1e-5)
    assert codes == "int8" or before.sum() < whole.sum() * 0.997
    larger = np.square(packed.values() - weights).sum() / np.square(searched.values() - weights).sum()
    assert larger < 1.05


def test_without_activations_large_weights_are_clipped_less() -> None:
    """They often stand where large inputs do."""
    weights = np.random.default_rng(7).standard_t(4, (300, COLUMNS)).astype(np.float32)
    format = WeightFormat("int4", 32, False, "float32")
    largest = np.abs(weights).reshape(300, -1, 32).max(-1) / 7
    found = NUMPY.quantize_rows(weights, format)
    expected = unbiased(weights, quantize_rows(weights, format, clipping=BLIND_CLIPPING))
    assert np.array_equal(found.scales, expected.scales) and np.array_equal(found.codes, expected.codes)
    assert (
        (np.abs(quantize_rows(weights, format).scales) / largest).min() < 0.8 < (np.abs(found.scales) / largest).min()
    )


def test_ties_go_to_even_codes() -> None:
    weights = np.array([[7, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -7] * 4], np.float32)
    packed = quantize_rows(weights, WeightFormat("int4", 32, False, "float16"), clipping=(1.0,))
    assert packed.scales.tolist() == [[1.0]]  # not -1, which is as good and comes later
    assert (packed.codes[0, :8].astype(int) - 8).tolist() == [7, 0, 2, 2, 0, -2, -2, -7]


def test_the_largest_weight_may_take_the_lowest_code_whatever_its_sign() -> None:
    weights = np.array([[8] + [-7, 7, 3, 0] * 7 + [1, 2, 5], [-8] + [-7, 7, 3, 0] * 7 + [1, 2, 5]], np.float32)
    packed = quantize_rows(weights, WeightFormat("int4", 32, False, "float16"))
    assert packed.codes[:, 0].tolist() == [0, 0] and packed.scales.tolist() == [[-1.0], [1.0]]
    assert np.array_equal(packed.values(), weights)


def test_zero_points_stay_within_the_codes() -> None:
    """Weights that are all above, or all below, 0 have their zero at an end."""
    random = np.random.default_rng(1)
    weights = (1 + random.random((2, 64)) * 0.1).astype(np.float32) * np.array([[1], [-1]], np.float32)
    packed = quantize_rows(weights, WeightFormat("int4", 64, True, "float32"))
    assert packed.zeros is not None and packed.zeros.tolist() == [[0], [15]]
    assert np.abs(packed.values() - weights).max() < 0.07


def test_groups_of_zeros_and_of_tiny_values() -> None:
    weights = np.zeros((2, 64), np.float32)
    weights[1, :32] = 1e-7
    for zeros in (False, True):
        packed = quantize_rows(weights, WeightFormat("int4", 32, zeros, "float16"))
        assert (packed.scales != 0).all() and np.isfinite(packed.scales).all()
        assert (packed.values()[0] == 0).all() and np.abs(packed.values() - weights).max() <= 1e-7


def test_a_row_is_the_same_among_others() -> None:
    """Rows and groups are computed in blocks: where these end does not matter."""
    random = np.random.default_rng(2)
    weights = random.standard_normal((700, 256)).astype(np.float32)
    factors = np.square(random.standard_normal(256)).astype(np.float32)
    for format in (WeightFormat("int4", 128, True, "bfloat16"), WeightFormat("int8", None, False, "bfloat16")):
        whole = quantize_rows(weights, format, factors)
        for row in (0, 511, 512, 699):
            alone = quantize_rows(weights[row : row + 1], format, factors)
            assert np.array_equal(whole.codes[row], alone.codes[0]) and np.array_equal(
                whole.scales[row], alone.scales[0]
            )


def test_a_group_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 64 do not divide 96 columns"):
        quantize_rows(np.zeros((1, 96), np.float32), WeightFormat("int4", 64, False, "float16"))
