"""Models that think before they answer, by marks around their reasoning or in channels (see
`edgellm.tool_calls.harmony`), and rules that begin where the reasoning ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from edgellm.engines.speculation.constraints import TokenConstraint, packed_mask
from edgellm.text.tokenizer import Tokenizer

START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL = (
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call")
)
CHANNEL_MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL)
#: Who writes an answer, and the channel of what is said.
ROLE, FINAL = "assistant", "final"


def harmony_ids(tokenizer: Tokenizer) -> dict[str, int] | None:
    """The tokens of `CHANNEL_MARKS`; None for a model that has not all of them."""
    found = {mark: tokenizer.token_to_id(mark) for mark in CHANNEL_MARKS}
    ids = {mark: token for mark, token in found.items() if token is not None}
    return ids if len(ids) == len(CHANNEL_MARKS) else None


def begins_message(tokenizer: Tokenizer, ids: Mapping[str, int], prompt_ids: Sequence[int]) -> bool:
    """Whether a prompt ends where the model writes the header of a message."""
    last = next((place for place in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[place] in ids.values()), None)
    if last is None or prompt_ids[last] != ids[START]:
        return False
    return tokenizer.decode(prompt_ids[last + 1 :]).strip() == ROLE


#: How Gemma 4 begins its reasoning, and goes on behind that.
_CHANNEL, _CHANNEL_NAME = "<|channel>", "thought"
#: What models write around their reasoning. A model has the marks that are one token each in its vocabulary.
MARKS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"), (_CHANNEL, "<channel|>"))

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
    tokenizer: Tokenizer, marks: ReasoningMarks | None, prompt_ids: Sequence[int], continued: str | None = None
) -> ReasoningState:
    """How reasoning stands behind a prompt: open or closed where nothing but whitespace, or Gemma 4's name of it,
    follows a mark at its end, and closed for a model without `marks`. Of a message that the model goes on with,
    `continued`, its last mark decides, wherever that is."""
    if marks is None:
        return "closed"
    if continued is not None:
        begin, end = (continued.rfind(tokenizer.id_to_token(mark) or "\0") for mark in marks)
        if begin != end:
            return "open" if begin > end else "closed"
    last = next((place for place in range(len(prompt_ids) - 1, -1, -1) if prompt_ids[place] in marks), None)
    behind = "" if last is None else tokenizer.decode(prompt_ids[last + 1 :], skip_special_tokens=False).strip()
    if last is None or behind not in ("", _CHANNEL_NAME):
        return "undecided"
    return "open" if prompt_ids[last] == marks.begin else "closed"


def channel_name(
    tokenizer: Tokenizer, marks: ReasoningMarks | None, prompt_ids: Sequence[int], state: ReasoningState
) -> str:
    """What an answer has at the beginning of its reasoning that is no part of it: the name that Gemma 4 gives its
    channel, and the end of the line, where the prompt does not have them already; nothing of other models."""
    if marks is None or tokenizer.id_to_token(marks.begin) != _CHANNEL:
        return ""
    is_to_come = state == "undecided" or (state == "open" and prompt_ids[-1] == marks.begin)
    return f"{_CHANNEL_NAME}\n" if is_to_come else ""


class LateRules(TokenConstraint):
    """Rules that begin somewhere in an answer: until then each token is allowed."""

    #: Whether the answer may end before they begin.
    _may_never_begin = False

    def __init__(self, vocab_size: int, rules: TokenConstraint | None = None) -> None:
        """`rules` may be made later, where they begin."""
        self._vocab_size, self._rules = vocab_size, rules
        self._everything = packed_mask(np.ones(vocab_size, np.bool_))
        self._free: list[int] = []  # tokens before the rules
        self._ruled = 0  # tokens that the rules have consumed

    @property
    def _begun(self) -> TokenConstraint | None:
        return self._rules

    def _advance_freely(self, token: int) -> bool:
        if not 0 <= token < self._vocab_size:
            return False
        self._free.append(token)
        return True

    def fill_mask(self, row: np.ndarray) -> None:
        if (rules := self._begun) is None:
            row.view(np.uint32)[:] = self._everything
        else:
            rules.fill_mask(row)

    def try_advance(self, token: int) -> bool:
        if (rules := self._begun) is None:
            return self._advance_freely(token)
        consumed = rules.try_advance(token)
        self._ruled += consumed
        return consumed

    def rollback(self, count: int) -> None:
        ruled = min(count, self._ruled)
        if ruled and self._rules is not None:
            self._rules.rollback(ruled)
            self._ruled -= ruled
        del self._free[len(self._free) - (count - ruled) :]

    def forced(self, most: int) -> list[int]:
        return [] if (rules := self._begun) is None else rules.forced(most)

    def is_free(self) -> bool:
        return (rules := self._begun) is None or rules.is_free()

    def is_complete(self) -> bool:
        return self._may_never_begin if (rules := self._begun) is None else rules.is_complete()

    def is_stopped(self) -> bool:
        return (rules := self._begun) is not None and rules.is_stopped()


class AfterReasoning(LateRules):
    """Rules that begin behind a mark. Where the model is undecided whether to think (`begin` is a token), its first
    token may be that, or the first one of the rules."""

    def __init__(
        self, rules: TokenConstraint, end: Sequence[int], vocab_size: int, begin: int | None = None, between: int = 0
    ) -> None:
        """`end` are the tokens, one or several, that end the reasoning, up to so many others `between` the last and
        those before it. Without `begin` it is under way."""
        super().__init__(vocab_size, rules)
        self._begin, self._end, self._between = begin, list(end), between

    @property
    def answer_start(self) -> int | None:
        """How many tokens came before the rules; None while the model thinks."""
        return None if self._begun is None else len(self._free)

    @property
    def _begun(self) -> TokenConstraint | None:
        thinks = not self._ruled and not self._is_undecided and not self._has_ended
        return None if thinks else self._rules

    @property
    def _has_ended(self) -> bool:
        *first, last = self._end
        behind = len(self._free) - 1 - len(first)  # where the first tokens stand, if none are between
        places = range(max(0, behind - self._between), behind + 1)
        return self._free[-1:] == [last] and any(self._free[at : at + len(first)] == first for at in places)

    @property
    def _is_undecided(self) -> bool:
        return self._begin is not None and not self._free and not self._ruled

    def fill_mask(self, row: np.ndarray) -> None:
        super().fill_mask(row)
        if self._begin is not None and self._is_undecided:
            row.view(np.uint32)[self._begin >> 5] |= np.uint32(1 << (self._begin & 31))

    def try_advance(self, token: int) -> bool:
        begins = self._is_undecided and token == self._begin
        return self._advance_freely(token) if begins else super().try_advance(token)

    def forced(self, most: int) -> list[int]:
        return [] if self._is_undecided else super().forced(most)

    def is_stopped(self) -> bool:
        return not self._is_undecided and super().is_stopped()
