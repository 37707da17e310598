"""The queue in front of the engine: first come, first served, whichever thread it comes from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from edgellm.errors import QueueFullError
from edgellm.generation import RequestState


@dataclass(eq=False)
class Call:
    """A function that wants the engine for itself, and its result."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        """Call it; what it raises is the result's."""
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function())
        except BaseException as error:
            self.result.set_exception(error)


#: What stands in the queue.
Entry = RequestState | Call


class RequestQueue:
    """Requests in their order, at most `limit` of them; any thread puts, the engine's takes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._refusal: Callable[[], Exception] | None = None
        self._earliest = float("inf")

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[Entry]:
        """Who waits, in order."""
        return list(self._entries)

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._refusal is not None

    def check(self) -> None:
        """Raise the error that the queue was closed with."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, entry: Entry) -> None:
        """Join the end of the queue. Raises QueueFullError, or the error that the queue was closed with."""
        with self._changed:
            self.check()
            if isinstance(entry, RequestState):
                if len(self._entries) >= self.limit:
                    raise QueueFullError(
                        f"{len(self._entries)} requests are waiting, which is all that the queue holds: ask again when "
                        "some are answered, or open with a larger queue_limit"
                    )
                if entry.deadline is not None:
                    self._earliest = min(self._earliest, entry.deadline)
            self._entries.append(entry)
            self._changed.notify()

    def first(self) -> Entry | None:
        """Whose turn it is."""
        with self._changed:
            return self._entries[0] if self._entries else None

    def remove(self, entry: Entry) -> bool:
        """Take an entry out, from wherever it stands; False where it is not there any more."""
        with self._changed:
            if self._entries and self._entries[0] is entry:
                self._entries.popleft()
                return True
            try:
                self._entries.remove(entry)
            except ValueError:
                return False
            return True

    def take_late(self, now: float) -> list[RequestState]:
        """Take out the requests whose time is over."""
        if now < self._earliest:
            return []
        with self._changed:
            late = [entry for entry in self._entries if isinstance(entry, RequestState) and _is_late(entry, now)]
            for entry in late:
                self._entries.remove(entry)
            deadlines = [entry.deadline for entry in self._entries if isinstance(entry, RequestState)]
            self._earliest = min((deadline for deadline in deadlines if deadline is not None), default=float("inf"))
        return late

    def wait(self) -> None:
        """Return when there is an entry, or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._entries or self._refusal is not None)

    def close(self, refusal: Callable[[], Exception]) -> None:
        """Refuse what comes from now on with the error that `refusal` makes; the first one stays."""
        with self._changed:
            self._refusal = self._refusal or refusal
            self._changed.notify_all()

    def take_all(self) -> list[Entry]:
        """Empty the queue."""
        with self._changed:
            entries = list(self._entries)
            self._entries.clear()
            return entries


def _is_late(entry: RequestState, now: float) -> bool:
    return entry.deadline is not None and now >= entry.deadline
