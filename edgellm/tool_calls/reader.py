"""Calls read from an answer as it grows: text goes in, in pieces of any size, text and calls come out.

Calls are read character by character, so that it makes no difference where the pieces are cut. What may be the
beginning of a call is held back until that is decided. What turns out to be none, or to call a tool that the request
has not, stays text; a call that breaks off when its name was shown stays one that is not complete.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from edgellm.structure.reasoning import ReasoningMarks, ReasoningState
from edgellm.tool_calls.calls import ToolCall, ToolCallDelta, joined_deltas
from edgellm.tool_calls.characters import END, NAME_CHARACTERS, SPACES, Broken, CharacterReader, Characters
from edgellm.tool_calls.formats import ToolFormat
from edgellm.tool_calls.values import is_object, json_text, typed_text

#: So many letters and digits, which every template takes.
_ID_LENGTH = 9
_ID_CHARACTERS = string.ascii_letters + string.digits
#: The end of a value between tags, and what follows it: within a text the first may stand for itself.
_VALUE_END = "</parameter>"
_FUNCTION, _ARGUMENT, _CALL_END, _END = "<function=", "<parameter=", "</function>", "</tool_call>"
_BEHIND_VALUE = (_ARGUMENT, _CALL_END, _END)


class _OpenCall:
    """A call that is being read: `name` is None until it is known, `arguments` are shown from then on."""

    def __init__(self) -> None:
        self.id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
        self.name: str | None = None
        self.pieces: list[str] = []
        self.index = -1
        self.is_broken = False

    @property
    def arguments(self) -> str:
        """The arguments so far, JSON text."""
        return "".join(self.pieces)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are whole, and nothing went astray before the call ended."""
        return not self.is_broken and is_object(self.arguments)


class ToolReader(CharacterReader):
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
        """`schemas` are those of the tools' arguments, by name. A model with reasoning `marks` calls nothing while it
        thinks; `reasoning` is how that stands where the answer begins. `shown_ids` are the special tokens whose text it
        has to see. With `calls_first` an answer that does not begin with an enforced call, as its rules write it, has
        none."""
        super().__init__()
        self.shown_ids = frozenset(shown_ids)
        self._format, self._schemas, self._marks = tool_format, schemas, marks
        self._thinks, self._may_think = reasoning == "open", reasoning == "undecided"
        self._deltas: list[ToolCallDelta] = []
        self._text: list[str] = []
        self._calls: list[_OpenCall] = []
        self._open: _OpenCall | None = None
        #: Why what began like a call stayed text, or is not complete.
        self.error: str | None = None
        self._held: list[str] = []  # whitespace: in front of a call and behind one it is not text
        self._at_beginning = True  # where a call without a mark may begin
        self._behind_call = False
        self._is_between = True  # in text, with nothing held back
        self._calls_first = calls_first
        # Qwen3-Coder leaves its mark out now and then.
        begins = (tool_format.begin, _FUNCTION if tool_format.body == "tags" else "")
        self._begins_with = tool_format.openings(schemas) if calls_first else tuple(filter(None, begins))
        self._firsts = frozenset(each[0] for each in self._begins_with)
        self._reading = self._read()
        next(self._reading)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far."""
        return tuple(ToolCall(each.id, each.name or "", each.arguments, each.is_complete) for each in self._calls)

    def push(self, token_id: int, text: str) -> str:
        """Add a token's text; return the text to show."""
        if self._marks is not None and (self._thinks or self._may_think):
            began, self._may_think = self._may_think and token_id == self._marks.begin, False
            if began or self._thinks:
                self._thinks = token_id != self._marks.end
                return text
        return self._add(text)

    def finish(self) -> str:
        """The answer has ended; return the text that was held back."""
        if not self._thinks:
            self._has_ended = True
            self._reading.send(END)
        return self._taken()

    def take_deltas(self) -> tuple[ToolCallDelta, ...]:
        """The pieces of calls since this was last asked for."""
        found, self._deltas = joined_deltas(self._deltas), []
        return found

    def _add(self, text: str) -> str:
        if self._is_between and not (self._at_beginning and self._format.bare):
            start = next((place for place, each in enumerate(text) if each in self._firsts), len(text))
            start = len(text[:start].rstrip(" \t\r\n"))
            if start:
                self._show(text[:start])
                text = text[start:]
        for character in text:
            self._reading.send(character)
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
            self._raw.clear()
            self._is_between = not self._held and not self._again
            character = yield from self._next()
            self._is_between = False
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
        while (read := "".join(self._raw)) not in self._begins_with:
            if not any(each.startswith(read) for each in self._begins_with) or (yield from self._next()) == END:
                self._reread(self._raw[1:])
                return may_be_bare and not self._calls_first
        if may_be_bare:
            self._reread(self._raw[1:])
        return True

    def _read_calls(self) -> Characters:
        """What follows the beginning of a call; what is none is shown as text."""
        body = self._format.body
        try:
            if body == "python":
                yield from self._python_list()
            elif body == "tags":
                yield from self._tagged_call()
            elif body == "object":
                if self._raw != ["{"]:
                    yield from self._expect("{")
                yield from self._object_call()
            else:
                yield from self._listed_or_named()
            yield from self._end_mark()
        except Broken as broken:
            raw, call, self._open, self._at_beginning = "".join(self._raw), self._open, None, False
            if call is not None and call.name is not None:
                call.is_broken = not self._has_ended
                self.error = self.error if call.is_complete else str(broken)
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
        passed: list[str] = []
        place = 0
        while place < len(end):
            character = yield from self._next()
            passed.append(character)
            if character == end[place]:
                place += 1
            elif place or character not in SPACES:
                if character != END:  # of an answer that ends here it is no text, either
                    self._reread(passed)
                return

    def _listed_or_named(self) -> Characters:
        """Of Mistral's two forms: a list of objects, or a name, perhaps marks and an id, and the arguments."""
        character = yield from self._behind_spaces()
        if character == "[":
            while True:
                yield from self._expect("{")
                yield from self._object_call()
                character = yield from self._behind_spaces()
                if character != ",":
                    break
            self._require(character, "]")
            return
        self._begin_call()
        name: list[str] = []
        while character in NAME_CHARACTERS:
            name.append(character)
            character = yield from self._next()
        marks = ""
        while character not in ("{", END) and len(marks) < 64:
            marks += character
            character = yield from self._next()
        self._require(character, "{")
        self._name("".join(name))
        yield from self._json_value(character, self._argue)
        self._close_call()

    def _object_call(self) -> Characters:
        """A call as an object, behind its brace."""
        self._begin_call()
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
                emit = held.append if self._open is None or self._open.name is None else self._argue
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
            elif character != "}":
                self._require(character, "}")
        if self._open is None or self._open.name is None:
            raise Broken("a call has no name")
        if not has_arguments:
            self._argue("{}")
        self._close_call()

    def _tagged_call(self) -> Characters:
        """A call as tags, each value as text by itself."""
        if self._raw != [*_FUNCTION]:
            yield from self._expect("<")
            yield from self._literal(_FUNCTION[1:])
        self._begin_call()
        name = yield from self._until(">")
        self._name(name)
        schema = self._schemas[name]
        properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        separator, given = "{", set[str]()
        while True:
            yield from self._expect("<")
            character = yield from self._next()
            if character == "/":
                yield from self._literal("function>")
                break
            self._require(character, "p")
            yield from self._literal("arameter=")
            key = yield from self._until(">")
            self._add_name(key, given)
            value = (yield from self._tagged_value(properties, given)).removeprefix("\n").removesuffix("\n")
            self._argue(f"{separator}{json_text(key)}: {typed_text(value, properties.get(key), schema)}")
            separator = ", "
        self._argue("{}" if separator == "{" else "}")
        self._close_call()

    def _tagged_value(self, names: Collection[str], given: Collection[str]) -> Characters:
        """The text up to the tag that ends it: the one that another tag of the call follows. Where it is missing, the
        text ends where the call does, or before the tag of an argument of these `names` that was not `given`; where
        there are no names, before any such tag that begins a line."""
        found: list[str] = []
        start: int | None = None  # of the latest tag, until it has ended
        while True:
            character = yield from self._next()
            self._refuse_end(character)
            if character == "<":
                start = len(found)
            found.append(character)
            if character != ">" or start is None:
                continue
            tag, begin, start = "".join(found[start:]), start, None
            if tag == _VALUE_END and (yield from self._followed_by(_BEHIND_VALUE)):
                return "".join(found[:begin])
            name = tag[len(_ARGUMENT) : -1] if tag.startswith(_ARGUMENT) else ""
            is_known = name in names or (not names and (begin == 0 or found[begin - 1] == "\n"))
            is_next = bool(name) and name not in given and is_known
            if is_next or (tag == _CALL_END and (yield from self._followed_by((_END,)))):
                self._reread(tag)
                return "".join(found[:begin])

    def _python_list(self) -> Characters:
        """Calls as Python writes them, in a list; a model that is told to may have objects there."""
        if self._raw != ["["]:
            yield from self._expect("[")
        while True:
            character = yield from self._behind_spaces()
            if character == "{":
                yield from self._object_call()
                character = yield from self._behind_spaces()
            else:
                character = yield from self._python_call(character)
            if character != ",":
                break
        self._require(character, "]")

    def _python_call(self, character: str) -> Characters:
        """A call that begins with this character, and the `,` or `]` behind it. Each argument is shown when it is
        whole; any word may be its name."""
        self._begin_call()
        name: list[str] = []
        while character in NAME_CHARACTERS:
            name.append(character)
            character = yield from self._next()
        self._require(character, "(")
        self._name("".join(name))
        separator, given = "{", set[str]()
        character = yield from self._behind_spaces()
        while character != ")":
            key = ""
            while character.isalnum() or character in ("_", "-"):
                key += character
                character = yield from self._next()
            self._add_name(key, given)
            self._back(character)
            yield from self._expect("=")
            value, character = yield from self._python_value()
            self._argue(f"{separator}{json_text(key)}: {value}")
            separator = ", "
            if character == ",":
                character = yield from self._behind_spaces()
        character = yield from self._behind_spaces()
        if character not in (",", "]"):  # the text of its last argument went on
            self._require(character, "]")
        self._argue("{}" if separator == "{" else "}")
        self._close_call()
        return character

    def _add_name(self, name: str, given: set[str]) -> None:
        """Note the name of an argument; refuse one that was given before, and none."""
        if not name or name in given:
            raise Broken(f"a call has the argument {name[:80]!r} twice" if name else "a call has an unnamed argument")
        given.add(name)

    def _begin_call(self) -> None:
        self._open = _OpenCall()

    def _name(self, name: str) -> None:
        """The open call's name is known: it is shown from now on."""
        if name not in self._schemas:
            raise Broken(f"the answer calls the tool {name[:80]!r}, which the request has not")
        call = self._open
        if call is None or call.name is not None:
            raise Broken("a call has its name twice")
        call.name, call.index = name, len(self._calls)
        self._calls.append(call)
        self._deltas.append(ToolCallDelta(call.index, call.id, name, ""))

    def _argue(self, piece: str) -> None:
        if self._open is not None and piece:
            self._open.pieces.append(piece)
            self._deltas.append(ToolCallDelta(self._open.index, None, None, piece))

    def _close_call(self) -> None:
        call, self._open = self._open, None
        if call is not None:
            self._raw.clear()  # it stays a call, whatever follows
            if not call.is_complete:
                self.error = f"the arguments of the call of {call.name} are no JSON object"
