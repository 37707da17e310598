"""Distributions in fixed point, and draws from them, for many rows at once, as the acceptance kernels define them."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.portable_math import fixed_point_exp, fixed_point_weights, gumbel, log
from edgellm.kernels.random_numbers import philox_4x32

_MINUS_INFINITY = np.float32(-np.inf)
_FIXED_POINT = 2.0**-32
#: exp of this times 2^32 is below 1: farther values have weight 0.
_FARTHEST = np.float32(23)
#: The sum of weight times distance is kept in units of 2^-36: distances in 2^-16, weights in 2^-32, 12 bits dropped.
_DISTANCE_SCALE = np.float32(2.0**16)
_DROPPED_BITS = np.uint64(12)
_DISTANCE_UNIT = 2.0**-36


def divided(logits: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    """`logits` [n, V] float32 over their row's `temperature` [n] float32, unchanged where that is 0."""
    return logits / np.where(temperature == 0, np.float32(1), temperature)[:, None]


class Distribution:
    """softmax of `processed` [n, V] float32 restricted to values >= `thresholds` [n]; at temperature 0 the argmax."""

    def __init__(self, processed: np.ndarray, thresholds: np.ndarray, temperature: np.ndarray) -> None:
        self._values = np.where(np.isnan(processed), _MINUS_INFINITY, processed)
        self._passes = self._values >= thresholds[:, None]
        for row in np.flatnonzero(temperature == 0):
            self._passes[row] = np.arange(processed.shape[1]) == self._values[row].argmax()

    def scores(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [m, V] of the chosen `rows` (bool [n]), and which of them may be drawn."""
        return self._values[rows], self._passes[rows]

    def probabilities(self) -> np.ndarray:
        """p [n, V] float32: fixed-point weights over their sum; a row of which nothing passes is all 0."""
        maximum = self._values.max(axis=1, keepdims=True)
        weights = fixed_point_weights(self._values, maximum)
        weights[~self._passes] = 0
        totals = weights.sum(axis=1, keepdims=True, dtype=np.uint64)
        return weights.astype(np.float32) / np.maximum(totals, np.uint64(1)).astype(np.float32)


class Draws:
    """The random words of n draws, named by their slots' `records` [n], `positions` [n] int32 and a stream."""

    def __init__(self, records: np.ndarray, positions: np.ndarray, stream: int) -> None:
        seeds, sequences = records["seed"], records["sequence"]
        self._keys = (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32))
        self._sequences = sequences.astype(np.int64)
        self._positions = positions.astype(np.int64)
        self._stream = stream

    def uniform(self) -> np.ndarray:
        """float32 [n] of (word 0 + 0.5) * 2^-32, between 0 and 1."""
        words = philox_4x32((0, self._positions, self._sequences, self._stream), self._keys)[:, 0]
        return (words.astype(np.float32) + np.float32(0.5)) * np.float32(_FIXED_POINT)

    def by_weight(self, weights: np.ndarray) -> np.ndarray:
        """Ids [n] int32 drawn in proportion to `weights` [n, V] float32; 0 where a row has none above 0."""
        return self.by_score(log(weights), weights > 0)

    def by_score(self, scores: np.ndarray, possible: np.ndarray) -> np.ndarray:
        """Gumbel-max: the argmax [n] int32 (lowest id of equals) of `scores` [n, V] + g among the `possible`.

        0 where a row has none.
        """
        rows, ids = np.nonzero(possible)
        result = np.zeros(scores.shape[0], np.int32)
        if not rows.size:
            return result
        noisy = scores[rows, ids] + self._gumbel(rows, ids)
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        lengths = np.diff(starts, append=rows.size)
        is_best = noisy == np.repeat(np.maximum.reduceat(noisy, starts), lengths)
        best_rows, first = np.unique(rows[is_best], return_index=True)
        result[best_rows] = ids[is_best][first]
        return result

    def _gumbel(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """float32 Gumbel draws of ascending (row, id) pairs; one Philox block serves four neighbouring ids."""
        blocks = ids >> 2
        starts = (np.diff(blocks, prepend=-1) != 0) | (np.diff(rows, prepend=-1) != 0)
        of_block = rows[starts]
        counter = (blocks[starts], self._positions[of_block], self._sequences[of_block], self._stream)
        words = philox_4x32(counter, (self._keys[0][of_block], self._keys[1][of_block]))
        return gumbel(words[starts.cumsum() - 1, ids & 3])


def is_typical(
    processed: np.ndarray, threshold: np.float32, tokens: np.ndarray, epsilon: float, delta: float
) -> np.ndarray:
    """bool [m]: whether p(x) > min(epsilon, delta * exp(-H(p))) for each x of `tokens` [m].

    p is the softmax of `processed` [V] float32 restricted to values >= `threshold`, H its entropy in nats:
    log Z + sum(w d) / Z with weights w = exp(-d), d the distance from the maximum, and Z their sum.
    """
    values = np.where(np.isnan(processed), _MINUS_INFINITY, processed)
    maximum = values.max()
    weights = np.where(values >= threshold, fixed_point_weights(values, maximum), np.uint64(0))
    total = float(weights.sum(dtype=np.uint64))
    if total == 0:
        return np.zeros(tokens.size, bool)
    counted = np.flatnonzero(weights)
    with np.errstate(invalid="ignore"):  # inf - inf, replaced
        distances = np.where(values[counted] == maximum, np.float32(0), maximum - values[counted])
    scaled = (np.minimum(distances, _FARTHEST) * _DISTANCE_SCALE).astype(np.uint64)
    distance = float(((weights[counted] * scaled) >> _DROPPED_BITS).sum(dtype=np.uint64))
    normalizer = total * _FIXED_POINT
    entropy = float(log(np.array([normalizer], np.float32))[0]) + distance * _DISTANCE_UNIT / normalizer
    likelihood = float(fixed_point_exp(np.array([-max(entropy, 0.0)], np.float32))[0]) * _FIXED_POINT
    bound = min(epsilon, delta * likelihood)
    inside = (tokens >= 0) & (tokens < values.size)
    probabilities = weights[np.where(inside, tokens, 0)].astype(np.float64) / total
    return inside & (probabilities > bound)
