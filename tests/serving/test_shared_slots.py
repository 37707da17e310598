"""Clients that share the slots: who gives way to whom, and that nobody does so for nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from priority_driver import LONG, SHORT, SLOTS, Driver

from edgellm import Response, SpecDecodeRuntime
from edgellm.decoding.slot_table import HeldSlots
from edgellm.generation import RequestState


@pytest.fixture
def driver(plain_runtime: SpecDecodeRuntime) -> Driver:
    return Driver(plain_runtime)


def ask(driver: Driver, clients: str, **more: int) -> list[RequestState]:
    """A long request of each of these clients."""
    return [driver.ask(client=client, **more) for client in clients]


def preemptions(states: Sequence[RequestState]) -> list[int]:
    return [state.sequence.clock.preemptions for state in states]


def running(driver: Driver) -> str:
    """The clients of what is computed."""
    return "".join(sorted(each.client for each in driver.server._request_states.values()))


def token_ids(driver: Driver) -> list[tuple[int, ...]]:
    """The answers to all that were asked, at the end."""
    found = driver.end()
    assert all(isinstance(each, Response) for each in found), found
    return [each.token_ids for each in found if isinstance(each, Response)]


def test_another_client_gets_a_slot_at_once_and_the_newest_gives_way(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes the rounds that it takes alone, and all answers are those that they are alone."""
    expected = Driver(driver.runtime)
    alone = []
    for place in range(6):  # one at a time
        expected.ask(SHORT if place == 5 else LONG, client="a")
        alone = token_ids(expected)
    one = Driver(driver.runtime)
    one.states.extend(expected.states[:5])
    one.ask(SHORT)
    rounds = 0
    while not one.states[5].ended:
        one.rounds()
        rounds += 1
    flood = ask(driver, "aaaaa")
    driver.rounds(4)
    assert running(driver) == "aaa" and not any(preemptions(flood)), "one that is alone has all slots"
    other = driver.ask(SHORT, client="b")
    with caplog.at_level(logging.INFO, "edgellm.serving"):
        driver.rounds(rounds)
    assert other.ended and preemptions(flood) == [0, 0, 1, 0, 0] and not any(state.ended for state in flood)
    assert caplog.messages[0] == "request gave way to another client's"
    driver.rounds()
    assert running(driver) == "aaa" and preemptions([other]) == [0] and not flood[3].sequence.clock.started
    assert token_ids(driver) == alone
    assert driver.metrics.snapshot()["preemptions"]["by_equals"] == 1 == sum(preemptions(driver.states))
    assert "\nedgellm_preemptions_by_equals_total 1\n" in driver.metrics.prometheus()


def with_slots(driver: Driver, count: int) -> None:
    """Let a driver have so many slots of its engines."""
    driver.server._loop.slots._held = held = HeldSlots()
    for slot in reversed(range(count, SLOTS)):
        held.hold(slot)


def test_two_who_always_ask_have_as_many_slots_and_give_way_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long their answers are."""
    with_slots(driver, 2)
    ask(driver, "aaa")
    driver.rounds(3)
    loop, computed = driver.server._loop, []
    advance = loop.advance
    monkeypatch.setattr(loop, "advance", lambda: computed.append(running(driver)) or advance())
    for _ in range(120):
        waiting = Counter(each.client for each in driver.queue.entries)
        for client, params in (("a", LONG), ("b", SHORT)):
            for _ in range(2 - waiting[client]):
                driver.ask(params, client=client)
        driver.rounds()
    assert computed == ["ab"] * 120 and sum(preemptions(driver.states)) == 1
    driver.end()


def test_each_has_a_slot_and_of_more_clients_than_slots_nobody_gives_way(driver: Driver) -> None:
    states = ask(driver, "aaa")
    driver.rounds(2)
    states += ask(driver, "bc")
    driver.rounds()
    assert running(driver) == "abc" and preemptions(states) == [0, 1, 1, 0, 0]
    states += ask(driver, "bd")
    driver.rounds(10)
    assert running(driver) == "abc" and sum(preemptions(states)) == 2
    assert driver.server._first() is states[6], "who has none goes before those that gave way"
    token_ids(driver)
    begun = [state.sequence.clock.started for state in states]
    assert begun[6] < begun[5] and sum(preemptions(states)) == 2


def test_one_that_asks_again_and_again_lets_the_others_go_on(driver: Driver) -> None:
    """Each of its requests begins in the next round, and what gives way gets tokens between them."""
    flood, had = ask(driver, "aaa"), 0
    driver.rounds(2)
    while not flood[2].ended:
        other = driver.ask(SHORT, client="b")
        driver.rounds()
        assert other.sequence.clock.started
        driver.rounds(5)
        assert other.ended
        had, before = flood[2].sequence.answer.token_count, had
        assert had > before
    assert flood[0].ended and flood[1].ended and preemptions(flood)[2] > 5
    assert [len(each) for each in token_ids(driver)[:3]] == [40] * 3


def test_with_one_slot_clients_take_turns_by_requests(driver: Driver) -> None:
    with_slots(driver, 1)
    flood = ask(driver, "aaa")
    driver.rounds(2)
    other = driver.ask(SHORT, client="b")
    driver.end()
    started = [state.sequence.clock.started for state in (flood[0], other, *flood[1:])]
    assert started == sorted(started) and not any(preemptions(driver.states))


def test_rows_that_are_not_kept_are_computed_again_once(driver: Driver) -> None:
    driver.runtime._keeper.budget = 0
    flood = ask(driver, "aaa")
    for number in range(4):
        driver.rounds(2)
        driver.ask(SHORT, client="b")
        driver.rounds(6)
        assert driver.states[-1].ended == (number < 3)
        assert preemptions(flood) == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]][number]
    driver.ask(SHORT, 1, client="b")
    driver.rounds()
    assert preemptions(flood) == [1, 1, 2], "an urgent one goes first as ever"
    assert driver.metrics.snapshot()["preemptions"]["recomputed"] == 4
    driver.end()


def test_priorities_go_first(driver: Driver) -> None:
    """Nobody gives way to a lower one; of the lowest, the client's with the most under way does."""
    urgent = ask(driver, "aaa", priority=1)
    driver.rounds(2)
    low = driver.ask(SHORT, client="b")
    driver.rounds(3)
    assert not any(preemptions(urgent)) and not low.sequence.clock.started
    driver.end()
    assert not any(preemptions(driver.states))
    states = []
    for client, priority in (("a", 0), ("a", 5), ("b", 0)):
        states.append(driver.ask(client=client, priority=priority))
        driver.rounds()
    driver.ask(SHORT, 3, client="c")
    driver.rounds()
    assert preemptions(states) == [1, 0, 0], "b's has begun later, but is all that it has"
    driver.end()
    assert driver.metrics.snapshot()["preemptions"]["by_equals"] == 0


def test_a_place_for_an_adapter_is_one_of_a_share_too(driver: Driver) -> None:
    """A slot is free, but the engines hold two adapters, which the other client uses."""
    states = [driver.ask(client="a", adapter=name) for name in ("one", "two")]
    driver.rounds(2)
    other = driver.ask(SHORT, client="b", adapter="three")
    driver.rounds()
    assert other.sequence.clock.started and preemptions(states) == [0, 1]
    third = driver.ask(SHORT, client="c", adapter="one")
    driver.rounds()
    assert third.sequence.clock.started and preemptions(states) == [0, 1], "what needs no place takes none"
    assert [len(each) for each in token_ids(driver)] == [40, 40, 4, 4]
    states = [driver.ask(client=client, adapter=name) for client, name in (("a", "one"), ("a", "one"), ("b", "two"))]
    driver.rounds(3)
    driver.ask(SHORT, client="c", adapter="three")
    driver.rounds(3)
    assert not any(preemptions(states)), "one would have to give all that it has"
    driver.end()


def test_of_one_that_is_cancelled_while_it_waits_nothing_is_left(driver: Driver) -> None:
    states = ask(driver, "aaa")
    driver.rounds(3)
    driver.ask(replace(LONG, max_tokens=30), client="b")
    driver.rounds()
    assert preemptions(states) == [0, 0, 1] and driver.runtime.kept_bytes
    states[2].cancel()
    driver.rounds()
    assert states[2].ended and not driver.runtime.kept_bytes and running(driver) == "aab"
    driver.end()
