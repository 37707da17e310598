"""The values that a JSON schema's keywords may have, where these are no schemas themselves."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from edgellm.errors import RequestError, shown

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Whole numbers beyond are rounded on the way to masks.
LARGEST_NUMBER = 2**53
#: multipleOf 0.25 is 25 hundredths: automata have a state for each remainder of such a number.
LARGEST_DIVISOR = 2000
#: JSON's short escapes; other control characters are never written.
_ESCAPED = "\b\f\n\r\t"


def schema_error(place: str, found: str, expected: str) -> RequestError:
    """What is wrong at a place (a JSON pointer) of a schema."""
    return RequestError(f"the JSON schema, at {place}, {found}: expected {expected}")


def _type(value: Any, here: str) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not names or not all(each in TYPES for each in names):
        raise schema_error(here, f"is {shown(value)}", f"one of {', '.join(TYPES)}, or a list of some")
    return value


def _named_values(value: Any, here: str) -> Any:
    if not isinstance(value, (list, tuple)) or not value:
        raise schema_error(here, f"is {shown(value)}", "a list of at least one value")
    return [_named_value(each, here) for each in value]


def _named_value(value: Any, here: str) -> Any:
    """A value of an enum or a const; one that masks would change is refused."""
    if isinstance(value, (list, tuple)):
        return [_named_value(each, here) for each in value]
    if isinstance(value, dict):
        return {_named_value(name, here): _named_value(each, here) for name, each in value.items()}
    if isinstance(value, str):
        wrong = [each for each in value if (ord(each) < 0x20 and each not in _ESCAPED) or ord(each) == 0x7F]
        if wrong:
            raise schema_error(
                here, f"has the control character {wrong[0]!r}", "text without those: no answer writes them"
            )
    elif not isinstance(value, bool) and isinstance(value, (int, float)):
        return _number(value, here)
    return value


def _number(value: Any, here: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise schema_error(here, f"is {shown(value)}", "a number")
    if abs(value) > LARGEST_NUMBER:
        raise schema_error(here, f"is {shown(value)}", f"a number from -{LARGEST_NUMBER} to {LARGEST_NUMBER}")
    return value


def _divisor(value: Any, here: str) -> int | float:
    number = _number(value, here)
    digits = Decimal(repr(number)).normalize().as_tuple().digits
    if number <= 0 or int("".join(map(str, digits))) > LARGEST_DIVISOR:
        raise schema_error(here, f"is {shown(value)}", f"a positive number whose digits are at most {LARGEST_DIVISOR}")
    return number


def _count(value: Any, here: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise schema_error(here, f"is {shown(value)}", "a whole number from 0")
    return value


def _required(value: Any, here: str) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise schema_error(here, f"is {shown(value)}", "a list of properties' names")
    return list(dict.fromkeys(value))


def check_pattern(pattern: Any, here: str) -> str:
    """Refuse what means something else elsewhere: JSON Schema's patterns are JavaScript's, masks have Rust's."""
    if not isinstance(pattern, str):
        raise schema_error(here, f"is {shown(pattern)}", "a regular expression")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nested sets and the like
            re.compile(pattern, re.ASCII | re.MULTILINE)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        raise schema_error(
            here, f"is {shown(pattern)} ({error})", "a regular expression as JavaScript and Python read it"
        ) from (error)
    extension = re.search(r"\(\?(?!:)", pattern)
    if extension:
        raise schema_error(here, f"is {shown(pattern)}, with (? at {extension.start()}", "no groups but ( and (?:")
    return pattern


def _format(value: Any, here: str) -> str:
    if value not in FORMATS:
        raise schema_error(here, f"is {shown(value)}, which would not be enforced", f"one of {', '.join(FORMATS)}")
    return str(value)


#: What checks the value of each keyword, and gives it as the grammar takes it.
CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(COUNTS, _count),
    **dict.fromkeys(NUMBERS, _number),
    "multipleOf": _divisor,
    "type": _type,
    "enum": _named_values,
    "const": _named_value,
    "required": _required,
    "pattern": check_pattern,
    "format": _format,
}
