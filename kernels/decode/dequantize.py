"""Packed weights as dense matrices on the GPU, where something multiplies them that knows no others."""

from __future__ import annotations

import ctypes
from functools import cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES, MACROS, addresses
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.device_layout import PackedMatrix

#: Warps of a block, each of which makes a block of weights dense.
_WARPS = 8


class _Dequantize(ctypes.Structure):
    """`Dequantize` of dequantize.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "values", "order", "scales")),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
    ]


@cache
def dequantize_kernel(dtype: str, scales: int, mode: int, arranged: bool = False) -> Kernel:
    """The kernel for weights of so many `DeviceLayout.scales` and a `DeviceLayout.mode`, in a compute dtype."""
    expression = f"decode::packed::dequantize<{CUDA_TYPES[dtype]}, {scales}, {mode}, {str(arranged).lower()}>"
    macros = (("HOST_DEQUANTIZE_BYTES", ctypes.sizeof(_Dequantize)), ("HOST_WARPS", _WARPS))
    name = f"dequantize-{dtype}-{scales}-{mode}{'-arranged' * arranged}"
    return Kernel(ModuleSource(name, ("decode/dequantize.cu",), (expression,), (*MACROS, *macros)), expression)


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
    return Launch(module, kernel, (-(-down * along // _WARPS), 1, 1), 32 * _WARPS, 0, (arguments,))
