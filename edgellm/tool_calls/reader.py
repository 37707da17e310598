"""Calls read from an answer as it grows: text goes in, in pieces of any size, text and calls come out.

Calls are read character by character, so that it makes no difference where the pieces are cut. What may be the
beginning of a call is held back until that is decided. What turns out to be none, or to call a tool that the request
has not, stays text; a call that breaks off when its name was shown stays one that is not complete.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.structure.reasoning import ReasoningMarks, ReasoningState
from edgellm.tool_calls.calls import ToolCall, ToolCallDelta, joined_deltas
from edgellm.tool_calls.characters import END, NAME_CHARACTERS, SPACES, Broken, CharacterReader, Characters
from edgellm.tool_calls.formats import ARGUMENT_END, ARGUMENT_TAG, FUNCTION_END, FUNCTION_TAG, ToolFormat
from edgellm.tool_calls.values import is_object, json_text, typed_text


@dataclass
class OpenCall:
    """A call whose name is known: it is shown from then on, its arguments as they come, as pieces of JSON text."""

    name: str
    #: Nine letters and digits, which every template takes.
    id: str = field(
        default_factory=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    )
    pieces: list[str] = field(default_factory=list)
    is_broken: bool = False

    def call(self) -> ToolCall:
        """The call so far, complete if its arguments are whole and nothing went astray before it ended."""
        arguments = "".join(self.pieces)
        return ToolCall(self.id, self.name, arguments, not self.is_broken and is_object(arguments))


class ReadCalls:
    """The calls of an answer as they grow, and their pieces."""

    hides_text = False

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        """`schemas` are those of the arguments of the tools that may be called, by name."""
        self._schemas = schemas
        self._deltas: list[ToolCallDelta] = []
        self._calls: list[OpenCall] = []
        #: Why what began like a call stayed text, or is not complete.
        self.error: str | None = None

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(each.call() for each in self._calls)

    def take_deltas(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of calls since this was last asked for."""
        found, self._deltas = joined_deltas(self._deltas), []
        return found

    def _begin_call(self, name: str) -> OpenCall:
        """A call's name is known: it is shown from now on."""
        call = OpenCall(name)
        self._deltas.append(ToolCallDelta(len(self._calls), call.id, name, ""))
        self._calls.append(call)
        return call

    def _extend_call(self, piece: str) -> None:
        """The latest call's arguments go on."""
        self._calls[-1].pieces.append(piece)
        self._deltas.append(ToolCallDelta(len(self._calls) - 1, None, None, piece))


class ToolReader(CharacterReader, ReadCalls):
    """Reads the calls of one answer. `push` and `finish` return text to show; calls come from `take_deltas`."""

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Mapping[str, Any],
        marks: ReasoningMarks | None = None,
        reasoning: ReasoningState = "closed",
        shown_ids: Iterable[int] = (),
        calls_first: bool = False,
    ) -> None:
        """A model with reasoning `marks` calls nothing while it thinks; `reasoning` is how that stands where the answer
        begins. `shown_ids` are the special tokens whose text it has to see. With `calls_first` an answer that does not
        begin with an enforced call, as its rules write it, has none."""
        CharacterReader.__init__(self)
        ReadCalls.__init__(self, schemas)
        self.shown_ids = frozenset(shown_ids)
        self._format, self._marks, self._reasoning = tool_format, marks, reasoning
        self._text: list[str] = []
        self._open: OpenCall | None = None
        self._held: list[str] = []  # whitespace: in front of a call and behind one it is not text
        self._at_beginning = True  # where a call without a mark may begin
        self._behind_call = False
        self._calls_first = calls_first
        # Qwen3-Coder leaves its mark out now and then.
        begins = (tool_format.begin, FUNCTION_TAG if tool_format.body == "tags" else "")
        self._begins_with = tool_format.openings(schemas) if calls_first else tuple(filter(None, begins))
        self._behind_value = (ARGUMENT_TAG, FUNCTION_END, tool_format.end)
        self._reading = self._read()
        next(self._reading)

    def push(self, token_id: int, text: str) -> str:
        """Add a token's text; return the text to show."""
        if self._marks is not None and self._reasoning != "closed":
            thinks = self._reasoning == "open" or token_id == self._marks.begin
            self._reasoning = "open" if thinks and token_id != self._marks.end else "closed"
            if thinks:
                return text
        self._characters += text
        next(self._reading)
        return self._taken()

    def finish(self) -> str:
        """The answer has ended; return the text that was held back."""
        if self._reasoning != "open":
            self._has_ended = True
            next(self._reading)
        return self._taken()

    def _taken(self) -> str:
        text, self._text = "".join(self._text), []
        return text

    def _show(self, text: str) -> None:
        self._text += [*self._held, text]
        self._held.clear()
        self._at_beginning = self._behind_call = False

    def _read(self) -> Characters:
        """The whole answer: text, and calls in it."""
        while True:
            if self._at == len(self._characters):
                self._characters.clear()
                self._at = 0
            self._start = self._at
            character = yield from self._next()
            if character == END:
                if not self._behind_call:
                    self._text += self._held
                self._held.clear()
                while True:
                    yield
            elif character in SPACES:
                self._held.append(character)
            elif (yield from self._begins(character)):
                yield from self._read_calls()
            else:
                self._show(character)

    def _begins(self, character: str) -> Characters:
        """Whether a call begins with this character, and what follows it as far as a mark goes."""
        may_be_bare = self._at_beginning and character == self._format.bare
        if self._calls_first and (not self._at_beginning or (self._held and not self._behind_call)):
            return False
        while (read := self._raw) not in self._begins_with:
            if not any(each.startswith(read) for each in self._begins_with) or (yield from self._next()) == END:
                self._at = self._start + 1
                return may_be_bare and not self._calls_first
        if may_be_bare:
            self._at = self._start + 1
        return True

    def _read_calls(self) -> Characters:
        """What follows the beginning of a call; what is none is shown as text."""
        readers = {
            "python": self._python_list,
            "tags": self._tagged_call,
            "keyed": self._keyed_call,
            "object": self._object_call,
        }
        try:
            yield from readers.get(self._format.body, self._listed_or_named)()
            yield from self._end_mark()
        except Broken as broken:
            raw, call, self._open, self._at_beginning = self._raw, self._open, None, False
            if call is not None:
                call.is_broken = not self._has_ended
                self.error = self.error if call.call().complete else str(broken)
            elif raw.strip():
                self.error = str(broken)
                self._show(raw)
                return
        else:
            self._at_beginning = True
        self._behind_call = True
        self._held.clear()

    def _end_mark(self) -> Characters:
        """The mark that ends a call; one that is missing where all else is there is let pass."""
        end = self._format.end or (";" if self._format.bare == "{" else "")
        begin, place = self._at, 0
        while place < len(end):
            character = yield from self._next()
            if character == end[place]:
                place += 1
            elif place or character not in SPACES:
                if character != END:  # of an answer that ends here it is no text, either
                    self._at = begin
                return

    def _opened(self, text: str) -> Characters:
        """Read what a call begins with, unless that told that there is one."""
        if self._raw != text:
            yield from self._expect(text)

    def _listed_or_named(self) -> Characters:
        """A list of objects, or as Mistral may write it a name, perhaps marks and an id, and the arguments."""
        character = yield from self._behind_spaces()
        if character == "[":
            while True:
                yield from self._object_call()
                character = yield from self._behind_spaces()
                if character != ",":
                    break
            self._require(character, "]")
            return
        name, character = yield from self._word(character, NAME_CHARACTERS.__contains__)
        marks = 0
        while character not in ("{", END) and marks < 64:
            marks += 1
            character = yield from self._next()
        self._require(character, "{")
        self._name(name)
        yield from self._json_value(character, self._argue)
        self._close_call()

    def _object_call(self) -> Characters:
        yield from self._opened("{")
        held: list[str] = []  # arguments that come before the name
        has_arguments = False
        character = yield from self._behind_spaces()
        while character != "}":
            self._require(character, '"')
            key = yield from self._json_string()
            self._require((yield from self._behind_spaces()), ":")
            character = yield from self._behind_spaces()
            if key == "name":
                self._require(character, '"')
                self._name((yield from self._json_string()))
                self._argue("".join(held))
            elif key in ("arguments", "parameters"):
                if has_arguments:
                    raise Broken("a call has its arguments twice")
                has_arguments = True
                emit = held.append if self._open is None else self._argue
                if character == "{":
                    yield from self._json_value(character, emit)
                elif character == '"':
                    emit((yield from self._json_string()))
                elif (yield from self._json_value(character)) == "null":
                    emit("{}")
                else:
                    raise Broken("a call has arguments that are no object")
            else:
                yield from self._json_value(character)
            character = yield from self._behind_spaces()
            if character == ",":
                character = yield from self._behind_spaces()
                self._require(character, '"')
            else:
                self._require(character, "}")
        if self._open is None:
            raise Broken("a call has no name")
        if not has_arguments:
            self._argue("{}")
        self._close_call()

    def _tagged_call(self) -> Characters:
        yield from self._opened(FUNCTION_TAG)
        name = yield from self._until(">")
        self._name(name)
        schema = self._schemas[name]
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        given = set[str]()
        while True:
            yield from self._expect("<")
            character = yield from self._next()
            if character == "/":
                yield from self._literal(FUNCTION_END[2:])
                break
            self._require(character, ARGUMENT_TAG[1])
            yield from self._literal(ARGUMENT_TAG[2:])
            key = yield from self._until(">")
            self._add_name(key, given)
            value = (yield from self._tagged_value(properties, given)).removeprefix("\n").removesuffix("\n")
            self._argument(key, typed_text(value, properties.get(key), schema))
        self._close_call(lacks_brace=True)

    def _tagged_value(self, names: Collection[str], given: Collection[str]) -> Characters:
        """The text up to the tag that ends it: the one that another tag of the call follows. Where it is missing, the
        text ends where the call does, or before the tag of an argument of these `names` that was not `given`; where
        there are no names, before any such tag that begins a line."""
        begin, start = self._at, -1  # of the text, and of the latest tag in it until that has ended
        while True:
            character = yield from self._within()
            if character == "<":
                start = self._at - 1
            elif character == ">" and start >= 0:
                place, tag, start = start, "".join(self._characters[start : self._at]), -1
                name = tag[len(ARGUMENT_TAG) : -1] if tag.startswith(ARGUMENT_TAG) else ""
                is_at_line = place == begin or self._characters[place - 1] == "\n"
                is_next = name and name not in given and (name in names or (not names and is_at_line))
                if tag != ARGUMENT_END or not (yield from self._followed_by(self._behind_value)):
                    if not is_next and (tag != FUNCTION_END or not (yield from self._followed_by((self._format.end,)))):
                        continue
                    self._at = place
                return "".join(self._characters[begin:place])

    def _keyed_call(self) -> Characters:
        yield from self._expect("call:")
        name, character = yield from self._word((yield from self._next()), NAME_CHARACTERS.__contains__)
        self._require(character, "{")
        self._name(name)
        schema, given = self._schemas[name], set[str]()
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        character = yield from self._behind_spaces()
        while character != "}":
            key = yield from self._keyed_name(character)
            self._add_name(key, given)
            value, character = yield from self._keyed_value(properties.get(key), schema)
            self._argument(key, value)
            if character == ",":
                character = yield from self._behind_spaces()
        self._close_call(lacks_brace=True)

    def _python_list(self) -> Characters:
        """Calls as Python writes them, in a list; a model that is told to may have objects there."""
        yield from self._opened("[")
        while True:
            character = yield from self._behind_spaces()
            if character == "{":
                self._back(character)
                yield from self._object_call()
                character = yield from self._behind_spaces()
            else:
                character = yield from self._python_call(character)
            if character != ",":
                break
        self._require(character, "]")

    def _python_call(self, character: str) -> Characters:
        """A call from this character on, and the `,` or `]` behind it. Any word may be an argument's name."""
        name, character = yield from self._word(character, NAME_CHARACTERS.__contains__)
        self._require(character, "(")
        self._name(name)
        given = set[str]()
        character = yield from self._behind_spaces()
        while character != ")":
            key, character = yield from self._word(character, lambda each: each.isalnum() or each in ("_", "-"))
            self._add_name(key, given)
            self._back(character)
            yield from self._expect("=")
            value, character = yield from self._python_value()
            self._argument(key, value)
            if character == ",":
                character = yield from self._behind_spaces()
        character = yield from self._behind_spaces()
        if character not in (",", "]"):  # the text of its last argument went on
            self._require(character, "]")
        self._close_call(lacks_brace=True)
        return character

    def _add_name(self, name: str, given: set[str]) -> None:
        """Note the name of an argument; refuse one that was given before, and none."""
        if not name or name in given:
            raise Broken(f"a call has the argument {name[:80]!r} twice" if name else "a call has an unnamed argument")
        given.add(name)

    def _name(self, name: str) -> None:
        if name not in self._schemas:
            raise Broken(f"the answer calls the tool {name[:80]!r}, which the request has not")
        if self._open is not None:
            raise Broken("a call has its name twice")
        self._open = self._begin_call(name)

    def _argue(self, piece: str) -> None:
        if self._open is not None and piece:
            self._extend_call(piece)

    def _argument(self, name: str, value: str) -> None:
        """The open call has a further argument, whose value is JSON text."""
        assert self._open is not None
        self._argue(f"{', ' if self._open.pieces else '{'}{json_text(name)}: {value}")

    def _close_call(self, lacks_brace: bool = False) -> None:
        call = self._open
        assert call is not None
        if lacks_brace:
            self._argue("}" if call.pieces else "{}")
        self._open, self._start = None, self._at  # it stays a call, whatever follows
        if not call.call().complete:
            self.error = f"the arguments of the call of {call.name} are no JSON object"
