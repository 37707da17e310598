"""Attention of decode, verify and draft steps on the GPU: its kernels and their launch."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray, members
from edgellm.kernels.decode.arguments import CUDA_TYPES, addresses, decode_kernel
from edgellm.kernels.decode.attention_geometries import (
    KEY_TILE,
    MOST_OF_ONE_WARP,
    MOST_WARPS,
    ROWS,
    SHARED_TILE_WARPS,
    TABLES_BYTES,
    AttentionGeometry,
    AttentionShape,
    attention_geometry,
)
from edgellm.kernels.decode.contract import (
    MAX_TOKENS,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    attention_refusal,
)
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch


class _Attention(ctypes.Structure):
    """`Arguments` of attention_block.cuh."""

    _fields_ = members(
        "void* qkv q_norm k_norm cos_sin start_index mask k_cache v_cache k_scale v_scale sinks",
        "void* context partial counters",
        "float epsilon offset scale inverse_size cap inverse_cap",
        "int group group_inverse tile_tokens tile_inverse size rotary kv_rows tokens token_blocks mask_keys masks_all",
        "int span_bits states slot_bits row_tiles stages in_cluster split_bits",
        "int rotary_columns query_columns window window_bits",
    )


class AttentionKind(NamedTuple):
    """What a kernel is compiled for. `shares`: several warps have spans of a row; `int8`: KV rows are; `window`: they
    are a ring, of which tokens see a part. `tile_warps` (None: as large heads need), `in_turn`: see
    `AttentionGeometry`; `sinks`: each head has one; `neighbours`, `norms_behind`, `cap`, `values_normed`: see
    `AttentionWeights`. `one_token`: each sequence has one, without a mask, as in plain decode steps."""

    shares: bool = True
    int8: bool = False
    window: bool = False
    tile_warps: int | None = None
    in_turn: bool = False
    sinks: bool = False
    neighbours: bool = False
    norms_behind: bool = False
    cap: bool = False
    values_normed: bool = False
    one_token: bool = False


_PLAIN = AttentionKind()


def attention_kernel(dtype: str, head_size: int, kind: AttentionKind = _PLAIN) -> Kernel:
    """The kernel of a kind for heads of so many elements."""
    tile_warps, int8, steps = kind.tile_warps, kind.int8, -(-head_size // 16)
    if tile_warps is None:
        tile_warps = SHARED_TILE_WARPS if head_size > MOST_OF_ONE_WARP else 1
    sample = (
        AttentionGeometry(2, 2, 3, 2, False, tile_warps, kind.in_turn),
        AttentionShape(1, 5, 2, 1, 16 * steps, 1 << 20, int8),
    )
    known = kind._replace(tile_warps=tile_warps)._asdict()
    macros = (
        ("HOST_MAX_TOKENS", MAX_TOKENS),
        ("HOST_MAX_WARPS", MOST_WARPS),
        ("HOST_KEY_TILE", KEY_TILE),
        ("HOST_ROWS", ROWS),
        ("HOST_TABLES_BYTES", TABLES_BYTES),
        ("HOST_ATTENTION_BYTES", ctypes.sizeof(_Attention)),
        ("HOST_HEAD_SIZE", 16 * steps),
        ("HOST_BLOCK_BYTES", sample[0].shared_bytes(sample[1])),
        *((f"HOST_{name.upper()}", int(value)) for name, value in known.items() if name != "shares"),
    )
    expression = f"decode::keys_by_position::attention<{CUDA_TYPES[dtype]}, {steps}, {str(kind.shares).lower()}>"
    return decode_kernel("attention.cu", expression, macros)


def attention_launch(
    module: KernelModule,
    qkv: DeviceArray,
    weights: AttentionWeights,
    step: AttentionStep,
    scratch: AttentionScratch,
    context: DeviceArray,
    geometry: AttentionGeometry | None = None,
) -> Launch:
    """See `NumpyDecodeKernels.attention`. `geometry`: other than the fastest."""
    mask, (batch, kv_heads, kv_rows, size) = step.attention_mask, step.k_cache.shape
    tokens, mask_keys = (1, 0) if mask is None else mask.shape[2:]
    columns = step.rope_rotary_cos_sin.shape[-1]
    heads, (first, rotary) = context.size // (batch * tokens * size), weights.rotary_part or (0, columns)
    rotary, cos_sin = (rotary if weights.rotary else 0), step.rope_rotary_cos_sin
    further = weights.query_columns
    int8 = step.k_scale is not None
    if (refusal := attention_refusal(heads, kv_heads, size, int8)) is not None:
        raise KernelError(refusal)
    window = step.window or 0
    if window and (kv_rows % KEY_TILE or window + tokens - 1 > kv_rows or step.masks_all):
        raise KernelError(
            f"a ring of {kv_rows} rows for a window of {window} and {tokens} new tokens, masks_all {step.masks_all}; "
            f"expected at least both, in whole tiles of {KEY_TILE}, and no mask of all rows"
        )
    is_outside = first + rotary + further > columns or first % 4 or further % 4
    if tokens > MAX_TOKENS or is_outside or rotary > size or rotary % 4:
        raise KernelError(
            f"decode attention takes up to {MAX_TOKENS} tokens a sequence and rotates at most a head, by fours of "
            f"elements, found {tokens} tokens and {rotary} rotated elements of {size}"
        )
    if weights.sinks is not None and (weights.sinks.shape, weights.sinks.dtype) != ((heads,), context.dtype):
        raise KernelError(
            f"sinks {weights.sinks.dtype} {list(weights.sinks.shape)} of {heads} heads; expected one each"
        )
    shape = AttentionShape(batch, tokens, heads, kv_heads, size, kv_rows, int8, window)
    if geometry is None:
        geometry = attention_geometry(shape, module)
    group, splits, cap = shape.group, geometry.splits, weights.cap
    token_blocks = -(-tokens // (geometry.row_tiles * shape.tile_tokens))
    arguments = _Attention(
        *addresses(qkv, weights.q_norm, weights.k_norm),
        cos_sin.pointer + first * ITEM_SIZES[cos_sin.dtype],
        *addresses(step.kvcache_start_index, mask),
        *addresses(step.k_cache, step.v_cache, step.k_scale, step.v_scale, weights.sinks, context, *scratch),
        *(weights.epsilon, weights.offset, (1 if cap else weights.scale) * 1.4426950408889634, 1 / size),
        *(cap, weights.scale / cap if cap else 0.0),
        *(group, -(-65_536 // group), shape.tile_tokens, -(-65_536 // shape.tile_tokens), size, rotary),
        *(kv_rows, tokens, token_blocks, mask_keys, step.masks_all, shape.span_bits),
        *(shape.spans, geometry.slots.bit_length() - 1, geometry.row_tiles, geometry.stages),
        *(geometry.in_cluster, geometry.splits.bit_length() - 1),
        *(columns, further, window, shape.window_bits if window else 0),
    )
    how = (geometry.shares, int8, window > 0, geometry.tile_warps, geometry.in_turn, weights.sinks is not None)
    ready = weights.neighbours, weights.norms_behind, cap > 0, weights.values_normed
    kernel = attention_kernel(context.dtype, size, AttentionKind(*how, *ready, mask is None))
    shares = splits * shape.parts
    grid, cluster = (shares, kv_heads, batch * token_blocks), (shares if geometry.in_cluster else 1, 1, 1)
    return Launch(module, kernel, grid, 32 * geometry.warps, geometry.shared_bytes(shape), (arguments,), cluster)
