"""Codes of weights in blocks, as GGUF files have them, brought into a byte each: on the host, and on the GPU, where
`shuffle` reads them.

Layouts of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h): a block is some columns of a row. Its
codes' lower bits are halves of bytes, those of `span` columns the lower ones, those of the next the upper ones; upper
bits stand apart, side by side in the same bits of `lanes` bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS, BLOCK_ROWS

_THREADS = 256
#: Columns that a thread makes: those of any block are a multiple of it.
_THREAD_COLUMNS = 8


@dataclass(frozen=True)
class BlockCodes:
    """Where a block of `size` bytes has the codes of its `columns`: lower bits from the byte `low` on, `upper` bits
    more from the byte `high` on. Without a `span` each byte is a code, a two's complement that counts from 128 here.
    `signed_zero`: the code 8 is a 0 as the code 0 is, by which it is replaced. Where scales are `Levels` of
    `level_parts`, their factors stand from the byte `factors` on, and each is of a `group` of columns."""

    columns: int
    size: int
    low: int
    span: int
    upper: int = 0
    high: int = 0
    lanes: int = 0
    signed_zero: bool = False
    factors: int = 0
    level_parts: int = 0
    group: int = 32


#: By the types' names.
BLOCK_CODES = MappingProxyType(
    {
        "q4_0": BlockCodes(32, 18, 2, 16),
        "q4_1": BlockCodes(32, 20, 4, 16),
        "q5_0": BlockCodes(32, 22, 6, 16, upper=1, high=2, lanes=1),
        "q5_1": BlockCodes(32, 24, 8, 16, upper=1, high=4, lanes=1),
        "q8_0": BlockCodes(32, 34, 2, 0),
        "q4_k": BlockCodes(256, 144, 16, 32, level_parts=2),
        "q5_k": BlockCodes(256, 176, 48, 32, upper=1, high=16, lanes=32, level_parts=2),
        "q6_k": BlockCodes(256, 210, 0, 64, upper=2, high=128, lanes=32, factors=208, level_parts=1, group=16),
        "iq4_nl": BlockCodes(32, 18, 2, 16),
        "iq4_xs": BlockCodes(256, 136, 8, 16, level_parts=1),
        "mxfp4": BlockCodes(32, 17, 1, 16, signed_zero=True),
    }
)


def block_codes(kind: str, data: np.ndarray) -> np.ndarray:
    """The codes of rows of blocks [N, bytes of a row] uint8 of a kind: uint8 [N, K]."""
    form, rows = BLOCK_CODES[kind], data.shape[0]
    blocks = data.reshape(rows, -1, form.size)
    if not form.span:
        return (blocks[..., form.low :] ^ 128).reshape(rows, -1)
    low = blocks[..., form.low : form.low + form.columns // 2]
    low = low.reshape(*blocks.shape[:2], -1, 1, form.span)
    codes = (low >> np.array([[0], [4]], np.uint8) & 15).reshape(rows, -1, form.columns)
    if form.upper:
        high = blocks[..., form.high : form.high + form.columns * form.upper // 8]
        high = high.reshape(*blocks.shape[:2], -1, 1, form.lanes)
        shifts = np.arange(0, 8, form.upper, dtype=np.uint8)[:, None]
        codes |= (high >> shifts & (1 << form.upper) - 1).reshape(codes.shape) << 4
    if form.signed_zero:
        codes[codes == 8] = 0
    return codes.reshape(rows, -1)


class _Unblock(ctypes.Structure):
    """`Unblock` of block_codes.cu."""

    _fields_ = members("void* blocks codes", "longlong eights")


class _Levels(ctypes.Structure):
    """`Levels` of block_codes.cu."""

    _fields_ = members("void* blocks tails", "int rows along first end")


def block_kernel(kind: str, expression: str) -> Kernel:
    """A kernel of block_codes.cu for blocks of a kind: `unblock`, or `levels`."""
    form = BLOCK_CODES[kind]
    macros = (
        ("HOST_UNBLOCK_BYTES", ctypes.sizeof(_Unblock)),
        ("HOST_LEVELS_BYTES", ctypes.sizeof(_Levels)),
        *((f"HOST_{name.upper()}", int(value)) for name, value in vars(form).items()),
    )
    expressions = ("unblock", "levels") if form.level_parts else ("unblock",)
    return Kernel(ModuleSource(f"unblock-{kind}", ("quantization/block_codes.cu",), expressions, macros), expression)


def unblock(module: KernelModule, blocks: DeviceArray, codes: DeviceArray, kind: str) -> Launch:
    """A launch that makes `codes` uint8 [N, K] of rows of blocks uint8 [N, bytes of a row], as `block_codes` does.
    Raises KernelError where they do not fit."""
    form, (rows, columns) = BLOCK_CODES[kind], codes.shape
    expected = (rows, columns // form.columns * form.size)
    if (blocks.dtype, codes.dtype) != ("uint8", "uint8") or blocks.shape != expected or columns % form.columns:
        raise KernelError(
            f"blocks {blocks.dtype} {list(blocks.shape)} of {kind} do not become codes {codes.dtype} "
            f"{list(codes.shape)}: expected uint8 {list(expected)}, rows of a multiple of {form.columns} columns"
        )
    eights = rows * columns // _THREAD_COLUMNS
    arguments = _Unblock(blocks.pointer, codes.pointer, eights)
    return Launch(module, block_kernel(kind, "unblock"), (-(-eights // _THREADS), 1, 1), _THREADS, 0, (arguments,))


def block_levels(module: KernelModule, blocks: DeviceArray, tails: DeviceArray, kind: str, first: int = 0) -> Launch:
    """A launch that makes what `tail_bytes` gives of rows of blocks uint8 [N, bytes of a row] that have `Levels`.

    `tails` uint8 [row blocks, K / 128, bytes]: the first row of blocks is its row `first`; where the last one ends no
    row block, zeros follow. Raises KernelError where they do not fit.
    """
    form, (rows, row_bytes) = BLOCK_CODES[kind], blocks.shape
    along = row_bytes // form.size * form.columns // BLOCK_COLUMNS
    expected = along, BLOCK_ROWS * (2 + BLOCK_COLUMNS // form.group) * form.level_parts
    end = -(-(first + rows) // BLOCK_ROWS) * BLOCK_ROWS
    if not form.level_parts or tails.shape[1:] != expected or end > tails.shape[0] * BLOCK_ROWS:
        raise KernelError(
            f"rows {first} on of blocks {list(blocks.shape)} of {kind} do not become tails {list(tails.shape)}: "
            f"expected {[end // BLOCK_ROWS, *expected]}"
        )
    arguments = _Levels(blocks.pointer, tails.pointer, rows, along, first, end)
    blocks_of_threads = -(-(end - first) * along // _THREADS)
    return Launch(module, block_kernel(kind, "levels"), (blocks_of_threads, 1, 1), _THREADS, 0, (arguments,))
