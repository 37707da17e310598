"""JSON schemas: what of them is enforced. A keyword that would be passed over is refused with its name and place.

`enforced_schema` gives what the grammar is compiled of: the keywords of our own list alone, annotations left out.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import product
from math import inf
from typing import Any
from urllib.parse import unquote

from edgellm.errors import RequestError, require, shown
from edgellm.structure.schema_alternatives import Alternatives
from edgellm.structure.schema_keywords import (
    ANNOTATIONS,
    CHECKS,
    ENFORCED,
    FORMATS,
    LISTS,
    LONGEST_HOSTNAME,
    MAPPINGS,
    NOT_ENFORCED,
    SCHEMAS,
    allowed_types,
    check_pattern,
    in_the_last_draft,
    meant_keyword,
    require_valid,
    rewritten,
    schema_error,
)
from edgellm.structure.steps import Steps, check_path, folded
from edgellm.text.messages import JSONCopy

#: Of JSON: values nested in others, values in all, bytes as text; of these what says what is valid.
MOST_LEVELS, MOST_VALUES, MOST_BYTES, MOST_ENFORCED_BYTES = 60, 50_000, 2**20, 128 * 1024
#: Properties of one object that may be left out: a parser looks ahead at all of them.
MOST_OPTIONAL = 400
#: Patterns, formats and lengths that one text has to fulfil together: their automata are multiplied.
MOST_EXPRESSIONS = 8
#: A place's name of so many characters is a step of a walk.
_STEP_CHARACTERS = 64
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = [("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")]


def enforced_schema(schema: Any, steps: Steps | None = None) -> Any:
    """The schema with enforced keywords alone, in so many `steps`; RequestError names what is wrong or not enforced."""
    schema = JSONCopy("the JSON schema", MOST_VALUES, MOST_LEVELS, inf).of(schema, "the JSON schema")
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode())
    except ValueError as error:  # a number of more digits than Python writes
        raise RequestError(f"the JSON schema cannot be written as text: {error}") from error
    if size > MOST_BYTES:
        raise RequestError(f"the JSON schema has {size} bytes: at most {MOST_BYTES} are taken, say less in it")
    require(isinstance(schema, (dict, bool)), "a JSON schema", schema, "an object, as in {'type': 'object'}")
    if schema is False:
        raise RequestError("the JSON schema is false, which no value fulfils: say what the answer may be")
    walk = _Walk({} if schema is True else schema, steps or Steps("the JSON schema"))
    enforced = walk.schema(walk.document, "#")
    walk.check_paths()
    walk.check_references()
    alternatives = Alternatives(walk.found, walk.targets, walk.steps)
    alternatives.separate()
    alternatives.check()
    walk.check_narrow_ranges()
    walk.place_references(enforced)
    if (size := len(json.dumps(enforced, ensure_ascii=False).encode())) > MOST_ENFORCED_BYTES:
        raise RequestError(
            f"the JSON schema has {size} bytes without its annotations: at most {MOST_ENFORCED_BYTES} are taken, say "
            "less in it"
        )
    return enforced


class _Walk:
    """One walk over a schema. `found` has the enforced part of each subschema by its JSON pointer."""

    def __init__(self, document: Any, steps: Steps) -> None:
        self.document = document
        self.found: dict[str, Any] = {}
        self.steps = steps
        self._references: list[tuple[str, str]] = []
        self.targets: dict[str, Any] = {}
        self._draft = str(document.get("$schema", ""))
        #: The keyword that gives a schema a name of its own, and the place of the innermost with one.
        self._name, self._base = "id" if "draft-04" in self._draft else "$id", "#"

    def schema(self, schema: Any, place: str) -> Any:
        """The enforced part of a subschema."""
        self.steps.take(1 + len(place) // _STEP_CHARACTERS)
        if isinstance(schema, bool):
            self.found[place] = schema
            return schema
        require_valid(isinstance(schema, dict), place, schema, "a schema: an object, true or false")
        enforced: dict[str, Any] = {}
        all_of: list[Any] = []
        self.found[place] = enforced
        outer, self._base = self._base, place if self._is_named(schema) else self._base
        for keyword, value in schema.items():
            here = f"{place}/{_escaped(keyword)}"
            if keyword in ("$defs", "definitions"):
                continue
            if keyword == "prefixItems" and "items" in schema and self._draft and "2020-12" not in self._draft:
                raise schema_error(here, "is of a later draft than $schema", "items as a list, and additionalItems")
            meaning, meant = in_the_last_draft(keyword, value, schema)
            parts = rewritten(meaning, meant, schema)
            if parts is not None:  # "~" alone is in no JSON pointer
                all_of += [self.schema(each, f"{here}~/{number}") for number, each in enumerate(parts)]
            elif meaning == "allOf":
                all_of += self._keyword(meaning, meant, here)
            elif meaning in ENFORCED:
                enforced[meaning] = self._keyword(meaning, meant, here)
            else:
                _check_ignored(keyword, meaning, meant, schema, place)
        self._base = outer
        all_of += _write_format(enforced)
        if enforced.get("additionalProperties") is False and "patternProperties" in enforced:
            names = list(dict.fromkeys([*enforced.get("properties", ()), *enforced.get("required", ())]))
            self.steps.take(20 + 10 * len(names))
            if names and _is_dead_end(names, enforced["patternProperties"]):  # so no pattern adds to the names
                all_of.append({"properties": dict.fromkeys(names, True), "additionalProperties": False})
        if all_of:
            enforced["allOf"] = all_of
        _check_bounds(enforced, place)
        return enforced

    def _is_named(self, schema: dict[str, Any]) -> bool:
        """Whether a subschema has a name, so that the $refs within begin at it."""
        name = schema.get(self._name)
        return isinstance(name, str) and not name.startswith("#")

    def _keyword(self, keyword: str, value: Any, here: str) -> Any:
        if keyword in LISTS:
            require_valid(isinstance(value, list) and value != [], here, value, "a list of at least one schema")
            return [self.schema(each, f"{here}/{place}") for place, each in enumerate(value)]
        if keyword in MAPPINGS:
            require_valid(isinstance(value, dict), here, value, "schemas by name")
            if keyword == "patternProperties":
                for pattern in value:
                    check_pattern(pattern, here)
            return {name: self.schema(each, f"{here}/{_escaped(name)}") for name, each in value.items()}
        if keyword in SCHEMAS:
            return self.schema(value, here)
        if keyword == "$ref":
            is_place = isinstance(value, str) and value.startswith("#")
            require_valid(is_place, here, value, "a place in this schema, as in #/$defs/NAME")
            value = self._base + value[1:]
            self._references.append((here, value))
            return value
        return CHECKS[keyword](value, here)

    def check_paths(self) -> None:
        """Each $ref leads to a subschema, on a path of bounded length, and few expressions meet on one text."""
        for here, reference in self._references:
            self.targets[reference] = self.target(reference)
            if self.targets[reference] is None:
                raise schema_error(here, f"is {shown(reference)}, where there is no schema", "a place in this schema")
        places = {id(schema): place for place, schema in self.found.items()}

        def value(schema: Any, known: Callable[[Any], tuple[int, int]]) -> tuple[int, int]:
            """How many $refs follow a schema in a row, and how many expressions its text has to fulfil together."""

            def found(which: int, schemas: Iterable[Any]) -> list[int]:
                return [0, *(known(each)[which] for each in schemas)]

            if not isinstance(schema, dict):
                return 0, 0
            referred = [self.targets[schema["$ref"]]] if "$ref" in schema else []
            links = max(len(referred) + sum(found(0, referred)), *found(0, self._following(schema)))
            check_path(links, "the JSON schema")
            met = ("pattern" in schema) + bool({"minLength", "maxLength"} & set(schema))
            met += sum(found(1, [*referred, *schema.get("allOf", ())]))
            met += sum(max(found(1, schema.get(keyword, ()))) for keyword in ("anyOf", "oneOf"))
            if met > MOST_EXPRESSIONS:
                count = f"has {met} patterns, formats and lengths that one text has to fulfil together"
                raise schema_error(places[id(schema)], count, f"at most {MOST_EXPRESSIONS}")
            return links, met

        folded(self.found.values(), self._following, value, (0, 0))

    def _following(self, schema: Any) -> list[Any]:
        """The schemas that describe a value, or a part of it, along with this one."""
        if not isinstance(schema, dict):
            return []
        found = [self.targets[schema["$ref"]]] if "$ref" in schema else []
        for keyword, value in schema.items():
            found += [value] if keyword in SCHEMAS else value if keyword in LISTS else []
            found += value.values() if keyword in MAPPINGS else []
        return found

    def check_references(self) -> None:
        """There is an end to what each $ref describes."""
        targets, ending = self.targets, set[str]()
        while more := {each for each in targets if each not in ending and self._ends(targets[each], ending)}:
            ending |= more
        for here, reference in self._references:
            if reference not in ending and targets[reference] is not False:
                found = f"leads back to {reference} for ever: no value of it ever ends"
                way_out = "a way out, such as an optional property or an alternative without the $ref"
                raise schema_error(here, found, way_out)

    def target(self, reference: str) -> Any:
        """The subschema that a $ref leads to, walked now where nothing led there; None where there is none."""
        path = _path(reference)
        plain = "/".join(map(_escaped, path))
        if plain not in self.found:
            schema, base = self.document, "#"
            for depth, name in enumerate(path[1:], 2):
                schema = _within(schema, name)
                if isinstance(schema, dict) and self._is_named(schema) and depth < len(path):
                    base = "/".join(map(_escaped, path[:depth]))
            if not isinstance(schema, (dict, bool)):
                return None
            self._base = base
            self.schema(schema, plain)
        return self.found[plain]

    def place_references(self, enforced: dict[str, Any]) -> None:
        """Put what $refs lead to, but the whole schema, among its `$defs`, under names that need no escapes."""
        names: dict[str, str] = {}
        for number, (reference, target) in enumerate(self.targets.items()):
            if target is not enforced:
                names[reference] = f"{re.sub('[^A-Za-z0-9_]+', '_', _path(reference)[-1])}-{number}"
        for schema in {id(each): each for each in self.found.values()}.values():  # some have two places
            if isinstance(schema, dict) and schema.get("$ref") in names:
                schema["$ref"] = f"#/$defs/{names[schema['$ref']]}"
        if names:
            enforced["$defs"] = {name: self.targets[reference] for reference, name in names.items()}

    def _ends(self, schema: Any, ending: set[str]) -> bool:
        """Whether some value of a schema is finite, as far as is known: `ending` are the $refs that have one."""
        self.steps.take()
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"] not in ending:
            return False
        if not all(self._ends(each, ending) for each in schema.get("allOf", ())):
            return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema and not any(self._ends(each, ending) for each in schema[keyword]):
                return False
        types = allowed_types(schema)
        if "const" in schema or "enum" in schema or not types <= {"object", "array"}:
            return True
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = {
            "object": [properties.get(name, others) for name in schema.get("required", ())],
            "array": [*first[:least], *([schema.get("items", True)] if least > len(first) else [])],
        }
        return any(all(self._ends(each, ending) for each in needed[kind]) for kind in types)

    def check_narrow_ranges(self) -> None:
        """Refuse a range of less than 1 that begins or ends right behind a whole number: llguidance lets that number
        itself through (seen in 1.9.1). Where schemas are merged, any bound may meet any other."""
        schemas = [each for each in self.found.items() if isinstance(each[1], dict)]
        for group in [schemas] if any(_merges(each) for _, each in schemas) else [[each] for each in schemas]:
            lows, highs = (
                sorted(each[name] for _, each in group for name in names if name in each) for names in (_LOW, _HIGH)
            )
            for place, schema in group:
                for keyword, others, sign in (("exclusiveMinimum", highs, 1), ("exclusiveMaximum", lows, -1)):
                    bound = schema.get(keyword)
                    if bound is None or bound != int(bound) or schema.get("type") == "integer":
                        continue
                    place_of = bisect_right(others, bound) if sign > 0 else bisect_left(others, bound) - 1
                    if 0 <= place_of < len(others) and abs(others[place_of] - bound) < 1:
                        found = f"is {bound}, with another bound less than 1 away, and {bound} itself would get through"
                        other = "a bound that is no whole number, such as 0.001 for above 0, or one that may be reached"
                        raise schema_error(f"{place}/{keyword}", found, other)


def _is_dead_end(names: list[str], patterns: dict[str, Any]) -> bool:
    """Whether no other name fulfils a pattern: llguidance lets a comma follow the last one even so (seen in 1.9.1)."""
    from llguidance import LLMatcher

    from edgellm.structure.grammar import byte_vocabulary  # llguidance is loaded for schemas that need it

    keys = {each: True for each, value in patterns.items() if value is not False}
    schema: dict[str, Any] = {"properties": dict.fromkeys(names, True), "required": names, "patternProperties": keys}
    schema |= {"type": "object", "additionalProperties": False}
    grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    constraint = byte_vocabulary().constraint_for(grammar, "the JSON schema")
    before = json.dumps(dict.fromkeys(names, 0), ensure_ascii=False)[:-1] + ","
    return all(map(constraint.try_advance, before.encode())) and not constraint.try_advance(ord('"'))


def _merges(schema: dict[str, Any]) -> bool:
    """Whether several schemas describe one value here."""
    return (
        "allOf" in schema
        or "patternProperties" in schema
        or (bool({"anyOf", "oneOf", "$ref"} & set(schema)) and len(set(schema) - {"$defs", "definitions", "type"}) > 1)
    )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _path(reference: str) -> list[str]:
    """The names on the way to where a $ref leads; the first is "#"."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference.split("/")]


def _within(value: Any, name: str) -> Any:
    """What a value has under a name, a list at a place; None where it has nothing there."""
    if isinstance(value, list):
        return value[int(name)] if name.isdecimal() and int(name) < len(value) else None
    return value.get(name) if isinstance(value, dict) else None


def _write_format(enforced: dict[str, Any]) -> list[Any]:
    """Write a format as its pattern, or leave it out as an annotation; a pattern that was beside it is returned."""
    name = enforced.pop("format", None)
    if name not in FORMATS:
        return []
    if name == "hostname":
        enforced["maxLength"] = min(enforced.get("maxLength", LONGEST_HOSTNAME), LONGEST_HOSTNAME)
    beside = [{"pattern": enforced["pattern"]}] if "pattern" in enforced else []
    enforced["pattern"] = f"^(?:{FORMATS[name]})$"
    return beside


def _check_ignored(keyword: str, meaning: str, value: Any, schema: dict[str, Any], place: str) -> None:
    """Refuse a keyword that is not enforced, unless it leaves open what is valid: by the specification one that is not
    known does, but not a slip of one that is."""
    if meaning == "x-guidance":
        found = "has x-guidance, which would change how answers are made"
        raise schema_error(place, found, "a plain schema: leave it out")
    meant = None if meaning in NOT_ENFORCED or meaning in ANNOTATIONS else meant_keyword(meaning)
    if meant is not None or (meaning in NOT_ENFORCED and not NOT_ENFORCED[meaning](value, schema)):
        hint = f"did you mean {meant}? " if meant else ""
        raise RequestError(
            f"the JSON schema, at {place}, has the keyword {shown(keyword)}, which would not be enforced: {hint}leave "
            "it out and check the answer yourself, or say the same with keywords that are (docs, structured output)"
        )


def _check_bounds(schema: dict[str, Any], place: str) -> None:
    """Refuse bounds between which there is nothing."""
    for low, high in (*_COUNTS, *product(_LOW, _HIGH)):
        strict = "exclusive" in low + high  # then equal bounds leave nothing, either
        if low in schema and high in schema and (schema[low], strict) >= (schema[high], True):
            beside = "and" if high in _HIGH else "above"
            found = f"has {low} {schema[low]} {beside} {high} {schema[high]}"
            raise schema_error(place, found, "bounds that a value can fulfil")
    required = schema.get("required", ())
    optional = set(schema.get("properties", ())) - set(required)
    if len(optional) > MOST_OPTIONAL:
        found = f"has {len(optional)} properties that may be left out"
        raise schema_error(place, found, f"at most {MOST_OPTIONAL}: require some of them, or nest them in objects")
    if len(required) > schema.get("maxProperties", inf):
        raise schema_error(place, f"requires {len(required)} properties, more than maxProperties", "fewer of them")
    if schema.get("minProperties", 0) > len(required) + 1:
        found = f"is {schema['minProperties']}, which would not be enforced (one key may be written twice)"
        raise schema_error(f"{place}/minProperties", found, "at most one more than there are required properties")
    if schema.get("items") is False and schema.get("minItems", 0) > len(schema.get("prefixItems", ())):
        found = f"has minItems {schema['minItems']}, but no items behind prefixItems"
        raise schema_error(place, found, "fewer of them")
