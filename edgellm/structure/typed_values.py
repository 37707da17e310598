"""Dataclasses as JSON schemas, and parsed JSON as their instances."""

from __future__ import annotations

import dataclasses
import enum
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from edgellm.errors import RequestError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def is_dataclass_type(value: Any) -> bool:
    """Whether this is a dataclass, not an instance of one."""
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def dataclass_schema(cls: type) -> dict[str, Any]:
    """The JSON schema of a dataclass, whose fields are str, int, float, bool, Literal, Enum, list, Optional and
    dataclasses; those with defaults may be left out. RequestError names the field that is something else."""
    definitions: dict[str, Any] = {}
    reference = _definition(cls, definitions, {})
    return {**reference, "$defs": definitions}


def _definition(cls: type, definitions: dict[str, Any], names: dict[type, str]) -> dict[str, Any]:
    """A reference to a dataclass among the definitions, which may refer to itself."""
    if cls not in names:
        names[cls] = cls.__name__ if cls.__name__ not in definitions else f"{cls.__name__}{len(names)}"
        definitions[names[cls]] = {}
        hints, fields = _hints(cls), _init_fields(cls)
        definitions[names[cls]] = {
            "type": "object",
            "properties": {
                field.name: _schema(hints[field.name], f"{cls.__name__}.{field.name}", definitions, names)
                for field in fields
            },
            "required": [field.name for field in fields if not _has_default(field)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{names[cls]}"}


def _init_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls)
    except (NameError, TypeError) as error:
        raise RequestError(
            f"the annotations of {cls.__name__} cannot be read ({error}): expected names that its module knows"
        ) from error


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _schema(hint: Any, place: str, definitions: dict[str, Any], names: dict[type, str]) -> dict[str, Any]:
    arguments = get_args(hint)
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if get_origin(hint) is Literal:
        return {"enum": _named(arguments, place)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": _named([member.value for member in hint], place)}
    if get_origin(hint) is list and len(arguments) == 1:
        return {"type": "array", "items": _schema(arguments[0], place, definitions, names)}
    if _is_optional(hint) and len(arguments) == 2 and type(None) in arguments:
        inner = arguments[0] if arguments[1] is type(None) else arguments[1]
        return {"anyOf": [_schema(inner, place, definitions, names), {"type": "null"}]}
    if is_dataclass_type(hint):
        return _definition(hint, definitions, names)
    raise RequestError(
        f"the field {place} is {getattr(hint, '__name__', None) or hint}: expected str, int, float, bool, Literal, an "
        "Enum of such values, list[...], Optional[...], or a dataclass"
    )


def _named(values: Any, place: str) -> list[Any]:
    wrong = [each for each in values if type(each) not in _PLAIN]
    if wrong or not values:
        found = f"the value {wrong[0]!r}" if wrong else "no values"
        raise RequestError(f"the field {place} has {found}: expected text, numbers, booleans or None")
    return list(values)


def instance(cls: type, value: dict[str, Any]) -> Any:
    """The instance of a dataclass that JSON of its schema describes; what its own checks raise is raised."""
    hints = _hints(cls)
    return cls(**{name: _value(hints[name], each) for name, each in value.items()})


def _value(hint: Any, value: Any) -> Any:
    if hint is float:
        return float(value)
    if get_origin(hint) is list:
        return [_value(get_args(hint)[0], each) for each in value]
    if _is_optional(hint):
        inner = next(each for each in get_args(hint) if each is not type(None))
        return None if value is None else _value(inner, value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if is_dataclass_type(hint):
        return instance(hint, value)
    return value
