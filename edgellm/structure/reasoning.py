"""Models that think before they answer: a grammar that begins where the reasoning ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint, packed_mask
from edgellm.text.tokenizer import Tokenizer

#: What models write around their reasoning. A model has the marks that are one token each in its vocabulary.
MARKS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))

#: Of reasoning, where an answer begins: it is under way, is over, or the model may still open it.
ReasoningState = Literal["open", "closed", "undecided"]


class ReasoningMarks(NamedTuple):
    """The tokens that begin and end a model's reasoning."""

    begin: int
    end: int


def reasoning_marks(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """The marks of a model that may think; None where its vocabulary has none."""
    for texts in MARKS:
        begin, end = map(tokenizer.token_to_id, texts)
        if begin is not None and end is not None:
            return ReasoningMarks(begin, end)
    return None


def reasoning_state(
    tokenizer: Tokenizer, marks: ReasoningMarks, prompt_ids: Sequence[int], continued: str | None = None
) -> ReasoningState:
    """How reasoning stands behind a prompt: open or closed where nothing but whitespace follows a mark at its end.

    Of a message that the model goes on with, `continued`, its last mark decides, wherever that is.
    """
    if continued is not None:
        begin, end = (continued.rfind(tokenizer.id_to_token(mark) or "\0") for mark in marks)
        if begin != end:
            return "open" if begin > end else "closed"
    last = next((place for place in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[place] in marks), None)
    if last is None or tokenizer.decode(prompt_ids[last + 1 :], skip_special_tokens=False).strip():
        return "undecided"
    return "open" if prompt_ids[last] == marks.begin else "closed"


class AfterReasoning:
    """Rules that begin behind a mark: see `edgellm.engines.speculation.constraints.TokenConstraint`.

    While the model thinks each token is allowed. Where it is undecided (`begin` is a token), its first token may be
    that, or the first one of the rules.
    """

    def __init__(self, rules: TokenConstraint, end: Sequence[int], vocab_size: int, begin: int | None = None) -> None:
        """`end` are the tokens, one or several, that end the reasoning. Without `begin` it is under way."""
        self._rules, self._begin, self._end = rules, begin, list(end)
        self._everything = packed_mask(np.ones(vocab_size, np.bool_))
        self._vocab_size = vocab_size
        self._reasoning: list[int] = []
        self._answered = 0  # tokens that the rules have consumed

    @property
    def answer_start(self) -> int | None:
        """How many tokens came before the rules; None while the model thinks."""
        return None if self._thinks else len(self._reasoning)

    @property
    def _thinks(self) -> bool:
        if self._answered:
            return False
        began = self._begin is None or bool(self._reasoning)
        return began and self._reasoning[-len(self._end) :] != self._end

    @property
    def _is_undecided(self) -> bool:
        return self._begin is not None and not self._reasoning and not self._answered

    def fill_mask(self, row: np.ndarray) -> None:
        if self._thinks:
            row.view(np.uint32)[:] = self._everything
            return
        self._rules.fill_mask(row)
        if self._begin is not None and self._is_undecided:
            row.view(np.uint32)[self._begin >> 5] |= np.uint32(1 << (self._begin & 31))

    def try_advance(self, token: int) -> bool:
        if self._thinks or (self._is_undecided and token == self._begin):
            if not 0 <= token < self._vocab_size:
                return False
            self._reasoning.append(token)
            return True
        consumed = self._rules.try_advance(token)
        self._answered += consumed
        return consumed

    def rollback(self, count: int) -> None:
        answered = min(count, self._answered)
        if answered:
            self._rules.rollback(answered)
            self._answered -= answered
        del self._reasoning[len(self._reasoning) - (count - answered) :]

    def forced(self, most: int) -> list[int]:
        return [] if self._thinks or self._is_undecided else self._rules.forced(most)

    def is_free(self) -> bool:
        return self._thinks or self._rules.is_free()

    def is_complete(self) -> bool:
        return not self._thinks and self._rules.is_complete()

    def is_stopped(self) -> bool:
        return not self._thinks and not self._is_undecided and self._rules.is_stopped()
