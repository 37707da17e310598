"""How the tokens of an answer are chosen, and when it ends."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgellm.errors import RequestError, is_switch, require, shown
from edgellm.structure.description import structure_of, structure_of_response_format

#: Logits divided by less overflow float32: below it the likeliest token is taken, as others write 1e-6 for 0.
SMALLEST_TEMPERATURE = 0.001
LARGEST_INTEGER = 2**31 - 1
LARGEST_SEED = 2**64 - 1
MOST_LOGPROBS = 20
#: Of OpenAI's API: with 100 a token is as good as chosen, with -100 as good as forbidden.
LARGEST_BIAS = 100.0
MOST_BIASES = MOST_BAD_WORDS = 1024
#: Characters of all bad words together: each is encoded, twice.
_MOST_BAD_CHARACTERS = 2**16
#: The range of a number, and whether its lowest is left out; of a whole one, and what a value of it means.
_REALS: dict[str, Any] = {
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0, True),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-2.0, 2.0)),
}
_WHOLE: dict[str, Any] = {
    "top_k": (-1, LARGEST_INTEGER, "0 and -1 switch it off"),
    "seed": (-(2**63), LARGEST_SEED, "those below 0, which OpenAI's API has, are taken modulo 2^64"),
    "max_tokens": (1, LARGEST_INTEGER),
    "min_tokens": (0, LARGEST_INTEGER),
    "logprobs": (0, MOST_LOGPROBS),
}
_MAY_BE_NONE = ("seed", "max_tokens", "logprobs", "structure", "allowed_token_ids")


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling and its limits; wrong values raise `RequestError` that names field, value and range.

    `temperature` 0 is greedy decoding, and so is one below 0.001. `top_k` 0 (or -1), `top_p` 1 and `min_p` 0 switch
    these filters off; a `repetition_penalty` of 1 and `presence_penalty`, `frequency_penalty` of 0 do nothing. `seed`
    None draws one at random. `max_tokens` None means up to the context limit. An answer ends at the model's
    end-of-sequence tokens (unless `ignore_eos`), at one of `stop_token_ids`, or where its text contains one of the
    `stop` strings; not before it has `min_tokens`: such tokens are not drawn until then, and a stop string counts where
    its end comes later.

    With `logprobs` N each token comes with its log-probability and the N likeliest in its place (`TokenLogprobs`); the
    host then reads logits in every step, and with penalties nothing is drafted. They are after masks (`structure`,
    `allowed_token_ids`, `bad_words`) and `logit_bias`, before penalties, temperature and filters, drafted and plain
    alike.

    `structure` is the form that an answer must have: `edgellm.Structure(...)`, or for short a JSON schema, a class, a
    list of choices, or "json_object". Tokens that would leave it are never drawn, and the end of sequence only where it
    is complete, so that `stop`, `max_tokens` and the like alone can cut it (`Response.structure_complete`). It does not
    go with `ignore_eos`. Of a model that thinks it begins where its reasoning ends; an answer that ends before is not
    complete.

    `allowed_token_ids` are the only tokens of an answer, the end of sequence only where it is among them (None: all).
    `bad_words` (texts, or lists of token ids) are never in it: the last token of one is forbidden wherever the tokens
    before it end the answer so far; a text is forbidden as the tokenizer writes it at an answer's beginning and behind
    a space. `logit_bias` adds numbers from -100 to 100 to the logits of tokens, by id, before penalties and
    temperature; ids beyond the model's vocabulary are refused when it is asked.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    structure: Any = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Collection[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checked_value(field.name, getattr(self, field.name)))
        if self.structure is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos goes on behind the end of an answer, where a structure has nothing more to say: leave one "
                "of them out"
            )

        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: expected no more than max_tokens"
            )

    @property
    def needs_sampling(self) -> bool:
        """Whether tokens are drawn at random rather than taken greedily."""
        return self.temperature > 0.0

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: their own, or a random one of 32 bits where sampling needs one."""
        if self.seed is not None or not self.needs_sampling:
            return self
        return replace(self, seed=secrets.randbits(32))


def with_structure(
    params: SamplingParams | None, structure: Any = None, response_format: Any = None
) -> SamplingParams | None:
    """Parameters with the structure that a call names, in either way, in place of their own; as they are without one.

    Raises RequestError for what is none, and where both are given.
    """
    if structure is None and response_format is None:
        return params
    if structure is not None and response_format is not None:
        raise RequestError("structure and response_format are two ways to say one thing: give one of them")
    asked = structure_of_response_format(response_format) if structure is None else structure_of(structure)
    return replace(params or SamplingParams(), structure=asked)


def checked_value(name: str, value: Any) -> Any:
    """Return `value` as field `name` of `SamplingParams` holds it, or raise `RequestError`."""
    if value is None and name in _MAY_BE_NONE:
        return None
    if name == "temperature":
        number = _real(name, value, 0.0, 100.0)
        return number if number >= SMALLEST_TEMPERATURE else 0.0
    if name in _REALS:
        return _real(name, value, *_REALS[name])
    if name in _WHOLE:
        number = _integer(name, value, *_WHOLE[name])
        return number % (LARGEST_SEED + 1) if name == "seed" else max(0, number)
    if name == "stop":
        return _stop_strings(value)
    if name == "stop_token_ids":
        values = (value,) if isinstance(value, numbers.Integral) else _sequence(name, value)
        return tuple(_integer(name, item, 0, LARGEST_INTEGER) for item in values)
    if name == "structure":
        return structure_of(value)
    if name == "logit_bias":
        return _biases(value)
    if name == "allowed_token_ids":
        ids = {_integer(name, item, 0, LARGEST_INTEGER) for item in _sequence(name, value)}
        if not ids:
            raise RequestError("allowed_token_ids is empty, so that nothing could be said: name some, or leave it out")
        return tuple(sorted(ids))
    if name == "bad_words":
        return _bad_words(value)
    require(is_switch(value), name, value, "true or false")
    return bool(value)


def _real(name: str, value: Any, low: float, high: float, exclusive: bool = False) -> float:
    bounds = f"a number above {low:g} and up to {high:g}" if exclusive else f"a number from {low:g} to {high:g}"
    number = as_float(value)
    require(low <= number <= high and not (exclusive and number == low), name, value, bounds)
    return number


def as_float(value: Any) -> float:
    """A real number as a float: infinity where it is larger than floats are, NaN for what is no number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        return float(value) if is_number else math.nan
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _integer(name: str, value: Any, low: int, high: int, meaning: str = "") -> int:
    bounds = f"a whole number from {low} to {high}" + (f" ({meaning})" if meaning else "")
    require(isinstance(value, numbers.Integral) and not isinstance(value, bool), name, value, bounds)
    require(low <= int(value) <= high, name, int(value), bounds)
    return int(value)


def _sequence(name: str, value: Any) -> list[Any]:
    is_array = getattr(value, "ndim", 0) == 1
    require(is_array or isinstance(value, (list, tuple, range, set, frozenset)), name, value, "a list")
    return list(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _sequence("stop", value)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop holds {shown(string)}: expected strings")
        if not string:
            raise RequestError("stop holds an empty string, which would end every answer at once: leave it out")
    return tuple(strings)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids with their biases, by id; ids may be text, as in JSON."""
    pairs = list(value.items()) if isinstance(value, Mapping) else _sequence("logit_bias", value)
    are_pairs = all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs)
    require(are_pairs and len(pairs) <= MOST_BIASES, "logit_bias", value, f"up to {MOST_BIASES} numbers by token id")
    found = {}
    for token_id, bias in pairs:
        is_text = isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 11
        checked = _integer("logit_bias", int(token_id) if is_text else token_id, 0, LARGEST_INTEGER)
        found[checked] = _real(f"logit_bias of token {checked}", bias, -LARGEST_BIAS, LARGEST_BIAS)
    return tuple(sorted(found.items()))


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    words = _sequence("bad_words", value)
    if len(words) > MOST_BAD_WORDS:
        raise RequestError(f"bad_words has {len(words)} words: expected at most {MOST_BAD_WORDS}")
    characters = sum(len(word) for word in words if isinstance(word, str))
    if characters > _MOST_BAD_CHARACTERS:
        raise RequestError(
            f"bad_words have {characters:,} characters: expected at most {_MOST_BAD_CHARACTERS:,} in all"
        )
    found: list[str | tuple[int, ...]] = []
    for word in words:
        if isinstance(word, str):
            if not word.strip():
                raise RequestError(f"bad_words has {shown(word)}: expected words that have more than whitespace")
            found.append(word)
        else:
            ids = tuple(_integer("bad_words", each, 0, LARGEST_INTEGER) for each in _sequence("bad_words", word))
            if not ids:
                raise RequestError("bad_words has an empty list: expected a word's token ids")
            found.append(ids)
    return tuple(found)
