"""CUDA memory, copies, events and graph capture through pycuda, on the device's primary context.

TensorRT runs on the primary context, so pycuda must use it too. pycuda has no calls for CUDA graphs: those come from
`cuda.bindings.driver`, on pycuda's stream.
"""

from __future__ import annotations

import atexit
import gc
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from edgellm.engines.backends.base import check_rows, row_pieces
from edgellm.engines.backends.cuda_events import DeviceReadback, DeviceSignal, DeviceTimestamp, DeviceTransfer, checked
from edgellm.engines.backends.pinned_ring import RING_BYTES, PinnedRing
from edgellm.engines.errors import DeviceLostError, DeviceMemoryError, EngineError, MissingDependencyError
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.made import CAPTURED, Made

logger = logging.getLogger("edgellm.cuda")

#: How many results may be on their way to the host at once.
_PINNED_SLOTS = 8
#: Bytes that arrays side by side take together at least: the driver rounds each allocation up to 2 MiB, and one of all
#: bytes may not be there where memory is in pieces, as on a Jetson.
_PIECE = 256 << 20
#: Where an array in such a piece begins.
_ALIGNMENT = 256
#: Bytes of an array that goes by way of pinned buffers, which are some more calls.
_LARGE = 1 << 20


def host_dtype(dtype: str) -> np.dtype:
    """The NumPy dtype that holds `dtype` on the host; bfloat16 as its uint16 bits."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


class HostVisibleMemory:
    """Pinned host memory at `pointer` of the device's address space; the owner of the arrays in it."""

    def __init__(self, cuda: Any, shape: tuple[int, ...], dtype: str) -> None:
        mapped = cuda.host_alloc_flags.DEVICEMAP
        self._values = cuda.pagelocked_zeros((math.prod(shape),), host_dtype(dtype), mem_flags=mapped)
        self.pointer = int(self._values.base.get_device_pointer())

    def view(self, array: DeviceArray) -> np.ndarray:
        """The host's view of an array in this memory."""
        first = (array.pointer - self.pointer) // self._values.itemsize
        return self._values[first : first + array.size].reshape(array.shape)


class CudaDevice:
    """A GPU, by its index (None: see `find_gpu`): its primary context (current in the calling thread until `close`), or
    what a tool that measures in a part of the GPU puts in its place, and one stream."""

    #: Within `large_uploads`.
    _ring: PinnedRing | None = None

    def __init__(self, index: int | None = None) -> None:
        try:
            import pycuda.driver as cuda
        except ImportError as error:
            raise MissingDependencyError(
                f"pycuda does not load ({error}). Install it with pip install '.[gpu]' in EdgeLLM's checkout, on "
                "JetPack 6 '.[jetpack6]', or use --backend numpy."
            ) from error
        gpu = find_gpu(index)
        try:
            cuda.init()
            device = cuda.Device(0 if gpu is None else gpu.index)
        except cuda.Error as error:
            raise MissingDependencyError(f"No usable NVIDIA GPU: {error}. Use --backend numpy.") from error
        if gpu is None:
            raise MissingDependencyError("No usable NVIDIA GPU: libcuda.so.1 shows none. Use --backend numpy.")
        self.gpu = gpu
        self._cuda = cuda
        self._readbacks: dict[tuple[int | None, tuple[int, ...], str], deque[tuple[np.ndarray, Any]]] = {}
        self._first_event: tuple[Any, float] | None = None
        #: What has to be made before it runs; see `Backend.made`.
        self.made = Made()
        self._context = device.retain_primary_context()
        self._context.push()
        if gpu.enter_partition is not None:
            gpu.enter_partition()
        atexit.register(self.close)  # pycuda aborts the process if a context is current when it is unloaded
        self.stream, self._copy_stream = cuda.Stream(), cuda.Stream()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within, the device's context is the calling thread's, where another may be."""
        self._context.push()
        try:
            yield
        finally:
            self._context.pop()

    @property
    def gpu_index(self) -> int:
        return self.gpu.index

    def lost(self) -> DeviceLostError | None:
        """See `Backend.lost`: such an error is given by every call from then on."""
        from cuda.bindings import driver

        (status,) = driver.cuCtxSynchronize()
        return DeviceLostError.of(int(status))

    def free_memory(self) -> tuple[int, int]:
        """Bytes free and bytes in all."""
        return self._cuda.mem_get_info()

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        nbytes = max(1, math.prod(shape) * ITEM_SIZES[dtype])
        try:
            allocation = self._cuda.mem_alloc(nbytes)
        except self._cuda.MemoryError as error:
            free, total = self.free_memory()
            raise DeviceMemoryError(
                f"Allocating {nbytes >> 20} MiB for {tuple(shape)} {dtype} failed with {free >> 20} of {total >> 20} "
                "MiB free. Close other programs on the GPU or build with smaller limits."
            ) from error
        return DeviceArray(int(allocation), tuple(shape), dtype, allocation)

    def zeros(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        array = self.empty(shape, dtype)
        self._cuda.memset_d8_async(array.pointer, 0, array.nbytes, self.stream)
        return array

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, DeviceArray]:
        """See `Backend.zeros_side_by_side`: a piece of memory is freed with the last array in it."""
        found: dict[str, DeviceArray] = {}
        waiting, size = dict[str, int](), 0
        for number, (name, (shape, dtype)) in enumerate(edge.items(), 1):
            waiting[name] = size
            size += -(-math.prod(shape) * ITEM_SIZES[dtype] // _ALIGNMENT) * _ALIGNMENT
            if size >= _PIECE or number == len(edge):
                piece = self.zeros((size,), "uint8")
                found |= {each: self.part(piece, offset, *edge[each]) for each, offset in waiting.items()}
                waiting, size = {}, 0
        return found

    def shared_zeros(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, DeviceArray]:
        return self.zeros_side_by_side(edge)

    def part(self, memory: DeviceArray, offset: int, shape: Sequence[int], dtype: str) -> DeviceArray:
        """An array in `memory` uint8, from byte `offset` on."""
        return DeviceArray(memory.pointer + offset, tuple(shape), dtype, memory)

    def upload(self, array: DeviceArray, values: np.ndarray) -> None:
        """Copy host values of the same shape and dtype; they may be changed as soon as this returns."""
        if values.shape != array.shape or values.dtype != host_dtype(array.dtype):
            raise EngineError(
                f"cannot upload {values.dtype} {values.shape} into a device array of {array.dtype} {array.shape}"
            )
        if array.nbytes:
            self.upload_parts(array, [np.ascontiguousarray(values)])

    def upload_parts(self, array: DeviceArray, parts: Sequence[np.ndarray]) -> None:
        """Copy the bytes of `parts`, each in C order, one behind the other: as many as the array has."""
        pointer = array.pointer
        if self._ring is not None and array.nbytes >= _LARGE:
            self._ring.upload(pointer, parts)
            return
        for part in parts:
            self._cuda.memcpy_htod_async(pointer, part, self.stream)
            pointer += part.nbytes

    @contextmanager
    def large_uploads(self, nbytes: int) -> Iterator[None]:
        """Within, where so many bytes are uploaded in all, large arrays go by way of pinned buffers, which are there
        until then: faster. Where there is no memory for these, or they would not pay, nothing is different."""
        with suppress(DeviceMemoryError):
            if nbytes >= RING_BYTES:
                self._ring = PinnedRing(self._cuda, self.stream, self.host_memory(RING_BYTES))
        try:
            yield
        finally:
            ring, self._ring = self._ring, None
            if ring is not None:
                with self.current():
                    ring.close()

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise EngineError(
                f"cannot copy a device array of {source.dtype} {source.shape} to one of {target.dtype} {target.shape}"
            )
        if source.nbytes:
            self._cuda.memcpy_dtod_async(target.pointer, source.pointer, source.nbytes, self.stream)

    def download(self, array: DeviceArray) -> np.ndarray:
        """Wait for all work and copy the values to the host."""
        values = np.empty(array.shape, host_dtype(array.dtype))
        self.synchronize()
        self._cuda.memcpy_dtoh(values, array.pointer)
        return values

    def host_memory(self, nbytes: int) -> np.ndarray:
        """[nbytes] uint8, pinned. Raises DeviceMemoryError."""
        try:
            return self._cuda.pagelocked_empty((nbytes,), np.uint8)
        except self._cuda.MemoryError as error:
            raise DeviceMemoryError(
                f"Allocating {nbytes >> 20} MiB of pinned host memory failed: give snapshots a smaller memory budget"
            ) from error

    def upload_rows(self, target: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> DeviceTransfer:
        """One two-dimensional copy, or where the rows begin anew two: a line for each of the G groups. Pageable memory
        works, but slowly."""
        return self._copy_rows(target, values, rows, first, self.stream)

    def begin_beside(self) -> None:
        before = self._cuda.Event(self._cuda.event_flags.DISABLE_TIMING)
        before.record(self.stream)
        self._copy_stream.wait_for_event(before)

    def upload_rows_beside(self, target: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> DeviceTransfer:
        """The same on another stream; see `Backend.upload_rows_beside`."""
        return self._copy_rows(target, values, rows, first, self._copy_stream)

    def wait_for(self, transfer: DeviceTransfer) -> None:
        """Let the stream wait for a transfer."""
        self.stream.wait_for_event(transfer.event)

    def download_rows(self, source: DeviceArray, values: np.ndarray, rows: int, first: int = 0) -> DeviceTransfer:
        """The same copies, the other way."""
        return self._copy_rows(source, values, rows, first, self.stream, to_host=True)

    def _copy_rows(
        self, array: DeviceArray, values: np.ndarray, rows: int, first: int, stream: Any, to_host: bool = False
    ) -> DeviceTransfer:
        """Copy rows of `values` [G, N, D] to `array` [G, C, D], or the other way."""
        check_rows(array.shape, host_dtype(array.dtype), values, rows, first)
        if not values.flags.c_contiguous:
            raise EngineError("rows are copied from and to contiguous host memory only")
        row, groups = values.shape[2] * values.itemsize, max(1, values.shape[0])
        for own, of_values in row_pieces(array.shape[1], rows, first):
            copy = self._cuda.Memcpy2D()
            copy.height, copy.width_in_bytes = values.shape[0], (own.stop - own.start) * row
            if to_host:
                copy.set_src_device(array.pointer)
                copy.set_dst_host(values)
            else:
                copy.set_src_host(values)
                copy.set_dst_device(array.pointer)
            # From one group to the next, and where in a line the rows begin.
            ends = (array.nbytes // groups, own.start * row), (values.nbytes // groups, of_values.start * row)
            source, target = ends if to_host else reversed(ends)
            (copy.src_pitch, copy.src_x_in_bytes), (copy.dst_pitch, copy.dst_x_in_bytes) = source, target
            if copy.width_in_bytes and copy.height:
                copy(stream)
        event = self._cuda.Event(self._cuda.event_flags.DISABLE_TIMING)
        event.record(stream)
        return DeviceTransfer(values, array, event)

    def host_visible(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Zeroed pinned host memory that kernels write directly; see `Backend.host_visible`."""
        memory = HostVisibleMemory(self._cuda, tuple(shape), dtype)
        return DeviceArray(memory.pointer, tuple(shape), dtype, memory)

    def signal(self) -> DeviceSignal:
        """An event of the stream."""
        return DeviceSignal(self.stream)

    def seen(self, array: DeviceArray) -> np.ndarray:
        view: np.ndarray = array.owner.view(array)
        return view

    def read(self, array: DeviceArray) -> DeviceReadback:
        """Start copying a small array into one of a ring of pinned buffers; at most 8 may be unread at a time.

        An array of `host_visible` memory needs no copy, only the event.
        """
        visible = isinstance(array.owner, HostVisibleMemory)
        ring = self._readbacks.setdefault((array.pointer if visible else None, array.shape, array.dtype), deque())
        if len(ring) < _PINNED_SLOTS:
            if visible:
                values = array.owner.view(array)
            else:
                values = self._cuda.pagelocked_empty(array.shape, host_dtype(array.dtype))
            ring.append((values, self._cuda.Event(self._cuda.event_flags.DISABLE_TIMING)))
        else:
            ring.rotate(-1)  # the oldest is used again
        values, event = ring[-1]
        if not visible:
            self._cuda.memcpy_dtoh_async(values, array.pointer, self.stream)
        event.record(self.stream)
        return DeviceReadback(values, event)

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        """Record what `step` enqueues as a CUDA graph and return its launch.

        Where that fails, one warning is logged and `step` itself is returned: slower, not wrong.
        """
        try:
            with self.made.counting(CAPTURED):
                return self._capture(step)
        except Exception as error:
            reason = str(error)  # as text: whoever keeps the log's record keeps no device by the error's traceback
            logger.warning("CUDA graph capture of %s failed (%s); it runs uncaptured, which is slower", name, reason)
            return step

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        from cuda.bindings import driver

        stream = driver.CUstream(self.stream.handle)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with no_garbage_collection():  # freeing device memory would invalidate the capture
            checked(driver, driver.cuStreamBeginCapture(stream, mode))
            try:
                step()
            except BaseException:
                status, *graphs = driver.cuStreamEndCapture(stream)
                if status == driver.CUresult.CUDA_SUCCESS:  # what was captured until then
                    driver.cuGraphDestroy(*graphs)
                raise
            graph = checked(driver, driver.cuStreamEndCapture(stream))
        free, _ = self.free_memory()
        try:
            executable = checked(driver, driver.cuGraphInstantiate(graph, 0))
            checked(driver, driver.cuGraphUpload(executable, stream))  # which its first launch would do
        finally:
            driver.cuGraphDestroy(graph)
        self.made.graph_bytes += max(0, free - self.free_memory()[0])
        return _GraphLaunch(driver, executable, stream)

    def timestamp(self) -> DeviceTimestamp:
        """An event here in the stream's work, with its time."""
        if self._first_event is None:
            first = self._cuda.Event()
            first.record(self.stream)
            first.synchronize()
            self._first_event = first, time.perf_counter()
        event = self._cuda.Event()
        event.record(self.stream)
        return DeviceTimestamp(event, *self._first_event)

    def synchronize(self) -> None:
        """Wait for everything on the stream, and what is copied beside it."""
        self.stream.synchronize()
        self._copy_stream.synchronize()

    def close(self) -> None:
        """Leave the primary context; memory goes with the last array that refers to it."""
        if self._context is None:
            return
        try:
            self.synchronize()
        finally:  # also where the GPU reports a failure: nothing more can be done with this context
            atexit.unregister(self.close)
            self._readbacks.clear()
            self._first_event = None
            self._context.pop()
            self._context = None


def gpu_memory() -> tuple[int, int]:
    """Bytes of the GPU's memory that are free, and in all. Raises MissingDependencyError."""
    device = CudaDevice()
    try:
        return device.free_memory()
    finally:
        device.close()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector of cycles rests; what is let go of otherwise is freed at once."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _GraphLaunch:
    """Launches an instantiated graph; destroys it with itself."""

    def __init__(self, driver: Any, executable: Any, stream: Any) -> None:
        self._driver, self._executable, self._stream = driver, executable, stream

    def __call__(self) -> None:
        (status,) = self._driver.cuGraphLaunch(self._executable, self._stream)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"launching a captured step failed: {status}")

    def __del__(self) -> None:
        self._driver.cuGraphExecDestroy(self._executable)
