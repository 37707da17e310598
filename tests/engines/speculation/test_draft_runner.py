"""The draft's runner on NumPy: prefill, accept and propose against one another, for slots of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.runner import DecodingRunner

RANGE, HIDDEN_SIZE = 128, 64
TOKENS = np.array([(11 * index + 5) % 300 for index in range(20)], np.int32)


@pytest.fixture(params=[1, 3])
def eagle(
    request: pytest.FixtureRequest, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> Iterator[DecodingRunner]:
    with open_eagle(make_engines(request.param, agreeing=False)) as runner:
        yield runner


@pytest.fixture
def draft(eagle: DecodingRunner) -> EagleDraftEngineRunner:
    return eagle.draft


@pytest.fixture
def features(draft: EagleDraftEngineRunner) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((1, 20, draft.config.feature_size)).astype(np.float32)


def prefilled(draft: EagleDraftEngineRunner, slot: int, features: np.ndarray, count: int) -> np.ndarray:
    """Commit the first `count` entries in two chunks; the logits [Vd] after the last."""
    for start, end in ((0, min(count, 9)), (9, count)):
        if end > start:
            draft.prefill(slot, TOKENS[start:end], features[:, start:end], start, end - start)
    return draft.logits(1, 1)[0, 0].copy()


def set_pending(draft: EagleDraftEngineRunner, slot: int, features: np.ndarray, start: int, end: int) -> None:
    """Let the entries start..end-1 be pending."""
    pending, count = draft.pending, end - start
    pending.features[slot, :count] = features[0, start:end]
    pending.token_ids[slot] = -1
    pending.token_ids[slot, :count] = TOKENS[start:end]
    pending.counts[slot], pending.start[slot], pending.last[slot] = count, start, count - 1


def test_accept_equals_prefill(draft: EagleDraftEngineRunner, features: np.ndarray) -> None:
    whole = prefilled(draft, 0, features, 14)
    expected = {name: cache[0, :, :14].copy() for name, cache in draft.states.tensors.items()}
    prefilled(draft, 0, features, 11)
    set_pending(draft, 0, features, 11, 14)
    draft.accept_step(1, 3, RANGE)()
    np.testing.assert_allclose(draft.logits(1, 1)[0, 0], whole, atol=1e-4)
    for name, cache in draft.states.tensors.items():
        np.testing.assert_allclose(cache[0, :, :14], expected[name], atol=1e-5)


def test_slots_of_different_lengths_are_accepted_together_as_alone(
    draft: EagleDraftEngineRunner, features: np.ndarray
) -> None:
    rows = draft.limits.accept_tokens
    ends = {0: (11, 14), 1: (3, 4), 2: (15, 15 + rows)}
    alone = {slot: prefilled(draft, slot, features, end) for slot, (_, end) in ends.items()}
    for slot, (start, end) in ends.items():
        prefilled(draft, slot, features, start)
        set_pending(draft, slot, features, start, end)
    draft.accept_step(3, rows, RANGE)()
    for slot, expected in alone.items():
        np.testing.assert_allclose(draft.logits(3, 1)[slot, 0], expected, atol=1e-4)


def drafted(
    draft: EagleDraftEngineRunner, batch: int, plan: DraftPlan, committed: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Propose all levels after an accept; copies of the candidates' tokens, scores and parents [B, C]."""
    candidates = draft.candidates(batch, plan)
    draft.expand_step(batch, 1, plan)()
    for level in range(1, plan.steps):
        draft.propose_step(batch, level, plan, committed, RANGE)()
        draft.expand_step(batch, level + 1, plan)()
    return candidates.tokens.copy(), candidates.scores.copy(), candidates.parents.copy()


@pytest.mark.parametrize("plan", [chain(4), tree(4, 3, 12)], ids=lambda plan: plan.name)
def test_slots_of_different_lengths_propose_together_as_alone(
    draft: EagleDraftEngineRunner, features: np.ndarray, plan: DraftPlan
) -> None:
    rows, ends = draft.limits.accept_tokens, (14, 6)
    alone = []
    for end in ends:
        prefilled(draft, 0, features, end - 1)
        set_pending(draft, 0, features, end - 1, end)
        draft.accept_step(1, 1, RANGE)()
        alone.append(drafted(draft, 1, plan, np.array([end], np.int32)))
    for slot, end in enumerate(ends):
        prefilled(draft, slot, features, end - 1)
        set_pending(draft, slot, features, end - 1, end)
    draft.accept_step(2, rows, RANGE)()
    together = drafted(draft, 2, plan, np.array(ends, np.int32))
    for slot in range(2):
        for found, expected in zip(together, alone[slot], strict=True):
            np.testing.assert_allclose(found[slot], expected[0], rtol=2e-4, atol=1e-3)


def test_a_proposed_chain_is_what_prefill_of_it_would_propose(
    make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """The first proposed token, committed with the hidden state that was fed back, leads to the second one's logits.

    For the first generation a feature is what the head puts out, so prefill can compute what propose did.
    """
    with open_eagle(make_engines(1, agreeing=False)) as runner:
        draft = runner.draft
        features = np.random.default_rng(0).standard_normal((1, 10, HIDDEN_SIZE)).astype(np.float32)
        prefilled(draft, 0, features, 9)
        set_pending(draft, 0, features, 9, 10)
        draft.accept_step(1, 1, RANGE)()
        fed_back = draft.hidden_states(1, 1).copy()
        tokens, _, _ = drafted(draft, 1, chain(3), np.array([10], np.int32))
        draft.prefill(0, tokens[0, :1].astype(np.int32), fed_back, 10, 1)
        assert draft.draft_to_target[int(draft.logits(1, 1)[0, 0].argmax())] == tokens[0, 1]


def test_proposals_commit_nothing(draft: EagleDraftEngineRunner, features: np.ndarray) -> None:
    prefilled(draft, 0, features, 11)
    committed = {name: cache[0, :, :11].copy() for name, cache in draft.states.tensors.items()}
    set_pending(draft, 0, features, 11, 14)
    draft.accept_step(1, 3, RANGE)()
    expected = draft.logits(1, 1)[0, 0].copy()
    drafted(draft, 1, tree(4, 3, 12), np.array([14], np.int32))
    draft.accept_step(1, 3, RANGE)()
    np.testing.assert_array_equal(draft.logits(1, 1)[0, 0], expected)
    for name, cache in draft.states.tensors.items():
        np.testing.assert_array_equal(cache[0, :, :11], committed[name])


def test_memory_has_the_dimensions_of_configuration_and_limits(draft: EagleDraftEngineRunner) -> None:
    config, limits = draft.config, draft.limits
    assert {cache.shape for cache in draft.states.tensors.values()} == {(4, 4, limits.kv_rows, 16)}
    assert draft.tables(slice(0, 1)).rotary.shape[1] == config.decoder.rotary_dim
    assert draft.pending.features.shape == (4, limits.accept_tokens, config.feature_size)
    mapping = draft.draft_to_target
    np.testing.assert_array_equal(draft.target_to_draft[mapping], np.arange(len(mapping)))


def test_a_prefill_of_nothing_or_too_much_is_refused(draft: EagleDraftEngineRunner, features: np.ndarray) -> None:
    for count, chunk in ((0, 4), (5, 4)):
        with pytest.raises(EngineError, match="tokens for a chunk of 4"):
            draft.prefill(0, TOKENS[:count], features[:, :chunk], 0, chunk)
