"""Sections of a file brought into memory by several threads, each hashed by the one that read it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Barrier
from typing import NamedTuple

import numpy as np

from edgellm.engines.processor_cores import usable_cores
from edgellm.errors import SnapshotError
from edgellm.snapshots.content_digest import section_digest

#: More threads than these do not hash, or read, faster; the thread that launches needs a core of its own.
_MOST_THREADS, _MOST_READERS = 16, 8


class Part(NamedTuple):
    """What one thread reads at a time: `target` [lines, n] uint8 is filled from the file, line i from `offset` +
    i * `stride` on; all in bytes."""

    target: np.ndarray
    offset: int
    stride: int


class Reading:
    """`parts` of an open file on their way into memory. Belongs to one thread, which is not one of those that read."""

    def __init__(self, descriptor: int, parts: Sequence[Part], is_hashed: bool) -> None:
        self._descriptor, self._parts, self._is_hashed = descriptor, parts, is_hashed
        self._numbers = itertools.count()
        self._arrived: SimpleQueue[tuple[int, bytes] | Exception] = SimpleQueue()
        self._digests: dict[int, bytes] = {}
        self._stopped = False
        self.workers: list[Future[None]] = []

    def wait_for(self, number: int) -> None:
        """Return once the part is there. Raises SnapshotError where the file cannot be read to its end."""
        while number not in self._digests:
            arrived = self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            self._digests[arrived[0]] = arrived[1]

    def digests(self) -> list[bytes]:
        """Those of all parts, in their order, once all are there; they are empty unless the parts are hashed."""
        for number in range(len(self._parts)):
            self.wait_for(number)
        return [self._digests[number] for number in range(len(self._parts))]

    def stop(self) -> None:
        """Leave out what has not begun; nothing is read or written afterwards."""
        self._stopped = True
        wait(self.workers)

    def work(self) -> None:
        """Read until nothing is left; several threads do this at a time."""
        try:
            while not self._stopped and (number := next(self._numbers)) < len(self._parts):
                part = self._parts[number]
                for line, target in enumerate(part.target):
                    _read(self._descriptor, memoryview(target), part.offset + line * part.stride)
                self._arrived.put((number, section_digest(part.target.reshape(-1)) if self._is_hashed else b""))
        except Exception as error:
            self._arrived.put(error)


class SectionReader:
    """Threads that read; they are made once, which takes milliseconds."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` of them; by default as many as there are cores besides the one that launches, and are of use."""
        self._threads = threads or max(1, min(_MOST_THREADS, usable_cores() - 1))
        self._readers = threads or min(_MOST_READERS, self._threads)
        self._pool = ThreadPoolExecutor(self._threads, "edgellm-snapshot")

    def reserve(self) -> None:
        """Start the threads now."""
        barrier = Barrier(self._threads)
        try:
            wait([self._pool.submit(barrier.wait) for _ in range(self._threads)])
        except BaseException:  # there is no room for so many threads: those that wait for the others go on
            barrier.abort()
            raise

    def read(self, descriptor: int, parts: Sequence[Part], is_hashed: bool) -> Reading:
        """Begin to read; the descriptor stays open until all parts are there, or the reading is stopped."""
        reading = Reading(descriptor, parts, is_hashed)
        count = min(len(parts), self._threads if is_hashed else self._readers)
        reading.workers = [self._pool.submit(reading.work) for _ in range(count)]
        return reading

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _read(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        try:
            count = os.preadv(descriptor, [target], offset)
        except OSError as error:
            raise SnapshotError(
                f"the file of a snapshot cannot be read: {error.strerror or error}", "unreadable"
            ) from error
        if count == 0:
            raise SnapshotError("the file of a snapshot is shorter than it was when it was opened", "damaged")
        target, offset = target[count:], offset + count
