"""What encoders of media share, so that the host waits for nothing between a piece and its prompt's first token."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import finalize

import numpy as np

from edgellm.engines.backends.base import Backend, Timestamp, Transfer
from edgellm.kernels.arrays import Array, DeviceArray, leading

#: Of so many pieces the memory of rows is kept to be written anew, where nobody says otherwise.
SPARE = 2


class EncoderHost:
    """Memory of rows, of so many pieces at `most` kept to be written anew when nobody reads them any more, since to
    free a GPU's memory waits for all of its work; uploads; and the `seconds` of a backend's clock that work took."""

    def __init__(self, backend: Backend, most: int = SPARE) -> None:
        self._backend, self.seconds = backend, 0.0
        self._spare: deque[DeviceArray] = deque(maxlen=most)
        #: By name, host memory that arrays are copied from by turns, and its latest copy.
        self._staged: dict[str, deque[tuple[np.ndarray, Transfer | None]]] = {}
        self._timed: list[tuple[Timestamp, Timestamp]] = []

    def empty(self, shape: tuple[int, ...], size: int = 0) -> Array:
        """Uninitialized memory of `shape` compute, the first of at least `size` elements."""
        size = max(size, math.prod(shape))
        memory: Array | None = next((spare for spare in self._spare if spare.size == size), None)
        if isinstance(memory, DeviceArray):
            self._spare.remove(memory)
        memory = self._backend.empty((size,), "compute") if memory is None else memory
        if isinstance(memory, DeviceArray):
            lent = replace(memory)
            finalize(lent, self._spare.append, memory).atexit = False
            memory = replace(memory, owner=lent)
        return leading(memory, shape)

    def upload(self, name: str, array: Array, values: np.ndarray) -> None:
        """See `Backend.upload`: from memory that is pinned, for the host might wait for what runs else. It waits for
        the copy before the last under that name alone."""
        turns = self._staged.setdefault(name, deque([(np.empty(0, np.uint8), None)] * 2))
        staged, copying = turns.popleft()
        if copying is not None:
            copying.wait()
        staged = staged if staged.size >= values.nbytes else self._backend.host_memory(values.nbytes)
        own = staged[: values.nbytes].view(values.dtype)
        np.copyto(own.reshape(values.shape), values)
        turns.append((staged, self._backend.upload_rows(array.reshape(1, 1, -1), own.reshape(1, 1, -1), 1)))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Within, work is enqueued whose seconds count: at once, or with `count`."""
        began = self._backend.timestamp()
        yield
        self._timed.append((began, self._backend.timestamp()))
        if self._backend.computes_at_once:
            self.count()

    def count(self) -> None:
        """Add the seconds of what is done, or wait for it."""
        self.seconds += sum(end.seconds() - began.seconds() for began, end in self._timed)
        self._timed.clear()
