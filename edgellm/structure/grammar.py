"""Grammars compiled for a tokenizer: the masks of an answer's tokens, by llguidance.

llguidance's matchers never raise: they go into a state of error for ever. Here each such state is an error of its
request, and the matcher is made anew at the place where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.speculation.constraints import mask_of, mask_words
from edgellm.errors import ConstraintError, RequestError
from edgellm.structure.steps import check_grammar

if TYPE_CHECKING:
    from edgellm.text.tokenizer import Tokenizer

#: Work that compiling and one mask may take, as llguidance counts it (its documentation: about 50, 14 and 20 units a
#: microsecond); the clock is looked at once, when a grammar is tried. A mask that needs more is its request's error.
FUEL: dict[str, Any] = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000}
COMPILE_SECONDS = 2.0
#: After a mask of so much work it is made sure, with so many of its tokens, that the grammar still works.
SLOW_MASK_SECONDS, PROVED_TOKENS = 0.002, 8
#: A mask that takes longer is its answer's error: those behind it would, too.
MASK_SECONDS = 1.0
#: A grammar is tried along so many tokens, or stretches of forced ones: work grows with what an answer has.
TRIED_TOKENS = 8
#: How many grammars of a model stay compiled, and the bytes of masks that each keeps.
MOST_GRAMMARS, MASK_BYTES = 64, 4 * 2**20
#: Answers rarely share more tokens from their beginning on.
CACHED_TOKENS = 256
#: So many forced tokens are kept of a place at the most, and of so many places.
MOST_FORCED, FORCED_PLACES = 32, 4096
#: Texts that forced tokens were spelled of.
SPELLED_TEXTS = 4096
_SAMPLE = '{"name": ["caf\u00e9 1", -2.5e3], "x y": null}'


class Grammar:
    """A grammar compiled for one tokenizer, which answers share. Any thread may use it."""

    def __init__(self, make: Callable[[], LLMatcher], eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """`make` compiles it; copies of one matcher share the automaton that they build by and by."""
        self.eos_token_ids, self.vocab_size = tuple(eos_token_ids), vocab_size
        self.ending_mask = mask_of(eos_token_ids, vocab_size)
        self._make, self._matcher, self._lock = make, make(), threading.Lock()
        #: Counts the matchers whose copies were given up.
        self.generation = 0
        #: Masks, and the first `MOST_FORCED` forced tokens, by the tokens before: llguidance has no name for a state.
        #: Different answers and the trees of different rounds share them.
        most = max(1, MASK_BYTES // self.ending_mask.nbytes)
        self.masks: RecentlyUsed[tuple[int, ...], np.ndarray] = RecentlyUsed(most)
        self.forced: RecentlyUsed[tuple[int, ...], list[int]] = RecentlyUsed(FORCED_PLACES)

    def matcher(self) -> tuple[LLMatcher, int]:
        """A matcher at the beginning, and its generation."""
        with self._lock:
            return self._matcher.deep_copy(), self.generation

    def give_up(self, generation: int) -> None:
        """A matcher of a generation is in error, and so is the automaton that it shares with others of it: these go on
        with a new one, so that the error is that of one answer alone."""
        with self._lock:
            if generation == self.generation:
                self._matcher, self.generation = self._make(), generation + 1


class GrammarConstraint:
    """A grammar at one place of an answer: see `edgellm.engines.speculation.constraints.TokenConstraint`.

    At the end of sequence, which comes only where the grammar allows an end, it stops: behind it only more of these
    tokens are allowed.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher, self._generation = grammar.matcher()
        self._path: list[int] = []
        self._endings = 0  # the matcher never sees the end of sequence

    def fill_mask(self, row: np.ndarray) -> None:
        grammar, words = self._grammar, row.view(np.int32)
        if len(words) != len(grammar.ending_mask) or not words.flags.c_contiguous:
            raise ValueError(f"a mask has {len(row)} words: expected {len(grammar.ending_mask)}, contiguous")
        if self._endings:
            words[:] = grammar.ending_mask.view(np.int32)
            return
        path = self._cached_path
        known = None if path is None else grammar.masks.find(path)
        if known is not None:
            words[:] = known
            return
        matcher, began = self._live(), time.thread_time()
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        seconds = time.thread_time() - began
        if seconds > MASK_SECONDS:
            self._begin_again()
            raise ConstraintError(f"a mask of the answer's structure took {seconds:.1f} seconds: ask for a simpler one")
        if seconds > SLOW_MASK_SECONDS:
            self.prove(words)
        if not words.any():
            raise ConstraintError(
                f"no token goes on with the answer's structure after {len(self._path)} tokens: the model's vocabulary "
                "lacks what it asks for next"
            )
        if path is not None:
            grammar.masks.keep(path, words.copy())

    @property
    def _cached_path(self) -> tuple[int, ...] | None:
        return tuple(self._path) if len(self._path) <= CACHED_TOKENS else None

    def try_advance(self, token: int) -> bool:
        """See `TokenConstraint`. Raises ConstraintError where the grammar cannot be followed any further."""
        if token in self._grammar.eos_token_ids:
            allowed = self.is_complete()
            self._endings += allowed
            return allowed
        if self._endings or not 0 <= token < self._grammar.vocab_size:  # an unknown id would break the matcher
            return False
        if self._live().try_consume_tokens([token]) == 1:
            self._path.append(token)
            return True
        self._check()
        return False

    def rollback(self, count: int) -> None:
        ended = min(count, self._endings)
        self._endings -= ended
        if count > ended:
            matcher = self._live()
            del self._path[len(self._path) - (count - ended) :]
            if not matcher.rollback(count - ended):
                self._begin_again()

    def forced(self, most: int) -> list[int]:
        """See `TokenConstraint`; the end of sequence is forced, too, the first of several."""
        if self._endings:
            return []
        path = self._cached_path
        known = None if path is None else self._grammar.forced.find(path)
        if known is None:
            known = self._spelled_ahead(max(most, MOST_FORCED))
            if path is not None:
                self._grammar.forced.keep(path, known)
        return known[:most]

    def _spelled_ahead(self, most: int) -> list[int]:
        matcher = self._live()
        found: list[int] = matcher.compute_ff_tokens()[:most]
        count = matcher.try_consume_tokens(found) if found else 0
        self._check()
        ends = count == len(found) < most and matcher.is_stopped()
        if count:
            matcher.rollback(count)
        return [*found[:count], *self._grammar.eos_token_ids[:ends]]

    def is_free(self) -> bool:
        """A grammar says of each token whether it may come."""
        return False

    def is_complete(self) -> bool:
        return bool(self._endings or self._live().is_accepting())

    def is_stopped(self) -> bool:
        return bool(self._endings or self._live().is_stopped())

    def _check(self) -> None:
        """Raise ConstraintError where the matcher is in error, and go back to where it was before."""
        if self._matcher.is_error():
            reason = matcher_error(self._matcher)
            self._begin_again()
            raise ConstraintError(
                f"the answer's structure cannot be followed behind {len(self._path)} tokens ({reason}): ask for a "
                "simpler one"
            )

    def prove(self, words: np.ndarray) -> list[int]:
        """Some tokens of a mask, from first to last. Raises ConstraintError where the mask's work has broken the
        automaton, which shows only in what it consumes: these are tried."""
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        some = allowed[:: max(1, len(allowed) // PROVED_TOKENS)].tolist()
        tried = [each for each in some if each not in self._grammar.eos_token_ids]
        for token in tried:
            if not self.try_advance(token):
                self._begin_again()
                raise ConstraintError("the answer's structure takes too much work: ask for a simpler one")
            self.rollback(1)
        return tried

    def _live(self) -> LLMatcher:
        """The matcher, at the place behind the path."""
        if self._generation != self._grammar.generation:
            self._remake()
        return self._matcher

    def _begin_again(self) -> None:
        self._grammar.give_up(self._generation)
        self._remake()

    def _remake(self) -> None:
        self._matcher, self._generation = self._grammar.matcher()
        if self._path:
            self._matcher.try_consume_tokens(self._path)


class Definition(NamedTuple):
    """What makes a vocabulary: the text of a tokenizer.json, the width of the logits, and tokens that are no text."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]


class GrammarVocabulary:
    """A model's tokens as grammars see them, and the grammars compiled for them. Any thread may use it."""

    def __init__(
        self, tokenizer: LLTokenizer, vocab_size: int, eos_token_ids: Sequence[int], definition: Definition | None
    ) -> None:
        """`vocab_size` is the width of the logits, `tokenizer` was made with it and the same ends of sequence by the
        `definition`; None is that of single bytes."""
        self._definition, self._eos_token_ids = definition, tuple(eos_token_ids)
        #: How many tokens there are, and what knows them: its `is_special_token` are those known by their ids alone.
        self.size, self.tokenizer = vocab_size, tokenizer
        self._grammars: RecentlyUsed[str, Grammar] = RecentlyUsed(MOST_GRAMMARS)

    @classmethod
    def of_tokenizer(cls, model: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
        """The vocabulary of a model's tokenizer; RequestError where llguidance cannot read it, or reads it wrongly."""
        if not eos_token_ids:
            raise RequestError(
                "the model names no end-of-sequence token, so that no structured answer could end: name one in "
                "generation_config.json (eos_token_id) and build anew"
            )
        special = sorted(model.special_token_ids.union(eos_token_ids))
        definition = Definition(model.definition, vocab_size, tuple(eos_token_ids), tuple(special))
        try:
            vocabulary = cls.of_definition(definition)
            sample = model.encode(_SAMPLE, add_special_tokens=False)
            read = vocabulary.tokenizer.decode_bytes(sample).decode(errors="replace").lstrip()
            if read != _SAMPLE:
                raise ValueError(f"it reads {_SAMPLE} as {read[:80]!r}")
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # Rust's cannot be named
                raise
            reason = " ".join(str(error).split())[:200]
            raise RequestError(
                f"the model's tokenizer.json cannot be used for structured answers ({reason}): leave structure out, or "
                "use a model with a byte-level or byte-fallback tokenizer"
            ) from error
        return vocabulary

    @classmethod
    def of_definition(cls, definition: Definition) -> GrammarVocabulary:
        """The vocabulary that a definition describes; what llguidance raises for one that it cannot read is raised.

        Only the special tokens that it names are known by their ids alone. llguidance takes each added token whose name
        is like `<name>` for such, which no text is spelled with, and yet spells forced text with it, and with special
        ones: behind such a literal there was no token that it took.
        """
        size, ends = definition.vocab_size, list(definition.eos_token_ids)
        tokenizer = LLTokenizer(definition.tokenizer, n_vocab=size, eos_token=ends)
        named = TokenizerWrapper(_NamesAsText(tokenizer, size, definition.special_token_ids))
        return cls(LLTokenizer(named, n_vocab=size, eos_token=ends), size, ends, definition)

    def constraint_for(self, grammar: str, what: str = "the structure") -> GrammarConstraint:
        """The rules of a grammar (`Structure.grammar_text`), which errors call `what`. Raises RequestError for a
        grammar that cannot be compiled, or that no answer could begin."""
        return GrammarConstraint(self.compiled(grammar, what))

    def compiled(self, grammar: str, what: str = "the structure") -> Grammar:
        """A grammar, compiled once and tried; see `constraint_for`."""
        found = self._grammars.find(grammar)
        if found is None:
            check_grammar(self._definition, grammar, what)
            found = self._grammars.keep(grammar, self.compiled_anew(grammar, what))
        return found

    def compiled_anew(self, grammar: str, what: str) -> Grammar:
        """A grammar, compiled and tried in this process; see `constraint_for`."""
        began = time.thread_time()
        limits = LLParserLimits(verbose_errors=False, **FUEL)

        def make() -> LLMatcher:
            matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits)
            if matcher.is_error():
                raise RequestError(f"{what} cannot be enforced ({matcher_error(matcher)}): say it in another way")
            return matcher

        compiled = Grammar(make, self._eos_token_ids, self.size)
        trial, row = GrammarConstraint(compiled), np.empty(mask_words(self.size), np.int32)
        try:
            for _ in range(TRIED_TOKENS):
                trial.fill_mask(row)
                some = trial.prove(row)
                for token in trial.forced(64) or some[len(some) // 2 :][:1]:
                    trial.try_advance(token)
        except ConstraintError as error:
            raise RequestError(f"{what} cannot be begun by any answer, or takes too much work: {error}") from error
        seconds = time.thread_time() - began
        if seconds > COMPILE_SECONDS:
            taken = f"{seconds:.1f} seconds to compile, of {COMPILE_SECONDS:g}"
            raise RequestError(f"{what} took {taken}: ask for a simpler one")
        return compiled


def matcher_error(matcher: LLMatcher) -> str:
    """What a matcher says of its error, in one line that is not long."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        text = "there is nothing that fulfils it"
    return text[:300] or "no reason given"


class _NamesAsText:
    """A tokenizer as llguidance takes one, in which only `special` tokens are known by their ids alone. Forced text is
    spelled as the model's tokenizer spells it, but for names of special tokens: their text is no such token."""

    bos_token_id = None

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, special: Iterable[int]) -> None:
        self._tokenizer, self._special = tokenizer, frozenset(special)
        self.eos_token_id, self.special_token_ids = tokenizer.eos_token, sorted(self._special)
        named = ((each, tokenizer.decode_bytes([each])) for each in range(vocab_size))
        #: Where there is no token llguidance writes the id.
        self.tokens = [b"" if name == b"<[%d]>" % token else name for token, name in named]
        self._spelled = lru_cache(SPELLED_TEXTS)(self._spell)

    def __call__(self, text: bytes) -> list[int]:
        return [*self._spelled(text)]

    def _spell(self, text: bytes) -> tuple[int, ...]:
        found: list[int] = []
        for token in self._tokenizer.tokenize_bytes(text):
            name = self.tokens[token]
            in_parts = token in self._special and len(name) > 1
            found += [*self._spell(name[:1]), *self._spell(name[1:])] if in_parts else [token]
        return tuple(found)


class _Bytes:
    """A tokenizer whose tokens are the 256 bytes and an end of sequence, as llguidance takes one."""

    eos_token_id, bos_token_id = 256, None
    tokens: tuple[bytes, ...] = (*(bytes([each]) for each in range(256)), b"<eos>")
    special_token_ids: tuple[int, ...] = (256,)

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def byte_vocabulary() -> GrammarVocabulary:
    """The vocabulary of single bytes: texts are tried against grammars with it, without any model."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])
    return GrammarVocabulary(tokenizer, 257, (256,), None)


def matches(grammar: str, text: str) -> bool:
    """Whether a text is whole by a grammar that compiles."""
    constraint = byte_vocabulary().constraint_for(grammar)
    try:
        return all(map(constraint.try_advance, text.encode())) and constraint.is_complete()
    except ConstraintError:
        return False
