"""The kernels of encoders of images and speech on the GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import MAXIMUM_ROWS, cuda_header
from edgellm.kernels.decode.arguments import MACROS
from edgellm.kernels.encoder.contract import ACTIVATION_MACROS, MAX_HEAD_SIZE, Convolution, EncoderKernels
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import CUDA_TYPES, Launcher

#: Threads of a block that has a row, and their warps; rows and columns of a tile of a product.
_THREADS, _ROW_WARPS, _TILE = 256, 8, 64
_WARPS, _STAGES, _KEYS = 4, 2, 64
#: The sizes that heads are padded to.
_SIZES = (64, 80, 128)
_ROW_MACROS = (("HOST_THREADS", _THREADS), ("HOST_TILE", _TILE), *ACTIVATION_MACROS)
_NORM_MACROS = (("HOST_THREADS", _THREADS), ("HOST_MAX_HEAD_SIZE", MAX_HEAD_SIZE))


def _padded(size: int) -> int:
    return next(padded for padded in _SIZES if padded >= size)


def _rows(tiles: int) -> int:
    """Queries of a block of `attention`."""
    return 16 * tiles * _WARPS


def attention_tiles(size: int, window: int, heads: int, multiprocessors: int) -> int:
    """Tiles of 16 queries for each warp of `attention`; `heads` are those of all windows.

    Two share what is read from shared memory, but registers do not hold those of large heads, and few queries must
    give each multiprocessor a block.
    """
    return 2 if size <= 80 and window > _rows(1) and -(-window // _rows(2)) * heads >= multiprocessors else 1


def attention_bytes(size: int, window: int) -> int:
    """Shared memory of a block of `attention` in windows of so many rows, for heads of `size` elements: two stages of
    keys and values, and a bit for each row of the window, in whole tiles."""
    return _stage_bytes(_padded(size)) * _STAGES + 8 * -(-window // _KEYS)


def _stage_bytes(padded: int) -> int:
    return 2 * 2 * (padded + 8) * _KEYS


@lru_cache
def row_kernel(file: str, name: str, *arguments: str | int) -> Kernel:
    """A kernel of encoder/`file`; `arguments` of its template are dtypes, and how many columns a thread takes."""
    kinds = (CUDA_TYPES[each] if isinstance(each, str) else str(each) for each in arguments)
    macros = _NORM_MACROS if file in ("norms.cu", "conformer.cu", "past.cu") else _ROW_MACROS
    return _kernel(file, name, f"encoder::{name}<{', '.join(kinds)}>", "_".join(map(str, arguments)), macros)


@lru_cache
def attention_kernel(dtype: str, size: int, tiles: int) -> Kernel:
    """`attention` for heads of `size` elements."""
    padded = _padded(size)
    sizes = (("HOST_WARPS", _WARPS), ("HOST_STAGES", _STAGES), ("HOST_KEYS", _KEYS))
    expression = f"encoder::attention<{CUDA_TYPES[dtype]}, {padded}, {tiles}>"
    macros = (*MACROS, *sizes, ("HOST_BYTES", _stage_bytes(padded) * _STAGES))
    return _kernel("attention.cu", "attention", expression, f"{dtype}_{padded}_{tiles}", macros)


def _kernel(file: str, name: str, expression: str, kind: str, macros: tuple[tuple[str, int | str], ...]) -> Kernel:
    header = ("encoder/arguments.cuh", cuda_header(EncoderKernels))
    source = ModuleSource(f"encoder_{name}_{kind}", (f"encoder/{file}",), (expression,), macros, (header,))
    return Kernel(source, expression)


class CudaEncoder(Launcher):
    """See `edgellm.kernels.encoder.contract.EncoderKernels`; arrays are `DeviceArray`, a call gives a `Launch`, which
    waits for its predecessor itself."""

    def __init__(self, module: KernelModule) -> None:
        super().__init__(module, EncoderKernels)

    def norm(self, values, weight, bias, epsilon, offset, output, next_early=True):
        arguments = (values, weight, bias, epsilon, offset, output, next_early)
        sizes, packed = self._packed("norm", *arguments)
        width = _columns_at_once(sizes["K"], sizes["P"])
        _check_aligned("norm", width, values, weight, bias, output)
        kinds = values.dtype, weight.dtype, output.dtype, width
        return self._in_blocks("rows.cu", "norm", kinds, sizes["R"], packed, 4 * sizes["K"])

    def activate(self, values: DeviceArray, activation: int, output: DeviceArray) -> Launch:
        return self._by_row("rows.cu", "activate", (output.dtype,), values, activation, output)

    def copy_rows(self, values: DeviceArray, rows: DeviceArray | None, output: DeviceArray, column: int) -> Launch:
        kinds = values.dtype, output.dtype
        return self._by_row("rows.cu", "copy_rows", kinds, values, rows, output, column, column=column)

    def add_rows(self, values: DeviceArray, other: DeviceArray, output: DeviceArray) -> Launch:
        return self._by_row("rows.cu", "add_rows", (values.dtype, other.dtype), values, other, output)

    def add_scaled_rows(self, values, other, scale, output):
        return self._by_row("rows.cu", "add_scaled_rows", (scale.dtype,), values, other, scale, output)

    def average_pool(self, values: DeviceArray, side: int, size: int, output: DeviceArray) -> Launch:
        return self._by_row("rows.cu", "average_pool", (values.dtype,), values, side, size, output)

    def clip_rows(self, values: DeviceArray, bounds: DeviceArray, output: DeviceArray, column: int) -> Launch:
        kinds = values.dtype, bounds.dtype, output.dtype
        return self._by_row("bounds.cu", "clip_rows", kinds, values, bounds, output, column, column=column)

    def clipped_gate(self, gate, values, gate_bounds, bounds, activation, output):
        given = gate, values, gate_bounds, bounds, activation, output
        return self._by_row("bounds.cu", "clipped_gate", (output.dtype,), *given)

    def normed_heads(self, qkv, query_weight, key_weight, epsilon, output):
        sizes, packed = self._packed("normed_heads", qkv, query_weight, key_weight, epsilon, output)
        return self._in_blocks("norms.cu", "normed_heads", (query_weight.dtype,), sizes["R"], packed)

    def standard_norm(self, values, bias, scale, factor, epsilon, output):
        sizes, packed = self._packed("standard_norm", values, bias, scale, factor, epsilon, output)
        kind = "float32" if bias is None else bias.dtype
        return self._in_blocks("norms.cu", "standard_norm", (kind,), sizes["R"], packed, 4 * sizes["K"])

    def unfold(self, values: DeviceArray, convolution: Convolution, output: DeviceArray) -> Launch:
        """What a convolution reads; see the contract. A thread has an element."""
        sizes, packed = self._packed("unfold", values, convolution, output)
        blocks = -(-sizes["R"] * sizes["P"] // _THREADS)
        return self._in_blocks("rows.cu", "unfold", (values.dtype, output.dtype), blocks, packed)

    def centered_norm(self, values, weight, mask, epsilon, output):
        sizes, packed = self._packed("centered_norm", values, weight, mask, epsilon, output)
        return self._in_blocks("conformer.cu", "centered_norm", (output.dtype,), -(-sizes["R"] // _ROW_WARPS), packed)

    def add_normed(self, values, weight, epsilon, residual, share, output):
        sizes, packed = self._packed("add_normed", values, weight, epsilon, residual, share, output)
        return self._in_blocks("conformer.cu", "add_normed", (weight.dtype,), sizes["R"], packed, 4 * sizes["K"])

    def gated_convolution(self, values, weight, norm, epsilon, output):
        sizes, packed = self._packed("gated_convolution", values, weight, norm, epsilon, output)
        return self._in_blocks("conformer.cu", "gated_convolution", (output.dtype,), sizes["R"], packed, 4 * sizes["K"])

    def local_attention(self, qkv, relative, first, past, cap, scale, context):
        sizes, packed = self._packed("local_attention", qkv, relative, first, past, cap, scale, context)
        blocks = -(-sizes["R"] * sizes["E"] // sizes["D"] // _ROW_WARPS)
        return self._in_blocks("conformer.cu", "local_attention", (context.dtype,), blocks, packed)

    def product(self, values: DeviceArray, weight: DeviceArray, scale: float, output: DeviceArray) -> Launch:
        sizes, packed = self._packed("product", values, weight, scale, output)
        grid = (-(-sizes["C"] // _TILE), -(-sizes["R"] // _TILE), 1)
        if grid[1] > MAXIMUM_ROWS:
            raise KernelError(f"product: {sizes['R']} rows; expected up to {MAXIMUM_ROWS * _TILE}")
        kernel = row_kernel("product.cu", "product", values.dtype, weight.dtype, output.dtype)
        return Launch(self._module, kernel, grid, _THREADS, 0, (packed,))

    def prepare_heads(self, qkv: DeviceArray, rotary: DeviceArray | None, heads: DeviceArray) -> Launch:
        sizes, packed = self._packed("prepare_heads", qkv, rotary, heads)
        _check_aligned("prepare_heads", 4, qkv, rotary, heads)
        return self._in_blocks("heads.cu", "prepare_heads", (qkv.dtype, heads.dtype), sizes["R"], packed)

    def attention(self, heads, window, visible, scale, context, tiles=None):
        """Attention within windows; see the contract. `tiles`: other than the fastest."""
        sizes, packed = self._packed("attention", heads, window, visible, scale, context)
        _check_aligned("attention", 8, heads, context)
        count, size, windows = sizes["G"], sizes["D"], sizes["R"] // window
        if tiles is None:
            tiles = attention_tiles(size, window, count * windows, self._module.multiprocessors)
        grid = (count, -(-window // _rows(tiles)), windows)
        kernel, shared = attention_kernel(heads.dtype, size, tiles), attention_bytes(size, window)
        return Launch(self._module, kernel, grid, 32 * _WARPS, shared, (packed,))

    def past_attention(self, heads, kept, first, past, scale, context):
        sizes, packed = self._packed("past_attention", heads, kept, first, past, scale, context)
        _check_aligned("past_attention", 8, heads, kept)
        blocks = -(-sizes["R"] // _ROW_WARPS) * sizes["G"]
        return self._in_blocks("past.cu", "past_attention", (heads.dtype,), blocks, packed)

    def _by_row(self, file: str, name: str, kinds: tuple[str, ...], *arguments: Any, column: int = 0) -> Launch:
        """The launch of a kernel whose blocks have a row of the result each; rows begin at a `column` of it."""
        sizes, packed = self._packed(name, *arguments)
        columns = sizes["K"], sizes.get("P", sizes["K"])
        width = _columns_at_once(*columns, column)
        found = [each for each in arguments if isinstance(each, DeviceArray)]
        _check_aligned(name, width, *(each for each in found if each.dtype != "int32" and each.shape[-1] in columns))
        return self._in_blocks(file, name, (*kinds, width), found[-1].shape[0], packed)

    def _in_blocks(
        self, file: str, name: str, kinds: tuple[Any, ...], blocks: int, packed: Any, shared: int = 0
    ) -> Launch:
        """The launch of a kernel of so many blocks."""
        return Launch(self._module, row_kernel(file, name, *kinds), (blocks, 1, 1), _THREADS, shared, (packed,))


def _columns_at_once(*widths: int) -> int:
    """How many columns a thread takes: the order of a sum depends on them, and they on the widths alone."""
    return 1 if any(width % 4 for width in widths) else 4


def _check_aligned(name: str, width: int, *arrays: DeviceArray | None) -> None:
    """Raise KernelError for an array whose elements are not loaded or stored so many at a time."""
    for array in arrays:
        if array is not None and array.pointer % (width * ITEM_SIZES[array.dtype]):
            raise KernelError(
                f"{name}: an array of {array.dtype} at {array.pointer:#x}; expected a multiple of "
                f"{width * ITEM_SIZES[array.dtype]} bytes"
            )
