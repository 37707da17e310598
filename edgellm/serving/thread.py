"""The thread that owns the engines: it answers what any other thread asks for."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import DeviceLostError, EngineError, closed_error, is_whole, require
from edgellm.generation import Generation, RequestState
from edgellm.metrics import Metrics
from edgellm.requests import Request
from edgellm.serving.request_queue import Call, RequestQueue
from edgellm.serving.server import Engine, RequestServer, end_request

logger = logging.getLogger("edgellm.serving")

#: How many requests may wait where nobody says otherwise.
QUEUE_LIMIT = 1024

OpenedEngine = TypeVar("OpenedEngine", bound=Engine)


class EngineThread(Generic[OpenedEngine]):
    """Opens an engine in a thread of its own and answers requests with it: the higher priority first, and of one
    priority by turns of the clients.

    Requests join while others run, and leave as `RequestServer` says. Where the engine has failed and cannot even be
    cleared, or its device is lost, the thread ends and everything fails with the cause.
    """

    def __init__(
        self, open_engine: Callable[[], OpenedEngine], metrics: Metrics, queue_limit: int = QUEUE_LIMIT
    ) -> None:
        """`opened` has the engine, or what opening it raised, when that is done; `closed` ends with the thread."""
        require(is_whole(queue_limit, 1), "queue_limit", queue_limit, "a whole number of at least 1")
        self.metrics = metrics
        self.opened: Future[OpenedEngine] = Future()
        self.closed: Future[None] = Future()
        for result in (self.opened, self.closed):
            result.set_running_or_notify_cancel()  # who waits for them may give up, they go on
        self._open_engine = open_engine
        self._queue = RequestQueue(queue_limit)
        self._server: RequestServer | None = None
        self._began: float | None = None
        self._thread = threading.Thread(target=self._main, name="edgellm-engine", daemon=True)
        _all_threads.add(self)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many requests wait for their turn."""
        return len(self._queue)

    @property
    def seconds_at_work(self) -> float:
        """How long the thread has been at the round, or the call, that it computes; 0 while it waits for one."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def running(self) -> int:
        """How many requests are being computed."""
        server = self._server  # the thread's end may take it away meanwhile
        return 0 if server is None else server.running

    @property
    def preempted(self) -> int:
        """How many requests gave way to others, and wait to go on."""
        server = self._server
        return 0 if server is None else server.preempted

    def submit(
        self, sequence: DecodingSequence, request: Request, owner: object | None = None, client: str = ""
    ) -> Generation:
        """Queue a request of a `client`, of which `sequence` was made ready. Its answer holds the `owner`.

        Raises QueueFullError, RequestError after `close`, EngineError where the thread has died, or in a process that
        was forked since.
        """
        request_state = RequestState(sequence, request.deadline, self._discard, request.stop_when, client)
        self._queue.put(request_state)
        self.metrics.accepted()
        return Generation(request_state, owner)

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
        self._queue.close(closed_error)
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
        server = self._server = RequestServer(engine, self._queue, self.metrics)
        while True:
            if not server.running and not server.preempted:
                self._began = None
                while not self._queue.wakes and engine.idle():
                    pass
                self._queue.wait()
            if self._queue.closed:
                break
            self._began = time.monotonic()
            server.round()
        server.abandon()

    def _end_rest(self, crash: BaseException | None) -> None:
        """End whatever is left, at the end of the thread."""
        running = [] if self._server is None else self._server.request_states
        if self._server is not None:
            self._server.forget_preempted()
        for entry in [*running, *self._queue.take_all()]:
            if isinstance(entry, RequestState):
                end_request(entry, "cancelled", self.metrics, None if crash is None else _dead(crash))
            elif entry.result.set_running_or_notify_cancel():
                entry.result.set_exception(closed_error() if crash is None else _dead(crash))
        self._server = None

    def _discard(self, request_state: RequestState) -> None:
        if self._queue.remove(request_state):
            end_request(request_state, "cancelled", self.metrics)

    def _forked(self) -> None:
        """This process is a copy, in which the thread does not exist, and locks may be held for ever."""
        entries = [*([] if self._server is None else self._server.request_states), *self._queue.entries]
        self._server = None
        self._queue = RequestQueue(1)
        self._queue.close(_after_fork)
        self.metrics = Metrics()
        atexit.unregister(self.close)
        for entry in entries:
            if isinstance(entry, RequestState):
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


def _after_fork() -> Exception:
    return EngineError(
        "this process was forked from the one that opened the model, and a thread that computes does not survive that: "
        "open the model after the fork, or start processes with the method 'spawn'"
    )


def _dead(cause: BaseException) -> Exception:
    """What is raised by a thread that has ended: an error for each who asks, as an error keeps where it was raised."""
    error: Exception
    if isinstance(cause, DeviceLostError):
        error = DeviceLostError(str(cause))
    else:
        error = EngineError(f"the engine's thread has ended with {type(cause).__name__}: {cause}; open the model anew")
    error.__cause__ = cause
    return error
