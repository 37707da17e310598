"""The kernels of long prompts in NumPy, float32: they define what `CudaPrefill` computes."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.contracts import Contracts
from edgellm.kernels.decode.numpy_twins import rms_norm, rotary_embedding
from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows, Launchable, PrefillKernels

_check = Contracts(PrefillKernels, np.ndarray)
#: Rows of queries whose scores are held at a time.
_QUERY_ROWS = 64


class NumpyPrefill:
    """See `edgellm.kernels.prefill.contract.PrefillKernels`."""

    def prepare_heads(
        self, qkv: np.ndarray, norms: HeadNorms | None, rotary: np.ndarray | None, rows: KeyValueRows
    ) -> Launchable:
        """Norm, rotation and KV rows; see the contract."""
        sizes = _check("prepare_heads", qkv, norms, rotary, rows)
        return lambda: _prepare_heads(qkv, norms, rotary, rows, sizes["W"] // sizes["D"] - 2 * sizes["G"])

    def causal_attention(self, qkv: np.ndarray, rows: KeyValueRows, scale: float, context: np.ndarray) -> Launchable:
        """Attention over the rows up to each token's own; see the contract."""
        _check("causal_attention", qkv, rows, scale, context)
        return lambda: _causal_attention(qkv, rows, scale, context)


def _prepare_heads(
    qkv: np.ndarray, norms: HeadNorms | None, rotary: np.ndarray | None, rows: KeyValueRows, heads: int
) -> None:
    batch, kv_heads, _, size = rows.k_cache.shape
    tokens = qkv.shape[1]
    parts = qkv.reshape(batch * tokens, -1, size)
    query, key, value = np.split(parts, (heads, heads + kv_heads), axis=1)
    if norms is not None:
        query = rms_norm(query, norms.query, norms.epsilon, norms.offset)
        key = rms_norm(key, norms.key, norms.epsilon, norms.offset)
    if rotary is not None:
        rotation = rotary.reshape(batch * tokens, -1)
        query, key = rotary_embedding(query, rotation), rotary_embedding(key, rotation)
    parts[:, :heads] = query
    for cache, values in ((rows.k_cache, key), (rows.v_cache, value)):
        for b, start in enumerate(rows.start.tolist()):
            cache[b, :, start : start + tokens] = values.reshape(batch, tokens, kv_heads, size)[b].swapaxes(0, 1)


def _causal_attention(qkv: np.ndarray, rows: KeyValueRows, scale: float, context: np.ndarray) -> None:
    batch, kv_heads, _, size = rows.k_cache.shape
    tokens, width = context.shape[1:]
    query = qkv[:, :, :width].reshape(batch, tokens, kv_heads, -1, size)
    results = context.reshape(query.shape)
    for b, start in enumerate(rows.start.tolist()):
        for first in range(0, tokens, _QUERY_ROWS):
            chosen = slice(first, min(first + _QUERY_ROWS, tokens))
            end = start + chosen.stop
            keys, values = (cache[b, :, None, :end] for cache in (rows.k_cache, rows.v_cache))
            scores = query[b, chosen].transpose(1, 2, 0, 3) @ keys.swapaxes(-1, -2) * np.float32(scale)
            places = np.arange(start + chosen.start, end)
            scores[..., np.arange(end) > places[:, None]] = -np.inf
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = shares / shares.sum(axis=-1, keepdims=True) @ values
            results[b, chosen] = attended.transpose(2, 0, 1, 3)
