"""Values in the text of calls: as Python writes them, as text between tags, and what their schemas say they may be."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.errors import RequestError, shown
from edgellm.structure.schema_keywords import TYPES, allowed_types, kind_of, named_values
from edgellm.structure.steps import folded

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|[0-7]{1,3}|.)", re.DOTALL
)
_ESCAPED = {"\n": "", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPED |= {each: each for each in "\\'\"/"}

#: Stands before and behind text where `keyed_text` writes it; names of arguments that need none have these characters.
TEXT_MARK, PLAIN_NAME = '<|"|>', r"[^\s,:{}\[\]<>|\"']+"


def json_text(value: Any) -> str:
    """A value as JSON. Half of a surrogate pair stays an escape: as a character it could not be sent as UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def keyed_text(value: Any) -> str:
    """A value as Gemma 4 writes it: names in their order, which have no quotes, and text as it is between marks.
    RequestError for text with such a mark in it."""
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
        return f"{{{','.join(f'{keyed_name(name)}:{keyed_text(each)}' for name, each in pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(keyed_text, value))}]"
    if not isinstance(value, str):
        return json_text(value)
    if TEXT_MARK in value:
        raise RequestError(f"the text {shown(value)} has {TEXT_MARK} in it, which ends a text in this model's calls")
    return f"{TEXT_MARK}{value}{TEXT_MARK}"


def keyed_name(name: str) -> str:
    """The name of an argument, or of a value of an object, as Gemma 4 writes it."""
    return name if re.fullmatch(PLAIN_NAME, name) else keyed_text(name)


def is_object(text: str) -> bool:
    """Whether a text is a whole JSON object."""
    try:
        return isinstance(parsed_json(text), dict)
    except (ValueError, RecursionError):
        return False


def python_json(source: str) -> str:
    """A literal of Python, or with JSON's true, false and null in it, as JSON. ValueError for anything else."""
    source = source.strip()
    with contextlib.suppress(ValueError, RecursionError):
        parsed_json(source)
        return source
    try:
        return json_text(_literal(ast.parse(source, mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _literal(node: ast.AST | None) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_literal(key)): _literal(value) for key, value in pairs}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    raise ValueError("a value is no literal")


def unescaped(text: str) -> str:
    """What stands between the quotes of a string in Python or JSON; a backslash before anything else stays one."""

    def character(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "xuU" and len(code) > 1:
            return chr(int(code[1:], 16))
        return chr(int(code, 8)) if code[0] in "01234567" else _ESCAPED.get(code, found[0])

    return _ESCAPE.sub(character, text)


def all_kinds(schemas: Iterable[Any], root: Any) -> list[frozenset[str]]:
    """The JSON types that a value of each of the schemas may have, an "integer" also where it may be any "number";
    those that a schema leaves open are all there. `root` is the schema that has the definitions."""
    everything = frozenset(TYPES)

    def conditions(schema: Any) -> list[list[Any]]:
        """Lists of schemas: a value fulfils one of each."""
        if not isinstance(schema, dict):
            return []
        all_of = [*schema.get("allOf", ()), *([referred(schema["$ref"], root)] if "$ref" in schema else ())]
        return [*([each] for each in all_of), *(schema[word] for word in ("anyOf", "oneOf") if word in schema)]

    def value(schema: Any, known: Callable[[Any], frozenset[str]]) -> frozenset[str]:
        kinds = allowed_types(schema) if isinstance(schema, dict) else everything
        for alternatives in conditions(schema):
            kinds &= frozenset().union(*map(known, alternatives))
        return kinds

    return folded(schemas, lambda schema: [each for listed in conditions(schema) for each in listed], value, everything)


def referred(reference: str, root: dict[str, Any]) -> Any:
    """The schema that a $ref of an enforced schema leads to: the whole, or one of its definitions."""
    return root if reference == "#" else root["$defs"][reference.removeprefix("#/$defs/")]


def spelled(value: Any) -> tuple[str, ...]:
    """How a value may be written between tags."""
    if value is None or isinstance(value, bool):
        return ("null", "None") if value is None else (json.dumps(value), str(value))
    return (value if isinstance(value, str) else json_text(value),)


def typed_text(text: str, schema: Any, root: Any) -> str:
    """A value that stands as text between tags, as JSON: of a type that the schema allows where there is one, and text
    where nothing else fits. Beside JSON itself, literals of Python count, as templates write true, false and null."""
    (kinds,) = all_kinds([schema], root)
    if kinds == {"string"}:
        return json_text(text)
    named = named_values(schema) if isinstance(schema, dict) else None
    for value in named or ():
        if text in spelled(value):  # a text may look like a number that is not among them
            return json_text(value)
    is_list = text.lstrip()[:1] in ("[", "{") and "\\" not in text  # before some letters Python warns of a backslash
    try:
        found = python_json(text) if is_list or text in ("True", "False", "None") else text.strip()
        kind = kind_of(parsed_json(found))
    except (ValueError, RecursionError):
        return json_text(text)
    return json_text(text) if "string" in kinds and kind not in kinds else found
