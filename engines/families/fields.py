"""Reads a published `config.json` field by field and gathers everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgellm.engines.errors import CheckpointError, UnsupportedModelError

#: No published dimension comes near; larger ones are damage, and arithmetic on them would run away.
LARGEST_INTEGER = 2**31 - 1


class ConfigFields:
    """Typed access to the fields of a configuration. Problems are gathered until `raise_problems`.

    A field that is wrong reads as a harmless value of its type, so that one pass finds all problems.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self._invalid: list[str] = []
        self._unsupported: list[str] = []

    def integer(self, name: str, default: int | None = None, largest: int = LARGEST_INTEGER) -> int:
        """A whole number from 1 to `largest`; required where there is no default (a null counts as absent)."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not _is_integer(value) or not 1 <= value <= largest:
            self._wrong(name, f"a whole number from 1 to {largest}")
            return 1
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; required where there is no default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            self._wrong(name, "a positive number")
            return 1.0
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._wrong(name, "true or false")
            return default
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; none where the field is absent or null."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_integer(token) and 0 <= token <= LARGEST_INTEGER for token in ids):
            self._wrong(name, "a token id or a list of them")
            return ()
        return tuple(dict.fromkeys(ids))

    def invalid(self, problem: str) -> None:
        """Note something that is wrong."""
        self._invalid.append(problem)

    def unsupported(self, problem: str) -> None:
        """Note something that is well-formed and not implemented."""
        self._unsupported.append(problem)

    def raise_problems(self, family: str) -> None:
        """Raise CheckpointError if anything is wrong, UnsupportedModelError if something is merely not implemented."""
        problems = self._invalid + self._unsupported
        if not problems:
            return
        listed = "\n".join(f"  {problem}" for problem in problems)
        if self._invalid:
            advice = "Copy config.json anew from the model's source."
            raise CheckpointError(f"config.json is not a valid {family} configuration:\n{listed}\n{advice}")
        raise UnsupportedModelError(
            f"This {family} model needs what EdgeLLM does not compute:\n{listed}\nTake a variant of it without that."
        )

    def _wrong(self, name: str, expected: str) -> None:
        found = f"is {self.values[name]!r:.60}" if name in self.values else "is missing"
        self._invalid.append(f"{name} {found}, expected {expected}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
