"""Threads that make requests ready, so that nothing keeps the event loop waiting, and what they may hold together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from edgellm.decoding.sequence import DecodingSequence
from edgellm.http.errors import HTTPError, later
from edgellm.serving.request_queue import ClientShares

T = TypeVar("T")

#: How many requests are read at a time; one client's are one fewer, and of those with a body of so many bytes, which
#: may take long and much memory, there is one.
READERS, LARGE_BODY = 4, 2**19
#: What takes longer than so many seconds may never end: its thread is lost, and so many of them are replaced.
READER_SECONDS, SPARE_READERS = 60.0, 8


@dataclass(eq=False)
class _Reading:
    client: str
    function: Callable[[], Any]
    is_large: bool
    result: asyncio.Future[Any]
    is_lost: bool = False


class Readers:
    """Runs functions in threads, each in one of its own; belongs to one event loop.

    Clients take turns by their shares, and nobody has all. A thread cannot be ended: one that takes too long is lost,
    its request fails, and another takes its place while there are spare ones.
    """

    def __init__(self, count: int = READERS, seconds: float = READER_SECONDS, spares: int = SPARE_READERS) -> None:
        self._count, self._seconds, self._spares = count, seconds, spares
        self._waiting: list[_Reading] = []
        self._working: Counter[str] = Counter()  # by client
        self._shares = ClientShares()  # of those that are lost, too
        #: How many threads have taken too long, and still run.
        self.lost = 0
        self._large = 0  # of those that work

    @property
    def are_lost(self) -> bool:
        return self._most <= 0

    @property
    def _most(self) -> int:
        return self._count - max(0, self.lost - self._spares)

    async def run(self, client: str, function: Callable[[], T], is_large: bool = False) -> T:
        """What a function returns or raises; HTTPError where it takes too long."""
        reading = _Reading(client, function, is_large, asyncio.get_running_loop().create_future())
        self._waiting.append(reading)
        self._begin()
        try:
            return await reading.result
        finally:
            del reading  # whose error would hold this frame, and all that it read

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting = [each for each in self._waiting if not each.result.done()]  # whose client has not gone
        while self._waiting and self._working.total() < self._most:
            most = max(1, self._most - 1)
            allowed = [each for each in self._waiting if self._working[each.client] < most]
            allowed = [each for each in allowed if not (each.is_large and self._large)]
            if not allowed:
                return
            first = self._shares.first(allowed)
            self._waiting.remove(first)
            self._working[first.client] += 1
            self._shares.begin(first.client)
            self._large += first.is_large
            ended = partial(self._end, first, loop.call_later(self._seconds, self._lose, first))
            threading.Thread(target=_run, args=(loop, first, ended), name="edgellm-http", daemon=True).start()

    def _lose(self, reading: _Reading) -> None:
        reading.is_lost = True
        self._working[reading.client] -= 1
        self.lost += 1
        self._large -= reading.is_large
        if not reading.result.done():
            message = f"the request takes more than {self._seconds:g} seconds to be read: make it smaller or simpler"
            reading.result.set_exception(HTTPError(400, message, code="reading_time"))
        self._begin()

    def _end(self, reading: _Reading, timer: asyncio.TimerHandle, value: Any, error: BaseException | None) -> None:
        timer.cancel()
        self._shares.end(reading.client)
        if reading.is_lost:
            self.lost -= 1
        else:
            self._working[reading.client] -= 1
            self._large -= reading.is_large
        self._working += Counter()  # lets go of clients that have none
        if not reading.result.done():
            if error is None:
                reading.result.set_result(value)
            else:
                reading.result.set_exception(error)
        self._begin()


def _run(loop: asyncio.AbstractEventLoop, reading: _Reading, ended: Callable[[Any, Any], None]) -> None:
    value, error = None, None
    try:
        value = reading.function()
    except BaseException as raised:
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(ended, value, error)
    error = None  # which would hold this frame


class ImageMemory:
    """Bounds the pixels of the images of all requests that are being read, or wait for their turn to be encoded."""

    def __init__(self, most: int) -> None:
        self._most, self._read = most, 0
        self._waiting: WeakSet[DecodingSequence] = WeakSet()
        self._lock = threading.Lock()

    @contextmanager
    def reading(self, pixels: int) -> Iterator[Callable[[DecodingSequence], None]]:
        """Hold so many pixels, which the sequence that is handed over holds from then on until its images are encoded.
        Raises HTTPError where there is no room for them."""
        with self._lock:
            waiting = sum(piece.held_pixels for each in list(self._waiting) for piece in tuple(each.prepared_media))
            if pixels and self._read + waiting + pixels > self._most:
                raise later(503, "the images of other requests take all the room: ask again", "busy")
            self._read += pixels
        try:
            yield self._hand_over
        finally:
            with self._lock:
                self._read -= pixels

    def _hand_over(self, sequence: DecodingSequence) -> None:
        with self._lock:
            self._waiting.add(sequence)
