"""What passes between GPUs that share a model, on the GPU: see exchange.cu. All ranks make the same launches, in the
same order, and each launch waits for those of the others."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import CUDA_TYPES

#: The most GPUs that share a model, and arrays that one launch brings to all.
MOST_RANKS, MOST_ARRAYS = 8, 12
#: Threads of a block, pieces of a thread in a round, and blocks: as many as every GPU runs at once.
_THREADS, _DEPTH, _MOST_BLOCKS = 256, 8, 64
#: Bytes that a thread has at a time.
_PIECE = 16
#: What an inbox takes for each rank that writes into it: the messages of two rounds.
INBOX_BYTES = 2 * _MOST_BLOCKS * _DEPTH * _THREADS * _PIECE
#: Flags in a rank's memory for each rank, and rounds.
FLAGS = _MOST_BLOCKS


class RanksArgument(ctypes.Structure):
    """`Ranks` of exchange.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST_RANKS) for name in ("inboxes", "flags")),
        *members("void* rounds stopped missed", "longlong limit", "int own count early"),
    ]


class _Arrays(ctypes.Structure):
    """`Arrays` of exchange.cu."""

    _fields_ = [
        ("places", ctypes.c_void_p * MOST_ARRAYS),
        *((name, ctypes.c_longlong * MOST_ARRAYS) for name in ("bytes", "ends")),
    ]


class _Begins(ctypes.Structure):
    """`Begins` of exchange.cu."""

    _fields_ = [("of", ctypes.c_int * (MOST_RANKS + 1))]


def exchange_source(dtype: str) -> ModuleSource:
    """The kernels of ranks that compute in `dtype`."""
    macros = {
        "MOST_RANKS": MOST_RANKS,
        "THREADS": _THREADS,
        "DEPTH": _DEPTH,
        "MOST_BLOCKS": _MOST_BLOCKS,
        "MOST_ARRAYS": MOST_ARRAYS,
        "RANKS_BYTES": ctypes.sizeof(RanksArgument),
        "ARRAYS_BYTES": ctypes.sizeof(_Arrays),
    }
    hosts = tuple((f"HOST_{name}", value) for name, value in macros.items())
    expressions = tuple(_sum_of(dtype, turns) for turns in (1, _DEPTH))
    return ModuleSource(f"ranks_{dtype}", ("ranks/exchange.cu",), expressions, hosts)


class CudaRank:
    """The kernels of one rank; a call gives a `Launch`. Methods are those of `NumpyRank`."""

    def __init__(self, module: KernelModule, dtype: str, argument: RanksArgument) -> None:
        """`argument` says where the memory of all ranks is; it must stay there."""
        self._module, self._dtype, self._argument = module, dtype, argument
        self._source = exchange_source(dtype)
        module.load(self._source)

    def sum(
        self, values: DeviceArray, output: DeviceArray, residual: DeviceArray | None = None, scale: float = 1.0
    ) -> Launch:
        """See `NumpyRank.sum`; a multiple of 4 elements."""
        dtypes = values.dtype, output.dtype, "float32" if residual is None else residual.dtype
        sizes = {values.size, output.size} | (set() if residual is None else {residual.size})
        if dtypes[:2] != ("float32",) * 2 or dtypes[2] not in ("float32", self._dtype) or len(sizes) > 1:
            found = "" if residual is None else f", and a residual {residual.dtype} {list(residual.shape)}"
            raise KernelError(
                f"ranks add no {values.dtype} {list(values.shape)} to {output.dtype} {list(output.shape)}{found}; "
                "expected float32 of one size"
            )
        if values.size % 4:
            raise KernelError(f"ranks add a multiple of 4 elements, not {values.size}")
        pieces = values.size // 4
        blocks, depth = _grid(pieces)
        kernel = Kernel(self._source, _sum_of(self._dtype, 1 if depth == 1 else _DEPTH))
        before = ctypes.c_void_p(0 if residual is None else residual.pointer)
        pointers = ctypes.c_void_p(values.pointer), ctypes.c_void_p(output.pointer), before
        numbers = ctypes.c_int(dtypes[2] == "float32"), ctypes.c_float(scale)
        return self._launch(kernel, blocks, pieces, depth, *pointers, *numbers)

    def columns(self, values: DeviceArray, widths: Sequence[int], output: DeviceArray) -> Launch:
        """See `NumpyRank.columns`."""
        rows, begins = values.size // values.shape[-1], (0, *accumulate(widths))
        fits = len(widths) == self._argument.count and widths[self._argument.own] == values.shape[-1]
        if not fits or (values.dtype, output.dtype) != ("float32",) * 2 or output.size != rows * begins[-1]:
            raise KernelError(
                f"columns {values.dtype} {list(values.shape)} of ranks that have {list(widths)} do not fill "
                f"{output.dtype} {list(output.shape)}"
            )
        of_row = -(-max(widths) // 4)
        blocks, depth = _grid(rows * of_row)
        ends = _Begins((ctypes.c_int * (MOST_RANKS + 1))(*begins))
        arguments = ctypes.c_void_p(values.pointer), ctypes.c_void_p(output.pointer), ends, ctypes.c_int(of_row)
        return self._launch(Kernel(self._source, "join_columns"), blocks, rows * of_row, depth, *arguments)

    def share(self, arrays: Sequence[DeviceArray]) -> Launch:
        """See `NumpyRank.share`; up to `MOST_ARRAYS`."""
        if not 0 < len(arrays) <= MOST_ARRAYS:
            raise KernelError(f"1 to {MOST_ARRAYS} arrays are brought to all ranks at once, not {len(arrays)}")
        sizes = [array.nbytes for array in arrays]
        ends = [*accumulate(-(-size // _PIECE) for size in sizes)]
        places = (ctypes.c_void_p * MOST_ARRAYS)(*(array.pointer for array in arrays))
        numbers = ((ctypes.c_longlong * MOST_ARRAYS)(*each) for each in (sizes, ends))
        blocks, depth = _grid(ends[-1])
        return self._launch(Kernel(self._source, "share_arrays"), blocks, ends[-1], depth, _Arrays(places, *numbers))

    def joined(self) -> Launch:
        """A launch that does nothing: what comes behind it has one predecessor."""
        return Launch(self._module, Kernel(self._source, "joined"), (1, 1, 1), 32, 0, ())

    def _launch(self, kernel: Kernel, blocks: int, pieces: int, depth: int, *arguments: Any) -> Launch:
        size = ctypes.c_longlong(pieces), ctypes.c_int(depth)
        return Launch(self._module, kernel, (blocks, 1, 1), _THREADS, 0, (self._argument, *arguments, *size))


def _sum_of(dtype: str, turns: int) -> str:
    return f"ranks::sum_ranks<{CUDA_TYPES[dtype]}, {turns}>"


def _grid(pieces: int) -> tuple[int, int]:
    """Blocks of a message, and pieces that a thread has in a round: the same on all ranks."""
    blocks = min(_MOST_BLOCKS, max(1, -(-pieces // _THREADS)))
    return blocks, min(_DEPTH, max(1, -(-pieces // (blocks * _THREADS))))
