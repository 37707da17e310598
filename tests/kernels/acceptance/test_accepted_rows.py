"""What follows acceptance, in NumPy against plain Python: caches, features and state take what was accepted."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_bundles import accepted_arrays, sequence_state

from edgellm.kernels.acceptance.contract import Accepted, Pending
from edgellm.kernels.acceptance.twin import NumpyAcceptance
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import IN_PROMPT, SequenceState

ACCEPTANCE = NumpyAcceptance()


@pytest.fixture
def rng():
    return np.random.default_rng(31)


def pending_arrays(slots: int, rows: int, features: np.ndarray | None = None) -> Pending:
    """What the draft has not seen, of `rows` rows; features of width 1 unless given."""
    if features is None:
        features = np.zeros((slots, rows, 1), np.float32)
    counts, start = np.full(slots, 4, np.int32), np.full(slots, 5, np.int32)
    return Pending(features, np.full((slots, rows), 9, np.int32), counts, start, np.full((slots, 1), 6, np.int32))


def compact(
    caches: list[np.ndarray], start: np.ndarray, indices: np.ndarray, lengths: np.ndarray, wraps: bool = False
) -> None:
    """`move_accepted` with features that nobody looks at."""
    slots, most = indices.shape
    accepted = Accepted(indices, np.zeros_like(indices), lengths)
    dtype = caches[0].dtype if caches else np.float32
    pending = pending_arrays(slots, most, np.zeros((slots, most, 1), dtype))
    ACCEPTANCE.move_accepted(caches, start, accepted, np.zeros((slots, 64, 1), dtype), pending, wraps)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
def test_compaction_moves_accepted_rows(rng, dtype):
    """Overlapping moves, several caches and slots, lengths 0 to W; everything else stays."""
    slots, rows, most = 4, 40, 7
    for _ in range(20):
        caches = [rng.integers(0, 30_000, (slots + 1, 2, rows, 3)).astype(dtype) for _ in range(5)]
        start = rng.integers(0, rows - 20, slots).astype(np.int32)
        lengths = rng.integers(0, most + 1, slots).astype(np.int32)
        indices = np.full((slots, most), -1, np.int32)
        expected = [cache.copy() for cache in caches]
        for slot in range(slots):
            path = np.sort(rng.permutation(np.arange(1, 20))[: max(0, lengths[slot] - 1)])
            indices[slot, : lengths[slot]] = [0, *path][: lengths[slot]]
            for i in range(lengths[slot]):
                for cache, target in zip(caches, expected, strict=True):
                    target[slot, :, start[slot] + i] = cache[slot, :, start[slot] + indices[slot, i]]
        compact(caches, start, indices, lengths)
        for cache, target in zip(caches, expected, strict=True):
            np.testing.assert_array_equal(cache, target)


def test_compaction_stays_inside_the_cache(rng):
    cache = rng.normal(size=(1, 1, 6, 2)).astype(np.float32)
    before = cache.copy()
    indices = np.array([[0, 2, 9]], np.int32)
    compact([cache], np.array([3], np.int32), indices, np.array([3], np.int32))
    np.testing.assert_array_equal(cache[0, 0], before[0, 0, [0, 1, 2, 3, 5, 5]])


def test_compaction_goes_round_a_ring(rng):
    """Wherever in the ring the tree begins; positions have long been beyond its rows."""
    rows, most = 24, 6
    for start in range(100, 160):
        cache = rng.normal(size=(2, 2, rows, 3)).astype(np.float32)
        expected, length = cache.copy(), int(rng.integers(1, most + 1))
        indices = np.full((1, most), -1, np.int32)
        indices[0, :length] = [0, *np.sort(rng.permutation(np.arange(1, 20))[: length - 1])]
        for i, index in enumerate(indices[0, :length]):
            expected[0, :, (start + i) % rows] = cache[0, :, (start + index) % rows]
        compact([cache], np.array([start], np.int32), indices, np.array([length], np.int32), wraps=True)
        np.testing.assert_array_equal(cache, expected)


def test_features_are_gathered(rng):
    hidden = rng.normal(size=(3, 9, 4)).astype(np.float32)
    pending = np.zeros((3, 6, 4), np.float32)
    indices = np.array([[0, 3, 8, -1], [-1, -1, -1, -1], [0, -1, -1, -1]], np.int32)
    accepted = Accepted(indices, np.zeros_like(indices), np.array([3, 0, 1], np.int32))
    caches, start = [np.zeros((3, 1, 40, 1), np.float32)], np.zeros(3, np.int32)
    ACCEPTANCE.move_accepted(caches, start, accepted, hidden, pending_arrays(3, 6, pending))
    np.testing.assert_array_equal(pending[0, :3], hidden[0, [0, 3, 8]])
    np.testing.assert_array_equal(pending[2, 0], hidden[2, 0])
    assert not pending[0, 3:].any()
    assert not pending[1].any()
    assert not pending[2, 1:].any()


def state_arrays(slots: int, active: np.ndarray) -> SequenceState:
    return sequence_state(
        slots,
        active=active,
        token_ids=np.full((slots, 1), 50, np.int32),
        kvcache_start_index=np.arange(20, 20 + slots, dtype=np.int32),
        positions=np.arange(21, 21 + slots, dtype=np.int32),
        token_counts=np.full((slots, 60), IN_PROMPT, np.int32),
    )


def test_advance_takes_the_accepted_tokens():
    ids = np.array([[7, 8, 7, -1], [3, 3, 3, 3], [5, -1, -1, -1]], np.int32)
    lengths, active = np.array([3, 4, 1], np.int32), np.array([1, 0, 1], np.int32)
    state, pending, emitted = state_arrays(3, active), pending_arrays(3, 6), np.full((3, 5), 99, np.int32)
    before = [array.copy() for array in (*state, *pending)]
    ACCEPTANCE.advance_accepted(Accepted(np.zeros_like(ids), ids, lengths), state, pending, emitted)
    assert emitted.tolist() == [[3, 7, 8, 7, -1], [0, -1, -1, -1, -1], [1, 5, -1, -1, -1]]
    for array, old in zip((*state, *pending), before, strict=True):
        np.testing.assert_array_equal(array[1], old[1])
    assert state.token_ids[[0, 2], 0].tolist() == [7, 5]
    assert state.kvcache_start_index.tolist() == [23, 21, 23]
    assert state.positions.tolist() == [24, 22, 24]
    assert (state.token_counts - IN_PROMPT)[0, [7, 8]].tolist() == [2, 1]
    assert (state.token_counts - IN_PROMPT).sum(axis=1).tolist() == [3, 0, 1]
    assert pending.token_ids[0].tolist() == [7, 8, 7, -1, -1, -1]
    assert pending.token_ids[2].tolist() == [5, -1, -1, -1, -1, -1]
    assert pending.counts.tolist() == [3, 4, 1]
    assert pending.start.tolist() == [20, 5, 22]
    assert pending.last[:, 0].tolist() == [2, 6, 0]


def test_plain_steps_append_to_the_pending_input(rng):
    hidden = rng.normal(size=(4, 1, 3)).astype(np.float32)
    features = np.zeros((4, 2, 3), np.float32)
    ids, counts = np.full((4, 2), -1, np.int32), np.array([1, 0, 2, 1], np.int32)
    start, last = np.full(4, -7, np.int32), np.full((4, 1), -7, np.int32)
    tokens, active = np.array([11, 12, 13, 14], np.int32), np.array([1, 1, 1, 0], np.int32)
    base = np.array([30, 40, 50, 60], np.int32)
    state = sequence_state(4, active=active, kvcache_start_index=base)
    ACCEPTANCE.append_pending(hidden, tokens, state, Pending(features, ids, counts, start, last))
    assert counts.tolist() == [2, 1, 2, 1]  # the third was full, the fourth is idle
    assert ids.tolist() == [[-1, 11], [12, -1], [-1, -1], [-1, -1]]
    assert start.tolist() == [28, 39, -7, -7]
    assert last[:, 0].tolist() == [1, 0, -7, -7]
    np.testing.assert_array_equal(features[0, 1], hidden[0, 0])
    np.testing.assert_array_equal(features[1, 0], hidden[1, 0])
    assert not features[2:].any()


def test_wrong_arguments_are_named():
    def integers(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    with pytest.raises(KernelError, match=r"emitted has 4 columns; expected W \+ 1 = 5"):
        state = state_arrays(2, integers(2))
        ACCEPTANCE.advance_accepted(accepted_arrays(2, 4), state, pending_arrays(2, 6), integers(2, 4))
    with pytest.raises(KernelError, match=r"3 pending rows \(Q\); expected at least W = 4"):
        hidden, cache = np.zeros((2, 8, 1), np.float32), np.zeros((2, 1, 9, 4), np.float32)
        ACCEPTANCE.move_accepted([cache], integers(2), accepted_arrays(2, 4), hidden, pending_arrays(2, 3))
    caches = [np.zeros((2, 1, 9, 4), np.float32), np.zeros((2, 1, 8, 4), np.float32)]
    with pytest.raises(KernelError, match=r"caches\[1\] is float32 \[2, 1, 8, 4\]; expected it to be like caches\[0\]"):
        compact(caches, integers(2), integers(2, 4), integers(2))
    with pytest.raises(KernelError, match="no caches"):
        compact([], integers(2), integers(2, 4), integers(2))
    with pytest.raises(KernelError, match=r"caches hold 2 slots; expected at least B = 3"):
        compact(caches[:1], integers(3), integers(3, 4), integers(3))
