"""Where the seconds go in which a model's weights come from their files to a GPU, and what bounds them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.backends import cuda_backend, packed_loading, pinned_ring
from edgellm.engines.backends.cuda_backend import CudaBackend
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.backends.pinned_ring import RING_BYTES, PinnedRing

#: By owner and name, what is timed, and what that is called. What runs inside another counts for itself alone.
_WATCHED: list[tuple[Any, str, str]] = [
    (CudaBackend, "load_weights", "else"),
    (cuda_backend, "packed_layouts", "layouts"),
    (CudaBackend, "zeros_side_by_side", "memory"),
    (CudaDevice, "host_memory", "pinned memory"),
    (PinnedRing, "upload", "buffers that are free"),
    (PinnedRing, "_sent", "buffers that are filled"),
    (PinnedRing, "close", "the GPU"),
    (CudaDevice, "upload", "other uploads"),
    (CudaDevice, "synchronize", "the GPU"),
    (PackedLoader, "_loaded", "launches"),
    (CudaBackend, "_check_finite", "finite values"),
    (CudaBackend, "load_kernels", "kernels"),
    (packed_loading, "_prepare", "scales"),
    (pinned_ring, "_fill", "filling"),
]


class OpeningSeconds:
    """While `watching`, within `load_weights`: seconds of this thread by what it does or waits for (`own`), and of all
    `others` the sums of their seconds and of those of a processor, which are fewer where they wait for the
    interpreter."""

    def __init__(self) -> None:
        self.own, self.others = dict[str, float](), dict[str, list[float]]()
        self._began, self._running = 0.0, ["before"]
        self._main, self._lock = threading.get_ident(), threading.Lock()

    @contextmanager
    def _spent(self, name: str) -> Iterator[None]:
        if len(self._running) == 1 and name != "else":
            yield
            return
        if threading.get_ident() != self._main:
            began = time.perf_counter(), time.thread_time()
            yield
            with self._lock:
                found = self.others.setdefault(name, [0.0, 0.0])
                found[0] += time.perf_counter() - began[0]
                found[1] += time.thread_time() - began[1]
            return
        self._change()
        self._running.append(name)
        try:
            yield
        finally:
            self._change()
            self._running.pop()

    def _change(self) -> None:
        now, name = time.perf_counter(), self._running[-1]
        if name != "before":
            self.own[name] = self.own.get(name, 0.0) + now - self._began
        self._began = now

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self._spent(name):
                return function(*arguments, **named)

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in _WATCHED]
        ahead = packed_loading.computed_ahead

        def waited(*arguments: Any) -> Iterator[Any]:
            found = ahead(*arguments)
            while True:
                with self._spent("scales"):
                    item = next(found, None)
                if item is None:
                    return
                yield item

        for (owner, name, function), (*_, label) in zip(before, _WATCHED, strict=True):
            setattr(owner, name, self._timed(function, label))
        packed_loading.computed_ahead = waited  # type: ignore[assignment]
        try:
            yield
        finally:
            packed_loading.computed_ahead = ahead
            for owner, name, function in before:
                setattr(owner, name, function)


def bounds(file: Path) -> dict[str, float]:
    """GB/s of the first bytes of a file, mapped anew each time, to the GPU: as the driver copies them, through pinned
    buffers; and of pinned memory alone."""
    device = CudaDevice()
    try:
        return _bounds(device, file, max(1, min(1 << 30, file.stat().st_size) // RING_BYTES))
    finally:
        device.close()


def _bounds(device: CudaDevice, file: Path, count: int) -> dict[str, float]:
    nbytes = count * RING_BYTES
    array, pinned, found = device.zeros((nbytes,), "uint8"), device.host_memory(RING_BYTES), dict[str, float]()
    device.synchronize()

    def timed(name: str, run: Callable[[], Any]) -> None:
        began = time.perf_counter()
        run()
        device.synchronize()
        found[name] = nbytes / 1e9 / (time.perf_counter() - began)

    def mapped() -> np.ndarray:
        return np.asarray(np.memmap(file, np.uint8, "r", shape=(nbytes,)))

    timed("pageable", lambda: device.upload(array, mapped()))
    with device.large_uploads(nbytes):
        timed("ring", lambda: device.upload(array, mapped()))
    timed("pinned", lambda: [device.upload(array[:RING_BYTES], pinned) for _ in range(count)])
    return found
