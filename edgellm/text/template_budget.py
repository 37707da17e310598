"""What one rendering of a template may use, and the counting of it."""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may use. Sizes are in characters; `total_size` is the sum of all values that are made."""

    source_size: int = 256 * 1024
    output_size: int = 4 * 1024 * 1024
    value_size: int = 4 * 1024 * 1024
    total_size: int = 256 * 1024 * 1024
    seconds: float = 5.0


class LimitExceeded(Exception):
    """A template used more than its limits allow; the message completes "the template ..."."""


class TemplateRaised(Exception):
    """A template called `raise_exception`."""


class Budget:
    """What is left of the limits during one rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._left = limits.total_size
        self._deadline = time.monotonic() + limits.seconds

    def spend(self, amount: int) -> None:
        """Take `amount` characters or steps; raises `LimitExceeded` when nothing is left or time is up."""
        self._left -= amount
        if self._left < 0:
            raise LimitExceeded(f"makes more than {self.limits.total_size} characters of values")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"runs longer than {self.limits.seconds:g} seconds")

    def check_size(self, size: int) -> None:
        """Raise `LimitExceeded` where one value of `size` characters is too large."""
        if size > self.limits.value_size:
            raise LimitExceeded(f"makes a value of more than {self.limits.value_size} characters")

    def take(self, value: Any) -> Any:
        """Pay for a value that was made, and return it; what comes item by item becomes a list."""
        if isinstance(value, Iterator):
            items, size = [], 0
            for item in value:
                size += self._size(item, self.limits.value_size - size)
                items.append(item)
                self.spend(1)
            return items
        self.spend(self._size(value, self.limits.value_size) + 1)
        return value

    def _size(self, value: Any, allowed: int) -> int:
        """The size of `value` as if printed, shared parts counted as often as they occur."""
        size, waiting, seen = 0, [value], 0
        while waiting:
            item = waiting.pop()
            seen += 1
            if seen % 4096 == 0:
                self.spend(4096)
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            elif isinstance(item, Mapping):
                waiting.extend(item)
                waiting.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)):
                waiting.extend(item)
            size += 1
            if size > allowed + 1:
                self.check_size(self.limits.value_size + 1)
        return size


current_budget: ContextVar[Budget] = ContextVar("template_budget")


def run_with_budget(limits: TemplateLimits, function: Callable[[], Any]) -> Any:
    """Call `function` while everything that templates do is paid from one new budget."""
    token = current_budget.set(Budget(limits))
    try:
        return function()
    finally:
        current_budget.reset(token)
