"""Attention of decode, verify and draft steps on the GPU: how its kernel shares the work, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer

#: The most new tokens of a sequence.
MAX_TOKENS = 64

_KEY_TILE, _GROUP, _ROWS = 64, 4, 16
_TEAM_THREADS, _MOST_TEAMS = 128, 4
#: Groups of spans that a sequence's keys are expected to fill, where its capacity has more: up to 1,280 keys.
_USUAL_GROUPS = 5
#: Bytes of a block's own variables: of the new tokens that each of its tokens sees, and of what is made ready.
_STATIC_BYTES = MAX_TOKENS * (MAX_TOKENS + 4 + 8 + 2 * 16 + 2 * 4) + 16
#: Bytes that a team's warps leave each other: weights and maxima.
_TEAM_BYTES = 4 * (32 * 16 + _ROWS * 4)


@dataclass(frozen=True)
class AttentionGeometry:
    """How decode_attention.cu's blocks share the work, on which no bit of a result depends.

    A block has `row_tiles` of 16 rows (tokens times query heads of a key-value head) and four spans of keys, of which
    it computes `slots` at once (1, 2 or 4); `stages` (1 or 2) tiles of keys of each are in memory.
    """

    slots: int
    row_tiles: int
    stages: int

    @property
    def teams(self) -> int:
        """Teams of four warps, which take turns at the block's tiles."""
        return min(_MOST_TEAMS, 1 << (self.slots * self.row_tiles - 1).bit_length())

    def shared_bytes(self, tokens: int, size: int) -> int:
        """Shared memory of a block, beside its own variables."""
        rows = 2 * (self.slots * self.stages * _KEY_TILE + tokens) + self.row_tiles * _ROWS
        spans = _GROUP * self.row_tiles * _ROWS
        return (2 * rows + 4 * spans) * (-(-size // 16) * 16 + 8) + self.teams * _TEAM_BYTES

    def fits(self, tokens: int, size: int, shared_limit: int) -> bool:
        """Whether a block gets the memory that it needs."""
        return self.shared_bytes(tokens, size) + _STATIC_BYTES <= shared_limit


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
        geometry = attention_geometry(
            batch, tokens, group, size, kv_heads, kv_rows, kernels.shared_limit, kernels.multiprocessors
        )
    groups, tile_tokens = _groups(kv_heads, kv_rows), _ROWS // group
    token_blocks = -(-tokens // (geometry.row_tiles * tile_tokens))
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
        *map(ctypes.c_int, (group, -(-65_536 // group), tile_tokens, size, rotary, kv_rows, tokens, token_blocks)),
        *map(ctypes.c_int, (mask_keys, masks_all, _span_bits(kv_heads), groups)),
        *map(ctypes.c_int, (geometry.slots, geometry.row_tiles, geometry.stages)),
    )
    steps = 4 if size <= 64 else 8 if size <= 128 else 16
    grid = (groups, kv_heads, batch * token_blocks)
    name, shared = f"decode_attention_{steps}_{k_cache.dtype}", geometry.shared_bytes(tokens, size)
    return Launch(kernels, Kernel(OTHER_KERNELS, name), grid, _TEAM_THREADS * geometry.teams, shared, arguments)


def attention_geometry(
    batch: int,
    tokens: int,
    group: int,
    size: int,
    kv_heads: int,
    kv_rows: int,
    shared_limit: int,
    multiprocessors: int,
) -> AttentionGeometry:
    """The fastest that fits, by times measured on an H200; the smallest if none does."""
    tile_tokens = _ROWS // group
    groups = min(_groups(kv_heads, kv_rows), _USUAL_GROUPS)

    def microseconds(geometry: AttentionGeometry) -> float:
        blocks = groups * kv_heads * batch * -(-tokens // (geometry.row_tiles * tile_tokens))
        two = geometry.teams <= 2 and 2 * (geometry.shared_bytes(tokens, size) + _STATIC_BYTES) <= shared_limit
        waves = -(-blocks // (multiprocessors * (1 + two)))
        return waves * (5 + 3.2 * geometry.row_tiles) * {4: 1, 2: 1.2, 1: 1.5}[geometry.slots]

    for stages in range(2 if kv_rows > _KEY_TILE << _span_bits(kv_heads) else 1, 0, -1):
        choices = [
            AttentionGeometry(slots, row_tiles, stages)
            for slots in (4, 2, 1)
            for row_tiles in range(1, 1 + min(4, -(-tokens // tile_tokens)))
        ]
        fitting = [choice for choice in choices if choice.fits(tokens, size, shared_limit)]
        if fitting:
            return min(fitting, key=microseconds)
    return AttentionGeometry(1, 1, 1)


def attention_shared_bytes(tokens: int, size: int) -> int:
    """Shared memory of the smallest blocks."""
    return AttentionGeometry(1, 1, 1).shared_bytes(tokens, size) + _STATIC_BYTES


def attention_partials(rows: int, heads: int, kv_heads: int, kv_rows: int, size: int) -> int:
    """Number of float32 values that the blocks of an attention layer leave for the merge; `rows` tokens in a step."""
    return rows * heads * _groups(kv_heads, kv_rows) * (size + 4)


def _span_bits(kv_heads: int) -> int:
    """A token's keys are divided into 2 to this power spans, at most: by the model alone, as bits depend on it."""
    return max(16, min(128, 256 // kv_heads)).bit_length() - 1


def _groups(kv_heads: int, kv_rows: int) -> int:
    spans = min(-(-kv_rows // _KEY_TILE), 1 << _span_bits(kv_heads))
    return -(-spans // _GROUP)
