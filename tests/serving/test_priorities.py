"""Requests that outrank others: who goes first, who gives way, and that answers stay what they are undisturbed."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgellm import LLM, Request, RequestError, Response, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.building.inputs import read_decoder_config
from edgellm.engines.errors import ConstraintError
from edgellm.engines.model.config import EngineLimits
from edgellm.errors import AdapterError, QueueFullError
from edgellm.generation import RequestState
from edgellm.serving.metrics import Metrics
from edgellm.serving.server import Call, RequestQueue, RequestServer
from edgellm.structure.description import Structure

SLOTS = 3
TREE = DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False)
DRAFTINGS = {"plain": None, "tree": TREE, "chain": DraftingConfig(kind="chain", draft_steps=3), "suffix": "suffix"}
#: Bytes: nothing is kept, one sequence or two are, all are.
BUDGETS = {"none": 0, "tiny": 60_000, "all": 1 << 24}
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engines(
    tiny_checkpoint: Path, tiny_draft: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three slots, a draft, three adapters of which the engines hold two, context 96."""
    folder = tmp_path_factory.mktemp("priorities")
    config = read_decoder_config(tiny_checkpoint)
    adapters = {name: make_adapter(folder / name, config, seed) for seed, name in enumerate(("one", "two", "three"))}
    limits = EngineLimits(
        SLOTS, 16, 96, draft_top_k=4, draft_steps=3, verify_tree_size=12, max_lora_rank=4, lora_slots=2
    )
    build_engine_directory(tiny_checkpoint, folder / "engines", limits, [], draft=tiny_draft, adapters=adapters)
    return folder / "engines"


@pytest.fixture(scope="module", params=list(DRAFTINGS))
def runtime(request: pytest.FixtureRequest, engines: Path) -> Iterator[SpecDecodeRuntime]:
    drafting = DRAFTINGS[request.param]
    if drafting == "suffix":
        drafting = DraftingConfig(kind="suffix")
    with SpecDecodeRuntime(engines, drafting=drafting, backend="numpy") as opened:
        yield opened


@pytest.fixture
def plain(engines: Path) -> Iterator[SpecDecodeRuntime]:
    with SpecDecodeRuntime(engines, backend="numpy") as opened:
        yield opened


@pytest.fixture
def schedules(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that serves random schedules."""
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import preemption_schedules

    return preemption_schedules


def pool_of(count: int, seed: int = 0) -> list[Request]:
    """Requests of many kinds."""
    chosen, found = random.Random(seed), []
    for number in range(count):
        structure = chosen.choice((None, None, Structure(regex="[a-z]{4,30}( [0-9]{2,9}){0,3}")))
        params = SamplingParams(
            temperature=chosen.choice((0.0, 0.8, 1.3)),
            top_k=chosen.choice((0, 20)),
            repetition_penalty=chosen.choice((1.0, 1.2)),
            presence_penalty=chosen.choice((0.0, 0.4)),
            seed=number,
            max_tokens=chosen.choice((1, 4, 12, 30)),
            stop=chosen.choice(((), ("e",), ("ab", "zz"))) if structure is None else (),
            ignore_eos=structure is None and chosen.random() < 0.7,
            logprobs=chosen.choice((None, None, 3)),
            logit_bias=chosen.choice(({}, {}, {101: 1.5})),
            structure=structure,
        )
        prompt = [chosen.randrange(250) for _ in range(chosen.choice((1, 3, 9, 17, 40)))]
        found.append(Request(prompt, None, params, chosen.choice((None, None, "one", "two", "three"))))
    return found


def check(schedules: Any, runtime: SpecDecodeRuntime, expected: Sequence[Any], pool: list[Request], seeds: range) -> int:
    """Serve schedules, of which every answer must be right; how many gave way."""
    gave_way = 0
    for seed in seeds:
        runtime._keeper.budget = list(BUDGETS.values())[seed % 3]
        served = schedules.serve(runtime, pool, schedules.random_schedule(seed, len(pool), SLOTS), seed % 2 == 0)
        for outcome in served.outcomes:
            assert schedules.is_right(outcome, expected[outcome.arrival.number]), (seed, outcome)
            assert outcome.kept == 0 or seed % 3, "rows were kept without a budget"
            assert outcome.recomputed == 0 or seed % 3 != 2, "rows were not kept though there was room"
            gave_way += bool(outcome.kept or outcome.recomputed)
        assert served.most_bytes <= runtime._keeper.budget
    return gave_way


@pytest.mark.parametrize("ahead", [0, 1])
def test_answers_that_gave_way_are_what_they_are_undisturbed(
    schedules: Any, runtime: SpecDecodeRuntime, plain: SpecDecodeRuntime, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of draft; kept, computed again, and both; with the next step under way, as on a GPU, too."""
    pool = pool_of(30)
    expected = list(schedules.alone(plain, pool))
    monkeypatch.setattr(runtime._open_runner().backend, "steps_ahead", ahead)
    assert check(schedules, runtime, expected, pool, range(9 * ahead, 9 * ahead + 9)) >= 5


@pytest.mark.slow
def test_200_schedules(schedules: Any, runtime: SpecDecodeRuntime, plain: SpecDecodeRuntime) -> None:
    pool = pool_of(100, 1)
    expected = list(schedules.alone(plain, pool))
    assert check(schedules, runtime, expected, pool, range(100, 300)) > 500


def test_the_shipped_model_with_images_and_adapters(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(repository))
    from tools.bench import preemption_equality as equality

    directory = equality.build(equality.SHIPPED_MODEL, tmp_path / "engines", "numpy")
    ways = [("plain", "none"), ("chain", "all")]
    found = equality.compare(directory, "numpy", range(4, 6), ways, 8, equality.SHIPPED_MODEL)
    assert equality.is_fine(found, "numpy") and not any(each.differences for each in found)
    assert found[0].counts["recomputed"].answers and found[1].counts["kept"].answers
    assert "differ" in found[0].line()
    found[1].counts["kept"].differ = 1
    assert not equality.is_fine(found, "tensorrt")


@dataclass
class Driver:
    """Requests to a server without a thread: `started` and `steps` say what its runner did."""

    runtime: SpecDecodeRuntime
    limit: int = 16
    states: list[RequestState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue, self.metrics = RequestQueue(self.limit), Metrics()
        self.server = RequestServer(self.runtime, self.queue, self.metrics)

    def ask(self, params: SamplingParams = LONG, priority: int = 0, **more: Any) -> RequestState:
        """Queue a request."""
        prompt = [(7 * len(self.states) + 3 * place) % 250 for place in range(20)]
        request = Request(prompt, None, params, more.pop("adapter", None), priority=priority)
        state = RequestState(self.runtime.prepare(request), discard=self.queue.remove, **more)
        self.queue.put(state)
        self.states.append(state)
        return state

    def rounds(self, count: int = 1) -> None:
        for _ in range(count):
            self.server.round()

    def end(self) -> list[Response | Exception]:
        """Go on until all have ended; nothing is left behind."""
        while self.server.running or self.server.preempted or len(self.queue):
            self.server.round()
        assert self.runtime.kept_bytes == 0
        assert all(state.sequence.kept is None and state.sequence.images is None for state in self.states)
        return [state.outcome() for state in self.states]


@pytest.fixture
def driver(plain: SpecDecodeRuntime) -> Driver:
    return Driver(plain)


def preemptions(state: RequestState) -> int:
    return state.sequence.clock.preemptions


def test_the_higher_goes_first_and_equals_in_their_order(driver: Driver) -> None:
    priorities = [0, 2, -3, 2, 0, 1, 0]
    states = [driver.ask(SHORT, priority) for priority in priorities]
    expected = [1, 3, 5, 0, 4, 6, 2]
    assert [driver.states.index(entry) for entry in driver.queue.entries] == expected
    driver.end()
    started = [state.sequence.clock.started for state in states]
    assert sorted(range(7), key=lambda number: started[number]) == expected
    assert not any(map(preemptions, states))  # slots were free, or those that ran were as urgent


def test_the_lowest_and_of_these_the_latest_begun_gives_way(driver: Driver) -> None:
    states = [driver.ask(priority=priority) for priority in (1, 0, 0)]
    driver.rounds(3)
    driver.ask(SHORT, 5)
    driver.rounds()
    assert [preemptions(state) for state in states] == [0, 0, 1] and driver.server.preempted == 1
    driver.ask(SHORT, 5)
    driver.rounds()
    assert [preemptions(state) for state in states] == [0, 1, 1]
    found = driver.end()
    assert [response.timings.preemptions for response in found] == [0, 1, 1, 0, 0]
    assert all(len(response.token_ids) in (40, 4) for response in found)
    ended = [state.sequence.clock.last_token for state in states]
    assert found[1].timings.preempted_seconds > 0 == found[0].timings.preempted_seconds
    assert ended[0] <= ended[1] <= ended[2]
    snapshot = driver.metrics.snapshot()
    assert snapshot["preemptions"]["kept"] == 2 and snapshot["preemptions"]["kept_rows"] > 40
    assert snapshot["preempted_seconds"]["count"] == 2


def test_equals_never_give_way(driver: Driver) -> None:
    """Two that come again and again do not take each other's slot."""
    running = [driver.ask(priority=3) for _ in range(SLOTS)]
    driver.rounds(2)
    later = [driver.ask(priority=3) for _ in range(4)]
    driver.rounds(20)
    assert not any(map(preemptions, running)) and not any(state.sequence.clock.started for state in later)
    driver.end()
    assert not any(map(preemptions, driver.states))


def test_one_that_gave_way_goes_first_among_its_equals_and_may_outrank_others(driver: Driver) -> None:
    states = [driver.ask(priority=1) for _ in range(SLOTS)]
    driver.rounds(2)
    equal = driver.ask(SHORT, 1)
    urgent = [driver.ask(SHORT, 9) for _ in range(SLOTS)]
    driver.rounds()
    assert [preemptions(state) for state in states] == [1, 1, 1]
    driver.rounds(4)
    assert all(state.ended for state in urgent) and driver.server.running == SLOTS
    assert not equal.sequence.clock.started
    low = driver.ask(priority=0)
    driver.end()
    assert low.sequence.clock.started > equal.sequence.clock.started


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_emergency_waits_for_one_round_at_most(
    driver: Driver, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while a round is computed, all slots taken and others waiting: its prefill is the next launch but those
    of that round."""
    runner = driver.runtime._open_runner()
    monkeypatch.setattr(runner.backend, "steps_ahead", ahead)
    launches: list[str] = []
    step, start = runner.step, runner.start
    coming = iter([0] * 6 + [1])

    def stepped(*arguments: Any, **more: Any) -> Any:
        if next(coming, 0):
            launches.clear()
            driver.ask(SHORT, 7)
        launches.append("step")
        return step(*arguments, **more)

    def started(*arguments: Any, **more: Any) -> Any:
        launches.append("prefill")
        return start(*arguments, **more)

    monkeypatch.setattr(runner, "step", stepped)
    monkeypatch.setattr(runner, "start", started)
    for _ in range(2 * SLOTS):
        driver.ask()
    driver.end()
    assert launches.index("prefill") <= 1
    assert preemptions(driver.states[2]) == 1 and len(driver.states) == 2 * SLOTS + 1
    assert all(len(response.token_ids) == 40 for response in driver.end()[:-1])


@pytest.mark.parametrize("budget", [0, 1 << 24])
def test_one_that_waits_is_ended_at_once_with_what_it_has(driver: Driver, budget: int) -> None:
    driver.runtime._keeper.budget = budget
    cancelled, late, stopped, other = driver.ask(), driver.ask(), driver.ask(stop_when=lambda text: len(text) > 2), None
    driver.rounds(5)
    urgent = [driver.ask(replace(LONG, max_tokens=30), 4) for _ in range(SLOTS)]
    driver.rounds()
    assert driver.server.preempted == SLOTS and (driver.runtime.kept_bytes > 0) == (budget > 0)
    had = [state.sequence.answer.token_ids for state in (cancelled, late)]
    assert all(len(each) > 3 for each in had)
    cancelled.cancel()
    late.deadline = 0.0
    stopped.look_ahead()
    driver.rounds()
    assert all(state.ended for state in (cancelled, late, stopped)) and driver.runtime.kept_bytes == 0
    assert not any(state.ended for state in urgent)
    reasons = [state.response.finish_reason for state in (cancelled, late, stopped)]
    assert reasons == ["cancelled", "deadline", "stop"] and other is None
    assert [state.response.token_ids for state in (cancelled, late)] == had
    assert cancelled.response.timings.preemptions == 1 and cancelled.response.timings.preempted_seconds > 0
    driver.end()


def test_an_adapter_that_is_gone_meanwhile_is_the_failure_of_that_request_alone(driver: Driver) -> None:
    """It is loaded again where others took its place; removed or replaced, it is an error."""
    expected = Driver(driver.runtime).ask(adapter="one")
    adapted = [driver.ask(adapter="one"), driver.ask(), driver.ask(adapter="one")]
    driver.rounds(3)
    urgent = [driver.ask(SHORT, 5, adapter=name) for name in ("two", "three", "two")]
    driver.rounds()
    assert driver.server.preempted == SLOTS
    driver.rounds(4)
    assert all(state.ended for state in urgent) and driver.server.running == SLOTS
    again = [driver.ask(priority=8), driver.ask(priority=8), driver.ask(priority=8)]
    driver.rounds()
    slots = driver.runtime._open_runner().base.adapters
    removed = slots._adapters["one"]
    slots.remove("one")
    found = driver.end()
    assert [type(found[0]), type(found[2])] == [AdapterError, AdapterError] and "no adapter 'one'" in str(found[0])
    assert all(len(response.token_ids) == 40 for response in (found[1], *found[6:])) and len(again) == 3
    slots.add("one", removed)
    fresh = Driver(driver.runtime)
    fresh.states.append(expected)
    fresh.queue.put(expected)
    fresh.end()
    assert len(expected.response.token_ids) == 40
    waiting = Driver(driver.runtime)
    waiting.ask(adapter="one")
    waiting.rounds(2)
    for _ in range(SLOTS):
        waiting.ask(SHORT, 1)
    waiting.rounds()
    waiting.states[0].sequence.adapter_digest = "another one's"
    assert "was replaced by another one" in str(waiting.end()[0])


def test_a_place_for_an_adapter_is_made_too(driver: Driver) -> None:
    """A slot is free, but the engines hold two adapters, which others use."""
    first, second = driver.ask(adapter="one"), driver.ask(adapter="two", priority=3)
    driver.rounds(2)
    equal = driver.ask(SHORT, adapter="three")
    driver.rounds(2)
    assert not equal.sequence.clock.started and driver.server.running == 2
    urgent = driver.ask(SHORT, 2, adapter="three")
    driver.rounds()
    assert urgent.sequence.clock.started and [preemptions(first), preemptions(second)] == [1, 0]
    driver.end()


class _NoWayOn:
    """Rules whose grammar fails."""

    def structured_from(self, token_ids: Sequence[int]) -> None:
        return None

    @property
    def constraint(self) -> Any:
        def fail(*_: Any) -> None:
            raise ConstraintError("out of order")

        return SimpleNamespace(is_free=lambda: False, fill_mask=fail, try_advance=fail, forced=lambda most: [])


@pytest.mark.parametrize("budget", [0, 1 << 24])
def test_a_grammar_that_fails_when_it_goes_on_is_the_failure_of_that_request_alone(
    driver: Driver, budget: int
) -> None:
    driver.runtime._keeper.budget = budget
    states = [driver.ask() for _ in range(SLOTS)]
    driver.rounds(3)
    driver.ask(SHORT, 1)
    driver.rounds()
    assert preemptions(states[2]) == 1
    states[2].sequence.rules = _NoWayOn()
    found = driver.end()
    assert isinstance(found[2], ConstraintError)
    assert [len(response.token_ids) for response in (*found[:2], found[3])] == [40, 40, 4]


def test_what_fails_while_rows_are_put_back_is_the_failure_of_that_request_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, put_back = driver.runtime._keeper, driver.runtime._keeper.put_back
    states = [driver.ask(), driver.ask(adapter="one"), driver.ask(adapter="two")]
    driver.rounds(3)
    for _ in range(2):
        driver.ask(SHORT, 1)
    driver.rounds()
    calls = []

    def fail_once(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("out of order")
        put_back(*arguments)

    monkeypatch.setattr(keeper, "put_back", fail_once)
    found = driver.end()
    assert [isinstance(each, RuntimeError) for each in found] == [False, True, False, False, False]
    assert len(found[2].token_ids) == 40 and len(calls) == 2 and states[1].sequence.kept is None
    assert not driver.runtime._open_runner().base.adapts(slice(0, SLOTS))


def test_memory_that_is_not_there_is_no_failure(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgellm.errors import DeviceMemoryError

    def refuse(nbytes: int) -> np.ndarray:
        raise DeviceMemoryError("no memory")

    monkeypatch.setattr(driver.runtime._open_runner().backend, "host_memory", refuse)
    states = [driver.ask() for _ in range(SLOTS)]
    driver.rounds(3)
    driver.ask(SHORT, 1)
    assert all(len(response.token_ids) in (40, 4) for response in driver.end()) and preemptions(states[2]) == 1
    assert driver.metrics.snapshot()["preemptions"]["recomputed"] == 1


def test_the_engine_fails_while_others_wait(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were being computed fail; one that gave way goes on."""
    states = [driver.ask() for _ in range(SLOTS)]
    driver.rounds(3)
    driver.ask(LONG, 1)
    driver.rounds(2)
    runner = driver.runtime._open_runner()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "step", lambda *_: 1 / 0)
        driver.rounds()
    assert [state.ended for state in driver.states] == [True, True, False, True]
    assert len(driver.end()[2].token_ids) == 40 and preemptions(states[2]) == 1


def test_calls_wait_for_those_that_gave_way(driver: Driver) -> None:
    states = [driver.ask() for _ in range(SLOTS)]
    driver.rounds(2)
    call = Call(lambda: [state.ended for state in states])
    driver.queue.put(call)
    behind = driver.ask(SHORT)
    driver.ask(SHORT, 1)
    driver.rounds()
    assert driver.server.preempted == 1
    driver.end()
    assert call.result.result() == [True] * SLOTS
    assert behind.sequence.clock.started > max(state.sequence.clock.last_token for state in states)


def test_a_full_queue_takes_what_outranks_others(plain: SpecDecodeRuntime) -> None:
    driver = Driver(plain, limit=2)
    for _ in range(2):
        driver.ask(SHORT)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        driver.ask(SHORT)
    driver.ask(SHORT, 1)
    driver.ask(SHORT, 2)
    with pytest.raises(QueueFullError):
        driver.ask(SHORT, 3)  # twice as many is all
    assert len(driver.end()) == 4


@pytest.mark.parametrize("preempted", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_preemptions(driver: Driver, preempted: int) -> None:
    driver.runtime._keeper.budget = 300_000
    states = [driver.ask() for _ in range(SLOTS)]
    count, used = 0, []
    while count < preempted:
        for number, state in enumerate(states):
            if state.ended:
                driver.states.remove(state)
                states[number] = driver.ask()
        driver.ask(replace(SHORT, max_tokens=1), 1)
        driver.rounds(2)
        driver.states[:] = states
        count = sum(driver.metrics._preemptions.values())
        keeper = driver.runtime._keeper
        assert keeper.nbytes + sum(each.nbytes for each in keeper._free) <= keeper.budget
        if count > preempted // 3:
            used.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    driver.end()
    gc.collect()
    assert used[-1] - used[0] < 8 << 10, "KiB"


def test_through_a_served_model(engines: Path) -> None:
    """Streams go on where they were, sessions have priorities, and the metrics tell."""
    with LLM(engines, backend="numpy", drafting=None) as llm:
        expected = [llm.generate([number, 2, 3], replace(LONG, max_tokens=80)) for number in range(SLOTS)]
        llm.call(lambda runtime: setattr(runtime, "_slow", runtime._open_runner().step)).result()
        streams = [llm.stream([number, 2, 3], replace(LONG, max_tokens=80)) for number in range(SLOTS)]
        for stream in streams:
            assert stream.next_chunk() is not None
        urgent = [llm.generate([9, 9, number], SHORT, priority=5) for number in range(3)]
        assert all(len(response.token_ids) == 4 and not response.timings.preemptions for response in urgent)
        found = [stream.result() for stream in streams]
        assert [response.token_ids for response in found] == [response.token_ids for response in expected]
        assert sum(response.timings.preemptions for response in found) > 0
        lines = llm.metrics_text().splitlines()
        count = sum(response.timings.preemptions for response in found)
        assert f'edgellm_preemptions_total{{rows="kept"}} {count}' in lines
        assert "edgellm_requests_preempted 0" in lines and "edgellm_preempted_bytes 0" in lines
        assert any(line.startswith("edgellm_preempted_rows_kept_total ") for line in lines)
        assert any(line.startswith("edgellm_preempted_bytes_kept_total ") for line in lines)
        session = llm.create_session(priority=2)
        assert session.priority == 2
        answer = session.stream("Hello", SHORT)
        assert answer.request_state.priority == 2 and answer.result().token_ids
        plan = llm._runtime._open_runner().base.memory_plan
        assert plan.host == {"rows of answers that give way": 256 << 20} and plan.total == sum(plan.items.values())
        assert "host: rows of answers that give way, at most" in plan.describe()


def test_closing_frees_everything(engines: Path) -> None:
    llm = LLM(engines, backend="numpy", drafting=None)
    keeper = llm._runtime._keeper
    low = [llm.stream([number, 2, 3], replace(LONG, max_tokens=80)) for number in range(SLOTS)]
    for stream in low:
        stream.next_chunk()
    high = [llm.stream([number, 4, 5], replace(LONG, max_tokens=80), priority=1) for number in range(SLOTS)]
    for stream in high:
        stream.next_chunk()
    llm.close()
    assert all(stream.finished for stream in (*low, *high))
    assert keeper.nbytes == 0 and not keeper._free
    assert all(stream.request_state.sequence.kept is None for stream in low)


@pytest.mark.parametrize("value", ["high", 1.5, True, None, 10**7, -(10**7)])
def test_what_is_no_priority(value: Any) -> None:
    with pytest.raises(RequestError, match="priority is .*expected a whole number from -1000000 to 1000000"):
        Request("hi", priority=value)


def test_what_is_no_budget(engines: Path) -> None:
    for value in (-1, 1.5, True, "much"):
        with pytest.raises(RequestError, match="preemption_budget is .*expected a whole number of bytes"):
            SpecDecodeRuntime(engines, backend="numpy", preemption_budget=value)
