"""Values that no argument expects: of every type, at every edge, and hostile ones."""

from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


class Unprintable:
    """Has no text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def _nested() -> Iterator[Any]:
    """Lists and objects that hold themselves, or 100,000 of their kind."""
    endless: list[Any] = []
    endless.append(endless)
    yield endless
    yield {"a": endless}
    yield [{"role": "assistant", "content": "x", "tool_calls": endless}]
    yield _deep()
    yield [{"role": "user", "content": _deep()}]


@cache
def _deep() -> list[Any]:
    """Made once: it takes longer than refusing it does."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def wrong_values() -> Iterator[Any]:
    """All of them, made anew: some can be used up."""
    yield from (None, True, False, 0, 1, -1, 5, 2**31, 2**63, 2**64, -(2**70), 10**400, 10**5000, -(10**5000))
    yield from (0.0, -0.5, 1.5, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 1j)
    yield from (decimal.Decimal("NaN"), decimal.Decimal(5), fractions.Fraction(1, 3), fractions.Fraction(10**400, 3))
    yield from ("", " ", "x", "\0", "\ud800", "~", "~nobody/x", "/", "/dev/null", "x" * 5000, "nan", "auto", "numpy")
    yield from (b"", b"x", bytearray(b"x"), memoryview(b"x"), Path("x"), Path("/"))
    yield from ([], (), {}, set(), frozenset(), range(3), [None], [5], ["x"], [[]], [{}], [b"x"], ({},), [[1, 2]])
    yield from ([10**5000], [-1], [2**31], [1.5], [math.nan], [True], ["\ud800"], [""], [object()], [Unprintable()])
    yield from ({"a": 1}, {1: 2}, {None: None}, {"role": "user"}, [{"role": "user"}], [{"role": "user", "content": 5}])
    yield from ([{"role": "user", "content": [5]}], [{"role": 5, "content": "x"}], [{"role": ["user"], "content": "x"}])
    yield from ([{"role": "user", "content": "\ud800"}], [{"role": "user", "content": "x", 5: 6}], [{5: 6}])
    yield from (
        [{"role": "user", "content": [{"type": ["image"]}]}],
        [{"role": "user", "content": [{"type": "image"}]}],
    )
    yield from ([{"role": "user", "content": [{"type": "image", "image": "/none.png", "channels": []}]}],)
    yield from ([{"role": "assistant", "content": "x", "tool_calls": 10**5000}],)
    yield from ([{"role": "assistant", "content": None, "tool_calls": [object()]}],)
    yield from (object(), Unprintable(), int, len, lambda: None, Ellipsis)
    yield from (iter([1]), (each for each in ["x"]), map(int, "1"), {"x": "y"}.items(), type, NotImplemented)
    yield from (np.array(5), np.array([1.5]), np.array([[1, 2]]), np.array([2**40]), np.array([]), np.array(["x"]))
    yield from _nested()
    yield from (np.float32("nan"), np.int64(-1), np.bool_(True), np.zeros((2, 2, 3), np.uint8), np.array([None]))
