"""Grammars of arguments between braces as Gemma 4 writes them: names without quotes, and text between marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgellm.errors import RequestError
from edgellm.structure.schema_keywords import kind_of, named_values
from edgellm.structure.steps import Steps
from edgellm.tool_calls.arguments import (
    alternatives_of,
    argument_parts,
    json_rule,
    listed,
    literal,
    text_forms,
    text_terms,
)
from edgellm.tool_calls.values import TEXT_MARK, all_kinds, keyed_name, keyed_text

#: Written as JSON has them.
_SCALARS = frozenset(["integer", "number", "boolean", "null"])
#: What a schema is that allows everything.
_ANYTHING = {"anyOf": [{"type": kind} for kind in ("string", "number", "boolean", "null", "object", "array")]}
#: A name that a schema does not say.
_NAME = "/[a-zA-Z_][a-zA-Z0-9_]*/"


class KeyedRules:
    """The rules of the arguments of one tool."""

    def __init__(
        self, number: int, tool: str, schema: dict[str, Any], special_ids: Mapping[str, int], size: Steps
    ) -> None:
        """`size` counts the bytes. Raises RequestError for what these rules cannot say."""
        self.rules: list[str] = []
        self._number, self._root, self._special_ids, self._size = number, schema, special_ids, size
        self._known: dict[int, tuple[Any, str]] = {}  # schemas, which are kept so that none takes another's id
        self._object(f"args_{number}", schema, f"the tool {tool}", is_whole=True)

    def _add(self, rule: str) -> None:
        self._size.take(len(rule))
        self.rules.append(rule)

    def _object(self, name: str, schema: dict[str, Any], what: str, is_whole: bool = False) -> None:
        """The rule of that name: what stands between the braces of an object, in the order of its names."""
        others = schema.get("additionalProperties", "properties" not in schema)
        is_bare = set(schema) <= {"type", "properties", "required", "additionalProperties", "$defs"}
        if is_bare and others is not False and not schema.get("properties") and not schema.get("required"):
            pair = f'{_NAME} ":" {self._value(others, what)}'
            self._add(f'{name}: ({pair} ("," {pair})*)?')
            return
        parts = sorted(argument_parts(schema), key=lambda part: part[0].lower())
        for rule in (f"{name}: from_{name}_0", *listed(name, parts, '","')):
            self._add(rule)
        for place, (key, each, _) in enumerate(parts):
            head = literal(f"{keyed_name(key)}:", self._special_ids)
            value = self._value(each, f"{what} has the argument {key!r}" if is_whole else what)
            self._add(f"arg_{name}_{place}: {head} {value}")

    def _value(self, schema: Any, what: str) -> str:
        """The name of the rule of a value."""
        schema = _ANYTHING if schema is True or schema == {} else schema
        if id(schema) not in self._known:
            name = f"value_{self._number}_{len(self._known)}"
            self._known[id(schema)] = schema, name
            alternatives = alternatives_of(schema, self._root)
            all_of_them = enumerate(zip(alternatives, all_kinds(alternatives, self._root), strict=True))
            written = [self._alternative(f"{name}_{place}", what, *each) for place, each in all_of_them]
            if not any(written):
                raise RequestError(f"{what} which nothing can be: expected a schema that some value fulfils")
            self._add(f"{name}: {' | '.join(filter(None, written))}")
        return self._known[id(schema)][1]

    def _alternative(self, name: str, what: str, schema: dict[str, Any], kinds: frozenset[str]) -> str:
        """How a value of a schema without alternatives is written; "" for none."""
        named = named_values(schema)
        if named is not None and set(schema) <= {"type", "enum", "const"}:
            return " | ".join(literal(keyed_text(each), self._special_ids) for each in named if kind_of(each) in kinds)
        if not schema:
            return self._value(_ANYTHING, what)
        if kinds == {"string"} and text_forms(schema) is not None:
            return self._text(name.upper(), what, schema)
        if kinds <= _SCALARS:
            self._add(f"{name}: {json_rule(schema, self._root, self._size)}")
            return name
        if kinds == {"object"}:
            self._object(name, schema, what)
            return f'"{{" {name} "}}"'
        if kinds == {"array"} and set(schema) <= {"type", "items", "minItems", "maxItems"}:
            return f'"[" {self._items(schema, what)} "]"'
        raise RequestError(
            f"{what} with a value of a form which cannot be enforced in the format of this model: say it by types, "
            "bounds, patterns without anchors within them, an enum, or properties"
        )

    def _items(self, schema: dict[str, Any], what: str) -> str:
        items, least, most = schema.get("items", True), schema.get("minItems", 0), schema.get("maxItems")
        if items is False or most == 0:
            return ""
        value = self._value(items, what)
        more = "" if most == 1 else f'("," {value}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"{value} {more}" if least else f"({value} {more})?"

    def _text(self, name: str, what: str, schema: dict[str, Any]) -> str:
        """Text between its marks: where these are no special tokens, the second one belongs to the terminal."""
        from edgellm.structure.grammar import byte_vocabulary

        mark, escaped = literal(TEXT_MARK, self._special_ids), re.escape(TEXT_MARK)
        is_token = TEXT_MARK in self._special_ids
        behind = "*" if is_token else "+"
        self._add(f"{name}: {text_terms(schema, '' if is_token else escaped)} & ~/(?s:.*){escaped}(?s:.{behind})/")
        if len(schema) > 2:  # what is said of a text may leave none
            byte_vocabulary().compiled(f"start: {name}\n{self.rules[-1]}", f"{what}, whose text")
        return f"{mark} {name} {mark if is_token else ''}"
