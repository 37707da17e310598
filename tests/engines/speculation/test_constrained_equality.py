"""Rules on tokens are obeyed by drafts as by plain decoding, token for token, and leave the law of the masked model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from runner_steps import take_step
from token_rules import VOCABULARY, RandomRules, RuledSequence, ruled_answers, rules

from edgellm.decoding.sequence import StepMasks
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.constraints import TokenConstraint, allows
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, given, tree
from edgellm.engines.speculation.runner import DecodingRunner

PLANS = [
    chain(4),
    tree(4, 4, 16),
    tree(3, 2, 7),
    choices_plan([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    given(12, 4),
]
SAMPLINGS = {
    "greedy": SamplingValues(),
    "penalized": SamplingValues(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "everything": SamplingValues(
        1.0, 0, 0.9, 0.01, 1.2, 0.3, 0.2, seed=5, sequence=2, logit_bias=((3, 4.0), (7, -9.0), (40, 2.5))
    ),
    "sampled": SamplingValues(temperature=1.0, seed=11),
}
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 1))]


def answers(runner: DecodingRunner, samplings: Sequence[SamplingValues], *others: Any) -> tuple[list[list[int]], int]:
    """Those of the first prompts."""
    return ruled_answers(runner, PROMPTS, samplings, *others)


@pytest.fixture(scope="module", params=[(1, "numpy"), (3, "fixed")], ids=str)
def eagle(
    request: pytest.FixtureRequest, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> Iterator[DecodingRunner]:
    generation, backend = request.param
    with open_eagle(make_engines(generation), backend) as runner:
        yield runner


@pytest.mark.parametrize("name", ["greedy", "everything", "sampled"])
def test_one_slot(eagle: DecodingRunner, name: str) -> None:
    sampling = [SAMPLINGS[name]]
    free, _ = answers(eagle, sampling, [None], None)
    plain, most = answers(eagle, sampling, [rules()], None)
    assert plain != free
    for plan in PLANS:
        drafted, steps = answers(eagle, sampling, [rules()], plan, plain)
        assert drafted == plain, plan.name
        assert steps < most or not plan.is_given
    assert answers(eagle, sampling, [None], PLANS[0])[0] == free  # no mask is left behind


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[1], PLANS[-1]], ids=lambda plan: plan.name)
def test_slots_of_which_some_are_free(eagle: DecodingRunner, plan: DraftPlan) -> None:
    samplings = [SAMPLINGS[name] for name in ("sampled", "everything", "greedy", "penalized")]
    alone = [answers(eagle, [s], [m], None)[0][0] for s, m in zip(samplings[:1], [rules(1)], strict=True)]

    def made() -> list[TokenConstraint | None]:
        return [rules(1), None, rules(2), rules(3)]

    plain, _ = answers(eagle, samplings, made(), None)
    assert plain[0] == alone[0]
    assert answers(eagle, samplings, made(), plan, plain)[0] == plain


def test_without_a_draft_model(make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]) -> None:
    limits = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96)
    directory = make_engines(3)
    directory = replace(directory, limits=limits, draft=None)
    from edgellm.engines.backends.opening import open_backend

    runner = DecodingRunner.open(open_backend("numpy", directory), directory, drafts=False)
    try:
        for name in ("greedy", "everything"):
            sampling = [SAMPLINGS[name]] * 2
            plain, most = answers(runner, sampling, [rules(), None], None)
            drafted, steps = answers(runner, sampling, [rules(), None], PLANS[-1], plain)
            assert drafted == plain and steps < most
    finally:
        runner.close()


def test_a_dead_end_is_found_where_plain_decoding_finds_it(eagle: DecodingRunner) -> None:
    """No mask is asked for behind it, and what is drawn there is never taken."""

    def until_the_end(plan: DraftPlan | None) -> list[int]:
        sequence = RuledSequence(RandomRules(VOCABULARY, 3, 0.5, dead=2))
        tokens = eagle.start(0, PROMPTS[0], 0, SAMPLINGS["greedy"], None, StepMasks([sequence])).wait().tolist()
        sequence.know(tokens)
        while sequence.failure is None and len(tokens) < 40:
            for token in take_step(eagle, 1, plan, StepMasks([sequence])).wait()[0]:
                if sequence.failure is not None or not sequence.constraint.try_advance(token):
                    break
                tokens.append(token)
        eagle.stop(0)
        return tokens

    plain = until_the_end(None)
    assert 1 < len(plain) < 40
    for plan in PLANS[:-1]:
        assert until_the_end(plan) == plain


def test_masks_keep_what_is_not_read(eagle: DecodingRunner) -> None:
    """Nodes that are forbidden have no mask, all others theirs: the path's own rules say so."""
    seen = []

    class Watched(StepMasks):
        def fill(self, trees: object, rows: np.ndarray, masks: np.ndarray) -> int:
            used = super().fill(trees, rows, masks)
            copies = [each.copy() for each in trees]
            seen.append((copies, rows.copy(), masks[:used].copy(), [*self._sequences[0].constraint.path]))
            return used

    sequence = RuledSequence(RandomRules(VOCABULARY, 1, 0.5))
    sequence.know(eagle.start(0, PROMPTS[0], 0, SAMPLINGS["greedy"], None, StepMasks([sequence])).wait().tolist())
    for _ in range(4):
        sequence.know(take_step(eagle, 1, PLANS[1], Watched([sequence])).wait()[0])
    eagle.stop(0)
    for (tokens, parents), rows, masks, before in seen:
        for node in range(tokens.shape[1]):
            path, at = [], node
            while at > 0:
                path.append(int(tokens[0, at]))
                at = int(parents[0, at])
            fresh = RandomRules(VOCABULARY, 1, 0.5)
            fresh.path = [*before]
            if at < 0 or not all(map(fresh.try_advance, reversed(path))):
                assert rows[node] == -1
            else:
                found = [token for token in range(VOCABULARY) if allows(masks[rows[node]], token)]
                assert found == np.flatnonzero(fresh.allowed()).tolist()
    assert len({tuple(rows >= 0) for _, rows, _, _ in seen}) > 1


# The law of the first two tokens: cells by the tokens' remainders.

_CELLS = 7


def exact_law(runner: DecodingRunner, sampling: SamplingValues) -> np.ndarray:
    """[_CELLS, _CELLS]: the probabilities of the first two tokens, of the masked model."""

    def law(rule: RandomRules, tokens: list[int]) -> np.ndarray:
        runner.start(0, [*PROMPTS[0], *tokens], 0, SamplingValues()).wait()
        values = runner.base.logits(0).astype(np.float64) / sampling.temperature
        values[~rule.allowed()] = -np.inf
        weights = np.exp(values - values.max())
        return weights / weights.sum()

    found, rule = np.zeros((_CELLS, _CELLS)), ruled()
    first = law(rule, [])
    for token in np.flatnonzero(first > 1e-7):
        assert rule.try_advance(int(token))
        second = law(rule, [int(token)])
        rule.rollback(1)
        found[token % _CELLS] += first[token] * np.bincount(np.arange(VOCABULARY) % _CELLS, second, _CELLS)
    return found


def ruled() -> RandomRules:
    return RandomRules(VOCABULARY, 4, 0.15)


def drawn(runner: DecodingRunner, plan: DraftPlan | None, count: int) -> np.ndarray:
    """[_CELLS, _CELLS] how often the first two tokens were those, of `count` answers."""
    found = np.zeros((_CELLS, _CELLS))
    for first in range(0, count, 4):
        sequences = [RuledSequence(ruled()) for _ in range(4)]
        tokens = []
        for slot, sequence in enumerate(sequences):
            sampling = SamplingValues(temperature=1.5, seed=1000 + first + slot, sequence=slot)
            reused = len(PROMPTS[0]) - 1 if first else 0
            tokens.append(runner.start(slot, PROMPTS[0], reused, sampling, None, StepMasks([sequence])).wait().tolist())
            sequence.know(tokens[-1])
        for got, emitted in zip(tokens, take_step(runner, 4, plan, StepMasks(sequences)).wait(), strict=True):
            found[got[0] % _CELLS, emitted[0] % _CELLS] += 1
        for slot in range(4):
            runner.stop(slot)
    return found


def agrees(found: np.ndarray, law: np.ndarray) -> bool:
    """Chi-square; refuses a true law three times in 10^5."""
    expected = law.ravel() * found.sum()
    frequent = expected >= 5
    pairs = [(found.ravel()[frequent], expected[frequent])]
    rest = found.ravel()[~frequent].sum(), expected[~frequent].sum()
    statistic = sum(((f - e) ** 2 / e).sum() for f, e in pairs)
    degrees = int(frequent.sum()) - 1
    if rest[1] >= 5:
        statistic, degrees = statistic + (rest[0] - rest[1]) ** 2 / rest[1], degrees + 1
    spread = 2 / (9 * degrees)
    return statistic <= degrees * (1 - spread + 4 * np.sqrt(spread)) ** 3  # Wilson and Hilferty's quantile


@pytest.fixture(scope="module")
def lawful(
    make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> Iterator[tuple[DecodingRunner, np.ndarray]]:
    with open_eagle(make_engines(3)) as runner:
        yield runner, exact_law(runner, SamplingValues(temperature=1.5))


@pytest.mark.parametrize(
    "plan", [None, tree(4, 3, 12), chain(3, sampled=True)], ids=lambda plan: "plain" if plan is None else plan.name
)
def test_first_tokens_have_the_law_of_the_masked_model(
    lawful: tuple[DecodingRunner, np.ndarray], plan: DraftPlan | None
) -> None:
    runner, law = lawful
    assert agrees(drawn(runner, plan, 400), law)
