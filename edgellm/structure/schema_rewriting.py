"""Keywords of JSON schemas that no mask keeps, said in the keywords that masks do keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgellm.structure.schema_keywords import ENFORCED, NOT_ENFORCED, TYPES

#: Properties that others depend on: each doubles the alternatives.
MOST_DEPENDENCIES = 6
#: Properties that may be left out where one of them has to be there, too.
MOST_WAYS = 30


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
