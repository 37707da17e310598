"""How close a draw was: two ways of computing the same logits may part only where rounding decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.portable_math import gumbel
from edgellm.kernels.random_numbers import philox_4x32
from edgellm.kernels.sampling.contract import IN_PROMPT
from edgellm.kernels.sampling.twin import NumpySampling


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The index of the first token that differs, None where none does as far as both go."""
    pairs = enumerate(zip(expected, found, strict=False))
    return next((index for index, (one, other) in pairs if one != other), None)


def draw_gap(
    logits: np.ndarray,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    sampling: SamplingValues,
    drawn: int,
    other: int,
) -> float:
    """How far `logits` [V] float32, after prompt and answer so far, are from drawing `other` in place of `drawn`.

    In the units of processed logits, it is the least of what would do that: `other` overtakes `drawn` in what the draw
    maximizes (processed logits, plus Gumbel noise where it samples), or top-p drops `drawn` and `other` is next. One of
    them that top-k, top-p and min-p do not keep must get back as well. For top-p that is how far the odds of all
    likelier tokens together, as a logarithm, are from those of top-p: so much these and the rest must move apart.
    """
    counts = np.zeros((1, logits.size), np.int32)
    counts[0, list(prompt_ids)] = IN_PROMPT
    np.add.at(counts[0], list(answer_ids), 1)

    processed = logits[None].astype(np.float32)
    NumpySampling().process_logits(processed, counts, sampling.words()[None], processed)
    filters = _Filters(processed[0], sampling)
    scores = processed[0].copy()
    if sampling.temperature:
        ids = np.flatnonzero(filters.kept | np.isin(np.arange(logits.size), (drawn, other)))
        scores[ids] += _noise(ids.tolist(), sampling, len(prompt_ids) + len(answer_ids))
    if not filters.kept[drawn]:
        return max(filters.distance_to_keep(drawn), filters.distance_to_keep(other))
    ahead = float(scores[drawn] - scores[other])
    overtaking = abs(ahead) if filters.kept[other] else max(0.0, ahead)
    rest = filters.kept.copy()
    rest[drawn] = False
    behind = max(0.0, float(scores[rest].max(initial=-np.inf) - scores[other]))
    return max(filters.distance_to_keep(other), min(overtaking, max(filters.distance_to_drop(drawn), behind)))


class _Filters:
    """What top-k, top-p and min-p keep of `processed` [V] float32: `kept` [V] bool; and how near others are to it."""

    def __init__(self, processed: np.ndarray, sampling: SamplingValues) -> None:
        self._values, self._sampling = processed, sampling
        self._threshold = self._threshold_of(sampling.top_p, sampling.min_p)
        self.kept = processed >= self._threshold

    def distance_to_keep(self, token: int) -> float:
        """How far a token is from being kept; 0 where it is."""
        value, top_p = self._values[token], self._sampling.top_p
        if self.kept[token]:
            return 0.0
        distance = float(self._threshold - value)
        if value < self._threshold_of(1.0, self._sampling.min_p):
            return distance
        return min(distance, _log_odds(self._likelier(token)) - _log_odds(top_p))

    def distance_to_drop(self, token: int) -> float:
        """How far a token is from being dropped by top-p; infinite for the likeliest."""
        if not self.kept[token]:
            return 0.0
        return _log_odds(self._sampling.top_p) - _log_odds(self._likelier(token))

    def _likelier(self, token: int) -> float:
        """The probability of all likelier tokens, of those that top-k keeps."""
        kept = self._values[self._values >= self._threshold_of(1.0, 0.0)].astype(np.float64)
        weights = np.exp(kept - kept.max())
        return float(weights[kept > self._values[token]].sum() / weights.sum())

    def _threshold_of(self, top_p: float, min_p: float) -> np.float32:
        threshold = np.empty(1, np.float32)
        rows = replace(self._sampling, top_p=top_p, min_p=min_p).words()[None]
        NumpySampling().filter_threshold(self._values[None], rows, threshold)
        return threshold[0]


def _log_odds(probability: float) -> float:
    if not 0 < probability < 1:
        return math.copysign(math.inf, probability - 0.5)
    return math.log(probability) - math.log1p(-probability)


def _noise(ids: Sequence[int], sampling: SamplingValues, position: int) -> np.ndarray:
    """The Gumbel noise of tokens in the draw at a position (`SamplingKernels.sample`): float32 like `ids`."""
    key = sampling.seed & 0xFFFFFFFF, sampling.seed >> 32
    blocks = [philox_4x32((np.array([token // 4]), position, sampling.sequence, 0), key)[0] for token in ids]
    return gumbel(np.array([block[token % 4] for block, token in zip(blocks, ids, strict=True)], np.uint32))


def spacing(value: float, dtype: str) -> float:
    """The distance between neighbouring numbers of `dtype` at the size of `value`."""
    mantissa = {"float16": 10, "bfloat16": 7, "float32": 23}[dtype]
    return 2.0 ** (math.floor(math.log2(abs(value))) - mantissa)
