"""Attention within a window by the kernels' twins: against all rows written out, of every phase; and what is
refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_twins import NumpyDecodeKernels, attend, rotary_embedding
from prefill_twin import NumpyPrefill
from window_cases import CASES, EPSILON, WindowCase

from edgellm.kernels.decode.attention_geometries import AttentionShape, attention_geometry, attention_shared_bytes
from edgellm.kernels.decode.contract import MAX_TOKENS
from edgellm.kernels.decode.heads_twin import rms_norm
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.rows import quantize_rows


def heads_of(case: WindowCase, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values [B T, n, D] as they are attended with; of int8 keys and values as they are read."""
    parts = arrays["qkv"].reshape(len(arrays["qkv"]), -1, case.size)
    query, key, value = np.split(parts, (case.heads, case.heads + case.kv_heads), axis=1)
    if case.norm:
        query, key = (rms_norm(x, arrays[f"{n}_norm"], EPSILON, 1.0) for x, n in ((query, "q"), (key, "k")))
    turns = arrays["cos_sin"].reshape(len(query), -1)[:, case.before :]
    query, key = rotary_embedding(query, turns), rotary_embedding(key, turns)
    if case.int8:
        key, value = (np.multiply(*quantize_rows(x)) for x in (key, value))
    return query, key, value


def expected(case: WindowCase, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The context [B T, E], of keys that are put together one by one."""
    query, key, value = heads_of(case, arrays)
    rows = []
    for number in range(len(query)):
        b, t = divmod(number, case.tokens)
        start, own = case.starts[b], np.flatnonzero(arrays["mask"][b, 0, t, case.starts[b] :])
        kept = []
        for kind, new in (("k", key), ("v", value)):
            cache = arrays[f"{kind}_cache"][b] * (arrays[f"{kind}_scale"][b] if case.int8 else np.float32(1))
            before = [cache[:, position % case.rows] for position in range(max(0, start + 1 - case.window), start)]
            each = [*before, *(new[b * case.tokens + node] for node in own)][-case.window :]
            kept.append(np.stack(each, axis=1))
        grouped = query[number].reshape(case.kv_heads, case.group, case.size) * np.float32(case.size**-0.5)
        rows.append(attend(grouped, *kept).reshape(-1))
    return np.stack(rows)


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_trees_see_their_windows(name: str) -> None:
    case = CASES[name]
    arrays = case.arrays()
    wanted, before = expected(case, arrays), {key: array.copy() for key, array in arrays.items()}
    _, key, value = heads_of(case, arrays)
    context = np.full_like(wanted, np.nan)
    NumpyDecodeKernels().attention(arrays["qkv"], *case.bundles(arrays), None, context)()
    np.testing.assert_allclose(context, wanted, rtol=2e-5, atol=2e-5)
    for b, start in enumerate(case.starts):
        new, own = case.places(start, case.tokens), slice(b * case.tokens, (b + 1) * case.tokens)
        for kind, rows in (("k", key), ("v", value)):
            cache = arrays[f"{kind}_cache"][b]
            scales = arrays[f"{kind}_scale"][b][:, new] if case.int8 else np.float32(1)
            np.testing.assert_allclose((cache[:, new] * scales).swapaxes(0, 1), rows[own], rtol=1e-5, atol=1e-5)
            others = np.setdiff1d(np.arange(case.rows), new)
            np.testing.assert_array_equal(cache[:, others], before[f"{kind}_cache"][b][:, others])


@pytest.mark.parametrize("name", CASES)
def test_prompts_have_what_decode_steps_have(name: str) -> None:
    case = CASES[name]
    arrays = case.arrays(chain=True)
    wanted = expected(case, arrays)
    qkv = arrays["qkv"].reshape(len(case.starts), case.tokens, -1)
    context = np.full((len(case.starts), case.tokens, case.heads * case.size), np.nan, np.float32)
    case.prefill(NumpyPrefill(), arrays, qkv, np.empty_like(context), context)
    np.testing.assert_allclose(context.reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)


def test_rings_that_are_too_short_are_refused() -> None:
    for rows, tokens in ((100, 1), (64, 5)):
        case = replace(CASES["tile"], rows=rows, tokens=tokens, window=61)
        with pytest.raises(KernelError, match=f"a ring of {rows} rows for a window of 61 and {tokens} new tokens"):
            arrays = case.arrays(chain=True)
            qkv = arrays["qkv"].reshape(len(case.starts), tokens, -1)
            context = np.zeros((len(case.starts), tokens, case.heads * case.size), np.float32)
            case.prefill(NumpyPrefill(), arrays, qkv, np.empty_like(context), context)
    case = replace(CASES["tile"], before=8, rotary=64)
    arrays = case.arrays()
    arrays["cos_sin"] = np.ascontiguousarray(arrays["cos_sin"][..., :64])
    with pytest.raises(KernelError, match="64 elements of heads of 64 to rotate"):
        qkv, context = arrays["qkv"][:, None], np.zeros((4, 1, case.heads * case.size), np.float32)
        case.prefill(NumpyPrefill(), arrays, qkv, np.empty_like(context), context)


class _Device:
    multiprocessors, shared_limit, has_clusters = 16, 166_912, False


@pytest.mark.parametrize("window", [1, 64, 512, 1024, 4096, 32_768])
@pytest.mark.parametrize("kv_heads", [1, 4, 8, 16])
def test_spans_of_a_window_are_no_more_than_those_of_a_whole_context(window: int, kv_heads: int) -> None:
    for tokens in (1, 8, MAX_TOKENS):
        shape = AttentionShape(1, tokens, 2 * kv_heads, kv_heads, 128, 1 << 16, False, window)
        assert shape.spans <= 1 << shape.span_bits
        assert attention_geometry(shape, _Device()).fits(shape, _Device.shared_limit)
        assert attention_shared_bytes(shape) <= _Device.shared_limit
        other = shape._replace(tokens=1, batch=4, kv_rows=1 << 17)
        assert (other.window_bits, other.span_bits) == (shape.window_bits, shape.span_bits)
