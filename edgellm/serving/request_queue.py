"""The queue of requests: who waits, whose turn it is, and who is refused."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol, TypeVar

from edgellm.errors import QueueFullError
from edgellm.generation import RequestState

#: Of so many clients it is known when each began something.
_KNOWN_CLIENTS = 1024


class OfClient(Protocol):
    """What waits for a client."""

    client: str


Waiting = TypeVar("Waiting", bound=OfClient)


class ClientShares:
    """What each client has under way, so that nobody takes all while another waits.

    Whoever has the fewest under way goes first; of these, who began something the longest ago: round robin.
    """

    def __init__(self) -> None:
        self.under_way: Counter[str] = Counter()
        self._begun: dict[str, int] = {}  # the latest last
        self._count = 0

    def first(self, waiting: Iterable[Waiting]) -> Waiting:
        """Whose turn it is among those that wait, in the order in which they came."""
        return min(waiting, key=lambda each: (self.under_way[each.client], self._begun.get(each.client, 0)))

    def begin(self, client: str) -> None:
        """A client has one more under way."""
        self.under_way[client] += 1
        self._count += 1
        self._begun.pop(client, None)
        self._begun[client] = self._count
        if len(self._begun) > _KNOWN_CLIENTS:
            del self._begun[next(iter(self._begun))]

    def end(self, client: str) -> None:
        """A client has one fewer under way."""
        self.under_way[client] -= 1
        if not self.under_way[client]:
            del self.under_way[client]


@dataclass(eq=False)
class Call:
    """A function that wants the engine for itself, and its result."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    #: It goes among requests that name none.
    priority: int = 0
    client: str = ""

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
    """Requests, the higher priority first, and of one priority by their clients' shares; those of one client in their
    order. Any thread puts, the engine's takes.

    A request is refused where `limit` others go before it; and where twice as many wait, of which its client has one.
    So one client fills the queue for itself alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: Who waits, in the order of priorities and of coming; the queue alone changes it.
        self.entries: list[Entry] = []
        self._changed = threading.Condition()
        self._refusal: Callable[[], Exception] | None = None
        self._earliest = math.inf
        #: What is under way.
        self.shares = ClientShares()
        self._first: Entry | None = None  # as long as nothing changes

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken."""
        return self._refusal is not None

    @property
    def wakes(self) -> bool:
        """Whether there is an entry, or the queue is closed."""
        return bool(self.entries) or self.closed

    def check(self) -> None:
        """Raise the error that the queue was closed with."""
        if self._refusal is not None:
            raise self._refusal()

    def put(self, entry: Entry) -> None:
        """Join the queue behind those of its priority. Raises QueueFullError, or the error that the queue was closed
        with."""
        with self._changed:
            self.check()
            place = bisect_right(self.entries, -entry.priority, key=lambda each: -each.priority)
            if isinstance(entry, RequestState):
                self._check_room(entry, place)
                self._earliest = min(self._earliest, entry.deadline)
            self.entries.insert(place, entry)
            self._first = None
            self._changed.notify()

    def _check_room(self, entry: RequestState, place: int) -> None:
        """Raise QueueFullError where an entry, whose equals end at `place`, finds no room."""
        if len(self.entries) < self.limit:
            return
        equals = Counter(each.client for each in self.entries[:place] if each.priority == entry.priority)
        before = place - equals.total() + sum(min(count, equals[entry.client] + 1) for count in equals.values())
        waits = any(each.client == entry.client for each in self.entries)
        if before >= self.limit or (waits and len(self.entries) >= 2 * self.limit):
            raise QueueFullError(
                f"{len(self.entries)} requests are waiting, which is all that the queue holds: ask again when "
                "some are answered, or open with a larger queue_limit"
            )

    def first(self) -> Entry | None:
        """The entry whose turn it is; None where nobody waits. A call waits for all of its equals that came before it,
        and those that came later for the call."""
        with self._changed:
            if self._first is None and self.entries:
                top = self.entries[0]
                requests = takewhile(lambda each: isinstance(each, RequestState), self.entries)
                equals = [each for each in requests if each.priority == top.priority]
                self._first = self.shares.first(equals) if equals else top
            return self._first

    def begin(self, entry: Entry) -> None:
        """An entry that was taken out is under way."""
        self.shares.begin(entry.client)
        self._first = None

    def end(self, entry: Entry) -> None:
        """An entry is under way no more."""
        self.shares.end(entry.client)
        self._first = None

    def remove(self, entry: Entry) -> bool:
        """Take an entry out, from wherever it stands; False where it is not there any more."""
        with self._changed:
            try:
                self.entries.remove(entry)
            except ValueError:
                return False
            self._first = None
            return True

    def take_late(self, now: float) -> list[RequestState]:
        """Take out the requests whose time is over."""
        if now < self._earliest:
            return []
        with self._changed:
            late = [entry for entry in self.entries if isinstance(entry, RequestState) and now >= entry.deadline]
            for entry in late:
                self.entries.remove(entry)
            self._first = None
            waiting = (entry.deadline for entry in self.entries if isinstance(entry, RequestState))
            self._earliest = min(waiting, default=math.inf)
        return late

    def wait(self) -> None:
        """Return when it `wakes`."""
        with self._changed:
            self._changed.wait_for(lambda: self.wakes)

    def close(self, refusal: Callable[[], Exception]) -> None:
        """Refuse what comes from now on with the error that `refusal` makes; the first one stays."""
        with self._changed:
            self._refusal = self._refusal or refusal
            self._changed.notify_all()

    def take_all(self) -> list[Entry]:
        """Empty the queue."""
        with self._changed:
            entries = list(self.entries)
            self.entries.clear()
            self._first = None
            return entries
