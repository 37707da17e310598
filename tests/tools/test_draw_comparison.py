"""The distance of a draw from another one, against the kernels that draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.sampling.contract import IN_PROMPT
from edgellm.kernels.sampling.twin import NumpySampling
from tools.bench.draw_comparison import draw_gap, first_difference

PROMPT, ANSWER = [1, 2, 3, 3], [7, 3, 7]


def test_the_first_difference_as_far_as_both_go() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) is None


def drawn(logits: np.ndarray, values: SamplingValues) -> int:
    """The token that the runtime draws after prompt and answer."""
    kernels, counts, token = NumpySampling(), np.zeros((1, logits.size), np.int32), np.zeros(1, np.int32)
    counts[0, PROMPT] = IN_PROMPT
    for token_id in ANSWER:
        counts[0, token_id] += 1
    rows = values.words()[None]
    processed, threshold = logits[None].copy(), np.zeros(1, np.float32)
    kernels.process_logits(processed, counts, rows, processed)
    kernels.filter_threshold(processed, rows, threshold)
    kernels.sample(processed, threshold, rows, np.array([len(PROMPT) + len(ANSWER)], np.int32), token)
    return int(token[0])


@pytest.mark.parametrize(
    "values",
    [
        SamplingValues(),
        SamplingValues(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25),
        SamplingValues(1.0, seed=3, sequence=1),
        SamplingValues(0.7, 5, 0.9, 0.02, 1.2, 0.1, 0.2, seed=(1 << 50) + 1),
    ],
)
def test_raising_the_other_token_by_the_gap_makes_it_the_drawn_one(values: SamplingValues) -> None:
    """Just less changes nothing, just more does: the gap is the distance, in logits times temperature."""
    logits = np.random.default_rng(4).standard_normal(20).astype(np.float32) * 2
    first, scale = drawn(logits, values), values.temperature or 1.0
    others = [token for token in range(20) if token != first]
    tried = 0
    for other in others:
        gap = draw_gap(logits, PROMPT, ANSWER, values, first, other) * scale
        raised = []
        for factor in (0.99, 1.01):
            changed = logits.copy()
            divisor = values.repetition_penalty if other in PROMPT + ANSWER and changed[other] > 0 else 1.0
            changed[other] += factor * gap * divisor
            if (logits[other] > 0) == (changed[other] > 0):  # the penalty treats both alike
                raised.append(drawn(changed, values))
        if len(raised) == 2 and not values.top_k:
            assert raised == [first, other]
            tried += 1
    assert tried or values.top_k


def test_a_token_that_a_filter_drops_is_as_far_as_the_threshold() -> None:
    logits = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    for dropped, distance in ((2, 1.0), (3, 2.0)):
        # With a noise that has it ahead, it needs nothing else; the other way round it must overtake as well.
        gaps = [draw_gap(logits, [], [], SamplingValues(1.0, top_k=2, seed=seed), 0, dropped) for seed in range(50)]
        assert min(gaps) == pytest.approx(distance) and max(gaps) > distance


TOP_P = SamplingValues(1.0, top_p=0.9, seed=1)


def distribution(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities)).astype(np.float32)


def test_top_p_keeps_a_token_when_what_is_likelier_falls_below_it() -> None:
    """0.9003 of the probability is likelier than token 2, which top-p drops: a shift of 0.003 brings it back."""
    logits, apart = distribution(0.5, 0.4003, 0.0797, 0.02), np.array([-1, -1, 1, 1], np.float32)
    seed = next(seed for seed in range(1000) if drawn_at(logits + apart * np.float32(0.01), seed) == 2)
    first = drawn_at(logits, seed)
    gap = draw_gap(logits, [], [], replace(TOP_P, seed=seed), first, 2)
    assert first != 2 and 0.003 < gap < 0.004
    assert drawn_at(logits + apart * np.float32(0.9 * gap / 2), seed) == first
    assert drawn_at(logits + apart * np.float32(1.1 * gap / 2), seed) == 2


def test_top_p_drops_the_drawn_token_when_what_is_likelier_reaches_it() -> None:
    """0.8997 is likelier than token 2: it is kept, but a shift of 0.004 drops it, and then the next best is drawn."""
    logits = distribution(0.5, 0.3997, 0.0803, 0.02)
    seed = next(seed for seed in range(1000) if drawn_at(logits, seed) == 2)
    values = replace(TOP_P, seed=seed)
    apart = np.array([1, 1, -1, -1], np.float32)
    other = drawn_at(logits + apart * np.float32(0.01), seed)
    assert other != 2
    gap = draw_gap(logits, [], [], values, 2, other)
    assert 0.003 < gap < 0.004
    assert drawn_at(logits + apart * np.float32(0.9 * gap / 2), seed) == 2
    assert drawn_at(logits + apart * np.float32(1.1 * gap / 2), seed) == other


def drawn_at(logits: np.ndarray, seed: int) -> int:
    kernels, token, threshold = NumpySampling(), np.zeros(1, np.int32), np.zeros(1, np.float32)
    logits = np.ascontiguousarray(logits[None], np.float32)
    rows = replace(TOP_P, seed=seed).words()[None]
    kernels.filter_threshold(logits, rows, threshold)
    kernels.sample(logits, threshold, rows, np.zeros(1, np.int32), token)
    return int(token[0])
