"""The queue by itself: clients take turns, and none of them fills it for the others."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from edgellm.decoding.sequence import Clock
from edgellm.errors import QueueFullError
from edgellm.generation import RequestState
from edgellm.serving.request_queue import Call, RequestQueue


def request(client: str, priority: int = 0) -> RequestState:
    return RequestState(SimpleNamespace(clock=Clock(), priority=priority), client=client)  # type: ignore[arg-type]


def put(queue: RequestQueue, clients: str) -> list[RequestState]:
    entries = [request(client) for client in clients]
    for each in entries:
        queue.put(each)
    return entries


def begin(queue: RequestQueue) -> RequestState:
    """Whose turn it is, under way now."""
    entry = queue.first()
    assert isinstance(entry, RequestState) and queue.remove(entry)
    queue.begin(entry)
    return entry


def order(queue: RequestQueue) -> list[RequestState]:
    """Who has a turn when, one at a time, to the end."""
    found = []
    while len(queue):
        found.append(begin(queue))
        queue.end(found[-1])
    return found


def test_turns_by_what_is_under_way_and_then_round_robin() -> None:
    queue = RequestQueue(99)
    put(queue, "aaaabbc")
    assert "".join(each.client for each in order(queue)) == "abcabaa"
    put(queue, "aaabb")
    taken = [begin(queue) for _ in range(4)]
    assert "".join(each.client for each in taken) == "baba"  # b began the longest ago
    queue.end(taken[1])
    assert begin(queue).client == "a"
    put(queue, "bc")
    assert [begin(queue).client for _ in range(2)] == ["c", "b"]


def test_the_higher_goes_first_whoever_asks_and_a_call_lets_nobody_overtake() -> None:
    queue = RequestQueue(99)
    for client, priority in (("a", 0), ("a", 1), ("b", 0), ("a", 1), ("b", 1)):
        queue.put(request(client, priority))
    assert [(each.client, each.priority) for each in order(queue)] == [("a", 1), ("b", 1), ("a", 1), ("b", 0), ("a", 0)]
    put(queue, "aa")
    call = Call(lambda: None)
    queue.put(call)
    put(queue, "b")
    assert [begin(queue).client for _ in range(2)] == ["a", "a"]
    assert queue.first() is call and queue.remove(call)
    assert begin(queue).client == "b"


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_is_passed_by_each_other_client_a_bounded_number_of_times(slots: int, seed: int) -> None:
    """By brute force: clients with much and little to ask, answers long and short. While one of a client waits, another
    begins at most once with one slot; and never one of a client with more under way."""
    chance, queue = random.Random(seed), RequestQueue(99)
    under_way: dict[RequestState, int] = {}
    passed: dict[RequestState, Counter[str]] = {}
    waiting: dict[str, list[RequestState]] = {client: [] for client in "abcde"}
    for _ in range(1500):
        for client, likely in zip("abcde", (0.9, 0.6, 0.3, 0.1, 0.05), strict=True):
            if chance.random() < likely and len(waiting[client]) < 8:
                waiting[client] += put(queue, client)
        for entry in list(under_way):
            under_way[entry] -= 1
            if not under_way[entry]:
                del under_way[entry]
                queue.end(entry)
        while len(under_way) < slots and len(queue):
            counts = Counter(each.client for each in under_way)
            entry = begin(queue)
            assert entry is waiting[entry.client].pop(0)
            heads = [each[0] for each in waiting.values() if each]
            assert counts[entry.client] <= min((counts[each.client] for each in heads), default=slots)
            for head in heads:
                if head.client != entry.client:
                    passed.setdefault(head, Counter())[entry.client] += 1
            assert slots > 1 or max(passed.pop(entry, Counter()).values(), default=0) <= 1
            under_way[entry] = chance.choice((1, 2, 20) if entry.client in "ac" else (1, 2))


def test_slots_are_shared_by_two_who_always_wait_however_long_their_answers_are() -> None:
    chance, queue, held = random.Random(1), RequestQueue(30), Counter[str]()
    under_way: dict[RequestState, int] = {}
    for _ in range(4000):
        waiting = Counter(each.client for each in queue.entries)
        for client in "ab":
            put(queue, client * (4 - waiting[client]))
        under_way = {each: left - 1 for each, left in under_way.items() if left > 1 or queue.end(each)}
        while len(under_way) < 4:
            entry = begin(queue)
            under_way[entry] = chance.randrange(1, 100) if entry.client == "a" else chance.randrange(1, 5)
        held.update(each.client for each in under_way)
    assert held["a"] / held["b"] == pytest.approx(1, abs=0.02)


def test_one_client_fills_the_queue_for_itself_alone() -> None:
    queue = RequestQueue(8)
    put(queue, "a" * 8)
    with pytest.raises(QueueFullError, match="8 requests are waiting"):
        put(queue, "a")
    put(queue, "b" * 4)
    with pytest.raises(QueueFullError):
        put(queue, "b")
    put(queue, "ccd")
    assert len(queue) == 15
    put(queue, "d")
    with pytest.raises(QueueFullError):  # twice as many as the limit wait, one of d among them
        put(queue, "d")
    put(queue, "efgh")  # none of theirs does
    with pytest.raises(QueueFullError, match="20 requests are waiting"):
        put(queue, "i")  # as many others as the limit go before it
    queue.put(request("i", 1))
    assert order(queue)[0].client == "i"


@pytest.mark.parametrize("seed", range(20))
def test_none_is_refused_who_would_be_among_the_first(seed: int) -> None:
    """By brute force: who is taken has fewer than `limit` others before it, and who is not could have as many."""
    chance, limit = random.Random(seed), 6
    clients = "".join(chance.choices("abcdefghi", [9, 5, 3, 2, 1, 1, 1, 1, 1], k=40))
    queue, taken = RequestQueue(limit), ""
    for client in clients:
        alone = RequestQueue(99)
        *_, last = put(alone, taken + client)
        place = order(alone).index(last)
        try:
            put(queue, client)
        except QueueFullError:
            rounds = Counter(taken)
            assert place >= limit - len(rounds) and (client in taken or place >= limit)
        else:
            taken += client
            assert place < limit
    assert limit <= len(taken) <= 3 * limit
