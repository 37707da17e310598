"""A neighbour of the part of a GPU that is measured: it keeps memory busy from the other multiprocessors, meanwhile.

A part of a large GPU has far more bandwidth for its arithmetic than a board. Beside a neighbour it has less: so many
blocks change words that the part is left the board's own ratio (`boards.yaml`). Readers cannot press it that far:
however many there are, the part reads 0.8 TB/s beside them. Each word lies somewhere else in a gigabyte, so memory
reads and writes 32 bytes of another row for it. A launch of them lasts a millisecond and a half, whatever it does: all
end at once, and what waits for the whole GPU (freed memory, code that is loaded) waits no longer than a few of those.

`as_device.py` begins it; it ends with the process.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.gpu import GPU
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Bytes of the memory that is changed: far more than caches hold; of it what a word of 4 bytes moves, there and back.
_BYTES, _MOVED = 1 << 30, 64
#: Nanoseconds that a warp rests behind each word; threads of a block.
_RESTS, _THREADS = 800, 32
#: Nanoseconds of a launch; launches that are enqueued ahead, so that a host that is busy starves nobody; seconds until
#: a change has come through them.
_LAUNCH, _AHEAD = 1_500_000, 8
_SETTLES = 2e-9 * _LAUNCH * _AHEAD
#: The kernel.
KERNEL = "change_beside"
#: Behind the name of a device that is measured beside a neighbour.
BESIDE = "+beside"
#: By how much what is left to the part may be off.
TOLERANCE = 0.05
_CODE = r"""
extern "C" __global__ void __launch_bounds__(32) change_beside(
    unsigned* memory, unsigned long long* counted, unsigned nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    begin = __shfl_sync(0xffffffffu, begin, 0);
    unsigned place = (static_cast<unsigned>(begin) ^ (blockIdx.x * 32 + threadIdx.x) * 2654435761u) | 1u, turns = 0;
    do {
        place = place * 1664525u + 1013904223u;
        atomicAdd(memory + (place >> (32 - PLACE_BITS)), 0u);  // nobody waits for it
        ++turns;
        __nanosleep(RESTS);  // else a dozen warps keep all of memory busy
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        now = __shfl_sync(0xffffffffu, now, 0);
    } while (now - begin < nanoseconds);
    if (threadIdx.x == 0) {
        atomicAdd(counted, static_cast<unsigned long long>(turns) * 32 * MOVED);
        atomicAdd(counted + 1, now - begin);
    }
}
"""
_SOURCE = ModuleSource(
    "neighbour",
    ("neighbour.cu",),
    macros=(("RESTS", _RESTS), ("MOVED", _MOVED), ("PLACE_BITS", (_BYTES // 4).bit_length() - 1)),
    headers=(("neighbour.cu", _CODE),),
)


class NeighbourError(Exception):
    """The neighbour does not read, or cannot leave the part what it should."""


class Counted(NamedTuple):
    """Bytes that warps have moved, and the nanoseconds that each of them took, summed."""

    nbytes: int
    nanoseconds: int


class Neighbour:
    """Blocks that keep memory busy on `rest`, the multiprocessors beside the part, until the process ends.

    None read before `read_with`. A thread launches them, in a context of its own. `target` is what they are to leave
    the part, and `left` what so many blocks left it when that was tried, in GB/s.
    """

    def __init__(self, rest: Any, gpu: GPU) -> None:
        """Raises NeighbourError where the driver makes no context for it."""
        self._rest, self._gpu = rest, gpu
        self.blocks, self.most_blocks, self.target = 0, 0, 0.0
        self.left: dict[int, float] = {}
        self._counters: Any = None
        self._error: BaseException | None = None
        self._ready, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour", daemon=True)
        self._thread.start()
        atexit.register(self.end)
        self._ready.wait(60)
        self._check()

    def read_with(self, blocks: int) -> None:
        """Let so many blocks read from now on; returns when no others do."""
        self.blocks = blocks
        time.sleep(_SETTLES)
        self._check()

    def counted(self) -> Counted:
        """What was read until now. A context is current in the calling thread."""
        from cuda.bindings import driver

        self._check()
        found = (ctypes.c_ulonglong * 2)()
        _checked(driver.cuMemcpyDtoH(ctypes.addressof(found), self._counters, ctypes.sizeof(found)))
        return Counted(*found)

    def rate_since(self, before: Counted) -> float:
        """GB/s that it got since then, while its blocks read. Raises NeighbourError where none did."""
        now = self.counted()
        if now.nanoseconds == before.nanoseconds and self.blocks:
            raise NeighbourError("the neighbour of the part that is measured did not read meanwhile")
        return rate(before, now, self.blocks)

    def end(self) -> None:
        """Let it end: at once, or when the launches that are under way have ended."""
        self._ends.set()
        self._thread.join(10)
        atexit.unregister(self.end)

    def _check(self) -> None:
        if self._error is not None:
            raise NeighbourError(f"the neighbour of the part that is measured has ended: {self._error}")
        if not self._ready.is_set():
            raise NeighbourError("the neighbour of the part that is measured did not begin within a minute")

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def _read(self) -> None:
        from cuda.bindings import driver

        # What other threads capture goes on while this one waits for events.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _checked(driver.cuThreadExchangeStreamCaptureMode(mode))
        device = _checked(driver.cuDeviceGet(self._gpu.index))
        _checked(driver.cuDevicePrimaryCtxRetain(device))  # which that of the part belongs to as well
        description = _checked(driver.cuDevResourceGenerateDesc([self._rest], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = _checked(driver.cuGreenCtxCreate(description, device, flags))
        _checked(driver.cuCtxSetCurrent(_checked(driver.cuCtxFromGreenCtx(green))))
        stream = _checked(driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
        memory, self._counters = _checked(driver.cuMemAlloc(_BYTES)), _checked(driver.cuMemAlloc(32))
        _checked(driver.cuMemsetD8Async(memory, 0, _BYTES, stream))
        _checked(driver.cuMemsetD8Async(self._counters, 0, 32, stream))
        module, kernel = KernelModule(self._gpu, SimpleNamespace(handle=int(stream))), Kernel(_SOURCE, KERNEL)
        function = module.function(kernel, 0)
        resident = _checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, _THREADS, 0))
        self.most_blocks = resident * self._rest.sm.smCount
        given = ctypes.c_void_p(int(memory)), ctypes.c_void_p(int(self._counters)), ctypes.c_uint(_LAUNCH)
        kinds = driver.CUevent_flags
        event_flags = int(kinds.CU_EVENT_BLOCKING_SYNC) | int(kinds.CU_EVENT_DISABLE_TIMING)
        events = [_checked(driver.cuEventCreate(event_flags)) for _ in range(_AHEAD)]
        launches: dict[int, Launch] = {}
        _checked(driver.cuStreamSynchronize(stream))
        self._ready.set()
        number = 0
        try:
            while not self._ends.is_set():
                blocks = self.blocks
                if not blocks:
                    self._ends.wait(0.005)
                    continue
                if blocks not in launches:
                    launches[blocks] = Launch(module, kernel, (blocks, 1, 1), _THREADS, 0, given)
                if number >= _AHEAD:
                    _checked(driver.cuEventSynchronize(events[number % _AHEAD]))
                launches[blocks]()
                _checked(driver.cuEventRecord(events[number % _AHEAD], stream))
                number += 1
        finally:
            driver.cuStreamSynchronize(stream)
            module.close()
            for release, what in (
                *((driver.cuEventDestroy, event) for event in events),
                *((driver.cuMemFree, each) for each in (memory, self._counters)),
                (driver.cuStreamDestroy, stream),
            ):
                release(what)


_current: Neighbour | None = None


def current() -> Neighbour | None:
    """The neighbour of this process."""
    return _current


def begin(rest: Any, gpu: GPU, target: Callable[[], float], read: Callable[[], float]) -> Neighbour:
    """The neighbour that leaves the part `target` GB/s of what it reads; `read` measures what that is now.

    The target is asked for while the neighbour reads, for clocks depend on it. Raises NeighbourError where it cannot
    leave that.
    """
    global _current
    made = Neighbour(rest, gpu)
    try:
        made.read_with(max(1, made.most_blocks // 2))

        def left(blocks: int) -> float:
            made.read_with(blocks)
            return read()

        made.target = target()
        blocks, made.left = blocks_that_leave(made.target, made.most_blocks, left)
    except BaseException:
        made.end()
        raise
    made.read_with(blocks)
    _current = made
    print(
        f"a neighbour of {blocks} blocks leaves the part {made.left[blocks]:.0f} of {made.left[0]:.0f} GB/s, expected "
        f"{made.target:.0f}",
        file=sys.stderr,
        flush=True,
    )
    return made


def blocks_that_leave(target: float, most: int, left: Callable[[int], float]) -> tuple[int, dict[int, float]]:
    """How many blocks leave the part a bandwidth, of at most so many, and what those that were tried leave it in truth;
    the more blocks, the less is `left`. Raises NeighbourError where none come near."""
    found = {blocks: left(blocks) for blocks in (0, most)}
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        found[middle] = left(middle)
        low, high = (middle, high) if found[middle] > target else (low, middle)
    best = min(found, key=lambda blocks: abs(found[blocks] - target))
    if abs(found[best] / target - 1) > TOLERANCE:
        raise NeighbourError(
            f"the part reads {found[0]:.0f} GB/s alone, {found[most]:.0f} beside the most readers and "
            f"{found[best]:.0f} at the nearest: expected {target:.0f}. Measure without a neighbour, by --alone"
        )
    return best, found


def rate(before: Counted, now: Counted, blocks: int) -> float:
    """GB/s of so many blocks between two counts."""
    nanoseconds = now.nanoseconds - before.nanoseconds
    return blocks * (_THREADS // 32) * (now.nbytes - before.nbytes) / nanoseconds if nanoseconds else 0.0


@contextmanager
def resting() -> Iterator[None]:
    """Nobody reads meanwhile: for processes of their own, which have their own neighbour, and would share the GPU with
    this one in turns."""
    blocks = _current.blocks if _current is not None else 0
    if _current is None or not blocks:
        yield
        return
    _current.read_with(0)
    try:
        yield
    finally:
        _current.read_with(blocks)


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise NeighbourError(f"CUDA reported {status} to the neighbour of the part that is measured")
    return values[0] if values else None
