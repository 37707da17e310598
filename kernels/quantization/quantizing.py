"""Launches of the kernels that quantize weights: the search of scales, and float32 products of calibration rows."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import CUDA_TYPES
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Columns of a group for which there can be a factor matrix.
MATRIX_SIZES = (32, 64, 128)
#: Of search.cu: warps of a block, and rows of a warp.
_WARPS, _WARP_ROWS = 4, 8
#: Of products.cu: rows and columns of a block, and its threads.
_TILE, _THREADS = 128, 256


class _Search(ctypes.Structure):
    """`Search` of search.cu."""

    _fields_ = members(
        "void* weights factors shares scales zeros codes", "longlong columns", "int rows share_count", "float last"
    )


@dataclass(frozen=True)
class Quantized:
    """Where a weight [N, K] goes: `codes` uint8 [N, K], `scales` and `zeros` float32 [N, groups]."""

    codes: DeviceArray
    scales: DeviceArray
    zeros: DeviceArray


def search(
    module: KernelModule,
    format: WeightFormat,
    weights: DeviceArray,
    factors: DeviceArray | None,
    shares: DeviceArray,
    quantized: Quantized,
) -> Launch:
    """A launch that quantizes `weights` float32 [N, K] as `quantize_rows` of engines/quantizer/rounding.py does.

    `factors` float32 [groups, size, size], [K] or None; `shares` float32: the clipping. Without zero points `zeros` are
    the middle of the codes. Raises KernelError for a group that does not divide K, and for matrices of other sizes than
    `MATRIX_SIZES`.
    """
    rows, columns = weights.shape
    size = format.group or columns
    has_matrices = factors is not None and len(factors.shape) == 3
    if columns % size or (has_matrices and size not in MATRIX_SIZES):
        raise KernelError(f"groups of {size} columns: expected to divide {columns}, and with factors {MATRIX_SIZES}")
    arguments = _Search(
        weights.pointer,
        factors.pointer if factors is not None else None,
        shares.pointer,
        quantized.scales.pointer,
        quantized.zeros.pointer,
        quantized.codes.pointer,
        columns,
        rows,
        shares.size,
        (1 << format.bits) - 1,
    )
    options, groups = f"{CUDA_TYPES[format.dtype]}, {{}}{str(format.zeros).lower()}", columns // size
    if has_matrices:
        kernel = _kernel(f"search_groups<{options.format(f'{size}, ')}>")
        shared = 4 * size * (size + 2 * _WARPS * _WARP_ROWS)
        grid = groups, -(-rows // (_WARPS * _WARP_ROWS)), 1
        return Launch(module, kernel, grid, 32 * _WARPS, shared, (arguments,))
    grid = -(-rows * groups // _WARPS), 1, 1
    kernel = _kernel(f"search_columns<{options.format('')}>")
    return Launch(module, kernel, grid, 32 * _WARPS, 0, (arguments, ctypes.c_int(size)))


def linear_rows(module: KernelModule, inputs: DeviceArray, weights: DeviceArray, outputs: DeviceArray) -> Launch:
    """`outputs` float32 [M, N] = `inputs` [M, K] times the transpose of `weights` [N, K]."""
    (rows, depth), columns = inputs.shape, weights.shape[0]
    sizes = (ctypes.c_int(size) for size in (rows, columns, depth))
    pointers = (ctypes.c_void_p(array.pointer) for array in (inputs, weights, outputs))
    grid = -(-columns // _TILE), -(-rows // _TILE), 1
    return Launch(module, Kernel(_PRODUCTS, "linear_rows"), grid, _THREADS, 0, (*pointers, *sizes))


def add_moments(module: KernelModule, inputs: DeviceArray, products: DeviceArray, magnitudes: DeviceArray) -> Launch:
    """Add to `products` float32 [groups, size, size] those of the columns of `inputs` [M, K], summed over its rows, and
    to `magnitudes` [K] the sums of absolute values. Raises KernelError for more than 128 columns in a group."""
    groups, size, _ = products.shape
    if size > _TILE:
        raise KernelError(f"groups of {size} columns: expected at most {_TILE}")
    sizes = (ctypes.c_int(size) for size in (*inputs.shape, size))
    pointers = (ctypes.c_void_p(array.pointer) for array in (inputs, products, magnitudes))
    return Launch(module, Kernel(_PRODUCTS, "add_moments"), (groups, 1, 1), _THREADS, 0, (*pointers, *sizes))


_PRODUCTS = ModuleSource("calibration-products", ("quantization/products.cu",))


def _kernel(expression: str) -> Kernel:
    macros = (("HOST_SEARCH_BYTES", ctypes.sizeof(_Search)),)
    return Kernel(ModuleSource("search-scales", ("quantization/search.cu",), (expression,), macros), expression)
