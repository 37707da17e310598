"""A trace of what a model does, in the format that Chrome's tracing and Perfetto (ui.perfetto.dev) open.

Device spans are measured where the work is done: on a GPU by CUDA events between the stages of a round, which run as
graphs of their own while a trace is taken (otherwise a round is one graph), on NumPy by the clock. A GPU's times are
brought to the host's clock by one event that the host waits for; they are a few microseconds off.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.engines.backends.base import Backend, Timestamp
from edgellm.engines.errors import explained
from edgellm.errors import RequestError
from edgellm.kernels.atomic_write import write_atomically

DEVICE_TRACK, HOST_TRACK = 1, 2
#: Spans whose ends are still to be read from the device; more of them are read as they grow older.
_MOST_PENDING = 512


@dataclass(frozen=True)
class Span:
    """Something on a track (`DEVICE_TRACK` or `HOST_TRACK`) from `begin` to `end`, seconds of `time.perf_counter`."""

    track: int
    name: str
    begin: float
    end: float
    details: dict[str, Any]


class Trace:
    """Collects spans (see `edgellm.observing.observer.Observer`); `events` and `save` may be used by any thread.

    All of them are kept, some hundred bytes each: a program that runs for days observes minutes of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._pending: deque[tuple[str, Timestamp, Timestamp, dict[str, Any]]] = deque()
        self._device = "device"
        self._started = time.perf_counter()

    @property
    def spans(self) -> list[Span]:
        """What is known so far, the device's spans after `finish` only for certain."""
        with self._lock:
            return list(self._spans)

    @contextmanager
    def device_span(self, backend: Backend, name: str, **details: Any) -> Iterator[None]:
        self._device = backend.name
        begin = backend.timestamp()
        yield
        self._pending.append((name, begin, backend.timestamp(), details))
        while len(self._pending) > _MOST_PENDING:  # long since over: nothing is waited for
            self._resolve()

    @contextmanager
    def host_span(self, name: str, **details: Any) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._add(Span(HOST_TRACK, name, begin, time.perf_counter(), details))

    def finish(self) -> None:
        while self._pending:
            self._resolve()

    def events(self) -> list[dict[str, Any]]:
        """The trace events: complete ones ("X") with times in microseconds since the trace began, and the tracks'
        names."""
        process = os.getpid()
        names = ((DEVICE_TRACK, f"{self._device} (device)"), (HOST_TRACK, "host"))
        found: list[dict[str, Any]] = [
            {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": name}}
            for track, name in names
        ]
        # What contains others comes first, as nesting is read from the order where two begin at the same time.
        for span in sorted(self.spans, key=lambda each: (each.begin, -each.end)):
            times = {"ts": (span.begin - self._started) * 1e6, "dur": (span.end - span.begin) * 1e6}
            found.append(
                {"ph": "X", "pid": process, "tid": span.track, "name": span.name, **times, "args": span.details}
            )
        return found

    def save(self, path: Path) -> None:
        """Write the trace as JSON, in place of what has the name; raises RequestError where that cannot be done."""
        content = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        with explained(f"the trace {path} cannot be written", RequestError):
            write_atomically(path, json.dumps(content).encode())

    def _resolve(self) -> None:
        name, begin, end, details = self._pending.popleft()
        self._add(Span(DEVICE_TRACK, name, begin.seconds(), end.seconds(), details))

    def _add(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)
