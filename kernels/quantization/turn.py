"""Weights of 4 to 8 bits brought into the kernels' layout on the GPU, where they are loaded: their codes, as they are
published, into the order that `shuffle` reads, and from that into the layout."""

from __future__ import annotations

import ctypes

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.code_words import TURNS, UPPER_TURNS, Turns
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes

#: Where in its word each of eight neighbouring rows' code is in AWQ's order.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
#: Arrangements of words that are turned, as the kernel numbers them.
TURNED = ("columns", "awq", "pairs")
_TILE_ROWS, _TILE_WORDS, _THREADS = 64, 32, 256


class _Turn(ctypes.Structure):
    """`Turn` of turn.cu."""

    _fields_ = members("void* words target", "int rows width")


class _Arrange(ctypes.Structure):
    """`Arrange` of turn.cu."""

    _fields_ = members("void* codes target order", "longlong words", "int columns row_bytes")


def _kernel(expression: str) -> Kernel:
    macros = (
        ("HOST_AWQ_PLACES", ", ".join(map(str, AWQ_PLACES))),
        ("HOST_TURN_BYTES", ctypes.sizeof(_Turn)),
        ("HOST_ARRANGE_BYTES", ctypes.sizeof(_Arrange)),
    )
    return Kernel(ModuleSource(expression, ("quantization/turn.cu",), (expression,), macros), expression)


def turn(module: KernelModule, words: DeviceArray, target: DeviceArray, arrangement: str) -> Launch:
    """A launch that makes `target` uint32 [N, W] of words of neighbouring columns.

    `words` uint32 are, by their `arrangement`: "columns" [W, N], the same otherwise; "awq" [8 W, N / 8], a word the
    codes of 4 bits of a column and eight neighbouring rows, at `AWQ_PLACES`; "pairs" [N / 2, 2 W], a byte the codes of
    a column and two rows, as two's complements. Raises KernelError where they do not fit.
    """
    rows, width = target.shape
    together = {"columns": 1, "awq": 8, "pairs": 2}[arrangement]
    expected = {"columns": (width, rows), "awq": (8 * width, rows // 8), "pairs": (rows // 2, 2 * width)}[arrangement]
    if words.shape != expected or rows % together or {words.dtype, target.dtype} != {"uint32"}:
        raise KernelError(
            f"words {words.dtype} {list(words.shape)} do not become {target.dtype} {list(target.shape)}: expected "
            f"uint32 {list(expected)}"
        )
    grid, arguments = (
        (-(-rows // _TILE_ROWS), -(-width // _TILE_WORDS), 1),
        (words.pointer, target.pointer, rows, width),
    )
    kernel = _kernel(f"turn<{TURNED.index(arrangement)}>")
    return Launch(module, kernel, grid, _THREADS, 0, (_Turn(*arguments),))


def arrange(module: KernelModule, codes: DeviceArray, target: DeviceArray, order: DeviceArray) -> Launch:
    """A launch that makes column k of `target` uint8 [N, B] column order[k] of `codes`, of as many bytes.

    `order` int32 [K]; a byte holds one code, where B is K or somewhat more, or two, the first column in the lower half.
    Raises KernelError where they do not fit, or rows are no whole words.
    """
    (rows, row_bytes), columns = codes.shape, order.size
    bits = 8 if row_bytes >= columns else 4
    dtypes = (codes.dtype, target.dtype, order.dtype)
    if dtypes != ("uint8", "uint8", "int32") or target.shape != codes.shape or row_bytes % 4 or 2 * row_bytes < columns:
        raise KernelError(
            f"codes {codes.dtype} {list(codes.shape)} are not arranged to {target.dtype} {list(target.shape)} by an "
            f"order of {columns} columns: expected bytes of one shape, rows of whole words, one or two codes a byte"
        )
    words = rows * row_bytes // 4
    arguments = _Arrange(codes.pointer, target.pointer, order.pointer, words, columns, row_bytes)
    return Launch(module, _kernel(f"arrange<{bits}>"), (-(-words // _THREADS), 1, 1), _THREADS, 0, (arguments,))


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
    """A launch that makes `data` uint8 of `layout.shape` of a weight's codes and what stands beside them.

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
