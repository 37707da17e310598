"""Attention of decode, verify and draft steps on the GPU: how its kernel shares the work, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule, Launch, pointer

#: The most new tokens of a sequence.
MAX_TOKENS = 64

_KEY_TILE, _GROUP, _ROWS = 64, 4, 16
_FEWEST_WARPS = 4
#: Bytes of a block's own variables: which new tokens each of its tokens sees, and how many keys it has.
_STATIC_BYTES = MAX_TOKENS * MAX_TOKENS + 4 * MAX_TOKENS + 16


@dataclass(frozen=True)
class AttentionGeometry:
    """How decode_attention.cu's blocks share the work, on which no bit of a result depends.

    A block has `row_tiles` of 16 rows (tokens times query heads of a key-value head) and `slots` spans of keys (1, 2 or
    4), a warp for each pair; `stages` (1 or 2) tiles of keys of a span are in shared memory.
    """

    slots: int
    row_tiles: int
    stages: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return max(_FEWEST_WARPS, self.slots * self.row_tiles)

    def shared_bytes(self, tokens: int, size: int) -> int:
        """Shared memory of a block, beside its own variables."""
        rows = 2 * (self.slots * self.stages * _KEY_TILE + tokens) + self.row_tiles * _ROWS
        return 2 * rows * (-(-size // 16) * 16 + 8)

    def fits(self, tokens: int, size: int, shared_limit: int) -> bool:
        """Whether a block gets the memory and, for its size of heads, the registers that it needs."""
        warps = 16 if size <= 64 else 8
        return self.warps <= warps and self.shared_bytes(tokens, size) + _STATIC_BYTES <= shared_limit


def attention_launch(
    kernels: KernelModule,
    qkv: DeviceArray,
    q_norm: DeviceArray | None,
    k_norm: DeviceArray | None,
    epsilon: float,
    rope_rotary_cos_sin: DeviceArray,
    kvcache_start_index: DeviceArray,
    attention_mask: DeviceArray | None,
    k_cache: DeviceArray,
    v_cache: DeviceArray,
    partial: DeviceArray,
    counters: DeviceArray,
    context: DeviceArray,
    masks_all: bool = False,
    geometry: AttentionGeometry | None = None,
) -> Launch:
    """See `numpy_decode_kernels.attention`.

    `partial` float32 of `attention_partials` and `counters` [B T, n_kv] uint32 (zero before and after) are its own.
    """
    batch, kv_heads, kv_rows, size = k_cache.shape
    tokens, mask_keys = (1, 0) if attention_mask is None else attention_mask.shape[2:]
    heads = context.size // (batch * tokens * size)
    group, rotary = heads // kv_heads, rope_rotary_cos_sin.shape[-1]
    if size % 8 or size > 256 or group > _ROWS or heads % kv_heads or tokens > MAX_TOKENS:
        raise KernelError(
            f"decode attention takes head sizes up to 256 (multiples of 8), up to {_ROWS} query heads a key-value head "
            f"and {MAX_TOKENS} tokens a sequence, found head size {size}, {heads} query heads, {kv_heads} key-value "
            f"heads, {tokens} tokens"
        )
    if geometry is None:
        geometry = attention_geometry(batch, tokens, group, size, kv_heads, kv_rows, kernels.shared_limit)
    spans = _spans(kv_heads, kv_rows)
    states = -(-spans // _GROUP) if geometry.slots == _GROUP else spans
    arguments = (
        pointer(qkv),
        pointer(q_norm),
        pointer(k_norm),
        ctypes.c_float(epsilon),
        pointer(rope_rotary_cos_sin),
        pointer(kvcache_start_index),
        pointer(attention_mask),
        pointer(k_cache),
        pointer(v_cache),
        pointer(context),
        pointer(partial),
        pointer(counters),
        ctypes.c_float(size**-0.5 * 1.4426950408889634),
        *map(ctypes.c_int, (group, size, rotary, kv_heads, kv_rows, tokens, mask_keys, masks_all)),
        *map(ctypes.c_int, (_max_spans(kv_heads), states, geometry.slots, geometry.row_tiles, geometry.stages)),
    )
    steps = 4 if size <= 64 else 8 if size <= 128 else 16
    token_blocks = -(-tokens // (geometry.row_tiles * (_ROWS // group)))
    grid = (-(-spans // geometry.slots), kv_heads * token_blocks, batch)
    name, shared = f"decode_mma_attention_{steps}_{k_cache.dtype}", geometry.shared_bytes(tokens, size)
    return Launch(kernels, name, grid, 32 * geometry.warps, shared, arguments)


def attention_geometry(
    batch: int, tokens: int, group: int, size: int, kv_heads: int, kv_rows: int, shared_limit: int
) -> AttentionGeometry:
    """The fastest that fits, as measured; the smallest if none does."""
    row_tiles = -(-tokens // (_ROWS // group))
    stages = 2 if -(-kv_rows // _KEY_TILE) > _max_spans(kv_heads) else 1
    slots = 1 if row_tiles == 1 else _GROUP
    choices = [
        AttentionGeometry(few, most, deep)
        for deep in range(stages, 0, -1)
        for few in (4, 2, 1)
        if few <= slots
        for most in (4, 3, 2, 1)
        if most <= row_tiles
    ]
    fitting = (choice for choice in choices if choice.fits(tokens, size, shared_limit))
    return next(fitting, AttentionGeometry(1, 1, 1))


def attention_partials(rows: int, heads: int, kv_heads: int, kv_rows: int, size: int) -> int:
    """Number of float32 values that the blocks of an attention layer leave for the merge; `rows` tokens in a step."""
    return rows * heads * _spans(kv_heads, kv_rows) * (size + 4)


def _max_spans(kv_heads: int) -> int:
    """Into how many spans a token's keys are divided, at most: a property of the model, as bits depend on it."""
    return max(16, min(128, 256 // kv_heads))


def _spans(kv_heads: int, kv_rows: int) -> int:
    return min(-(-kv_rows // _KEY_TILE), _max_spans(kv_heads))
