"""Masks and biases of logits against definitions written out as loops, and where they stand among all that follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_bundles import sampling_rows

from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.twin import NumpySampling

KERNELS = NumpySampling()


def packed(allowed: np.ndarray) -> np.ndarray:
    """`allowed` bool [M, V] as masks [M, ceil(V / 32)] uint32, bit by bit."""
    masks = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint32)
    for row, token in np.argwhere(allowed):
        masks[row, token // 32] |= np.uint32(1 << token % 32)
    return masks


def constrained(logits: np.ndarray, allowed: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    """One row [V], token by token in float32."""
    result = logits.copy()
    for token, value in enumerate(logits):
        if bias is not None:
            with np.errstate(invalid="ignore"):
                total = np.float32(value + bias[token])
            result[token] = -np.inf if np.isnan(total) else total
        if allowed is not None and not allowed[token]:
            result[token] = -np.inf
    return result


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.integers(1, 300),
    slots=st.integers(1, 4),
    nodes=st.integers(1, 5),
    masks=st.integers(1, 6),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_lose_what_masks_forbid_and_gain_their_biases(vocabulary, slots, nodes, masks, density, seed):
    rng = np.random.default_rng(seed)
    rows = slots * nodes
    logits = rng.normal(0, 3, (rows, vocabulary)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = np.nan
    logits[rng.random(logits.shape) < 0.05] = np.inf
    logits[rng.random(logits.shape) < 0.05] = -np.inf
    bias = rng.normal(0, 3, (slots, vocabulary)).astype(np.float32)
    bias[rng.random(bias.shape) < 0.05] = -np.inf
    biased = rng.integers(0, 2, slots)
    bias[biased == 0] = np.nan  # not read
    allowed = rng.random((masks, vocabulary)) < density
    mask_rows = rng.integers(-2, masks + 2, rows).astype(np.int32)
    expected = np.stack(
        [
            constrained(
                logits[row],
                allowed[mask_rows[row]] if 0 <= mask_rows[row] < masks else None,
                bias[row // nodes] if biased[row // nodes] else None,
            )
            for row in range(rows)
        ]
    )
    KERNELS.constrain_logits(logits, mask_rows, packed(allowed), bias, sampling_rows(slots, biased=biased))
    np.testing.assert_array_equal(logits.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("vocabulary", [7, 32, 33, 128_256])
def test_bits_behind_the_vocabulary_mean_nothing(vocabulary):
    masks = np.full((1, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32)
    logits, bias = np.ones((1, vocabulary), np.float32), np.empty((1, vocabulary), np.float32)
    KERNELS.constrain_logits(logits, np.zeros(1, np.int32), masks, bias, sampling_rows(1))
    assert (logits == 1).all()


def test_masks_of_another_width_are_refused():
    arguments = np.zeros((1, 64), np.float32), np.zeros(1, np.int32), np.zeros((1, 3), np.uint32)
    with pytest.raises(KernelError, match="constrain_logits: masks have 3 words; expected 2, a bit for each of 64 tok"):
        KERNELS.constrain_logits(*arguments, np.zeros((1, 64), np.float32), sampling_rows(1))


def test_biases_come_before_penalties_and_temperature():
    """A repetition penalty divides what is positive and multiplies what is not: the order shows."""
    rows = sampling_rows(1, repetition_penalty=2, temperature=0.5, biased=1)
    logits, bias = np.array([[4, -1, 3]], np.float32), np.array([[-6, 3, 0]], np.float32)
    counts = np.array([[1, 1, 0]], np.int32)
    KERNELS.constrain_logits(logits, np.full(1, -1, np.int32), np.zeros((1, 1), np.uint32), bias, rows)
    KERNELS.process_logits(logits, counts, rows, logits)
    assert logits.tolist() == [[-8, 2, 6]]


@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("left", [1, 6, 7, 8, 200])
def test_filters_see_what_masks_have_left_alone(top_k, top_p, left):
    """They keep the tokens that they keep where the vocabulary is no larger than that."""
    rng = np.random.default_rng(left)
    ids = np.sort(rng.permutation(300)[:left])
    few = rng.normal(0, 2, (1, left)).astype(np.float32)
    masked = np.full((1, 300), -np.inf, np.float32)
    masked[0, ids] = few[0]
    rows, bounds = sampling_rows(1, top_k=top_k, top_p=top_p, min_p=0.01), np.zeros((2, 1), np.float32)
    KERNELS.filter_threshold(few, rows, bounds[0])
    KERNELS.filter_threshold(masked, rows, bounds[1])
    assert (few >= bounds[0]).tolist() == (masked[:, ids] >= bounds[1]).tolist()


def test_a_row_of_which_nothing_remains_selects_id_0():
    rows, token = sampling_rows(1, temperature=1), np.full(1, 9, np.int32)
    logits = np.ones((1, 40), np.float32)
    KERNELS.constrain_logits(logits, np.zeros(1, np.int32), np.zeros((1, 2), np.uint32), np.zeros_like(logits), rows)
    KERNELS.argmax(logits, token)
    assert token.tolist() == [0]
    KERNELS.sample(logits, np.full(1, -np.inf, np.float32), rows, np.zeros(1, np.int32), token)
    assert token.tolist() == [0]
