"""Reading character by character: what waits for more, what is read again, and values as JSON and Python write them."""

from __future__ import annotations

import json
import re
import string
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

from edgellm.tool_calls.values import json_text, python_json, unescaped

SPACES = frozenset(" \t\r\n")
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")
#: In place of a character: the answer has ended.
END = ""
#: What a string of Python may stand behind, as part of an argument or all of it, and what may follow one in a list.
_BEFORE_STRING = ("", "(", "[", "{", ",", ":")
_BEHIND_INNER = (",", ")", "]", "}", ":")
#: How a call of Python goes on behind an argument, and what is read to tell.
_GOING_ON = re.compile(r"\s*(,\s*([\w-]+\s*=|\))|\)\s*(\]|,\s*(\{|[\w.-]+\()))")
_PASSED = SPACES | NAME_CHARACTERS | {",", ")"}

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

    def _followed_by(self, texts: Collection[str], spaces: Collection[str] = SPACES) -> Characters:
        """Whether one of the texts stands here, behind whitespace. All that is read for that is read again."""
        passed: list[str] = []
        text = ""
        while text not in texts and any(each.startswith(text) for each in texts):
            character = yield from self._next()
            if character == END:
                break
            passed.append(character)
            if text or character not in spaces:
                text += character
        self._reread(passed)
        return text in texts

    def _reread(self, passed: Sequence[str]) -> None:
        """Let the latest characters be read again."""
        self._again.extendleft(reversed(passed))
        del self._raw[len(self._raw) - len(passed) :]

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

    def _python_value(self) -> Characters:
        """An argument as Python writes it, as JSON, and the character behind it, `,` or `)`."""
        source: list[str] = []
        last = ""  # the latest character that is no whitespace
        depth = 0
        while True:
            character = yield from self._next()
            self._refuse_end(character)
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
        """The value of a string behind its first quote; `is_inner`: it is part of a list or an object.

        Line ends may stand in it as they are. A quote ends it where what follows may follow a string: templates write
        text with quotes in it as it is, and so do models.
        """
        is_triple = yield from self._followed_by((quote * 2,), ())
        if is_triple:
            yield from self._literal(quote * 2)
        found: list[str] = []
        while True:
            character = yield from self._next()
            self._refuse_end(character)
            if character == "\\":
                found.append(character)
                character = yield from self._next()
                self._refuse_end(character)
            elif character != quote:
                pass
            elif is_triple:
                if (yield from self._followed_by((quote * 2,), ())):
                    yield from self._literal(quote * 2)
                    return unescaped("".join(found))
            elif (yield from self._followed_by(_BEHIND_INNER) if is_inner else self._goes_on()):
                return unescaped("".join(found))
            found.append(character)

    def _goes_on(self) -> Characters:
        """Whether a call goes on here behind an argument: with the name of the next one, or with its own end and that
        of the list, or another call. All that is read for that is read again."""
        passed: list[str] = []
        while not passed or passed[-1].isalnum() or passed[-1] in _PASSED:
            character = yield from self._next()
            if character == END:
                break
            passed.append(character)
        self._reread(passed)
        return _GOING_ON.match("".join(passed)) is not None
