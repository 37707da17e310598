"""The states of a model in memory: bound where they are, exchanged, copied, committed, handed to snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.states import decoder_states
from edgellm.engines.runners.states import ModelStates
from edgellm.kernels.acceptance.contract import Accepted, Pending

CONFIG = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
SLOTS, ROWS = 3, 20


@pytest.fixture(params=["compute", "int8"])
def states(request: pytest.FixtureRequest) -> ModelStates:
    made = ModelStates(
        NumpyBackend(CONFIG), decoder_states(CONFIG, request.param), SLOTS, ROWS, np.arange(SLOTS, dtype=np.int32)
    )
    random = np.random.default_rng(3)
    for tensor in made.tensors.values():
        tensor[...] = random.integers(-127, 128, tensor.shape)
    return made


def copies(states: ModelStates) -> dict[str, np.ndarray]:
    return {name: tensor.copy() for name, tensor in states.tensors.items()}


def test_engines_change_states_where_they_are(states: ModelStates) -> None:
    bound = states.bound(slice(1, 3))
    assert bound.keys() == states.tensors.keys() | {f"present_{name}" for name in states.tensors}
    for name, tensor in states.tensors.items():
        assert bound[name] is bound[f"present_{name}"] and np.shares_memory(bound[name], tensor[1:])
    assert states.last_of[1] == list(states.tensors)[-1]


def test_slots_change_places_with_the_rows_that_steps_write(states: ModelStates) -> None:
    before, starts = copies(states), states._starts
    states.move(0, 2, ROWS, True)
    states.move(0, 1, ROWS, False)
    for name, tensor in states.tensors.items():
        assert (tensor == before[name][[2, 2, 0]]).all()
    assert starts.tolist() == [2, 2, 0]


def test_rows_that_nobody_asks_for_stay_where_they_are(states: ModelStates) -> None:
    before = copies(states)
    states.move(1, 2, 7, True)
    states.move(2, 0, 7, False)
    for name, tensor in states.tensors.items():
        assert (tensor[:, :, :7] == before[name][[1, 2, 1], :, :7]).all()
        assert (tensor[:, :, 7:] == before[name][:, :, 7:]).all()


def test_accepted_rows_move_together_with_their_scales(states: ModelStates) -> None:
    before, start = copies(states), np.asarray([4, 0, 9], np.int32)
    indices = np.asarray([[0, 2, 5], [0, 0, 0], [0, 1, 4]], np.int32)
    accepted = Accepted(indices, np.zeros((SLOTS, 3), np.int32), np.asarray([3, 1, 2], np.int32))
    features = np.arange(SLOTS * 6, dtype=np.float32).reshape(SLOTS, 6, 1)
    pending = Pending(
        np.zeros((SLOTS, 3, 1), np.float32),
        *(np.zeros(shape, np.int32) for shape in ((SLOTS, 3), (SLOTS,), (SLOTS,), (SLOTS, 1))),
    )
    states.commit(start, accepted, features, pending)()
    for name, tensor in states.tensors.items():
        expected = before[name]
        for slot, length in enumerate((3, 1, 2)):
            rows = start[slot] + indices[slot, :length]
            expected[slot, :, start[slot] : start[slot] + length] = expected[slot, :, rows].swapaxes(0, 1)
        assert (tensor == expected).all(), name
    assert pending.features[0, :, 0].tolist() == [0, 2, 5]


def test_a_snapshot_takes_the_rows_of_one_slot(states: ModelStates) -> None:
    saved = states.saved(7)
    found = {each.name: each for each in states.of_slot(1, 7)}
    assert saved.keys() == found.keys() == states.tensors.keys()
    for name, (shape, dtype) in saved.items():
        memory = found[name].memory
        assert np.shares_memory(memory, states.tensors[name][1]) and memory.dtype == np.dtype(dtype)
        assert (shape[0], found[name].rows, shape[2]) == shape and memory.shape == (shape[0], ROWS, shape[2])
    assert states.cut(7, 5) == 5


def test_nothing_is_held_once_cleared(states: ModelStates) -> None:
    list(states.of_slot(0, 1))
    states.clear()
    assert not states.tensors and not list(states.of_slot(1, 1))
