"""Reading character by character: what waits for more, what is read again, and values in the text of calls."""

from __future__ import annotations

import ast
import json
import string
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

SPACES = frozenset(" \t\r\n")
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")
#: In place of a character: the answer has ended.
END = ""

#: Reads characters: what is sent is one, or `END`.
Characters = Generator[None, str, Any]


class Broken(Exception):
    """What is read is no call, or a broken one; the text says why."""


class CharacterReader:
    """Characters that are sent one by one, to generators that call each other with `yield from`."""

    def __init__(self) -> None:
        self._raw: list[str] = []  # of the call that is being read, as it was written
        self._again: deque[str] = deque()  # characters that are read once more
        self._has_ended = False

    def _next(self) -> Characters:
        """The next character; `END` for ever, once the answer has ended and what is read again is read."""
        if self._again:
            character = self._again.popleft()
        elif self._has_ended or (character := (yield)) == END:
            return END
        self._raw.append(character)
        return character

    def _back(self, character: str) -> None:
        """Let the latest character be read again."""
        if character != END:
            self._again.appendleft(character)
            self._raw.pop()

    def _refuse_end(self, character: str) -> None:
        if character == END:
            raise Broken("the answer ended within a call")

    def _behind_spaces(self) -> Characters:
        """The next character that is no whitespace."""
        while (character := (yield from self._next())) in SPACES:
            pass
        return character

    def _expect(self, expected: str) -> Characters:
        self._require((yield from self._behind_spaces()), expected)

    def _literal(self, text: str) -> Characters:
        for expected in text:
            self._require((yield from self._next()), expected)

    def _require(self, character: str, expected: str) -> None:
        """Refuse another character than the expected one, which is then read again."""
        if character != expected:
            self._back(character)
            found = "the end of the answer" if character == END else repr(character)
            raise Broken(f"a call has {found} where {expected!r} was expected")

    def _until(self, end: str) -> Characters:
        """The text up to `end`, which is read, too."""
        found = ""
        pieces: list[str] = []
        while not found.endswith(end):
            character = yield from self._next()
            self._refuse_end(character)
            pieces.append(character)
            found = (found + character)[-len(end) :]
        return "".join(pieces)[: -len(end)]

    def _json_string(self) -> Characters:
        """The value of a string, behind its quote."""
        raw = yield from self._json_value('"')
        try:
            return json.loads(raw)
        except ValueError as error:
            raise Broken(f"a call has a string that is no JSON ({error})") from error

    def _json_value(self, first: str, emit: Callable[[str], None] | None = None) -> Characters:
        """The text of a JSON value that begins with `first`; `emit` gets its characters as they come."""
        found: list[str] = []

        def take(character: str) -> None:
            found.append(character)
            if emit is not None:
                emit(character)

        take(first)
        if first not in ("{", "[", '"'):  # a number or a word
            while (character := (yield from self._next())) not in (",", "}", "]", END) and character not in SPACES:
                take(character)
            self._back(character)
            return "".join(found)
        depth, in_string = int(first != '"'), first == '"'
        while depth or in_string:
            character = yield from self._next()
            self._refuse_end(character)
            take(character)
            if in_string:
                if character == "\\":
                    character = yield from self._next()
                    self._refuse_end(character)
                    take(character)
                elif character == '"':
                    in_string = False
            elif character == '"':
                in_string = True
            else:
                depth += (character in ("{", "[")) - (character in ("}", "]"))
        return "".join(found)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=_refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def typed_text(text: str, schema: Any) -> str:
    """A value that stands as text between tags, as JSON: of the schema's type, text where nothing else fits."""
    kinds = schema.get("type", ()) if isinstance(schema, dict) else ()
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if kinds == {"string"}:
        return json_text(text)
    try:
        return json_text(json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return json_text({"True": True, "False": False, "None": None}.get(text, text))


def python_arguments(source: str) -> str:
    """The arguments of a call as Python writes them, as a JSON object; Broken for what are none."""
    try:
        call = ast.parse(f"f({source})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("arguments have no names")
        return json_text({str(each.arg): _python_value(each.value) for each in call.keywords if each.arg is not None})
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Broken(f"a call has arguments that cannot be read ({error})") from error


def _python_value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, bool, type(None))):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_python_value(key)): _python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _python_value(node.operand)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    raise ValueError("a value is no literal")
