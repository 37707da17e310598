"""Words of codes, as they are published, turned on the GPU into the order that `shuffle` reads."""

from __future__ import annotations

import ctypes

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Where in its word each of eight neighbouring rows' code is in AWQ's order.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_TILE_ROWS, _TILE_WORDS, _THREADS = 64, 32, 256


class _Turn(ctypes.Structure):
    """`Turn` of turn.cu."""

    _fields_ = [
        ("words", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
    ]


def turn_kernel(awq: bool) -> Kernel:
    """The kernel for words of columns, or of AWQ's rows."""
    macros = (
        ("HOST_AWQ_PLACES", ", ".join(map(str, AWQ_PLACES))),
        ("HOST_TURN_BYTES", ctypes.sizeof(_Turn)),
    )
    expression = f"turn<{str(awq).lower()}>"
    return Kernel(ModuleSource(f"turn-{awq}", ("quantization/turn.cu",), (expression,), macros), expression)


def turn(module: KernelModule, words: DeviceArray, target: DeviceArray, awq: bool = False) -> Launch:
    """A launch that makes `target` uint32 [N, W] of words of neighbouring columns.

    `words` uint32 are [W, N], the same otherwise; or with `awq` [8 W, N / 8], a word the codes of 4 bits of a column
    and eight neighbouring rows, at `AWQ_PLACES`. Raises KernelError where they do not fit.
    """
    rows, width = target.shape
    expected = (8 * width, rows // 8) if awq else (width, rows)
    if words.shape != expected or (awq and rows % 8) or {words.dtype, target.dtype} != {"uint32"}:
        raise KernelError(
            f"words {words.dtype} {list(words.shape)} do not become {target.dtype} {list(target.shape)}: expected "
            f"uint32 {list(expected)}"
        )
    grid = -(-rows // _TILE_ROWS), -(-width // _TILE_WORDS), 1
    return Launch(module, turn_kernel(awq), grid, _THREADS, 0, (_Turn(words.pointer, target.pointer, rows, width),))
