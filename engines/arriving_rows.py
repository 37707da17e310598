"""KV rows on their way into the caches while what reads them is being enqueued."""

from __future__ import annotations

from collections.abc import Iterable

from edgellm.engines.backends.base import Backend, Transfer

#: Copies that are begun before anything else is enqueued, and for each one that is waited for: the host's time for
#: launching must not be the bus's time for waiting.
_FIRST, _NEXT = 2, 3


class ArrivingRows:
    """Copies that begin one after the other as `rows` is read: names, each with its `Backend.upload_rows_beside`.

    They end in this order. Not thread-safe.
    """

    def __init__(self, backend: Backend, rows: Iterable[tuple[str, Transfer]]) -> None:
        """Begins the first of them; raises what reading `rows` does."""
        self._backend, self._rows = backend, iter(rows)
        self._begun: dict[str, Transfer] = {}
        self._latest: Transfer | None = None
        self._begin(_FIRST)

    def wait_for(self, name: str) -> None:
        """Let what is enqueued from now on wait for the rows of this name, and all before them."""
        while name not in self._begun:
            if not self._begin(1):
                raise KeyError(name)
        self._backend.wait_for(self._begun[name])
        self._begin(_NEXT)

    def wait_for_all(self) -> None:
        """Let what is enqueued from now on wait for everything."""
        while self._begin(_FIRST):
            pass
        if self._latest is not None:
            self._backend.wait_for(self._latest)

    def _begin(self, count: int) -> int:
        """Begin some more; how many there were."""
        for number in range(count):
            found = next(self._rows, None)
            if found is None:
                return number
            self._begun[found[0]] = self._latest = found[1]
        return count
