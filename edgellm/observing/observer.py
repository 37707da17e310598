"""Observing a runner: spans of its work on the device and on the host, for a trace or, as NVTX ranges, a profiler.

Only a runner that is observed costs anything: it is wrapped, and its rounds run stage by stage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

from edgellm.engines.backends.base import Backend
from edgellm.engines.runners.base_runner import StepKey
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import MissingDependencyError
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
