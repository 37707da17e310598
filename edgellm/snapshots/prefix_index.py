"""Finds, among many token sequences, those that share the longest prefix with a prompt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

_ID_BYTES = 4


def token_key(token_ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as bytes that sort as the ids do, 4 a token; ids below 0, which no snapshot has, become large ones."""
    return np.asarray(token_ids, np.int64).astype(">u4").tobytes()


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two keys have in common from their beginning."""
    longest = min(len(first), len(second)) // _ID_BYTES
    one, other = (np.frombuffer(key, np.uint32, longest) for key in (first, second))
    differs = one != other
    return int(np.argmax(differs)) if differs.any() else longest


def reusable_rows(common: int, prompt_tokens: int, draft_rows: int | None = None) -> int:
    """How many KV rows a prompt of `prompt_tokens` can take over that shares its first `common` tokens with them.

    The prompt's last token is always computed. A draft, of which `draft_rows` rows are there (None: there is no
    draft), needs of each row the token after it, too.
    """
    rows = min(common, prompt_tokens - 1)
    if draft_rows is not None:
        rows = min(rows, draft_rows, common - 1)
    return max(0, rows)


class PrefixIndex(Generic[T]):
    """Items by their token sequences, sorted: what shares the longest prefix with a prompt stands next to it.

    A look-up compares the prompt with a few of n sequences (log n for finding the place); adding moves n references.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._items: dict[bytes, T] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return iter([self._items[key] for key in self._keys])

    def get(self, key: bytes) -> T | None:
        """The item with exactly these tokens."""
        return self._items.get(key)

    def add(self, key: bytes, item: T) -> None:
        """Add an item, in place of one with the same tokens."""
        if key not in self._items:
            self._keys.insert(bisect_left(self._keys, key), key)
        self._items[key] = item

    def remove(self, key: bytes) -> None:
        """Take an item out; KeyError where there is none."""
        del self._items[key]
        del self._keys[bisect_left(self._keys, key)]

    def longest(self, prompt: bytes) -> tuple[int, list[T]]:
        """The length in tokens of the longest prefix that any item shares with the prompt, and all items that do.

        (0, []) where none shares a token.
        """
        place = bisect_left(self._keys, prompt)
        neighbours = self._keys[max(0, place - 1) : place + 1]
        common = max((common_tokens(key, prompt) for key in neighbours), default=0)
        if common == 0:
            return 0, []
        prefix = prompt[: common * _ID_BYTES]
        first = bisect_left(self._keys, prefix)
        last = bisect_right(self._keys, prefix, lo=first, key=lambda key: key[: len(prefix)])
        return common, [self._items[key] for key in self._keys[first:last]]

    def longest_whole(self, prompt: bytes) -> tuple[int, list[T]]:
        """As `longest`, but only of items whose every token the prompt begins with."""
        while True:
            place = bisect_right(self._keys, prompt)
            if place == 0:
                return 0, []
            key = self._keys[place - 1]
            if prompt.startswith(key):
                return len(key) // _ID_BYTES, [self._items[key]]
            prompt = prompt[: common_tokens(key, prompt) * _ID_BYTES]  # none between them is a prefix of it
