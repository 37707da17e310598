"""The NumPy kernels of the draft tree against plain recursion, on random and on awkward trees."""

from __future__ import annotations

from dataclasses import replace

import draft_tree_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.kernels.checks import COMPUTE_DTYPES
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.draft_tree_interface import candidate_count, level_start
from edgellm.kernels.errors import KernelError
from edgellm.kernels.log_softmax import CHUNK, LogSoftmax
from edgellm.kernels.numpy_draft_tree import NumpyDraftTree
from edgellm.kernels.top_values import largest

KERNELS = NumpyDraftTree()
NO_WORKSPACE = np.zeros(0, np.uint8)
KINDS = st.sampled_from(["ordinary", "ties", "equal", "awkward"])
SEEDS = st.integers(0, 2**32 - 1)


def expand(drafting, level: int, score: bool = True) -> None:
    arrays = (drafting.draft_to_target, drafting.frontiers, *drafting.candidates())
    KERNELS.expand_frontier(level, score, drafting.logits[level - 1], *arrays, NO_WORKSPACE)


def propose(drafting, level: int, select: bool = True) -> tuple[np.ndarray, ...]:
    outputs = drafting.proposal_outputs()
    KERNELS.prepare_proposal(
        level,
        select,
        drafting.committed,
        drafting.position_offsets,
        drafting.rotary_table,
        drafting.embedding,
        drafting.hidden[level - 1],
        *drafting.candidates(),
        drafting.frontiers,
        *outputs,
        None,
    )
    return outputs


def check_expansion(drafting, level: int, score: bool = True) -> None:
    top_k = drafting.top_k
    start = level_start(level, top_k)
    for b in range(drafting.batch):
        tokens, scores, parents = (array[b] for array in drafting.candidates())
        for slot in range(1 if level == 1 else top_k):
            parent = -1 if level == 1 else int(drafting.frontiers[b, level - 2, slot])
            idle = level > 1 and not reference.is_of_level(parent, level - 1, top_k)
            parent_score = 0.0 if level == 1 else -np.inf if idle else float(scores[parent])
            row = drafting.logits[level - 1][b, slot]
            expected = reference.expand(row, drafting.draft_to_target, parent_score, top_k, score)
            entries = slice(start + slot * top_k, start + (slot + 1) * top_k)
            assert tokens[entries].tolist() == [token for token, _ in expected]
            np.testing.assert_allclose(scores[entries], [score for _, score in expected], rtol=2e-6, atol=1e-5)
            assert parents[entries].tolist() == [parent if token >= 0 else -1 for token, _ in expected]


def check_proposal(drafting, level: int, outputs: tuple[np.ndarray, ...]) -> None:
    inputs_embeds, hidden_out, start, cos_sin, mask = outputs
    top_k = drafting.top_k
    assert (start == drafting.committed + (level - 1) * top_k).all()
    for b in range(drafting.batch):
        committed = int(drafting.committed[b])
        position = committed + level - 1 + int(drafting.position_offsets[b])
        for slot in range(top_k):
            candidate = int(drafting.frontiers[b, level - 1, slot])
            valid = reference.is_of_level(candidate, level, top_k)
            token = int(drafting.candidate_tokens[b, candidate]) if valid else -1
            known = 0 <= token < len(drafting.embedding)
            assert (inputs_embeds[b, slot] == (drafting.embedding[token] if known else 0)).all()
            parent = (candidate - level_start(level, top_k)) // top_k if valid and level > 1 else 0
            assert (hidden_out[b, slot] == drafting.hidden[level - 1][b, parent]).all()
            assert (cos_sin[b, slot] == reference.rotary_row(drafting.rotary_table, position)).all()
            rows = reference.proposal_rows(drafting.frontiers[b], level, slot)
            assert mask[b, 0, slot].tolist() == reference.mask_row(drafting.keys, committed, rows)


def check_verification(drafting, roots: np.ndarray, positions: np.ndarray, outputs: tuple[np.ndarray, ...]) -> None:
    selected, tokens, parents, depths, ancestors, draw_positions, inputs_embeds, cos_sin, mask = outputs
    size = tokens.shape[1]
    for b in range(drafting.batch):
        committed = int(drafting.committed[b])
        nodes = reference.tree(
            int(roots[b, 0]),
            selected[b].tolist(),
            drafting.candidate_tokens[b],
            drafting.candidate_parents[b],
            size,
        )
        for i, (token, parent, depth, way) in enumerate(nodes):
            assert (tokens[b, i], parents[b, i], depths[b, i]) == (token, parent, depth)
            assert np.flatnonzero(ancestors[b, i]).tolist() == sorted(way)
            assert draw_positions[b, i] == positions[b] + depth
            known = 0 <= token < len(drafting.embedding)
            assert (inputs_embeds[b, i] == (drafting.embedding[token] if known else 0)).all()
            position = committed + depth + int(drafting.position_offsets[b])
            assert (cos_sin[b, i] == reference.rotary_row(drafting.rotary_table, position)).all()
            assert mask[b, 0, i].tolist() == reference.mask_row(drafting.keys, committed, way)


def verify(drafting, rng, tree_size: int, tokens: int, select: bool, static: np.ndarray | None = None, candidates=None):
    outputs = drafting.verification_outputs(tree_size, tokens)
    if static is not None:
        outputs[0][...] = static
    roots = rng.integers(0, len(drafting.embedding), (drafting.batch, 1)).astype(np.int32)
    positions = rng.integers(0, 999, drafting.batch).astype(np.int32)
    KERNELS.prepare_verification(
        select,
        drafting.candidate_tokens.shape[1] if candidates is None else candidates,
        roots,
        positions,
        drafting.committed,
        drafting.position_offsets,
        drafting.rotary_table,
        drafting.embedding,
        *drafting.candidates(),
        drafting.frontiers,
        *outputs,
        None,
    )
    check_verification(drafting, roots, positions, outputs)
    return outputs


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, batch=st.integers(1, 3), top_k=st.integers(1, 6), steps=st.integers(1, 5), kind=KINDS)
def test_dynamic_round_by_recursion(seed, batch, top_k, steps, kind):
    """Levels, frontiers, masks and the verified tree; draft vocabularies below K, ties and NaN among the logits."""
    rng = np.random.default_rng(seed)
    drafting = reference.random_drafting(rng, batch, top_k, steps, draft_vocab=int(rng.integers(1, 30)), kind=kind)
    expand(drafting, 1)
    check_expansion(drafting, 1)
    for level in range(1, steps):
        outputs = propose(drafting, level)
        for b in range(batch):
            scores = drafting.candidate_scores[b]
            assert drafting.frontiers[b, level - 1].tolist() == reference.select_frontier(scores, level, top_k)
        check_proposal(drafting, level, outputs)
        expand(drafting, level + 1)
        check_expansion(drafting, level + 1)
    count = candidate_count(steps, top_k)
    for tree_size in {2, min(5, count + 1), count + 1, count + 4}:
        selected, tokens, *_ = verify(drafting, rng, tree_size, tree_size + int(rng.integers(0, 4)), select=True)
        for b in range(batch):
            scores = drafting.candidate_scores[b]
            chosen = sorted(reference.best([(float(scores[i]), i) for i in range(count)], tree_size - 1))
            assert selected[b].tolist() == chosen + [-1] * (tree_size - 1 - len(chosen))
            # The tree is connected: every selected node has its place, none became padding.
            assert (tokens[b, 1 : 1 + len(chosen)] >= 0).all()


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
        drafting.frontiers[:, level - 1] = np.where(rng.random(row.shape) < 0.2, strange, row)
    before, score = drafting.frontiers.copy(), bool(seed % 2)
    for level in range(1, steps + 1):
        expand(drafting, level, score)
        check_expansion(drafting, level, score)
        if level < steps:
            check_proposal(drafting, level, propose(drafting, level, select=False))
    assert (drafting.frontiers == before).all()
    size = int(rng.integers(1, count + 1))
    static = np.full((batch, size), -1, np.int32)
    for b in range(batch):
        chosen = np.sort(rng.permutation(count)[: rng.integers(0, size + 1)])
        static[b, : chosen.size] = chosen
    outputs = verify(drafting, rng, size + 1, size + 2, select=False, static=static)
    assert (outputs[0] == static).all()


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
    scores = drafting.candidate_scores[0]
    assert scores[[0, 3, 12]].tolist() == [0, 0, 0]
    assert np.isneginf(np.delete(scores, [0, 3, 12])).all()
    assert drafting.frontiers[0].tolist() == [[0, -1, -1], [3, -1, -1]]
    selected, _, parents, depths, *_ = verify(drafting, np.random.default_rng(6), 3, 3, select=True)
    assert selected[0].tolist() == [0, 3]
    assert (parents[0].tolist(), depths[0].tolist()) == ([-1, 0, 1], [0, 1, 2])


def test_only_the_named_candidates_are_selected():
    """Arrays of a deeper round may be used for a shallow one."""
    rng = np.random.default_rng(7)
    drafting = reference.random_drafting(rng, 2, 4, 3, draft_vocab=50)
    expand(drafting, 1)
    drafting.candidate_scores[:, 4:] = 5
    selected, *_ = verify(drafting, rng, 7, 8, select=True, candidates=candidate_count(1, 4))
    assert selected.tolist() == [[0, 1, 2, 3, -1, -1]] * 2


@pytest.mark.parametrize("committed", [0, 60, 66, 70, 75])
def test_masks_at_the_end_of_the_key_range(committed):
    rng = np.random.default_rng(8)
    drafting = reference.random_drafting(rng, 1, 3, 3, draft_vocab=20, keys=70)
    drafting.committed[:] = committed
    expand(drafting, 1)
    for level in (1, 2):
        check_proposal(drafting, level, propose(drafting, level))
        expand(drafting, level + 1)
    verify(drafting, rng, 9, 12, select=True)


def test_a_tree_1024_wide_and_one_32_deep_work():
    rng = np.random.default_rng(9)
    drafting = reference.random_drafting(rng, 1, 64, 2, draft_vocab=300, keys=1100)
    expand(drafting, 1)
    propose(drafting, 1)
    expand(drafting, 2)
    verify(drafting, rng, 1024, 1024, select=True)
    chain = reference.random_drafting(rng, 1, 1, 32, draft_vocab=5)
    expand(chain, 1)
    for level in range(1, 32):
        check_proposal(chain, level, propose(chain, level))
        expand(chain, level + 1)
    depths = verify(chain, rng, 33, 33, select=True)[3]
    assert depths[0].tolist() == list(range(33))


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
    with pytest.raises(KernelError, match=r"logits has 3 rows a sequence; expected 1 at level 1"):
        drafting.logits[0] = drafting.logits[1]
        expand(drafting, 1)
    with pytest.raises(KernelError, match=r"level 32; expected 1 to 31"):
        drafting.hidden.extend([drafting.hidden[1]] * 32)
        propose(drafting, 32)
    deep = reference.random_drafting(rng, 1, 3, 4, draft_vocab=9)
    deep.frontiers = deep.frontiers[:, :1].copy()
    with pytest.raises(KernelError, match=r"frontiers has F = 1 levels; expected at least 2"):
        propose(deep, 2)
    with pytest.raises(KernelError, match=r"T = 1025 tokens; expected at most 1024"):
        verify(drafting, rng, 13, 1025, select=True)
    with pytest.raises(KernelError, match=r"root and 12 selected nodes; expected at most T = 12"):
        verify(drafting, rng, 13, 12, select=True)
    with pytest.raises(KernelError, match=r"candidates is 13; expected 1 to C = 12"):
        verify(drafting, rng, 13, 13, select=True, candidates=13)
    with pytest.raises(KernelError, match="hidden_in is float32; expected float16"):
        drafting.embedding = drafting.embedding.astype(np.float16)
        outputs = deep.proposal_outputs()
        KERNELS.prepare_proposal(
            1,
            True,
            drafting.committed,
            drafting.position_offsets,
            drafting.rotary_table,
            drafting.embedding,
            deep.hidden[0],
            *drafting.candidates(),
            drafting.frontiers,
            *outputs,
            None,
        )


def test_kernels_are_compiled_under_the_names_that_the_launcher_uses():
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    own = replace(OTHER_KERNELS, files=tuple(name for name in OTHER_KERNELS.files if "draft_" in name))
    cubin = compile_module(own, "sm_90").code
    kernels = [f"{name}_{dtype}" for name in ("draft_proposal", "draft_verification") for dtype in COMPUTE_DTYPES]
    for name in ("draft_expand", *kernels):
        assert b".text." + name.encode() + b"\0" in cubin


def test_draft_vocabulary_beyond_the_limit_is_refused():
    drafting = reference.random_drafting(np.random.default_rng(11), 1, 1, 1, draft_vocab=4)
    drafting.logits[0] = np.zeros((1, 1, (1 << 18) + 1), np.float32)
    drafting.draft_to_target = np.zeros((1 << 18) + 1, np.int32)
    with pytest.raises(KernelError, match=r"draft vocabulary V = 262145; expected at most 262144"):
        expand(drafting, 1)
