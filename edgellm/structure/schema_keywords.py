"""The keywords of JSON schemas: the values that they may have, where these are no schemas themselves; and those that no
mask keeps, said in others that masks do keep."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from decimal import Decimal
from itertools import combinations
from typing import Any

from edgellm.errors import RequestError, require, shown

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPPINGS = ("properties", "patternProperties")
SCHEMAS = ("items", "additionalProperties")
#: They say nothing about what is valid: those of the specification, of OpenAPI, and pydantic's hint beside a `oneOf`.
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "discriminator"]
    + ["$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "nullable", "example"]
    + ["contentEncoding", "contentMediaType", "contentSchema"]
)
#: They mean something that no mask keeps, but with the values for which they say nothing.
NOT_ENFORCED: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    **dict.fromkeys(["$dynamicRef", "$recursiveRef", "contains"], lambda value, schema: False),
    **dict.fromkeys(["dependencies", "dependentRequired", "dependentSchemas"], lambda value, schema: value == {}),
    **dict.fromkeys(["unevaluatedItems", "unevaluatedProperties"], lambda value, schema: value is True),
    **dict.fromkeys(["minContains", "maxContains"], lambda value, schema: "contains" not in schema),
    **dict.fromkeys(["then", "else"], lambda value, schema: "if" not in schema),
    "if": lambda value, schema: not {"then", "else"} & set(schema),
    "not": lambda value, schema: value is False,
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems") in (0, 1),
    "propertyNames": lambda value, schema: value in (True, {}, {"type": "string"}),
    "additionalItems": lambda value, schema: not isinstance(schema.get("items"), list),
}
#: Whole numbers beyond are rounded on the way to masks.
LARGEST_NUMBER = 2**53
#: multipleOf 0.25 is 25 hundredths: automata have a state for each remainder of such a number.
LARGEST_DIVISOR = 2000
#: Properties that others depend on: each doubles the alternatives.
MOST_DEPENDENCIES = 6
#: Properties that may be left out where one of them has to be there, too.
MOST_WAYS = 30
#: JSON's short escapes; other control characters are never written.
_ESCAPED = "\b\f\n\r\t"


_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (  # of the years 0001 to 9999
    r"(?:(?:\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    rf"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE, _GROUP = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)", "[0-9A-Fa-f]{1,4}"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
#: Up to seven groups, and "::".
_BEFORE = ["::", *(rf"{_GROUP}(?::{_GROUP}){{{more}}}::" for more in range(7))]
#: Eight groups, the last two of which may be an IPv4 address; "::" stands for one group or more.
_IPV6 = "|".join(
    [rf"(?:{_GROUP}:){{6}}(?:{_GROUP}:{_GROUP}|{_IPV4})", _BEFORE[7]]
    + [rf"{before}(?:(?:{_GROUP}:){{0,{6 - groups}}}{_GROUP})?" for groups, before in enumerate(_BEFORE[:7])]
    + [rf"{before}(?:{_GROUP}:){{0,{5 - groups}}}{_IPV4}" for groups, before in enumerate(_BEFORE[:6])]
)
_SAFE = r"A-Za-z0-9._~!$&'()*+,;=-"
_PATH = rf"(?:[:@{_SAFE}]|%[0-9A-Fa-f]{{2}})"
#: As RFC 3986 has them, without hosts in brackets: the scheme of a URI, the host, and what follows or has no scheme.
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_AUTHORITY = rf"//(?:(?:[:{_SAFE}]|%[0-9A-Fa-f]{{2}})*@)?[A-Za-z0-9._~-]*(?::\d*)?"
_URI, _REFERENCE = (
    rf"(?:{_AUTHORITY}(?:/{_PATH}*)*|/(?:{_PATH}+(?:/{_PATH}*)*)?|{first}+(?:/{_PATH}*)*)?"
    rf"(?:\?(?:[/?]|{_PATH})*)?(?:#(?:[/?]|{_PATH})*)?"
    for first in (_PATH, rf"(?:[@{_SAFE}]|%[0-9A-Fa-f]{{2}})")
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#: Years, months and days, or hours, minutes and seconds, none left out between two.
_DAYS, _SECONDS = (rf"(?:\d+{a}(?:\d+{b}(?:\d+{c})?)?|\d+{b}(?:\d+{c})?|\d+{c})" for a, b, c in ("YMD", "HMS"))
#: The formats that are enforced, each by its expression.
FORMATS = {
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": rf"P(?:{_DAYS}(?:T{_SECONDS})?|T{_SECONDS}|\d+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _SCHEME + _URI,
    "ipv6": _IPV6,
    "uri-reference": f"(?:{_SCHEME})?{_REFERENCE}",
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
}
#: The other formats of the specification. One that it does not name is an annotation.
FORMATS_NOT_ENFORCED = frozenset(
    ["idn-email", "idn-hostname", "iri", "iri-reference", "uri-template", "regex", "relative-json-pointer"]
)
#: Of a whole name.
LONGEST_HOSTNAME = 253


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def named_values(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema names by const or enum; None where it names none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def allowed_types(schema: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows by its type, const or enum, "integer" also where it may be any "number"."""
    named = schema.get("type", TYPES)
    types = {named} if isinstance(named, str) else set(named)
    types |= {"integer"} if "number" in types else set()
    values = named_values(schema)
    return frozenset(types if values is None else types.intersection(map(kind_of, values)))


def schema_error(place: str, found: str, expected: str) -> RequestError:
    """What is wrong at a place (a JSON pointer) of a schema."""
    return RequestError(f"the JSON schema, at {place}, {found}: expected {expected}")


def require_valid(condition: bool, place: str, value: Any, expected: str) -> None:
    """Raise RequestError where the condition on the value at a place of a schema does not hold."""
    require(condition, f"the JSON schema, at {place},", value, expected)


def _type(value: Any, here: str) -> Any:
    names = [value] if isinstance(value, str) else value
    is_known = isinstance(names, list) and names != [] and all(each in TYPES for each in names)
    require_valid(is_known, here, value, f"one of {', '.join(TYPES)}, or a list of some")
    return value


def _named_values(value: Any, here: str) -> Any:
    require_valid(isinstance(value, list) and value != [], here, value, "a list of at least one value")
    return _named_value(value, here)


def _named_value(value: Any, here: str) -> Any:
    """A value of an enum or a const; one that masks would change is refused."""
    if isinstance(value, list):
        return [_named_value(each, here) for each in value]
    if isinstance(value, dict):
        return {_named_value(name, here): _named_value(each, here) for name, each in value.items()}
    if isinstance(value, str):
        wrong = [each for each in value if (ord(each) < 0x20 and each not in _ESCAPED) or ord(each) == 0x7F]
        if wrong:
            found = f"has the control character {wrong[0]!r}"
            raise schema_error(here, found, "text without those: no answer writes them")
    return _number(value, here) if kind_of(value) in ("integer", "number") else value


def _number(value: Any, here: str) -> int | float:
    is_known = kind_of(value) in ("integer", "number") and abs(value) <= LARGEST_NUMBER
    require_valid(is_known, here, value, f"a number from -{LARGEST_NUMBER} to {LARGEST_NUMBER}")
    return value


def _divisor(value: Any, here: str) -> int | float:
    digits = Decimal(repr(_number(value, here))).normalize().as_tuple().digits
    is_small = value > 0 and int("".join(map(str, digits))) <= LARGEST_DIVISOR
    require_valid(is_small, here, value, f"a positive number whose digits are at most {LARGEST_DIVISOR}")
    return value


def _count(value: Any, here: str) -> int:
    require_valid(kind_of(value) == "integer" and 0 <= value < 2**31, here, value, "a whole number from 0")
    return int(value)


def _required(value: Any, here: str) -> list[str]:
    is_known = isinstance(value, list) and all(isinstance(each, str) for each in value)
    require_valid(is_known, here, value, "a list of properties' names")
    return list(dict.fromkeys(value))


#: Patterns with look-ahead that generators of schemas write, zod's of "email" and pydantic's of Decimal, and the same
#: without it.
_WRITTEN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
}


def check_pattern(pattern: Any, here: str) -> str:
    """A pattern as masks take it. What JavaScript, whose patterns these are, and Rust read otherwise is refused."""
    require_valid(isinstance(pattern, str), here, pattern, "a regular expression")
    pattern = _WRITTEN.get(pattern, pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nested sets and the like
            re.compile(pattern, re.ASCII | re.MULTILINE)
    except (re.error, Warning, RecursionError, OverflowError) as error:
        found = f"is {shown(pattern)} ({error})"
        raise schema_error(here, found, "a regular expression as JavaScript and Python read it") from error
    if extension := re.search(r"\(\?(?!:)", pattern):
        raise schema_error(here, f"is {shown(pattern)}, with (? at {extension.start()}", "no groups but ( and (?:")
    return pattern


#: Of a pattern: an escape, a class, or a character; and what JavaScript means by some, in Rust's words.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_MEANT = {"\\d": "[0-9]", "\\w": "[A-Za-z0-9_]", "\\D": "[^0-9]", "\\W": "[^A-Za-z0-9_]", "/": r"\/", "\n": r"\n"}
_MEANT["."] = r"[^\n\r\x{2028}\x{2029}]"
_WITHIN = {"\\d": "0-9", "\\w": "A-Za-z0-9_", "/": r"\/", "\n": r"\n"}


def whole_text(pattern: str) -> str | None:
    """The expression, in Rust's syntax between slashes, of the texts in which a checked pattern finds something; None
    for a pattern with anchors within it, or classes that leave digits or words out."""
    pieces = _PIECE.findall(pattern)
    begins, ends = pieces[:1] == ["^"], len(pieces) > 1 and pieces[-1] == "$"
    found, depth = [], 0
    for piece in pieces[begins : len(pieces) - ends]:
        depth += (piece == "(") - (piece == ")")
        is_class = len(piece) > 1 and piece[0] == "["
        is_open = piece == "|" and not depth and (begins or ends)  # an anchor is of one alternative
        if is_open or piece in ("^", "$") or (is_class and re.search(r"\\[DW]", piece)):
            return None
        within = re.sub(r"\\.|[/\n]", lambda each: _WITHIN.get(each[0], each[0]), piece)
        found.append(within if is_class else _MEANT.get(piece, piece))
    before, behind = ("" if is_there else "(?s:.*)" for is_there in (begins, ends))
    return f"{before}(?:{''.join(found)}){behind}"


def _format(value: Any, here: str) -> str:
    require_valid(isinstance(value, str), here, value, f"text, such as {', '.join(FORMATS)}")
    if value in FORMATS_NOT_ENFORCED:
        raise schema_error(here, f"is {value!r}, which would not be enforced", f"one of {', '.join(FORMATS)}")
    return value


#: What checks the value of each keyword, and gives it as the grammar takes it.
CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"], _count),
    **dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], _number),
    "multipleOf": _divisor,
    "type": _type,
    "enum": _named_values,
    "const": _named_value,
    "required": _required,
    "pattern": check_pattern,
    "format": _format,
}

#: `$defs` and `definitions` are looked into where a $ref leads there.
ENFORCED = frozenset((*LISTS, *MAPPINGS, *SCHEMAS, *CHECKS, "$ref", "$defs", "definitions"))


def meant_keyword(name: str) -> str | None:
    """The keyword that an unknown one is a slip of: another case, a letter more, less, changed or moved (of long names
    two). None for what is none: by the specification that is an annotation."""
    if name.startswith(("_", "@", "x-")) or len(name) > 30:
        return None
    return next((_SLIPS[each] for each in _shortened(name.casefold()) if each in _SLIPS), None)


def _shortened(name: str) -> set[str]:
    """A name, and it without one letter, of long ones without two: names at few edits have one in common."""
    least = len(name) - (2 if len(name) >= 12 else 1)
    return {"".join(each) for size in range(least, len(name) + 1) for each in combinations(name, size)}


_SLIPS = {
    short: keyword
    for keyword in sorted({*ENFORCED, *NOT_ENFORCED})
    if len(keyword) > 3
    for short in _shortened(keyword.casefold())
}


def in_the_last_draft(keyword: str, value: Any, schema: dict[str, Any]) -> tuple[str, Any]:
    """A keyword of a schema and its value as the draft of 2020-12 has them, where older ones have it in another way."""
    if isinstance(schema.get("items"), list) and "prefixItems" not in schema:
        keyword = {"items": "prefixItems", "additionalItems": "items"}.get(keyword, keyword)
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
        bound = schema.get(keyword.replace("exclusiveM", "m"))
        return (keyword, bound) if value and bound is not None else ("$comment", None)
    return keyword, value


def rewritten(keyword: str, value: Any, schema: dict[str, Any]) -> list[Any] | None:
    """Schemas that say together what a keyword of a schema says; None where none are known, or too many."""
    if keyword == "not":
        negation = negated(value)
        return None if negation is None else [negation]
    if keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        if not isinstance(value, dict) or len(value) > MOST_DEPENDENCIES:
            return None
        # What a property asks for: a name, in the third draft, names, or a schema.
        names = {name: [each] if isinstance(each, str) else each for name, each in value.items()}
        needed = {name: {"required": each} if isinstance(each, list) else each for name, each in names.items()}
        return [{"anyOf": [_without(name), each]} for name, each in needed.items()]
    properties, required = schema.get("properties"), schema.get("required", [])
    if keyword == "minProperties" and isinstance(properties, dict) and isinstance(required, list):
        optional = [name for name, each in properties.items() if each is not False and name not in required]
        is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
        if is_open and value == len(required) + 1 and 0 < len(optional) <= MOST_WAYS:
            others = {**_without(*optional), "required": required, keyword: value}
            return [{"anyOf": [*({"required": [name]} for name in optional), others]}]
    return None


def negated(schema: Any) -> Any:
    """A schema of the values that do not fulfil another; None where none is known."""
    if not isinstance(schema, dict):
        return not schema if isinstance(schema, bool) else None
    says = [keyword for keyword in schema if keyword in ENFORCED or keyword in NOT_ENFORCED]
    parts = [_NEGATIONS[each](schema[each]) if each in _NEGATIONS else None for each in says]
    return None if None in parts else {"anyOf": parts} if parts else False


def _without(*names: str) -> dict[str, Any]:
    return {"properties": dict.fromkeys(names, False)}


def _other_types(value: Any) -> Any:
    named = [value] if isinstance(value, str) else value
    if not isinstance(named, list) or ("integer" in named and "number" not in named):
        return None
    others = [each for each in TYPES if each not in named and (each != "integer" or "number" not in named)]
    return {"type": others} if others else False


def _no_requirement(names: Any) -> Any:
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return None
    return {"type": "object", "anyOf": [_without(each) for each in names]} if names else False


def _other_values(properties: Any) -> Any:
    parts = {name: negated(each) for name, each in properties.items()} if isinstance(properties, dict) else {"": None}
    if None in parts.values():
        return None
    ways = [{"required": [name], "properties": {name: each}} for name, each in parts.items()]
    return {"type": "object", "anyOf": ways} if ways else False


def _each(keyword: str, schemas: Any) -> Any:
    parts = [negated(each) for each in schemas] if isinstance(schemas, list) else [None]
    return None if None in parts else {keyword: parts}


_NEGATIONS: dict[str, Callable[[Any], Any]] = {
    "type": _other_types,
    "required": _no_requirement,
    "properties": _other_values,
    "anyOf": lambda schemas: _each("allOf", schemas),
    "allOf": lambda schemas: _each("anyOf", schemas),
    "not": lambda schema: schema,
}
