"""What slots' sampling is on the device: records, biases and masks, on the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest
from decode_models import LLAMA

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.runners.sampling_state import SamplingState, SamplingValues
from edgellm.kernels.sampling.record import SamplingRecord, records

VOCABULARY = 70
BIASED = SamplingValues(temperature=0.5, logit_bias=((3, 2.0), (69, -1.5)))


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(NumpyBackend(LLAMA), 3, VOCABULARY, 8, 6)


def test_a_record_holds_every_value_of_a_request(state):
    values = SamplingValues(0.7, 5, 0.9, 0.02, 1.2, 0.1, 0.2, seed=(1 << 63) + 5, sequence=-3, logit_bias=((1, 1.0),))
    state.set(1, values, [2, 3])
    for slot, expected in ((0, SamplingRecord()), (1, values)):
        found = records(state.rows(slice(slot, slot + 1)))[0]
        for name in found.dtype.names:
            assert found[name] == pytest.approx(getattr(expected, name)), name
    assert (values.penalizes, values.plain, SamplingValues().plain) == (True, False, True)
    assert not SamplingRecord().penalizes


def test_biases_go_where_their_requests_go(state):
    state.set(2, BIASED, [1])
    assert state.biased(slice(0, 3)) and not state.biased(slice(0, 2))
    state.move(2, 0)
    state.set(2, SamplingValues(), [1])
    logits = np.zeros((3, VOCABULARY), np.float32)
    state.constrain(slice(0, 3), logits)
    assert np.flatnonzero(logits).tolist() == [3, 69]
    assert logits[0, [3, 69]].tolist() == [2, -1.5]
    state.set(0, SamplingValues(logit_bias=((4, 1.0),)), [1])  # of the former biases nothing is left
    logits[:] = 0
    state.constrain(slice(0, 3), logits)
    assert np.argwhere(logits).tolist() == [[0, 4]]


def test_each_row_obeys_the_mask_that_was_uploaded_for_it(state):
    """Rows of trees of slots 1 and 2, two of which share a mask; none before and none after."""
    logits = np.ones((2, 3, VOCABULARY), np.float32)
    state.constrain(slice(1, 3), logits)
    assert (logits == 1).all()
    masks = state.masks
    masks.host_masks[0], masks.host_masks[1] = 0, 0
    masks.host_masks[0, 2], masks.host_masks[1, 0] = 1 << 5, 3
    masks.host_rows[:] = [1, -1, 0, 0, -1, -1]
    masks.upload(6, 2)
    state.constrain(slice(1, 3), logits)
    kept = [[np.flatnonzero(row == 1).tolist() for row in slot] for slot in logits]
    every = list(range(VOCABULARY))
    assert kept == [[[0, 1], every, [69]], [[69], every, every]]
    masks.clear()
    again = np.ones((3, VOCABULARY), np.float32)
    state.constrain(slice(0, 3), again)
    assert (again == 1).all()
