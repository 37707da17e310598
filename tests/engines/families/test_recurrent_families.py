"""Families with recurrent layers: steps and commits, chunks, trees, batches, against transformers and themselves."""

from __future__ import annotations

import numpy as np
import pytest
from golden_files import golden_folder, largest_difference
from random_trees import random_trees
from recurrent_steps import RecurrentSteps
from safetensors import safe_open

from edgellm.engines.model.decoder import decoder_program
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import decoder_states, kept_edge, state_edge

GOLDENS = golden_folder("decoder")
NAMES = (
    "lfm2",
    "lfm2_biases_wide",
    "granite4_hybrid",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_5_text_narrow",
    "qwen3_5_tied",
)
PROMPT = 9
TOLERANCE = 1e-4


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """The same bits in all states."""
    assert first.keys() == second.keys()
    assert [name for name, held in first.items() if not np.array_equal(held, second[name])] == []


every_family = pytest.mark.parametrize("name", NAMES)


def generated(name: str) -> list[int]:
    """The tokens that transformers generated behind the prompt."""
    with safe_open(GOLDENS / name / "expected.safetensors", "np") as file:
        return file.get_tensor("generated")[0].tolist()


@every_family
def test_greedy_tokens_equal_transformers(name: str) -> None:
    steps, expected = RecurrentSteps(GOLDENS / name), generated(name)
    logits, found = steps.prefill(steps.token_ids[0, :PROMPT].tolist(), chunk=4)[-1], list[int]()
    for _ in expected:
        found.append(int(logits.argmax()))
        logits = steps.decode(found[-1:])[0]
        steps.accept([[0]])
    assert len(found) == 64 and found == expected


@every_family
def test_every_prefix_then_steps(name: str) -> None:
    steps = RecurrentSteps(GOLDENS / name)
    ids, expected, empty = steps.token_ids[0].tolist(), steps.expected[0], steps.copy()
    for prefix in range(1, len(ids)):
        steps.restore(empty, [0])
        logits = [*steps.prefill(ids[:prefix])]
        for token in ids[prefix : prefix + 3]:
            logits.append(steps.decode([token])[0])
            steps.accept([[0]])
        assert largest_difference(np.stack(logits), expected[: len(logits)]) <= TOLERANCE


@every_family
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 16])
def test_chunks_and_steps_leave_the_same_states(name: str, chunk: int) -> None:
    """With KV rows of int8, as these compute in float64: elsewhere products of matrices round otherwise where there are
    other numbers of rows. What recurrent layers add is float32 either way, and never does."""
    whole, chunked, stepped = (RecurrentSteps(GOLDENS / name, kv_cache="int8") for _ in range(3))
    ids = whole.token_ids[0].tolist()
    logits = whole.prefill(ids)
    assert np.array_equal(chunked.prefill(ids, chunk, padding=chunk % 3).astype(np.float32), logits.astype(np.float32))
    for token in ids:
        stepped.decode([token])
        stepped.accept([[0]])
    assert_same(whole.held(), chunked.held())
    assert_same(whole.held(), stepped.held())


@every_family
def test_steps_change_no_state_before_their_commit(name: str) -> None:
    steps = RecurrentSteps(GOLDENS / name)
    steps.prefill([5, 3, 8])
    before = steps.held()
    first = steps.decode([7])
    steps.verify(np.asarray([[7, 1, 2, 9]]), np.asarray([[-1, 0, 0, 2]]))
    assert_same(before, steps.held())
    assert np.array_equal(steps.decode([7]), first)
    steps.accept([[0]])
    assert not any(np.array_equal(held, before[state]) for state, held in steps.held().items())


@every_family
def test_nodes_of_trees_equal_steps_along_their_paths(name: str) -> None:
    """Random trees with padding; the state behind an accepted path is that of the steps."""
    random = np.random.default_rng(19)
    tree_steps, steps = (RecurrentSteps(GOLDENS / name, kv_cache="int8") for _ in range(2))
    chains = [(random.integers(0, 80, (1, 6)), np.asarray([[-1, 0, 1, 2, 3, 4]]))]
    drawn = [random_trees(random, 1, 12, 80, 0.5) for _ in range(3)]
    for tokens, parents in chains + [(trees.tokens, trees.parents) for trees in drawn]:
        prompt = random.integers(0, 80, random.integers(1, 9)).tolist()
        for each in (tree_steps, steps):
            each.restore({state: np.zeros_like(cache) for state, cache in each.caches.items()}, [0])
            each.prefill(prompt)
        logits, held, length = tree_steps.verify(tokens, parents)[0], steps.copy(), steps.lengths
        for node in range(tokens.shape[1]):
            if tokens[0, node] < 0:
                continue
            path = [node]
            while parents[0, path[0]] >= 0:
                path.insert(0, parents[0, path[0]])
            steps.restore(held, length)
            for number in path:
                plain = steps.decode([tokens[0, number]])[0]
                steps.accept([[0]])
            assert np.array_equal(plain.astype(np.float32), logits[node].astype(np.float32))
        tree_steps.accept([path])  # of the last node
        assert_same(steps.held(), tree_steps.held())


@every_family
def test_sequences_in_a_batch_are_what_they_are_alone(name: str) -> None:
    """At different lengths, one of them idle: its state stays."""
    lengths, ids = [3, 17, 9], np.random.default_rng(3).integers(0, 80, (3, 20))
    together = RecurrentSteps(GOLDENS / name, batch=3)
    alone = [RecurrentSteps(GOLDENS / name) for _ in lengths]
    for slot, (each, length) in enumerate(zip(alone, lengths, strict=True)):
        each.prefill(ids[slot, :length].tolist())
        together.lengths[slot] = length
        for state, cache in each.caches.items():
            together.caches[state][slot] = cache[0]
    tokens, idle = [int(ids[slot, length]) for slot, length in enumerate(lengths)], together.held(1)
    for _ in range(3):
        logits = together.decode([tokens[0], -1, tokens[2]])
        together.accept([[0], [], [0]])
        for slot in (0, 2):
            assert np.abs(alone[slot].decode([tokens[slot]])[0] - logits[slot]).max() <= TOLERANCE
            alone[slot].accept([[0]])
            for state, held in alone[slot].held().items():
                np.testing.assert_allclose(together.held(slot)[state], held, atol=TOLERANCE)
    assert_same(idle, together.held(1))


@every_family
def test_programs_say_what_they_take_and_keep(name: str) -> None:
    config = RecurrentSteps(GOLDENS / name).config
    states = decoder_states(config)
    for phase, tokens, own in (("prefill", 16, "state_tokens"), ("decode", 1, None), ("verify", 8, "node_parents")):
        program = decoder_program(config, EngineShape(phase, 2, tokens, 64, 80, selected=tokens))
        assert program.states == state_edge(states, 2, 80)
        assert program.kept == ({} if phase == "prefill" else kept_edge(states, 2, tokens))
        assert program.kept.items() <= program.outputs.items() and program.kept.items() <= program.kinds.items()
        named = {"state_tokens": ((2,), "int32"), "node_parents": ((2, 8), "int32")}
        assert {name: kind for name, kind in program.inputs.items() if name in named} == (
            {own: named[own]} if own else {}
        )
        wide = [name for name, (_, dtype) in program.edge.items() if name in program.weights and dtype == "float32"]
        small = ("conv.weight", "conv.bias", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias", ".D")
        assert wide == [name for name in program.weights if name.endswith(small)] and wide


@every_family
def test_each_state_would_be_missed(name: str) -> None:
    steps = RecurrentSteps(GOLDENS / name)
    steps.prefill(steps.token_ids[0, :12].tolist())
    expected = steps.decode([3])
    for cache in steps.caches.values():
        held = cache.copy()
        cache[...] = 0
        assert np.abs(steps.decode([3]) - expected).max() > 100 * TOLERANCE
        cache[...] = held
