"""What tests of served models share: settings of short and long answers, and what is compared of an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgellm import LLM, SamplingParams
from edgellm.engines.backends.base import Engine
from edgellm.engines.backends.numpy_backend import NumpyEngine
from edgellm.engines.backends.numpy_ranks import RankedEngine
from edgellm.requests import Request, Response

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
#: Token ids, text, finish reason.
Answer = tuple[tuple[int, ...], str, str]
#: The fixtures `alone`, `paused` and `slowed`.
Answers = tuple[list[Request], list[Answer]]
Pause = Callable[[LLM], object]
Slow = Callable[[LLM], None]


def answer(response: Response) -> Answer:
    """What of a response is the same whatever runs beside it."""
    return response.token_ids, response.text, response.finish_reason


def check_before(monkeypatch: pytest.MonkeyPatch, check: Callable[[Engine], None]) -> None:
    """Call `check` with each engine of NumPy before it computes."""
    for kind in (NumpyEngine, RankedEngine):

        def enqueue(engine: Engine, compute: Callable[[Engine], None] = kind.enqueue) -> None:
            check(engine)
            compute(engine)

        monkeypatch.setattr(kind, "enqueue", enqueue)
