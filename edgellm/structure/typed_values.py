"""Types of Python as JSON schemas, and parsed JSON as their values."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from edgellm.errors import RequestError

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_UNIONS = (Union, types.UnionType)


def has_fields(value: Any) -> bool:
    """Whether this is a dataclass or a TypedDict, not an instance of one."""
    return _fields(value) is not None


def hints_of(described: type | Callable[..., Any], include_extras: bool = False) -> dict[str, Any]:
    """The type hints of a class's fields or of a function's parameters, by name; RequestError where one is unknown."""
    try:
        return get_type_hints(described, include_extras=include_extras)
    except Exception as error:  # they are evaluated: anything may be in them
        raise RequestError(
            f"the annotations of {described.__name__} cannot be read ({error}): expected names that its module knows"
        ) from error


class TypeSchemas:
    """Makes JSON schemas of type hints; `definitions` are the classes that they refer to, which go to "$defs"."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def of(self, hint: Any, place: str) -> dict[str, Any]:
        """The schema of a hint: str, int, float, bool, None, Any, Literal, an Enum, list, dict with text for keys,
        unions, dataclasses, TypedDicts and pydantic's models. RequestError names the `place` of anything else."""
        origin, arguments = get_origin(hint) or hint, get_args(hint)
        if hint is Any:
            return {}
        if hint in _PLAIN:
            return {"type": _PLAIN[hint]}
        if origin is Literal:
            return {"enum": _named(arguments, place)}
        if _is_enum(hint):
            return {"enum": _named([member.value for member in hint], place)}
        if origin is list:
            return {"type": "array", **({"items": self.of(arguments[0], place)} if arguments else {})}
        if origin is dict and (not arguments or arguments[0] is str):
            return {"type": "object", **({"additionalProperties": self.of(arguments[1], place)} if arguments else {})}
        if get_origin(hint) in _UNIONS:
            return {"anyOf": [self.of(each, place) for each in arguments]}
        if _fields(hint) is not None:
            return self._definition(hint)
        if hasattr(hint, "model_json_schema"):
            return self._of_model(hint, place)
        raise RequestError(
            f"{place} is {getattr(hint, '__name__', None) if origin is hint else hint}: expected str, int, float, "
            "bool, Literal, an Enum of such values, list[...], dict[str, ...], Optional[...], unions of these, a "
            "dataclass, a TypedDict or a pydantic model"
        )

    def _definition(self, cls: type) -> dict[str, Any]:
        """A reference to a class among the definitions, which may refer to itself."""
        if cls not in self._names:
            name = cls.__name__ if cls.__name__ not in self.definitions else f"{cls.__name__}{len(self._names)}"
            self._names[cls], self.definitions[name] = name, {}
            hints, fields = hints_of(cls), _fields(cls) or {}
            self.definitions[name] = {
                "type": "object",
                "properties": {each: self.of(hints[each], f"the field {cls.__name__}.{each}") for each in fields},
                "required": [each for each, is_required in fields.items() if is_required],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{self._names[cls]}"}

    def _of_model(self, model: Any, place: str) -> dict[str, Any]:
        schema = dict(model.model_json_schema())
        for name, definition in schema.pop("$defs", {}).items():
            if self.definitions.setdefault(name, definition) != definition:
                raise RequestError(f"{place} has another class of the name {name}: give them names of their own")
        return schema


def typed_value(hint: Any, value: Any) -> Any:
    """What JSON of a hint's schema stands for, instances of classes for example; what their checks raise is raised."""
    arguments, fields = get_args(hint), _fields(hint)
    if hint is float:
        return float(value)
    if get_origin(hint) is list and arguments:
        return [typed_value(arguments[0], each) for each in value]
    if get_origin(hint) is dict and arguments:
        return {name: typed_value(arguments[1], each) for name, each in value.items()}
    if get_origin(hint) in _UNIONS:
        return typed_value(next((each for each in arguments if _fits(each, value)), Any), value)
    if _is_enum(hint):
        return hint(value)
    if fields is not None:
        hints = hints_of(hint)
        return hint(**{name: typed_value(hints[name], each) for name, each in value.items()})
    return hint.model_validate(value) if hasattr(hint, "model_validate") else value


def _fits(hint: Any, value: Any) -> bool:
    """Whether a JSON value is one of this alternative of a union."""
    origin, arguments, fields = get_origin(hint) or hint, get_args(hint), _fields(hint)
    if hint in _PLAIN:
        return type(value) is hint or (hint is float and type(value) is int)
    if get_origin(hint) in _UNIONS:
        return any(_fits(each, value) for each in arguments)
    if origin is Literal or _is_enum(hint):
        allowed = arguments if origin is Literal else [member.value for member in hint]
        return any(type(each) is type(value) and each == value for each in allowed)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, item) for each in arguments for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, item) for each in arguments[1:] for item in value.values())
    if fields is None:
        return hint is Any or isinstance(value, dict)
    hints = hints_of(hint)
    return (
        isinstance(value, dict)
        and {name for name, is_required in fields.items() if is_required} <= value.keys() <= fields.keys()
        and all(_fits(hints[name], item) for name, item in value.items())
    )


def _fields(cls: Any) -> dict[str, bool] | None:
    """The fields of a dataclass or a TypedDict, and whether each has to be given; None for any other type."""
    if is_typeddict(cls):  # whose own keys know nothing of marks in annotations that are text
        marks = {name: str(get_origin(hint)) for name, hint in hints_of(cls, include_extras=True).items()}
        least = {name for name in cls.__required_keys__ if not marks[name].endswith(".NotRequired")}
        return {name: name in least or mark.endswith(".Required") for name, mark in marks.items()}
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return None
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return {field.name: field.default is missing and field.default_factory is missing for field in fields}


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, enum.EnumMeta)


def _named(values: Any, place: str) -> list[Any]:
    wrong = [each for each in values if type(each) not in _PLAIN]
    if wrong or not values:
        found = f"the value {wrong[0]!r}" if wrong else "no values"
        raise RequestError(f"{place} has {found}: expected text, numbers, booleans or None")
    return list(values)
