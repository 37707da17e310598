"""Drafting changes no token: every deterministic kind against plain decoding, greedy and sampled, one slot and several.

The runners compute in float32, where a difference can only come from logits that lie within rounding of each other;
none of these prompts has such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import runner_steps

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, tree
from edgellm.engines.speculation.runner import DecodingRunner

PLANS = [
    chain(4),
    chain(1),
    tree(4, 4, 16),
    tree(4, 4, 5),
    tree(3, 2, 10),
    tree(4, 1, 5),
    choices_plan([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]),
]
SAMPLINGS = {
    "greedy": SamplingValues(),
    "penalized": SamplingValues(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "sampled": SamplingValues(temperature=1.0, seed=11),
    "filtered": SamplingValues(0.8, 40, 0.9, 0.01, seed=(1 << 40) + 3),
    "everything": SamplingValues(1.0, 0, 0.9, 0.0, 1.2, 0.3, 0.2, seed=5, sequence=2),
}
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 1))]
COUNT = 16
answers = partial(runner_steps.answers, count=COUNT)


@pytest.fixture(
    scope="module",
    params=[(1, True), (3, False), ("mtp", False), ("mtp", True, "int8")],
    ids=lambda p: "-".join(map(str, p)),
)
def eagle(
    request: pytest.FixtureRequest, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> Iterator[DecodingRunner]:
    generation, agreeing, *kv_cache = request.param
    with open_eagle(make_engines(generation, agreeing).with_kv_cache(*kv_cache or (None,))) as runner:
        yield runner


@pytest.mark.parametrize("name", ["greedy", "filtered", "everything"])
def test_one_slot(eagle: DecodingRunner, name: str) -> None:
    sampling = SAMPLINGS[name]
    plain, plain_steps = answers(eagle, PROMPTS[:1], [sampling], [None])
    for plan in PLANS:
        drafted, steps = answers(eagle, PROMPTS[:1], [sampling], [plan])
        assert drafted == plain, plan.name
        assert steps <= plain_steps


@pytest.mark.parametrize("plan", [PLANS[2], PLANS[-1]], ids=lambda plan: plan.name)
def test_slots_of_different_lengths_and_samplings(eagle: DecodingRunner, plan: DraftPlan) -> None:
    samplings = [SAMPLINGS[name] for name in ("greedy", "everything", "filtered", "sampled")]
    alone = [answers(eagle, [p], [s], [None])[0][0] for p, s in zip(PROMPTS, samplings, strict=True)]
    together, _ = answers(eagle, PROMPTS, samplings, [plan])
    assert together == alone


def test_a_changing_mixture_of_plans_and_plain_steps(eagle: DecodingRunner) -> None:
    """Also plain steps for longer than the draft's pending entries last."""
    kinds = [*PLANS, None, None, None, None, None, None, None, PLANS[0], None, PLANS[2]]
    for name in ("greedy", "everything"):
        sampling = [SAMPLINGS[name]] * 2
        plain, _ = answers(eagle, PROMPTS[:2], sampling, [None], count=28)
        mixed, _ = answers(eagle, PROMPTS[:2], sampling, kinds, count=28)
        assert mixed == plain


def test_agreeing_heads_are_accepted_and_sampled_chains_too(
    make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """So that the other tests do accept: fewer steps than tokens by far."""
    for generation in (1, "mtp"):  # as above
        with open_eagle(make_engines(generation, True)) as runner:
            _, steps = answers(runner, PROMPTS[:1], [SamplingValues()], [PLANS[2]])
            assert COUNT / steps > 1.7
            _, steps = answers(runner, PROMPTS[:1], [SamplingValues()], [chain(3)])
            assert COUNT / steps > 1.5
            sampled, steps = answers(runner, PROMPTS[:1], [SAMPLINGS["sampled"]], [chain(4, sampled=True)])
            assert COUNT / steps > 1.4
            again, _ = answers(runner, PROMPTS[:1], [SAMPLINGS["sampled"]], [chain(4, sampled=True)])
            assert again == sampled


@pytest.mark.slow  # test_draft_weights.py drafts with such heads, too
@pytest.mark.parametrize(("generation", "weights"), [(1, "int8"), (3, "int4"), ("nemotron_mtp", "int4")])
def test_packed_drafts_change_no_token(
    generation: int | str, weights: str, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """And propose others than dense ones do, most of which are accepted all the same."""
    rounds = []
    for each in ("as-published", weights):
        directory, found = make_engines(generation, True, weights=each), []
        assert ("draft" in directory.packed_names) == (each == weights)
        with open_eagle(directory) as runner:
            for name in ("greedy", "everything"):
                samplings = [SAMPLINGS[name]] * 2
                plain, _ = answers(runner, PROMPTS[:2], samplings, [None])
                for plan in (PLANS[0], PLANS[2]):
                    drafted, steps = answers(runner, PROMPTS[:2], samplings, [plan])
                    assert drafted == plain, f"{name}, {plan.name}"
                    found.append(steps)
        rounds.append(found)
    assert max(rounds[1]) < COUNT
    assert sum(rounds[1]) < 1.25 * sum(rounds[0])


def test_sampled_chains_are_greedy_at_temperature_0(eagle: DecodingRunner) -> None:
    for name in ("greedy", "penalized"):
        plain, _ = answers(eagle, PROMPTS[:1], [SAMPLINGS[name]], [None])
        chained, _ = answers(eagle, PROMPTS[:1], [SAMPLINGS[name]], [chain(3, sampled=True)])
        assert chained == plain


def test_typical_acceptance_is_exact_at_temperature_0_and_takes_fewer_steps_above(eagle: DecodingRunner) -> None:
    lossy = tree(4, 4, 16, acceptance="typical")
    for name in ("greedy", "penalized"):
        plain, _ = answers(eagle, PROMPTS[:1], [SAMPLINGS[name]], [None])
        assert answers(eagle, PROMPTS[:1], [SAMPLINGS[name]], [lossy])[0] == plain
    _, exact = answers(eagle, PROMPTS[:1], [SAMPLINGS["sampled"]], [PLANS[2]])
    _, typical = answers(eagle, PROMPTS[:1], [SAMPLINGS["sampled"]], [lossy])
    assert typical < exact


@pytest.mark.slow  # test_drafted_answers.py ends there, too
def test_to_the_end_of_the_context(eagle: DecodingRunner) -> None:
    """The last rounds are shorter, the very last step is plain."""
    sampling = "everything"
    count = eagle.limits.kv_capacity - len(PROMPTS[2])
    plain, _ = answers(eagle, PROMPTS[2:3], [SAMPLINGS[sampling]], [None], count=count)
    for plan in (PLANS[0], PLANS[2], PLANS[-1]):
        drafted, _ = answers(eagle, PROMPTS[2:3], [SAMPLINGS[sampling]], [plan], count=count)
        assert drafted == plain
