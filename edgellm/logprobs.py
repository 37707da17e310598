"""Log-probabilities of tokens, from the logits that they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log-probability, and the likeliest tokens in its place with theirs, likeliest first.

    They are of the model's own distribution: temperature, penalties and filters are not in them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of each token, drawn from a row of `logits` [n, V] float32, and of the `top` likeliest (ties: the lower id)."""
    found = []
    for row, token in zip(logits.astype(np.float64), token_ids, strict=True):
        largest = row.max()
        values = row - (largest + np.log(np.exp(row - largest).sum()))
        likeliest: np.ndarray = np.empty(0, np.int64)
        if top:
            least = np.partition(values, -top)[-top] if top < len(values) else values.min()
            candidates = np.flatnonzero(values >= least)
            likeliest = candidates[np.argsort(-values[candidates], kind="stable")][:top]
        pairs = tuple((int(each), float(values[each])) for each in likeliest)
        found.append(TokenLogprobs(int(token), float(values[token]), pairs))
    return found
