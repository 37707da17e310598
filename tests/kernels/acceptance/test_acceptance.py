"""The acceptance kernels in NumPy against plain Python: walks, typical acceptance, draws, limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kernel_bundles import accepted_arrays, sampling_rows, sequence_state, tree_nodes
from random_trees import random_trees

from edgellm.kernels.acceptance.contract import MAXIMUM_ACCEPTED, MAXIMUM_TREE_SIZE, Chain, NodeLogits, TypicalBounds
from edgellm.kernels.acceptance.twin import NumpyAcceptance
from edgellm.kernels.errors import KernelError
from edgellm.kernels.sampling.contract import IN_PROMPT
from edgellm.kernels.sampling.record import records
from edgellm.kernels.sampling.twin import NumpySampling

ACCEPTANCE, KERNELS = NumpyAcceptance(), NumpySampling()
NO_WORKSPACE = np.zeros(0, np.uint8)


@pytest.fixture
def rng():
    return np.random.default_rng(31)


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
        tree = random_trees(rng, 5, 24, 3)
        tokens, parents, depths, *_ = tree
        drawn = rng.integers(0, 3, tokens.shape).astype(np.int32)
        depths[rng.random(depths.shape) < 0.05] += 1  # a child at a wrong depth is none
        active = np.array([1, 0, 1, 1, 2], np.int32)
        accepted = accepted_arrays(5, most)
        indices, ids, lengths = accepted
        ACCEPTANCE.accept_drawn(drawn, tree, active, accepted)
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
    """NaN and ties among the logits."""
    tree = random_trees(rng, 6, 30, 4)
    logits = rng.integers(0, 3, (6, 30, 4)).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    active = np.ones(6, np.int32)
    drawn = np.empty(180, np.int32)
    KERNELS.argmax(logits.reshape(180, 4), drawn)
    greedy, expected = accepted_arrays(6, 8), accepted_arrays(6, 8)
    ACCEPTANCE.eagle_accept(logits, tree, active, greedy, NO_WORKSPACE)
    ACCEPTANCE.accept_drawn(drawn.reshape(6, 30), tree, active, expected)
    for found, wanted in zip(greedy, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_tree_logits_have_the_bits_of_plain_decoding(rng):
    """Each node's row equals process_logits after the tokens on its path were emitted; repeated tokens included."""
    slots, size, vocabulary = 4, 20, 9
    tree = random_trees(rng, slots, size, vocabulary)
    tokens, ancestors = tree.tokens, tree.ancestors
    logits = rng.normal(0, 3, (slots, size, vocabulary)).astype(np.float32)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    counts[:, 3] |= IN_PROMPT
    settings = ([1.3, 1, 1, 0.8], [0.2, 0, -0.4, 0], [0.5, 0, 0.1, 0], [0.7, 1, 0, 1.5])
    names = "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature"
    rows = sampling_rows(4, **dict(zip(names, settings, strict=True)))
    before = counts.copy()
    processed = np.empty_like(logits)
    ACCEPTANCE.process_tree_logits(logits, counts, tree, rows, processed)
    np.testing.assert_array_equal(counts, before)
    for slot in range(slots):
        own = rows[slot : slot + 1]
        for node in range(size):
            emitted = counts[slot : slot + 1].copy()
            for step in range(1, size):
                if ancestors[slot, node, step] and tokens[slot, step] >= 0:
                    emitted[0, tokens[slot, step]] += 1
            expected = np.empty((1, vocabulary), np.float32)
            KERNELS.process_logits(logits[slot, node : node + 1], emitted, own, expected)
            np.testing.assert_array_equal(processed[slot, node], expected[0])
    in_place = logits.copy()
    ACCEPTANCE.process_tree_logits(in_place, counts, tree, rows, in_place)
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
        tree = random_trees(rng, 6, 25, 12)
        tokens, parents, depths, *_ = tree
        values = rng.normal(0, 1.5, (6, 25, 12)).astype(np.float32)
        thresholds = np.full((6, 25), -np.inf, np.float32)
        thresholds[3:] = 0.3
        temperature = np.array([1, 0.7, 1, 2, 1, 0], np.float32)
        drawn = rng.integers(0, 12, (6, 25)).astype(np.int32)
        active = np.array([1, 1, 0, 1, 1, 1], np.int32)
        accepted = accepted_arrays(6, most)
        indices, ids, lengths = accepted
        nodes, rows = NodeLogits(values, thresholds, drawn), sampling_rows(6, temperature=temperature)
        bounds = TypicalBounds(epsilon, delta)
        ACCEPTANCE.typical_accept(nodes, tree, active, rows, bounds, accepted, NO_WORKSPACE)
        for slot in range(6):
            path, emitted = [], []
            if active[slot] == 1 and temperature[slot] == 0:
                path, emitted = expected_walk(drawn[slot], tokens[slot], parents[slot], depths[slot], most)
            elif active[slot] == 1:
                own = (drawn[slot], tokens[slot], parents[slot])
                path, emitted = expected_typical(values[slot], thresholds[slot], *own, epsilon, delta, most)
            assert indices[slot].tolist() == path + [-1] * (most - len(path))
            assert ids[slot].tolist() == emitted + [-1] * (most - len(emitted))
            assert lengths[slot] == len(path)
            lengths_seen.add(len(path))
    assert len(lengths_seen) > 2


def chain_arguments(rng, slots=5, steps=3, vocabulary=6, draft_vocabulary=4):
    """Arguments of accept_sampled_chain up to the chain, with random p, q and drafts."""
    q = rng.random((slots, steps, draft_vocabulary)).astype(np.float32)
    q /= q.sum(axis=2, keepdims=True)
    draft_to_target = rng.permutation(vocabulary)[:draft_vocabulary].astype(np.int32)
    target_to_draft = np.full(vocabulary, -1, np.int32)
    target_to_draft[draft_to_target] = np.arange(draft_vocabulary)
    shape = (slots, steps + 1)
    processed = rng.normal(0, 1, (*shape, vocabulary)).astype(np.float32)
    thresholds, drawn = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    positions = np.arange(slots * (steps + 1), dtype=np.int32).reshape(shape)
    return {
        "nodes": NodeLogits(processed, thresholds, drawn),
        "tree": tree_nodes(rng.integers(0, vocabulary, shape).astype(np.int32), draw_positions=positions),
        "active": np.ones(slots, np.int32),
        "rows": sampling_rows(slots, seed=np.arange(slots), sequence=np.arange(slots)),
        "chain": Chain(np.zeros((slots, steps), np.int32), q, draft_to_target, target_to_draft),
    }


def test_a_chain_drawn_from_p_itself_is_accepted_whole(rng):
    """Its bonus is the very token that plain decoding draws there."""
    slots, steps, vocabulary = 40, 3, 7
    arguments = chain_arguments(rng, slots, steps, vocabulary, vocabulary)
    identity, nodes, rows = np.arange(vocabulary, dtype=np.int32), arguments["nodes"], arguments["rows"]
    chain = arguments["chain"]._replace(draft_to_target=identity, target_to_draft=identity)
    positions = np.arange(slots, dtype=np.int32)
    tree = arguments["tree"]
    tree.draw_positions[...] = positions[:, None] + np.arange(steps + 1)
    for step in range(steps):
        logits = np.ascontiguousarray(nodes.logits[:, step])
        ACCEPTANCE.draft_sample(step, logits, rows, positions, chain, NO_WORKSPACE)
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(
            chain.probabilities[:, step], shifted / shifted.sum(axis=1, keepdims=True), rtol=1e-5
        )
    tree.tokens[:, 1:] = chain.tokens
    accepted = accepted_arrays(slots, steps + 1)
    ACCEPTANCE.accept_sampled_chain(*(arguments | {"chain": chain}).values(), accepted, NO_WORKSPACE)
    assert accepted.lengths.tolist() == [steps + 1] * slots
    np.testing.assert_array_equal(accepted.ids[:, :steps], chain.tokens)
    bonus = np.empty(slots, np.int32)
    last = [np.ascontiguousarray(array[:, steps]) for array in (nodes.logits, nodes.thresholds, tree.draw_positions)]
    KERNELS.sample(last[0], last[1], rows, last[2], bonus)
    np.testing.assert_array_equal(accepted.ids[:, steps], bonus)


def test_sampled_chains_end_where_they_must(rng):
    """Idle slots, chains cut by -1, by W and by D, drafts that p excludes, greedy slots."""
    arguments = chain_arguments(rng, 6, 3)
    tokens, (processed, thresholds, _) = arguments["tree"].tokens, arguments["nodes"]
    temperature = records(arguments["rows"])["temperature"]
    arguments["active"][0] = 0
    tokens[1, 1] = -1
    thresholds[2, 0] = np.sort(processed[2, 0])[-2]  # two tokens pass
    tokens[2, 1] = int(processed[2, 0].argmin())
    temperature[3:5] = 0
    tokens[3, 1:] = [row.argmax() for row in processed[3, :3]]
    tokens[4, 1] = processed[4, 0].argmin()
    tokens[5, 1] = 6  # no such token

    def accept(most: int, **changed) -> tuple[np.ndarray, ...]:
        accepted = accepted_arrays(6, most)
        ACCEPTANCE.accept_sampled_chain(*(arguments | changed).values(), accepted, NO_WORKSPACE)
        return accepted

    indices, ids, lengths = accept(4)
    assert lengths[0] == 0
    assert set(ids[0]) == set(indices[0]) == {-1}
    assert lengths[1] == 1
    assert ids[1, 1:].tolist() == [-1, -1, -1]
    assert lengths[2] == 1
    assert processed[2, 0, ids[2, 0]] >= thresholds[2, 0]
    assert indices[3].tolist() == [0, 1, 2, 3]
    assert ids[3].tolist() == [int(row.argmax()) for row in processed[3]]
    assert ids[4].tolist() == [int(processed[4, 0].argmax()), -1, -1, -1]
    assert lengths[5] == 1
    assert accept(2).ids[3].tolist() == [int(row.argmax()) for row in processed[3, :2]]  # W = 2
    chain = arguments["chain"]
    short = [np.ascontiguousarray(array[:, :1]) for array in (chain.tokens, chain.probabilities)]  # D = 1
    assert accept(4, chain=chain._replace(tokens=short[0], probabilities=short[1])).lengths[3] == 2


def test_draft_sample_at_temperature_0_is_the_argmax(rng):
    logits = rng.normal(0, 1, (2, 6)).astype(np.float32)
    mapping = np.array([3, 9, 4, 7, 1, 0], np.int32)
    chain = Chain(np.full((2, 3), -9, np.int32), np.full((2, 3, 6), -9, np.float32), mapping, np.zeros(10, np.int32))
    rows = sampling_rows(2, temperature=0)
    ACCEPTANCE.draft_sample(1, logits, rows, np.zeros(2, np.int32), chain, NO_WORKSPACE)
    best = logits.argmax(axis=1)
    assert chain.tokens.tolist() == [[-9, mapping[best[0]], -9], [-9, mapping[best[1]], -9]]
    np.testing.assert_array_equal(chain.probabilities[:, 1], np.eye(6, dtype=np.float32)[best])
    assert set(chain.probabilities[:, [0, 2]].ravel()) == {-9}


def draw_parameters(slots: int) -> np.ndarray:
    """Slots with different settings, the last greedy."""
    rows = np.arange(slots)
    return sampling_rows(
        slots,
        repetition_penalty=np.where(rows % 2 == 0, 1.4, 1),
        presence_penalty=np.where(rows % 2 == 0, 0.3, 0),
        frequency_penalty=np.where(rows % 2 == 0, 0.2, 0),
        temperature=np.where(rows == slots - 1, 0, 0.8),
        top_k=np.where(rows % 3 == 0, 4, 0),
        top_p=np.where(rows % 3 == 1, 0.8, 1),
        min_p=np.where(rows % 3 == 2, 0.1, 0),
        seed=rows.astype(np.uint64) << np.uint64(40),
        sequence=rows,
    )


def processed_and_filtered(logits, counts, tree, rows) -> tuple[np.ndarray, np.ndarray]:
    processed, thresholds = np.empty_like(logits), np.empty(tree.tokens.size, np.float32)
    ACCEPTANCE.process_tree_logits(logits, counts, tree, rows, processed)
    KERNELS.filter_threshold(processed.reshape(tree.tokens.size, -1), rows, thresholds)
    return processed, thresholds.reshape(tree.tokens.shape)


def test_accept_draws_is_its_parts(rng):
    slots, size, vocabulary = 6, 30, 3
    tree = random_trees(rng, slots, size, vocabulary)
    tree = tree._replace(draw_positions=tree.depths + np.int32(10))
    logits = rng.normal(0, 1, (slots, size, vocabulary)).astype(np.float32)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    active = np.array([1, 1, 0, 1, 1, 1], np.int32)
    rows, state = draw_parameters(slots), sequence_state(slots, active=active, token_counts=counts)
    processed, thresholds = processed_and_filtered(logits, counts, tree, rows)
    drawn = np.empty(slots * size, np.int32)
    flat = processed.reshape(-1, vocabulary)
    KERNELS.sample(flat, thresholds.ravel(), rows, tree.draw_positions.ravel(), drawn)
    expected, found = accepted_arrays(slots, 8), accepted_arrays(slots, 8)
    ACCEPTANCE.accept_drawn(drawn.reshape(slots, size), tree, active, expected)
    nodes = NodeLogits(logits.copy(), np.empty_like(thresholds), np.empty((slots, size), np.int32))
    ACCEPTANCE.accept_draws(nodes, tree, state, rows, found)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert expected.lengths.max() > 2
    every = NodeLogits(logits, np.empty_like(thresholds), np.empty((slots, size), np.int32))
    ACCEPTANCE.draw_nodes(every, tree, state, rows)
    for one, other in zip(every, (processed, thresholds, drawn.reshape(slots, size)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_accept_sampled_draws_is_its_parts(rng):
    slots, size, vocabulary = 12, 4, 6
    arguments = chain_arguments(rng, slots, size - 1, vocabulary)
    counts = rng.integers(0, 2, (slots, vocabulary)).astype(np.int32)
    ancestors = np.ascontiguousarray(np.broadcast_to(np.tri(size, dtype=bool), (slots, size, size)))
    ancestors[:, 1:, 0] = False
    rows, tree = draw_parameters(slots), arguments["tree"]._replace(ancestors=ancestors)
    logits, chain = arguments["nodes"].logits, arguments["chain"]
    processed = NodeLogits(*processed_and_filtered(logits, counts, tree, rows), np.zeros((slots, size), np.int32))
    expected, found = accepted_arrays(slots, size), accepted_arrays(slots, size)
    ACCEPTANCE.accept_sampled_chain(processed, tree, arguments["active"], rows, chain, expected, NO_WORKSPACE)
    state = sequence_state(slots, active=arguments["active"], token_counts=counts)
    ACCEPTANCE.accept_sampled_draws(arguments["nodes"], tree, state, rows, chain, found, NO_WORKSPACE)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(expected.lengths) > {1}


def integers(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def test_trees_beyond_the_limits_are_refused():
    def accept(slots: int, size: int, most: int) -> None:
        tree = tree_nodes(integers(slots, size))
        ACCEPTANCE.accept_drawn(integers(slots, size), tree, integers(slots), accepted_arrays(slots, most))

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
    tree = tree_nodes(tokens, parents=wide, depths=depths)
    ACCEPTANCE.accept_drawn(drawn, tree, integers(1) + 1, outputs)
    assert outputs[0][0, :2].tolist() == [0, size - 1]
    nodes = np.arange(size, dtype=np.int32)[None]
    deep = tree_nodes(tokens, parents=nodes - 1, depths=nodes)
    ACCEPTANCE.accept_drawn(nodes + 1, deep, integers(1) + 1, outputs)
    assert outputs[2][0] == MAXIMUM_ACCEPTED
    assert outputs[0][0].tolist() == list(range(MAXIMUM_ACCEPTED))


def test_wrong_arguments_are_named(rng):
    tree, outputs = tree_nodes(integers(2, 8)), accepted_arrays(2, 4)
    with pytest.raises(KernelError, match=r"tree.parents has shape \[2, 7\]; expected \[B, T\]"):
        ACCEPTANCE.accept_drawn(integers(2, 8), tree._replace(parents=integers(2, 7)), integers(2), outputs)
    arguments = chain_arguments(rng, 2)
    arguments["chain"] = arguments["chain"]._replace(target_to_draft=integers(5))
    with pytest.raises(KernelError, match=r"chain.target_to_draft has shape \[5\]"):
        ACCEPTANCE.accept_sampled_chain(*arguments.values(), outputs, NO_WORKSPACE)
    rows, chain = sampling_rows(2), chain_arguments(rng, 2)["chain"]
    with pytest.raises(KernelError, match="step is 3; expected 0 to 2"):
        ACCEPTANCE.draft_sample(3, np.zeros((2, 4), np.float32), rows, integers(2), chain, NO_WORKSPACE)
    nodes = NodeLogits(np.zeros((2, 8, 5), np.float32), np.zeros((2, 8), np.float32), integers(2, 8))
    with pytest.raises(KernelError, match=r"epsilon is 0.0"):
        ACCEPTANCE.typical_accept(nodes, tree, integers(2), rows, TypicalBounds(0.0, 0.3), outputs, NO_WORKSPACE)
    with pytest.raises(KernelError, match=r"settings of 1 slots; expected B = 2"):
        ACCEPTANCE.draw_nodes(nodes, tree, sequence_state(2, 5), sampling_rows(1))
