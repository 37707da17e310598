"""The thread that owns the engines: it answers what any other thread asks for, as many requests at a time as fit."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from edgellm.decoding import DecodingLoop, DecodingSequence, EmittedToken
from edgellm.errors import EngineError, RequestError
from edgellm.generation import Answering, Generation, deadline_after
from edgellm.metrics import Metrics
from edgellm.request_queue import Call, Entry, RequestQueue
from edgellm.responses import Chunk, Response
from edgellm.stream import finished_response

logger = logging.getLogger("edgellm.serving")
logger.addHandler(logging.NullHandler())

#: How many requests may wait where nobody says otherwise.
QUEUE_LIMIT = 1024


class Engine(Protocol):
    """What the thread opens, uses and closes; nothing else may use it meanwhile."""

    def loop(self) -> DecodingLoop:
        """The loop to answer requests with; asked for again after each call, which may have changed something."""

    def close(self) -> None:
        """Free everything."""


OpenedEngine = TypeVar("OpenedEngine", bound=Engine)


class EngineThread(Generic[OpenedEngine]):
    """Opens an engine in a thread of its own and answers requests with it, first come, first served.

    Requests join while others run (continuous batching), and leave when they are finished, cancelled or late, or fail:
    then the others go on. Where the engine itself fails, all that it was computing fail with the cause, and what waits
    is tried; where it cannot even be cleared, the thread ends and everything fails with the cause.
    """

    def __init__(self, open_engine: Callable[[], OpenedEngine], queue_limit: int = QUEUE_LIMIT) -> None:
        """`opened` has the engine, or what opening it raised, when that is done; `closed` ends with the thread."""
        if isinstance(queue_limit, bool) or not isinstance(queue_limit, int) or queue_limit < 1:
            raise RequestError(f"queue_limit is {queue_limit!r}: expected a whole number of at least 1")
        self.metrics = Metrics()
        self.opened: Future[OpenedEngine] = Future()
        self.closed: Future[None] = Future()
        for result in (self.opened, self.closed):
            result.set_running_or_notify_cancel()  # who waits for them may give up, they go on
        self._open_engine = open_engine
        self._queue = RequestQueue(queue_limit)
        self._answering: dict[DecodingSequence, Answering] = {}
        self._thread = threading.Thread(target=self._main, name="edgellm-engine", daemon=True)
        _all_threads.add(self)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """How many requests are being computed."""
        return len(self._answering)

    def submit(self, sequence: DecodingSequence, deadline: float | None = None) -> Generation:
        """Queue a request, which ends by itself after `deadline` seconds.

        Raises QueueFullError, RequestError after `close`, EngineError where the thread has died, or in a process that
        was forked since.
        """
        answering = Answering(sequence, deadline_after(deadline))
        try:
            self._queue.put(answering)
        except Exception:
            self.metrics.refused()
            raise
        self.metrics.accepted()
        return Generation(answering, self._discard)

    def check(self) -> None:
        """Raise what `submit` would, but for a full queue."""
        self._queue.check()

    def call(self, function: Callable[[OpenedEngine], Any]) -> Future[Any]:
        """Run a function of the engine in its thread when its turn comes and no request is being computed."""
        call = Call(lambda: function(self.opened.result()))
        self._queue.put(call)
        return call.result

    def close(self) -> None:
        """End all requests as cancelled, free the engine, and wait for that. May be called again, and by any thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self.closed.result()
            self._thread.join()

    def stop(self) -> Future[None]:
        """As `close`, but does not wait: the result is `closed`."""
        self._queue.close(_after_close)
        return self.closed

    def _main(self) -> None:
        try:
            engine = self._open_engine()
        except BaseException as error:
            failure = error
            self._queue.close(lambda: _dead(failure))
            self._end_rest(failure)
            self.closed.set_result(None)
            self.opened.set_exception(error)
            return
        atexit.register(self.close)  # before what the engine has registered: it must close in this thread
        self.opened.set_result(engine)
        crash: BaseException | None = None
        try:
            self._serve(engine)
        except BaseException as error:
            crash = error
            logger.critical("the engine thread has died: %s", error, exc_info=error)
            self._queue.close(lambda: _dead(crash))
        self._end_rest(crash)
        try:
            engine.close()
        except Exception as error:
            logger.error("the engine could not be closed: %s", error, exc_info=error)
        atexit.unregister(self.close)
        self.closed.set_result(None)

    def _serve(self, engine: OpenedEngine) -> None:
        self._loop = engine.loop()
        while True:
            if not self._loop.running:
                self._queue.wait()
            if self._queue.closed:
                break
            try:
                self._round(engine)
            except Exception as error:
                self._fail_running(error)
        self._loop.abandon()

    def _round(self, engine: OpenedEngine) -> None:
        """End what is unwanted, take in what has a place, and compute one round."""
        now = time.perf_counter()
        for late in self._queue.take_late(now):
            self._end(late, "deadline")
        for answering in self._answering.values():
            if (reason := answering.unwanted(now)) is not None:
                self._release_text(answering, reason)
        self._deliver(self._loop.evict())
        self._admit(engine)
        if self._loop.running:
            self._deliver(self._loop.advance())
            self.metrics.round()

    def _admit(self, engine: OpenedEngine) -> None:
        """Begin those whose turn it is, as long as there is a place for the first."""
        while (entry := self._queue.first()) is not None:
            if isinstance(entry, Call):
                if self._loop.running:
                    return
                if self._queue.remove(entry):
                    entry.run()
                    self._loop = engine.loop()
                continue
            sequence, failure, reason = entry.sequence, None, entry.unwanted(time.perf_counter())
            try:
                if reason is None and not self._loop.has_place(sequence):
                    return
            except Exception as error:
                failure = error
            if not self._queue.remove(entry):
                continue
            if reason is not None or failure is not None:
                self._end(entry, reason or "cancelled", failure)
                continue
            self._answering[sequence] = entry
            self._deliver(self._loop.settle())
            try:
                self._loop.admit(sequence)
            except Exception as error:
                sequence.failure = error
                self._end_finished()

    def _deliver(self, emitted: Iterator[EmittedToken]) -> None:
        """Hand the tokens of a round to those who wait for them, and end what is finished."""
        rounds: dict[DecodingSequence, list[EmittedToken]] = {}
        try:
            for each in emitted:
                rounds.setdefault(each.sequence, []).append(each)
        finally:
            for sequence, tokens in rounds.items():
                text = "".join(each.text for each in tokens)
                ids, flags = tuple(each.token_id for each in tokens), tuple(each.from_draft for each in tokens)
                self._answering[sequence].deliver(Chunk(text, ids, flags))
        self._end_finished()

    def _end_finished(self) -> None:
        for sequence, answering in list(self._answering.items()):
            if sequence.finished:
                del self._answering[sequence]
                self._end(answering, "cancelled", sequence.failure)

    def _fail_running(self, error: Exception) -> None:
        """The engine has failed: so have the requests that it was computing, but for those that were finished."""
        logger.error("the engine failed: %s", error, exc_info=error)
        self._loop.abandon(keep_rows=False)
        for sequence in self._answering:
            if not sequence.finished:
                sequence.failure = _failed_with(error)
        self._end_finished()

    def _release_text(self, answering: Answering, reason: str) -> None:
        """Finish an answer, and show the text that was held back."""
        try:
            text = answering.sequence.answer.finish(reason)
        except Exception as error:  # its text cannot be completed
            answering.sequence.failure = error
            return
        if text:
            answering.deliver(Chunk(text, ()))

    def _end(self, answering: Answering, reason: str, failure: Exception | None = None) -> None:
        """Give a request its response, ended for `reason` where it was not finished; or what it failed with."""
        response: Response | None = None
        if failure is None:
            self._release_text(answering, reason)
            failure = answering.sequence.failure
        if failure is None:
            response = finished_response(answering.sequence)
        self.metrics.ended(response)
        outcome = "failed" if response is None else response.finish_reason
        details: dict[str, Any] = {"outcome": outcome, "prompt_tokens": len(answering.sequence.prompt_ids)}
        if response is not None:
            details |= {"completion_tokens": response.usage.completion_tokens}
            details |= {"total_seconds": response.timings.total_seconds}
        logger.info("request ended: %s", outcome, extra={"edgellm": details}, exc_info=failure)
        answering.end(response, failure)

    def _end_rest(self, crash: BaseException | None) -> None:
        """End whatever is left, at the end of the thread."""
        for answering in [*self._answering.values(), *self._queue.take_all()]:
            self._end_unbegun(answering, crash)
        self._answering.clear()

    def _end_unbegun(self, entry: Entry, crash: BaseException | None) -> None:
        if isinstance(entry, Answering):
            self._end(entry, "cancelled", None if crash is None else _dead(crash))
        elif entry.result.set_running_or_notify_cancel():
            entry.result.set_exception(_after_close() if crash is None else _dead(crash))

    def _discard(self, answering: Answering) -> None:
        if self._queue.remove(answering):
            self._end(answering, "cancelled")

    def _forked(self) -> None:
        """This process is a copy, in which the thread does not exist, and locks may be held for ever."""
        entries = [*self._answering.values(), *self._queue.entries]
        self._queue = RequestQueue(1)
        self._queue.close(_after_fork)
        self.metrics = Metrics()
        atexit.unregister(self.close)
        for entry in entries:
            if isinstance(entry, Answering):
                entry.forked(_after_fork())
        if not self.closed.done():
            self.closed = Future()
            self.closed.set_result(None)


_all_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


def _mark_forked() -> None:
    for thread in list(_all_threads):
        thread._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def _after_close() -> Exception:
    return RequestError("the model is closed: open it anew")


def _after_fork() -> Exception:
    return EngineError(
        "this process was forked from the one that opened the model, and a thread that computes does not survive that: "
        "open the model after the fork, or start processes with the method 'spawn'"
    )


def _dead(cause: BaseException) -> Exception:
    error = EngineError(f"the engine's thread has ended with {type(cause).__name__}: {cause}; open the model anew")
    error.__cause__ = cause
    return error


def _failed_with(cause: Exception) -> Exception:
    error = EngineError(f"the engine failed while it computed this answer: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
