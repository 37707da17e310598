"""The kernels of decode and verify steps on the GPU, prepared once and launched every step.

Each method has the arguments of its NumPy twin in `numpy_decode_kernels`, which defines what it computes, and returns
a `Launch` that enqueues it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule, Launch, pointer

#: The most tokens in a step, of all sequences together: the tensor-core instruction multiplies eight rows.
MAX_ROWS = 8

_WARPS, _UNIT, _STEP = 16, 8, 32
_KEY_TILE, _STAGES, _PADDING = 32, 2, 8
#: decode_linear.cu's DEPTH.
_DEPTH = 4


class CudaDecodeKernels(KernelModule):
    """The kernels for one GPU and stream; the GPU's primary context must be current."""

    def __init__(self, architecture: str, stream_handle: int, cubin: bytes | None = None) -> None:
        super().__init__(architecture, stream_handle, cubin)
        self.blocks_per_multiprocessor = 2
        self.depth = _DEPTH

    def norm_linear(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
        next_early: bool = True,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_linear`.

        `next_early` False: a kernel that overlaps this one starts only when the one before this one has finished.
        """
        rows, shared, arguments = self._norm(1, hidden, norm_weight, epsilon, weight, bias, output)
        arguments += (ctypes.c_int(next_early), *_feature_arguments(features, place, weight.shape[1]))
        return self._linear(f"decode_norm_linear_{weight.dtype}", rows, shared, arguments)

    def norm_gate_up(
        self,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> Launch:
        """See `numpy_decode_kernels.norm_gate_up`."""
        rows, shared, arguments = self._norm(2, hidden, norm_weight, epsilon, weight, bias, output)
        return self._linear(f"decode_norm_gate_up_{weight.dtype}", rows, shared, arguments)

    def _norm(
        self,
        tiles: int,
        hidden: DeviceArray,
        norm_weight: DeviceArray,
        epsilon: float,
        weight: DeviceArray,
        bias: DeviceArray | None,
        output: DeviceArray,
    ) -> tuple[int, int, tuple[Any, ...]]:
        """Output rows, bytes of shared memory and the first arguments of both kernels."""
        batch, rows, columns = self._sizes(hidden, weight, tiles)
        arguments = (
            pointer(weight),
            pointer(bias),
            pointer(hidden),
            ctypes.c_int(hidden.dtype == "float32"),
            pointer(norm_weight),
            ctypes.c_float(epsilon),
            pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, _steps(columns))),
        )
        return rows, _norm_bytes(tiles, batch, columns, self.depth), arguments

    def linear_residual(
        self,
        x: DeviceArray,
        weight: DeviceArray,
        bias: DeviceArray | None,
        residual: DeviceArray,
        output: DeviceArray,
        features: DeviceArray | None = None,
        place: int = 0,
    ) -> Launch:
        """See `numpy_decode_kernels.linear_residual`."""
        batch, rows, columns = self._sizes(x, weight, 1)
        steps = _steps(columns)
        staged = _linear_bytes(1, self.depth) + batch * (_WARPS * steps * _STEP * 2 + 64)
        stage = staged <= self.shared_limit
        arguments = (
            pointer(weight),
            pointer(bias),
            pointer(x),
            pointer(residual),
            ctypes.c_int(residual.dtype == "float32"),
            pointer(output),
            *map(ctypes.c_int, (batch, rows, columns, steps, stage)),
            *_feature_arguments(features, place, rows),
        )
        name = f"decode_linear_residual_{weight.dtype}"
        return self._linear(name, rows, staged if stage else _linear_bytes(1, self.depth), arguments)

    def _sizes(self, x: DeviceArray, weight: DeviceArray, tiles: int) -> tuple[int, int, int]:
        columns = weight.shape[1]
        batch = x.size // columns
        if not 1 <= batch <= MAX_ROWS or columns % 8 or batch * columns != x.size:
            raise KernelError(
                f"decode kernels take 1 to {MAX_ROWS} rows of a width that is a multiple of 8, "
                f"found {x.shape} times {weight.shape}"
            )
        return batch, weight.shape[0] // tiles, columns

    def _linear(self, name: str, rows: int, shared_bytes: int, arguments: Sequence[Any]) -> Launch:
        blocks = min(-(-rows // _UNIT), self.multiprocessors * self.blocks_per_multiprocessor)
        return Launch(self, name, (blocks, 1, 1), 32 * _WARPS, shared_bytes, arguments)

    def attention(
        self,
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
    ) -> Launch:
        """See `numpy_decode_kernels.attention`.

        `partial` float32 of `attention_partials` and `counters` [B T, n_kv] uint32 (zero before and after) are its own.
        """
        batch, kv_heads, kv_rows, size = k_cache.shape
        tokens, mask_keys = (1, 0) if attention_mask is None else attention_mask.shape[2:]
        heads = context.size // (batch * tokens * size)
        group, rotary = heads // kv_heads, rope_rotary_cos_sin.shape[-1]
        if size % 8 or size > 256 or group > 16 or heads % kv_heads:
            raise KernelError(
                f"decode attention takes head sizes up to 256 (multiples of 8) and up to 16 query heads a key-value "
                f"head, found head size {size}, {heads} query heads, {kv_heads} key-value heads"
            )
        shared = _attention_bytes(tokens, group, size)
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
            *map(ctypes.c_int, (group, size, rotary, kv_rows, tokens, mask_keys)),
        )
        pairs = 1 if size <= 64 else 2 if size <= 128 else 4
        grid = (attention_splits(kv_heads, kv_rows), kv_heads, batch * tokens)
        threads = 32 * _attention_warps(group)
        return Launch(self, f"decode_attention_{pairs}_{k_cache.dtype}", grid, threads, shared, arguments)


def attention_splits(kv_heads: int, kv_rows: int) -> int:
    """Over how many blocks the keys of one key-value head are split, at most; the same for any tokens in a step."""
    return min(-(-kv_rows // _KEY_TILE), max(16, min(128, 256 // kv_heads)))


def attention_partials(rows: int, heads: int, kv_heads: int, kv_rows: int, size: int) -> int:
    """Number of float32 values that the splits of one attention layer leave for the merge; `rows` tokens in a step."""
    return rows * heads * attention_splits(kv_heads, kv_rows) * (size + 2)


def shared_bytes(batch: int, tokens: int, hidden_size: int, head_size: int, group: int) -> int:
    """The most shared memory that a block of any of the kernels needs.

    Widths other than the hidden size do not count: `linear_residual` reads what does not fit from global memory.
    """
    return max(_norm_bytes(2, batch * tokens, hidden_size, _DEPTH), _attention_bytes(tokens, group, head_size))


def _norm_bytes(tiles: int, batch: int, columns: int, depth: int) -> int:
    """Ring, partial sums, and the activations, which are float before they are normalized."""
    return _linear_bytes(tiles, depth) + batch * (_WARPS * _steps(columns) * _STEP * 4 + 64)


def _linear_bytes(tiles: int, depth: int) -> int:
    """Ring and partial sums."""
    return depth * 32 * _WARPS * 16 + (2 * _WARPS * tiles * 64 + _UNIT * _WARPS) * 4


def _attention_warps(group: int) -> int:
    return max(4, group)


def _attention_bytes(tokens: int, group: int, size: int) -> int:
    tiles = 2 * _STAGES * _KEY_TILE * (size + _PADDING) * 2
    return tiles + ((group + tokens) * size + _attention_warps(group) * _KEY_TILE) * 4


def _steps(columns: int) -> int:
    """Steps of 32 columns that each of a block's warps takes."""
    return -(-columns // (_WARPS * _STEP))


def _feature_arguments(features: DeviceArray | None, place: int, width: int) -> tuple[Any, Any]:
    """Where a kernel writes its columns of `features` [rows, n width], and the distance of two rows in elements."""
    if features is None:
        return ctypes.c_void_p(0), ctypes.c_int(0)
    stride = features.shape[-1]
    if stride % width or not 0 <= place < stride // width:
        raise KernelError(f"features of {features.shape} have no place {place} of width {width}")
    return ctypes.c_void_p(features.pointer + place * width * ITEM_SIZES[features.dtype]), ctypes.c_int(stride)
