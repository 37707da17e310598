"""Where ranks on GPUs give each other what they have, how their work stands in one stream, and tensors of which each
holds the part that it computes with, in memory of its own."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import permutations, zip_longest
from typing import Any

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice, no_garbage_collection
from edgellm.engines.backends.rank_nccl import NcclRanks
from edgellm.engines.errors import DeviceLostError
from edgellm.engines.model.sharding import Range
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.gpu import reaches
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.ranks.launcher import FLAGS, INBOX_BYTES, MOST_RANKS, CudaRank, RanksArgument, blocks_at_once

#: The variable of the environment by which NCCL adds also where GPUs reach each other's memory: set it to 1.
BY_NCCL = "EDGELLM_NCCL"
#: What a rank waits for another before it ends the model. Long: kernels may have to be loaded first.
WAIT_SECONDS = 30.0
#: How many launches of a rank are enqueued before it is another one's turn.
_AT_A_TIME = 16


def reach_each_other(gpus: Sequence[int]) -> bool:
    """Whether kernels on GPUs of these indices are to use each other's memory, and can."""
    asked = os.environ.get(BY_NCCL) == "1"
    return not asked and all(one == other or reaches(one, other) for one, other in permutations(gpus, 2))


class RankMemory:
    """Inboxes and flags of ranks on devices, of which several may be the same, and whether one has waited in vain.

    `nccl` gathers what ranks add where one does not reach another's memory, or the environment asks for it; else None.
    """

    def __init__(self, devices: Sequence[CudaDevice], wait_seconds: float = WAIT_SECONDS) -> None:
        """Raises MissingDependencyError where NCCL is needed and not there; see `NcclRanks`."""
        count = len(devices)
        self._devices, self._seconds = devices, wait_seconds
        self._failure: str | None = None
        together = reach_each_other([device.gpu.index for device in devices])
        together = together and all(_use_memory(one, other) for one, other in permutations(devices, 2))
        self._missed = devices[0].host_visible((count, 2), "uint32")
        self._arrays = [self._of_rank(device, count) for device in devices]
        for device in devices:
            with device.current():
                device.synchronize()
        #: What kernels of each rank take.
        self.arguments = [self._argument(rank) for rank in range(count)]
        self.nccl = None if together else NcclRanks(devices, [inbox for inbox, *_ in self._arrays], wait_seconds)
        if self.nccl is not None:
            self.nccl.watch(devices[0].seen(self._missed), self.fail, self._has_missed)

    def kernels(self, rank: int, module: KernelModule, dtype: str) -> CudaRank:
        """What a rank launches."""
        nccl = None if self.nccl is None else self.nccl.ranks[rank]
        return CudaRank(module, dtype, self.arguments[rank], nccl)

    def close(self) -> None:
        """End what NCCL has."""
        if self.nccl is not None:
            self.nccl.close()

    @staticmethod
    def nbytes(count: int) -> int:
        """What a rank of so many takes on its GPU."""
        return count * INBOX_BYTES + (count + 1) * FLAGS * 4

    def _of_rank(self, device: CudaDevice, count: int) -> tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]:
        """Inbox, flags, rounds, and whether the rank has stopped."""
        with device.current():
            inbox, flags = device.zeros((count * INBOX_BYTES,), "uint8"), device.zeros((FLAGS * count,), "uint32")
            return inbox, flags, device.zeros((FLAGS,), "uint32"), device.zeros((1,), "uint32")

    def _argument(self, rank: int) -> RanksArgument:
        inboxes, flags, rounds, stopped = zip(*self._arrays, strict=True)
        places = [(ctypes.c_void_p * MOST_RANKS)(*(array.pointer for array in each)) for each in (inboxes, flags)]
        own = rounds[rank].pointer, stopped[rank].pointer, self._missed.pointer + 8 * rank
        apart = len({device.gpu.index for device in self._devices}) == len(self._devices)
        blocks = blocks_at_once([device.gpu.multiprocessors for device in self._devices], apart)
        return RanksArgument(*places, *own, int(self._seconds * 1e9), rank, len(self._arrays), apart, blocks)

    def fail(self, rank: int, error: BaseException) -> DeviceLostError:
        """The error of a rank that has failed, now or before; nothing runs from then on."""
        if self._failure is None:
            said = str(error) or type(error).__name__
            self._failure = f"rank {rank} of {len(self._devices)} {self._place(rank)} failed: {said}"
        return DeviceLostError(f"{self._failure}. Open the model anew")

    def check(self) -> None:
        """Raise DeviceLostError that names a rank which has failed, or for which another has waited in vain."""
        if self._failure is None and self.nccl is None:
            missed = self._devices[0].seen(self._missed)[:, 0]
            for late in np.flatnonzero(missed)[:1]:
                self._has_missed(int(missed[late]) - 1, int(late))
        if self._failure is not None:
            raise DeviceLostError(f"{self._failure}. Open the model anew")

    def _has_missed(self, rank: int, other: int) -> None:
        """`other` has waited for a rank in vain."""
        self._failure = self._failure or (
            f"rank {rank} of {len(self._devices)} {self._place(rank)} has failed: rank {other} waited "
            f"{self._seconds:g} s for what it computes"
        )

    def _place(self, rank: int) -> str:
        return f"(GPU {self._devices[rank].gpu.index})"


def _use_memory(one: CudaDevice, other: CudaDevice) -> bool:
    """Whether kernels of one device may use the other's memory, which is made possible."""
    if one.gpu.index == other.gpu.index:
        return True
    from cuda.bindings import driver

    with other.current():
        _, context = driver.cuCtxGetCurrent()
    with one.current():
        (enabled,) = driver.cuCtxEnablePeerAccess(context, 0)
    return enabled in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)


class RankStreams:
    """Runs what ranks enqueue on streams of their own, within the work of the first one's stream, captured or not."""

    def __init__(self, devices: Sequence[CudaDevice], memory: RankMemory, joined: Callable[[], None]) -> None:
        """`joined` is a launch of the first rank's that does nothing."""
        self._devices, self._memory, self._joined = devices, memory, joined
        self._events = [self._event(device) for device in devices]

    @staticmethod
    def _event(device: CudaDevice) -> Any:
        import pycuda.driver as cuda

        with device.current():
            return cuda.Event(cuda.event_flags.DISABLE_TIMING)

    def run(self, launches: Sequence[Sequence[Callable[[], object]]]) -> None:
        """Enqueue the launches of each rank, behind what the first one's stream has, and let it wait for all.

        A few of each rank by turns: a launch that finds its stream full waits for the GPU, which may wait for another
        rank, as do loading a kernel and freeing memory: neither is done in between. Raises DeviceLostError that names
        a rank which has failed, now or before.
        """
        self._memory.check()
        with no_garbage_collection():
            self._run(launches)

    def _run(self, launches: Sequence[Sequence[Callable[[], object]]]) -> None:
        first, *others = self._devices
        rank = 0
        try:
            self._events[0].record(first.stream)
            for rank in range(1, len(self._devices)):
                with self._devices[rank].current():
                    self._devices[rank].stream.wait_for_event(self._events[0])
            for number, parts in enumerate(zip_longest(*map(_parts, launches), fillvalue=())):
                turns = [[own[at : at + _AT_A_TIME] for at in range(0, len(own), _AT_A_TIME)] for own in parts]
                with self._memory.nccl.communicators.group() if self._memory.nccl and number % 2 else nullcontext():
                    for turn in zip_longest(*turns, fillvalue=()):
                        for rank, own in enumerate(turn):
                            with self._devices[rank].current():
                                for launch in own:
                                    launch()
            for rank, device in enumerate(others, 1):
                with device.current():
                    self._events[rank].record(device.stream)
                first.stream.wait_for_event(self._events[rank])
            rank = 0
            self._joined()
        except Exception as error:
            raise self._memory.fail(rank, error) from error


def _parts(launches: Sequence[Callable[[], object]]) -> list[list[Callable[[], object]]]:
    """What a rank enqueues by itself, what it begins as one with all others, and so on, one behind the other."""
    parts: list[list[Callable[[], object]]] = [[]]
    for launch in launches:
        for number, stage in enumerate(getattr(launch, "stages", (launch,))):  # of `Together`
            parts += [[], []] if number % 3 == 1 else []
            parts[-2 if number % 3 == 1 else -1].append(stage)
    return parts


@dataclass(frozen=True)
class RankedArray:
    """A tensor of which each rank has some of an `axis`: a state [S, n, C, D] heads, columns of a convolution [S, n, K]
    channels, adapters and a recurrent layer's inputs [R, N] columns. `parts` are which, in one range or several, and
    where. It is used as `DeviceArray` is.

    Where there are fewer heads than ranks, several have the same. Of one slot a state is [n, C, D]; then a rank may
    have none of what is looked at.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[tuple[Range, ...], DeviceArray], ...]
    axis: int = 1

    @property
    def nbytes(self) -> int:
        """Size in bytes of what one GPU would hold."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def __getitem__(self, leading: slice) -> RankedArray:
        """Some slots or rows, or some heads of a slot."""
        start, stop, _ = leading.indices(self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        if self.axis:
            return replace(self, shape=shape, parts=tuple((own, part[leading]) for own, part in self.parts))
        parts = []
        for ((begin, end),), part in self.parts:
            first, last = max(begin, start), min(end, stop)
            if first < last:
                parts.append((((first - start, last - start),), part[first - begin : last - begin]))
        return replace(self, shape=shape, parts=tuple(parts))

    def reshape(self, *shape: int) -> RankedArray:
        """Other axes before the one that is shared: one slot [1, n, C, D] as [n, C, D]. Raises ValueError otherwise."""
        axis, behind = self.axis + len(shape) - len(self.shape), self.shape[self.axis :]
        if axis < 0 or shape[axis:] != behind or math.prod(shape[:axis]) != math.prod(self.shape[: self.axis]):
            raise ValueError(f"cannot view heads of several GPUs {self.shape} as {shape}")
        parts = ((own, part.reshape(*shape[:axis], *part.shape[self.axis :])) for own, part in self.parts)
        return replace(self, shape=shape, parts=tuple(parts), axis=axis)

    def pieces(self) -> Iterator[tuple[Range, DeviceArray]]:
        """Of one slot [1, n, ...] or [n, ...] each range, and what a rank has there."""
        for ranges, part in self.reshape(*self.shape[self.axis :]).parts:
            first = 0
            for begin, end in ranges:
                yield (begin, end), part[first : first + end - begin]
                first += end - begin

    def beside(self, whole: DeviceArray) -> list[tuple[DeviceArray, DeviceArray]]:
        """Of one slot [1, n, ...] what ranks have, with its place in an array of one GPU of the same shape."""
        rows = whole.reshape(*whole.shape[1:])
        return [(part, rows[begin:end]) for (begin, end), part in self.pieces()]
