"""The kernels of decode, verify and draft steps in NumPy, float32: the twins of `CudaDecodeKernels`, their definition.

R rows stand for the new tokens of all sequences: B in a decode step, B T in a verify or draft step.
"""

from __future__ import annotations

import numpy as np


def norm_linear(
    hidden: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
    bias: np.ndarray | None,
    output: np.ndarray,
    features: np.ndarray | None = None,
    place: int = 0,
    keeps_raw: bool = False,
) -> None:
    """`output` [R, N] = rms_norm(hidden [R, K]) times the transpose of `weight` [N, K], plus `bias` [N].

    `features` [R, n K] gets what was normalized, or `hidden` itself if `keeps_raw`, in its columns from `place` K on.
    """
    rows = _rows(hidden, weight)
    normed = rms_norm(rows, norm_weight, epsilon)
    output.reshape(-1, len(weight))[...] = linear(normed, weight, bias)
    write_features(features, place, rows if keeps_raw else normed)


def norms_linear(
    first: np.ndarray,
    first_norm: np.ndarray,
    second: np.ndarray,
    second_norm: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
    bias: np.ndarray | None,
    output: np.ndarray,
    normed: np.ndarray | None = None,
) -> None:
    """`output` [R, N] = [rms_norm(first [R, H]) | rms_norm(second [R, H])] times `weight` [N, 2H]^T, plus `bias` [N].

    `normed` [R, H] gets the second input, normalized.
    """
    size = len(first_norm)
    parts = (
        rms_norm(first.reshape(-1, size), first_norm, epsilon),
        rms_norm(second.reshape(-1, size), second_norm, epsilon),
    )
    output[...] = linear(np.concatenate(parts, axis=1), weight, bias)
    write_features(normed, 0, parts[1])


def norm_gate_up(
    hidden: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
    bias: np.ndarray | None,
    output: np.ndarray,
) -> None:
    """`output` [R, F] = silu(gate) * up of rms_norm(hidden [R, K]), `weight` [2F, K] and `bias` [2F] gate then up."""
    output[...] = silu_mul(linear(rms_norm(_rows(hidden, weight), norm_weight, epsilon), weight, bias))


def linear_residual(
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    residual: np.ndarray | None,
    output: np.ndarray,
    features: np.ndarray | None = None,
    place: int = 0,
    selected: np.ndarray | None = None,
) -> None:
    """`output` [R, N] = `residual` [R, N] (None: 0) + x [R, K] times the transpose of `weight` [N, K], plus `bias` [N].

    `features` [R, n N] gets the residual as it was before, in its columns from `place` N on. With `selected` [B, 1]
    int32, x and residual have T rows a sequence, of which it names the one that goes into the B rows of the output.
    """
    x = _rows(x, weight)
    residual = np.zeros((len(x), len(weight)), x.dtype) if residual is None else residual.reshape(len(x), -1)
    if selected is not None:
        chosen = np.arange(selected.size) * (len(x) // selected.size) + selected.reshape(-1)
        x, residual = x[chosen], residual[chosen]
    write_features(features, place, residual)
    output[...] = residual + linear(x, weight, bias)


def attention(
    qkv: np.ndarray,
    q_norm: np.ndarray | None,
    k_norm: np.ndarray | None,
    epsilon: float,
    rope_rotary_cos_sin: np.ndarray,
    kvcache_start_index: np.ndarray,
    attention_mask: np.ndarray | None,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    context: np.ndarray,
    masks_all: bool = False,
) -> None:
    """Attention of T new tokens a sequence: [q/k norm,] rotation, their KV rows, softmax over what each of them sees.

    A token sees the rows before start_index[b], itself, and the new tokens whose rows `attention_mask` [B, 1, T, L]
    bool lets it see; without a mask T is 1. `qkv` [B T, (n_q + 2 n_kv) D], `rope_rotary_cos_sin` [B, T, rotary], caches
    [B, n_kv, rows, D] of which rows start_index[b] .. + T - 1 are written, `context` [B T, n_q D]. `masks_all`: the
    mask decides about the rows before start_index[b] too.
    """
    batch, kv_heads, _, size = k_cache.shape
    tokens = len(qkv) // batch
    query_heads = qkv.shape[1] // size - 2 * kv_heads
    heads = qkv.reshape(batch * tokens, -1, size)
    query, key, value = np.split(heads, (query_heads, query_heads + kv_heads), axis=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, epsilon), rms_norm(key, k_norm, epsilon)
    cos_sin = rope_rotary_cos_sin.reshape(batch * tokens, -1)
    query, key = rotary_embedding(query, cos_sin), rotary_embedding(key, cos_sin)
    query = query.reshape(batch, tokens, kv_heads, -1, size) * np.float32(size**-0.5)
    key, value = (x.reshape(batch, tokens, kv_heads, size).swapaxes(1, 2) for x in (key, value))
    for b, start in enumerate(kvcache_start_index.tolist()):
        new = slice(start, start + tokens)
        k_cache[b, :, new], v_cache[b, :, new] = key[b], value[b]
        for t in range(tokens):
            seen, before = np.arange(tokens) == t, np.ones(start, bool)
            if attention_mask is not None:
                seen |= attention_mask[b, 0, t, new]
                before = attention_mask[b, 0, t, :start] if masks_all else before
            rows = np.concatenate((np.flatnonzero(before), start + np.flatnonzero(seen)))
            scores = query[b, t] @ k_cache[b][:, rows].swapaxes(-1, -2)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = weights / weights.sum(axis=-1, keepdims=True) @ v_cache[b][:, rows]
            context[b * tokens + t] = attended.reshape(-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """[R, K] times the transpose of [N, K], plus [N]."""
    product = x @ weight.T
    return product if bias is None else product + bias


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """silu(first half) * second half over the last axis: [R, 2F] to [R, F]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def rotary_embedding(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of each head of [R, n, D] by [R, rotary], cosine half then sine half.

    Element j is paired with element j + R/2.
    """
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine, rest), axis=-1)


def _rows(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.reshape(-1, weight.shape[1])


def write_features(features: np.ndarray | None, place: int, values: np.ndarray) -> None:
    """Put `values` [R, K] into columns `place` K on of `features` [R, n K], if there are any."""
    if features is not None:
        width = values.shape[1]
        features.reshape(len(values), -1)[:, place * width : (place + 1) * width] = values
