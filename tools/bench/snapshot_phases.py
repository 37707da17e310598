"""Where the time to a first token goes when rows come from a snapshot: host time by phase, and of reading alone."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore
from edgellm.snapshots.transfer import Part, Reading, SectionReader

#: Of a phase's name: whose method it is, and which. Times of `restore` and `start` contain those of others.
_METHODS = {
    "find": (SnapshotStore, "find"),
    "open the file": (SnapshotStore, "open"),
    "check": (SlotSnapshots, "_check"),
    "wait for sections": (Reading, "wait_for"),
    "restore": (SlotSnapshots, "restore"),
}


class Phases:
    """Adds up the host's milliseconds in each phase; `take` gives the medians of all requests since the last `take`."""

    def __init__(self, runner: DecodingRunner) -> None:
        self._runner = runner
        self._now: dict[str, float] = defaultdict(float)
        self._all: list[dict[str, float]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take the times of what is called within."""
        base, backend = self._runner.base, self._runner.backend
        methods: dict[str, tuple[Any, str]] = _METHODS | {
            "start copies": (backend, "upload_rows_beside"),
            "start": (self._runner, "start"),
            "prefill": (base, "_prefill"),
        }
        with ExitStack() as stack:
            for name, (owner, method) in methods.items():
                timed = self._timed(name, getattr(owner, method))
                stack.enter_context(mock.patch.object(owner, method, timed))
            yield

    def request(self, seconds: float) -> None:
        """A request has ended, whose first token took so long."""
        if self._now:
            rest = seconds - self._now["restore"] / 1000 - self._now["start"] / 1000
            self._all.append(dict(self._now) | {"before, between, and waiting for the token": rest * 1000})
        self._now.clear()

    def take(self) -> dict[str, float]:
        """Medians, in milliseconds."""
        names = {name: None for phases in self._all for name in phases}
        found = {name: statistics.median(phases.get(name, 0.0) for phases in self._all) for name in names}
        self._all.clear()
        return {name: round(milliseconds, 3) for name, milliseconds in found.items()}

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._now[name] += (time.perf_counter() - started) * 1000

        return timed


def reading_speed(path: Path, memory: np.ndarray, threads: int, is_hashed: bool, repeats: int) -> float:
    """Milliseconds in which so many threads read a snapshot's file into `memory` [bytes] uint8, and hash it or not."""
    sections = read_snapshot(path).sections
    parts = [
        Part(memory[start : start + section.nbytes].reshape(1, -1), section.offset, section.nbytes, section)
        for section in sections
        for start in [section.offset]
    ]
    reader, times = SectionReader(threads), []
    reader.reserve()
    with path.open("rb") as file:
        for _ in range(repeats):
            started = time.perf_counter()
            reader.read(file.fileno(), parts, is_hashed).findings()
            times.append((time.perf_counter() - started) * 1000)
    reader.close()
    return statistics.median(times)
