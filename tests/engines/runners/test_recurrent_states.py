"""Recurrent states in memory: what commits change and what they must not, replayed paths, slots that change places."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.states import ConvColumns, DeltaMatrix, KVRows, LayerState
from edgellm.engines.runners.prefill import prompt_chunks
from edgellm.engines.runners.states import ModelStates, ReplayInputs
from edgellm.kernels.acceptance.contract import Accepted, Pending

CONFIG = DecoderConfig("llama", 96, 64, 128, 2, 4, 2, 16, 256, 1e-5, 10000.0, 16, "float16", True)
LAYERS: list[LayerState] = [
    ConvColumns(0, 12, 3),
    KVRows(1, 2, 16),
    ConvColumns(2, 2 * 1 * 4 + 2 * 6, 4),
    DeltaMatrix(2, (1, 2), (4, 6)),
]
RECURRENT = ["conv_columns_0", "conv_columns_2", "delta_matrix_2"]
SLOTS, ROWS, NODES = 3, 20, 7


def made(*more: LayerState, seed: int = 3) -> ModelStates:
    states = ModelStates(NumpyBackend(CONFIG), [*LAYERS, *more], SLOTS, ROWS, np.arange(SLOTS, dtype=np.int32))
    random = np.random.default_rng(seed)
    for tensor in states.tensors.values():
        tensor[...] = random.standard_normal(tensor.shape)
    return states


def copies(states: ModelStates) -> dict[str, np.ndarray]:
    return {name: tensor.copy() for name, tensor in states.tensors.items()}


def fill(kept: dict[str, np.ndarray], random: np.random.Generator) -> None:
    """What a step keeps: anything, but for gates, which are logarithms of decays and weights from 0 to 1."""
    for name, array in kept.items():
        array[...] = random.standard_normal(array.shape)
        if name.startswith("delta_gates"):
            half = array.shape[2] // 2
            array[..., :half] = -np.abs(array[..., :half])
            array[..., half:] = 1 / (1 + np.exp(-array[..., half:]))


def plain_steps(states: ModelStates, slot: int, kept: dict[str, np.ndarray], path: list[int]) -> None:
    """Take a path of a tree as plain decoding does: token by token, each a step of its own."""
    one = ReplayInputs(NumpyBackend(CONFIG).zeros_side_by_side, LAYERS, 1, 1).of(1, 1)
    for node in path:
        for name, array in one.items():
            array[...] = kept[name][slot : slot + 1, node : node + 1]
        (commit,) = states.commit_step(slice(slot, slot + 1), np.ones(1, np.int32), one)
        assert commit is not None
        commit()


def test_what_a_step_that_is_committed_later_is_bound_to() -> None:
    states = made()
    kept = states.kept_inputs(SLOTS, 1).of(2, 1)
    assert {name: array.shape for name, array in kept.items()} == {
        "conv_inputs_0": (2, 1, 12),
        "conv_inputs_2": (2, 1, 20),
        "delta_rows_2": (2, 1, 20),
        "delta_gates_2": (2, 1, 4),
    }
    assert states.bound(slice(0, 2), kept).keys() == (
        states.tensors.keys() | {"present_k_cache_1", "present_v_cache_1"} | kept.keys()
    )
    prefill = states.bound(slice(1, 2))
    assert prefill.keys() == states.tensors.keys() | {f"present_{name}" for name in states.tensors}
    assert states.is_recurrent and [states.last_of[layer] for layer in range(3)] == [
        "conv_columns_0",
        "v_cache_1",
        "delta_matrix_2",
    ]


def test_models_that_attend_alone_keep_and_commit_nothing() -> None:
    states = ModelStates(NumpyBackend(CONFIG), LAYERS[1:2], SLOTS, ROWS, np.arange(SLOTS, dtype=np.int32))
    assert not states.is_recurrent and states.kept_inputs(SLOTS, NODES).of(2, 5) == {}
    assert states.commit_step(slice(0, 2), np.ones(2, np.int32), {}) == []
    assert list(states.recurrent_of_slot(0)) == [] and states.cut(9, 4) == 4


def test_steps_of_others_change_nothing_of_an_idle_slot() -> None:
    states, random = made(), np.random.default_rng(5)
    before = copies(states)
    kept = states.kept_inputs(SLOTS, 1).of(SLOTS, 1)
    fill(kept, random)
    (commit,) = states.commit_step(slice(0, SLOTS), np.asarray([1, 0, 1], np.int32), kept)
    assert commit is not None
    for _ in range(4):
        commit()
    for name, tensor in states.tensors.items():
        changed = [bool((tensor[slot] != before[name][slot]).any()) for slot in range(SLOTS)]
        assert changed == ([True, False, True] if name in RECURRENT else [False] * 3), name


def test_a_slot_that_begins_anew_has_nothing_of_what_it_had() -> None:
    states = made()
    before = copies(states)
    states.clear_slot(1)
    for name, tensor in states.tensors.items():
        assert (tensor[[0, 2]] == before[name][[0, 2]]).all()
        assert (tensor[1] == (0 if name in RECURRENT else before[name][1])).all()


def test_slots_change_places_with_all_that_they_hold() -> None:
    states = made()
    before = copies(states)
    states.move(0, 2, ROWS, True)
    states.move(0, 1, ROWS, False)
    for name, tensor in states.tensors.items():
        assert (tensor == before[name][[2, 2, 0]]).all(), name


def test_rows_move_and_recurrent_states_take_the_accepted_path() -> None:
    states, plain = made(KVRows(3, 1, 8)), made()  # Gemma 4 has fewer heads in some layers
    kept = dict(states.kept_inputs(SLOTS, NODES).of(SLOTS, NODES))
    fill(kept, np.random.default_rng(6))
    indices = np.asarray([[0, 2, 5], [-1, -1, -1], [0, 6, -1]], np.int32)
    accepted = Accepted(indices, np.zeros((SLOTS, 3), np.int32), np.asarray([3, 0, 2], np.int32))
    pending = Pending(
        np.zeros((SLOTS, 3, 1), np.float32),
        *(np.zeros(shape, np.int32) for shape in ((SLOTS, 3), (SLOTS,), (SLOTS,), (SLOTS, 1))),
    )
    start, features = np.asarray([4, 0, 9], np.int32), np.arange(SLOTS * NODES, dtype=np.float32)
    before = copies(states)
    states.commit(start, accepted, features.reshape(SLOTS, NODES, 1), pending, kept)()
    for slot, path in enumerate([[0, 2, 5], [], [0, 6]]):
        plain_steps(plain, slot, kept, path)
    for name in RECURRENT:
        assert (states.tensors[name] == plain.tensors[name]).all(), name
        assert (states.tensors[name][1] == before[name][1]).all()
    for name in ("k_cache_1", "k_cache_3"):
        assert (states.tensors[name][0, :, 4:7] == before[name][0][:, [4, 6, 9]]).all()
    assert pending.features[0, :, 0].tolist() == [0, 2, 5]


@pytest.mark.parametrize("rounds", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_the_state_after_many_rounds_is_that_of_plain_decoding(rounds: int) -> None:
    states, plain, random = made(), made(), np.random.default_rng(rounds)
    kept = dict(states.kept_inputs(SLOTS, NODES).of(SLOTS, NODES))
    indices, counts = np.zeros((SLOTS, NODES), np.int32), np.zeros(SLOTS, np.int32)
    replay = states.replay(slice(0, SLOTS), kept, indices, counts)
    held = 0
    for number in range(rounds):
        fill(kept, random)
        indices[...] = -1
        for slot in range(SLOTS):
            path = [0, *sorted(random.choice(range(1, NODES), random.integers(0, 4), replace=False).tolist())]
            path = path if random.random() > 0.1 else []
            indices[slot, : len(path)], counts[slot] = path, len(path)
            plain_steps(plain, slot, kept, path)
        replay()
        if number == 100:
            tracemalloc.start()
            held = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    for name in RECURRENT:
        assert np.isfinite(states.tensors[name]).all() and (states.tensors[name] == plain.tensors[name]).all(), name
    assert grown < 1 << 16


def test_what_a_snapshot_or_a_keeper_takes_of_a_slot() -> None:
    states = made()
    saved, found = states.saved(7), {each.name: each for each in states.of_slot(1, 7)}
    assert saved.keys() == found.keys() == states.tensors.keys()
    for name, (shape, dtype) in saved.items():
        memory = found[name].memory
        assert np.shares_memory(memory, states.tensors[name][1]) and memory.dtype == np.dtype(dtype)
        assert (memory.shape[0], found[name].rows, memory.shape[2]) == shape
    assert [each.name for each in states.recurrent_of_slot(2)] == RECURRENT
    assert all(each.rows == each.memory.shape[1] for each in states.recurrent_of_slot(2))


def test_states_are_of_one_place() -> None:
    states = made()
    assert [states.cut(9, wanted) for wanted in (12, 9, 8, 0)] == [9, 9, 0, 0]


@pytest.mark.parametrize("fixed", [False, True])
def test_chunks_end_where_states_are_wanted(fixed: bool) -> None:
    limits = EngineLimits(1, 128, 512)
    for first, stops in ((0, ()), (0, (3, 130, 200)), (37, (3, 37, 38, 299, 300, 400)), (299, (250,))):
        chunks, position, ends = list(prompt_chunks(limits, None if fixed else 1, first, 300, stops)), first, []
        for tokens, size in chunks:
            assert 0 < tokens <= size <= 128 and (size in limits.prefill_chunks or not fixed)
            position += tokens
            ends.append(position)
        assert position == 300 and {stop for stop in stops if first < stop < 300} <= set(ends)
    assert [tokens for tokens, _ in prompt_chunks(limits, None if fixed else 1, 0, 300)] == [128, 128, 44] or fixed
