"""The decode step in NumPy, float32: the twin of cuda/decode_step.cu and the definition of what it computes.

Written phase by phase as the kernel is, so that a test can compare each intermediate result.
"""

from __future__ import annotations

import numpy as np

from edgellm.kernels.decode_kernels import DecodeLayer, DecodeStep


def decode_step(step: DecodeStep) -> None:
    """Compute `step.logits` and the new token's KV rows, all arrays float32 (start_index int32).

    Every scratch array is left as the last layer's phases leave it; `partial`, `counters` and `barrier`, which
    serve the order of the kernel's blocks, are not used.
    """
    d = step.dimensions
    hidden = step.embeddings.reshape(d.batch, d.hidden_size)
    for layer in step.layers:
        step.qkv[...] = linear(rms_norm(hidden, layer.input_norm, step.epsilon), layer.qkv, layer.qkv_bias)
        step.context[...] = attention(step, layer, step.qkv)
        step.hidden[...] = hidden + linear(step.context, layer.o, layer.o_bias)
        normed = rms_norm(step.hidden, layer.post_attention_norm, step.epsilon)
        step.activation[...] = silu_mul(linear(normed, layer.gate_up, layer.gate_up_bias))
        step.hidden[...] += linear(step.activation, layer.down, layer.down_bias)
        hidden = step.hidden
    normed = rms_norm(hidden, step.norm, step.epsilon)
    step.logits[...] = linear(normed, step.head, None).reshape(step.logits.shape)


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """[B, K] times the transpose of [N, K], plus [N]."""
    product = x @ weight.T
    return product if bias is None else product + bias


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """silu(first half) * second half over the last axis: [B, 2F] to [B, F]."""
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def rotary_embedding(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """Rotate the first R elements of each head of [B, n, D] by [B, R], cosine half then sine half.

    Element j is paired with element j + R/2.
    """
    rotary = cos_sin.shape[-1]
    half = rotary // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    low, high, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine, rest), axis=-1)


def attention(step: DecodeStep, layer: DecodeLayer, qkv: np.ndarray) -> np.ndarray:
    """Write the new token's row start_index[b] of both caches, then attend to rows 0..start_index[b]: [B, n_q D]."""
    d = step.dimensions
    heads = qkv.reshape(d.batch, d.heads + 2 * d.kv_heads, d.head_size)
    query, key, value = np.split(heads, (d.heads, d.heads + d.kv_heads), axis=1)
    if layer.q_norm is not None:
        query = rms_norm(query, layer.q_norm, step.epsilon)
        key = rms_norm(key, layer.k_norm, step.epsilon)
    cos_sin = step.cos_sin.reshape(d.batch, d.rotary)
    query, key = rotary_embedding(query, cos_sin), rotary_embedding(key, cos_sin)
    query = query.reshape(d.batch, d.kv_heads, d.heads // d.kv_heads, d.head_size) * np.float32(d.head_size**-0.5)
    context = np.empty_like(query)
    for b, position in enumerate(step.start_index.tolist()):
        layer.k_cache[b, :, position] = key[b]
        layer.v_cache[b, :, position] = value[b]
        scores = query[b] @ layer.k_cache[b, :, : position + 1].swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        context[b] = weights / weights.sum(axis=-1, keepdims=True) @ layer.v_cache[b, :, : position + 1]
    return context.reshape(d.batch, d.query_size)
