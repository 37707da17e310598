"""Calls of gpt-oss kept by a grammar: from the header of a message that calls a function on, or of the whole answer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.errors import ConstraintError
from edgellm.structure.reasoning import LateRules
from edgellm.structure.steps import Steps
from edgellm.text.channels import CHANNEL, CONSTRAIN, END, MESSAGE, START
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.harmony import RECIPIENT
from edgellm.tool_calls.rules import MOST_GRAMMAR_BYTES, json_rule, literal

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary


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
    behind = f'({channel} "commentary")? (" "? {constrain}? "json")? {message}'
    return [f"named: {' | '.join(names)}", f"behind: {behind}", *rules]


class _FromHeader(LateRules):
    """Rules that begin where the header of a message names a function: behind "to=functions."."""

    _may_never_begin = True

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str, ids: Mapping[str, int]) -> None:
        super().__init__(vocabulary.size)
        self._vocabulary, self._grammar, self._ids = vocabulary, grammar, ids

    def _advance_freely(self, token: int) -> bool:
        is_known = super()._advance_freely(token)
        if is_known:
            self._rules = self._begun_here()
        return is_known

    def rollback(self, count: int) -> None:
        before = len(self._free)
        super().rollback(count)
        if len(self._free) < before:
            self._rules = None

    def _begun_here(self) -> TokenConstraint | None:
        ids, header = self._ids, []
        for token in reversed(self._free):
            if token in (ids[MESSAGE], ids[END]):
                break
            if token == ids[START]:
                header.append(token)
                break
            header.append(token)
        plain = [token for token in reversed(header) if token not in ids.values()]
        is_header = len(header) == len(self._free) or (header and header[-1] == ids[START])
        if not is_header:
            return None
        tokenizer = self._vocabulary.tokenizer
        found = RECIPIENT.search(tokenizer.decode_bytes(plain).decode("utf-8", "replace"))
        if found is None:
            return None
        rules = self._vocabulary.constraint_for(self._grammar, "the tools")
        with suppress(ConstraintError):
            if all(map(rules.try_advance, tokenizer.tokenize_bytes(found[1].encode()))):
                return rules
        return None
