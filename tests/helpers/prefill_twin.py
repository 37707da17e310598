"""The kernels of long prompts in NumPy, float32: they define what `CudaPrefill` computes."""

from __future__ import annotations

import numpy as np
from decode_twins import attend, heads_made_ready
from device_weights import from_device_layout

from edgellm.kernels.contracts import Contracts
from edgellm.kernels.decode.heads_twin import rms_norm
from edgellm.kernels.numpy_launch import NumpyLaunch, checked_launch
from edgellm.kernels.prefill.contract import KeyValueRows, PrefillKernels, RotaryPart, RowScales
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.packed_weight import PackedWeight
from edgellm.kernels.quantization.rows import write_ring_rows, write_rows

_check = Contracts(PrefillKernels, np.ndarray)
#: Rows of queries whose scores are held at a time.
_QUERY_ROWS = 64


class NumpyPrefill:
    """See `edgellm.kernels.prefill.contract.PrefillKernels`."""

    @checked_launch(_check)
    def prepare_heads(self, qkv, norms, rotary, rows, row_scales, part, queries):
        batch, kv_heads, _, size = rows.k_cache.shape
        tokens, heads = qkv.shape[1], qkv.shape[2] // size - 2 * kv_heads
        parts = qkv.reshape(batch * tokens, -1, size)
        query, key, value = np.split(parts, (heads, heads + kv_heads), axis=1)
        turns, neighbours = None, part is not None and part.neighbours
        if rotary is not None:
            rotation = rotary.reshape(batch * tokens, -1)
            first, width, further, _ = part or RotaryPart(0, rotation.shape[1])
            own = first + further
            turns = rotation[:, own : own + width], rotation[:, first : first + width]
        weights, epsilon, offset = (None, 0.0, 0.0) if norms is None else (norms[:2], norms.epsilon, norms.offset)
        behind = norms is not None and norms.behind
        query, key = heads_made_ready((query, key), weights, turns, epsilon, offset, neighbours, behind)
        value = rms_norm(value, np.float32(1), epsilon, 0.0) if norms is not None and norms.values else value
        if queries is not None:
            queries[...] = query.reshape(queries.shape)
        key_scales, value_scales = row_scales or (None, None)
        for cache, scales, values in ((rows.k_cache, key_scales, key), (rows.v_cache, value_scales, value)):
            by_sequence = values.reshape(batch, tokens, kv_heads, size).swapaxes(1, 2)
            for b, start in enumerate(rows.start.tolist()):
                if rows.window:
                    write_ring_rows(b, start, by_sequence[b], cache, scales)
                else:
                    write_rows((b, slice(None), slice(start, start + tokens)), by_sequence[b], cache, scales)

    @checked_launch(_check)
    def causal_attention(self, queries, rows, scale, context, row_scales=None, sinks=None, cap=0.0):
        _causal_attention(queries, rows, scale, context, row_scales, sinks=sinks, cap=cap)

    @checked_launch(_check)
    def attention_ahead(self, queries, rows, scale, context, row_scales, last_seen, cap=0.0):
        _causal_attention(queries, rows, scale, context, row_scales, last_seen, cap=cap)

    def dequantize(self, weight: PackedWeight | PackedMatrix, values: np.ndarray) -> NumpyLaunch:
        """`values` [N, K] compute: those of a packed weight that takes inputs as they are: `PackedWeight.values`, times
        the inputs' scales where it has such."""
        if isinstance(weight, PackedMatrix):  # as the device has it: of codes alone
            weight = from_device_layout(weight.layout, weight.data)
        scales = np.float32(1) if weight.input_scales is None else weight.input_scales
        return NumpyLaunch(lambda: np.copyto(values, weight.values() * scales))


def _causal_attention(
    queries: np.ndarray,
    rows: KeyValueRows,
    scale: float,
    context: np.ndarray,
    row_scales: RowScales | None,
    last_seen: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    cap: float = 0.0,
) -> None:
    batch, kv_heads, _, size = rows.k_cache.shape
    tokens = context.shape[1]
    query = queries.reshape(batch, tokens, kv_heads, -1, size)
    results = context.reshape(query.shape)
    for b, start in enumerate(rows.start.tolist()):
        for first in range(0, tokens, _QUERY_ROWS):
            chosen = slice(first, min(first + _QUERY_ROWS, tokens))
            own = np.arange(start + chosen.start, start + chosen.stop)[:, None]
            last = own if last_seen is None else last_seen[b, chosen][:, None]
            begin = max(0, start + chosen.start + 1 - rows.window) if rows.window else 0
            positions = np.arange(begin, last.max() + 1)
            seen = positions % rows.k_cache.shape[2]
            keys, values = (cache[b][:, None, seen] for cache in (rows.k_cache, rows.v_cache))
            scales = [None, None] if row_scales is None else [each[b][:, None, seen] for each in row_scales]
            hidden = positions > last
            if rows.window:
                hidden |= positions <= own - rows.window
            scaled = query[b, chosen].transpose(1, 2, 0, 3) * np.float32(scale)
            own_sinks = None if sinks is None else sinks.reshape(kv_heads, -1, 1, 1)
            attended = attend(scaled, keys, values, scales[0], scales[1], hidden, own_sinks, cap)
            results[b, chosen] = attended.transpose(2, 0, 1, 3)
