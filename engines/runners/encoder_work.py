"""What encoders of media share, so that the host waits for nothing between a piece and its prompt's first token: memory
that is lent, uploads from pinned memory, and the device's own times."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from edgellm.engines.backends.base import Backend, Timestamp, Transfer
from edgellm.kernels.arrays import Array, DeviceArray, leading

#: Of so many pieces the memory of rows is kept to be written anew, where nobody says otherwise.
SPARE = 2


class _Lent:
    """Keeps memory until nobody reads what is in it, then gives it back."""

    def __init__(self, memory: DeviceArray, spare: deque[DeviceArray]) -> None:
        self._memory, self._spare = memory, spare

    def __del__(self) -> None:
        self._spare.append(self._memory)


class LentMemory:
    """Memory of rows, which is written anew when nobody reads them any more: to free a GPU's memory waits for all of
    its work."""

    def __init__(self, backend: Backend, most: int = SPARE) -> None:
        """`most`: of so many pieces it is kept."""
        self._backend = backend
        self._spare: deque[DeviceArray] = deque(maxlen=most)

    def empty(self, shape: tuple[int, ...], size: int = 0) -> Array:
        """Uninitialized memory of `shape` compute, the first of at least `size` elements."""
        size = max(size, math.prod(shape))
        memory: Array | None = next((spare for spare in self._spare if spare.size == size), None)
        if isinstance(memory, DeviceArray):
            self._spare.remove(memory)
        memory = self._backend.empty((size,), "compute") if memory is None else memory
        if isinstance(memory, DeviceArray):
            memory = replace(memory, owner=_Lent(memory, self._spare))
        return leading(memory, shape)

    def clear(self) -> None:
        """Keep no memory that nobody reads."""
        self._spare.clear()


class PinnedUploads:
    """Brings large arrays to the device: from memory that is not pinned the host might wait for what runs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        #: By name, host memory that arrays are copied from by turns, and its latest copy.
        self._staged: dict[str, deque[tuple[np.ndarray, Transfer | None]]] = {}

    def upload(self, name: str, array: Array, values: np.ndarray) -> None:
        """See `Backend.upload`. It waits for the copy before the last under that name alone."""
        turns = self._staged.setdefault(name, deque([(np.empty(0, np.uint8), None)] * 2))
        staged, copying = turns.popleft()
        if copying is not None:
            copying.wait()
        if staged.size < values.nbytes:
            staged = self._backend.host_memory(values.nbytes)
        own = staged[: values.nbytes].view(values.dtype)
        np.copyto(own.reshape(values.shape), values)
        turns.append((staged, self._backend.upload_rows(array.reshape(1, 1, -1), own.reshape(1, 1, -1), 1)))

    def clear(self) -> None:
        """Let go of the host's memory."""
        self._staged.clear()


class DeviceSeconds:
    """Seconds of a backend's clock that work took. Where nothing waits for the device, those of the latest come with
    the next."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.total = backend, 0.0
        self._timed: list[tuple[Timestamp, Timestamp]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, work is enqueued whose seconds count."""
        began = self._backend.timestamp()
        yield
        self._timed.append((began, self._backend.timestamp()))
        if self._backend.computes_at_once:
            self.count()

    def count(self) -> None:
        """Count the seconds of work that is done, or wait for it."""
        self.total += sum(end.seconds() - began.seconds() for began, end in self._timed)
        self._timed.clear()
