"""Rounds of candidates that the host gives: the tokens of plain decoding, whatever is given, with a draft or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pytest
from runner_steps import stepped, take_step

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

SAMPLINGS = {
    "greedy": SamplingValues(),
    "penalized": SamplingValues(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "sampled": SamplingValues(temperature=1.0, seed=11),
    "everything": SamplingValues(1.0, 0, 0.9, 0.0, 1.2, 0.3, 0.2, seed=5, sequence=2),
}
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 1))]
COUNT, VOCABULARY = 18, 320
NOTHING = GivenTree([], [])
answers = partial(stepped, count=COUNT, prompts=PROMPTS)
GIVEN = [given(1, 1), given(3, 3), given(7, 4), given(15, 4)]


@pytest.fixture(scope="module", params=["no draft", "draft"])
def runner(
    request: pytest.FixtureRequest, make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> Iterator[DecodingRunner]:
    directory = make_engines(3)
    if request.param == "draft":
        with open_eagle(directory) as drafting:
            yield drafting
        return
    plain_runner = DecodingRunner.open(open_backend("numpy", directory), directory, drafts=False)
    try:
        yield plain_runner
    finally:
        plain_runner.close()


def plain(runner: DecodingRunner, samplings: Sequence[SamplingValues], count: int = COUNT) -> list[list[int]]:
    return answers(runner, samplings, lambda number, found: (None, None), count=count)[0]


def guesses(
    expected: Sequence[int], said: int, plan: DraftPlan, rng: np.random.Generator, right: float = 0.8
) -> GivenTree:
    """A tree of up to the plan's size: a path that is `right` with this probability a token, and wrong branches."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    for place in range(int(rng.integers(0, plan.top_k + 1))):
        wanted = [-1, *(node for node in range(place) if depths[node] < plan.steps)]
        parent = wanted[-1] if rng.random() < 0.7 else int(rng.choice(wanted))
        depth = 1 if parent < 0 else depths[parent] + 1
        at = said + depth - 1
        is_right = at < len(expected) and rng.random() < right
        tokens.append(expected[at] if is_right else int(rng.integers(0, VOCABULARY)))
        parents.append(parent)
        depths.append(depth)
    return GivenTree(tokens, parents)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_chains_and_trees_give_the_tokens_of_plain_decoding(runner: DecodingRunner, name: str) -> None:
    expected = plain(runner, [SAMPLINGS[name]])
    rng = np.random.default_rng(7)
    for plan in GIVEN:
        found, steps = answers(
            runner,
            [SAMPLINGS[name]],
            lambda number, said, plan=plan: (plan, [guesses(expected[0], len(said[0]), plan, rng)]),
        )
        assert found == expected, plan.name
        assert steps < COUNT - 2


def test_right_candidates_are_accepted_whole(runner: DecodingRunner) -> None:
    (expected,) = plain(runner, [SAMPLINGS["sampled"]], 1 + 5 * 5)

    def right(number: int, said: list[list[int]]) -> tuple[DraftPlan, list[GivenTree]]:
        following = expected[len(said[0]) : len(said[0]) + 4]
        return given(4, 4), [GivenTree(following, range(-1, len(following) - 1))]

    assert answers(runner, [SAMPLINGS["sampled"]], right, count=1 + 5 * 5) == ([expected], 5)


def test_slots_without_a_proposal_get_their_own_token(runner: DecodingRunner) -> None:
    samplings = [SAMPLINGS[name] for name in ("greedy", "everything", "penalized", "sampled")]
    expected = plain(runner, samplings)
    rng = np.random.default_rng(3)

    def some(number: int, said: list[list[int]]) -> tuple[DraftPlan, list[GivenTree]]:
        trees = [
            NOTHING if (slot + number) % 3 == 0 else guesses(expected[slot], len(said[slot]), GIVEN[2], rng)
            for slot in range(4)
        ]
        return GIVEN[2], trees

    assert answers(runner, samplings, some)[0] == expected
    assert answers(runner, samplings, lambda *_: (GIVEN[2], [NOTHING] * 4))[0] == expected


def test_mixed_with_plain_steps_and_the_drafts_own_rounds(runner: DecodingRunner) -> None:
    """So that entries that the draft has not seen wait for longer than it has room for."""
    own = [None] if not runner.draft.has_model else [None, chain(4), tree(4, 4, 16)]
    rng = np.random.default_rng(9)
    for name in ("greedy", "everything"):
        samplings = [SAMPLINGS[name]] * 2
        expected = plain(runner, samplings)

        def mixed(number: int, said: list[list[int]], expected: list = expected) -> tuple:
            if number % 3:
                plan = GIVEN[number % len(GIVEN)]
                return plan, [guesses(expected[slot], len(said[slot]), plan, rng) for slot in range(2)]
            return own[number // 3 % len(own)], None

        assert answers(runner, samplings, mixed)[0] == expected


def test_to_the_end_of_the_context(runner: DecodingRunner) -> None:
    count = runner.limits.kv_capacity - len(PROMPTS[2])
    rng = np.random.default_rng(1)
    for name in ("greedy", "sampled"):
        (expected,), _ = answers(runner, [SAMPLINGS[name]], lambda *_: (None, None), count=count, prompts=PROMPTS[2:3])
        found, _ = answers(
            runner,
            [SAMPLINGS[name]],
            lambda number, said, expected=expected: (GIVEN[2], [guesses(expected, len(said[0]), GIVEN[2], rng)]),
            count=count,
            prompts=PROMPTS[2:3],
        )
        assert found == [expected]


def test_what_is_not_given_is_refused(runner: DecodingRunner) -> None:
    runner.start(0, PROMPTS[0], 0, SamplingValues()).wait()
    with pytest.raises(EngineError, match="given 3: trees are given to a plan of given candidates, and to no other"):
        take_step(runner, 1, given(3, 3))
    if runner.draft.has_model:
        with pytest.raises(EngineError, match="chain 2: trees are given to a plan of given candidates"):
            take_step(runner, 1, chain(2), None, [NOTHING])
    assert not runner.takes_given(1, given(40, 16))
    assert not runner.takes_given(1, given(7, 17))
    runner.stop(0)


def test_rules_have_rows_for_the_largest_trees_of_all_slots(runner: DecodingRunner) -> None:
    """A directory's own trees may be smaller than those given to it."""
    plan = given(runner.verification.most_nodes - 1, runner.verification.most_given)
    rooms: list[int] = []

    class NoMasks:
        def fill(self, trees: tuple[np.ndarray, np.ndarray] | None, rows: np.ndarray, masks: np.ndarray) -> int:
            assert trees is not None
            rooms.append(min(rows.size, len(masks)) - trees[0].size)
            rows.fill(-1)
            return 0

    for slot, prompt in enumerate(PROMPTS[:3]):
        runner.start(slot, prompt, 0, SamplingValues()).wait()
    chain = GivenTree([5] * plan.top_k, [-1] * plan.top_k)
    runner.round(3, plan, NoMasks(), [chain] * 3).wait()
    for slot in range(3):
        runner.stop(slot)
    assert len(rooms) == 1 and rooms[0] >= 0
