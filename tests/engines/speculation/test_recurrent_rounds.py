"""Rounds over recurrent layers: the tokens, and the states, of plain decoding, whatever is drafted or given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from runner_steps import fitting, take_step
from tiny_families import RECURRENT

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, choices_plan, given, tree
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.kept_on_host import RowKeeper

LIMITS = EngineLimits(max_batch=4, prefill_chunk=16, kv_capacity=96, draft_top_k=4, draft_steps=4, verify_tree_size=16)
PLANS = [chain(4), tree(4, 4, 16), tree(2, 3, 9), choices_plan([[0], [1], [0, 0], [0, 1], [0, 0, 0]])]
SAMPLINGS = [
    SamplingValues(),
    SamplingValues(temperature=1.0, seed=11),
    SamplingValues(1.0, 0, 0.9, 0.0, 1.1, 0.1, 0.05, seed=5),
]
PROMPTS = [[(7 * index + 5 * seed) % 250 for index in range(length)] for seed, length in enumerate((20, 3, 33))]
COUNT = 16


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", "mtp", "granite4_hybrid", "nemotron_h"])
def directory(
    request: pytest.FixtureRequest,
    make_tiny_pair: Callable[..., tuple],
    make_engines: Callable[..., EngineDirectory],
    tmp_path_factory: pytest.TempPathFactory,
) -> EngineDirectory:
    if request.param == "mtp":  # the head that ships with the model drafts
        return make_engines("mtp", True, LIMITS)
    base, head = make_tiny_pair(1, **RECURRENT[request.param] | {"tie_word_embeddings": False})
    target = tmp_path_factory.mktemp("recurrent") / "engines"
    build_engine_directory(base, target, LIMITS, [], draft=head)
    return EngineDirectory.open(target)


@pytest.fixture(scope="module")
def expected(runner: DecodingRunner, on_numpy: list[list[int]]) -> list[list[int]]:
    """What each prompt is answered with alone, plainly: by NumPy, or by the GPU itself."""
    return on_numpy if runner.backend.name == "numpy" else alone(runner)


@pytest.fixture(scope="module")
def on_numpy(directory: EngineDirectory, open_eagle: Callable[..., object]) -> list[list[int]]:
    with open_eagle(directory) as opened:
        return alone(opened)


def alone(runner: DecodingRunner) -> list[list[int]]:
    pairs = zip(PROMPTS, SAMPLINGS, strict=True)
    return [answers(runner, [prompt], [sampling], [None])[0] for prompt, sampling in pairs]


Step = tuple[DraftPlan | None, Sequence[GivenTree] | None]


def answers(
    runner: DecodingRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingValues],
    plans: Sequence[DraftPlan | None],
    trees: Callable[[list[list[int]], DraftPlan], list[GivenTree]] | None = None,
) -> list[list[int]]:
    """The first tokens of prompts together, the plans in turn."""
    found = [
        runner.start(slot, prompt, 0, sampling).wait().tolist()
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    step = 0
    while min(map(len, found)) < COUNT:
        plan = plans[step % len(plans)]
        proposed = None
        if plan is not None:
            plan = fitting(plan, LIMITS.kv_capacity - max(runner.base.lengths))
        if plan is not None and plan.is_given:
            assert trees is not None and runner.takes_given(len(prompts), plan)
            proposed = trees(found, plan)
        for tokens, emitted in zip(found, take_step(runner, len(prompts), plan, None, proposed).wait(), strict=True):
            tokens.extend(emitted)
        step += 1
    for slot in range(len(prompts)):
        runner.stop(slot)
    return [tokens[:COUNT] for tokens in found]


def recurrent(runner: DecodingRunner, slot: int) -> dict[str, np.ndarray]:
    """A copy of a slot's recurrent states."""
    found = {}
    for each in runner.base.states.recurrent_of_slot(slot):
        values = runner.backend.host_memory(each.memory.nbytes).view(np.float32).reshape(each.memory.shape)
        runner.backend.download_rows(each.memory, values, each.rows).wait()
        found[each.name] = values
    return found


def assert_same(runner: DecodingRunner, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """On a GPU the bits are the same; NumPy's linear layers of several rows round otherwise."""
    assert found.keys() == wanted.keys()
    for name, values in found.items():
        if runner.backend.name == "numpy":
            np.testing.assert_allclose(values, wanted[name], rtol=1e-3, atol=2e-5, err_msg=name)
        else:
            assert (values == wanted[name]).all(), name


def test_drafted_rounds_equal_plain_decoding(runner: DecodingRunner, expected: list[list[int]]) -> None:
    assert answers(runner, PROMPTS, SAMPLINGS, [None]) == expected
    for plans in (*([plan] for plan in PLANS), [*PLANS, None, None]):
        assert answers(runner, PROMPTS, SAMPLINGS, plans) == expected, [plan and plan.name for plan in plans]
    for order in ((1, 2, 0), (2, 0, 1)):
        found = answers(runner, [PROMPTS[i] for i in order], [SAMPLINGS[i] for i in order], [PLANS[1], None])
        assert found == [expected[i] for i in order]


def branching(expected: Sequence[Sequence[int]], generator: np.random.Generator) -> Callable[..., list[GivenTree]]:
    """Trees whose right path goes through any of the branches."""

    def trees(found: list[list[int]], plan: DraftPlan) -> list[GivenTree]:
        made = []
        for tokens, wanted in zip(found, expected, strict=True):
            nodes: list[int] = []
            parents: list[int] = []
            above, depth = -1, 0
            while len(nodes) + 2 <= plan.tree_size - 1 and depth < min(plan.steps, 3):
                at = len(tokens) + depth
                right = wanted[at] if at < len(wanted) and generator.random() < 0.8 else 1
                children = [right, (right + 1 + int(generator.integers(0, 9))) % 250]
                generator.shuffle(children)
                nodes += children
                parents += [above, above]
                above, depth = len(nodes) - 2 + children.index(right), depth + 1
            made.append(GivenTree(nodes, parents))
        return made

    return trees


def test_given_trees_that_branch_equal_plain_decoding(runner: DecodingRunner, expected: list[list[int]]) -> None:
    trees = branching(expected, np.random.default_rng(3))
    for plans in ([given(8, 4)], [given(5, 3), None, PLANS[1]]):
        assert answers(runner, PROMPTS, SAMPLINGS, plans, trees) == expected


def test_states_are_those_of_plain_decoding(runner: DecodingRunner, expected: list[list[int]]) -> None:
    trees = branching(expected[:1], np.random.default_rng(4))
    held: list[tuple[int, dict[str, np.ndarray]]] = []
    for plans in ([None], [given(8, 4)], [PLANS[1], None]):
        runner.start(0, PROMPTS[0], 0, SAMPLINGS[0]).wait()
        found, step = [expected[0][0]], 0
        while len(found) < COUNT - 8:  # a round gives five at most
            plan = plans[step % len(plans)]
            proposed = None if plan is None or not plan.is_given else trees([found], plan)
            found += take_step(runner, 1, plan, None, proposed).wait()[0]
            step += 1
        assert found == expected[0][: len(found)]
        held.append((len(found), recurrent(runner, 0)))
        runner.stop(0)
    for count, states in held:
        found = runner.start(0, PROMPTS[0], 0, SAMPLINGS[0]).wait().tolist()
        while len(found) < count:
            found += take_step(runner, 1, None).wait()[0]
        assert_same(runner, states, recurrent(runner, 0))
        runner.stop(0)


def test_what_idle_slots_hold_stays_to_the_bit(runner: DecodingRunner, expected: list[list[int]]) -> None:
    runner.start(2, PROMPTS[2], 0, SAMPLINGS[2]).wait()
    runner.stop(2)
    before = recurrent(runner, 2)
    trees = branching(expected[:2], np.random.default_rng(5))
    plans = [None, given(8, 4), PLANS[1]]
    assert answers(runner, PROMPTS[:2], SAMPLINGS[:2], plans, trees) == expected[:2]
    runner.swap_rows(2, 3)
    runner.copy_rows(3, 1)
    for slot in (1, 3):
        for name, values in recurrent(runner, slot).items():
            assert (values == before[name]).all()


def test_a_dropped_forward_pass_changes_nothing(runner: DecodingRunner, expected: list[list[int]]) -> None:
    found = runner.start(0, PROMPTS[0], 0, SAMPLINGS[0]).wait().tolist()
    trees = branching(expected[:1], np.random.default_rng(6))
    while len(found) < COUNT:
        before = recurrent(runner, 0)
        begun = runner.begin(1)
        assert all((values == before[name]).all() for name, values in recurrent(runner, 0).items())
        if len(found) % 3:
            plan = fitting(given(8, 4), LIMITS.kv_capacity - max(runner.base.lengths))
            assert plan is not None
            found += take_step(runner, 1, plan, None, trees([found], plan)).wait()[0]
        else:
            found += take_step(runner, 1, None, None, None, begun).wait()[0]
    assert found[:COUNT] == expected[0]
    runner.stop(0)


@pytest.mark.parametrize("plan", [None, PLANS[0], PLANS[1]], ids=["plain", "chain", "tree"])
def test_what_gave_way_goes_on(runner: DecodingRunner, expected: list[list[int]], plan: DraftPlan | None) -> None:
    """Kept on the host between two steps, in another slot afterwards, with another sequence in its slot meanwhile."""
    keeper = RowKeeper(runner, 1 << 24)
    found = runner.start(0, PROMPTS[1], 0, SAMPLINGS[1]).wait().tolist()
    while len(found) < 12:
        found += take_step(runner, 1, plan).wait()[0]
    rows = len(PROMPTS[1]) + len(found) - 1
    draft_rows = runner.draft.rows(0)
    kept = keeper.keep(0, rows, draft_rows)
    assert kept is not None
    runner.stop(0)
    assert answers(runner, PROMPTS[:2], SAMPLINGS[:2], [plan]) == expected[:2]
    other = runner.start(0, PROMPTS[2], 0, SAMPLINGS[2]).wait().tolist()
    keeper.put_back(1, kept)
    runner.resume(1, [*PROMPTS[1], *found], len(found), draft_rows, SAMPLINGS[1])
    while len(found) < COUNT:
        for tokens, emitted in zip((other, found), take_step(runner, 2, plan).wait(), strict=True):
            tokens.extend(emitted)
    assert found[:COUNT] == expected[1] and other[:COUNT] == expected[2][: len(other)]
    for slot in (1, 0):
        runner.stop(slot)
    keeper.close()


def test_a_prompt_goes_on_from_where_a_slot_is(runner: DecodingRunner, expected: list[list[int]]) -> None:
    """With stops on the way, at whose places the states are those of shorter prompts."""
    prompt, seen = PROMPTS[2], {}
    for place in (7, 16, 30):
        runner.start(1, prompt[:place], 0, SAMPLINGS[2]).wait()
        runner.stop(1)
        seen[place] = recurrent(runner, 1)
    stopped: dict[int, dict[str, np.ndarray]] = {}
    stops = {place: lambda place=place: stopped.update({place: recurrent(runner, 0)}) for place in (7, 16, 30)}
    first = runner.start(0, prompt, 0, SAMPLINGS[2], stops=stops).wait().tolist()
    assert first == expected[2][:1] and stopped.keys() == seen.keys()
    for place, states in stopped.items():
        for name, values in states.items():  # chunks of other sizes
            tolerance = {"rtol": 1e-3, "atol": 2e-5} if runner.backend.name == "numpy" else {"rtol": 0.1, "atol": 0.02}
            np.testing.assert_allclose(values, seen[place][name], **tolerance, err_msg=name)
    runner.stop(0)
    runner.start(1, prompt[:30], 0, SAMPLINGS[2]).wait()
    runner.stop(1)  # in a slot that had gone farther
    found = runner.start(1, prompt, 30, SAMPLINGS[2]).wait().tolist()
    runner.stop(1)
    assert found == first


def test_logits_behind_a_text_are_those_of_decoding(directory: EngineDirectory, on_numpy: list[list[int]]) -> None:
    expected = on_numpy
    with without_draft(directory) as opened:
        following = FollowingLogits(opened.base)
        text = [*PROMPTS[0], *expected[0]]
        for first in (len(PROMPTS[0]), 1):
            blocks = np.concatenate([block.copy() for block in following.blocks(2, text, first)])
            answered = blocks[len(PROMPTS[0]) - first :]
            assert answered.argmax(axis=1).tolist() == expected[0]


@contextmanager
def without_draft(directory: EngineDirectory) -> Iterator[DecodingRunner]:
    from edgellm.engines.backends.opening import open_backend

    opened = DecodingRunner.open(open_backend("numpy", directory), directory, drafts=False)
    try:
        yield opened
    finally:
        opened.close()


def test_rounds_without_a_draft_model(directory: EngineDirectory, on_numpy: list[list[int]]) -> None:
    expected = on_numpy
    with without_draft(directory) as opened:
        trees = branching(expected, np.random.default_rng(7))
        assert answers(opened, PROMPTS, SAMPLINGS, [given(8, 4), None, given(2, 2)], trees) == expected
        with pytest.raises(EngineError, match="trees are given to a plan of given candidates"):
            opened.round(1, given(2, 2))
