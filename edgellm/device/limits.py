"""What a GPU, or the part of it that is measured, can read and multiply.

Three kernels, compiled as all others are. One reads a gigabyte, which no cache holds, as the decode kernels do: by
asynchronous copies into rings of shared memory, with as many bytes under way. One multiplies matrices in registers by
`mma.sync` (16 x 8 x 16, fp16 with sums in fp32). One counts clocks. They take milliseconds.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.closing import Closing
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import MACROS
from edgellm.kernels.gpu import GPU, find_gpu
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Bytes that are read, and mma.sync of each warp: 4096 multiplications and additions each.
_BYTES, _TURNS, _CHAINS, _OPERATIONS = 1 << 30, 2048, 8, 4096
#: Bytes of a tile of weights, of a block's ring, and threads and warps of a block.
_TILE_BYTES, _RING_BYTES, _THREADS, _WARPS = 1 << 15, 1 << 16, 256, 8
#: Blocks of a multiprocessor that multiply.
_BLOCKS = (4, 8)
#: Nanoseconds in which clocks are counted.
_COUNTED = 2_000_000


class Ring(NamedTuple):
    """How a block reads: `tiles` of 8 rows that a warp copies at once, `depth` such copies under way, and bytes of a
    row in one, `piece`; so many `blocks` on a multiprocessor."""

    tiles: int
    depth: int
    piece: int
    blocks: int = 1

    @property
    def kernel(self) -> str:
        """The kernel that reads so."""
        return f"read_ring<{self.tiles}, {self.depth}, {self.piece}>"


#: Dense weights come in pieces of 64 bytes, packed ones in whole tiles. The fastest counts.
_RINGS = (Ring(4, 4, 64), Ring(2, 8, 64), Ring(4, 4, 512), Ring(2, 8, 512))
SOURCE = ModuleSource(
    "device_limits",
    ("shared/device_limits.cu",),
    tuple(ring.kernel for ring in _RINGS),
    macros=(*MACROS, ("TURNS", _TURNS), ("CHAINS", _CHAINS), ("TILE_BYTES", _TILE_BYTES)),
)


class DeviceLimits(NamedTuple):
    """Read bandwidth in GB/s and arithmetic of `mma.sync` in TFLOP/s, of so many multiprocessors at a clock in GHz."""

    read_gb_per_s: float
    mma_tflop_per_s: float
    multiprocessors: int
    clock_ghz: float = 0.0


class Reader(Closing):
    """The kernels, in the context that is current, with the memory that they read until it is closed."""

    def __init__(self) -> None:
        import pycuda.driver as cuda

        gpu = find_gpu()
        assert gpu is not None
        self.gpu, self._cuda, self._stream = gpu, cuda, cuda.Stream()
        self._memory, self._out = cuda.mem_alloc(_BYTES), cuda.mem_alloc(16)
        cuda.memset_d8_async(int(self._memory), 0, _BYTES, self._stream)
        self._module = KernelModule(gpu, self._stream)

    def close(self) -> None:
        """Let go of the memory."""
        self._module.close()
        self._memory.free()
        self._out.free()

    def bandwidth(self, ring: Ring, repeats: int = 2, series: int = 3) -> float:
        """GB/s that are read through such rings: the median of some series."""
        blocks = ring.blocks * self.gpu.multiprocessors
        units = _BYTES // (ring.tiles * _TILE_BYTES) // (blocks * _WARPS) * (blocks * _WARPS)
        given = ctypes.c_void_p(int(self._memory)), ctypes.c_int(units)
        span = self._milliseconds(ring.kernel, blocks, given, _RING_BYTES, repeats, series)
        return units * ring.tiles * _TILE_BYTES / span / 1e6

    def arithmetic(self) -> float:
        """TFLOP/s of `mma.sync`."""

        def speed(blocks: int) -> float:
            operations = blocks * _WARPS * _TURNS * _CHAINS * _OPERATIONS
            return operations / self._milliseconds("multiply", blocks, (ctypes.c_void_p(int(self._out)),)) / 1e9

        return max(speed(blocks * self.gpu.multiprocessors) for blocks in _BLOCKS)

    def clock(self) -> float:
        """GHz of a multiprocessor."""
        given = ctypes.c_void_p(int(self._out)), ctypes.c_uint(_COUNTED)
        self._launch("count_clocks", 1, given, threads=1)()
        self._stream.synchronize()
        counted = np.empty(2, np.uint64)
        self._cuda.memcpy_dtoh(counted, self._out)
        return float(counted[0] / counted[1])

    def _launch(
        self, kernel: str, blocks: int, given: tuple[Any, ...], shared: int = 0, threads: int = _THREADS
    ) -> Launch:
        return Launch(self._module, Kernel(SOURCE, kernel), (blocks, 1, 1), threads, shared, given)

    def _milliseconds(
        self, kernel: str, blocks: int, given: tuple[Any, ...], shared: int = 0, repeats: int = 3, series: int = 5
    ) -> float:
        launch: Callable[[], None] = self._launch(kernel, blocks, given, shared)
        return gpu_milliseconds(self._stream, launch, repeats, series, before=launch)


def fitting_rings(gpu: GPU) -> list[Ring]:
    """The rings among which the fastest counts: decode kernels have 64 KB under way on a multiprocessor, one block's,
    on GPUs like an Orin, and twice as much where kernels overlap. More are not always faster, so both are tried."""
    blocks = [each for each in (1, 2) if each * (_RING_BYTES + 1024) <= gpu.shared_limit + 1024]
    return [ring._replace(blocks=each) for ring in _RINGS for each in blocks]


@contextmanager
def some_context() -> Iterator[None]:
    """A context like that of every backend, the one that pycuda knows as current where there is one."""
    import pycuda.driver as cuda

    if cuda.Context.get_current() is not None:
        yield
        return
    device = CudaDevice()
    try:
        yield
    finally:
        device.close()


def measured_limits() -> DeviceLimits:
    """What the GPU reads and multiplies now, through the fastest ring. What is measured first brings the clocks up."""
    with some_context(), Reader() as reader:
        ring = max(fitting_rings(reader.gpu), key=reader.bandwidth)
        found = reader.bandwidth(ring, series=5), reader.arithmetic()
        return DeviceLimits(*found, reader.gpu.multiprocessors, reader.clock())


def memory_bandwidth() -> float | None:
    """GB/s of a GPU's own memory by what its driver says of clock and bus, twice a clock; None where it shares the
    host's, of which the driver does not say it."""
    import pycuda.driver as cuda

    with some_context():
        said, names = cuda.Context.get_device(), cuda.device_attribute
        clock, bits = said.get_attribute(names.MEMORY_CLOCK_RATE), said.get_attribute(names.GLOBAL_MEMORY_BUS_WIDTH)
        return None if said.get_attribute(names.INTEGRATED) else 2 * clock * bits / 8e6 or None


def gpu_milliseconds(
    stream: Any, step: Callable[[], Any], repeats: int, series: int = 5, before: Callable[[], Any] = lambda: None
) -> float:
    """Median over the series, each of so many repeats, of the milliseconds of one `step`.

    `before` runs ahead of each series and is not timed: steps that lengthen a sequence begin at the same length there.
    """
    import pycuda.driver as cuda

    spans = []
    for _ in range(series):
        before()
        begin, end = cuda.Event(), cuda.Event()
        begin.record(stream)
        for _ in range(repeats):
            step()
        end.record(stream)
        end.synchronize()
        spans.append(begin.time_till(end) / repeats)
    return statistics.median(spans)
