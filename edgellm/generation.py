"""`Generation`: a request that another thread answers, seen from the threads that wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import EngineError, RequestError
from edgellm.requests import Chunk, Response

#: How many unread chunks are kept apart; what comes then joins the last one, so that nobody waits for a slow reader.
UNREAD_CHUNKS = 64


class Answering:
    """The engine's side of a request: what it has produced, who wants to know, and whether it is still wanted.

    `cancelled` may be set by any thread, without a lock. `deadline` is a time of `time.perf_counter`, or None: so many
    `seconds` after the request was accepted, which is before its prompt and its images were made ready. `discard` takes
    a request that was not begun out of the queue.
    """

    def __init__(
        self,
        sequence: DecodingSequence,
        seconds: float | None = None,
        discard: Callable[[Answering], None] | None = None,
    ) -> None:
        self.sequence = sequence
        self.deadline = None if seconds is None else sequence.clock.accepted + seconds
        self._discard = discard
        sequence.clock.queued = time.perf_counter()
        self.cancelled = False
        self.changed = threading.Condition()
        self.chunks: deque[Chunk] = deque()
        self.ended = False
        self.response: Response | None = None
        self.failure: Exception | None = None
        self._listeners: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End the answer at the next round, at once where it has not begun."""
        self.cancelled = True
        if self._discard is not None:
            self._discard(self)

    def unwanted(self, now: float) -> str | None:
        """The reason to end the request, if there is one."""
        if self.cancelled:
            return "cancelled"
        return "deadline" if self.deadline is not None and now >= self.deadline else None

    def deliver(self, chunk: Chunk) -> None:
        """Hand over a piece of the answer."""
        with self.changed:
            if len(self.chunks) < UNREAD_CHUNKS:
                self.chunks.append(chunk)
            else:
                self.chunks.append(_joined(self.chunks.pop(), chunk))
            self.changed.notify_all()
        self._tell()

    def take(self) -> Chunk | None:
        """The oldest piece that nobody has taken yet; None where there is none."""
        with self.changed:
            return self.chunks.popleft() if self.chunks else None

    def end(self, response: Response | None, failure: Exception | None) -> None:
        """The request has its response, or has failed."""
        with self.changed:
            self.response, self.failure, self.ended = response, failure, True
            self.changed.notify_all()
        self._tell()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended; False where it has not within `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self.ended, timeout)

    def outcome(self) -> Response | Exception:
        """The response, or what the request failed with, when it has ended."""
        return self.response or self.failure or EngineError("the request has not ended")

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there is something new. It runs in the engine's thread: it must only wake others."""
        with self.changed:
            self._listeners.append(listener)

    def forked(self, failure: Exception) -> None:
        """This process is a copy in which nobody answers, and the lock may be held for ever."""
        self.changed = threading.Condition()
        if not self.ended:
            self.failure, self.ended = failure, True

    def _tell(self) -> None:
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception:  # nobody listens any more, as when an event loop was closed
                self._listeners = [other for other in self._listeners if other is not listener]
                self.cancelled = True


class Generation:
    """A request on its way: iterate over its `Chunk`s, or ask for the `result`. Any thread may use it.

    Chunks that nobody reads block nobody: they join until they are read. Leaving a `with` block, and letting go of the
    object, cancel what is not finished.
    """

    def __init__(self, answering: Answering, owner: object | None = None) -> None:
        """`owner` is kept as long as this."""
        self._answering, self._owner = answering, owner

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, well or not; there may be chunks to read."""
        return self._answering.ended

    @property
    def answering(self) -> Answering:
        """The engine's side of the request, which outlives this object and, held, does not keep the answer wanted."""
        return self._answering

    def __iter__(self) -> Iterator[Chunk]:
        while (chunk := self.next_chunk()) is not None:
            yield chunk

    def next_chunk(self, timeout: float | None = None) -> Chunk | None:
        """The next piece of the answer, None after the last. Raises what the request failed with.

        Raises TimeoutError where none comes within `timeout` seconds.
        """
        answering = self._answering
        with answering.changed:
            if not answering.changed.wait_for(lambda: answering.chunks or answering.ended, timeout):
                raise TimeoutError(f"no new part of the answer within {timeout} seconds")
            return self._take()

    def poll(self) -> Chunk | None:
        """All that came since the last reading, as one chunk, without waiting; None where that is nothing.

        Raises what the request failed with.
        """
        chunk = None
        with self._answering.changed:
            while (following := self._take()) is not None:
                chunk = following if chunk is None else _joined(chunk, following)
        return chunk

    def result(self, timeout: float | None = None) -> Response:
        """Wait for the whole answer. Raises what the request failed with, TimeoutError after `timeout` seconds."""
        answering = self._answering
        if not answering.wait(timeout):
            raise TimeoutError(f"the answer is not finished within {timeout} seconds")
        if answering.response is None:
            raise answering.failure or RequestError("the request has failed")
        return answering.response

    def cancel(self) -> None:
        """End the answer at the next round, at once where it has not begun; its finish reason is "cancelled"."""
        self._answering.cancel()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is something new to `poll`: from the thread that computes, so it must only set an
        event or the like. It is called once now."""
        self._answering.listen(wake)
        wake()

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.finished:
            self.cancel()

    def __del__(self) -> None:
        answering = getattr(self, "_answering", None)
        if answering is not None:
            answering.cancelled = True  # takes no lock: this may run anywhere

    def _take(self) -> Chunk | None:
        """The oldest chunk; None where there is none. Raises the failure after the last one."""
        answering = self._answering
        chunk = answering.take()
        if chunk is None and answering.ended and answering.failure is not None:
            raise answering.failure
        return chunk


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return Chunk(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.from_draft + second.from_draft,
        first.logprobs + second.logprobs,
    )


OnChunk = Callable[[Chunk], object]


class ChunkCallbacks:
    """Hands what has come of each answer to its callback, whenever it is called.

    What a callback raises ends its request, which fails with that, and leaves the others alone.
    """

    def __init__(self, told: Iterable[tuple[Answering, OnChunk]]) -> None:
        self._told = dict(told)

    def __call__(self) -> None:
        for answering, on_chunk in list(self._told.items()):
            try:
                while (chunk := answering.take()) is not None:
                    on_chunk(chunk)
            except Exception as error:
                del self._told[answering]
                answering.sequence.failure = error  # the next round takes it out
                if answering.ended:
                    answering.end(None, error)


def callbacks_of_each(on_chunk: Any, count: int | None) -> list[OnChunk | None]:
    """The callbacks of `count` requests, None where one has none; `count` None: of one that is not in a list.

    Raises RequestError for what is not a callable or None for each.
    """
    if count is None:
        return [_checked(on_chunk, "on_chunk")]
    if on_chunk is None:
        return [None] * count
    expected = f"expected a list with a callable or None for each of the {count} requests"
    if not isinstance(on_chunk, Sequence) or isinstance(on_chunk, (str, bytes)):
        raise RequestError(f"on_chunk is a {type(on_chunk).__name__}: {expected}")
    if len(on_chunk) != count:
        raise RequestError(f"on_chunk has {len(on_chunk)} entries: {expected}")
    return [_checked(each, f"on_chunk[{index}]") for index, each in enumerate(on_chunk)]


def _checked(callback: Any, name: str) -> OnChunk | None:
    if callback is not None and not callable(callback):
        raise RequestError(f"{name} is a {type(callback).__name__}: expected a callable that takes a Chunk, or None")
    return callback
