"""Each operation of the NumPy interpreter against its formula written out in float64."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest

from edgellm.engines.backends import numpy_operations
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.errors import EngineError
from edgellm.engines.model.operations import Scoring

RANDOM = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.fixture
def operations() -> NumpyOperations:
    return NumpyOperations({}, {})


@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 5, 7), (3, 1, 7), (2, 4, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(operations: NumpyOperations, shape: tuple[int, ...], with_bias: bool) -> None:
    x, weight, bias = normal(*shape), normal(6, 7), normal(6) if with_bias else None
    found = operations.linear(x, weight, bias)
    expected = np.einsum("btk,nk->btn", x.astype(np.float64), weight) + (0 if bias is None else bias)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert found.shape == (*shape[:2], 6)
    assert found.dtype == np.float32
    assert found.flags.c_contiguous


@pytest.mark.parametrize("shape", [(1, 5), (700, 3001), (3001, 700), (2, 300_000), (3, 9000)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_of_large_weights_are_shared_by_threads(
    shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two megabytes two share them here; rows that are too long for it are multiplied as before."""
    monkeypatch.setattr(numpy_operations, "_BYTES_OF_THREAD", 1 << 20)
    x, weight, bias = normal(1, 1, shape[1]), normal(*shape), normal(shape[0])
    found = NumpyOperations({}, {}, threads=threads).linear(x, weight, bias)
    assert (found.shape, found.dtype, found.flags.c_contiguous) == ((1, 1, shape[0]), np.float32, True)
    np.testing.assert_allclose(found[0, 0], weight.astype(np.float64) @ x[0, 0] + bias, rtol=0, atol=2e-3)


def test_a_process_that_was_forked_has_threads_of_its_own() -> None:
    code = """
import os
import numpy as np
from edgellm.engines.backends.numpy_operations import NumpyOperations
operations, weight = NumpyOperations({}, {}, threads=2), np.ones((16384, 1024), np.float32)
assert (operations.linear(weight[:1], weight) == 1024).all()
child = os.fork()
if child == 0:
    os._exit(int(operations.linear(weight[:1], weight)[0, 0] == 1024))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8), (2, 4, 3, 8)])
def test_rms_norm(operations: NumpyOperations, shape: tuple[int, ...]) -> None:
    x, weight = normal(*shape), normal(8)
    before = x.copy()
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 0.1) * weight
    found = operations.rms_norm(x, weight, 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(x, before)


def test_rms_norm_of_zeros_is_zero(operations: NumpyOperations) -> None:
    for shape in ((1, 1, 4), (1, 2, 4)):
        np.testing.assert_array_equal(operations.rms_norm(np.zeros(shape, np.float32), normal(4), 1e-6), 0)


def test_split_and_concatenate(operations: NumpyOperations) -> None:
    x = normal(2, 6, 3, 4)
    for axis in (1, -3):
        parts = operations.split(x, (3, 1, 2), axis)
        assert [part.shape[1] for part in parts] == [3, 1, 2]
        np.testing.assert_array_equal(operations.concatenate(parts, axis), x)


def test_heads(operations: NumpyOperations) -> None:
    x = normal(2, 3, 20)
    heads = operations.split_heads(x, 4)
    assert heads.shape == (2, 4, 3, 5)
    for head in range(4):
        np.testing.assert_array_equal(heads[:, head], x[..., head * 5 : head * 5 + 5])
    np.testing.assert_array_equal(operations.merge_heads(heads), x)


@pytest.mark.parametrize("rotated", [8, 6])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3)])
def test_rotary_embedding(operations: NumpyOperations, rotated: int, batch: int, tokens: int) -> None:
    heads, size, half = 3, 8, rotated // 2
    angles = RANDOM.uniform(0, 7, (batch, tokens, half))
    cos_sin = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
    x = operations.split_heads(normal(batch, tokens, heads * size), heads)
    expected = x.astype(np.float64)
    for index in np.ndindex(batch, heads, tokens):
        b, _, t = index
        for j in range(half):
            pair = complex(x[index][j], x[index][j + half]) * complex(
                math.cos(angles[b, t, j]), math.sin(angles[b, t, j])
            )
            expected[index][j], expected[index][j + half] = pair.real, pair.imag
    np.testing.assert_allclose(operations.rotary_embedding(x, cos_sin), expected, atol=1e-6)


def test_kv_cache_update_writes_in_place(operations: NumpyOperations) -> None:
    cache = np.zeros((2, 3, 10, 4), np.float32)
    update = normal(2, 3, 2, 4)
    assert operations.kv_cache_update(cache, update, np.asarray([8, 0], np.int32)) is cache
    np.testing.assert_array_equal(cache[0, :, 8:], update[0])
    np.testing.assert_array_equal(cache[1, :, :2], update[1])
    assert np.count_nonzero(cache) == update.size


@pytest.mark.parametrize("start", [-1, 9, 2**31 - 1])
def test_kv_cache_update_outside_of_the_cache(operations: NumpyOperations, start: int) -> None:
    cache = np.zeros((1, 1, 10, 4), np.float32)
    with pytest.raises(EngineError, match="KV cache of 10 rows"):
        operations.kv_cache_update(cache, normal(1, 1, 2, 4), np.asarray([start], np.int32))
    assert not cache.any()


def reference_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One query at a time, over the keys that it sees."""
    batch, heads, tokens, size = query.shape
    result = np.zeros(query.shape)
    for b, h, t in np.ndindex(batch, heads, tokens):
        kv_head = h // (heads // keys.shape[1])
        seen = np.flatnonzero(mask[b, 0, t])
        scores = keys[b, kv_head, seen].astype(np.float64) @ query[b, h, t] / math.sqrt(size)
        weights = np.exp(scores - scores.max())
        result[b, h, t] = weights / weights.sum() @ values[b, kv_head, seen].astype(np.float64)
    return result


MASKS = {
    "causal": lambda b, t, j: j <= 4 + 2 * b + t,
    "from the first row": lambda b, t, j: j <= t,
    "everything": lambda b, t, j: True,
    "a tree": lambda b, t, j: j < 3 or (j - 3 <= t and (j - 3) % 2 == t % 2),
    "a window": lambda b, t, j: 2 + t <= j <= 5 + t,
    "one key": lambda b, t, j: j == 6,
}


@pytest.mark.parametrize("mask_name", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention(
    operations: NumpyOperations, mask_name: str, batch: int, tokens: int, heads: int, kv_heads: int
) -> None:
    size, key_range, rows = 6, 11, 16
    query = operations.split_heads(normal(batch, tokens, heads * size), heads)
    keys, values = normal(batch, kv_heads, rows, size), normal(batch, kv_heads, rows, size)
    keys[:, :, key_range:] = values[:, :, key_range:] = np.nan  # beyond the key range nothing may be read
    mask = np.zeros((batch, 1, tokens, key_range), bool)
    for index in np.ndindex(mask.shape):
        b, _, t, j = index
        mask[index] = MASKS[mask_name](b, t, j)
    found = operations.attention(query, (keys, values), mask, Scoring(size**-0.5))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference_attention(query, keys, values, mask), atol=1e-5)


def test_attention_with_large_scores(operations: NumpyOperations) -> None:
    query, keys, values = normal(1, 2, 3, 4) * 1e4, normal(1, 1, 8, 4) * 100, normal(1, 1, 8, 4)
    mask = np.ones((1, 1, 3, 8), bool)
    found = operations.attention(query, (keys, values), mask, Scoring(0.5))
    np.testing.assert_allclose(found, reference_attention(query, keys, values, mask), atol=1e-5)


def test_a_mask_that_hides_everything_is_an_error(operations: NumpyOperations) -> None:
    for tokens in (1, 2):
        mask = np.zeros((1, 1, tokens, 8), bool)
        with pytest.raises(EngineError, match="hides every key"):
            operations.attention(normal(1, 2, tokens, 4), [normal(1, 1, 8, 4)] * 2, mask, Scoring(0.5))


def test_an_input_that_was_filled_anew_is_read_anew() -> None:
    mask, cos_sin = np.zeros((1, 1, 1, 8), bool), np.zeros((1, 1, 4), np.float32)
    operations = NumpyOperations({"attention_mask": mask, "rope_rotary_cos_sin": cos_sin}, {})
    query, keys, values = normal(1, 2, 1, 4), normal(1, 1, 8, 4), normal(1, 1, 8, 4)
    for length in (3, 5, 2, 8):
        mask[...] = np.arange(8) < length
        bound = operations.input("attention_mask", (1, 1, 1, 8), "bool")
        found = operations.attention(query, (keys, values), bound, Scoring(0.5))
        np.testing.assert_allclose(found, reference_attention(query, keys, values, mask), atol=1e-6)
        cos_sin[...] = length
        bound = operations.input("rope_rotary_cos_sin", (1, 1, 4), "compute")
        turned = operations.rotary_embedding(np.ones((1, 2, 1, 4), np.float32), bound)
        np.testing.assert_array_equal(turned[0, 0, 0], [0, 0, 2 * length, 2 * length])


def test_gated(operations: NumpyOperations) -> None:
    gate_up = np.concatenate((np.linspace(-300, 300, 64), RANDOM.standard_normal(64))).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = operations.gated(np.stack((gate_up, gate_up))[None], "silu")
    gate, up = gate_up[:64].astype(np.float64), gate_up[64:]
    expected = gate / (1 + np.exp(-gate)) * up
    assert found.shape == (1, 2, 64)
    np.testing.assert_allclose(found[0, 1], expected, rtol=1e-6, atol=1e-30)


def test_scale(operations: NumpyOperations) -> None:
    x = normal(2, 3, 4)
    found = operations.scale(x, 0.22)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, x.astype(np.float64) * 0.22, rtol=1e-6)


def test_rms_norm_with_an_offset(operations: NumpyOperations) -> None:
    x, weight = normal(2, 3, 4), normal(4)
    np.testing.assert_array_equal(operations.rms_norm(x, weight, 0.1, 1.0), operations.rms_norm(x, weight + 1, 0.1))


def test_gather_rows(operations: NumpyOperations) -> None:
    x = normal(2, 5, 3)
    rows = np.asarray([[4, 0, 4], [1, 2, 3]], np.int32)
    expected = np.stack([x[b, rows[b]] for b in range(2)])
    np.testing.assert_array_equal(operations.gather_rows(x, rows), expected)
    for row in (-1, 5):
        with pytest.raises(EngineError, match=f"{row}"):
            operations.gather_rows(x, np.asarray([[row], [0]], np.int32))


def test_inputs_and_weights_are_checked() -> None:
    bindings, weights = {"x": normal(1, 2)}, {"w": normal(3, 2)}
    operations = NumpyOperations(bindings, weights)
    assert operations.input("x", (1, 2), "compute") is bindings["x"]
    assert operations.input("x", [1, 2], "float32") is bindings["x"]
    assert operations.weight("w", (3, 2)) is weights["w"]
    with pytest.raises(EngineError, match=r"'y' is not bound: expected int32 \[4\]"):
        operations.input("y", (4,), "int32")
    with pytest.raises(EngineError, match=r"'x' has the shape \[1, 2\], expected \[2, 1\]"):
        operations.input("x", (2, 1), "compute")
    with pytest.raises(EngineError, match="'x' is float32, expected bool"):
        operations.input("x", (1, 2), "bool")
    with pytest.raises(EngineError, match=r"'v' is missing: expected float32 \[3, 2\]"):
        operations.weight("v", (3, 2))
    with pytest.raises(EngineError, match=r"'w' has the shape \[3, 2\], expected \[2, 3\]"):
        operations.weight("w", (2, 3))


def test_outputs_fill_the_bound_array_or_are_bound() -> None:
    bound = np.zeros((1, 4), np.float32)
    bindings = {"logits": bound}
    operations = NumpyOperations(bindings, {})
    for _ in range(2):
        values, free = normal(1, 4), normal(2, 2)
        operations.output("logits", values)
        operations.output("hidden_states", free)
        assert bindings["logits"] is bound
        np.testing.assert_array_equal(bound, values)
        assert bindings["hidden_states"] is free
    with pytest.raises(EngineError, match=r"'logits' is bound to float32 \[1, 4\], expected float32 \[2, 2\]"):
        operations.output("logits", normal(2, 2))


def test_a_cache_is_its_own_output_even_after_another_was_bound() -> None:
    first, second = normal(1, 1, 4, 2), normal(2, 1, 4, 2)
    bindings: dict[str, np.ndarray] = {}
    operations = NumpyOperations(bindings, {})
    operations.output("present_k_cache_0", first)
    kept = first.copy()
    operations.output("present_k_cache_0", second)
    assert bindings["present_k_cache_0"] is second
    np.testing.assert_array_equal(first, kept)
    bindings = {"present_k_cache_0": first[:]}
    NumpyOperations(bindings, {}).output("present_k_cache_0", first)
    assert bindings["present_k_cache_0"] is not first
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 3, 8)])
def test_layer_norm(operations: NumpyOperations, shape: tuple[int, ...]) -> None:
    x, weight, bias = normal(*shape) + 3, normal(8), normal(8)
    before = x.copy()
    exact = x.astype(np.float64)
    spread = exact - exact.mean(-1, keepdims=True)
    expected = spread / np.sqrt((spread**2).mean(-1, keepdims=True) + 0.1) * weight + bias
    found = operations.layer_norm(x, weight, bias, 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(x, before)


def test_layer_norm_of_equal_values_is_the_bias(operations: NumpyOperations) -> None:
    bias = normal(4)
    found = operations.layer_norm(np.full((1, 2, 4), 5, np.float32), normal(4), bias, 1e-6)
    np.testing.assert_array_equal(found, np.broadcast_to(bias, (1, 2, 4)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)) if x > -400 else 0.0,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(operations: NumpyOperations, kind: str) -> None:
    x = np.concatenate((np.linspace(-300, 300, 401), np.linspace(-6, 6, 2001), [0, 1e-6, -1e-6])).astype(np.float32)
    before = x.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = operations.activation(x.reshape(1, 5, -1), kind)
    expected = [ACTIVATIONS[kind](float(value)) for value in x]
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=2e-6, atol=2e-6)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(x, before)


def test_reshape_and_casts_keep_values(operations: NumpyOperations) -> None:
    x = normal(1, 6, 4)
    np.testing.assert_array_equal(operations.reshape(x, (3, 2, 4)), x.reshape(3, 2, 4))
    for cast in (operations.to_compute, operations.to_float32):
        np.testing.assert_array_equal(cast(x), x)


@pytest.mark.parametrize(("batch", "tokens", "heads"), [(1, 1, 2), (1, 5, 2), (3, 4, 2)])
@pytest.mark.parametrize("hidden", ["none", "last", "some", "absent"])
def test_attention_of_all_rows_to_each_other(
    operations: NumpyOperations, hidden: str, batch: int, tokens: int, heads: int
) -> None:
    """One row of the mask serves every query; without a mask every row is seen."""
    query, keys, values = (normal(batch, heads, tokens, 6) for _ in range(3))
    row = np.ones((batch, 1, 1, tokens), bool)
    if hidden == "last":
        row[..., max(1, tokens - 2) :] = False
    elif hidden == "some":
        row[..., 1::2] = False
        row[0, ..., tokens - 1] = True
    found = operations.attention(query, (keys, values), None if hidden == "absent" else row, Scoring(6**-0.5))
    mask = np.broadcast_to(row, (batch, 1, tokens, tokens))
    np.testing.assert_allclose(found, reference_attention(query, keys, values, mask), atol=1e-5)


def test_masks_of_several_kinds_take_turns(operations: NumpyOperations) -> None:
    """Layers with windows and layers without: what was made of one mask must not serve the other."""
    whole, windows = np.ones((1, 1, 1, 8), bool), np.ones((2, 1, 1, 4), bool)
    whole[..., 6:] = False
    windows[1, ..., 2:] = False
    x = normal(1, 2, 8, 6)
    apart = np.ascontiguousarray(x.reshape(2, 2, 4, 6))
    for _ in range(2):
        for tensor, mask in ((x, whole), (apart, windows)):
            found = operations.attention(tensor, (tensor, tensor), mask, Scoring(6**-0.5))
            wide = np.broadcast_to(mask, (tensor.shape[0], 1, tensor.shape[2], tensor.shape[2]))
            np.testing.assert_allclose(found, reference_attention(tensor, tensor, tensor, wide), atol=1e-5)
