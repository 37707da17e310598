"""What one rendering of a template may use, and the counting of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

_CONTAINERS = (list, tuple, Mapping, KeysView, ValuesView, ItemsView)
_LARGEST_INTEGER = 4096  # bits: arithmetic on such integers takes microseconds


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use, compiling included.

    `source_size` and `value_size`, that of what is written, too, are in characters, `source_tokens` in words and signs
    inside of `{{ }}` and `{% %}`, `items` in the values that a list or dictionary would print, `depth` in containers
    within containers and in macros that call macros, and `total_size` in bytes: the sum of all values that are made,
    whether they are still there or not. A template of a published model uses less than a hundredth of each.
    """

    source_size: int = 256 * 1024
    source_tokens: int = 16_000
    value_size: int = 4 * 1024 * 1024
    items: int = 256 * 1024
    depth: int = 100
    total_size: int = 256 * 1024 * 1024
    #: Of the thread's own time, so that a machine that is busy with something else stops no template. One step more can
    #: take half a second.
    seconds: float = 3.0


class LimitExceeded(Exception):
    """A template used more than its limits allow; the message completes "the template ..."."""


class TemplateRaised(Exception):
    """A template called `raise_exception`."""


def check(size: int, most: int, what: str) -> None:
    """Stop a template whose `size` is above `most`: it `what` ("makes text of more than {} characters")."""
    if size > most:
        raise LimitExceeded(what.format(most))


class Budget:
    """What is left of the limits during one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self.calls = 0  # inside of one another
        self._left = limits.total_size
        self._deadline = time.thread_time() + limits.seconds

    def spend(self, nbytes: int = 0) -> None:
        """Take `nbytes` of memory, and look at the clock; raises `LimitExceeded` where nothing of either is left."""
        self._left -= nbytes
        if self._left < 0:
            raise LimitExceeded(f"makes more than {self.limits.total_size} bytes of values")
        if time.thread_time() > self._deadline:
            raise LimitExceeded(f"runs longer than {self.limits.seconds:g} seconds")

    def check_size(self, size: int) -> None:
        """Raise `LimitExceeded` where one value of `size` characters is too large."""
        check(size, self.limits.value_size, "makes a value of more than {} characters")

    def check_items(self, count: int) -> None:
        """Raise `LimitExceeded` where one list or dictionary of `count` items is too large."""
        check(count, self.limits.items, "makes a list or dictionary of more than {} items")

    def check_integer(self, value: Any) -> None:
        """Raise `LimitExceeded` where `value` is an integer too large to be computed with."""
        if isinstance(value, int):
            check(value.bit_length(), _LARGEST_INTEGER, "makes or uses an integer of more than {} bits")

    def take(self, value: Any) -> Any:
        """Pay for a value that was made, and return it; what comes item by item becomes a list. Of a list or dictionary
        the places and the text in them are paid for: what else is in there was when it was made."""
        if isinstance(value, str):
            self.check_size(len(value))
            self.spend(sys.getsizeof(value))
        elif isinstance(value, Iterator):
            found: list[Any] = []
            for item in value:
                self.check_items(len(found) + 1)
                self.spend(8 + sys.getsizeof(item))
                found.append(item)
            return found
        elif isinstance(value, (list, tuple, dict)):
            self.check_items(len(value))
            place, items = (104, value.values()) if isinstance(value, dict) else (8, value)
            self.spend(64 + place * len(value) + sum(sys.getsizeof(item) for item in items if isinstance(item, str)))
        else:
            self.check_integer(value)
            self.spend(64)
        return value

    def measure(self, value: Any) -> int:
        """How many characters `value` has at least as printed, what it holds several times counted as often.

        Raises `LimitExceeded` where that, the number of values inside or their depth is too large: so nothing that
        walks through all of a measured value (printing, comparing, hashing, JSON) can take long.
        """
        if isinstance(value, str):
            self.check_size(len(value))
            return len(value)
        size = count = depth = 0
        level = [value]
        while level:
            below: list[Any] = []
            for item in level:
                size += 2
                if isinstance(item, str):
                    size += len(item)
                elif isinstance(item, int):
                    self.check_integer(item)
                    size += item.bit_length() // 3
                elif isinstance(item, _CONTAINERS):
                    self.check_items(len(below) + len(item))
                    below.extend(item)
                    if isinstance(item, Mapping):
                        below.extend(item.values())
            count += len(level)
            self.check_items(count)
            self.check_size(size)
            depth += 1
            check(depth, self.limits.depth, "nests values more than {} deep")
            self.spend()
            level = below
        return size


current_budget: ContextVar[Budget] = ContextVar("template_budget")


def run_with_budget(limits: TemplateLimits, function: Callable[[], Any]) -> Any:
    """Call `function` while everything that templates do is paid from one new budget."""
    token = current_budget.set(Budget(limits))
    try:
        return function()
    finally:
        current_budget.reset(token)
