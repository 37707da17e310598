"""The parameters of linear layers and attention, by their twins against formulas written out; and that they compose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from decode_twins import NumpyDecodeKernels, NumpyTiledKernels

from edgellm.kernels.decode.contract import (
    SQUARE_SUMS,
    AddedTo,
    AttentionStep,
    AttentionWeights,
    Kept,
    LinearWeights,
    NormedInput,
    padded_columns,
)
from edgellm.kernels.errors import KernelError

FEW, MANY = NumpyDecodeKernels(), NumpyTiledKernels()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@dataclass
class Layer:
    """Three rows of 24 columns, of which 8 to 24 count, and a layer of 10 outputs."""

    x = normal(3, 24)
    norm = 0.1 * normal(16)
    linear = LinearWeights(normal(10, 16), normal(10))


def normed_by_hand(row: np.ndarray, norm: np.ndarray, offset: float, epsilon: float) -> list[float]:
    mean = sum(float(value) ** 2 for value in row) / len(row)
    return [float(v) / math.sqrt(mean + epsilon) * (float(w) + offset) for v, w in zip(row, norm, strict=True)]


def test_an_offset_is_added_to_the_norm_and_a_scale_is_what_sums_are_multiplied_by():
    layer, output, kept = Layer(), np.empty((3, 10), np.float32), np.zeros((3, 32), np.float32)
    normed = NormedInput(layer.x, layer.norm, 1e-3, offset=1.0, first=8, width=16)
    FEW.norm_linear([normed], layer.linear, output, scale=0.25, kept=Kept(kept, 1))()
    for row in range(3):
        expected = np.array(normed_by_hand(layer.x[row, 8:], layer.norm, 1.0, 1e-3))
        sums = expected @ layer.linear.weight.T.astype(float) + layer.linear.bias
        np.testing.assert_allclose(output[row], 0.25 * sums, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kept[row], [*[0] * 16, *expected], rtol=1e-5, atol=1e-6)


def test_gelu_is_the_tanh_approximation():
    x, linear, output = normal(4, 8), LinearWeights(normal(12, 8)), np.empty((4, 6), np.float32)
    MANY.gate_up(x, linear, "gelu_tanh", output)()
    sums = x.astype(float) @ linear.weight.T.astype(float)
    for row, column in np.ndindex(4, 6):
        gate, up = sums[row, column], sums[row, column + 6]
        expected = 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        assert output[row, column] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    with pytest.raises(KernelError, match="no activation relu"):
        MANY.gate_up(x, linear, "relu", output)


def test_parts_side_by_side_with_a_copy_among_them_are_one_input_of_the_layer_that_follows():
    first, second, norm = normal(3, 40), normal(3, 24), normal(24)
    width = padded_columns(64)
    together, kept = np.full((3, width), np.nan, np.float32), np.empty((3, 40), np.float32)
    FEW.norm(NormedInput(first, None), together, kept=Kept(kept))()
    FEW.norm(NormedInput(second, norm, 1e-5), together, column=40)()
    np.testing.assert_array_equal(together[:, :40], first)
    np.testing.assert_array_equal(kept, first)
    assert not together[:, 64:].any()
    linear, one, two = LinearWeights(normal(8, 64)), *np.empty((2, 3, 8), np.float32)
    MANY.linear(together, linear, one)()
    inputs = [NormedInput(first, normal(40), 1e-5), NormedInput(second, norm, 1e-5)]
    FEW.norm_linear(inputs, linear, two)()
    both = np.concatenate((normed(inputs[0]), normed(inputs[1])), axis=1)
    np.testing.assert_allclose(two, both @ linear.weight.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(one, np.concatenate((first, normed(inputs[1])), axis=1) @ linear.weight.T, atol=1e-5)


def test_parts_are_normed_where_they_are():
    x, first, second = normal(3, 40), normal(24), normal(8)
    before = x.copy()
    parts = [NormedInput(before, first, 1e-3, 0.5, 0, 24), NormedInput(before, second, 1e-5, 0.0, 24, 8)]
    expected = [normed(part._replace(values=part.values[:, part.first : part.first + part.width])) for part in parts]
    FEW.norm_parts([part._replace(values=x) for part in parts])()
    np.testing.assert_allclose(x[:, :32], np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(x[:, 32:], before[:, 32:])


def test_parts_that_ranks_share_are_normed_by_the_squares_of_all():
    """Two ranks, which have the same second part: the first one alone counts it."""
    whole, weights, squares = normal(3, 56), (normal(32), normal(8)), np.full((2, 3, SQUARE_SUMS), np.nan, np.float32)
    parts = whole[:, :32], whole[:, 32:40]
    expected = [normed(NormedInput(x, weight, 1e-3, 1.0)) for x, weight in zip(parts, weights, strict=True)]
    ranks = [np.concatenate((whole[:, 16 * rank : 16 * rank + 16], whole[:, 32:]), axis=1) for rank in range(2)]
    for rank, x in enumerate(ranks):
        own = [NormedInput(x, None, first=0, width=16), NormedInput(x, None, first=16, width=8)]
        FEW.square_sums(own, (True, rank == 0), squares[rank])()
    assert not squares[:, :, 2:].any()
    for rank, x in enumerate(ranks):
        own = NormedInput(x, weights[0][16 * rank : 16 * rank + 16], 1e-3, 1.0, 0, 16)
        FEW.norm_parts([own, NormedInput(x, weights[1], 1e-3, 1.0, 16, 8)], squares=squares.sum(0), wholes=(32, 8))()
        np.testing.assert_allclose(x[:, :16], expected[0][:, 16 * rank : 16 * rank + 16], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(x[:, 16:24], expected[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(x[:, 24:], whole[:, 40:])


def test_columns_of_gemma4():
    x, queries, output = normal(3, 40), normal(3, 24), np.empty((3, 8), np.float32)
    before = x.copy()
    FEW.insert_columns(queries, x)()
    np.testing.assert_array_equal(x, np.concatenate((queries, before[:, 24:]), axis=1))
    gate, own, norm = normal(3, 8), normal(3, 40) * 2, 1 + 0.1 * normal(8)
    inputs = before.copy()
    FEW.token_inputs(inputs, own, norm, 1e-3, 0.5, 3.0)()
    parts = [normed(NormedInput(part, norm, 1e-3, 0.5)) for part in np.split(before, 5, axis=1)]
    np.testing.assert_allclose(inputs, (np.concatenate(parts, axis=1) + 3.0 * own) / math.sqrt(2), rtol=1e-5, atol=1e-5)
    FEW.token_gate(gate, "silu", NormedInput(inputs, None, first=16, width=8), output)()
    expected = gate / (1 + np.exp(-gate)) * inputs[:, 16:24]
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    residual, total, factor = normal(3, 8), np.empty((3, 8), np.float32), np.array([0.3], np.float32)
    FEW.norm_residual(NormedInput(before, norm, 1e-3, 0.0, 16, 8), residual, total, factor=factor)()
    expected = 0.3 * (residual + normed(NormedInput(before[:, 16:24], norm, 1e-3)))
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-5)


def test_what_an_input_is_added_to_first_is_another_launch_inside():
    given, residual, weight, norm, factor = normal(2, 16), normal(2, 16), normal(16), normal(16), normal(1)
    linear, apart, stream = LinearWeights(normal(8, 16)), *np.empty((2, 2, 16), np.float32)
    added = AddedTo(residual, stream, weight, 1e-3, 1.0, factor)
    through = NormedInput(normal(2, 40), None, first=16, width=8)
    FEW.norm_residual(NormedInput(given, weight, 1e-3, 1.0), residual, apart, factor=factor)()
    for own in (norm, None):
        found, kept, expected = (
            np.empty((2, 8), np.float32),
            np.empty((2, 16), np.float32),
            np.empty((2, 8), np.float32),
        )
        stream[...] = np.nan
        FEW.norm_linear([NormedInput(given, own, 1e-5, added=added)], linear, found, kept=Kept(kept, raw=True))()
        FEW.norm_linear([NormedInput(apart, own, 1e-5)], linear, expected)()
        for one, wanted in ((stream, apart), (kept, apart), (found, expected)):
            np.testing.assert_array_equal(one, wanted)
    stream[...], gate = np.nan, expected.copy()
    FEW.token_gate_linear(NormedInput(given, None, added=added), linear, "silu", through, found)()
    FEW.token_gate(gate, "silu", through, expected)()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(stream, apart)


def normed(part: NormedInput) -> np.ndarray:
    return np.array([normed_by_hand(row, part.weight, part.offset, part.epsilon) for row in part.values])


@pytest.mark.parametrize("kernels", [FEW, MANY], ids=["few", "many"])
def test_a_residual_is_not_scaled_and_may_be_missing(kernels):
    x, residual, linear = normal(3, 16), normal(3, 10), LinearWeights(normal(10, 16), normal(10))
    sums = x @ linear.weight.T + linear.bias
    output, kept = np.empty((3, 10), np.float32), np.empty((3, 10), np.float32)
    kernels.linear_residual(x, linear, residual, output, scale=0.5, kept=Kept(kept, raw=True))()
    np.testing.assert_allclose(output, residual + 0.5 * sums, atol=1e-6)
    np.testing.assert_array_equal(kept, residual)
    kernels.linear_residual(x, linear, None, output)()
    np.testing.assert_allclose(output, sums, atol=1e-6)


def test_rows_are_scaled_in_float32():
    x, output = normal(2, 3, 8), np.empty((6, 8), np.float32)
    FEW.scale_rows(x, 45.25483399593904, output)()
    np.testing.assert_array_equal(output, x.reshape(6, 8) * np.float32(45.25483399593904))


@pytest.mark.parametrize("rotary", [False, True])
def test_scores_have_the_layers_scale_and_heads_turn_only_where_it_says_so(rotary):
    qkv, cos_sin, context = normal(1, 24), np.array([[[0, 1]]], np.float32), np.empty((1, 8), np.float32)
    caches = [normal(1, 1, 6, 8), normal(1, 1, 6, 8) + 1]
    step = AttentionStep(cos_sin, np.array([5], np.int32), None, *caches)
    weights = AttentionWeights(np.zeros(8, np.float32), np.ones(8, np.float32), 0.0, 1.0, 0.3, rotary)
    launch = FEW.attention(qkv, weights, step, None, context)
    launch.overlap_previous()
    launch()
    query, key, value = qkv.reshape(3, 8)
    query = query / np.sqrt((query**2).mean())
    key = key / np.sqrt((key**2).mean()) * 2
    if rotary:  # by a quarter, of the first two elements
        for head in (query, key):
            head[0], head[1] = -head[1], head[0]
    keys, values = np.vstack((caches[0][0, 0, :5], key)), np.vstack((caches[1][0, 0, :5], value))
    shares = np.exp(0.3 * keys @ query)
    np.testing.assert_allclose(context[0], shares / shares.sum() @ values, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(caches[0][0, 0, 5], key, rtol=1e-5, atol=1e-6)
