"""What drafting emits has the base's own law: enumerated on a vocabulary of five, against the real kernels.

Every kind emits the first tokens of thousands of slots, over as many rounds as that takes; their joint distribution is
compared with the enumerated one by a chi-square test. Deterministic trees emit the
very tokens of plain decoding besides. See `enumerated_law` for the base and its rules.
"""

from __future__ import annotations

import numpy as np
import pytest
from enumerated_law import (
    ACCEPTANCE,
    DRAFT_IDS,
    EMITTED,
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
