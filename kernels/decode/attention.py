"""Attention of decode, verify and draft steps on the GPU: how its kernel shares the work, and its launch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES, MACROS, addresses
from edgellm.kernels.decode.contract import (
    MAX_TOKENS,
    AttentionScratch,
    AttentionStep,
    AttentionWeights,
    attention_refusal,
)
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

_KEY_TILE, _GROUP, _ROWS = 64, 4, 16
_TEAM_THREADS, _MOST_TEAMS, _MOST_ROW_TILES = 128, 4, 4
#: Groups of spans that a sequence's keys are expected to fill, where its capacity has more: up to 1,280 keys.
_USUAL_GROUPS = 5
#: Bytes of a block's own variables: of the new tokens that each of its tokens sees, and of what is made ready.
_TABLES_BYTES = MAX_TOKENS * (MAX_TOKENS + 4 + 8 + 2 * 16 + 2 * 4) + 16
#: Bytes that a team's warps leave each other: weights and maxima.
_TEAM_BYTES = 4 * (32 * 16 + _ROWS * 4)


class _Attention(ctypes.Structure):
    """`Arguments` of attention_block.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "q_norm", "k_norm", "cos_sin", "start_index", "mask")),
        *((name, ctypes.c_void_p) for name in ("k_cache", "v_cache", "context", "partial", "counters")),
        *((name, ctypes.c_float) for name in ("epsilon", "offset", "scale")),
        *((name, ctypes.c_int) for name in ("group", "group_inverse", "tile_tokens", "size", "rotary", "kv_rows")),
        *((name, ctypes.c_int) for name in ("tokens", "token_blocks", "mask_keys", "masks_all", "span_bits")),
        *((name, ctypes.c_int) for name in ("states", "slots", "row_tiles", "stages")),
    ]


@dataclass(frozen=True)
class AttentionGeometry:
    """How attention.cu's blocks share the work, on which no bit of a result depends.

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
        return self.shared_bytes(tokens, size) + _TABLES_BYTES <= shared_limit


@cache
def attention_source(dtype: str, head_size: int) -> ModuleSource:
    """The kernel for heads of so many elements (up to 64, 128 or 256)."""
    macros = (
        ("HOST_MAX_TOKENS", MAX_TOKENS),
        ("HOST_MAX_ROW_TILES", _MOST_ROW_TILES),
        ("HOST_MAX_TEAMS", _MOST_TEAMS),
        ("HOST_TEAM_THREADS", _TEAM_THREADS),
        ("HOST_KEY_TILE", _KEY_TILE),
        ("HOST_GROUP", _GROUP),
        ("HOST_ROWS", _ROWS),
        ("HOST_TABLES_BYTES", _TABLES_BYTES),
        ("HOST_ATTENTION_BYTES", ctypes.sizeof(_Attention)),
        ("HOST_BLOCK_BYTES", AttentionGeometry(2, 3, 2).shared_bytes(5, 80)),
    )
    steps, expression = _kernel(dtype, head_size)
    name = f"decode-attention-{dtype}-{16 * steps}"
    return ModuleSource(name, ("decode/attention.cu",), (expression,), (*MACROS, *macros))


def _kernel(dtype: str, head_size: int) -> tuple[int, str]:
    """Steps of 16 elements of a head, and the kernel's name expression."""
    steps = 4 if head_size <= 64 else 8 if head_size <= 128 else 16
    return steps, f"decode::keys_by_position::attention<{CUDA_TYPES[dtype]}, {steps}>"


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
    heads = context.size // (batch * tokens * size)
    group, rotary = heads // kv_heads, step.rope_rotary_cos_sin.shape[-1] if weights.rotary else 0
    refusal = attention_refusal(heads, kv_heads, size)
    if refusal is not None:
        raise KernelError(refusal)
    if tokens > MAX_TOKENS or rotary > size:
        raise KernelError(
            f"decode attention takes up to {MAX_TOKENS} tokens a sequence and rotates at most a head, found {tokens} "
            f"tokens and {rotary} rotated elements of {size}"
        )
    if geometry is None:
        geometry = attention_geometry(
            batch, tokens, group, size, kv_heads, kv_rows, module.shared_limit, module.multiprocessors
        )
    groups, tile_tokens = _groups(kv_heads, kv_rows), _ROWS // group
    token_blocks = -(-tokens // (geometry.row_tiles * tile_tokens))
    arguments = _Attention(
        *addresses(qkv, weights.q_norm, weights.k_norm, step.rope_rotary_cos_sin, step.kvcache_start_index, mask),
        *addresses(step.k_cache, step.v_cache, context, *scratch),
        *(weights.epsilon, weights.offset, weights.scale * 1.4426950408889634),
        *(group, -(-65_536 // group), tile_tokens, size, rotary, kv_rows),
        *(tokens, token_blocks, mask_keys, step.masks_all, _span_bits(kv_heads)),
        *(groups, geometry.slots, geometry.row_tiles, geometry.stages),
    )
    dtype = step.k_cache.dtype
    kernel = Kernel(attention_source(dtype, size), _kernel(dtype, size)[1])
    grid, threads = (groups, kv_heads, batch * token_blocks), _TEAM_THREADS * geometry.teams
    return Launch(module, kernel, grid, threads, geometry.shared_bytes(tokens, size), (arguments,))


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
        two = geometry.teams <= 2 and 2 * (geometry.shared_bytes(tokens, size) + _TABLES_BYTES) <= shared_limit
        waves = -(-blocks // (multiprocessors * (1 + two)))
        return waves * (5 + 3.2 * geometry.row_tiles) * {4: 1, 2: 1.2, 1: 1.5}[geometry.slots]

    for stages in range(2 if kv_rows > _KEY_TILE << _span_bits(kv_heads) else 1, 0, -1):
        choices = [
            AttentionGeometry(slots, row_tiles, stages)
            for slots in (4, 2, 1)
            for row_tiles in range(1, 1 + min(_MOST_ROW_TILES, -(-tokens // tile_tokens)))
        ]
        fitting = [choice for choice in choices if choice.fits(tokens, size, shared_limit)]
        if fitting:
            return min(fitting, key=microseconds)
    return AttentionGeometry(1, 1, 1)


def attention_shared_bytes(tokens: int, size: int) -> int:
    """Shared memory of the smallest blocks."""
    return AttentionGeometry(1, 1, 1).shared_bytes(tokens, size) + _TABLES_BYTES


def attention_partials(rows: int, heads: int, kv_heads: int, kv_rows: int, size: int) -> int:
    """Number of float32 values that the blocks of an attention layer leave for the merge; `rows` tokens in a step."""
    return rows * heads * _groups(kv_heads, kv_rows) * (size + 4)


def _span_bits(kv_heads: int) -> int:
    """A token's keys are divided into 2 to this power spans, at most: by the model alone, as bits depend on it."""
    return max(16, min(128, 256 // kv_heads)).bit_length() - 1


def _groups(kv_heads: int, kv_rows: int) -> int:
    spans = min(-(-kv_rows // _KEY_TILE), 1 << _span_bits(kv_heads))
    return -(-spans // _GROUP)
