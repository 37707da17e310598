"""JSON schemas: what of them is enforced. A keyword that would be passed over is refused with its name and place.

`enforced_schema` gives what the grammar is compiled of: the keywords of our own list alone, annotations left out.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import unquote

from edgellm.errors import RequestError, shown
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
    TYPES,
    check_pattern,
    meant_keyword,
    schema_error,
)
from edgellm.structure.schema_rewriting import in_the_last_draft, rewritten
from edgellm.structure.steps import Steps, check_path, folded

#: Of JSON: values nested in others, values in all, bytes as text; of these what says what is valid.
MOST_LEVELS, MOST_VALUES, MOST_BYTES, MOST_ENFORCED_BYTES = 60, 50_000, 2**20, 128 * 1024
#: Properties of one object that may be left out: a parser looks ahead at all of them.
MOST_OPTIONAL = 400
#: Alternatives of a oneOf that are narrowed to be apart from one another: each is compared with each.
MOST_SEPARATED = 30
#: Patterns, formats and lengths that one text has to fulfil together: their automata are multiplied.
MOST_EXPRESSIONS = 8
#: A place's name of so many characters is a step of a walk.
_STEP_CHARACTERS = 64
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_ALL_TYPES = frozenset(TYPES)


def enforced_schema(schema: Any, steps: Steps | None = None) -> Any:
    """The schema with enforced keywords alone; RequestError names what is wrong or would not be enforced, and where.

    `steps` are those that the walks may take.
    """
    check_json(schema)
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"a JSON schema is {shown(schema)}: expected an object, as in {{'type': 'object'}}")
    if schema is False:
        raise RequestError("the JSON schema is false, which no value fulfils: say what the answer may be")
    walk = _Walk({} if schema is True else schema, steps or Steps("the JSON schema"))
    enforced = walk.schema(walk.document, "#")
    walk.check_paths()
    walk.check_references()
    walk.separate_alternatives()
    walk.check_alternatives()
    walk.check_narrow_ranges()
    walk.place_references(enforced)
    if (size := len(json.dumps(enforced, ensure_ascii=False).encode())) > MOST_ENFORCED_BYTES:
        raise RequestError(
            f"the JSON schema has {size} bytes without its annotations: at most {MOST_ENFORCED_BYTES} are taken, say "
            "less in it"
        )
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

    def __init__(self, document: Any, steps: Steps) -> None:
        self.document = document
        self.found: dict[str, Any] = {}
        self._steps = steps
        self._references: list[tuple[str, str]] = []
        self._targets: dict[str, Any] = {}
        self._facts: dict[int, _Facts] = {}
        self._apart: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # what these know by its id
        self._draft = str(document.get("$schema", ""))
        #: The keyword that gives a schema a name of its own, and the place of the innermost with one.
        self._name, self._base = "id" if "draft-04" in self._draft else "$id", "#"

    def schema(self, schema: Any, place: str) -> Any:
        """The enforced part of a subschema."""
        self._steps.take(1 + len(place) // _STEP_CHARACTERS)
        if isinstance(schema, bool):
            self.found[place] = schema
            return schema
        if not isinstance(schema, dict):
            raise schema_error(place, f"is {shown(schema)}", "a schema: an object, true or false")
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
            elif not _says_nothing(meaning, meant, schema):
                raise _not_enforced(keyword, place)
        self._base = outer
        all_of += _write_format(enforced)
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
            if not isinstance(value, (list, tuple)) or not value:
                raise schema_error(here, f"is {shown(value)}", "a list of at least one schema")
            return [self.schema(each, f"{here}/{place}") for place, each in enumerate(value)]
        if keyword in MAPPINGS:
            if not isinstance(value, dict):
                raise schema_error(here, f"is {shown(value)}", "schemas by name")
            if keyword == "patternProperties":
                for pattern in value:
                    check_pattern(pattern, here)
            return {name: self.schema(each, f"{here}/{_escaped(name)}") for name, each in value.items()}
        if keyword in SCHEMAS:
            return self.schema(value, here)
        if keyword == "$ref":
            if not isinstance(value, str) or not value.startswith("#"):
                raise schema_error(here, f"is {shown(value)}", "a place in this schema, as in #/$defs/NAME")
            value = self._base + value[1:]
            self._references.append((here, value))
            return value
        return CHECKS[keyword](value, here)

    def check_paths(self) -> None:
        """Each $ref leads to a subschema, on a path of bounded length, and few expressions meet on one text."""
        for here, reference in self._references:
            self._targets[reference] = self.target(reference)
            if self._targets[reference] is None:
                raise schema_error(here, f"is {shown(reference)}, where there is no schema", "a place in this schema")
        places = {id(schema): place for place, schema in self.found.items()}

        def value(schema: Any, known: Callable[[Any], tuple[int, int] | None]) -> tuple[int, int]:
            """How many $refs follow a schema in a row, and how many expressions its text has to fulfil together."""

            def found(which: int, schemas: Iterable[Any]) -> list[int]:
                return [0, *((known(each) or (0, 0))[which] for each in schemas)]

            if not isinstance(schema, dict):
                return 0, 0
            referred = [self._targets[schema["$ref"]]] if "$ref" in schema else []
            links = max(len(referred) + sum(found(0, referred)), *found(0, self._following(schema)))
            check_path(links, "the JSON schema")
            met = len({"pattern", "format"} & set(schema)) + bool({"minLength", "maxLength"} & set(schema))
            met += sum(found(1, [*referred, *schema.get("allOf", ())]))
            met += sum(max(found(1, schema.get(keyword, ()))) for keyword in ("anyOf", "oneOf"))
            if met > MOST_EXPRESSIONS:
                count = f"has {met} patterns, formats and lengths that one text has to fulfil together"
                raise schema_error(places[id(schema)], count, f"at most {MOST_EXPRESSIONS}")
            return links, met

        folded(self.found.values(), self._following, value)

    def _following(self, schema: Any) -> list[Any]:
        """The schemas that describe a value, or a part of it, along with this one."""
        if not isinstance(schema, dict):
            return []
        inner = [each for keyword in schema for each in _subschemas(schema, keyword)]
        return [self._targets[schema["$ref"]], *inner] if "$ref" in schema else inner

    def check_references(self) -> None:
        """There is an end to what each $ref describes."""
        targets, ending = self._targets, set[str]()
        while more := {each for each in targets if each not in ending and self._ends(targets[each], ending)}:
            ending |= more
        for here, reference in self._references:
            if reference not in ending and targets[reference] is not False:
                raise schema_error(
                    here,
                    f"leads back to {reference} for ever: no value of it ever ends",
                    "a way out, such as an optional property or an alternative without the $ref",
                )

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
        """Put what $refs lead to, and the enforced schema does not have at that place, among its `$defs`."""
        definitions: dict[str, Any] = {}
        places: dict[str, str] = {}
        own = self.document.get("$defs")
        free = (
            name for number in count() if (name := f"elsewhere-{number}") not in (own if isinstance(own, dict) else ())
        )
        for reference in dict.fromkeys(reference for _, reference in self._references):
            path, there = _path(reference), enforced
            for name in path[1:]:
                there = _within(there, name)
            if path[1:-1] == ["$defs"]:
                definitions[path[-1]] = self.target(reference)
            elif there is not self.target(reference):
                places[reference] = f"#/$defs/{(name := next(free))}"
                definitions[name] = self.target(reference)
        for schema in self.found.values():
            if isinstance(schema, dict) and schema.get("$ref") in places:
                schema["$ref"] = places[schema["$ref"]]
        if definitions:
            enforced["$defs"] = definitions

    def _ends(self, schema: Any, ending: set[str]) -> bool:
        """Whether some value of a schema is finite, as far as is known: `ending` are the $refs that have one."""
        self._steps.take()
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

    def separate_alternatives(self) -> None:
        """Narrow each alternative of a oneOf to values that fulfil no other, where properties can tell them apart."""
        for place, schema in list(self.found.items()):
            alternatives = schema.get("oneOf", ()) if isinstance(schema, dict) else ()
            if len(alternatives) <= MOST_SEPARATED:
                narrowed = [self._alone(number, alternatives) for number in range(len(alternatives))]
                if narrowed and None not in narrowed:
                    schema["oneOf"] = narrowed
                    self.found.update({f"{place}/oneOf~/{number}": each for number, each in enumerate(narrowed)})

    def _alone(self, number: int, alternatives: Sequence[Any]) -> Any:
        """An alternative, with no value that fulfils another; None where none of this is found."""
        first = alternatives[number]
        for second in (*alternatives[:number], *alternatives[number + 1 :]):
            if first is not None and not self._disjoint(first, second):
                first = self._narrowed(first, second)
                self._kept.append(first)
        return first

    def _narrowed(self, first: Any, second: Any) -> dict[str, Any] | None:
        """The objects of a schema without a property that the second one requires, or with one that has other values
        there; None where there is no such property."""
        one, other = self._facts_of(first), self._facts_of(second)
        if not one.schema or "object" not in one.types:
            return None
        known, only_requires = one.schema.get("properties", {}), set(other.schema) <= {"required", "type"}
        for name in other.required:
            if name not in one.required and (only_requires or name not in known):
                return {**first, "type": "object", "properties": {**first.get("properties", {}), name: False}}
        for name in known:
            if self._disjoint(one.property(name), other.property(name)):
                return {**first, "type": "object", "required": [*first.get("required", ()), name]}
        return None

    def check_alternatives(self) -> None:
        """No value can fulfil two alternatives of a oneOf, which is then as an anyOf. Those that name values, or values
        of one required property, are compared by these at once."""
        for place, schema in self.found.items():
            groups: dict[str | None, list[tuple[int, Any]]] = {}
            unnamed: list[tuple[int, Any]] = []
            by_value: dict[Any, list[tuple[int, Any]]] = {}
            for number, each in enumerate(schema.get("oneOf", ()) if isinstance(schema, dict) else ()):
                name, values = self._named_values(each)
                alike = [other for value in values or () for other in by_value.get((name, value), ())]
                others = [other for group, held in groups.items() if group != name or values is None for other in held]
                overlaps = [first for first, other in (*unnamed, *others, *alike) if not self._disjoint(other, each)]
                if overlaps:
                    raise schema_error(
                        f"{place}/oneOf",
                        f"has alternatives {overlaps[0]} and {number}, which one value may both fulfil",
                        "alternatives of different type, const or enum, or objects that all require a property "
                        "whose const tells them apart; or anyOf, where several may hold",
                    )
                (unnamed if values is None else groups.setdefault(name, [])).append((number, each))
                for value in values or ():
                    by_value.setdefault((name, value), []).append((number, each))

    def _named_values(self, schema: Any) -> tuple[str | None, frozenset[Any] | None]:
        """The values that a schema names (None), or its first required property that names some; None for neither."""
        facts = self._facts_of(schema)
        if facts.values is None and facts.types == {"object"}:
            for name in facts.required:
                values = self._facts_of(facts.property(name)).values
                if values is not None:
                    return name, values
        return None, facts.values

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
                        raise schema_error(
                            f"{place}/{keyword}",
                            f"is {bound}, with another bound less than 1 away, and {bound} itself would get through",
                            "a bound that is no whole number, such as 0.001 for above 0, or one that may be reached",
                        )

    def _disjoint(self, first: Any, second: Any) -> bool:
        """Whether no value can fulfil two schemas, as far as types, named values and required properties tell. What was
        told of a pair is remembered; of one that leads back to itself another may tell more the next time."""
        while True:
            known = len(self._apart)
            if self._told_apart(first, second, set(), 0):
                return True
            if len(self._apart) == known:
                return False

    def _told_apart(self, first: Any, second: Any, tried: set[tuple[int, int]], depth: int) -> bool:
        pair = id(first), id(second)
        if pair in tried or pair in self._apart or depth > MOST_LEVELS:
            return pair in self._apart
        tried.add(pair)
        one, other = self._facts_of(first), self._facts_of(second)
        self._steps.take(1 + (len(one.required) + len(other.required)) // 16)
        types = one.types & other.types
        if one.values is not None and other.values is not None:
            apart = one.values.isdisjoint(other.values)
        else:
            apart = not types or (
                types == {"object"}
                and any(
                    self._told_apart(one.property(name), other.property(name), tried, depth + 1)
                    for name in one.required | other.required
                )
            )
        apart = apart or any(
            every(self._told_apart(each, beside, tried, depth + 1) for each in facts.schema[keyword])
            for facts, beside in ((one, second), (other, first))
            for keyword, every in (("allOf", any), ("anyOf", all), ("oneOf", all))
            if keyword in facts.schema
        )
        if apart:
            self._apart.add(pair)
        return apart

    def _facts_of(self, schema: Any) -> _Facts:
        """What tells a schema from others, its $refs followed."""
        if id(schema) not in self._facts:
            resolved = self._resolved(schema)
            if not isinstance(resolved, dict):
                facts = _Facts(None, frozenset() if resolved is False else _ALL_TYPES, {}, {})
            else:
                values = _values(resolved)
                self._steps.take(1 + len(values or ()) // 8)
                facts = _Facts(
                    None if values is None else frozenset(map(_tagged, values)),
                    frozenset(_expanded(_types(resolved))),
                    dict.fromkeys(resolved.get("required", ())),
                    resolved,
                )
            self._facts[id(schema)] = facts
        return self._facts[id(schema)]

    def _resolved(self, schema: Any) -> Any:
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and seen < MOST_LEVELS:
            target = self._targets[schema["$ref"]]
            beside = {keyword: value for keyword, value in schema.items() if keyword != "$ref"}
            if beside and isinstance(target, dict):
                target = {**target, **beside}
                if "properties" in beside and "additionalProperties" not in beside:
                    target.pop("additionalProperties", None)  # it is of other properties
            schema, seen = target, seen + 1
        return schema


class _Facts(NamedTuple):
    """What tells a schema's values from others: those it names, its types, and of objects the required properties."""

    values: frozenset[Any] | None
    types: frozenset[str]
    required: dict[str, None]
    schema: dict[str, Any]

    def property(self, name: str) -> Any:
        """What an object's schema says of a property, as far as its name alone tells."""
        others = True if "patternProperties" in self.schema else self.schema.get("additionalProperties", True)
        return self.schema.get("properties", {}).get(name, others)


def _subschemas(schema: Any, keyword: str) -> Iterable[Any]:
    """The schemas that a keyword of a schema holds, those of definitions left out."""
    if not isinstance(schema, dict) or keyword not in schema:
        return ()
    if keyword in ("properties", "patternProperties"):
        return schema[keyword].values()
    return schema[keyword] if keyword in LISTS else [schema[keyword]] if keyword in SCHEMAS else ()


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
    if isinstance(value, (list, tuple)):
        return value[int(name)] if name.isdecimal() and int(name) < len(value) else None
    return value.get(name) if isinstance(value, dict) else None


def _write_format(enforced: dict[str, Any]) -> list[Any]:
    """Write a format as its pattern, where llguidance has none or a wider one, and leave out what is an annotation.
    Beside a pattern it is one of what is returned."""
    if enforced.get("format") == "hostname":
        enforced["maxLength"] = min(enforced.get("maxLength", LONGEST_HOSTNAME), LONGEST_HOSTNAME)
    if "format" not in enforced or (pattern := FORMATS.get(enforced["format"], "")) is None:
        return []
    del enforced["format"]
    beside = [{"pattern": enforced["pattern"]}] if pattern and "pattern" in enforced else []
    if pattern:
        enforced["pattern"] = f"^(?:{pattern})$"
    return beside


def _says_nothing(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword that is not enforced leaves open what is valid: by the specification one that is not known
    does, but not a slip of one that is."""
    if keyword in NOT_ENFORCED:
        return NOT_ENFORCED[keyword](value, schema)
    return keyword in ANNOTATIONS or (keyword != "x-guidance" and meant_keyword(keyword) is None)


def _not_enforced(keyword: str, place: str) -> RequestError:
    if keyword == "x-guidance":
        return schema_error(
            place, "has x-guidance, which would change how answers are made", "a plain schema: leave it out"
        )
    meant = None if keyword in NOT_ENFORCED else meant_keyword(keyword)
    hint = f"did you mean {meant}? " if meant else ""
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


def _tagged(value: Any) -> Any:
    """A value to be compared as JSON compares them, where true is not 1, and 1.0 is."""
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
    if schema.get("minProperties", 0) > len(required) + 1:
        raise schema_error(
            f"{place}/minProperties",
            f"is {schema['minProperties']}, which would not be enforced (one key may be written twice)",
            "at most one more than there are required properties",
        )
    if schema.get("items") is False and schema.get("minItems", 0) > len(schema.get("prefixItems", ())):
        raise schema_error(
            place, f"has minItems {schema['minItems']}, but no items behind prefixItems", "fewer of them"
        )
