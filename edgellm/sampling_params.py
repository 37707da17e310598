"""How the tokens of an answer are chosen, and when it ends."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from edgellm.errors import RequestError, shown

SMALLEST_TEMPERATURE = 0.001  # logits divided by less overflow float32
LARGEST_INTEGER = 2**31 - 1
LARGEST_SEED = 2**64 - 1
MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling and its limits; wrong values raise `RequestError` that names field, value and range.

    `temperature` 0 is greedy decoding. `top_k` 0, `top_p` 1 and `min_p` 0 switch these filters off; a
    `repetition_penalty` of 1 and `presence_penalty`, `frequency_penalty` of 0 do nothing. `seed` None draws one at
    random. `max_tokens` None means up to the context limit. An answer ends at the model's end-of-sequence tokens
    (unless `ignore_eos`), at one of `stop_token_ids`, or where its text contains one of the `stop` strings.

    With `logprobs` N each token comes with its log-probability and the N likeliest in its place (`TokenLogprobs`); the
    host then reads logits in every step, and with penalties nothing is drafted.
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
    stop: str | Sequence[str] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, checked_value(field.name, getattr(self, field.name)))

    @property
    def needs_sampling(self) -> bool:
        """Whether tokens are drawn at random rather than taken greedily."""
        return self.temperature > 0.0

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: their own, or a random one of 32 bits where sampling needs one."""
        if self.seed is not None or not self.needs_sampling:
            return self
        return replace(self, seed=secrets.randbits(32))


def checked_value(name: str, value: Any) -> Any:
    """Return `value` as field `name` of `SamplingParams` holds it, or raise `RequestError`."""
    if name == "temperature":
        number = _real(name, value, 0.0, 100.0)
        if 0.0 < number < SMALLEST_TEMPERATURE:
            raise RequestError(
                f"temperature is {shown(value)}: expected 0 (greedy decoding) or a number from {SMALLEST_TEMPERATURE} "
                "to 100"
            )
        return number
    if name == "top_p":
        return _real(name, value, 0.0, 1.0, exclusive=True)
    if name == "min_p":
        return _real(name, value, 0.0, 1.0)
    if name == "repetition_penalty":
        return _real(name, value, 0.0, 100.0, exclusive=True)
    if name in ("presence_penalty", "frequency_penalty"):
        return _real(name, value, -2.0, 2.0)
    if name == "top_k":
        return _integer(name, value, 0, LARGEST_INTEGER, "0 switches it off")
    if name == "seed":
        return None if value is None else _integer(name, value, 0, LARGEST_SEED)
    if name == "max_tokens":
        return None if value is None else _integer(name, value, 1, LARGEST_INTEGER)
    if name == "logprobs":
        return None if value is None else _integer(name, value, 0, MOST_LOGPROBS)
    if name == "stop":
        return _stop_strings(value)
    if name == "stop_token_ids":
        values = (value,) if isinstance(value, numbers.Integral) else _sequence(name, value)
        return tuple(_integer(name, item, 0, LARGEST_INTEGER) for item in values)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}: expected true or false")
    return value


def _real(name: str, value: Any, low: float, high: float, exclusive: bool = False) -> float:
    bounds = f"a number above {low:g} and up to {high:g}" if exclusive else f"a number from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise RequestError(f"{name} is {shown(value)}: expected {bounds}")
    number = as_float(value)
    if not math.isfinite(number) or number > high or number < low or (exclusive and number == low):
        raise RequestError(f"{name} is {shown(value)}: expected {bounds}")
    return number


def as_float(value: Any) -> float:
    """A real number as a float: infinity where it is larger than floats are."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _integer(name: str, value: Any, low: int, high: int, meaning: str = "") -> int:
    bounds = f"a whole number from {low} to {high}" + (f" ({meaning})" if meaning else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise RequestError(f"{name} is {shown(value)}: expected {bounds}")
    if not low <= int(value) <= high:
        raise RequestError(f"{name} is {shown(int(value))}: expected {bounds}")
    return int(value)


def _sequence(name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise RequestError(f"{name} is {shown(value)}: expected a list")
    return list(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _sequence("stop", value)
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(f"stop holds {shown(string)}: expected strings")
        if not string:
            raise RequestError("stop holds an empty string, which would end every answer at once: leave it out")
    return tuple(strings)
