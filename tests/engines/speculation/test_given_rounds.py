"""Rounds of candidates that the host gives, alone or beside the draft's in one tree: the tokens of plain decoding,
whatever is given, with a draft or none."""

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
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

SAMPLINGS = {
    "greedy": SamplingValues(),
    "penalized": SamplingValues(repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
    "sampled": SamplingValues(temperature=1.0, seed=11),
    "everything": SamplingValues(1.0, 0, 0.9, 0.0, 1.2, 0.3, 0.2, seed=5, sequence=2),
}
PROMPTS = [[(7 * index + 3 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33, 1))]
COUNT, VOCABULARY = 28, 320
NOTHING = GivenTree([], [])
answers = partial(stepped, count=COUNT, prompts=PROMPTS)
GIVEN = [given(1, 1), given(3, 3), given(7, 4), given(15, 4)]
#: Trees and chains of the draft with given nodes beside: all of them, few, as many as there are places.
JOINT = [
    tree(4, 4, 16).joined(7, 4, 16),
    tree(3, 3, 8).joined(4, 4, 16),
    chain(4).joined(7, 4, 16),
    chain(2).joined(3, 4, 16),
    choices_plan([[0], [1], [0, 0], [0, 1], [1, 0]]).joined(6, 3, 10),
]


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
    for place in range(int(rng.integers(0, plan.given_nodes + 1))):
        wanted = [-1, *(node for node in range(place) if depths[node] < plan.given_depth)]
        parent = wanted[-1] if rng.random() < 0.7 else int(rng.choice(wanted))
        depth = 1 if parent < 0 else depths[parent] + 1
        at = said + depth - 1
        is_right = at < len(expected) and rng.random() < right
        tokens.append(expected[at] if is_right else int(rng.integers(0, VOCABULARY)))
        parents.append(parent)
        depths.append(depth)
    return GivenTree(tokens, parents)


def plans_of(runner: DecodingRunner) -> list[DraftPlan]:
    return [*GIVEN, *([] if not runner.draft.has_model else JOINT)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_chains_and_trees_give_the_tokens_of_plain_decoding(runner: DecodingRunner, name: str) -> None:
    expected = plain(runner, [SAMPLINGS[name]])
    rng = np.random.default_rng(7)
    for plan in plans_of(runner):
        found, steps = answers(
            runner,
            [SAMPLINGS[name]],
            lambda number, said, plan=plan: (plan, [guesses(expected[0], len(said[0]), plan, rng)]),
        )
        assert found == expected, plan.name
        assert steps < COUNT - 2


def test_right_candidates_are_accepted_whole(runner: DecodingRunner) -> None:
    (expected,) = plain(runner, [SAMPLINGS["sampled"]], 1 + 5 * 5)

    def right(plan: DraftPlan, said: list[list[int]]) -> tuple[DraftPlan, list[GivenTree]]:
        following = expected[len(said[0]) : len(said[0]) + 4]
        return plan, [GivenTree(following, range(-1, len(following) - 1))]

    for plan in (given(4, 4), *([] if not runner.draft.has_model else JOINT[:3])):
        step = lambda number, said, plan=plan: right(plan, said)  # noqa: E731
        assert answers(runner, [SAMPLINGS["sampled"]], step, count=1 + 5 * 5) == ([expected], 5), plan.name


def test_slots_without_a_proposal_get_their_own_token(runner: DecodingRunner) -> None:
    samplings = [SAMPLINGS[name] for name in ("greedy", "everything", "penalized", "sampled")]
    expected = plain(runner, samplings)
    rng = np.random.default_rng(3)

    def some(plan: DraftPlan, number: int, said: list[list[int]]) -> tuple[DraftPlan, list[GivenTree]]:
        trees = [
            NOTHING if (slot + number) % 3 == 0 else guesses(expected[slot], len(said[slot]), plan, rng)
            for slot in range(4)
        ]
        return plan, trees

    for plan in (GIVEN[2], *([] if not runner.draft.has_model else JOINT)):
        assert answers(runner, samplings, partial(some, plan))[0] == expected, plan.name
        nothing = plan, [NOTHING] * 4
        assert answers(runner, samplings, lambda *_, nothing=nothing: nothing)[0] == expected, plan.name


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_draft_goes_on_behind_a_chain_that_leads(runner: DecodingRunner, name: str) -> None:
    """The same tokens, whether the chain is right or not; and more of them a round than of the chain alone."""
    if not runner.draft.has_model:
        pytest.skip("there is no draft model")
    expected = plain(runner, [SAMPLINGS[name]] * 2)
    rng = np.random.default_rng(6)
    taken = {}
    for plan in JOINT[:3]:
        for right in (1.0, 0.6):
            for leads in (False, True):

                def chains(
                    number: int,
                    said: list[list[int]],
                    plan: DraftPlan = plan,
                    right: float = right,
                    leads: bool = leads,
                ) -> tuple:
                    trees = []
                    for slot in range(2):
                        following = expected[slot][len(said[slot]) : len(said[slot]) + 2]
                        wrong = [token if rng.random() < right else 3 for token in following]
                        trees.append(GivenTree(wrong, range(-1, len(wrong) - 1), leads))
                    return plan, trees

                found, taken[right, leads] = answers(runner, [SAMPLINGS[name]] * 2, chains)
                assert found == expected, plan.name
        assert taken[1.0, True] <= taken[1.0, False]


def test_a_joint_tree_without_given_nodes_is_the_drafts_own(runner: DecodingRunner) -> None:
    if not runner.draft.has_model:
        pytest.skip("there is no draft model")
    for own in (tree(4, 4, 16), chain(4)):
        joint = own.joined(7, 4, 16)
        steps = [
            answers(runner, [SAMPLINGS["sampled"]] * 2, lambda number, said, plan=plan, trees=trees: (plan, trees))
            for plan, trees in ((own, None), (joint, [NOTHING] * 2))
        ]
        assert steps[0] == steps[1], own.name


def test_mixed_with_plain_steps_and_the_drafts_own_rounds(runner: DecodingRunner) -> None:
    """So that entries that the draft has not seen wait for longer than it has room for."""
    own = [None] if not runner.draft.has_model else [None, chain(4), tree(4, 4, 16)]
    rng, plans = np.random.default_rng(9), plans_of(runner)
    for name in ("greedy", "everything"):
        samplings = [SAMPLINGS[name]] * 2
        expected = plain(runner, samplings)

        def mixed(number: int, said: list[list[int]], expected: list = expected) -> tuple:
            if number % 3:
                plan = plans[number % len(plans)]
                return plan, [guesses(expected[slot], len(said[slot]), plan, rng) for slot in range(2)]
            return own[number // 3 % len(own)], None

        assert answers(runner, samplings, mixed)[0] == expected


def test_to_the_end_of_the_context(runner: DecodingRunner) -> None:
    count = runner.limits.kv_capacity - len(PROMPTS[2])
    rng = np.random.default_rng(1)
    for name, plan in (("greedy", GIVEN[2]), ("sampled", GIVEN[2]), ("greedy", JOINT[0]), ("sampled", JOINT[2])):
        if plan not in plans_of(runner):
            continue
        (expected,), _ = answers(runner, [SAMPLINGS[name]], lambda *_: (None, None), count=count, prompts=PROMPTS[2:3])
        found, _ = answers(
            runner,
            [SAMPLINGS[name]],
            lambda number, said, expected=expected, plan=plan: (plan, [guesses(expected, len(said[0]), plan, rng)]),
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
        with pytest.raises(EngineError, match=r"chain 2 \+ given 3: trees are given to a plan of given candidates"):
            take_step(runner, 1, JOINT[3])
        deep = chain(2).joined(3, 5, 16)
        assert runner.takes_given(1, JOINT[3]) and not runner.takes_given(1, deep)
        with pytest.raises(EngineError, match="draft_steps is 5 for a chain: the engines were built for at most 4"):
            take_step(runner, 1, deep, None, [NOTHING])
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
