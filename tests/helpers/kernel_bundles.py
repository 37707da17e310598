"""Bundles of kernel arguments from few values: sampling settings, sequence states, trees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.kernels.acceptance.contract import Accepted
from edgellm.kernels.sampling.contract import SequenceState
from edgellm.kernels.sampling.record import SamplingRecord, records
from edgellm.kernels.tree.contract import TreeNodes


def sampling_rows(slots: int, **settings: float | Sequence[float] | np.ndarray) -> np.ndarray:
    """Records of `slots` slots, [S, K] uint32: given fields, each for all slots or for every one, and neutral ones but
    for the temperature, which is 1."""
    rows = np.tile(SamplingRecord(temperature=1.0).words(), (slots, 1))
    for name, values in settings.items():
        records(rows)[name] = values
    return rows


def sequence_state(batch: int, vocabulary: int = 1, **arrays: np.ndarray) -> SequenceState:
    """The state of active sequences that know nothing but the given `arrays`."""
    known = {
        "active": np.ones(batch, np.int32),
        "token_ids": np.zeros((batch, 1), np.int32),
        "kvcache_start_index": np.zeros(batch, np.int32),
        "positions": np.zeros(batch, np.int32),
        "token_counts": np.zeros((batch, vocabulary), np.int32),
        "emitted_index": np.zeros(batch, np.int32),
        "emitted": np.zeros((batch, 2), np.int32),
    }
    return SequenceState(**known | arrays)


def tree_nodes(tokens: np.ndarray, **arrays: np.ndarray) -> TreeNodes:
    """A tree of these `tokens` [B, T] that is else as `arrays` say."""
    known = {name: np.zeros(tokens.shape, np.int32) for name in ("parents", "depths", "draw_positions")}
    ancestors = np.zeros((*tokens.shape, tokens.shape[1]), bool)
    return TreeNodes(**{"tokens": tokens, "ancestors": ancestors} | known | arrays)


def accepted_arrays(slots: int, most: int) -> Accepted:
    """Unwritten arrays of what acceptance writes."""
    return Accepted(*[np.full(shape, 77, np.int32) for shape in ((slots, most), (slots, most), slots)])
