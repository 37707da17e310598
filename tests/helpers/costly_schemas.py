"""Schemas and grammars that cost much, or all, where nobody bounds what they cost."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from edgellm.structure.description import json_options


def chain(links: int, *, arrays: int = 0, required: str | None = None) -> dict[str, Any]:
    """A $ref to a $ref to ... a text; each in so many `arrays`, or in an object's `required` property."""
    parts: dict[str, Any] = {f"d{links}": {"type": "string"}}
    for number in range(links):
        part: dict[str, Any] = {"$ref": f"#/$defs/d{number + 1}"}
        for _ in range(arrays):
            part = {"type": "array", "items": part}
        if required is not None:
            part = {"properties": {required: part}, "required": [required]}
        parts[f"d{number}"] = part
    return {"$ref": "#/$defs/d0", "$defs": parts}


def rules(count: int) -> str:
    """A grammar of so many rules, each of which is the next."""
    return "\n".join(["start: r0", *(f"r{number}: r{number + 1}" for number in range(count)), f'r{count}: "x"'])


def patterns(count: int) -> list[dict[str, Any]]:
    """Texts of so many patterns whose automata multiply where they meet."""
    return [{"type": "string", "pattern": f"a{number}.*b"} for number in range(count)]


def patterns_of_a_property(count: int) -> dict[str, Any]:
    """Such patterns, which meet where objects are merged."""
    return {"allOf": [{"type": "object", "properties": {"p": each}} for each in patterns(count)]}


def objects_of_one_another(count: int) -> dict[str, Any]:
    """A oneOf of objects which all require properties that are such objects, or null."""
    parts = {}
    for number in range(count):
        properties = {
            name: {"type": ["object", "null"], "properties": {"x": {"$ref": f"#/$defs/d{(number * step + 1) % count}"}}}
            for name, step in (("a", 1), ("b", 7), ("c", 11))
        }
        for each in properties.values():
            each["required"] = ["x"]
        parts[f"d{number}"] = {"type": "object", "properties": properties, "required": ["a", "b", "c"]}
    return {"oneOf": [{"$ref": f"#/$defs/d{number}"} for number in range(count)], "$defs": parts}


def schema_grammar(schema: Any) -> str:
    """A schema as llguidance takes it, whatever the walks say of it."""
    return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options()))


def lark_grammar(text: str) -> str:
    """A grammar as llguidance takes it."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})
