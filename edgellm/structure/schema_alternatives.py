"""Alternatives of a JSON schema's `oneOf`: told apart by types, named values and required properties.

llguidance takes a oneOf as an anyOf, which is right where no value fulfils two of its alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgellm.structure.schema_keywords import TYPES, allowed_types, named_values, schema_error
from edgellm.structure.steps import Steps

#: Alternatives of a oneOf that are narrowed to be apart from one another: each is compared with each.
MOST_SEPARATED = 30
#: So many schemas are looked into within one another, or $refs followed in a row.
_DEEPEST = 60


class Alternatives:
    """Narrows and checks the alternatives of every oneOf of a schema that was walked."""

    def __init__(self, found: dict[str, Any], targets: Mapping[str, Any], steps: Steps) -> None:
        """`found` has each enforced subschema by its JSON pointer, `targets` what each $ref leads to; comparisons take
        `steps`."""
        self._found, self._targets, self._steps = found, targets, steps
        self._facts: dict[int, tuple[Any, _Facts]] = {}  # by the id of a schema, which is kept beside
        self._apart: set[tuple[int, int]] = set()

    def separate(self) -> None:
        """Narrow each alternative of a oneOf to values that fulfil no other, where properties can tell them apart."""
        for place, schema in list(self._found.items()):
            alternatives = schema.get("oneOf", ()) if isinstance(schema, dict) else ()
            if len(alternatives) <= MOST_SEPARATED:
                narrowed = [self._alone(number, alternatives) for number in range(len(alternatives))]
                if narrowed and None not in narrowed:
                    schema["oneOf"] = narrowed
                    self._found.update({f"{place}/oneOf~/{number}": each for number, each in enumerate(narrowed)})

    def _alone(self, number: int, alternatives: Sequence[Any]) -> Any:
        """An alternative, with no value that fulfils another; None where none of this is found."""
        first = alternatives[number]
        for second in (*alternatives[:number], *alternatives[number + 1 :]):
            if first is not None and not self._disjoint(first, second):
                first = self._narrowed(first, second)
        return first

    def _narrowed(self, first: Any, second: Any) -> dict[str, Any] | None:
        """The objects of a schema without a property that the second requires, or with other values there; or None."""
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

    def check(self) -> None:
        """No value can fulfil two alternatives of a oneOf, which is then as an anyOf. Those that name values, or values
        of one required property, are compared by these at once."""
        for place, schema in self._found.items():
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
                if (values := self._facts_of(facts.property(name)).values) is not None:
                    return name, values
        return None, facts.values

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
        if pair in tried or pair in self._apart or depth > _DEEPEST:
            return pair in self._apart
        tried.add(pair)
        one, other = self._facts_of(first), self._facts_of(second)
        self._steps.take(1 + (len(one.required) + len(other.required)) // 16)
        types = one.types & other.types
        if one.values is not None and other.values is not None:
            apart = one.values.isdisjoint(other.values)
        else:
            names = one.required | other.required if types == {"object"} else {}
            apart = not types or any(
                self._told_apart(one.property(name), other.property(name), tried, depth + 1) for name in names
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
                facts = _Facts(None, frozenset(() if resolved is False else TYPES), {}, {})
            else:
                values = named_values(resolved)
                self._steps.take(1 + len(values or ()) // 8)
                tagged = None if values is None else frozenset(map(_tagged, values))
                required = dict.fromkeys(resolved.get("required", ()))
                facts = _Facts(tagged, allowed_types(resolved), required, resolved)
            self._facts[id(schema)] = schema, facts
        return self._facts[id(schema)][1]

    def _resolved(self, schema: Any) -> Any:
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and seen < _DEEPEST:
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


def _tagged(value: Any) -> Any:
    """A value to be compared as JSON compares them, where true is not 1, and 1.0 is."""
    if isinstance(value, dict):
        return "object", frozenset((key, _tagged(each)) for key, each in value.items())
    if isinstance(value, list):
        return "array", tuple(_tagged(each) for each in value)
    return isinstance(value, bool), value
