"""Calls of gpt-oss kept by a grammar: from the header of a message that calls a function on, or of the whole answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.structure.steps import Steps
from edgellm.text.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.harmony import RECIPIENT
from edgellm.tool_calls.rules import MOST_GRAMMAR_BYTES, RulesOfCall, json_rule, literal

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

#: A header names the function that it calls within so many tokens.
_LONGEST_HEADER = 64


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
        found = RECIPIENT.search(self._tokenizer.decode_bytes(plain).decode("utf-8", "replace"))
        return None if found is None else self._tokenizer.tokenize_bytes(found[1].encode())
