"""What passes between GPUs that share a model, on the GPU. All ranks launch the same sums, in the same order, and each
waits for those of the others (sum.cu); what else they give each other is copied."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray, members
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.launcher import CUDA_TYPES
from edgellm.kernels.numpy_launch import Enqueued
from edgellm.kernels.ranks.nccl import NcclRank

#: The most GPUs that share a model.
MOST_RANKS = 8
#: Threads of a block, pieces of four floats that a thread has in a round, and blocks.
_THREADS, _DEPTH, _MOST_BLOCKS = 256, 4, 256
#: Blocks that every GPU runs at once, also where several ranks share it; they add what is few, a piece of each thread.
_FEW_BLOCKS = 64
#: What an inbox takes for each rank that writes into it, of two rounds, where what is few is twice as large; flags in a
#: rank's memory for each rank, and rounds.
INBOX_BYTES, FLAGS = 2 * (_MOST_BLOCKS * _DEPTH + _FEW_BLOCKS * 2) * _THREADS * 16, _MOST_BLOCKS


class RanksArgument(ctypes.Structure):
    """`Ranks` of sum.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST_RANKS) for name in ("inboxes", "flags")),
        *members("void* rounds stopped missed", "longlong limit", "int own count early blocks"),
    ]


def blocks_at_once(multiprocessors: Sequence[int], apart: bool) -> int:
    """How many blocks of a sum all ranks run at once: while one waits for what comes, others write and read."""
    return min(_MOST_BLOCKS, max(_FEW_BLOCKS, 2 * min(multiprocessors))) if apart else _FEW_BLOCKS


def ranks_source(dtype: str) -> ModuleSource:
    """The kernels of ranks that compute in `dtype`."""
    macros = {
        "HOST_MOST_RANKS": MOST_RANKS,
        "HOST_THREADS": _THREADS,
        "HOST_DEPTH": _DEPTH,
        "HOST_MOST_BLOCKS": _MOST_BLOCKS,
        "HOST_FEW_BLOCKS": _FEW_BLOCKS,
        "HOST_RANKS_BYTES": ctypes.sizeof(RanksArgument),
    }
    expressions = *(_sum_of(dtype, turns) for turns in (0, 1, _DEPTH)), f"ranks::sum_gathered<{CUDA_TYPES[dtype]}>"
    return ModuleSource(f"ranks_{dtype}", ("ranks/sum.cu",), expressions, (*macros.items(),))


class ArrayCopy(Enqueued):
    """Copies rows on the stream of `module` each time that it is called, between any two GPUs."""

    def __init__(self, module: KernelModule, source: DeviceArray, target: DeviceArray, column: int = 0) -> None:
        """`source` [R, K] becomes the columns from `column` on of `target` [R, N]; of one row, or where both have the
        same size, what is copied is in one piece."""
        driver, item, width = module.driver, ITEM_SIZES[source.dtype], source.shape[-1]
        place = target.pointer + column * item
        self._driver, self._kept = driver, (source, target)
        if source.size in (width, target.size):
            self._copy = partial(driver.cuMemcpyDtoDAsync, place, source.pointer, source.nbytes, module.stream)
            return
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy.srcDevice, copy.dstDevice = source.pointer, place
        copy.WidthInBytes, copy.srcPitch, copy.dstPitch = width * item, width * item, target.shape[-1] * item
        copy.Height = source.size // width
        self._copy = partial(driver.cuMemcpy2DAsync, copy, module.stream)

    def __call__(self) -> None:
        (status,) = self._copy()
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"copying between GPUs failed: {status}")


@dataclass(frozen=True)
class Together(Enqueued):
    """What a rank does with all others by NCCL, in pieces. Each has three `stages`: what counts that the rank has come,
    what all begin as one, and what it does with what came."""

    stages: Sequence[Callable[[], None]]

    def overlap_previous(self) -> None:
        """What counts may start before its predecessor has ended."""
        self.stages[0].overlap_previous()  # type: ignore[attr-defined]


class CudaRank:
    """What one rank launches. Methods are those of `NumpyRank`."""

    def __init__(self, module: KernelModule, dtype: str, argument: RanksArgument, nccl: NcclRank | None = None) -> None:
        """`argument` says where the memory of all ranks is; it must stay there. `nccl` brings things from rank to rank
        (None: they use each other's memory)."""
        self._module, self._dtype, self._argument, self._nccl = module, dtype, argument, nccl
        self._source = ranks_source(dtype)
        module.load(self._source)

    def sum(
        self, values: DeviceArray, output: DeviceArray, residual: DeviceArray | None = None, scale: float = 1.0
    ) -> Launch | Together:
        """See `NumpyRank.sum`; a multiple of 4 elements."""
        before = values if residual is None else residual
        is_float = values.dtype == output.dtype == "float32" and before.dtype in ("float32", self._dtype)
        if not is_float or len({values.size, output.size, before.size}) > 1 or values.size % 4:
            raise KernelError(
                f"ranks add no {values.dtype} {list(values.shape)}, and {before.dtype} {list(before.shape)}, to "
                f"{output.dtype} {list(output.shape)}; expected float32 of one size, a multiple of 4"
            )
        pieces = values.size // 4
        if self._nccl is not None:
            return self._gathered(self._nccl, values, output, residual, scale)
        most = self._argument.blocks
        turns = 1 if pieces <= most * _THREADS else _DEPTH
        blocks = min(most, -(-pieces // (turns * _THREADS)))
        pointers = (ctypes.c_void_p(0 if array is None else array.pointer) for array in (values, output, residual))
        numbers = ctypes.c_int(before.dtype == "float32"), ctypes.c_float(scale), ctypes.c_longlong(pieces)
        kernel = Kernel(self._source, _sum_of(self._dtype, 0 if pieces <= _FEW_BLOCKS * _THREADS else turns))
        return Launch(self._module, kernel, (blocks, 1, 1), _THREADS, 0, (self._argument, *pointers, *numbers))

    def _gathered(
        self, nccl: NcclRank, values: DeviceArray, output: DeviceArray, residual: DeviceArray | None, scale: float
    ) -> Together:
        """As many elements at once as an inbox has place for."""
        stages, inbox = list[Callable[[], None]](), self._argument.inboxes[self._argument.own]
        for first in range(0, values.size, INBOX_BYTES // 4):
            size = min(values.size - first, INBOX_BYTES // 4)
            places = [output.pointer + 4 * first]
            places += [0 if residual is None else residual.pointer + ITEM_SIZES[residual.dtype] * first]
            is_float = residual is None or residual.dtype == "float32"
            gather = partial(nccl.gather, values.pointer + 4 * first, inbox, 4 * size)
            stages += [self._begun(), gather, self._add(size // 4, places, is_float, scale)]
        return Together(stages)

    def _begun(self) -> Launch:
        return Launch(self._module, Kernel(self._source, "begun"), (1, 1, 1), 32, 0, (self._argument,))

    def _add(
        self, pieces: int = 0, places: Sequence[int] = (0, 0), is_float: bool = True, scale: float = 1.0
    ) -> Launch:
        """Adds pieces that were gathered, for the places of an output and a residual, and counts that they have come;
        without pieces what else has come."""
        numbers = ctypes.c_int(is_float), ctypes.c_float(scale), ctypes.c_longlong(pieces)
        kernel = Kernel(self._source, f"ranks::sum_gathered<{CUDA_TYPES[self._dtype]}>")
        blocks = max(1, min(_MOST_BLOCKS, -(-pieces // _THREADS)))
        arguments = self._argument, *map(ctypes.c_void_p, places), *numbers
        return Launch(self._module, kernel, (blocks, 1, 1), _THREADS, 0, arguments)

    def columns(self, values: DeviceArray, widths: Sequence[int], output: DeviceArray) -> ArrayCopy | Together:
        """See `NumpyRank.columns`."""
        own, begins = self._argument.own, [0, *accumulate(widths)]
        if self._nccl is None:
            return self.copy(values, output, begins[own])
        rows, most = values.size // widths[own], INBOX_BYTES // (4 * max(widths))
        whole, stages = output.reshape(rows, begins[-1]), list[Callable[[], None]]()
        for first in range(0, rows, most):
            target = whole[first : first + most]
            inbox, brought, behind = self._argument.inboxes[own], list[Callable[[], None]](), list[Callable[[], None]]()
            for rank, width in enumerate(widths):
                place = values.pointer + 4 * first * width if rank == own else inbox + rank * INBOX_BYTES
                part = DeviceArray(place, (target.shape[0], width), "float32", values)
                brought += [partial(self._nccl.broadcast, rank, place, part.nbytes)] if rank else []
                behind += [self.copy(part, target, begins[rank])] if own == 0 else []
            stages += [self._begun(), partial(_in_turn, brought), partial(_in_turn, [*behind, self._add()])]
        return Together(stages)

    def bring(self, sources: Sequence[DeviceArray], targets: Sequence[DeviceArray]) -> list[Any]:
        """What lets a rank's `targets` be the `sources`, which are the first one's, and its targets, too."""
        if self._nccl is not None:
            brought = [partial(self._nccl.broadcast, 0, target.pointer, target.nbytes) for target in targets]
            return [Together([self._begun(), partial(_in_turn, brought), self._add()])]
        return [self.copy(*pair) for pair in zip(sources, targets, strict=True)] if self._argument.own else []

    def copy(self, source: DeviceArray, target: DeviceArray, column: int = 0) -> ArrayCopy:
        """See `ArrayCopy`."""
        return ArrayCopy(self._module, source, target, column)

    def joined(self) -> Launch:
        """A launch that does nothing: what comes behind it has one predecessor."""
        return Launch(self._module, Kernel(self._source, "joined"), (1, 1, 1), 32, 0, ())


def _in_turn(launches: Sequence[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def _sum_of(dtype: str, turns: int) -> str:
    """Of so many pieces of a thread in a round; 0: of few, each float beside its round."""
    return f"ranks::sum_many<{CUDA_TYPES[dtype]}, {turns}>" if turns else f"ranks::sum_few<{CUDA_TYPES[dtype]}>"
