"""JSON schemas: what of them is enforced. A keyword that would be passed over is refused with its name and place.

`enforced_schema` gives what the grammar is compiled of: the keywords of our own list alone, annotations left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from edgellm.errors import RequestError, did_you_mean, shown
from edgellm.structure.schema_keywords import CHECKS, COUNTS, NUMBERS, TYPES, check_pattern, schema_error

#: Of JSON: values nested in others, values in all, bytes as text.
MOST_LEVELS, MOST_VALUES, MOST_BYTES = 60, 50_000, 128 * 1024
#: Properties of one object that may be left out: a parser looks ahead at all of them.
MOST_OPTIONAL = 400
#: They say nothing about what is valid. `discriminator` is pydantic's hint beside a `oneOf`.
ANNOTATIONS = frozenset(
    ["title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$schema", "$id"]
    + ["discriminator"]
)
#: They mean something that no mask keeps: the nearest keyword that is enforced would not help.
_KEYWORDS = frozenset(
    ["not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "nullable"]
    + ["dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"]
    + ["additionalItems", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$vocabulary", "contentSchema"]
)
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties")
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OTHERS = ("type", "enum", "const", "$ref", "required", "pattern", "format")
ENFORCED = frozenset((*_LISTS, *_MAPPINGS, *_SCHEMAS, *COUNTS, *NUMBERS, *_OTHERS))


def enforced_schema(schema: Any) -> Any:
    """The schema with enforced keywords alone; RequestError names what is wrong or would not be enforced, and where."""
    check_json(schema)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"a JSON schema is {shown(schema)}: expected an object, as in {{'type': 'object'}}")
    if schema is False:
        raise RequestError("the JSON schema is false, which no value fulfils: say what the answer may be")
    walk = _Walk()
    enforced = walk.schema({} if schema is True else schema, "#")
    walk.check_references()
    walk.check_alternatives()
    walk.check_narrow_ranges()
    return enforced


def check_json(value: Any) -> None:
    """RequestError for what is no JSON, or more of it than a schema may have."""
    waiting, count = [(value, 1)], 0
    while waiting:
        found, level = waiting.pop()
        count += 1
        if level > MOST_LEVELS or count > MOST_VALUES:
            raise RequestError(
                f"the JSON schema nests values more than {MOST_LEVELS} deep, or holds itself: use $ref for what recurs"
                if level > MOST_LEVELS
                else f"the JSON schema has more than {MOST_VALUES} values: say less in it, or name parts once in $defs"
            )
        if isinstance(found, dict):
            wrong = [key for key in found if not isinstance(key, str)]
            if wrong:
                raise RequestError(f"the JSON schema has the key {shown(wrong[0])}: expected text")
            waiting += [(each, level + 1) for each in found.values()]
        elif isinstance(found, (list, tuple)):
            waiting += [(each, level + 1) for each in found]
        elif not (found is None or isinstance(found, (str, bool, int, float))) or found in (math.inf, -math.inf):
            raise RequestError(f"the JSON schema has {shown(found)}: expected values as JSON has them")
        elif found != found:
            raise RequestError("the JSON schema has NaN: expected values as JSON has them")
    try:
        size = len(json.dumps(value, ensure_ascii=False).encode())
    except UnicodeEncodeError as error:
        raise RequestError("the JSON schema has half of a surrogate pair, which is no character: remove it") from error
    except ValueError as error:  # a number of more digits than Python writes
        raise RequestError(f"the JSON schema cannot be written as text: {error}") from error
    if size > MOST_BYTES:
        raise RequestError(f"the JSON schema has {size} bytes: at most {MOST_BYTES} are taken, say less in it")


class _Walk:
    """One walk over a schema. `found` has the enforced part of each subschema by its JSON pointer."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._references: list[tuple[str, str]] = []

    def schema(self, schema: Any, place: str) -> Any:
        """The enforced part of a subschema."""
        if isinstance(schema, bool):
            self.found[place] = schema
            return schema
        if not isinstance(schema, dict):
            raise schema_error(place, f"is {shown(schema)}", "a schema: an object, true or false")
        enforced: dict[str, Any] = {}
        self.found[place] = enforced
        for keyword, value in schema.items():
            here = f"{place}/{_escaped(keyword)}"
            if keyword == "$id" and place != "#":
                raise schema_error(here, "names a part of the schema", "$id at the schema's root alone: leave it out")
            if keyword in ENFORCED:
                enforced[keyword] = self._keyword(keyword, value, here)
            elif keyword not in ANNOTATIONS:
                raise _not_enforced(keyword, place)
        _check_bounds(enforced, place)
        return enforced

    def _keyword(self, keyword: str, value: Any, here: str) -> Any:
        if keyword in _LISTS:
            if not isinstance(value, (list, tuple)) or not value:
                raise schema_error(here, f"is {shown(value)}", "a list of at least one schema")
            return [self.schema(each, f"{here}/{place}") for place, each in enumerate(value)]
        if keyword in _MAPPINGS:
            if not isinstance(value, dict):
                raise schema_error(here, f"is {shown(value)}", "schemas by name")
            if keyword == "patternProperties":
                for pattern in value:
                    check_pattern(pattern, here)
            return {name: self.schema(each, f"{here}/{_escaped(name)}") for name, each in value.items()}
        if keyword == "items" and isinstance(value, (list, tuple)):
            raise schema_error(here, "is a list", "one schema for all items: a schema for each place is prefixItems")
        if keyword in _SCHEMAS:
            return self.schema(value, here)
        if keyword == "$ref":
            if not isinstance(value, str) or not value.startswith("#"):
                raise schema_error(here, f"is {shown(value)}", "a place in this schema, as in #/$defs/NAME")
            self._references.append((here, value))
            return value
        return CHECKS[keyword](value, here)

    def check_references(self) -> None:
        """Each $ref leads to a subschema, and there is an end to what it describes."""
        targets = {}
        for here, reference in self._references:
            targets[reference] = self.target(reference)
            if targets[reference] is None:
                raise schema_error(here, f"is {shown(reference)}, where there is no schema", "a place in this schema")
        ending: set[str] = set()
        while more := {each for each in targets if each not in ending and self._ends(targets[each], ending)}:
            ending |= more
        for here, reference in self._references:
            if reference not in ending and self.target(reference) is not False:
                raise schema_error(
                    here,
                    f"leads back to {reference} for ever: no value of it ever ends",
                    "a way out, such as an optional property or an alternative without the $ref",
                )

    def target(self, reference: str) -> Any:
        """The subschema that a $ref leads to; None where there is none."""
        plain = "/".join(_escaped(unquote(part).replace("~1", "/").replace("~0", "~")) for part in reference.split("/"))
        return self.found.get(plain)

    def _ends(self, schema: Any, ending: set[str]) -> bool:
        """Whether some value of a schema is finite, as far as is known: `ending` are the $refs that have one."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"] not in ending:
            return False
        if not all(self._ends(each, ending) for each in schema.get("allOf", ())):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(self._ends(each, ending) for each in schema[keyword]):
                return False
        if "const" in schema or "enum" in schema or not _types(schema) <= {"object", "array"}:
            return True
        return any(self._container_ends(schema, kind, ending) for kind in _types(schema))

    def _container_ends(self, schema: dict[str, Any], kind: str, ending: set[str]) -> bool:
        if kind == "object":
            properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
            return all(self._ends(properties.get(name, others), ending) for name in schema.get("required", ()))
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = [*first[:least], *([schema.get("items", True)] if least > len(first) else [])]
        return all(self._ends(each, ending) for each in needed)

    def check_alternatives(self) -> None:
        """No value can fulfil two alternatives of a oneOf, which is then as an anyOf."""
        for place, schema in self.found.items():
            alternatives = schema.get("oneOf", ()) if isinstance(schema, dict) else ()
            for second in range(len(alternatives)):
                for first in range(second):
                    if not self._disjoint(alternatives[first], alternatives[second], 0):
                        raise schema_error(
                            f"{place}/oneOf",
                            f"has alternatives {first} and {second}, which one value may both fulfil",
                            "alternatives of different type, const or enum, or objects that all require a property "
                            "whose const tells them apart; or anyOf, where several may hold",
                        )

    def check_narrow_ranges(self) -> None:
        """Refuse a range of less than 1 that begins or ends right behind a whole number: llguidance lets that number
        itself through (seen in 1.9.1). Where schemas are merged, any bound may meet any other."""
        schemas = [each for each in self.found.items() if isinstance(each[1], dict)]
        for group in [schemas] if any(_merges(each) for _, each in schemas) else [[each] for each in schemas]:
            for place, schema in group:
                for keyword, others, sign in (("exclusiveMinimum", _HIGH, 1), ("exclusiveMaximum", _LOW, -1)):
                    bound = schema.get(keyword)
                    if bound is None or bound != int(bound) or schema.get("type") == "integer":
                        continue
                    near = [each[name] for _, each in group for name in others if name in each]
                    if any(0 < sign * (other - bound) < 1 for other in near):
                        raise schema_error(
                            f"{place}/{keyword}",
                            f"is {bound}, with another bound less than 1 away, and {bound} itself would get through",
                            "a bound that is no whole number, such as 0.001 for above 0, or one that may be reached",
                        )

    def _disjoint(self, first: Any, second: Any, depth: int) -> bool:
        first, second = self._resolved(first), self._resolved(second)
        if first is False or second is False:
            return True
        if not (isinstance(first, dict) and isinstance(second, dict)) or depth > MOST_LEVELS:
            return False
        values, others = _values(first), _values(second)
        if values is not None and others is not None:
            return not any(_same_json(value, other) for value in values for other in others)
        types = _expanded(_types(first)) & _expanded(_types(second))
        if not types:
            return True
        shared = set(first.get("required", ())) & set(second.get("required", ()))
        return types == {"object"} and any(
            self._disjoint(first.get("properties", {}).get(name), second.get("properties", {}).get(name), depth + 1)
            for name in shared
        )

    def _resolved(self, schema: Any) -> Any:
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and seen < MOST_LEVELS:
            target = self.target(schema["$ref"])
            beside = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
            schema, seen = target if not beside or not isinstance(target, dict) else {**target, **beside}, seen + 1
        return schema


def _merges(schema: dict[str, Any]) -> bool:
    """Whether several schemas describe one value here."""
    return (
        "allOf" in schema
        or "patternProperties" in schema
        or (bool({"anyOf", "oneOf", "$ref"} & set(schema)) and len(set(schema) - {"$defs", "definitions", "type"}) > 1)
    )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _not_enforced(keyword: str, place: str) -> RequestError:
    if keyword == "x-guidance":
        return schema_error(
            place, "has x-guidance, which would change how answers are made", "a plain schema: leave it out"
        )
    close = "" if keyword in _KEYWORDS else did_you_mean(keyword, sorted(ENFORCED))
    hint = f"{close[2:]} " if close.startswith(": did") else ""
    return RequestError(
        f"the JSON schema, at {place}, has the keyword {shown(keyword)}, which would not be enforced: {hint}leave it "
        "out and check the answer yourself, or say the same with keywords that are (docs, structured output)"
    )


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows by its type, const or enum."""
    named = schema.get("type", TYPES)
    types = {named} if isinstance(named, str) else set(named)
    values = _values(schema)
    return types if values is None else _expanded(types) & {_type_of(each) for each in values}


def _expanded(types: Iterable[str]) -> set[str]:
    found = set(types)
    return found | {"integer"} if "number" in found else found


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if value == int(value) else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The values that a schema names; None where it names none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _same_json(first: Any, second: Any) -> bool:
    """Whether two values are one in JSON, where true is not 1, and 1.0 is."""
    return _tagged(first) == _tagged(second)


def _tagged(value: Any) -> Any:
    if isinstance(value, dict):
        return "object", frozenset((key, _tagged(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return "array", tuple(_tagged(each) for each in value)
    return isinstance(value, bool), value


def _check_bounds(schema: dict[str, Any], place: str) -> None:
    """Refuse bounds between which there is nothing."""
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if low in schema and high in schema and schema[low] > schema[high]:
            raise schema_error(
                place, f"has {low} {schema[low]} above {high} {schema[high]}", "bounds that a value can fulfil"
            )
    for low, high in (
        ("minimum", "maximum"),
        ("minimum", "exclusiveMaximum"),
        ("exclusiveMinimum", "maximum"),
        ("exclusiveMinimum", "exclusiveMaximum"),
    ):
        strict = "exclusive" in low + high  # then equal bounds leave nothing, either
        if low in schema and high in schema and (schema[low], strict) >= (schema[high], True):
            raise schema_error(
                place, f"has {low} {schema[low]} and {high} {schema[high]}", "bounds that a value can fulfil"
            )
    required = schema.get("required", ())
    optional = set(schema.get("properties", ())) - set(required)
    if len(optional) > MOST_OPTIONAL:
        found = f"has {len(optional)} properties that may be left out"
        raise schema_error(place, found, f"at most {MOST_OPTIONAL}: require some of them, or nest them in objects")
    if len(required) > schema.get("maxProperties", math.inf):
        raise schema_error(place, f"requires {len(required)} properties, more than maxProperties", "fewer of them")
    if schema.get("minProperties", 0) > len(required):
        raise schema_error(
            f"{place}/minProperties",
            f"is {schema['minProperties']}, which would not be enforced (one key may be written twice)",
            "as many required properties, by name",
        )
    if schema.get("items") is False and schema.get("minItems", 0) > len(schema.get("prefixItems", ())):
        raise schema_error(
            place, f"has minItems {schema['minItems']}, but no items behind prefixItems", "fewer of them"
        )
