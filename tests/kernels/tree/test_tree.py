"""The NumPy kernels of the draft tree against plain recursion, on random and on awkward trees."""

from __future__ import annotations

import draft_tree_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.kernels.errors import KernelError
from edgellm.kernels.tree.contract import Block, candidate_count, level_start
from edgellm.kernels.tree.log_softmax import CHUNK, LogSoftmax
from edgellm.kernels.tree.twin import NumpyTree, largest

KERNELS = NumpyTree()
KINDS = st.sampled_from(["ordinary", "ties", "equal", "awkward"])
SEEDS = st.integers(0, 2**32 - 1)


def expand(drafting, level: int, dynamic: bool = True) -> None:
    logits = drafting.logits[level - 1]
    KERNELS.expand_frontier(drafting.level(level, dynamic), logits, drafting.candidates, drafting.expansion)


def propose(drafting, level: int, dynamic: bool = True):
    hidden, inputs = drafting.proposal(level)
    arrays = drafting.committed, drafting.tables, drafting.candidates, hidden, inputs
    KERNELS.prepare_proposal(drafting.level(level, dynamic), *arrays, None)
    return hidden, inputs


def check_expansion(drafting, level: int, score: bool = True) -> None:
    top_k = drafting.top_k
    start = level_start(level, top_k)
    for b in range(drafting.batch):
        tokens, scores, parents, frontiers, _ = (array[b] for array in drafting.candidates)
        for slot in range(1 if level == 1 else top_k):
            parent = -1 if level == 1 else int(frontiers[level - 2, slot])
            idle = level > 1 and not reference.is_of_level(parent, level - 1, top_k)
            parent_score = 0.0 if level == 1 else -np.inf if idle else float(scores[parent])
            row = drafting.logits[level - 1][b, slot]
            mapping, width = drafting.expansion.draft_to_target, drafting.width
            expected = reference.expand(row, mapping, parent_score, top_k, score, width)
            entries = slice(start + slot * top_k, start + (slot + 1) * top_k)
            assert tokens[entries].tolist() == [token for token, _ in expected]
            np.testing.assert_allclose(scores[entries], [score for _, score in expected], rtol=2e-6, atol=1e-5)
            assert parents[entries].tolist() == [parent if token >= 0 else -1 for token, _ in expected]


def check_proposal(drafting, level: int, written) -> None:
    hidden, inputs = written
    top_k, tables, candidates = drafting.top_k, drafting.tables, drafting.candidates
    assert (inputs.kvcache_start_index == drafting.committed + (level - 1) * top_k).all()
    for b in range(drafting.batch):
        committed = int(drafting.committed[b])
        position = committed + level - 1 + int(tables.position_offsets[b])
        for slot in range(top_k):
            candidate = int(candidates.frontiers[b, level - 1, slot])
            valid = reference.is_of_level(candidate, level, top_k)
            token = int(candidates.tokens[b, candidate]) if valid else -1
            known = 0 <= token < len(tables.embedding)
            assert (inputs.inputs_embeds[b, slot] == (tables.embedding[token] if known else 0)).all()
            parent = (candidate - level_start(level, top_k)) // top_k if valid and level > 1 else 0
            assert (hidden.fed[b, slot] == hidden.put_out[b, parent]).all()
            assert (inputs.rope_rotary_cos_sin[b, slot] == reference.rotary_row(tables.rotary, position)).all()
            rows = reference.proposal_rows(candidates.frontiers[b], level, slot)
            mask = inputs.attention_mask[b, 0, slot].tolist()
            assert mask == reference.mask_row(drafting.keys, committed, rows)


def check_verification(drafting, written, level: int | None = None) -> None:
    state, candidates, nodes, inputs = written
    tables, steps = drafting.tables, level or drafting.steps
    for b in range(drafting.batch):
        committed = int(drafting.committed[b])
        chosen = candidates.selected[b].tolist()
        root, size = int(state.token_ids[b, 0]), nodes.tokens.shape[1]
        count = candidate_count(steps, drafting.top_k)
        tokens, parents = candidates.tokens[b, :count], candidates.parents[b, :count]
        expected = reference.tree(root, chosen, tokens, parents, size)
        for i, (token, parent, depth, way) in enumerate(expected):
            assert (nodes.tokens[b, i], nodes.parents[b, i], nodes.depths[b, i]) == (token, parent, depth)
            assert np.flatnonzero(nodes.ancestors[b, i]).tolist() == sorted(way)
            assert nodes.draw_positions[b, i] == state.positions[b] + depth
            known = 0 <= token < len(tables.embedding)
            assert (inputs.inputs_embeds[b, i] == (tables.embedding[token] if known else 0)).all()
            position = committed + depth + int(tables.position_offsets[b])
            assert (inputs.rope_rotary_cos_sin[b, i] == reference.rotary_row(tables.rotary, position)).all()
            mask = inputs.attention_mask[b, 0, i].tolist()
            assert mask == reference.mask_row(drafting.keys, committed, way)


def verify(drafting, rng, tree_size: int, tokens: int, level: int | None = None, static: np.ndarray | None = None):
    """The candidates and the nodes of a verification of the levels up to `level` (None: all)."""
    written = drafting.verification(rng, tree_size, tokens)
    state, candidates, nodes, inputs = written
    if static is not None:
        candidates.selected[...] = static
    own = drafting.level(level or drafting.steps, static is None)
    KERNELS.prepare_verification(own, state, drafting.tables, candidates, nodes, inputs, None)
    check_verification(drafting, written, level)
    return candidates, nodes


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, batch=st.integers(1, 3), top_k=st.integers(1, 6), steps=st.integers(1, 5), kind=KINDS)
def test_dynamic_round_by_recursion(seed, batch, top_k, steps, kind):
    """Levels, frontiers, masks and the verified tree; draft vocabularies below K, ties and NaN among the logits, trees
    narrower than the arrays."""
    rng = np.random.default_rng(seed)
    vocabulary, width = int(rng.integers(1, 30)), int(rng.integers(1, top_k + 1))
    drafting = reference.random_drafting(rng, batch, top_k, steps, vocabulary, kind, width=width)
    expand(drafting, 1)
    check_expansion(drafting, 1)
    for level in range(1, steps):
        outputs = propose(drafting, level)
        for b in range(batch):
            scores = drafting.candidates.scores[b]
            expected = reference.select_frontier(scores, level, top_k, width)
            assert drafting.candidates.frontiers[b, level - 1].tolist() == expected
        check_proposal(drafting, level, outputs)
        expand(drafting, level + 1)
        check_expansion(drafting, level + 1)
    count = candidate_count(steps, top_k)
    for tree_size in {2, min(5, count + 1), count + 1, count + 4}:
        candidates, nodes = verify(drafting, rng, tree_size, tree_size + int(rng.integers(0, 4)))
        for b in range(batch):
            scores = candidates.scores[b]
            chosen = sorted(reference.best([(float(scores[i]), i) for i in range(count)], tree_size - 1))
            assert candidates.selected[b].tolist() == chosen + [-1] * (tree_size - 1 - len(chosen))
            # The tree is connected: every selected node has its place, none became padding.
            assert (nodes.tokens[b, 1 : 1 + len(chosen)] >= 0).all()


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, batch=st.integers(1, 3), width=st.integers(1, 5), steps=st.integers(1, 5), kind=KINDS)
def test_a_narrow_tree_in_wide_arrays_is_that_of_narrow_ones(seed, batch, width, steps, kind):
    """The same tokens, parents, depths and draws, whatever the draft's engine puts out for idle slots."""
    rng = np.random.default_rng(seed)
    top_k, vocabulary = width + int(rng.integers(1, 6)), int(rng.integers(1, 40))
    narrow = reference.random_drafting(rng, batch, width, steps, vocabulary, kind)
    wide = reference.random_drafting(rng, batch, top_k, steps, vocabulary, kind, width=width)
    wide.expansion, wide.committed, wide.tables = narrow.expansion, narrow.committed, narrow.tables
    for level in range(1, steps + 1):
        rows = narrow.logits[level - 1].shape[1]
        wide.logits[level - 1][:, :rows] = narrow.logits[level - 1]
        for drafting in (narrow, wide):
            expand(drafting, level)
            if level < steps:
                propose(drafting, level)
    tree_size = int(rng.integers(2, candidate_count(steps, width) + 3))
    found = [verify(drafting, np.random.default_rng(1), tree_size, tree_size)[1] for drafting in (narrow, wide)]
    for name, one, other in zip(found[0]._fields, *found, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, batch=st.integers(1, 3), top_k=st.integers(1, 5), steps=st.integers(2, 5), kind=KINDS)
def test_static_round_by_recursion(seed, batch, top_k, steps, kind):
    """Any frontiers and any ascending selection, idle slots, foreign levels and disconnected nodes included."""
    rng = np.random.default_rng(seed)
    drafting = reference.random_drafting(rng, batch, top_k, steps, draft_vocab=int(rng.integers(1, 30)), kind=kind)
    count = candidate_count(steps, top_k)
    for level in range(1, steps):
        start, end = level_start(level, top_k), level_start(level + 1, top_k)
        row = rng.integers(start, end, (batch, top_k))
        strange = rng.integers(-2, count + 3, row.shape)
        drafting.candidates.frontiers[:, level - 1] = np.where(rng.random(row.shape) < 0.2, strange, row)
    before, score = drafting.candidates.frontiers.copy(), bool(seed % 2)
    for level in range(1, steps + 1):
        expand(drafting, level, score)
        check_expansion(drafting, level, score)
        if level < steps:
            check_proposal(drafting, level, propose(drafting, level, dynamic=False))
    assert (drafting.candidates.frontiers == before).all()
    size = int(rng.integers(1, count + 1))
    static = np.full((batch, size), -1, np.int32)
    for b in range(batch):
        chosen = np.sort(rng.permutation(count)[: rng.integers(0, size + 1)])
        static[b, : chosen.size] = chosen
    candidates, _ = verify(drafting, rng, size + 1, size + 2, static=static)
    assert (candidates.selected == static).all()


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, batch=st.integers(1, 3), top_k=st.integers(1, 5), steps=st.integers(1, 5), kind=KINDS)
def test_a_block_is_the_round_whose_nodes_all_have_their_places_logits(seed, batch, top_k, steps, kind):
    """Level by level, with the logits of a level's place behind every node: dynamic and static, wide and narrow; then
    the same tree is verified."""
    rng = np.random.default_rng(seed)
    width, dynamic, rows = int(rng.integers(1, top_k + 1)), bool(seed % 2), steps + int(rng.integers(1, 5))
    vocabulary = int(rng.integers(1, 40))
    drafting = reference.random_drafting(rng, batch, top_k, steps, vocabulary, kind, width=width)
    logits = reference.random_block(rng, drafting, rows, kind)
    found = type(drafting.candidates)(*(array.copy() for array in drafting.candidates))
    KERNELS.expand_block(drafting.level(steps, dynamic), logits, found, drafting.expansion)
    for level in range(1, steps + 1):
        expand(drafting, level, dynamic)
        if level < steps:
            propose(drafting, level, dynamic)
    for name, one, other in zip(found._fields, found, drafting.candidates, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
    if dynamic:
        size = int(rng.integers(2, candidate_count(steps, top_k) + 3))
        expected = verify(drafting, np.random.default_rng(1), size, size)[1]
        drafting.candidates = found
        for one, other in zip(expected, verify(drafting, np.random.default_rng(1), size, size)[1], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sees_all", [True, False])
@pytest.mark.parametrize("committed", [0, 17, 66, 70, -3])
def test_what_is_read_of_a_block(committed, sees_all):
    """The last token, then mask tokens, at the end of the key range too."""
    drafting = reference.random_drafting(np.random.default_rng(3), 2, 3, 1, 20, keys=70)
    drafting.committed[:] = committed, 5
    inputs, ids = drafting.inputs(6, drafting.committed), np.asarray([[7], [99]], np.int32)
    KERNELS.prepare_block(Block(11, sees_all), ids, drafting.tables, inputs)
    tables = drafting.tables
    for b, t in np.ndindex(2, 6):
        token, first = int(ids[b, 0]) if t == 0 else 11, int(drafting.committed[b])
        known = tables.embedding[token] if token < len(tables.embedding) else 0
        assert (inputs.inputs_embeds[b, t] == known).all()
        position = first + t + int(tables.position_offsets[b])
        assert (inputs.rope_rotary_cos_sin[b, t] == reference.rotary_row(tables.rotary, position)).all()
        last = first + (5 if sees_all else t)
        assert inputs.attention_mask[b, 0, t].tolist() == [key <= last for key in range(70)]


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, vocab=st.integers(1, 400), top_k=st.integers(1, 64), kind=KINDS)
def test_largest_by_sorting(seed, vocab, top_k, kind):
    rng = np.random.default_rng(seed)
    values = reference.random_logits(rng, 1, 7, vocab, kind)[0]
    values[np.isnan(values)] = -np.inf
    places, found = largest(values, top_k)
    for row in range(7):
        expected = sorted(range(vocab), key=lambda i: (-values[row, i], i))[:top_k]
        assert places[row, : len(expected)].tolist() == expected
        assert found[row, : len(expected)].tolist() == values[row, expected].tolist()
        assert (found[row, len(expected) :] == -np.inf).all()


@pytest.mark.parametrize("vocab", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 32_000, 70_003])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 40.0])
def test_normalizer_against_float64(vocab, scale):
    rows = (np.random.default_rng(vocab).normal(0, scale, (3, vocab)) + 7).astype(np.float32)
    maxima, log_sums = LogSoftmax().normalizers(rows)
    exact = rows.astype(np.float64)
    assert (maxima == rows.max(axis=1)).all()
    expected = np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1))
    # The truncation of each term loses at most 2^-32.
    np.testing.assert_allclose(log_sums, expected, rtol=1e-6, atol=5e-7 + vocab * 2.0**-32)


def test_normalizer_does_not_depend_on_the_batch_or_on_earlier_calls():
    rows = np.random.default_rng(3).normal(0, 4, (9, 40_000)).astype(np.float32)
    several = LogSoftmax()
    together = several.normalizers(rows)[1]
    backwards = [several.normalizers(rows[i : i + 1])[1][0] for i in reversed(range(9))]
    assert together.tolist() == backwards[::-1]


def test_normalizer_does_not_depend_on_the_order_of_a_chunk():
    rng = np.random.default_rng(4)
    row = rng.normal(0, 4, (1, CHUNK)).astype(np.float32)
    shuffled = rng.permuted(row, axis=1)
    assert LogSoftmax().normalizers(row)[1] == LogSoftmax().normalizers(shuffled)[1]


def test_scores_never_rise_along_a_path_of_equal_logits():
    """All candidates of a level tie; children of certain parents tie with them, and the shallow and early win."""
    drafting = reference.random_drafting(np.random.default_rng(5), 1, 3, 3, draft_vocab=1)
    for logits in drafting.logits:
        logits[...] = 1.5
    expand(drafting, 1)
    for level in (1, 2):
        propose(drafting, level)
        expand(drafting, level + 1)
    scores = drafting.candidates.scores[0]
    assert scores[[0, 3, 12]].tolist() == [0, 0, 0]
    assert np.isneginf(np.delete(scores, [0, 3, 12])).all()
    assert drafting.candidates.frontiers[0].tolist() == [[0, -1, -1], [3, -1, -1]]
    candidates, nodes = verify(drafting, np.random.default_rng(6), 3, 3)
    assert candidates.selected[0].tolist() == [0, 3]
    assert (nodes.parents[0].tolist(), nodes.depths[0].tolist()) == ([-1, 0, 1], [0, 1, 2])


def test_only_the_named_candidates_are_selected():
    """Arrays of a deeper round may be used for a shallow one."""
    rng = np.random.default_rng(7)
    drafting = reference.random_drafting(rng, 2, 4, 3, draft_vocab=50)
    expand(drafting, 1)
    drafting.candidates.scores[:, 4:] = 5
    candidates, _ = verify(drafting, rng, 7, 8, level=1)
    assert candidates.selected.tolist() == [[0, 1, 2, 3, -1, -1]] * 2


@pytest.mark.parametrize("committed", [0, 60, 66, 70, 75])
def test_masks_at_the_end_of_the_key_range(committed):
    rng = np.random.default_rng(8)
    drafting = reference.random_drafting(rng, 1, 3, 3, draft_vocab=20, keys=70)
    drafting.committed[:] = committed
    expand(drafting, 1)
    for level in (1, 2):
        check_proposal(drafting, level, propose(drafting, level))
        expand(drafting, level + 1)
    verify(drafting, rng, 9, 12)


def test_a_tree_1024_wide_and_one_32_deep_work():
    rng = np.random.default_rng(9)
    drafting = reference.random_drafting(rng, 1, 64, 2, draft_vocab=300, keys=1100)
    expand(drafting, 1)
    propose(drafting, 1)
    expand(drafting, 2)
    verify(drafting, rng, 1024, 1024)
    chain = reference.random_drafting(rng, 1, 1, 32, draft_vocab=5)
    expand(chain, 1)
    for level in range(1, 32):
        check_proposal(chain, level, propose(chain, level))
        expand(chain, level + 1)
    nodes = verify(chain, rng, 33, 33)[1]
    assert nodes.depths[0].tolist() == list(range(33))


def test_limits_are_refused_with_what_was_found_and_expected():
    rng = np.random.default_rng(10)
    drafting = reference.random_drafting(rng, 1, 3, 2, draft_vocab=9)
    wide = reference.random_drafting(rng, 1, 65, 1, draft_vocab=9)
    with pytest.raises(KernelError, match=r"K = 65 .*expected 1 to 64"):
        expand(wide, 1)
    for level in (0, 33):
        drafting.logits.extend([drafting.logits[-1]] * 33)
        with pytest.raises(KernelError, match=rf"level {level}; expected 1 to 32"):
            expand(drafting, level)
    with pytest.raises(KernelError, match=r"C = 12 candidates; expected at least 21 for level 3"):
        expand(drafting, 3)
    with pytest.raises(KernelError, match=r"3 rows a sequence; expected 1 at level 1"):
        drafting.logits[0] = drafting.logits[1]
        expand(drafting, 1)
    with pytest.raises(KernelError, match=r"level 32; expected 1 to 31"):
        drafting.hidden.extend([drafting.hidden[1]] * 32)
        propose(drafting, 32)
    deep = reference.random_drafting(rng, 1, 3, 4, draft_vocab=9)
    deep.candidates = deep.candidates._replace(frontiers=deep.candidates.frontiers[:, :1].copy())
    with pytest.raises(KernelError, match=r"frontiers has F = 1 levels; expected at least 2"):
        propose(deep, 2)
    with pytest.raises(KernelError, match=r"T = 1025 tokens; expected at most 1024"):
        verify(drafting, rng, 13, 1025, level=2)
    with pytest.raises(KernelError, match=r"root and 12 selected nodes; expected at most T = 8"):
        verify(drafting, rng, 13, 8, level=2)
    with pytest.raises(KernelError, match=r"1 rows a sequence; expected the root's and one for each of 2 levels"):
        KERNELS.expand_block(
            drafting.level(2), drafting.logits[1][:, :1].copy(), drafting.candidates, drafting.expansion
        )
    for width in (0, 4):
        with pytest.raises(KernelError, match=rf"a tree of width {width}; expected 1 to K = 3"):
            drafting.width = width
            expand(drafting, 2)
    with pytest.raises(KernelError, match=r"hidden.put_out is float32; expected float16"):
        drafting.width = 3
        drafting.tables = drafting.tables._replace(embedding=drafting.tables.embedding.astype(np.float16))
        propose(drafting, 1)


def test_draft_vocabulary_beyond_the_limit_is_refused():
    drafting = reference.random_drafting(np.random.default_rng(11), 1, 1, 1, draft_vocab=4)
    drafting.logits[0] = np.zeros((1, 1, (1 << 18) + 1), np.float32)
    drafting.expansion = drafting.expansion._replace(draft_to_target=np.zeros((1 << 18) + 1, np.int32))
    with pytest.raises(KernelError, match=r"draft vocabulary U = 262145; expected at most 262144"):
        expand(drafting, 1)
