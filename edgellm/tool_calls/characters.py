"""Reading character by character: what waits for more, what is read again, and values as JSON and Python write them."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Generator
from typing import Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.tool_calls.values import TEXT_MARK, json_text, python_json, typed_text, unescaped

SPACES = frozenset(" \t\r\n")
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")
#: In place of a character: the answer has ended.
END = ""
#: What a string of Python may stand behind, as part of an argument or all of it, and what may follow one in a list.
_BEFORE_STRING = ("", "(", "[", "{", ",", ":")
_BEHIND_INNER = (",", ")", "]", "}", ":")
#: How a call of Python goes on behind an argument, and what is read to tell.
_GOING_ON = re.compile(r"\s*(,\s*([\w-]+\s*=|\))|\)\s*(\]|,\s*(\{|[\w.-]+\()))")
#: What is no part of a name or a word in calls of Gemma 4.
_KEYED = "{}[],:<"
_PASSED = SPACES | NAME_CHARACTERS | {",", ")"}

#: Reads characters: yields where it waits for more.
Characters = Generator[None, None, Any]


class Broken(Exception):
    """What is read is no call, or a broken one; the text says why."""


class CharacterReader:
    """Characters of a text that grows, for generators that call each other with `yield from`."""

    def __init__(self) -> None:
        self._characters: list[str] = []
        self._at = self._start = 0  # the next one, and the first one of what is being read
        self._has_ended = False

    @property
    def _raw(self) -> str:
        """What is being read, as it was written."""
        return "".join(self._characters[self._start : self._at])

    def _next(self) -> Characters:
        """The next character; `END` for ever, once the answer has ended and all of it is read."""
        while self._at == len(self._characters):
            if self._has_ended:
                return END
            yield
        self._at += 1
        return self._characters[self._at - 1]

    def _within(self) -> Characters:
        """The next character of a call; Broken where the answer has ended."""
        character = yield from self._next()
        if character == END:
            raise Broken("the answer ended within a call")
        return character

    def _back(self, character: str) -> None:
        """Let the latest character be read again."""
        self._at -= len(character)

    def _behind_spaces(self) -> Characters:
        """The next character that is no whitespace."""
        while (character := (yield from self._next())) in SPACES:
            pass
        return character

    def _word(self, character: str, is_part: Callable[[str], bool]) -> Characters:
        """The characters from this one on that are part of a word, and the one behind them."""
        begin = self._at - len(character)
        while is_part(character):
            character = yield from self._next()
        return "".join(self._characters[begin : self._at - len(character)]), character

    def _followed_by(self, texts: Collection[str], spaces: Collection[str] = SPACES) -> Characters:
        """Whether one of the texts stands here, behind whitespace. All that is read for that is read again."""
        begin, text = self._at, ""
        while text not in texts and any(each.startswith(text) for each in texts):
            character = yield from self._next()
            if character == END:
                break
            if text or character not in spaces:
                text += character
        self._at = begin
        return text in texts

    def _expect(self, text: str) -> Characters:
        """Read a text, perhaps behind whitespace."""
        self._require((yield from self._behind_spaces()), text[0])
        yield from self._literal(text[1:])

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
        """The text up to the character `end`, which is read, too."""
        begin = self._at
        while (yield from self._within()) != end:
            pass
        return "".join(self._characters[begin : self._at - 1])

    def _json_string(self) -> Characters:
        """The value of a string, behind its quote."""
        raw = yield from self._json_value('"')
        try:
            return json.loads(raw)
        except ValueError as error:
            raise Broken(f"a call has a string that is no JSON ({error})") from error

    def _json_value(self, first: str, emit: Callable[[str], None] = lambda character: None) -> Characters:
        """The text of a JSON value that begins with `first`, which is read; `emit` gets its characters as they come."""
        begin = self._at - 1
        emit(first)
        if first not in ("{", "[", '"'):  # a number or a word
            while (character := (yield from self._next())) not in (",", "}", "]", END) and character not in SPACES:
                emit(character)
            self._back(character)
        depth, in_string = int(first in ("{", "[")), first == '"'
        while depth or in_string:
            emit(character := (yield from self._within()))
            if character == '"':
                in_string = not in_string
            elif not in_string:
                depth += (character in ("{", "[")) - (character in ("}", "]"))
            elif character == "\\":
                emit((yield from self._within()))
        return "".join(self._characters[begin : self._at])

    def _python_value(self) -> Characters:
        """An argument as Python writes it, as JSON, and the character behind it, `,` or `)`."""
        source: list[str] = []
        last = ""  # the latest character that is no whitespace
        depth = 0
        while True:
            character = yield from self._within()
            if character in ("'", '"'):
                if last not in _BEFORE_STRING:
                    raise Broken(f"a call has a string behind {last!r}: expected one value for each argument")
                source.append(json_text((yield from self._python_string(character, depth > 0))))
                last = character
                continue
            if depth == 0 and character in (",", ")"):
                break
            depth += (character in ("(", "[", "{")) - (character in (")", "]", "}"))
            if depth < 0:
                self._require(character, ")")
            source.append(character)
            last = last if character in SPACES else character
        try:
            return python_json("".join(source)), character
        except ValueError as error:
            raise Broken(f"a call has an argument that cannot be read ({error})") from error

    def _python_string(self, quote: str, is_inner: bool) -> Characters:
        """The value of a string behind its first quote; `is_inner`: it is part of a list or an object. Line ends may
        stand in it as they are. A quote ends it where what follows may follow a string: templates write text with
        quotes in it as it is, and so do models."""
        rest = quote * 2  # of three
        is_triple = yield from self._followed_by((rest,), ())
        yield from self._literal(rest if is_triple else "")
        begin = self._at
        while True:
            character = yield from self._within()
            if character == "\\":
                yield from self._within()
            elif character == quote:
                end = self._at - 1
                if is_triple:
                    is_end = yield from self._followed_by((rest,), ())
                else:
                    is_end = yield from (self._followed_by(_BEHIND_INNER) if is_inner else self._goes_on())
                if is_end:
                    yield from self._literal(rest if is_triple else "")
                    return unescaped("".join(self._characters[begin:end]))

    def _marked_text(self) -> Characters:
        """The text up to the mark that ends it, behind the first character of the one that begins it."""
        yield from self._literal(TEXT_MARK[1:])
        begin, size = self._at, len(TEXT_MARK)
        while "".join(self._characters[max(begin, self._at - size) : self._at]) != TEXT_MARK:
            yield from self._within()
        return "".join(self._characters[begin : self._at - size])

    def _keyed_name(self, character: str) -> Characters:
        """The name of an argument that begins with this character, and the colon behind it."""
        if character == TEXT_MARK[0]:
            name = yield from self._marked_text()
            character = yield from self._behind_spaces()
        else:
            word, character = yield from self._word(character, lambda each: each not in _KEYED)
            name = word.rstrip()
        self._require(character, ":")
        return name

    def _keyed_value(self, schema: Any, root: Any) -> Characters:
        """An argument as Gemma 4 writes it, as JSON, and the character behind it, `,` or `}`. Words without marks
        around them are of a type that the schema allows."""
        source, word, depth = list[str](), list[str](), 0
        while True:
            character = yield from self._within()
            if character == TEXT_MARK[0]:
                source.append(json_text((yield from self._marked_text())))
            elif character not in _KEYED or (depth == 0 and character in (":", "]")):
                word.append(character)
            else:
                if text := "".join(word).strip():
                    names = character == ":"
                    source.append(json_text(text) if names else typed_text(text, {} if depth else schema, root))
                    word.clear()
                if depth == 0 and character in (",", "}"):
                    break
                depth += (character in ("[", "{")) - (character in ("]", "}"))
                source.append(character)
        value = "".join(source)
        try:
            parsed_json(value)
        except (ValueError, RecursionError) as error:
            raise Broken(f"a call has an argument that cannot be read ({error})") from error
        return value, character

    def _goes_on(self) -> Characters:
        """Whether a call goes on here behind an argument: with the name of the next one, or with its own end and that
        of the list, or another call. All that is read for that is read again."""
        begin = self._at
        while (character := (yield from self._next())).isalnum() or character in _PASSED:
            pass
        passed, self._at = "".join(self._characters[begin : self._at]), begin
        return _GOING_ON.match(passed) is not None
