"""Regular expressions for the names of modules, as adapters have them, matched in a bounded number of steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

from edgellm.engines.errors import AdapterError

#: Characters of one pattern and of all, groups within groups, and places in names where a part of a pattern is looked
#: for, all names together (a few seconds).
_LONGEST_PATTERN, _LONGEST_PATTERNS, _DEEPEST_PATTERN, _MOST_STEPS = 1000, 1 << 18, 20, 5_000_000

#: Names themselves, of which a file may hold one for each module of a large model.
_NAME = re.compile(r"(?:\w|\\?\.)+")
_ATOM = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\[^0-9xuUN]|[^\\()|]", re.DOTALL)
_REPETITION = re.compile(r"[*+?]|\{(?!\})(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?P<\w+>|\?[:=!]|(?!\?))")
_NO_WIDTH = ("^", "$", "\\A", "\\Z", "\\b", "\\B")


def patterns_problems(patterns: Sequence[str]) -> list[str]:
    """What forbids matching these patterns, in words."""
    if sum(map(len, patterns)) > _LONGEST_PATTERNS:
        return [f"its {len(patterns):,} patterns have more than {_LONGEST_PATTERNS:,} characters together"]
    return [problem for pattern in patterns if (problem := _pattern_problem(pattern))]


def _pattern_problem(pattern: str) -> str | None:
    if len(pattern) > _LONGEST_PATTERN:
        return f"the pattern {pattern!r:.80} has {len(pattern):,} characters: expected at most {_LONGEST_PATTERN:,}"
    try:
        re.compile(pattern)
        _PatternParser(pattern).whole()
    except (re.error, RecursionError, OverflowError) as error:
        return f"the pattern {pattern!r:.80} is not a regular expression: {error}"
    except AdapterError as error:
        return str(error)
    return None


def name_starts(module: str) -> list[int]:
    """Where in a module's name it, or an end of it that follows a dot, begins."""
    return [0, *(place + 1 for place, character in enumerate(module) if character == ".")]


class PatternMatcher:
    """Tells which module names an adapter's regular expressions match.

    All ways in which a part of a pattern can match are followed at once, as a set of places in the name, so that no
    pattern takes exponentially long, as it can with a matcher that tries them one by one.
    """

    def __init__(self, most_steps: int = _MOST_STEPS) -> None:
        self._parts: dict[str, _Part] = {}
        self._left = most_steps

    def matches(self, pattern: str, module: str, starts: Iterable[int]) -> bool:
        """Whether a pattern matches all of a name from one of these places. AdapterError after too many steps."""
        part = self._parts.get(pattern)
        if part is None:
            part = _name_end(pattern) if _NAME.fullmatch(pattern) else _PatternParser(pattern).whole()
            self._parts[pattern] = part
        return len(module) in part(set(starts), module, self._step)

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise AdapterError(
                "its patterns are too involved: matching them with the names of the modules takes too many steps"
            )


#: Where a part of a pattern can end in a name, if it begins in one of some places; it tells of every step.
_Part = Callable[[set[int], str, Callable[[], None]], set[int]]


class _PatternParser:
    """Makes a `_Part` of a regular expression that `re` has compiled; AdapterError for what it does not know."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def whole(self) -> _Part:
        """The part for the whole pattern."""
        branches = [self._sequence()]
        while self._pattern[self._place : self._place + 1] == "|":
            self._place += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        return lambda starts, name, step: set().union(*(branch(starts, name, step) for branch in branches))

    def _sequence(self) -> _Part:
        parts = []
        while self._pattern[self._place : self._place + 1] not in ("", "|", ")"):
            part = self._group() if self._pattern[self._place] == "(" else _atom(self._next(_ATOM)[0])
            repetition = _REPETITION.match(self._pattern, self._place)
            parts.append(part if repetition is None else _repeated(part, *self._bounds(repetition)))

        def sequence(starts: set[int], name: str, step: Callable[[], None]) -> set[int]:
            for part in parts:
                starts = part(starts, name, step) if starts else starts
            return starts

        return sequence

    def _group(self) -> _Part:
        kind = self._next(_GROUP)[0]
        self._depth += 1
        if self._depth > _DEEPEST_PATTERN:
            raise self._too_involved()
        part = self.whole()
        self._depth -= 1
        self._place += 1
        if kind[-1] not in "=!":
            return part
        return lambda starts, name, step: {
            start for start in starts if bool(part({start}, name, step)) == (kind[-1] == "=")
        }

    def _bounds(self, repetition: re.Match[str]) -> tuple[int, float]:
        self._place = repetition.end()
        following = self._pattern[self._place : self._place + 1]
        if following == "+":  # it gives nothing back, which a set of places cannot follow
            raise self._too_involved()
        self._place += following == "?"
        if repetition[0] in "*+?":
            return int(repetition[0] == "+"), 1 if repetition[0] == "?" else math.inf
        least = int(repetition[1] or 0)
        return least, int(repetition[3]) if repetition[3] else math.inf if repetition[2] else least

    def _next(self, kind: re.Pattern[str]) -> re.Match[str]:
        found = kind.match(self._pattern, self._place)
        if found is None:
            raise self._too_involved()
        self._place = found.end()
        return found

    def _too_involved(self) -> AdapterError:
        found = self._pattern[self._place :]
        return AdapterError(f"the pattern {self._pattern!r:.80} is too involved at {found!r:.20}: write it more simply")


def _name_end(pattern: str) -> _Part:
    """A pattern of a fixed width, which can only begin in one place if it ends where the name does."""
    compiled, width = re.compile(pattern), len(pattern.replace("\\", ""))

    def name_end(starts: set[int], name: str, step: Callable[[], None]) -> set[int]:
        step()
        start = len(name) - width
        return {len(name)} if start in starts and compiled.match(name, start) else set()

    return name_end


def _atom(text: str) -> _Part:
    """One character, or none: a place such as a name's end."""
    compiled, width = re.compile(text), text not in _NO_WIDTH

    def atom(starts: set[int], name: str, step: Callable[[], None]) -> set[int]:
        ends = set()
        for start in starts:
            step()
            if compiled.match(name, start):
                ends.add(start + width)
        return ends

    return atom


def _repeated(part: _Part, least: int, most: float) -> _Part:
    def repeated(starts: set[int], name: str, step: Callable[[], None]) -> set[int]:
        for _ in range(min(least, len(name) + 2)):  # what still goes on then stays in its places
            step()
            starts = part(starts, name, step)
        ends, count = set(starts), least
        while starts and count < most:
            step()
            starts = part(starts, name, step) - ends
            ends |= starts
            count += 1
        return ends

    return repeated
