"""What is asked for where answers are compared with plain decoding's, and how a difference is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm import SamplingParams
from edgellm.decoding.preparation import sampling_values
from tools.bench.draw_comparison import draw_gap, first_difference

#: Two ways of computing in float32 differ by less than this on NumPy, whose products round by their number of rows; on
#: a GPU a row has the same bits in all of them.
NUMPY_GAP = 1e-4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {
        "temperature": 1.0,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.05,
        "seed": 2026,
    },
}


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that differs; `gap` is plain decoding's distance from it, `allowed` the bound."""

    prompt: int
    token: int
    gap: float
    allowed: float


def parameters(sampling: str, tokens: int, until_end: bool = False) -> SamplingParams:
    """The request of a comparison."""
    return SamplingParams(max_tokens=tokens, ignore_eos=not until_end, **SAMPLINGS[sampling])


def difference(
    number: int,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    params: SamplingParams,
    backend: str,
    dtype: str,
    logits_of: Callable[[Sequence[int]], np.ndarray],
) -> Difference | None:
    """The first difference between two answers to the prompt of this `number`, None where there is none.

    `logits_of` computes the logits [V] float32 that plain decoding drew the last token of the answer it is given from.
    """
    place = first_difference(expected, found)
    if place is None:
        return None
    logits = logits_of(expected[: place + 1])
    gap = draw_gap(logits, prompt, expected[:place], sampling_values(params), expected[place], found[place])
    return Difference(number, place, gap, NUMPY_GAP if backend == "numpy" else 0.0)
