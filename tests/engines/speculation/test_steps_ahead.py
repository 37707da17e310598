"""Plain steps beside drafts of what was said before run ahead as they do without: who launches, waits and asks when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from drafted_conversations import ask_freely
from runner_steps import watch_steps

from edgellm import LLM, DraftingConfig, SamplingParams
from edgellm.drafting import learner, own_plans
from edgellm.drafting.seconds import PLAIN
from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.requests import Request

SUFFIX = DraftingConfig(kind="suffix")
LONG = SamplingParams(ignore_eos=True, max_tokens=30)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, seed=12, max_tokens=30, ignore_eos=True)
REPEATED = "The quick brown fox. The quick brown fox. The"
PROMPTS = [REPEATED, "x", "once upon a time", "again again again again", "zq"]


class Watch:
    """What a runner was asked for, in order: ("launch", plan's name) and ("wait", which launch); `ahead` are the
    launches whose tokens nobody has waited for, the prefill (-1) first. `asked` are how many of them there were each
    time that the index was asked, and whether the latest tokens waited for were a round's."""

    def __init__(self, llm: LLM) -> None:
        self.events: list[tuple[str, Any]] = []
        self.ahead: list[int] = []
        self.asked: list[tuple[int, bool]] = []
        self._llm, self._launched, self._was_round = llm, 0, False
        llm.call(self._attach).result()

    def _attach(self, runtime: Any) -> None:
        runner, index = runtime._runner, runtime._drafters.index
        start = runner.start

        def started(*arguments: Any) -> Any:
            found = start(*arguments)
            self.ahead.append(-1)
            return SimpleNamespace(wait=lambda: (self.ahead.remove(-1), found.wait())[1])

        def watched(take: Callable[[], Any], batch: int, plan: Any) -> Any:
            number, self._launched = self._launched, self._launched + 1
            self.events.append(("launch", PLAIN if plan is None else plan.name))
            self.ahead.append(number)
            found = take()
            wait = found.wait

            def waited() -> Any:
                if number in self.ahead:
                    assert number == self.ahead[0], "tokens are waited for in the order of their launches"
                    self.ahead.remove(number)
                    self.events.append(("wait", number))
                    self._was_round = plan is not None
                return wait()

            found.wait = waited
            return found

        watch_steps(runner, watched)
        runner.start = started
        if index is not None:
            propose = index.propose
            index.propose = lambda *each: (self.asked.append((len(self.ahead), self._was_round)), propose(*each))[1]

    def clear(self) -> None:
        """Begin anew."""
        self._llm.call(lambda runtime: (self.events.clear(), self.ahead.clear(), self.asked.clear())).result()

    def most_ahead(self) -> list[int]:
        """Before each wait, how many launches nobody has waited for."""
        ahead, found = 0, []
        for kind, _ in self.events:
            if kind == "wait":
                found.append(ahead)
            ahead += 1 if kind == "launch" else -1
        return found


@pytest.fixture(scope="module")
def directory(make_engines: Callable[..., EngineDirectory]) -> EngineDirectory:
    return make_engines(2)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are read one later, and what is asked for and taken does not depend on this machine's speed."""
    monkeypatch.setattr(NumpyBackend, "steps_ahead", 1)
    ask_freely(monkeypatch)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)


@pytest.fixture
def llms(directory: EngineDirectory, free: None) -> Iterator[tuple[LLM, LLM]]:
    settings = None, SUFFIX
    with ExitStack() as opened:
        plain, drafted = (
            opened.enter_context(LLM(directory.path, backend="numpy", drafting=each)) for each in settings
        )
        yield plain, drafted


def test_plain_steps_are_launched_and_waited_for_as_without_a_drafter(
    llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no round is worth it; the index is asked all the same, while two steps are under way."""
    monkeypatch.setattr(learner, "GAIN", 1e9)
    plain, drafted = llms
    watches = Watch(plain), Watch(drafted)
    for prompt in PROMPTS:
        for watch in watches:
            watch.clear()
        expected, found = plain.generate(prompt, LONG), drafted.generate(prompt, LONG)
        assert found.token_ids == expected.token_ids
        assert watches[1].events == watches[0].events
        assert watches[1].most_ahead()[:-1] == [2] * (len(watches[1].most_ahead()) - 1)
    assert watches[1].asked and all(ahead >= 1 for ahead, _ in watches[1].asked)


@pytest.mark.parametrize("goes_on", [False, True])
def test_rounds_begin_behind_what_is_under_way(
    llms: tuple[LLM, LLM], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round is launched when all tokens are known; behind it stands a plain step, or nothing where another round is
    expected. The index is asked while the device computes, or right behind a round."""
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(learner.Learner, "waits_for", lambda *_: goes_on)
    plain, drafted = llms
    watch, behind = Watch(drafted), []
    for _ in range(2):  # the second time the first answer was said before
        for prompt in PROMPTS:
            for params in (LONG, SAMPLED):
                expected = plain.generate(prompt, params).token_ids
                assert 0 not in expected  # behind that id a row without a number is feared, and nothing launched
                watch.clear()
                assert drafted.generate(prompt, params).token_ids == expected
                ahead = 0
                for place, (kind, name) in enumerate(watch.events):
                    if kind == "launch" and name != PLAIN:
                        assert ahead == 0, "a round's candidates follow tokens that are known"
                        behind += [each for each, _ in watch.events[place + 1 : place + 2]]
                    ahead += 1 if kind == "launch" else -1
                assert all(ahead > 0 or was_round for ahead, was_round in watch.asked)
    assert len(behind) > 10
    waited = behind.count("wait") / len(behind)
    assert waited == 1.0 if goes_on else waited < 0.5  # the last round of an answer has nothing behind it


@pytest.mark.parametrize("goes_on", [False, True])
def test_batches_that_shrink_and_grow_while_steps_are_under_way(
    llms: tuple[LLM, LLM], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some repeat and some do not, some are cancelled, others come in their place."""
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(learner.Learner, "waits_for", lambda *_: goes_on)
    plain, drafted = llms
    expected = {
        (prompt, params): plain.generate(prompt, params).token_ids for prompt in PROMPTS for params in (LONG, SAMPLED)
    }
    rounds = 0
    for number in range(6):
        params = SAMPLED if number % 2 else LONG
        streams = [drafted.stream(prompt, params) for prompt in PROMPTS]
        for stream in streams[: number % 4 + 1]:
            stream.next_chunk()
        streams[number % len(streams)].cancel()
        for place, (prompt, stream) in enumerate(zip(PROMPTS, streams, strict=True)):
            found = stream.result()
            whole = expected[prompt, params]
            assert found.token_ids == whole[: len(found.token_ids)]
            assert place == number % len(streams) or found.token_ids == whole
            rounds += found.drafting.rounds
    assert rounds > 10
    found = drafted.handle([Request(prompt, None, LONG) for prompt in PROMPTS])
    assert [each.token_ids for each in found] == [expected[prompt, LONG] for prompt in PROMPTS]
