"""What a model does, observed: a trace in the format that Chrome's tracing and Perfetto (ui.perfetto.dev) open, or NVTX
ranges for a profiler. Only a runner that is observed costs anything: it is wrapped, and its rounds run stage by stage.

Device spans are measured where the work is done: on a GPU by CUDA events between the stages of a round, which run as
graphs of their own while a trace is taken (otherwise a round is one graph), on NumPy by the clock. A GPU's times are
brought to the host's clock by one event that the host waits for; they are a few microseconds off.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from edgellm.engines.backends.base import Backend, Timestamp
from edgellm.engines.errors import explained
from edgellm.engines.runners.base_runner import StepKey
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import MissingDependencyError, RequestError
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.nvrtc import toolkit_roots, wheel_folders
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.slots import SlotSnapshots

#: Names of spans on the host: enqueueing work, waiting for the device, and everything that is done with tokens before
#: the next of these, the consumer's time included.
LAUNCH, WAIT, TOKENS, SNAPSHOT = "launch", "wait", "tokens", "snapshot"
#: Names of spans on the device; the stages of rounds have those of `edgellm.engines.speculation.draft_plan`.
PREFILL, DECODE, ROUND = "prefill", "decode", "round"
#: The forward pass of a step that begins before it is known which tokens may be chosen.
FORWARD = "forward"


class Observer(Protocol):
    """Takes note of spans; used from the thread of the runner."""

    def device_span(self, backend: Backend, name: str, **details: Any) -> AbstractContextManager[None]:
        """Around enqueueing what is to be one span on the device."""

    def host_span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Around something that the host does."""

    def finish(self) -> None:
        """The device is about to be closed: read from it what is still to be read."""


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def device_span(self, backend: Backend, name: str, **details: Any) -> AbstractContextManager[None]:
        return _together(each.device_span(backend, name, **details) for each in self._observers)

    def host_span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        return _together(each.host_span(name, **details) for each in self._observers)

    def finish(self) -> None:
        for observer in self._observers:
            observer.finish()


@contextmanager
def _together(spans: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for span in spans:
            stack.enter_context(span)
        yield


class ObservedRunner:
    """A runner as the decoding loop takes it; an observer takes note of each of its steps."""

    def __init__(self, runner: DecodingRunner, observer: Observer) -> None:
        self.base, self.draft, self.backend, self.limits = runner.base, runner.draft, runner.backend, runner.limits
        self.takes_given, self.is_ready, self.planned = runner.takes_given, runner.is_ready, runner.planned
        self.logits = runner.logits
        self._runner, self._observer = runner, observer
        self._steps = 0
        self._handling: AbstractContextManager[None] | None = None
        backend = runner.backend  # alone: a runner that held itself would not be freed when it is closed
        runner.observe_stages(lambda name: observer.device_span(backend, name))

    def start(self, slot: int, prompt_ids: Sequence[int], reused: int, *others: Any, **more: Any) -> Any:
        details = {"slot": slot, "prompt_tokens": len(prompt_ids), "reused_tokens": reused}
        return self._launch(PREFILL, details, lambda: self._runner.start(slot, prompt_ids, reused, *others, **more))

    def decode(self, batch: int, *others: Any, **more: Any) -> Any:
        return self._launch(DECODE, {"sequences": batch}, lambda: self._runner.decode(batch, *others, **more))

    def round(self, batch: int, plan: DraftPlan, *others: Any, **more: Any) -> Any:
        details = {"sequences": batch, "plan": plan.name}
        return self._launch(ROUND, details, lambda: self._runner.round(batch, plan, *others, **more))

    def begin(self, batch: int) -> StepKey:
        self._end_handling()
        with self._observer.device_span(self.backend, FORWARD, step=self._steps + 1, sequences=batch):
            return self._runner.begin(batch)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the runner does: the host has handled the latest tokens when it is asked for."""
        self._end_handling()
        return getattr(self._runner, name)

    def wait(self, result: Any, step: int) -> Any:
        """Wait for the result of `step`; from then to the next call the host counts as handling its tokens."""
        self._end_handling()
        with self._observer.host_span(WAIT, step=step):
            found = result.wait()
        counts = [len(each) for each in found] if isinstance(found, list) else (found >= 0).astype(int).tolist()
        self._handling = self._observer.host_span(TOKENS, step=step, tokens=counts)
        self._handling.__enter__()
        return found

    def _launch(self, name: str, details: dict[str, Any], launch: Callable[[], Any]) -> Any:
        self._end_handling()
        self._steps += 1
        details = {"step": self._steps, **details}
        with self._observer.host_span(LAUNCH, **details), self._observer.device_span(self.backend, name, **details):
            return _ObservedResult(cache(partial(self.wait, launch(), self._steps)))

    def _end_handling(self) -> None:
        if self._handling is not None:
            self._handling.__exit__(None, None, None)
            self._handling = None


class _ObservedResult(NamedTuple):
    """Tokens on their way to the host, which may be waited for again (see `DecodingRunner`)."""

    wait: Callable[[], Any]


class ObservedSnapshots:
    """A source of snapshots; an observer takes note of its work."""

    def __init__(self, snapshots: SlotSnapshots, observer: Observer) -> None:
        self._snapshots, self._observer, self.prove = snapshots, observer, snapshots.prove

    def restore(self, slot: int, prompt_ids: Sequence[int], contents: KVContents, *others: Any) -> int:
        with self._observer.host_span(SNAPSHOT, slot=slot):
            return self._snapshots.restore(slot, prompt_ids, contents, *others)


_LIBRARY_NAMES = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")


def library_candidates() -> list[str]:
    """Where the library of NVTX may be: in the wheel, in the toolkit, or where the system's loader finds it."""
    folders = [folder for wheels in wheel_folders() for folder in sorted(wheels.glob("*/lib"))]
    folders += [root / "lib64" for root in toolkit_roots()]
    files = [folder / name for folder in folders for name in _LIBRARY_NAMES]
    return [*(str(file) for file in files if file.is_file()), *_LIBRARY_NAMES]


class NvtxRanges:
    """Pushes and pops ranges (see `Observer`). Raises MissingDependencyError without the library."""

    def __init__(self) -> None:
        library = _load_library()
        self._push, self._pop = library.nvtxRangePushA, library.nvtxRangePop
        self._push.argtypes, self._push.restype = [ctypes.c_char_p], ctypes.c_int
        self._pop.argtypes, self._pop.restype = [], ctypes.c_int

    def device_span(self, backend: Backend, name: str, **details: Any) -> AbstractContextManager[None]:
        return self.host_span(name, **details)

    @contextmanager
    def host_span(self, name: str, **details: Any) -> Iterator[None]:
        self._push(f"edgellm: {name}".encode())
        try:
            yield
        finally:
            self._pop()

    def finish(self) -> None:
        """There is nothing left to do."""


def _load_library() -> Any:
    failures = []
    for candidate in library_candidates():
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            failures.append(str(error))
    raise MissingDependencyError(
        f"NVTX ranges need one of {', '.join(_LIBRARY_NAMES)}, and none loads ({'; '.join(failures)}). Install the "
        "wheel nvidia-nvtx, or leave the ranges out."
    )


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
    """Collects spans (see `edgellm.tracing.Observer`); `events` and `save` may be used by any thread.

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
