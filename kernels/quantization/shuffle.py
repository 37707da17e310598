"""Weights of 4 to 8 bits brought into the kernels' layout on the GPU, where they are loaded."""

from __future__ import annotations

import ctypes

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.code_words import TURNS, UPPER_TURNS, Turns
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes


class _Shuffle(ctypes.Structure):
    """`Shuffle` of shuffle.cu."""

    _fields_ = members("void* codes tails data", "longlong stride", "int rows columns tail_bytes")


def _listed(turns: tuple[Turns, ...]) -> str:
    return ", ".join(f"{{{', '.join(map(str, own))}}}" for own in turns)


def shuffle_kernel(codes: Codes, bits: int) -> Kernel:
    """The kernel for codes that are stored in 4 or 8 bits."""
    turns, upper = TURNS[codes], UPPER_TURNS.get(codes)
    macros = (
        ("HOST_SHUFFLE_BYTES", ctypes.sizeof(_Shuffle)),
        ("HOST_TURNS", _listed(turns)),
        ("HOST_UPPER_TURNS", _listed(upper or turns)),
    )
    expression = f"shuffle<{32 // len(turns)}, {bits}, {32 // len(upper) if upper else 0}>"
    name = f"shuffle-{codes}-{bits}"
    return Kernel(ModuleSource(name, ("quantization/shuffle.cu",), (expression,), macros), expression)


def shuffle(
    module: KernelModule, layout: DeviceLayout, codes: DeviceArray, tails: DeviceArray, data: DeviceArray
) -> Launch:
    """A launch that makes `data` uint8 of `layout.shape` as `to_device_layout` does.

    `codes` uint8 [N, K], one in each byte, or of 4 bits [N, K / 2 or more], two, the first column in the lower half;
    `tails` are `tail_bytes`. Raises KernelError where they do not fit, and for more than 524,280 rows.
    """
    down, along = layout.blocks
    tail = layout.block_bytes - layout.code_bytes
    rows, stride = codes.shape
    halves = layout.format.bits == 4 and -(-layout.columns // 2) <= stride < layout.columns
    found = (rows, codes.dtype, tails.shape, data.shape)
    expected = (layout.rows, "uint8", (down, along, tail), layout.shape)
    if found != expected or not (halves or stride == layout.columns) or down > 65_535:
        raise KernelError(
            f"codes {list(codes.shape)}, tails {list(tails.shape)} and data {list(data.shape)} are no weight of "
            f"{layout.rows} rows of {layout.columns} columns: expected {layout.rows} rows of {layout.columns} or half "
            f"as many bytes, {list(expected[2])} and {list(layout.shape)}"
        )
    arguments = _Shuffle(codes.pointer, tails.pointer, data.pointer, stride, layout.rows, layout.columns, tail)
    kernel = shuffle_kernel(layout.format.codes, 4 if halves else 8)
    return Launch(module, kernel, (along, down, 1), layout.code_bytes // 16 + tail // 16, 0, (arguments,))
