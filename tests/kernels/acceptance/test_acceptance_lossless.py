"""What drafting emits has the base's own law: enumerated on a vocabulary of five, against the real kernels.

Every kind emits the first tokens of thousands of slots, over as many rounds as that takes; their joint distribution is
compared with the enumerated one by a chi-square test, which wrong acceptance rules fail. Deterministic trees emit the
very tokens of plain decoding besides. See `enumerated_law` for the base and its rules.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from enumerated_law import (
    ACCEPTANCE,
    DRAFT_IDS,
    EMITTED,
    FIRST_TOKEN,
    NO_WORKSPACE,
    SETTINGS,
    TREES,
    VOCABULARY,
    Settings,
    Slots,
    Tables,
    chain_tokens_emitted,
    enumerated,
    fits,
    plain_tokens,
    softmax,
    tree_tokens_emitted,
)

from edgellm.kernels.acceptance.contract import NodeLogits, TypicalBounds
from edgellm.kernels.tree.contract import TreeNodes


@pytest.fixture(params=[1, 2], ids=["unlike", "alike"])
def tables(request) -> Tables:
    """Random p and q; the draft knows nothing of the base, or says nearly the same."""
    rng = np.random.default_rng(request.param)
    base = rng.normal(0, 1.3, (VOCABULARY, VOCABULARY)).astype(np.float32)
    draft = rng.normal(0, 1.3, (VOCABULARY, DRAFT_IDS.size)).astype(np.float32)
    if request.param == 2:
        draft = base[:, DRAFT_IDS] + np.float32(0.3) * draft
    return Tables(base, draft)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("name", SETTINGS)
def test_deterministic_trees_emit_the_tokens_of_plain_decoding(tables, name, kind):
    slots = tree_tokens_emitted(tables, SETTINGS[name], kind, 100)
    np.testing.assert_array_equal(slots.tokens[:, :EMITTED], plain_tokens(tables, SETTINGS[name], 100))
    assert slots.rounds < EMITTED + 1


@pytest.mark.parametrize("kind", TREES)
def test_greedy_trees_emit_the_tokens_of_plain_decoding(tables, kind):
    settings = Settings(temperature=0.0, repetition=1.2)
    slots = tree_tokens_emitted(tables, settings, kind, 3)
    np.testing.assert_array_equal(slots.tokens[:, :EMITTED], plain_tokens(tables, settings, 3))


#: Drafts that are unlike the base, and alike.
UNLIKE, ALIKE = 1, 2
DEFAULT_TREES = [("plain", UNLIKE), ("all", ALIKE), ("masked", UNLIKE), ("masked", ALIKE)]


@pytest.mark.parametrize(
    ("name", "tables"),
    [
        pytest.param(name, tables, marks=() if (name, tables) in DEFAULT_TREES else pytest.mark.slow)
        for name in SETTINGS
        for tables in (UNLIKE, ALIKE)
    ],
    indirect=["tables"],
)
def test_deterministic_trees_keep_the_law_of_the_base(tables, name):
    slots = tree_tokens_emitted(tables, SETTINGS[name], "tree", 1000)
    assert fits(slots.tokens[:, :EMITTED], enumerated(tables, SETTINGS[name]))


DRAFTS = {"plain": Settings(), "top-k": Settings(0.7, 2), "filtered": Settings(1.3, 3, 0.8, 0.1)}


CHAINS = {
    ("plain", "plain"): (UNLIKE, ALIKE),
    ("plain", "top-k"): (ALIKE,),
    ("top-k", "plain"): (UNLIKE,),
    ("top-k", "top-k"): (),
    ("top-p", "plain"): (ALIKE,),
    ("penalties", "plain"): (UNLIKE,),
    ("all", "filtered"): (ALIKE,),
    ("masked", "plain"): (UNLIKE,),
    ("all, masked", "top-k"): (UNLIKE, ALIKE),
}


@pytest.mark.parametrize(
    ("name", "draft", "tables"),
    [
        pytest.param(*names, tables, marks=() if tables in chosen else pytest.mark.slow)
        for names, chosen in CHAINS.items()
        for tables in (UNLIKE, ALIKE)
    ],
    indirect=["tables"],
)
def test_sampled_chains_keep_the_law_of_the_base(tables, name, draft):
    slots = chain_tokens_emitted(tables, SETTINGS[name], DRAFTS[draft], 1500)
    assert fits(slots.tokens[:, :EMITTED], enumerated(tables, SETTINGS[name]))


@pytest.mark.parametrize("name", ["plain", "masked", "all, masked"])
def test_plain_draws_have_the_law_of_the_base(tables, name):
    assert fits(plain_tokens(tables, SETTINGS[name], 800), enumerated(tables, SETTINGS[name]))


def test_masks_that_come_after_the_filters_fail(tables):
    settings = replace(SETTINGS["top-k"], rules=1)
    expected = enumerated(tables, settings)
    assert fits(plain_tokens(tables, settings, 800), expected)
    assert not fits(plain_tokens(tables, settings, 800, late=True), expected)


def test_forbidden_drafts_of_a_sampled_chain_have_to_be_tested(tables):
    """Where one is dropped instead, what q gave to it goes to all of p, not to what q gave too little."""
    slots = chain_tokens_emitted(tables, SETTINGS["masked"], DRAFTS["plain"], 2500, "forbidden drafts dropped")
    assert not fits(slots.tokens[:, :EMITTED], enumerated(tables, SETTINGS["masked"]))


def test_typical_acceptance_never_emits_what_is_forbidden(tables):
    """Bounds that take every token which has any probability, in trees that offer all tokens at each node."""
    settings, size, count = SETTINGS["masked"], 1 + VOCABULARY + VOCABULARY**2, 40
    parents = np.array([-1] + [0] * VOCABULARY + [1 + i // VOCABULARY for i in range(VOCABULARY**2)], np.int32)
    depths = np.array([0] + [1] * VOCABULARY + [2] * VOCABULARY**2, np.int32)
    own = np.eye(size, dtype=bool)
    ancestors = own | own[parents] & (np.arange(size) > 0)
    slots = Slots(count, settings, 3)
    offered = np.arange(1, size) - 1
    tokens = np.concatenate([slots.last, np.tile(offered % VOCABULARY, (count, 1))], axis=1).astype(np.int32)
    repeated = [np.ascontiguousarray(np.broadcast_to(a, (count, *a.shape))) for a in (parents, depths, ancestors)]
    tree = TreeNodes(tokens, *repeated, slots.positions[:, None] + depths)
    thresholds, drawn = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.int32)
    for free in (False, True):
        nodes = NodeLogits(tables.base[tokens] if free else slots.logits(tables, tokens), thresholds, drawn)
        ACCEPTANCE.draw_nodes(nodes, tree, slots.state, slots.settings)
        accepted = slots.accepted()
        bounds = TypicalBounds(1e-9, 1e-9)
        ACCEPTANCE.typical_accept(nodes, tree, slots.state.active, slots.settings, bounds, accepted, NO_WORKSPACE)
        assert (accepted.lengths == 3).all()
        follows = settings.allowed()[np.concatenate([slots.last, accepted.ids[:, :-1]], axis=1), accepted.ids]
        assert follows.all() != free


@pytest.mark.parametrize(
    ("wrong", "draft"), [("q before its processors", "top-k"), ("unlikely drafts dropped", "plain")]
)
def test_sampled_chains_used_wrongly_fail(tables, wrong, draft):
    slots = chain_tokens_emitted(tables, SETTINGS["plain"], DRAFTS[draft], 2500, wrong)
    assert not fits(slots.tokens[:, :EMITTED], enumerated(tables, SETTINGS["plain"]))


def test_trees_whose_bonus_is_drawn_anew_fail(tables):
    """A bonus from fresh random numbers forgets that no child equals it."""
    slots = tree_tokens_emitted(tables, SETTINGS["plain"], "tree", 1500, redraws=True)
    assert not fits(slots.tokens[:, :EMITTED], enumerated(tables, SETTINGS["plain"]))


def simulated_chain(tables: Tables, rule: str, count: int) -> np.ndarray:
    """Chains of two by one rule of acceptance, in plain NumPy with its own random numbers: tokens [slots, EMITTED]."""
    rng = np.random.default_rng(5)
    p_table = softmax(tables.base.astype(float))
    q_table = np.zeros((VOCABULARY, VOCABULARY))
    q_table[:, DRAFT_IDS] = softmax(tables.draft.astype(float))

    def drawn(p: np.ndarray) -> np.ndarray:
        return np.minimum((rng.random((count, 1)) > p.cumsum(axis=1)).sum(axis=1), VOCABULARY - 1)

    rows = np.arange(count)
    last = np.full(count, FIRST_TOKEN)
    tokens = np.full((count, EMITTED), -1)
    left = np.zeros(count, int)  # drafts that the slot's chain still has, tested one a turn; a bonus ends it
    for place in range(EMITTED):
        left = np.where(left == 0, 3, left) - 1  # two drafts, then the bonus
        p, q = p_table[last], q_table[last]
        draft = drawn(q)
        p_of_draft, q_of_draft = p[rows, draft], q[rows, draft]
        ratio = q_of_draft / p_of_draft if rule == "accepts with min(1, q/p)" else p_of_draft / q_of_draft
        accepts = (rng.random(count) < ratio) & (left > 0)
        residual = p if rule == "residual p" else np.maximum(p - q, 0)
        refused = drawn(residual / np.maximum(residual.sum(axis=1, keepdims=True), 1e-300))
        last = np.where(accepts, draft, np.where(left > 0, refused, drawn(p)))
        left = np.where(accepts, left, 0)
        tokens[:, place] = last
    return tokens


@pytest.mark.parametrize("rule", ["right", "accepts with min(1, q/p)", "residual p"])
def test_only_the_right_rule_keeps_the_law_of_the_base(tables, rule):
    tokens = simulated_chain(tables, rule, 2500)
    assert fits(tokens, enumerated(tables, SETTINGS["plain"])) == (rule == "right")
