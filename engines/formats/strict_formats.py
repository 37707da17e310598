"""JSON and YAML read without trust: every key and type is checked, and an error names file, key, found and expected."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import yaml

from edgellm.engines.errors import EdgeLLMError
from edgellm.engines.formats.small_files import CONFIG_BYTES, read_file
from edgellm.kernels.user_paths import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


T = TypeVar("T", bound="DataclassInstance")

#: Marks a field (`metadata`) that files written by earlier releases lack: it is left out where it has its default, so
#: that files which need no such field stay readable by those releases, and equal to theirs.
ADDED_LATER = MappingProxyType({"added_later": True})


#: How deep lists and objects may lie in each other.
DEEPEST_NESTING = 64
#: Whole numbers that are read at all: those that 64 bits hold, with a sign or without.
SMALLEST_INTEGER, LARGEST_INTEGER = -(1 << 63), (1 << 64) - 1
#: What a size, a count of things or a token id may be where its field names no smaller range.
LARGEST_SIZE = (1 << 31) - 1
_LARGEST_COUNT = (1 << 63) - 1
_MOST_DIGITS = len(str(SMALLEST_INTEGER))
_MOST_ITEMS = 4096


def bounded(largest: int, added_later: bool = False) -> dict[str, Any]:
    """The metadata of a field of whole numbers: each may be at most `largest`; see `ADDED_LATER`."""
    return {"largest": largest} | (dict(ADDED_LATER) if added_later else {})


def one_of(choices: Iterable[str], added_later: bool = False) -> dict[str, Any]:
    """The metadata of a field of text: it is one of `choices`; see `ADDED_LATER`."""
    return {"choices": choices} | (dict(ADDED_LATER) if added_later else {})


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a JSON value is a whole number (true and false are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_whole(value: Any, least: int = 0) -> TypeGuard[int]:
    """Whether a JSON value is a whole number from `least` to `LARGEST_SIZE`."""
    return is_integer(value) and least <= value <= LARGEST_SIZE


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a JSON value is a finite number, or a whole one of 64 bits (true and false are not)."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_integer(value) and SMALLEST_INTEGER <= value <= LARGEST_INTEGER


#: What a field's annotation allows in JSON: the words for it and the test.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a non-empty string", lambda value: isinstance(value, str) and value != ""),
    "float": ("a number", is_number),
    "float | None": ("a number or null", lambda value: value is None or is_number(value)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "dict": ("an object", lambda value: isinstance(value, dict)),
    "tuple[str, ...]": (
        f"a list of at most {_MOST_ITEMS} texts",
        lambda value: isinstance(value, list) and len(value) <= _MOST_ITEMS and all(isinstance(v, str) for v in value),
    ),
    "dict[str, Any] | None": ("an object or null", lambda value: value is None or isinstance(value, dict)),
}
#: The same for whole numbers: the range. Plain `int` fields are sizes, "count" is a number of bytes.
_RANGES = {
    "int": (1, LARGEST_SIZE),
    "count": (0, _LARGEST_COUNT),
    "int | None": (0, LARGEST_SIZE),
    "tuple[int, ...]": (0, LARGEST_SIZE),
}


def _integers(kind: str, largest: int | None) -> tuple[str, Callable[[Any], bool]]:
    """The words and the test for whole numbers of a kind, up to `largest` where the field says so."""
    low, high = _RANGES[kind]
    high = high if largest is None else largest
    words = f"from {low} to {high}"

    def is_in_range(value: Any) -> bool:
        return is_integer(value) and low <= value <= high

    if kind == "int | None":
        return f"a whole number {words}, or null", lambda value: value is None or is_in_range(value)
    if kind.startswith("tuple"):
        return (
            f"a list of at most {_MOST_ITEMS} whole numbers {words}",
            lambda value: isinstance(value, list) and len(value) <= _MOST_ITEMS and all(map(is_in_range, value)),
        )
    return f"a whole number {words}", is_in_range


class JSONObject:
    """An object of a JSON file at `place` ("edgellm.json: limits"); what is wrong raises `error_class`."""

    def __init__(self, values: dict[str, Any], place: str, error_class: type[EdgeLLMError], advice: str = "") -> None:
        self.values = values
        self.place = place
        self._error_class = error_class
        self._advice = advice

    @classmethod
    def read(
        cls, path: Path, error_class: type[EdgeLLMError], advice: str = "", limit: int = CONFIG_BYTES
    ) -> JSONObject:
        """Parse an ordinary file of at most `limit` bytes; `advice` ends every error's message."""
        data = read_file(path, limit, error_class, advice=advice)
        return cls.parse(data, printable(path), error_class, advice)

    @classmethod
    def parse(cls, data: bytes, place: str, error_class: type[EdgeLLMError], advice: str = "") -> JSONObject:
        """Parse the content of a file. Numbers may be of any size: what they may be is decided where they are used."""
        values = parse_json(data, place, error_class, advice, any_number=True)
        if not isinstance(values, dict):
            raise error_class(f"{place} holds {as_json(values)}, expected an object{_ending(advice)}")
        return cls(values, place, error_class, advice)

    def error(self, message: str) -> EdgeLLMError:
        return self._error_class(f"{self.place}: {message}{_ending(self._advice)}")

    def get(self, key: str, kind: str, largest: int | None = None) -> Any:
        """The value of `key`, which must be there and of `kind` (a type annotation); whole numbers up to `largest`."""
        if key not in self.values:
            raise self.error(f"the key {key!r} is missing")
        words, is_valid = _integers(kind, largest) if kind in _RANGES else _KINDS[kind]
        value = self.values[key]
        if not is_valid(value):
            raise self.error(f"{key!r} is {as_json(value)}, expected {words}")
        return tuple(value) if kind.startswith("tuple") else float(value) if kind == "float" else value

    def choice(self, key: str, choices: Iterable[str]) -> str:
        value = self.get(key, "str")
        if value not in choices:
            raise self.error(f"{key!r} is {value!r:.80}, expected one of {', '.join(choices)}")
        return value

    def object(self, key: str) -> JSONObject:
        return JSONObject(self.get(key, "dict"), f"{self.place}: {key}", self._error_class, self._advice)

    def optional(self, key: str) -> JSONObject | None:
        """The object under a key that may be missing."""
        return self.object(key) if key in self.values else None

    def refuse_other_keys(self, *known: str) -> None:
        """Raise for a key that is not among `known`."""
        if unknown := sorted(set(self.values) - set(known)):
            raise self.error(f"unknown keys {', '.join(map(repr, unknown))}, expected {', '.join(known)}")

    def dataclass(self, cls: type[T], **nested: type[DataclassInstance]) -> T:
        """This object as a dataclass whose annotations are strings; every field must be there and no other key.

        A field marked `ADDED_LATER` may be missing, one that is `bounded` has a range, one that is `one_of` some texts
        no other; `nested` gives the dataclasses of fields that hold one, at any depth.
        """
        values = {
            field.name: self.object(field.name).dataclass(nested[field.name], **nested)
            if field.name in nested
            else self.choice(field.name, field.metadata["choices"])
            if "choices" in field.metadata
            else self.get(field.name, str(field.type), field.metadata.get("largest"))
            for field in fields(cls)
            if field.name in self.values or not field.metadata.get("added_later")
        }
        self.refuse_other_keys(*(field.name for field in fields(cls)))
        return cls(**values)


def parse_json(
    data: bytes | str, place: str, error_class: type[EdgeLLMError], advice: str = "", any_number: bool = False
) -> Any:
    """The value that a JSON text holds, at most `DEEPEST_NESTING` deep, its text without halves of characters, its
    numbers finite and of at most 64 bits, or with `any_number` whatever Python reads (NaN and Infinity, too); else
    `error_class`, which begins with `place` and ends with `advice`."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        value = json.loads(text, **({} if any_number else _BOUNDED_NUMBERS))
        check_values(value, any_number)
    except RecursionError as error:
        raise error_class(f"{place} is not valid JSON: {_TOO_DEEP}{_ending(advice)}") from error
    except ValueError as error:
        raise error_class(f"{place} is not valid JSON: {error}{_ending(advice)}") from error
    return value


def check_values(value: Any, any_number: bool = False) -> None:
    """Raise ValueError where nested lists and dictionaries are too deep, or hold a half of a surrogate pair or, unless
    `any_number` may be there, one of more than 64 bits."""
    level = [value]
    for _ in range(DEEPEST_NESTING + 1):
        for item in level:
            if isinstance(item, int) and not any_number and not SMALLEST_INTEGER <= item <= LARGEST_INTEGER:
                found = f"{item:.3e}" if item.bit_length() < 1000 else f"of {item.bit_length()} bits"
                raise _out_of_range(found)
            if isinstance(item, str) and not item.isascii():
                _check_text(item)
        containers = [item for item in level if isinstance(item, (dict, list))]
        level = [inner for each in containers for inner in each]
        level += [inner for each in containers if isinstance(each, dict) for inner in each.values()]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"its lists and objects are nested more than {DEEPEST_NESTING} deep"


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text has half of a surrogate pair (U+{ord(text[error.start]):04X}) at position {error.start}, which is "
            "no character"
        ) from None


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise _out_of_range(f"of {len(text.lstrip('-'))} digits ({text[:12]}...)")
    return int(text)


def _out_of_range(found: str) -> ValueError:
    return ValueError(
        f"the whole number {found} is out of range, expected one from {SMALLEST_INTEGER} to {LARGEST_INTEGER}"
    )


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is out of range, expected one below 1.8e308")
    return value


def parsed_json(text: str) -> Any:
    """The value of a model's JSON text, which can be sent as JSON again: a number beyond floats is the largest of them,
    half of a surrogate pair U+FFFD. ValueError or RecursionError for what is none, NaN and infinity among it."""
    most = sys.float_info.max
    value = json.loads(
        text, parse_constant=_refuse_constant, parse_float=lambda number: max(-most, min(float(number), most))
    )
    if "\\u" not in text:
        return value
    units = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
    return json.loads(units.decode("utf-16", "replace"))


def plain_values(instance: Any) -> dict[str, Any]:
    """A dataclass instance as JSON values, for `JSONObject.dataclass` to read."""
    values = {field: getattr(instance, field.name) for field in fields(instance)}
    return {
        field.name: plain_values(value) if is_dataclass(value) else value
        for field, value in values.items()
        if not field.metadata.get("added_later") or value != field.default
    }


def canonical_json(value: Any) -> bytes:
    """One spelling for equal values, for digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


_BOUNDED_NUMBERS: dict[str, Any] = {
    "parse_constant": _refuse_constant,
    "parse_int": _whole_number,
    "parse_float": _finite_number,
}


def _ending(advice: str) -> str:
    return f". {advice}" if advice else ""


def as_json(value: Any) -> str:
    """A JSON value as errors show it, cut where it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."


#: Values and their ends in one text: more are no settings, and would take seconds.
MOST_EVENTS = 30_000
_LONGEST_NUMBER = 64
#: What YAML may take for a whole number, also to the base 60 (1:59:59), a float, a date or a time.
_NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-FxobTtZ_:.+-]*")
_TOO_DEEP_YAML = f"its lists and dictionaries are nested more than {DEEPEST_NESTING} deep"
_TEXT_TAG = "tag:yaml.org,2002:str"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _SingleKeyLoader(_LOADER):
    """A loader that refuses a key which a dictionary has twice, where PyYAML's own forgets the first value."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        found = set()
        for key, _ in node.value:
            named = key.tag, str(key.value)
            if named in found:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} again", key.start_mark)
            found.add(named)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, place: str, error_class: type[EdgeLLMError]) -> Any:
    """The value of a YAML (or JSON) text: dictionaries, lists, text, numbers, dates, truth values, None.

    `error_class`, in one line that begins with `place`, for what is malformed, nested more than 64 deep, has anchors,
    aliases, tags, a key twice or a number of more than 64 bits.
    """
    try:
        _check_events(text)
        value = yaml.load(text, Loader=_SingleKeyLoader)
        check_values(value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = str(error.problem or error.context)
        problem = _TOO_DEEP_YAML if "nesting depth" in problem else problem  # PyYAML's own bound, from 6.0.4 on
        raise error_class(f"{place} is not valid YAML: {problem}{where}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:  # a date that there is none of
        raise error_class(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    return value


def _check_events(text: str) -> None:
    """Raise ValueError or YAMLError for what `parse_yaml` refuses before any value is made."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_LOADER)):
        where = f"in line {event.start_mark.line + 1 if event.start_mark else 1}"
        if count >= MOST_EVENTS:
            raise ValueError(f"it has more than {MOST_EVENTS:,} values up to here: {where}")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{where} is an anchor or an alias (& or *), which are not read: write the value out")
        if isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            depth += 1
            if depth > DEEPEST_NESTING:
                raise ValueError(f"{_TOO_DEEP_YAML} {where}")
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            depth -= 1
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", _TEXT_TAG):
            raise ValueError(f"{where} is the tag {tag!r:.80}, which is not read: write the value alone")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _NUMBER.fullmatch(event.value):
            if len(event.value) > _LONGEST_NUMBER:
                raise ValueError(
                    f"{where} is a number of {len(event.value)} characters, expected at most {_LONGEST_NUMBER}"
                )
            if "_" in event.value and not isinstance(yaml.load(event.value, Loader=_LOADER), str):
                raise ValueError(f"{where} is the number {event.value}: write it without _, or as text in quotes")
