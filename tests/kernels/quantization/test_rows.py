"""Rows of KV caches in 8 bits: the definition itself, and attention over them against float64 on the rows as read."""

from __future__ import annotations

import numpy as np
import pytest
from decode_twins import NumpyDecodeKernels
from prefill_twin import NumpyPrefill

from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.model.operations import Scoring
from edgellm.kernels.decode.contract import AttentionStep, AttentionWeights
from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.contract import KeyValueRows, RowScales
from edgellm.kernels.quantization.rows import quantize_rows

RANDOM = np.random.default_rng(8)
BATCH, KV_HEADS, GROUP, SIZE, ROWS = 2, 2, 3, 16, 40


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_a_row_is_rounded_to_the_nearest_of_127_steps_ties_to_even() -> None:
    rows, scales = quantize_rows(np.asarray([[0.5, 1.5, 2.5, -0.5, -1.5, 127.0, -126.6, 3.49]], np.float32))
    assert scales.tolist() == [[1.0]] and rows.dtype == np.int8 and scales.dtype == np.float32
    assert rows.tolist() == [[0, 2, 2, 0, -2, 127, -127, 3]]


def test_the_largest_element_is_127_and_no_other_is_off_by_more_than_half_a_step() -> None:
    x = normal(1000, 64) * np.exp(4 * normal(1000, 1))
    rows, scales = quantize_rows(x)
    assert (np.abs(rows.astype(int)).max(axis=1) == 127).all()
    assert (scales == np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).all()
    assert (np.abs(rows * scales.astype(np.float64) - x) <= 0.5000001 * scales).all()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1.4e-36])
def test_rows_too_small_for_a_scale_are_zeros(largest: float) -> None:
    rows, scales = quantize_rows(np.asarray([[largest, -largest / 2, 0]], np.float32))
    assert not rows.any() and scales.tolist() == [[0.0]]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_reads_a_row_that_is_not_finite_is_nan(wrong: float) -> None:
    with np.errstate(invalid="ignore"):
        rows, scales = quantize_rows(np.asarray([[1, wrong, 2], [3, 4, 5]], np.float32))
        assert np.isnan(rows[0] * scales[0]).all() and np.isfinite(rows[1] * scales[1]).all()
    assert not rows[0].any()


class Cache:
    """KV rows of int8 with their scales, and what they stand for in float64."""

    def __init__(self) -> None:
        self.rows = [np.zeros((BATCH, KV_HEADS, ROWS, SIZE), np.int8) for _ in "kv"]
        self.scales = [np.zeros((BATCH, KV_HEADS, ROWS, 1), np.float32) for _ in "kv"]
        for rows, scales in zip(self.rows, self.scales, strict=True):
            rows[...], scales[...] = quantize_rows(normal(*rows.shape))

    def read(self) -> list[np.ndarray]:
        return [rows * scales.astype(np.float64) for rows, scales in zip(self.rows, self.scales, strict=True)]


def reference(query: np.ndarray, cache: Cache, seen: np.ndarray, scale: float) -> np.ndarray:
    """[B, T, n D] float64 of queries [B, T, n, D] over the rows that `seen` [B, T, rows] names."""
    keys, values = cache.read()
    result = np.zeros(query.shape)
    for b, t, head in np.ndindex(*query.shape[:3]):
        kept = seen[b, t]
        scores = keys[b, head // GROUP][kept] @ query[b, t, head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        result[b, t, head] = weights / weights.sum() @ values[b, head // GROUP][kept]
    return result.reshape(*query.shape[:2], -1)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("wide", [False, True])
def test_operations_attend_to_rows_as_they_are_read_back(tokens: int, wide: bool) -> None:
    cache, starts, operations = Cache(), np.asarray([7, 20], np.int32), NumpyOperations({}, {}, wide)
    dtype = np.float64 if wide else np.float32
    query, key, value = (normal(BATCH, heads, tokens, SIZE).astype(dtype) for heads in (GROUP * KV_HEADS, 2, 2))
    for rows, scales, update in zip(cache.rows, cache.scales, (key, value), strict=True):
        assert operations.kv_cache_update(rows, update, starts, scales) is rows
        for b, start in enumerate(starts):
            expected = quantize_rows(update[b])
            assert (rows[b, :, start : start + tokens] == expected[0]).all()
            assert (scales[b, :, start : start + tokens] == expected[1]).all()
    seen = np.arange(ROWS) <= starts[:, None, None] + np.arange(tokens)[:, None]
    found = operations.attention(query, (*cache.rows, *cache.scales), seen[:, None], Scoring(0.25))
    expected = reference(query.transpose(0, 2, 1, 3), cache, seen, 0.25)
    found = found.transpose(0, 2, 1, 3).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, atol=1e-12 if wide else 1e-5)


def test_the_twin_of_decode_attention_sees_a_tree_as_it_is_kept() -> None:
    cache, starts, tokens = Cache(), np.asarray([9, 30], np.int32), 6
    tree = np.tril(RANDOM.random((tokens, tokens)) < 0.5) | np.eye(tokens, dtype=bool)
    qkv, context = (
        normal(BATCH * tokens, (GROUP + 2) * KV_HEADS * SIZE),
        np.zeros((BATCH * tokens, 6 * SIZE), np.float32),
    )
    seen = np.zeros((BATCH, tokens, ROWS), bool)
    for b, start in enumerate(starts):
        seen[b, :, :start], seen[b, :, start : start + tokens] = True, tree
    step = AttentionStep(
        np.zeros((BATCH, tokens, 0), np.float32), starts, seen[:, None], *cache.rows, False, *cache.scales
    )
    weights = AttentionWeights(None, None, 0.0, 0.0, 0.25, rotary=False)
    NumpyDecodeKernels().attention(qkv, weights, step, None, context)()
    heads = qkv.reshape(BATCH, tokens, -1, SIZE)
    kept = quantize_rows(heads[:, :, -4:-2].swapaxes(1, 2))
    for b, start in enumerate(starts):
        assert (cache.rows[0][b, :, start : start + tokens] == kept[0][b]).all()
    expected = reference(heads[:, :, :6], cache, seen, 0.25)
    np.testing.assert_allclose(context.reshape(expected.shape), expected, atol=1e-5)


def test_the_twin_of_prefill_reads_its_own_rows_as_they_are_kept() -> None:
    cache, starts, tokens, kernels = Cache(), np.asarray([0, 11], np.int32), 24, NumpyPrefill()
    qkv, context = normal(BATCH, tokens, (GROUP + 2) * KV_HEADS * SIZE), np.zeros((BATCH, tokens, 6 * SIZE), np.float32)
    rows, scales = KeyValueRows(*cache.rows, starts), RowScales(*cache.scales)
    queries = np.empty_like(context)
    kernels.prepare_heads(qkv, None, None, rows, scales, None, queries)()
    kernels.causal_attention(queries, rows, 0.25, context, scales)()
    heads = qkv.reshape(BATCH, tokens, -1, SIZE)
    seen = np.arange(ROWS) <= starts[:, None, None] + np.arange(tokens)[:, None]
    np.testing.assert_allclose(context, reference(heads[:, :, :6], cache, seen, 0.25), atol=1e-5)
    with pytest.raises(KernelError, match="KV caches of int8 without scales"):
        kernels.prepare_heads(qkv, None, None, rows, None, None, queries)
    with pytest.raises(KernelError, match="KV caches of float32 with scales"):
        wide = KeyValueRows(*(np.zeros(each.shape, np.float32) for each in cache.rows), starts)
        kernels.causal_attention(queries, wide, 0.25, context, scales)
