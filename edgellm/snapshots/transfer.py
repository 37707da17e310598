"""Moves KV rows between a runner's caches and a snapshot, at the speed of the bus."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgellm.engines.backend import Backend, Transfer
from edgellm.errors import SnapshotError
from edgellm.kernels.arrays import Array

#: A file's rows go through pinned buffers of this size, each filled by a thread while others are on the bus: one thread
#: copies at a fraction of what a bus moves.
_BUFFER_BYTES = 2 << 20
_BUFFERS = 8


@dataclass(frozen=True)
class FilePlace:
    """Where in an open file something begins, in bytes."""

    descriptor: int
    offset: int


@dataclass(frozen=True)
class RowCopy:
    """The first `rows` rows of `cache` [n_kv, C, head_dim], which is one slot's, and of `values` [n_kv, N, head_dim]
    on the host. `place` is that of the values where they are those of a file: reading is faster than its map."""

    cache: Array
    values: np.ndarray
    rows: int
    place: FilePlace | None = None


class _Filling(NamedTuple):
    """A piece of the copy `number` whose buffer `place` is being filled."""

    number: int
    place: int
    staged: RowCopy
    filled: Future[None]


def _fill(target: np.ndarray, piece: RowCopy) -> None:
    """Bring a piece's rows into a buffer [groups, rows, head_dim]."""
    if piece.place is None or piece.rows < piece.values.shape[1]:
        np.copyto(target, piece.values[:, : piece.rows])
        return
    content, offset = memoryview(target.reshape(-1).view(np.uint8)), piece.place.offset
    while content:
        count = os.preadv(piece.place.descriptor, [content], offset)
        if count == 0:
            raise SnapshotError("the file of a snapshot is shorter than it was when it was opened", "damaged")
        content, offset = content[count:], offset + count


def slot_rows(cache: Array, slot: int) -> Array:
    """The rows [n_kv, C, head_dim] of one slot of a cache [slots, n_kv, C, head_dim]."""
    return cache[slot : slot + 1].reshape(*cache.shape[1:])


def download(backend: Backend, copies: Iterable[RowCopy]) -> None:
    """Fill the values from the caches; they are there when this returns."""
    for transfer in [backend.download_rows(copy.cache, copy.values, copy.rows) for copy in copies]:
        transfer.wait()


class Uploader:
    """Fills caches from host values, in order with the backend's other work. Used from the backend's thread.

    Values in `Backend.host_memory` are copied as they are; those of a file are brought to such memory piece by piece,
    by several threads.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: list[np.ndarray] = []
        self._under_way: list[Transfer | None] = []
        self._pool: ThreadPoolExecutor | None = None

    def reserve(self) -> None:
        """Make what files' rows go through, which takes milliseconds, before a request waits for it."""
        if not self._backend.computes_at_once:
            self._make_buffers(_BUFFER_BYTES)

    def upload(self, copies: Iterable[RowCopy], is_host_memory: bool) -> Iterator[Transfer]:
        """Set the caches' rows beside what is enqueued later, a copy whenever the next transfer is asked for: gives the
        transfer after which each copy is done. Raises SnapshotError where a file is shorter than it was."""
        self._backend.begin_beside()
        if is_host_memory or self._backend.computes_at_once:
            # Kept until the next upload, as are the values with them.
            self._under_way = kept = []
            for copy in copies:
                kept.append(self._backend.upload_rows_beside(copy.cache, copy.values, copy.rows))
                yield kept[-1]
            return
        copies = list(copies)
        pool = self._make_buffers(max(_BUFFER_BYTES, *map(_head_bytes, copies)))
        waiting: deque[_Filling] = deque()
        try:
            for number, (index, piece) in enumerate(self._pieces(copies)):
                if len(waiting) == _BUFFERS:
                    sent, transfer = waiting[0].number, self._send(waiting.popleft())
                    if waiting[0].number > sent:  # that was the copy's last piece
                        yield transfer
                place = number % _BUFFERS
                earlier = self._under_way[place]
                if earlier is not None:
                    earlier.wait()
                staged = self._staged(place, piece)
                waiting.append(_Filling(index, place, staged, pool.submit(_fill, staged.values, piece)))
            while waiting:
                sent, transfer = waiting[0].number, self._send(waiting.popleft())
                if not waiting or waiting[0].number > sent:
                    yield transfer
        finally:  # after a failure: nothing writes to the buffers any more
            wait([filling.filled for filling in waiting])

    def close(self) -> None:
        """End the threads and let go of the buffers; nothing may be under way."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._buffers, self._under_way = None, [], []

    def _send(self, filling: _Filling) -> Transfer:
        """Send a piece as soon as it is in its buffer."""
        filling.filled.result()
        staged = filling.staged
        transfer = self._backend.upload_rows_beside(staged.cache, staged.values, staged.rows)
        self._under_way[filling.place] = transfer
        return transfer

    def _staged(self, place: int, piece: RowCopy) -> RowCopy:
        """The piece with its values in a buffer."""
        groups, _, size = piece.values.shape
        shape = (groups, piece.rows, size)
        nbytes = groups * piece.rows * size * piece.values.itemsize
        return RowCopy(piece.cache, self._buffers[place][:nbytes].view(piece.values.dtype).reshape(shape), piece.rows)

    def _pieces(self, copies: Sequence[RowCopy]) -> Iterator[tuple[int, RowCopy]]:
        """The copies in pieces of whole heads that fit a buffer, each with its copy's index."""
        for index, copy in enumerate(copies):
            heads = max(1, len(self._buffers[0]) // max(1, _head_bytes(copy)))
            for first in range(0, copy.values.shape[0], heads):
                values, place = copy.values[first : first + heads], copy.place
                if place is not None:
                    place = FilePlace(place.descriptor, place.offset + copy.values[:first].nbytes)
                yield index, RowCopy(copy.cache[first : first + heads], values, copy.rows, place)

    def _make_buffers(self, nbytes: int) -> ThreadPoolExecutor:
        """Buffers of at least that size, and the threads that fill them."""
        if not self._buffers or len(self._buffers[0]) < nbytes:
            self._backend.synchronize()  # nothing is read from the old ones any more
            self._buffers = [self._backend.host_memory(nbytes) for _ in range(_BUFFERS)]
            self._under_way = []
        if len(self._under_way) != _BUFFERS:
            self._under_way = [None] * _BUFFERS
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_BUFFERS, os.cpu_count() or 1), "edgellm-snapshot")
        return self._pool


def _head_bytes(copy: RowCopy) -> int:
    return copy.rows * copy.values.shape[2] * copy.values.itemsize


def model_caches(base: Mapping[str, Array], draft: Mapping[str, Array] | None) -> dict[str, Array]:
    """The caches of a base and a draft runner under the names of a snapshot's tensors."""
    caches = {f"base.{name}": cache for name, cache in base.items()}
    return caches | {f"draft.{name}": cache for name, cache in (draft or {}).items()}
