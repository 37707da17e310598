"""`RecentlyUsed`: what is kept of what was made before, within a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Kept = TypeVar("Kept")


class RecentlyUsed(Generic[Key, Kept]):
    """Keeps the values that were used last, by key. Any thread may use it."""

    def __init__(self, most: int, size_of: Callable[[Kept], int] = lambda value: 1) -> None:
        """The sizes of all values are at most `most` together, by default their number: those go that were not used for
        the longest time."""
        self.most, self.size, self._size_of = most, 0, size_of
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def find(self, key: Key) -> Kept | None:
        """The value that was kept under a key, which then counts as just used; None where there is none."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key]

    def keep(self, key: Key, value: Kept) -> Kept:
        """Keep a value, unless it alone is too large, and give it."""
        size = self._size_of(value)
        with self._lock:
            if size <= self.most:
                self.size += size - (self._size_of(self._kept[key]) if key in self._kept else 0)
                self._kept[key] = value
                while self.size > self.most:
                    self.size -= self._size_of(self._kept.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._kept.clear()
            self.size = 0
