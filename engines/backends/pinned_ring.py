"""What is uploaded goes through pinned buffers that threads fill: of pageable memory, such as a mapped file, the driver
makes a pinned copy itself, by one thread, while the caller waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from edgellm.kernels.compilations import usable_cores

#: Bytes of a buffer, and of all that there are.
_PIECE, RING_BYTES = 4 << 20, 64 << 20
#: More do not copy faster.
_MOST_THREADS = 8


class PinnedRing:
    """Pinned `memory` uint8 in buffers that are used in turn, each again once the copy from it is done."""

    def __init__(self, cuda: Any, stream: Any, memory: np.ndarray) -> None:
        """For copies on a `stream` of pycuda, which is `cuda`."""
        self._cuda, self._stream = cuda, stream
        buffers, flags = memory.reshape(-1, _PIECE), cuda.event_flags.DISABLE_TIMING
        self._buffers = deque((buffer, cuda.Event(flags)) for buffer in buffers)
        self._pool = ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "edgellm-uploads")

    def upload(self, pointer: int, parts: Sequence[np.ndarray]) -> None:
        """Enqueue copies of `parts`, each in C order, to the device's memory from `pointer` on, one behind the other;
        they may be changed as soon as this returns."""
        filling = deque[tuple[np.ndarray, Any, Future[int]]]()
        for views in _pieces(parts):
            if len(filling) == len(self._buffers):
                pointer += self._sent(pointer, *filling.popleft())
            self._buffers.rotate(-1)
            buffer, event = self._buffers[0]
            event.synchronize()
            filling.append((buffer, event, self._pool.submit(_fill, buffer, views)))
        for each in filling:
            pointer += self._sent(pointer, *each)

    def _sent(self, pointer: int, buffer: np.ndarray, event: Any, filled: Future[int]) -> int:
        size = filled.result()
        self._cuda.memcpy_htod_async(pointer, buffer[:size], self._stream)
        event.record(self._stream)
        return size

    def close(self) -> None:
        """Wait until nothing fills the buffers or copies from them, also after an error."""
        self._pool.shutdown()
        self._stream.synchronize()


def _pieces(parts: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The bytes of parts, one behind the other, as much at a time as a buffer takes."""
    views, left = list[np.ndarray](), _PIECE
    for part in parts:
        data = part.reshape(-1).view(np.uint8)
        while data.size:
            views.append(data[:left])
            left, data = left - views[-1].size, data[left:]
            if not left:
                yield views
                views, left = [], _PIECE
    if views:
        yield views


def _fill(buffer: np.ndarray, views: Sequence[np.ndarray]) -> int:
    """Fill the beginning of a buffer, and say how much of it; other threads run meanwhile."""
    size = sum(view.size for view in views)
    np.concatenate(views, out=buffer[:size])
    return size
