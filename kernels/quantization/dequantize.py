"""Weights of 4 bits as dense matrices on the GPU, where something multiplies them that knows no others."""

from __future__ import annotations

import ctypes
from functools import cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES, MACROS
from edgellm.kernels.decode.packed_linear import packed_macros, scales_and_mode
from edgellm.kernels.decode.tiled_linear import TILED_LINEAR_BYTES
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.device_layout import PackedMatrix

#: Warps of a block, and blocks of weights that a warp reads at once.
_WARPS, _BLOCKS = 8, 2


class _Dequantize(ctypes.Structure):
    """`Dequantize` of dequantize.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "values")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
    ]


@cache
def _kernel(dtype: str, scales: int, mode: int) -> Kernel:
    expression = f"decode::packed::dequantize<{CUDA_TYPES[dtype]}, {scales}, {mode}>"
    macros = (("HOST_DEQUANTIZE_BYTES", ctypes.sizeof(_Dequantize)), ("HOST_WARPS", _WARPS), ("HOST_BLOCKS", _BLOCKS))
    every = (*MACROS, *packed_macros(TILED_LINEAR_BYTES), *macros)
    name = f"dequantize-{dtype}-{scales}-{mode}"
    return Kernel(ModuleSource(name, ("quantization/dequantize.cu",), (expression,), every), expression)


def dequantize(module: KernelModule, weight: PackedMatrix, values: DeviceArray) -> Launch:
    """A launch that makes `values` [N, K], of the dtype in which the weight is rounded, what `PackedWeight.values` are.

    Launches that make other matrices may overlap (`Launch.overlap_previous`). Raises KernelError where `values` are not
    the weight's, and for columns that do not come in eights.
    """
    layout = weight.layout
    if (values.shape, values.dtype) != (weight.shape, weight.dtype) or layout.columns % 8:
        raise KernelError(
            f"values {values.dtype} {list(values.shape)} cannot hold a weight {weight.dtype} {list(weight.shape)}, "
            "whose columns must come in eights"
        )
    down, along = layout.blocks
    arguments = _Dequantize(weight.pointer, values.pointer, layout.rows, layout.columns)
    kernel = _kernel(weight.dtype, *scales_and_mode(layout))
    return Launch(module, kernel, (-(-down * along // (_WARPS * _BLOCKS)), 1, 1), 32 * _WARPS, 0, (arguments,))
