"""Calls kept by grammars: of a whole answer where a call is required, and from where one begins where it is not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.errors import ConstraintError
from edgellm.structure.description import Structure
from edgellm.structure.reasoning import LateRules
from edgellm.structure.steps import Steps
from edgellm.tool_calls.arguments import KeyedRules, argument_rules, json_rule, literal
from edgellm.tool_calls.calls import ToolChoice
from edgellm.tool_calls.formats import ToolFormat

if TYPE_CHECKING:
    from edgellm.structure.grammar import GrammarVocabulary

#: Of the JSON schemas in the grammar of a request's tools.
MOST_GRAMMAR_BYTES = 2**20
#: A call without a mark begins within so many bytes of an answer, or not at all.
_OPENING_BYTES = 256


def call_constraint(
    tool_format: ToolFormat,
    choice: ToolChoice,
    vocabulary: GrammarVocabulary,
    mark_ids: dict[str, int],
    structure: Structure | None = None,
) -> TokenConstraint:
    """The rules of an answer that calls one of the tools, or may; `mark_ids` are those of the format's marks that are
    one token. An answer that need not call has the `structure` where it does not. Raises RequestError for tools that
    cannot be enforced on this model."""
    special_ids = {mark: token for mark, token in mark_ids.items() if vocabulary.tokenizer.is_special_token(token)}
    grammar = call_grammar(tool_format, choice, special_ids, may_lack_mark=choice.mode == "auto" and structure is None)
    compiled = vocabulary.constraint_for(grammar, "the tools")
    if choice.mode == "required":
        return compiled
    if structure is not None:
        text = vocabulary.constraint_for(structure.grammar_text, structure.name)
        openings = " | ".join(literal(opening, special_ids) for opening in tool_format.openings(choice.schemas))
        begun = f"%llguidance {{}}\nstart: ({openings}) /(?s:.+)/?"
        return CallsOrText(compiled, text, vocabulary.constraint_for(begun, "the tools"))
    names = "|".join(map(re.escape, choice.schemas))
    mark = re.escape(tool_format.begin)
    tags = f"|<function=(?:{names})>" if tool_format.body == "tags" else ""
    before = rf"\A\s*(?:{mark})?\s*"
    # A mark that is not always there is no part of the grammar.
    openings_by_bare = {
        "{": rf'{before}(\{{\s*"name"\s*:\s*"(?:{names})"\s*,\s*"parameters"\s*:\s*)',
        "[": rf"{before}(\[(?:{names})\()",
        "": f"({mark if tool_format.begin not in special_ids else '(?!)'}{tags})",
    }
    mark_id = None if tool_format.bare else special_ids.get(tool_format.begin)
    opening = re.compile(openings_by_bare[tool_format.bare].encode())
    return FromCall(vocabulary, grammar, opening, mark_id)


def call_grammar(
    tool_format: ToolFormat, choice: ToolChoice, special_ids: Mapping[str, int], may_lack_mark: bool = False
) -> str:
    """The grammar of an answer's calls, in llguidance's form of Lark; tags may stand without the mark before them."""
    rules, alternatives, size = [], [], Steps("the grammar of the tools", MOST_GRAMMAR_BYTES)
    for number, (name, schema) in enumerate(choice.schemas.items()):
        head, tail = (literal(text, special_ids) for text in tool_format.around(name))
        alternatives.append(f"call_{number}")
        rules.append(f"call_{number}: {head} args_{number} {tail}")
        if tool_format.body in ("tags", "python"):
            rules += argument_rules(tool_format, number, name, schema, size)
        elif tool_format.body == "keyed":
            rules += KeyedRules(number, name, schema, special_ids, size).rules
        else:
            rules.append(f"args_{number}: {json_rule(schema, {}, size)}")
    rules.append(f"call: {' | '.join(alternatives)}")
    before, begin, separator, end, behind = (literal(text, special_ids) for text in tool_format.frame)
    if may_lack_mark and tool_format.body == "tags":
        begin = f"({begin})?"
    one = f"{begin} call {end}"
    more = f"({separator} {one})*" if choice.parallel else ""
    return "\n".join(["%llguidance {}", f"start: {before} {one} {more} {behind}", *rules])


class RulesOfCall(LateRules):
    """Rules that begin where an answer begins a call, with the tokens that began it, or what of them belongs to it;
    where the rules do not take these, the call is no concern of theirs."""

    _may_never_begin = True

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        super().__init__(vocabulary.size)
        self._vocabulary, self._grammar, self._tokenizer = vocabulary, grammar, vocabulary.tokenizer

    def _began(self, token: int) -> Sequence[int] | None:
        """The first tokens of a call, where one begins with this token, the latest of the free ones."""
        raise NotImplementedError

    def _advance_freely(self, token: int) -> bool:
        is_known = super()._advance_freely(token)
        first = self._began(token) if is_known else None
        if first is not None:
            rules = self._vocabulary.constraint_for(self._grammar, "the tools")
            with suppress(ConstraintError):
                self._rules = rules if all(map(rules.try_advance, first)) else None
        return is_known

    def rollback(self, count: int) -> None:
        before = len(self._free)
        super().rollback(count)
        if len(self._free) < before:
            self._rules = None


class FromCall(RulesOfCall):
    """Rules that begin with the first group of `opening`, and with the token `mark_id`."""

    def __init__(
        self, vocabulary: GrammarVocabulary, grammar: str, opening: re.Pattern[bytes], mark_id: int | None
    ) -> None:
        super().__init__(vocabulary, grammar)
        self._opening, self._mark_id = opening, mark_id
        self._text = bytearray()  # of the free tokens

    def _began(self, token: int) -> Sequence[int] | None:
        begin = len(self._text)
        self._text += self._tokenizer.decode_bytes([token])
        if token == self._mark_id:
            return [token]
        found = self._opening.finditer(self._text, max(0, begin - _OPENING_BYTES))
        start = next((each.start(1) for each in found if each.end() > begin), None)
        return None if start is None else self._tokenizer.tokenize_bytes(bytes(self._text[start:]))

    def rollback(self, count: int) -> None:
        taken_back = self._free[len(self._free) - max(0, count - self._ruled) :]
        super().rollback(count)
        del self._text[len(self._text) - len(self._tokenizer.decode_bytes(taken_back)) :]


class CallsOrText(TokenConstraint):
    """Rules of an answer that is calls, or text of a structure; what begins as a call does is one."""

    def __init__(self, calls: TokenConstraint, text: TokenConstraint, opening: TokenConstraint) -> None:
        """`opening` takes each text that begins as a call does, and is complete from there on."""
        self._rules = (calls, text, opening)
        self._taken = [0, 0, 0]  # tokens, by each of them: it is followed while it has taken all
        self._count = 0

    def _followed(self, number: int) -> bool:
        return self._taken[number] == self._count

    @property
    def _answers(self) -> list[TokenConstraint]:
        """What may still be followed: the calls, the text, or both."""
        return [self._rules[number] for number in (0, 1) if self._followed(number)]

    def fill_mask(self, row: np.ndarray) -> None:
        first, *second = self._answers
        first.fill_mask(row)
        if second:
            text, opening = np.empty_like(row), np.empty_like(row)
            second[0].fill_mask(text)
            self._rules[2].fill_mask(opening)
            words = row.view(np.uint32)
            words |= text.view(np.uint32) & ~opening.view(np.uint32)

    def try_advance(self, token: int) -> bool:
        calls, text, opening = self._rules
        is_open = self._followed(0) and self._followed(1)
        took = [
            self._followed(0) and calls.try_advance(token),
            self._followed(1) and text.try_advance(token),
            is_open and opening.try_advance(token),
        ]
        if took[1] and took[2] and opening.is_complete():
            text.rollback(1)
            took[1] = False
        if not any(took[:2]):
            if took[2]:
                opening.rollback(1)
            return False
        self._count += 1
        self._taken = [self._count if each else taken for each, taken in zip(took, self._taken, strict=True)]
        return True

    def rollback(self, count: int) -> None:
        self._count -= count
        for number, rules in enumerate(self._rules):
            if self._taken[number] > self._count:
                rules.rollback(self._taken[number] - self._count)
                self._taken[number] = self._count

    def forced(self, most: int) -> list[int]:
        answers = self._answers
        return answers[0].forced(most) if len(answers) == 1 else []

    def is_free(self) -> bool:
        """Each token is allowed by the one or the other."""
        return False

    def is_complete(self) -> bool:
        return any(each.is_complete() for each in self._answers)

    def is_stopped(self) -> bool:
        return all(each.is_stopped() for each in self._answers)
