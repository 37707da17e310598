"""The acceptance kernels in NumPy against plain Python: walks, typical acceptance, draws, limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from random_trees import random_trees

from edgellm.kernels.acceptance_interface import MAXIMUM_ACCEPTED, MAXIMUM_TREE_SIZE, NodeDraws, SlotDraws
from edgellm.kernels.checks import IN_PROMPT
from edgellm.kernels.errors import KernelError
from edgellm.kernels.numpy_acceptance import NumpyAcceptance
from edgellm.kernels.numpy_kernels import NumpyKernels

ACCEPTANCE, KERNELS = NumpyAcceptance(), NumpyKernels()
NO_WORKSPACE = np.zeros(0, np.uint8)


@pytest.fixture
def rng():
    return np.random.default_rng(31)


def accepted_arrays(slots: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.full((slots, most), 77, np.int32), np.full((slots, most), 77, np.int32), np.full(slots, 77, np.int32)


def expected_walk(drawn, tokens, parents, depths, most) -> tuple[list[int], list[int]]:
    node, path, ids = 0, [0], []
    while True:
        ids.append(int(drawn[node]))
        if len(ids) == most:
            return path, ids
        for child in range(len(tokens)):
            if parents[child] == node and depths[child] == depths[node] + 1 and tokens[child] == drawn[node]:
                node = child
                path.append(child)
                break
        else:
            return path, ids


@pytest.mark.parametrize("most", [1, 2, 5, 33])
def test_walk_follows_the_drawn_tokens(rng, most):
    lengths_seen = set()
    for _ in range(20):
        tokens, parents, depths, _ = random_trees(rng, 5, 24, 3)
        drawn = rng.integers(0, 3, tokens.shape).astype(np.int32)
        depths[rng.random(depths.shape) < 0.05] += 1  # a child at a wrong depth is none
        active = np.array([1, 0, 1, 1, 2], np.int32)
        indices, ids, lengths = accepted_arrays(5, most)
        ACCEPTANCE.accept_drawn(drawn, tokens, parents, depths, active, None, indices, ids, lengths)
        for slot in range(5):
            path, emitted = ([], [])
            if active[slot] == 1:
                path, emitted = expected_walk(drawn[slot], tokens[slot], parents[slot], depths[slot], most)
            assert indices[slot].tolist() == path + [-1] * (most - len(path))
            assert ids[slot].tolist() == emitted + [-1] * (most - len(emitted))
            assert lengths[slot] == len(path)
            lengths_seen.add(len(path))
    assert len(lengths_seen) >= min(most, 4)


def test_eagle_accept_walks_along_the_argmax(rng):
    """NaN and ties among the logits, and a base whose reduced vocabulary is mapped to full ids."""
    tokens, parents, depths, _ = random_trees(rng, 6, 30, 4)
    logits = rng.integers(0, 3, (6, 30, 4)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    active = np.ones(6, np.int32)
    drawn = np.empty(180, np.int32)
    KERNELS.argmax(logits.reshape(180, 4), drawn)
    for mapping in (None, np.array([2, 0, 3, 1], np.int32)):
        greedy, expected = accepted_arrays(6, 8), accepted_arrays(6, 8)
        ACCEPTANCE.eagle_accept(logits, tokens, parents, depths, active, mapping, *greedy, NO_WORKSPACE)
        full = drawn if mapping is None else mapping[drawn]
        ACCEPTANCE.accept_drawn(full.reshape(6, 30), tokens, parents, depths, active, None, *expected)
        for found, wanted in zip(greedy, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_tree_logits_have_the_bits_of_plain_decoding(rng):
    """Each node's row equals process_logits after the tokens on its path were emitted; repeated tokens included."""
    slots, size, vocabulary = 4, 20, 9
    tokens, _, _, ancestors = random_trees(rng, slots, size, vocabulary)
    logits = rng.normal(0, 3, (slots, size, vocabulary)).astype(np.float32)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    counts[:, 3] |= IN_PROMPT
    settings = [
        np.array(values, np.float32)
        for values in ([1.3, 1, 1, 0.8], [0.2, 0, -0.4, 0], [0.5, 0, 0.1, 0], [0.7, 1, 0, 1.5])
    ]
    before = counts.copy()
    processed = np.empty_like(logits)
    ACCEPTANCE.process_tree_logits(logits, counts, tokens, ancestors, *settings, processed)
    np.testing.assert_array_equal(counts, before)
    for slot in range(slots):
        row_settings = [values[slot : slot + 1] for values in settings]
        for node in range(size):
            emitted = counts[slot : slot + 1].copy()
            for step in range(1, size):
                if ancestors[slot, node, step] and tokens[slot, step] >= 0:
                    emitted[0, tokens[slot, step]] += 1
            expected = np.empty((1, vocabulary), np.float32)
            KERNELS.process_logits(logits[slot, node : node + 1], emitted, *row_settings, expected)
            np.testing.assert_array_equal(processed[slot, node], expected[0])
    in_place = logits.copy()
    ACCEPTANCE.process_tree_logits(in_place, counts, tokens, ancestors, *settings, in_place)
    np.testing.assert_array_equal(in_place, processed)


def expected_typical(values, thresholds, drawn, tokens, parents, epsilon, delta, most) -> tuple[list[int], list[int]]:
    """The formula in float64, every path tried."""
    paths = {0: [0]}
    for node in range(1, len(tokens)):
        parent = int(parents[node])
        if parent not in paths or len(paths[parent]) == most:
            continue
        row = values[parent].astype(float)
        p = np.where(row >= thresholds[parent], np.exp(row - row.max()), 0)
        p /= p.sum()
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        bound = min(epsilon, delta * math.exp(-entropy))
        assert abs(p[tokens[node]] - bound) > 1e-4 * bound, "choose another seed: float32 cannot tell these apart"
        if p[tokens[node]] > bound:
            paths[node] = [*paths[parent], node]
    longest = max(len(path) for path in paths.values())
    path = next(path for path in paths.values() if len(path) == longest)  # in order of index
    return path, [int(tokens[node]) for node in path[1:]] + [int(drawn[path[-1]])]


@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.5, 0.9), (1e-9, 1e-9)])
def test_typical_acceptance_is_the_formula(rng, epsilon, delta):
    lengths_seen = set()
    for most in (2, 4, 33):
        tokens, parents, depths, _ = random_trees(rng, 6, 25, 12)
        values = rng.normal(0, 1.5, (6, 25, 12)).astype(np.float32)
        thresholds = np.full((6, 25), -np.inf, np.float32)
        thresholds[3:] = 0.3
        temperature = np.array([1, 0.7, 1, 2, 1, 0], np.float32)
        drawn = rng.integers(0, 12, (6, 25)).astype(np.int32)
        active = np.array([1, 1, 0, 1, 1, 1], np.int32)
        indices, ids, lengths = accepted_arrays(6, most)
        tree = (tokens, parents, depths, active)
        outputs = (indices, ids, lengths, NO_WORKSPACE)
        ACCEPTANCE.typical_accept(values, thresholds, temperature, drawn, *tree, epsilon, delta, *outputs)
        for slot in range(6):
            path, emitted = [], []
            if active[slot] == 1 and temperature[slot] == 0:
                path, emitted = expected_walk(drawn[slot], tokens[slot], parents[slot], depths[slot], most)
            elif active[slot] == 1:
                tree = (drawn[slot], tokens[slot], parents[slot])
                path, emitted = expected_typical(values[slot], thresholds[slot], *tree, epsilon, delta, most)
            assert indices[slot].tolist() == path + [-1] * (most - len(path))
            assert ids[slot].tolist() == emitted + [-1] * (most - len(emitted))
            assert lengths[slot] == len(path)
            lengths_seen.add(len(path))
    assert len(lengths_seen) > 2


def chain_arguments(rng, slots=5, steps=3, vocabulary=6, draft_vocabulary=4):
    """Arguments of accept_sampled_chain up to `active`, with random p, q and drafts."""
    q = rng.random((slots, steps, draft_vocabulary)).astype(np.float32)
    q /= q.sum(axis=2, keepdims=True)
    target_to_draft = np.full(vocabulary, -1, np.int32)
    target_to_draft[rng.permutation(vocabulary)[:draft_vocabulary]] = np.arange(draft_vocabulary)
    return {
        "processed": rng.normal(0, 1, (slots, steps + 1, vocabulary)).astype(np.float32),
        "thresholds": np.full((slots, steps + 1), -np.inf, np.float32),
        "temperature": np.ones(slots, np.float32),
        "tree_tokens": rng.integers(0, vocabulary, (slots, steps + 1)).astype(np.int32),
        "draft_probabilities": q,
        "target_to_draft": target_to_draft,
        "seeds": np.arange(slots).astype(np.uint64),
        "sequences": np.arange(slots, dtype=np.int32),
        "draw_positions": np.arange(slots * (steps + 1), dtype=np.int32).reshape(slots, steps + 1),
        "active": np.ones(slots, np.int32),
    }


def test_a_chain_drawn_from_p_itself_is_accepted_whole(rng):
    """Its bonus is the very token that plain decoding draws there."""
    slots, steps, vocabulary = 40, 3, 7
    arguments = chain_arguments(rng, slots, steps, vocabulary, vocabulary)
    arguments["target_to_draft"] = np.arange(vocabulary, dtype=np.int32)
    chain, q = np.empty((slots, steps), np.int32), np.empty((slots, steps, vocabulary), np.float32)
    off = (np.zeros(slots, np.int32), np.ones(slots, np.float32), np.zeros(slots, np.float32))
    draw = (arguments["seeds"], arguments["sequences"], np.arange(slots, dtype=np.int32))
    for step in range(steps):
        logits = np.ascontiguousarray(arguments["processed"][:, step])
        own = (arguments["target_to_draft"], arguments["temperature"], *off, *draw)
        ACCEPTANCE.draft_sample(logits, *own, step, chain, q, NO_WORKSPACE)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(q[:, step], shifted / shifted.sum(axis=1, keepdims=True), rtol=1e-5)
    arguments["tree_tokens"][:, 1:] = chain
    arguments["draft_probabilities"] = q
    indices, ids, lengths = accepted_arrays(slots, steps + 1)
    ACCEPTANCE.accept_sampled_chain(*arguments.values(), indices, ids, lengths, NO_WORKSPACE)
    assert lengths.tolist() == [steps + 1] * slots
    np.testing.assert_array_equal(ids[:, :steps], chain)
    bonus = np.empty(slots, np.int32)
    last = [np.ascontiguousarray(arguments[name][:, steps]) for name in ("processed", "thresholds", "draw_positions")]
    names = (arguments["temperature"], arguments["seeds"], arguments["sequences"])
    KERNELS.sample(last[0], last[1], *names, last[2], bonus)
    np.testing.assert_array_equal(ids[:, steps], bonus)


def test_sampled_chains_end_where_they_must(rng):
    """Idle slots, chains cut by -1, by W and by D, drafts that p excludes, greedy slots."""
    arguments = chain_arguments(rng, 6, 3)
    tokens = arguments["tree_tokens"]
    arguments["active"][0] = 0
    tokens[1, 1] = -1
    arguments["thresholds"][2, 0] = np.sort(arguments["processed"][2, 0])[-2]  # two tokens pass
    excluded = int(arguments["processed"][2, 0].argmin())
    tokens[2, 1] = excluded
    arguments["temperature"][3] = 0
    tokens[3, 1:] = [row.argmax() for row in arguments["processed"][3, :3]]
    arguments["temperature"][4] = 0
    tokens[4, 1] = arguments["processed"][4, 0].argmin()
    tokens[5, 1] = 6  # no such token
    indices, ids, lengths = accepted_arrays(6, 4)
    ACCEPTANCE.accept_sampled_chain(*arguments.values(), indices, ids, lengths, NO_WORKSPACE)
    assert lengths[0] == 0
    assert set(ids[0]) == set(indices[0]) == {-1}
    assert lengths[1] == 1
    assert ids[1, 1:].tolist() == [-1, -1, -1]
    assert lengths[2] == 1
    assert arguments["processed"][2, 0, ids[2, 0]] >= arguments["thresholds"][2, 0]
    assert indices[3].tolist() == [0, 1, 2, 3]
    assert ids[3].tolist() == [int(row.argmax()) for row in arguments["processed"][3]]
    assert ids[4].tolist() == [int(arguments["processed"][4, 0].argmax()), -1, -1, -1]
    assert lengths[5] == 1
    indices, ids, lengths = accepted_arrays(6, 2)  # W = 2
    ACCEPTANCE.accept_sampled_chain(*arguments.values(), indices, ids, lengths, NO_WORKSPACE)
    assert ids[3].tolist() == [int(row.argmax()) for row in arguments["processed"][3, :2]]
    arguments["draft_probabilities"] = np.ascontiguousarray(arguments["draft_probabilities"][:, :1])  # D = 1
    indices, ids, lengths = accepted_arrays(6, 4)
    ACCEPTANCE.accept_sampled_chain(*arguments.values(), indices, ids, lengths, NO_WORKSPACE)
    assert lengths[3] == 2


def test_draft_sample_at_temperature_0_is_the_argmax(rng):
    logits = rng.normal(0, 1, (2, 6)).astype(np.float32)
    mapping = np.array([3, 9, 4, 7, 1, 0], np.int32)
    off = (np.zeros(2, np.int32), np.ones(2, np.float32), np.zeros(2, np.float32))
    names = (np.zeros(2, np.uint64), np.zeros(2, np.int32), np.zeros(2, np.int32))
    chain, q = np.full((2, 3), -9, np.int32), np.full((2, 3, 6), -9, np.float32)
    ACCEPTANCE.draft_sample(logits, mapping, np.zeros(2, np.float32), *off, *names, 1, chain, q, NO_WORKSPACE)
    best = logits.argmax(axis=1)
    assert chain.tolist() == [[-9, mapping[best[0]], -9], [-9, mapping[best[1]], -9]]
    np.testing.assert_array_equal(q[:, 1], np.eye(6, dtype=np.float32)[best])
    assert set(q[:, [0, 2]].ravel()) == {-9}


def draw_parameters(slots: int, nodes: int) -> tuple[SlotDraws, NodeDraws]:
    """Slots with different settings, the last greedy."""
    rows = np.arange(slots)
    per_slot = SlotDraws(
        *(
            np.where(rows % 2 == 0, value, neutral).astype(np.float32)
            for value, neutral in ((1.4, 1), (0.3, 0), (0.2, 0))
        ),
        temperature=np.where(rows == slots - 1, 0, 0.8).astype(np.float32),
        top_k=np.where(rows % 3 == 0, 4, 0).astype(np.int32),
        top_p=np.where(rows % 3 == 1, 0.8, 1).astype(np.float32),
        min_p=np.where(rows % 3 == 2, 0.1, 0).astype(np.float32),
        seeds=rows.astype(np.uint64) << np.uint64(40),
        sequences=rows.astype(np.int32),
    )
    return per_slot, NodeDraws(*[values.repeat(nodes) for values in per_slot[3:]])


def processed_and_filtered(logits, counts, tokens, ancestors, per_slot, per_node) -> tuple[np.ndarray, np.ndarray]:
    processed, thresholds = np.empty_like(logits), np.empty(tokens.size, np.float32)
    ACCEPTANCE.process_tree_logits(logits, counts, tokens, ancestors, *per_slot[:4], processed)
    rows = processed.reshape(tokens.size, -1)
    KERNELS.filter_threshold(rows, per_node.top_k, per_node.top_p, per_node.min_p, thresholds)
    return processed, thresholds.reshape(tokens.shape)


def test_accept_draws_is_its_parts(rng):
    slots, size, vocabulary = 6, 30, 3
    tokens, parents, depths, ancestors = random_trees(rng, slots, size, vocabulary)
    logits = rng.normal(0, 1, (slots, size, vocabulary)).astype(np.float32)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    positions = (depths + 10).astype(np.int32)
    active = np.array([1, 1, 0, 1, 1, 1], np.int32)
    per_slot, per_node = draw_parameters(slots, size)
    processed, thresholds = processed_and_filtered(logits, counts, tokens, ancestors, per_slot, per_node)
    drawn = np.empty(slots * size, np.int32)
    names = (per_node.temperature, per_node.seeds, per_node.sequences, positions.ravel())
    KERNELS.sample(processed.reshape(-1, vocabulary), thresholds.ravel(), *names, drawn)
    expected, found = accepted_arrays(slots, 8), accepted_arrays(slots, 8)
    ACCEPTANCE.accept_drawn(drawn.reshape(slots, size), tokens, parents, depths, active, None, *expected)
    scratch = (np.empty_like(thresholds), np.empty((slots, size), np.int32))
    arguments = (logits, counts, tokens, parents, depths, ancestors, positions, active, per_slot, per_node)
    ACCEPTANCE.accept_draws(*arguments, *scratch, *found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert expected[2].max() > 2


def test_accept_sampled_draws_is_its_parts(rng):
    slots, size, vocabulary = 12, 4, 6
    arguments = chain_arguments(rng, slots, size - 1, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    ancestors = np.ascontiguousarray(np.broadcast_to(np.tri(size, dtype=bool), (slots, size, size)))
    ancestors[:, 1:, 0] = False
    per_slot, per_node = draw_parameters(slots, size)
    logits, tokens = arguments["processed"], arguments["tree_tokens"]
    arguments |= {name: getattr(per_slot, name) for name in ("temperature", "seeds", "sequences")}
    arguments["processed"], arguments["thresholds"] = processed_and_filtered(
        logits, counts, tokens, ancestors, per_slot, per_node
    )
    expected, found = accepted_arrays(slots, size), accepted_arrays(slots, size)
    ACCEPTANCE.accept_sampled_chain(*arguments.values(), *expected, NO_WORKSPACE)
    draft = (arguments["draft_probabilities"], arguments["target_to_draft"], arguments["draw_positions"])
    rest = (arguments["active"], per_slot, per_node, np.empty((slots, size), np.float32), *found, NO_WORKSPACE)
    ACCEPTANCE.accept_sampled_draws(logits, counts, tokens, ancestors, *draft, *rest)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(expected[2]) > {1}


def integers(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def test_trees_beyond_the_limits_are_refused():
    def accept(slots: int, size: int, most: int) -> None:
        tree = [integers(slots, size) for _ in range(4)]
        outputs = (integers(slots, most), integers(slots, most), integers(slots))
        ACCEPTANCE.accept_drawn(*tree, integers(slots), None, *outputs)

    accept(1, MAXIMUM_TREE_SIZE, MAXIMUM_ACCEPTED)
    with pytest.raises(KernelError, match=r"accept_drawn: T = 1025; expected at most 1024"):
        accept(1, MAXIMUM_TREE_SIZE + 1, 4)
    with pytest.raises(KernelError, match=r"accept_drawn: W = 34; expected at most 33"):
        accept(1, 8, MAXIMUM_ACCEPTED + 1)
    with pytest.raises(KernelError, match=r"B \* T = 66560; expected at most 65535"):
        accept(65, 1024, 4)


def test_a_tree_as_wide_or_deep_as_allowed_works():
    size = MAXIMUM_TREE_SIZE
    tokens = np.arange(size, dtype=np.int32)[None]
    outputs = accepted_arrays(1, MAXIMUM_ACCEPTED)
    wide = np.zeros((1, size), np.int32)
    drawn = np.full((1, size), size - 1, np.int32)
    depths = np.ones((1, size), np.int32)
    depths[0, 0], wide[0, 0] = 0, -1
    ACCEPTANCE.accept_drawn(drawn, tokens, wide, depths, integers(1) + 1, None, *outputs)
    assert outputs[0][0, :2].tolist() == [0, size - 1]
    nodes = np.arange(size, dtype=np.int32)[None]
    ACCEPTANCE.accept_drawn(nodes + 1, tokens, nodes - 1, nodes, integers(1) + 1, None, *outputs)
    assert outputs[2][0] == MAXIMUM_ACCEPTED
    assert outputs[0][0].tolist() == list(range(MAXIMUM_ACCEPTED))


def test_wrong_arguments_are_named(rng):
    tree = [integers(2, 8) for _ in range(3)]
    outputs = (integers(2, 4), integers(2, 4), integers(2))
    logits = np.zeros((2, 8, 5), np.float32)
    with pytest.raises(KernelError, match=r"tree_parents has shape \[2, 7\]; expected \[B, T\]"):
        ACCEPTANCE.accept_drawn(integers(2, 8), tree[0], integers(2, 7), tree[2], integers(2), None, *outputs)
    with pytest.raises(KernelError, match=r"vocab_mapping has 4 ids; expected V = 5"):
        ACCEPTANCE.eagle_accept(logits, *tree, integers(2), integers(4), *outputs, NO_WORKSPACE)
    arguments = chain_arguments(rng, 2)
    arguments["target_to_draft"] = integers(5)
    with pytest.raises(KernelError, match=r"target_to_draft has shape \[5\]"):
        ACCEPTANCE.accept_sampled_chain(*arguments.values(), *outputs, NO_WORKSPACE)
    floats = np.ones(2, np.float32)
    draft = (np.zeros((2, 4), np.float32), integers(4), floats, integers(2), floats, floats, np.zeros(2, np.uint64))
    with pytest.raises(KernelError, match="step is 3; expected 0 to 2"):
        probabilities = np.zeros((2, 3, 4), np.float32)
        ACCEPTANCE.draft_sample(*draft, integers(2), integers(2), 3, integers(2, 3), probabilities, NO_WORKSPACE)
    distribution = (logits, np.zeros((2, 8), np.float32), floats, integers(2, 8))
    with pytest.raises(KernelError, match=r"epsilon is 0.0"):
        ACCEPTANCE.typical_accept(*distribution, *tree, integers(2), 0.0, 0.3, *outputs, NO_WORKSPACE)
