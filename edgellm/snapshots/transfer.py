"""Moves KV rows between a runner's caches and a snapshot, at the speed of the bus."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from threading import Barrier
from typing import NamedTuple
from weakref import ReferenceType, ref

import numpy as np

from edgellm.engines.backends.base import Backend, Transfer
from edgellm.engines.errors import explained
from edgellm.errors import SnapshotError
from edgellm.kernels.arrays import Array
from edgellm.kernels.compilations import usable_cores
from edgellm.snapshots.snapshot import DIGEST_BYTES, Findings, Section, Snapshot, combined_findings, examine

#: A section, its place [lines, n] uint8 in the staging memory, and where that begins, in bytes.
Placed = tuple[Section, np.ndarray, int]

#: A file's rows go through pinned memory of the file's size, or of this one where the file is larger.
_STAGING_BYTES = 64 << 20
#: What is not hashed is read so much at a time: each return of a thread costs the one that launches some microseconds.
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class RowCopy:
    """The rows of `cache` [n_kv, C, size], which is one slot's, from row `first` on (see `Backend.upload_rows`), and
    the first `rows` of `values` [n_kv, N, size] on the host, which are the tensor `name` of a snapshot."""

    name: str
    cache: Array
    values: np.ndarray
    rows: int
    first: int = 0


class Uploader:
    """Fills caches from snapshots beside what the backend computes. Used from the backend's thread.

    A snapshot in `Backend.host_memory` is copied as it is. A file is read into such memory by several threads, and what
    has arrived is copied while the rest is read.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._under_way: list[Transfer] = []
        self._staging: np.ndarray | None = None
        #: Of the file that the staging memory holds the rows of: its map, and the sections by their offsets.
        self._held: ReferenceType[Snapshot] | None = None
        self._held_sections: dict[int, np.ndarray] = {}
        self._reader = SectionReader()

    def reserve(self, nbytes: int) -> None:
        """Make what a file of that size goes through, which takes milliseconds, before a request waits for it."""
        self._staged(nbytes)
        self._reader.reserve()

    def upload(self, copies: Iterable[RowCopy]) -> Iterator[tuple[str, Transfer]]:
        """Set the caches' rows beside what is enqueued later, a copy whenever the next one is asked for: gives names of
        tensors, each with the transfer after which it is there."""
        self._backend.begin_beside()
        # Kept until the next upload, as are the values with them.
        self._under_way = kept = []
        for copy in copies:
            kept.append(self._backend.upload_rows_beside(copy.cache, copy.values, copy.rows, copy.first))
            yield copy.name, kept[-1]

    def upload_file(
        self, descriptor: int, snapshot: Snapshot, copies: Iterable[RowCopy], findings: list[Findings] | None = None
    ) -> Iterator[tuple[str, Transfer]]:
        """The same with rows of the open file that the `snapshot`, and the copies' values, are a map of. What is given
        as `findings` gets those of the content added when all is there, for which everything is read. What the memory
        still holds of the latest file is not read again.

        Raises SnapshotError where the file is shorter than it was.
        """
        self._backend.begin_beside()
        wanted = {each.name: each for each in copies if each.rows}
        if findings is None and self._held is not None and self._held() is snapshot:
            held = ((each, self._held_sections[each.offset]) for each in snapshot.sections if each.name in wanted)
            yield from self._send(held, wanted)
            return
        self.forget()
        rounds = self._rounds(snapshot, wanted, whole=findings is not None)
        examined: list[tuple[int, Findings]] = []
        for placed in rounds:
            yield from self._upload_round(descriptor, placed, wanted, None if findings is None else examined)
        if len(rounds) == 1 and all(len(target) == 1 for _, target, _ in rounds[0]):
            self._held = ref(snapshot)
            self._held_sections = {section.offset: target for section, target, _ in rounds[0]}
        if findings is not None:
            findings.append(combined_findings(each for _, each in sorted(examined, key=itemgetter(0))))

    def _rounds(self, snapshot: Snapshot, wanted: Mapping[str, RowCopy], whole: bool) -> list[list[Placed]]:
        """What the staging memory takes at a time: sections in the order of `wanted`, and others first if `whole`."""
        place = {name: index for index, name in enumerate(wanted)}
        order = [section for section in snapshot.sections if section.name in place or whole]
        order.sort(key=lambda section: place.get(section.name, -1))
        sizes = [section.nbytes for section in order]
        staging = self._staged(sum(sizes), max(sizes, default=0))
        return [list(_placed(sections, wanted, staging, whole)) for sections in _fitting(order, len(staging))]

    def _upload_round(
        self,
        descriptor: int,
        placed: Sequence[Placed],
        wanted: Mapping[str, RowCopy],
        examined: list[tuple[int, Findings]] | None,
    ) -> Iterator[tuple[str, Transfer]]:
        """Read sections and copy each when it has arrived; `examined` gets what is found (None: nothing is hashed)."""
        if self._under_way:  # the last of them is done when all are, which read what is going to be overwritten
            self._under_way.pop().wait()
        parts, numbers = _parts(placed, self._staged(0), _READ_BYTES if examined is None else 0)
        reading = self._reader.read(descriptor, parts, examined is not None)

        def arrived() -> Iterator[tuple[Section, np.ndarray]]:
            for number, (section, target, _) in zip(numbers, placed, strict=True):
                if section.name in wanted:
                    reading.wait_for(number)
                    yield section, target

        try:
            yield from self._send(arrived(), wanted)
            found = reading.findings()
            if examined is not None:
                examined += [(part.offset, each) for part, each in zip(parts, found, strict=True)]
        finally:
            reading.stop()

    def read(self, descriptor: int, snapshot: Snapshot) -> Findings:
        """Fill the content of a snapshot, whose places are known, from its open file; what is found in it. Raises
        SnapshotError where the file cannot be read to its end."""
        end = Section(snapshot.nbytes - DIGEST_BYTES, DIGEST_BYTES)
        parts = [
            Part(snapshot.content[each.offset : each.offset + each.nbytes][None], each.offset, each.nbytes, each)
            for each in (*snapshot.sections, end)
        ]
        reading = self._reader.read(descriptor, parts, is_hashed=True)
        try:
            return combined_findings(reading.findings()[:-1])
        finally:
            reading.stop()

    def close(self) -> None:
        self._reader.close()
        self._reader, self._staging, self._under_way = SectionReader(), None, []  # what is made has no threads yet
        self.forget()

    def forget(self) -> None:
        """Read what the memory still holds of a file again when it is asked for."""
        self._held, self._held_sections = None, {}

    def _send(
        self, arrived: Iterable[tuple[Section, np.ndarray]], wanted: Mapping[str, RowCopy]
    ) -> Iterator[tuple[str, Transfer]]:
        """Copy sections, each with where it is in the staging memory; a tensor's last gives its name and transfer."""
        for section, target in arrived:
            copy = wanted[section.name]
            cache = copy.cache[section.first : section.first + section.groups]
            values = target.reshape(-1).view(copy.values.dtype).reshape(section.groups, -1, copy.values.shape[2])
            transfer = self._backend.upload_rows_beside(cache, values, copy.rows, copy.first)
            self._under_way = [transfer]
            if section.first + section.groups == copy.cache.shape[0]:
                yield section.name, transfer

    def _staged(self, nbytes: int, least: int = 0) -> np.ndarray:
        """Memory for `nbytes` at a time, or for a part of them, but never less than for `least`."""
        wanted = max(min(nbytes, _STAGING_BYTES), least)
        if self._staging is None or len(self._staging) < wanted:
            self._backend.synchronize()  # nothing is read from the old one any more
            self._staging = None
            self.forget()
            self._staging = self._backend.host_memory(wanted)
        return self._staging


def _fitting(sections: Sequence[Section], nbytes: int) -> Iterator[list[Section]]:
    """The sections in rounds that fit so many bytes at a time."""
    fitting: list[Section] = []
    for section in sections:
        if fitting and sum(each.nbytes for each in fitting) + section.nbytes > nbytes:
            yield fitting
            fitting = []
        fitting.append(section)
    if fitting:
        yield fitting


def _placed(
    sections: Iterable[Section], wanted: Mapping[str, RowCopy], staging: np.ndarray, whole: bool
) -> Iterator[Placed]:
    """Each section with its place [lines, n] in the staging memory, one behind the other, and where that begins: all of
    it, or of each group the rows that are wanted."""
    start = 0
    for section in sections:
        lines, line = 1, section.nbytes
        copy = wanted.get(section.name)
        if copy is not None and not whole and copy.rows < copy.values.shape[1]:
            lines, line = section.groups, copy.rows * copy.values[0, 0].nbytes
        yield section, staging[start : start + lines * line].reshape(lines, line), start
        start += lines * line


def _parts(placed: Iterable[Placed], staging: np.ndarray, most: int) -> tuple[list[Part], list[int]]:
    """What threads read, and the number of the part that each section is in: where sections follow each other in the
    file and in memory they are read together, as far as that is not more than `most` bytes."""
    parts: list[Part] = []
    numbers, first = [], 0
    for section, target, start in placed:
        if len(target) == 1 and parts and parts[-1].offset + start - first == section.offset:
            joined = staging[first : start + section.nbytes]
            if len(parts[-1].target) == 1 and len(joined) <= most:
                parts[-1] = Part(joined.reshape(1, -1), parts[-1].offset, len(joined))
                numbers.append(len(parts) - 1)
                continue
        first = start
        parts.append(Part(target, section.offset, section.nbytes // len(target), section))
        numbers.append(len(parts) - 1)
    return parts, numbers


#: More threads than these do not hash, or read, faster; the thread that launches needs a core of its own.
_MOST_THREADS, _MOST_READERS = 16, 8


class Part(NamedTuple):
    """What one thread reads at a time: `target` [lines, n] uint8 is filled from the file, line i from `offset` +
    i * `stride` on; all in bytes. Where parts are hashed each is one `section`."""

    target: np.ndarray
    offset: int
    stride: int
    section: Section = Section(0, 0)


class Reading:
    """`parts` of an open file on their way into memory. Belongs to one thread, which is not one of those that read."""

    def __init__(self, descriptor: int, parts: Sequence[Part], is_hashed: bool) -> None:
        self._descriptor, self._parts, self._is_hashed = descriptor, parts, is_hashed
        self._numbers = itertools.count()
        self._results: list[Future[Findings]] = [Future() for _ in parts]
        self._stopped = False
        self.workers: list[Future[None]] = []

    def wait_for(self, number: int) -> None:
        """Return once the part is there. Raises SnapshotError where the file cannot be read to its end."""
        self._results[number].result()

    def findings(self) -> list[Findings]:
        """Those of all parts, in their order, once all are there; they are empty unless the parts are hashed."""
        return [result.result() for result in self._results]

    def stop(self) -> None:
        """Leave out what has not begun; nothing is read or written afterwards."""
        self._stopped = True
        wait(self.workers)

    def work(self) -> None:
        """Read until nothing is left; several threads do this at a time."""
        while not self._stopped and (number := next(self._numbers)) < len(self._parts):
            part, result = self._parts[number], self._results[number]
            try:
                for line, target in enumerate(part.target):
                    _read(self._descriptor, memoryview(target), part.offset + line * part.stride)
                result.set_result(examine(part.target.reshape(-1), part.section) if self._is_hashed else Findings(b""))
            except Exception as error:
                result.set_exception(error)


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
        self._pool.shutdown()


def _read(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        with explained("the file of a snapshot cannot be read", partial(SnapshotError, reason="unreadable")):
            count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise SnapshotError("the file of a snapshot is shorter than it was when it was opened", "damaged")
        target, offset = target[count:], offset + count
