"""What a request asks of its tokens, made ready for one model: the rules that its answer is decoded under."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engines.speculation.constraints import (
    AllConstraints,
    AllowedTokens,
    BadWords,
    LateEnd,
    TokenConstraint,
    mask_words,
)
from edgellm.errors import RequestError
from edgellm.structure.reasoning import (
    CHANNEL,
    FINAL,
    MESSAGE,
    AfterReasoning,
    begins_message,
    harmony_ids,
    reasoning_marks,
    reasoning_state,
)
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.sampling_params import SamplingParams
    from edgellm.structure.grammar import GrammarVocabulary

#: Tokens of a form that gpt-oss may name in the header of what it says, as in "final <|constrain|>json".
_MOST_BETWEEN = 20


@dataclass(frozen=True, eq=False)
class AnswerRules:
    """The rules of one answer: runners take `constraint`; `after_reasoning` is the part of a model that may think."""

    constraint: TokenConstraint
    tokenizer: Tokenizer
    vocab_size: int
    after_reasoning: AfterReasoning | None = None

    def check_way_on(self) -> None:
        """Raise the ConstraintError that says why no token may come next, where none may."""
        self.constraint.fill_mask(np.empty(mask_words(self.vocab_size), np.uint32))

    def structured_from(self, token_ids: Sequence[int]) -> int | None:
        """Where in the answer's text its structure begins; None where reasoning has not ended. `token_ids` are those of
        the answer; the constraint may have consumed more, of a round that a stop string cut."""
        start = 0 if self.after_reasoning is None else self.after_reasoning.answer_start
        if start is None or start > len(token_ids):
            return None
        return start and len(self.tokenizer.decode(token_ids[:start]))


class RuleMaker:
    """Makes the rules of requests to one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the engine's logits; `eos_token_ids` are the engine's, too."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._vocabulary: GrammarVocabulary | None = None
        self._lock = threading.Lock()

    def rules(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        continued: str | None = None,
        calls: Callable[[Callable[[], GrammarVocabulary]], TokenConstraint | None] | None = None,
    ) -> AnswerRules | None:
        """The rules for the answer to a prompt, fresh ones for each; None where it may be anything.

        `continued` is the text of the message that the model goes on with, where the request asks for that. `calls`
        makes the rules of an answer that calls tools, or may, and has the structure where it does not. Raises
        RequestError for ids beyond the vocabulary, and for what cannot be enforced on this model.
        """
        self._check_ids("logit_bias", dict(params.logit_bias))
        constraints: list[TokenConstraint] = []
        after_reasoning = None
        structured: TokenConstraint | None = None
        if calls is not None:
            structured = calls(self.vocabulary)
        elif params.structure is not None:
            structured = self.vocabulary().constraint_for(params.structure.grammar_text, params.structure.name)
        if structured is not None:
            marks = reasoning_marks(self._tokenizer)
            state = reasoning_state(self._tokenizer, marks, prompt_ids, continued)
            channels = harmony_ids(self._tokenizer)
            if channels is not None and continued is None and begins_message(self._tokenizer, channels, prompt_ids):
                end = [channels[CHANNEL], *self._tokenizer.encode(FINAL), channels[MESSAGE]]
                late = AfterReasoning(structured, end, self._vocab_size, between=_MOST_BETWEEN)
                constraints.append(structured if calls is not None else late)
            elif marks is None or state == "closed":
                constraints.append(structured)
            else:
                begin = None if state == "open" else marks.begin
                after_reasoning = AfterReasoning(structured, [marks.end], self._vocab_size, begin)
                constraints.append(after_reasoning)
        if params.allowed_token_ids is not None:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
            constraints.append(AllowedTokens(params.allowed_token_ids, self._vocab_size))
        if params.bad_words:
            constraints.append(BadWords(self._word_ids(params.bad_words), self._vocab_size))
        ending_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        if params.min_tokens and ending_ids:
            constraints.append(LateEnd(ending_ids, params.min_tokens, self._vocab_size))
        if not constraints:
            return None
        constraint = constraints[0] if len(constraints) == 1 else AllConstraints(constraints)
        return AnswerRules(constraint, self._tokenizer, self._vocab_size, after_reasoning)

    def vocabulary(self) -> GrammarVocabulary:
        """The model's tokens as grammars see them; RequestError for a tokenizer that llguidance cannot read."""
        with self._lock:
            if self._vocabulary is None:
                from edgellm.structure.grammar import GrammarVocabulary

                described = self._tokenizer, self._vocab_size, self._eos_token_ids
                self._vocabulary = GrammarVocabulary.of_tokenizer(*described)
            return self._vocabulary

    def _word_ids(self, words: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """The tokens of each bad word: of a text as it stands at the beginning of an answer, and behind a space."""
        found: list[list[int]] = []
        for word in words:
            if isinstance(word, str):
                texts = [word] if word.startswith(" ") else [word, f" {word}"]
                spelled = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
                found += [each for each in spelled if each]
            else:
                self._check_ids("bad_words", word)
                found.append([*word])
        return found

    def _check_ids(self, name: str, token_ids: Any) -> None:
        if beyond := [each for each in token_ids if each >= self._vocab_size]:
            expected = f"the model's vocabulary has {self._vocab_size}, from 0 on"
            raise RequestError(f"{name} has the token id {beyond[0]}: {expected}")
