"""JSON files read without trust: every key and type is checked, and an error names file, key, found and expected."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.engines.errors import EdgeLLMError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

#: Marks a field (`metadata`) that files written by earlier releases lack: it is left out where it has its default, so
#: that files which need no such field stay readable by those releases, and equal to theirs.
ADDED_LATER = MappingProxyType({"added_later": True})


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: What a field's annotation allows in JSON: the words for it and the test. Plain `int` fields are sizes and counts.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a non-empty string", lambda value: isinstance(value, str) and value != ""),
    "int": ("a whole number of at least 1", lambda value: _is_integer(value) and value >= 1),
    "count": ("a whole number of at least 0", lambda value: _is_integer(value) and value >= 0),
    "float": (
        "a number",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
    ),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "dict": ("an object", lambda value: isinstance(value, dict)),
    "dict[str, Any] | None": ("an object or null", lambda value: value is None or isinstance(value, dict)),
    "int | None": (
        "a whole number of at least 0, or null",
        lambda value: value is None or (_is_integer(value) and value >= 0),
    ),
    "tuple[int, ...]": (
        "a list of whole numbers of at least 0",
        lambda value: isinstance(value, list) and all(_is_integer(item) and item >= 0 for item in value),
    ),
}


class JSONObject:
    """An object of a JSON file at `place` ("edgellm.json: limits"); what is wrong raises `error_class`."""

    def __init__(self, values: dict[str, Any], place: str, error_class: type[EdgeLLMError], advice: str = "") -> None:
        self.values = values
        self.place = place
        self._error_class = error_class
        self._advice = advice

    @classmethod
    def read(cls, path: Path, error_class: type[EdgeLLMError], advice: str = "") -> JSONObject:
        """Parse the file; `advice` ends every error's message."""
        try:
            return cls.parse(path.read_bytes(), str(path), error_class, advice)
        except OSError as error:
            raise error_class(f"{path} cannot be read: {error.strerror or error}{_ending(advice)}") from error

    @classmethod
    def parse(cls, data: bytes, place: str, error_class: type[EdgeLLMError], advice: str = "") -> JSONObject:
        """Parse the content of a file."""
        try:
            values = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise error_class(f"{place} is not valid JSON: {error}{_ending(advice)}") from error
        if not isinstance(values, dict):
            raise error_class(f"{place} holds {_describe(values)}, expected an object{_ending(advice)}")
        return cls(values, place, error_class, advice)

    def error(self, message: str) -> EdgeLLMError:
        """An error about this object, to raise."""
        return self._error_class(f"{self.place}: {message}{_ending(self._advice)}")

    def get(self, key: str, kind: str) -> Any:
        """The value of `key`, which must be there and of `kind` (a type annotation)."""
        if key not in self.values:
            raise self.error(f"the key {key!r} is missing")
        words, is_valid = _KINDS[kind]
        value = self.values[key]
        if not is_valid(value):
            raise self.error(f"{key!r} is {_describe(value)}, expected {words}")
        return tuple(value) if kind.startswith("tuple") else float(value) if kind == "float" else value

    def object(self, key: str) -> JSONObject:
        """The object under `key`."""
        return JSONObject(self.get(key, "dict"), f"{self.place}: {key}", self._error_class, self._advice)

    def refuse_other_keys(self, *known: str) -> None:
        """Raise for a key that is not among `known`."""
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            raise self.error(f"unknown keys {', '.join(map(repr, unknown))}, expected {', '.join(known)}")

    def dataclass(self, cls: type[T], **nested: type[DataclassInstance]) -> T:
        """This object as a dataclass whose annotations are strings; every field must be there and no other key.

        A field marked `ADDED_LATER` may be missing; `nested` gives the dataclasses of fields that hold one.
        """
        values = {
            field.name: self.object(field.name).dataclass(nested[field.name])
            if field.name in nested
            else self.get(field.name, str(field.type))
            for field in fields(cls)
            if field.name in self.values or not field.metadata.get("added_later")
        }
        self.refuse_other_keys(*(field.name for field in fields(cls)))
        return cls(**values)


def plain_values(instance: Any) -> dict[str, Any]:
    """A dataclass instance as JSON values, for `JSONObject.dataclass` to read."""
    values = asdict(instance)
    for field in fields(instance):
        value = getattr(instance, field.name)
        if field.metadata.get("added_later") and value == field.default:
            del values[field.name]
        elif is_dataclass(value):
            values[field.name] = plain_values(value)
    return values


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _ending(advice: str) -> str:
    return f". {advice}" if advice else ""


def _describe(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
