"""Answers of gpt-oss, which are messages in channels, "harmony" (https://github.com/openai/harmony): what the model
thinks, what it says, and calls of functions, each behind a header.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.errors import shown
from edgellm.structure.reasoning import CALL, CHANNEL, CHANNEL_MARKS, CONSTRAIN, END, MESSAGE, ROLE, START
from edgellm.structure.steps import Steps
from edgellm.tool_calls.arguments import json_rule, literal
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.reader import ReadCalls
from edgellm.tool_calls.rules import MOST_GRAMMAR_BYTES, RulesOfCall

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

_MARK = re.compile("|".join(map(re.escape, (START, END, CALL))))
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w*)")
#: How a header names the function that it calls.
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_-]*)")
#: What headers begin with; any other beginning of an answer is text without a header.
_BEGINNINGS = (CHANNEL, MESSAGE, START, "to=", ROLE)
#: A header names the function that it calls within so many tokens.
_LONGEST_HEADER = 64


class HarmonyReader(ReadCalls):
    """Reads one answer: `push` and `finish` return what the model says, `thoughts` are pieces of what it thinks, and
    calls come from `take_deltas`. See `edgellm.tool_calls.reader.ToolReader`."""

    hides_text = True

    def __init__(self, schemas: Mapping[str, Any], ids: Mapping[str, int], in_text: bool = False) -> None:
        """With `in_text` the answer goes on with what the model says."""
        super().__init__(schemas)
        self.shown_ids = frozenset(ids.values())
        self.thoughts: list[str] = []
        #: Of each token whether it is of what is said.
        self.said: list[bool] = []
        self.thinking_tokens = 0
        self._buffer = ""
        self._kind = "said" if in_text else "header"

    def push(self, token_id: int, text: str) -> str:
        self._buffer += text
        before = self._kind
        taken = self._take(ends=False)
        if token_id >= 0:
            is_mark = token_id in self.shown_ids
            self.said.append(self._kind == "said" and not is_mark)
            self.thinking_tokens += "thought" in (before, self._kind)
        return taken

    def finish(self) -> str:
        return self._take(ends=True)

    def _take(self, ends: bool) -> str:
        """What is certain of the buffer, by its kind, as far as it goes."""
        said: list[str] = []
        while self._kind != "header" or self._read_header(ends):
            found = _MARK.search(self._buffer)
            stop = found.start() if found else len(self._buffer) if ends else _certain(self._buffer)
            body, self._buffer = self._buffer[:stop], self._buffer[stop:]
            self._add(body, said)
            if found is None:
                break
            self._kind = "header"
            self._buffer = self._buffer.removeprefix(END).removeprefix(CALL)
        return "".join(said)

    def _read_header(self, ends: bool) -> bool:
        """Read a header, if it is there: the kind of its message is known then."""
        header, message, rest = self._buffer.partition(MESSAGE)
        text = self._buffer.lstrip()
        begins = any(text.startswith(each) or each.startswith(text) for each in _BEGINNINGS)
        is_cut = ends and not message and text and CHANNEL not in text and START not in text
        if not begins or is_cut:
            self._kind = "said"
            return True
        if not message:
            return False
        self._buffer = rest
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        self._kind = "thought" if channel is not None and channel[1] == "analysis" else "said"
        if recipient is not None and recipient[1] in self._schemas:
            self._kind = "call"
            self._begin_call(recipient[1])
        elif "to=" in header:
            self.error = f"a call has the header {shown(header)}, which names no tool of the request"
        return True

    def _add(self, body: str, said: list[str]) -> None:
        if not body:
            return
        if self._kind == "thought":
            self.thoughts.append(body)
        elif self._kind == "said":
            said.append(body)
        else:
            self._extend_call(body)


def _certain(text: str) -> int:
    """How many characters of a text are not the beginning of a mark."""
    start = text.rfind("<")
    return start if start >= 0 and any(mark.startswith(text[start:]) for mark in CHANNEL_MARKS) else len(text)


def harmony_constraint(choice: ToolChoice, vocabulary: GrammarVocabulary, ids: Mapping[str, int]) -> TokenConstraint:
    """The rules of an answer that calls one of the tools, behind what it may think, or may call one."""
    calls = _grammar(choice, ids)
    if choice.mode != "required":
        return _FromHeader(vocabulary, "\n".join(["%llguidance {}", "start: named", *calls]), ids)
    thinks = literal(f"{CHANNEL}analysis{MESSAGE}", ids) + " /(?s:.*)/ " + literal(f"{END}{START}assistant", ids)
    called = literal(f"{CHANNEL}commentary to=functions.", ids)
    whole = ["%llguidance {}", f"start: ({thinks})? {called} named", *calls]
    return vocabulary.constraint_for("\n".join(whole), "the tools")


def _grammar(choice: ToolChoice, ids: Mapping[str, int]) -> list[str]:
    """The rules of what follows "to=functions.": a name, what else a header may say, and the arguments."""
    size, rules, names = Steps("the grammar of the tools", MOST_GRAMMAR_BYTES), [], []
    for number, (name, schema) in enumerate(choice.schemas.items()):
        names.append(f"call_{number}")
        rules += [f"call_{number}: {literal(name, ids)} behind args_{number}"]
        rules.append(f"args_{number}: {json_rule(schema, {}, size)}")
    channel, constrain, message = (literal(mark, ids) for mark in (CHANNEL, CONSTRAIN, MESSAGE))
    behind = f'({channel} "commentary")? (" "? {constrain} "json" | " json")? {message}'  # apart from the name
    return [f"named: {' | '.join(names)}", f"behind: {behind}", *rules]


class _FromHeader(RulesOfCall):
    """Rules that begin where the header of a message names a function: behind "to=functions."."""

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str, ids: Mapping[str, int]) -> None:
        super().__init__(vocabulary, grammar)
        self._ids = ids

    def _began(self, token: int) -> Sequence[int] | None:
        ids, header = self._ids, []
        for each in reversed(self._free[-_LONGEST_HEADER:]):
            if each in (ids[MESSAGE], ids[END]):
                break
            header.append(each)
            if each == ids[START]:
                break
        if len(header) < len(self._free) and (not header or header[-1] != ids[START]):
            return None
        plain = [each for each in reversed(header) if each not in ids.values()]
        found = _RECIPIENT.search(self._tokenizer.decode_bytes(plain).decode("utf-8", "replace"))
        return None if found is None else self._tokenizer.tokenize_bytes(found[1].encode())
