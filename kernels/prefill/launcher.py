"""The kernels of long prompts on the GPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.decode.arguments import CUDA_TYPES, addresses, decode_kernel
from edgellm.kernels.decode.attention_geometries import KEY_TILE, AttentionShape
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import Launcher
from edgellm.kernels.prefill.contract import PrefillKernels
from edgellm.kernels.quantization.device_layout import PackedMatrix

_WARPS, _HEADS_THREADS = 4, 256
_HEADER = ("prefill/arguments.cuh", cuda_header(PrefillKernels))
#: Warps of a block that dequantizes, each of which makes a block of weights dense.
_DEQUANTIZE_WARPS = 8
#: Tiles of keys and of values that have places in memory, by the size that heads are padded to; of the largest a half
#: of either has one.
_STAGES = {64: 2, 128: 2, 256: 1, 512: 0.25}


class AttentionKind(NamedTuple):
    """What a kernel is compiled for. `int8`: KV rows are; `window`: tokens see a part of a ring; `ahead`: some see rows
    behind their own (`attention_ahead`); `sinks`: each head has one; `cap`: scores are capped."""

    int8: bool = False
    window: bool = False
    ahead: bool = False
    sinks: bool = False
    cap: bool = False


_PLAIN = AttentionKind()


class _Division(ctypes.Structure):
    """`Division` of attention.cu."""

    _fields_ = members("int span_bits window_bits")


def _padded(size: int) -> int:
    return next(padded for padded in _STAGES if padded >= size)


def _rows(tiles: int) -> int:
    """Queries of a block."""
    return 16 * tiles * _WARPS


def attention_tiles(size: int, tokens: int, heads: int, multiprocessors: int) -> int:
    """Tiles of 16 queries for each warp of `causal_attention`; `heads` are those of all sequences.

    Two share what is read from shared memory, but registers hold those of heads of up to 64 elements alone, with sums
    of a span and of all before it, and few queries must give each multiprocessor a block.
    """
    return 2 if size <= 64 and -(-tokens // _rows(2)) * heads >= multiprocessors else 1


def attention_bytes(size: int, tiles: int, int8: bool = False) -> int:
    """Shared memory of a block of `causal_attention`, for heads of `size` elements; `int8`: KV rows are."""
    padded = _padded(size)
    places = int(2 * _STAGES[padded] * KEY_TILE * padded)
    scales = 8 * ceil(_STAGES[padded]) * KEY_TILE if int8 else 0
    return 2 * (padded * _rows(tiles) + places) + scales


@lru_cache
def heads_kernel(dtype: str, size: int, int8: bool = False, source: str | None = None) -> Kernel:
    """`prepare_heads` of heads of `size` elements for a model of `dtype`; `int8`: KV rows are; `source`: the dtype of
    the values, if it is float32."""
    given, steps = ("float" if source == "float32" else CUDA_TYPES[dtype]), _padded(size) // 16
    expression = f"prefill::prepare_heads<{CUDA_TYPES[dtype]}, {given}, {steps}, {str(int8).lower()}>"
    return decode_kernel("prefill/heads.cu", expression, (), _HEADER)


@lru_cache
def attention_kernel(dtype: str, size: int, tiles: int, kind: AttentionKind = _PLAIN) -> Kernel:
    """`causal_attention` of a kind for heads of `size` elements."""
    expression = f"prefill::causal_attention<{CUDA_TYPES[dtype]}, {_padded(size)}, {tiles}>"
    own = (("HOST_WARPS", _WARPS), ("HOST_KEY_TILE", KEY_TILE), ("HOST_BYTES", attention_bytes(size, tiles, kind.int8)))
    sizes = (*own, ("HOST_DIVISION_BYTES", ctypes.sizeof(_Division)))
    host = (*sizes, *((f"HOST_{name.upper()}", int(is_so)) for name, is_so in kind._asdict().items()))
    return decode_kernel("prefill/attention.cu", expression, host, _HEADER)


class CudaPrefill(Launcher):
    """See `edgellm.kernels.prefill.contract.PrefillKernels`; arrays are `DeviceArray`, a call gives a `Launch`."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module, PrefillKernels)

    def prepare_heads(self, qkv, norms, rotary, rows, row_scales, part, queries):
        sizes, packed = self._packed("prepare_heads", qkv, norms, rotary, rows, row_scales, part, queries)
        grid = (sizes["T"], sizes["B"], 1)
        dtype = (rows.k_cache if queries is None else queries).dtype
        kernel = heads_kernel(dtype, sizes["D"], row_scales is not None, qkv.dtype)
        return Launch(self._module, kernel, grid, _HEADS_THREADS, 0, (packed,))

    def causal_attention(self, queries, rows, scale, context, row_scales=None, sinks=None, cap=0.0, tiles=None):
        """Attention over the rows up to each token's own; see the contract. `tiles`: other than the fastest."""
        return self._attention("causal_attention", (queries, rows, scale, context, row_scales, sinks, cap), tiles)

    def attention_ahead(self, queries, rows, scale, context, row_scales, last_seen, cap=0.0, tiles=None):
        """Attention over the rows up to one that is given for each token; see the contract. `tiles` as above."""
        return self._attention("attention_ahead", (queries, rows, scale, context, row_scales, last_seen, cap), tiles)

    def _attention(self, name: str, arguments: tuple[Any, ...], tiles: int | None) -> Launch:
        (queries, rows, _, _, row_scales, last, cap), is_ahead = arguments, name == "attention_ahead"
        sizes, packed = self._packed(name, *arguments)
        size, tokens, batch = sizes["D"], sizes["T"], sizes["B"]
        heads = sizes["E"] // size
        if tiles is None:
            tiles = attention_tiles(size, tokens, heads * batch, self._module.multiprocessors)
        int8 = row_scales is not None
        shape = AttentionShape(batch, tokens, heads, sizes["G"], size, sizes["C"], int8, rows.window)
        division = _Division(shape.span_bits, shape.window_bits if rows.window else 0)
        grid, shared = (heads, batch, -(-tokens // _rows(tiles))), attention_bytes(size, tiles, int8)
        kind = AttentionKind(int8, rows.window > 0, is_ahead, not is_ahead and last is not None, cap > 0)
        kernel = attention_kernel(queries.dtype, size, tiles, kind)
        return Launch(self._module, kernel, grid, 32 * _WARPS, shared, (packed, division))

    def dequantize(self, weight: PackedMatrix, values: DeviceArray) -> Launch:
        """See `NumpyPrefill.dequantize`."""
        return dequantize(self._module, weight, values)

    def load(self, dtype: str, size: int, tokens: int, heads: int, kind: AttentionKind) -> None:
        """Compile and load what steps of so many `tokens`, and `heads` of all sequences, need."""
        tiles = attention_tiles(size, tokens, heads, self._module.multiprocessors)
        for kernel in (heads_kernel(dtype, size, kind.int8), attention_kernel(dtype, size, tiles, kind)):
            self._module.load(kernel.source)


class _Dequantize(ctypes.Structure):
    """`Dequantize` of dequantize.cu."""

    _fields_ = members("void* weight values order scales", "int rows columns")


@lru_cache
def dequantize_kernel(dtype: str, scales: int, mode: int, arranged: bool = False) -> Kernel:
    """The kernel for weights of so many `DeviceLayout.scales` and a `DeviceLayout.mode`, in a compute dtype."""
    expression = f"decode::packed::dequantize<{CUDA_TYPES[dtype]}, {scales}, {mode}, {str(arranged).lower()}>"
    macros = (("HOST_DEQUANTIZE_BYTES", ctypes.sizeof(_Dequantize)), ("HOST_WARPS", _DEQUANTIZE_WARPS))
    return decode_kernel("dequantize.cu", expression, macros)


def dequantize(module: KernelModule, weight: PackedMatrix, values: DeviceArray) -> Launch:
    """A launch that makes `values` [N, K], of the compute dtype, the weight that takes inputs as they are: what
    `PackedWeight.values` gives, rounded to it; times the inputs' scales, where they have such, rounded once more.

    Launches that make other matrices may overlap (`Launch.overlap_previous`). Raises KernelError where `values` are not
    the weight's, and for columns that do not come in eights.
    """
    layout, inputs = weight.layout, weight.inputs or (None, None)
    if (values.shape, values.dtype) != (weight.shape, weight.dtype) or layout.columns % 8:
        raise KernelError(
            f"values {values.dtype} {list(values.shape)} cannot hold a weight {weight.dtype} {list(weight.shape)}, "
            "whose columns must come in eights"
        )
    down, along = layout.blocks
    arguments = _Dequantize(*addresses(weight.data, values, *inputs), layout.rows, layout.columns)
    kernel = dequantize_kernel(weight.dtype, layout.scales, layout.mode, weight.inputs is not None)
    return Launch(
        module, kernel, (-(-down * along // _DEQUANTIZE_WARPS), 1, 1), 32 * _DEQUANTIZE_WARPS, 0, (arguments,)
    )
