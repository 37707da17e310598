"""The kernels of the decode step in NumPy, float32: the twins of `CudaDecodeKernels` and the definition of each."""

from __future__ import annotations

import numpy as np


def norm_linear(
    hidden: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
    bias: np.ndarray | None,
    output: np.ndarray,
) -> None:
    """`output` [B, N] = rms_norm(hidden [B, K]) times the transpose of `weight` [N, K], plus `bias` [N]."""
    output.reshape(-1, len(weight))[...] = linear(rms_norm(_rows(hidden, weight), norm_weight, epsilon), weight, bias)


def norm_gate_up(
    hidden: np.ndarray,
    norm_weight: np.ndarray,
    epsilon: float,
    weight: np.ndarray,
    bias: np.ndarray | None,
    output: np.ndarray,
) -> None:
    """`output` [B, F] = silu(gate) * up of rms_norm(hidden [B, K]), `weight` [2F, K] and `bias` [2F] gate then up."""
    gate_up = linear(rms_norm(_rows(hidden, weight), norm_weight, epsilon), weight, bias)
    gate, up = np.split(gate_up, 2, axis=-1)
    output[...] = gate / (1 + np.exp(-gate)) * up


def linear_residual(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, residual: np.ndarray, output: np.ndarray
) -> None:
    """`output` [B, N] = `residual` [B, N] + x [B, K] times the transpose of `weight` [N, K], plus `bias` [N]."""
    output[...] = residual.reshape(output.shape) + linear(_rows(x, weight), weight, bias)


def attention(
    qkv: np.ndarray,
    q_norm: np.ndarray | None,
    k_norm: np.ndarray | None,
    epsilon: float,
    rope_rotary_cos_sin: np.ndarray,
    kvcache_start_index: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    context: np.ndarray,
) -> None:
    """Attention of one new token a sequence: [q/k norm,] rotation, its KV row, softmax over rows 0..start_index[b].

    `qkv` [B, (n_q + 2 n_kv) D], caches [B, n_kv, rows, D] of which row start_index[b] is written, `context` [B, n_q D].
    """
    batch, kv_heads, _, size = k_cache.shape
    query_heads = qkv.shape[1] // size - 2 * kv_heads
    heads = qkv.reshape(batch, -1, size)
    query, key, value = np.split(heads, (query_heads, query_heads + kv_heads), axis=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm(query, q_norm, epsilon), rms_norm(key, k_norm, epsilon)
    cos_sin = rope_rotary_cos_sin.reshape(batch, -1)
    query, key = rotary_embedding(query, cos_sin), rotary_embedding(key, cos_sin)
    query = query.reshape(batch, kv_heads, -1, size) * np.float32(size**-0.5)
    for b, position in enumerate(kvcache_start_index.tolist()):
        k_cache[b, :, position], v_cache[b, :, position] = key[b], value[b]
        scores = query[b] @ k_cache[b, :, : position + 1].swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = weights / weights.sum(axis=-1, keepdims=True) @ v_cache[b, :, : position + 1]
        context[b] = attended.reshape(-1)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """[B, K] times the transpose of [N, K], plus [N]."""
    product = x @ weight.T
    return product if bias is None else product + bias


def rotary_embedding(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of each head of [B, n, D] by [B, R], cosine half then sine half.

    Element j is paired with element j + R/2.
    """
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine, rest), axis=-1)


def _rows(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x.reshape(-1, weight.shape[1])
