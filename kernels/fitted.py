"""Constants of estimates and forms that measurements chose, with the measurement that made each: `fitted.json`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


def fitted(group: str, *names: str) -> list[Any]:
    """The values of a group, in the order of `names`; lists are tuples."""
    values = {name: value for each in _groups()[group] for name, value in each["values"].items()}
    return [_frozen(values[name]) for name in names]


@cache
def _groups() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return found


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {int(key): _frozen(one) for key, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
