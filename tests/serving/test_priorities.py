"""Requests that outrank others: who goes first, who gives way, what ends and fails meanwhile."""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from priority_driver import LONG, SHORT, SLOTS, Driver

from edgellm import LLM, Request, RequestError, SpecDecodeRuntime
from edgellm.engines.errors import ConstraintError
from edgellm.errors import AdapterError, DeviceMemoryError, EngineError, QueueFullError
from edgellm.generation import RequestState
from edgellm.serving.request_queue import Call


@pytest.fixture
def driver(plain_runtime: SpecDecodeRuntime) -> Driver:
    return Driver(plain_runtime)


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
def test_an_emergency_waits_for_one_round_at_most(driver: Driver, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while a round is computed, all slots taken and others waiting: its prefill is the next launch but those
    of that round."""
    runner = driver.runtime._open_runner()
    monkeypatch.setattr(runner.backend, "steps_ahead", ahead)
    launches: list[str] = []
    decode, start = runner.decode, runner.start
    coming = iter([0] * 6 + [1])

    def stepped(*arguments: Any, **more: Any) -> Any:
        if next(coming, 0):
            launches.clear()
            driver.ask(SHORT, 7)
        launches.append("step")
        return decode(*arguments, **more)

    def started(*arguments: Any, **more: Any) -> Any:
        launches.append("prefill")
        return start(*arguments, **more)

    monkeypatch.setattr(runner, "decode", stepped)
    monkeypatch.setattr(runner, "start", started)
    for _ in range(2 * SLOTS):
        driver.ask()
    driver.end()
    assert launches.index("prefill") <= 1
    assert preemptions(driver.states[2]) == 1 and len(driver.states) == 2 * SLOTS + 1
    assert all(len(response.token_ids) == 40 for response in driver.end()[:-1])


@pytest.mark.parametrize("budget", [0, 1 << 24])
def test_one_that_waits_is_ended_at_once_with_what_it_has(driver: Driver, budget: int) -> None:
    """Cancelled, late, or ended by its reader; also where another one, which waits on, would go on before it."""
    driver.runtime._keeper.budget = budget
    states = [driver.ask(), driver.ask(), driver.ask(stop_when=lambda text: len(text) > 2)]
    wanted, ended, stopped = states
    driver.rounds(5)
    urgent = [driver.ask(replace(LONG, max_tokens=30), 4) for _ in range(SLOTS)]
    driver.rounds()
    assert driver.server.preempted == SLOTS and (driver.runtime.kept_bytes > 0) == (budget > 0)
    had, kept = ended.sequence.answer.token_ids, driver.runtime.kept_bytes
    assert len(had) > 3
    if budget:
        ended.cancel()
    else:
        ended.deadline = 0.0
    stopped.look_ahead()
    driver.rounds()
    assert [state.ended for state in states] == [False, True, True] and not any(state.ended for state in urgent)
    assert budget == 0 or 0 < driver.runtime.kept_bytes < kept / 2
    assert ended.response.finish_reason == ("cancelled" if budget else "deadline")
    assert stopped.response.finish_reason == "stop" and ended.response.token_ids == had
    assert ended.response.timings.preemptions == 1 and ended.response.timings.preempted_seconds > 0
    assert len(driver.end()[0].token_ids) == 40 and preemptions(wanted) == 1


def test_an_observer_sees_answers_that_go_on(driver: Driver) -> None:
    class Silent:
        def device_span(self, *_: Any, **details: Any) -> Any:
            return nullcontext()

        host_span = device_span

        def finish(self) -> None:
            """Nothing is left."""

    for budget in (0, 1 << 24):
        driver.runtime.observe(Silent())
        driver.runtime._keeper.budget = budget
        observed = Driver(driver.runtime)
        states = [observed.ask() for _ in range(SLOTS)]
        observed.rounds(3)
        observed.ask(SHORT, 1)
        assert all(len(response.token_ids) in (4, 40) for response in observed.end()) and preemptions(states[2]) == 1


def test_an_adapter_that_is_gone_meanwhile_is_the_failure_of_that_request_alone(driver: Driver) -> None:
    """It is loaded again where others took its place; removed or replaced, it is an error."""
    expected = Driver(driver.runtime).ask(adapter="one")
    for name in ("one", None, "one"):
        driver.ask(adapter=name)
    driver.rounds(3)
    urgent = [driver.ask(SHORT, 5, adapter=name) for name in ("two", "three", "two")]
    driver.rounds()
    assert driver.server.preempted == SLOTS
    driver.rounds(4)
    assert all(state.ended for state in urgent) and driver.server.running == SLOTS
    again = [driver.ask(priority=8), driver.ask(priority=8), driver.ask(priority=8)]
    driver.rounds()
    slots = driver.runtime._open_runner().base.adapters
    removed = slots._adapters.pop("one")
    found = driver.end()
    assert [type(found[0]), type(found[2])] == [AdapterError, AdapterError] and "no adapter 'one'" in str(found[0])
    assert all(len(response.token_ids) == 40 for response in (found[1], *found[6:])) and len(again) == 3
    slots._adapters["one"] = removed
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
def test_a_grammar_that_fails_when_it_goes_on_is_the_failure_of_that_request_alone(driver: Driver, budget: int) -> None:
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
    assert [isinstance(each, EngineError) for each in found] == [False, True, False, False, False]
    assert "RuntimeError: out of order" in str(found[1])
    assert len(found[2].token_ids) == 40 and len(calls) == 2 and states[1].sequence.kept is None
    assert not driver.runtime._open_runner().base.adapts(slice(0, SLOTS))


def test_memory_that_is_not_there_is_no_failure(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
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
        patch.setattr(runner, "decode", lambda *_: 1 / 0)
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


def test_a_full_queue_takes_what_outranks_others(plain_runtime: SpecDecodeRuntime) -> None:
    driver = Driver(plain_runtime, limit=2)
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


def test_through_a_served_model(priority_engines: Path) -> None:
    """Streams go on where they were, sessions have priorities, and the metrics tell."""
    with LLM(priority_engines, backend="numpy", drafting=None) as llm:
        expected = [llm.generate([number, 2, 3], replace(LONG, max_tokens=80)) for number in range(SLOTS)]
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


def test_closing_frees_everything(priority_engines: Path) -> None:
    llm = LLM(priority_engines, backend="numpy", drafting=None)
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
    with pytest.raises(RequestError, match=r"priority is .*expected a whole number from -1000000 to 1000000"):
        Request("hi", priority=value)


def test_what_is_no_budget(priority_engines: Path) -> None:
    for value in (-1, 1.5, True, "much"):
        with pytest.raises(RequestError, match=r"preemption_budget is .*expected a whole number of bytes"):
            SpecDecodeRuntime(priority_engines, backend="numpy", preemption_budget=value)
