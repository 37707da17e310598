"""The round's runner on NumPy: what it keeps for the draft, reuse of prefixes, slots, limits, captures, seams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from runner_steps import fitting, take_step

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineDirectoryError, EngineError
from edgellm.engines.runners.captured_steps import CapturedSteps
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, chain, tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.tree import VerifiedTree

PROMPT = [(7 * index + 3) % 250 for index in range(40)]
GREEDY = SamplingValues()
PLANS = [chain(4), tree(4, 4, 16)]


@pytest.fixture
def runner(make_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]) -> Iterator[DecodingRunner]:
    with open_eagle(make_engines(3)) as opened:
        yield opened


def rounds(runner: DecodingRunner, count: int, plan: object = PLANS[1], batch: int = 1) -> list[list[int]]:
    """The tokens of each slot in `count` rounds of `plan` (None: plain steps)."""
    found: list[list[int]] = [[] for _ in range(batch)]
    for _ in range(count):
        for tokens, emitted in zip(found, take_step(runner, batch, plan).wait(), strict=True):
            tokens.extend(emitted)
    return found


def draft_state(runner: DecodingRunner, slot: int = 0) -> dict[str, np.ndarray]:
    """The draft's committed rows, once it has taken what is pending, and the logits that follow."""
    length = runner.base.lengths[slot]
    tokens = runner.draft.taken(slot + 1)
    runner.draft.accept_step(slot + 1, tokens, 128)()
    rows = {name: cache[slot, :, :length].copy() for name, cache in runner.draft.states.tensors.items()}
    return rows | {"logits": runner.draft.logits(slot + 1, 1)[slot, 0].copy()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("plan", [*PLANS, None], ids=["chain", "tree", "plain"])
def test_the_draft_sees_what_a_prefill_of_the_same_tokens_shows_it(runner: DecodingRunner, plan: object) -> None:
    """Whatever led to the tokens, chunks of a prompt, rounds or plain steps: features, ids and positions agree."""
    answer = runner.start(0, PROMPT, 0, GREEDY).wait().tolist()
    answer += rounds(runner, 12 if plan is None else 5, plan)[0]
    found = draft_state(runner)
    runner.stop(0)
    text = PROMPT + answer
    assert runner.base.sequences(slice(0, 1)).kvcache_start_index[0] == len(text) - 1
    runner.start(0, text[:-1], 0, GREEDY).wait()
    runner.draft.pending.token_ids[0, 0] = text[-1]
    assert_close(found, draft_state(runner))


@pytest.mark.parametrize("reused", [1, 15, 16, 17, 38])
def test_a_reused_prefix_changes_nothing(runner: DecodingRunner, reused: int) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    expected = draft_state(runner)
    runner.start(0, PROMPT[: reused + 1] + [5, 6, 7], 0, GREEDY).wait()
    rounds(runner, 2)
    runner.stop(0)
    runner.start(0, PROMPT, reused, GREEDY).wait()
    assert_close(draft_state(runner), expected)


def test_what_the_draft_has_committed_is_known_once_a_step_was_read(runner: DecodingRunner) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    assert runner.draft.rows(0) == len(PROMPT) - 1
    first = runner.round(1, PLANS[1])
    assert runner.draft.rows(0) == len(PROMPT) - 1
    count = len(first.wait()[0])
    assert runner.draft.rows(0) == len(PROMPT)
    plain = runner.limits.accept_tokens - count  # until its pending entries are full
    rounds(runner, plain, None)
    assert runner.draft.rows(0) == len(PROMPT)
    rounds(runner, 1, None)
    assert runner.draft.rows(0) == len(PROMPT) + count + plain


def test_a_moved_slot_goes_on_as_if_it_had_stayed(runner: DecodingRunner) -> None:
    sampled = SamplingValues(1.0, 0, 0.9, 0.0, 1.2, 0.3, 0.2, seed=5)
    runner.start(0, PROMPT[:9], 0, sampled).wait()
    expected = rounds(runner, 8)[0]
    runner.stop(0)
    for slot, prompt in enumerate((PROMPT, PROMPT[3:20], PROMPT[:9])):
        runner.start(slot, prompt, 0, sampled if slot == 2 else GREEDY).wait()
    found = rounds(runner, 4, batch=3)[2]
    runner.stop(0)
    runner.move(2, 0)
    found += rounds(runner, 4, batch=2)[0]
    assert found == expected
    assert rounds(runner, 1, batch=3)[2] == []


def test_an_idle_slot_among_others_keeps_its_rows_and_emits_nothing(runner: DecodingRunner) -> None:
    runner.start(0, PROMPT[:20], 0, GREEDY).wait()
    rounds(runner, 3)
    kept, committed = runner.base.lengths[0], runner.draft.rows(0)
    runner.stop(0)
    before = [cache[0, :, :kept].copy() for cache in runner.base.states.tensors.values()]
    drafted = [cache[0, :, :committed].copy() for cache in runner.draft.states.tensors.values()]
    runner.start(1, PROMPT, 0, GREEDY).wait()
    idle, busy = rounds(runner, 3, batch=2)
    idle_plain, _ = rounds(runner, 7, None, batch=2)
    assert idle == idle_plain == []
    assert len(busy) >= 3
    for cache, expected in zip(runner.base.states.tensors.values(), before, strict=True):
        np.testing.assert_array_equal(cache[0, :, :kept], expected)
    for cache, expected in zip(runner.draft.states.tensors.values(), drafted, strict=True):
        np.testing.assert_array_equal(cache[0, :, :committed], expected)


def test_rounds_that_are_read_late_leave_bounds_that_become_exact(runner: DecodingRunner) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    expected = rounds(runner, 4)[0]
    runner.stop(0)
    runner.start(0, PROMPT, 0, GREEDY).wait()
    launched = [runner.round(1, PLANS[1]) for _ in range(2)]
    assert runner.base.lengths[0] == len(PROMPT) + 2 * PLANS[1].longest
    launched.append(runner.decode(1))
    launched.append(runner.round(1, PLANS[1]))
    found = [token for step in launched for token in step.wait()[0]]
    assert runner.base.lengths[0] == len(PROMPT) + len(found)
    assert found[: len(expected)] == expected[: len(found)]


def test_a_round_without_room_is_refused_and_a_shorter_one_runs(runner: DecodingRunner) -> None:
    prompt = [1] * (runner.limits.kv_capacity - 3)
    runner.start(0, prompt, 0, GREEDY).wait()
    with pytest.raises(EngineError, match="may emit 5 tokens, but a sequence of 93 has room for 3 of 96"):
        runner.round(1, PLANS[0])
    plan = fitting(PLANS[0], 3)
    assert 1 <= len(runner.round(1, plan).wait()[0]) <= 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (tree(5, 2, 10), "draft_top_k is 5"),
        (chain(5), "draft_steps is 5"),
        (tree(4, 3, 17), "verify_tree_size is 17 for a tree: the engines were built for at most 16"),
    ],
)
def test_plans_beyond_the_engines_are_refused(runner: DecodingRunner, plan: object, message: str) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    with pytest.raises(EngineError, match=message):
        runner.round(1, plan)


def test_bad_prompts_are_refused_and_the_runner_goes_on(runner: DecodingRunner) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    expected = rounds(runner, 3)
    runner.stop(0)
    for prompt in ([], [1] * 96, [320], [-1]):
        with pytest.raises(EngineError):
            runner.start(0, prompt, 0, GREEDY)
    runner.start(0, PROMPT, 0, GREEDY).wait()
    assert rounds(runner, 3) == expected


def test_a_directory_without_a_draft_is_refused(tiny_engines: object) -> None:
    directory = EngineDirectory.open(tiny_engines)
    with pytest.raises(EngineDirectoryError, match="--draft"):
        DecodingRunner.open(NumpyBackend(directory.config), directory)


def test_acceptance_can_be_simulated_between_verification_and_acceptance(runner: DecodingRunner) -> None:
    """The benchmark's seam: logits overwritten along the chain, the kernels of acceptance run as ever."""
    wanted = 3

    def accept_levels(verified: VerifiedTree) -> None:
        logits, tokens = verified.logits.logits, verified.nodes.tokens
        for node in range(wanted):
            logits[0, node, tokens[0, node + 1]] = 1e6
        logits[0, wanted, (tokens[0, wanted + 1] + 1) % logits.shape[2]] = 1e6

    runner.verification.before_acceptance = accept_levels
    runner.start(0, PROMPT, 0, GREEDY).wait()
    assert [len(runner.round(1, chain(4)).wait()[0]) for _ in range(4)] == [wanted + 1] * 4


def test_the_stages_of_a_round_run_one_by_one(runner: DecodingRunner) -> None:
    runner.start(0, PROMPT, 0, GREEDY).wait()
    expected = rounds(runner, 1)[0]
    runner.start(0, PROMPT, 0, GREEDY).wait()
    stages = runner.prepare_round(1, PLANS[1]).stages
    assert list(stages) == [DRAFT_ACCEPT, DRAFT_PROPOSAL, BASE_VERIFY, ACCEPTANCE]
    for stage in stages.values():
        stage()
    emitted = runner.prepare_round(1, PLANS[1]).emitted[0]
    assert emitted[1 : 1 + emitted[0]].tolist() == expected
    assert set(runner.stage_seconds) == set(stages)
    assert all(seconds > 0 for seconds in runner.stage_seconds.values())


class CapturingBackend:
    """A backend as far as captures go; `refuses` says of which names a capture fails."""

    computes_at_once = False

    def __init__(self, refuses: Callable[[str], bool]) -> None:
        self._refuses = refuses
        self.captured: list[str] = []

    def capture(self, step: Callable[[], None], name: str) -> Callable[[], None]:
        if self._refuses(name):
            return step
        self.captured.append(name)
        return partial(step)


@pytest.mark.parametrize(
    ("refuses", "captured"),
    [
        (lambda name: False, ["the step key"]),
        (lambda name: name == "the step key", ["a of the step key", "b of the step key"]),
        (lambda name: "b of" not in name, ["b of the step key"]),
        (lambda name: True, []),
    ],
)
def test_stages_are_captured_together_or_one_by_one_or_not(refuses: Callable[[str], bool], captured: list[str]) -> None:
    backend, done = CapturingBackend(refuses), []
    steps = CapturedSteps(backend)
    stages = {"a": lambda: done.append("a"), "b": lambda: done.append("b")}
    for run in range(4):
        steps.run("key", stages)
        assert done == ["a", "b"] * (run + 1)
        assert backend.captured == ([] if run == 0 else captured)
