"""`Generation`: a request that another thread answers, as its readers see it."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import EngineError, require, require_kind, shown
from edgellm.requests import Chunk, Response, StopWhen
from edgellm.sampling_params import as_float
from edgellm.text.output import FinishReason
from edgellm.tool_calls.calls import joined_deltas, shown_calls

#: How many unread chunks are kept apart; what comes then joins the last one, so that nobody waits for a slow reader.
UNREAD_CHUNKS = 64


class RequestState:
    """A request between the engine and its readers: what it has produced, who listens, and whether it is to end.

    `cancelled` may be set by any thread, without a lock. `deadline` is a time of `time.perf_counter` (infinite: none),
    so many `seconds` after the request was accepted, which is before its prompt and its images were made ready.
    `discard` takes a request that was not begun out of the queue. `stop_when` is called by whoever reads; what it ends
    is the reader's answer at once, and the engine's at its next round. What it has `raised`, reading raises from then
    on.
    """

    def __init__(
        self,
        sequence: DecodingSequence,
        seconds: float | None = None,
        discard: Callable[[RequestState], None] | None = None,
        stop_when: StopWhen | None = None,
        client: str = "",
    ) -> None:
        self.sequence = sequence
        #: Who asks, as far as clients take turns.
        self.client = client
        self.deadline = math.inf if seconds is None else sequence.clock.accepted + seconds
        #: Where there is no slot for all, the larger goes first.
        self.priority = sequence.priority
        self._discard = discard
        sequence.clock.queued = time.perf_counter()
        self.cancelled = False
        self.changed = threading.Condition()
        self.chunks: deque[Chunk] = deque()
        self.ended = False
        self.response: Response | None = None
        self.failure: Exception | None = None
        self._listeners: list[Callable[[], None]] = []
        self.stop_when = stop_when
        self._reading = threading.RLock()  # held while `stop_when` runs; never by the engine's thread
        self._let_pass: deque[Chunk] = deque()  # by `stop_when`, and not read yet
        self._shown: list[Chunk] = []
        self._shown_text = ""
        self.raised: Exception | None = None
        self._asking = self._stopped = False

    @property
    def readable(self) -> bool:
        """Whether `take` has something to give, or to raise."""
        return bool(self.chunks or self._let_pass) or self.ended or self.raised is not None

    def cancel(self) -> None:
        """End the answer at the next round, at once where it has not begun."""
        self.cancelled = True
        if self._discard is not None:
            self._discard(self)

    def unwanted(self, now: float) -> FinishReason | None:
        """The reason to end the request, if there is one."""
        if self._stopped:
            return "stop"
        if self.cancelled:
            return "cancelled"
        return "deadline" if now >= self.deadline else None

    def deliver(self, chunks: Sequence[Chunk]) -> None:
        """Hand over what came of the answer at a time, token by token: read as one piece, unless a `stop_when` is to
        see each token as it would without drafts."""
        with self.changed:
            if self._stopped:
                return
            if self.stop_when is not None:
                self.chunks.extend(chunks)
            else:
                full = len(self.chunks) == UNREAD_CHUNKS
                self.chunks.append(_joined([self.chunks.pop(), *chunks] if full else chunks))
            self.changed.notify_all()
        if self._listeners:
            self._tell()

    def take(self) -> Chunk | None:
        """The oldest piece that nobody has read; None where there is none. Raises what `stop_when` raised."""
        if self.stop_when is None:
            with self.changed:
                return self.chunks.popleft() if self.chunks else None
        with self._reading:
            return self._let_pass.popleft() if self._let_pass else self._next_shown(self.stop_when)

    def look_ahead(self, waits: bool = True) -> bool:
        """Show `stop_when` what has come, for a caller who waits and does not read it yet. Raises nothing.

        Without `waits` it is left alone where it is running, in this thread or another: False.
        """
        if self.stop_when is None:
            return True
        if not self._reading.acquire(blocking=waits):
            return False
        try:
            if self._asking and not waits:
                return False
            while (chunk := self._next_shown(self.stop_when)) is not None:
                self._let_pass.append(chunk)
        except Exception as error:
            self.raised = error
        finally:
            self._reading.release()
        return True

    def as_shown(self, response: Response) -> Response:
        """The response of an answer that `stop_when` may have ended: no more than what was shown."""
        if not self._stopped:
            return response
        token_ids = tuple(token_id for chunk in self._shown for token_id in chunk.token_ids)
        logprobs = tuple(each for chunk in self._shown for each in chunk.logprobs)
        usage, count = response.usage, len(token_ids)
        deltas = [delta for chunk in self._shown for delta in chunk.tool_calls]
        return replace(
            response,
            text=self._shown_text,
            tool_calls=shown_calls(deltas, response.tool_calls),
            token_ids=token_ids,
            finish_reason="stop",
            usage=replace(
                usage, completion_tokens=count, context_left=usage.context_left + usage.completion_tokens - count
            ),
            stop_match=None,
            logprobs=None if response.logprobs is None else logprobs,
        )

    def end(self, response: Response | None, failure: Exception | None) -> None:
        """The request has its response, or has failed."""
        with self.changed:
            self.response = None if response is None else self.as_shown(response)
            self.failure, self.ended = failure, True
            self.changed.notify_all()
        self._tell()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request has ended; False where it has not within `timeout` seconds."""
        with self.changed:
            return self.changed.wait_for(lambda: self.ended, timeout)

    def outcome(self) -> Response | Exception:
        """The response, or what the request or its `stop_when` failed with, when it has ended."""
        return self.raised or self.response or self.failure or EngineError("the request has not ended")

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there is something new. It runs in the engine's thread: it must only wake others."""
        with self.changed:
            self._listeners.append(listener)

    def forked(self, failure: Exception) -> None:
        """End the request in a forked process, where nobody answers it and the lock may be held for ever."""
        self.changed, self._reading = threading.Condition(), threading.RLock()
        if not self.ended:
            self.failure, self.ended = failure, True

    def _next_shown(self, stop_when: StopWhen) -> Chunk | None:
        """The next piece, when `stop_when` has seen the text with it; the caller holds `_reading`."""
        if self.raised is not None:
            raise self.raised
        with self.changed:
            chunk = self.chunks.popleft() if self.chunks else None
        if chunk is None:
            return None
        self._shown.append(chunk)
        self._shown_text += chunk.text
        self._asking = True
        try:
            stops = bool(stop_when(self._shown_text))
        except BaseException as error:
            self.raised = error if isinstance(error, Exception) else None
            self.cancel()
            raise
        finally:
            self._asking = False
        if stops:
            with self.changed:
                self._stopped = True
                self.chunks.clear()
                if self.response is not None:  # the engine was faster
                    self.response = self.as_shown(self.response)
        return chunk

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

    def __init__(self, request_state: RequestState, owner: object | None = None) -> None:
        """`owner` is kept as long as this; `request_state`, the engine's side of the request, may outlive it, and does
        not keep the answer wanted."""
        self.request_state, self._owner = request_state, owner

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, well or not; there may be chunks to read."""
        return self.request_state.ended

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.next_chunk, None)

    def next_chunk(self, timeout: float | None = None) -> Chunk | None:
        """The next piece of the answer, None after the last.

        Raises what the request failed with, or its `stop_when` raised, and TimeoutError where no piece comes within
        `timeout` seconds.
        """
        request_state, until = self.request_state, _time_of(timeout)
        while True:
            with request_state.changed:
                if not request_state.changed.wait_for(lambda: request_state.readable, _seconds_to(until)):
                    raise TimeoutError(f"no new part of the answer within {shown(timeout)} seconds")
                ended = request_state.ended
            chunk = self._take()
            if chunk is not None or ended:  # else another thread has taken it
                return chunk

    def poll(self) -> Chunk | None:
        """All that came since the last reading, as one chunk, without waiting; None where that is nothing.

        Raises what the request failed with.
        """
        chunks = []
        while (chunk := self._take()) is not None:
            chunks.append(chunk)
        return _joined(chunks) if chunks else None

    def result(self, timeout: float | None = None) -> Response:
        """Wait for the whole answer. Raises what the request failed with, TimeoutError after `timeout` seconds."""
        request_state, until = self.request_state, _time_of(timeout)
        while request_state.stop_when and not (request_state.ended or request_state.raised):
            with request_state.changed:
                if not request_state.changed.wait_for(
                    lambda: request_state.chunks or request_state.ended, _seconds_to(until)
                ):
                    break
            request_state.look_ahead()
        if not request_state.raised and not request_state.wait(_seconds_to(until)):
            raise TimeoutError(f"the answer is not finished within {shown(timeout)} seconds")
        request_state.look_ahead()
        outcome = request_state.outcome()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def look_ahead(self) -> None:
        """Call the request's `stop_when` for what has come since; `result` and reading do it, too.

        For who waits for several answers at a time. What it raises is raised by these.
        """
        self.request_state.look_ahead()

    def cancel(self) -> None:
        """End the answer at the next round, at once where it has not begun; its finish reason is "cancelled"."""
        self.request_state.cancel()

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever there is something new to `poll`: from the thread that computes, so it must only set an
        event or the like. It is called once now."""
        require_kind(callable(wake), "wake", wake, "a callable without arguments")
        self.request_state.listen(wake)
        wake()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.finished:
            self.cancel()

    def __del__(self) -> None:
        if (request_state := getattr(self, "request_state", None)) is not None:
            request_state.cancelled = True  # takes no lock: this may run anywhere

    def _take(self) -> Chunk | None:
        """The oldest chunk; None where there is none. Raises the failure after the last one."""
        request_state = self.request_state
        failure = request_state.failure if request_state.ended else None  # what came before it is read first
        chunk = request_state.take()
        if chunk is None and failure is not None:
            raise failure
        return chunk


def _time_of(timeout: Any) -> float:
    """When so many seconds from now are over, in seconds of `time.monotonic`; never for None."""
    if timeout is None:
        return math.inf
    seconds = as_float(timeout)
    require(not math.isnan(seconds), "timeout", timeout, "a number of seconds, or None")
    return time.monotonic() + seconds


def _seconds_to(until: float) -> float | None:
    """How long to wait until then, as conditions take it: None for longer than a lock can wait."""
    seconds = max(0.0, until - time.monotonic())
    return seconds if seconds < threading.TIMEOUT_MAX else None


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    """Pieces that follow each other as one."""
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        tuple(flag for chunk in chunks for flag in chunk.from_draft),
        tuple(each for chunk in chunks for each in chunk.logprobs),
        joined_deltas(delta for chunk in chunks for delta in chunk.tool_calls),
    )
