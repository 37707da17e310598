"""The ways and orders in which a served model is asked the same: alone, with snapshots, in turns, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TypeVar

from edgellm import LLM, Request, Response, SamplingParams, SpecDecodeRuntime
from tools.bench.held_out_prompts import Messages, as_they_are

#: Slots of the model that is served.
SLOTS = 8
WAYS = ("alone", "snapshot", "turns", "batch of 3", "batch of 8")
Member = TypeVar("Member")


@dataclass(frozen=True)
class Asked:
    """The conversation `number`, with an adapter (None: without one), and the answer that plain decoding gives to it
    alone."""

    number: int
    messages: Messages
    adapter: str | None
    answer: tuple[int, ...] = ()
    next_messages: Messages = field(default_factory=list)
    next_answer: tuple[int, ...] = ()


def answers(
    llm: LLM, way: str, asked: Sequence[Asked], params: SamplingParams
) -> Iterator[tuple[Asked, bool, Response]]:
    """All answers of one way: what was asked, whether it is what follows, and the response."""
    if way == "alone":
        for each in asked:
            yield each, False, llm.chat(as_they_are(each.messages), params, each.adapter)
    elif way == "snapshot":
        for each in asked:
            llm.cache_system_prompt(each.messages[0]["content"], each.adapter)
            llm.call(forget_rows).result()
            yield each, False, llm.chat(as_they_are(each.messages), params, each.adapter)
    elif way == "turns":
        for few in groups(asked, SLOTS):  # as many as have rows of their own
            for each in few:
                yield each, False, llm.chat(as_they_are(each.messages), params, each.adapter)
            for each in reversed(few):
                yield each, True, llm.chat(as_they_are(each.next_messages), params, each.adapter)
    else:
        size = int(way.rsplit(maxsplit=1)[-1])
        for few in groups(asked, size):
            for number, order in enumerate(orders(few)):
                if number % 2 == 0:  # the others reuse rows
                    llm.call(forget_rows).result()
                requests = [Request(None, as_they_are(each.messages), params, each.adapter) for each in order]
                for each, response in zip(order, llm.handle(requests), strict=True):
                    if not isinstance(response, Response):
                        raise response
                    yield each, False, response


def forget_rows(runtime: SpecDecodeRuntime) -> None:
    """Reuse nothing of what slots hold."""
    for contents in runtime._contents:
        contents.replace((), 0 if runtime.has_draft_model else None)


def groups(members: Sequence[Member], size: int) -> list[Sequence[Member]]:
    """Groups of so many, of which the last may be smaller."""
    return [members[first : first + size] for first in range(0, len(members), size)]


def orders(few: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """All orders of up to three; of more those of a design in which each stands equally often in each place, and
    equally often right before each other (Williams 1949): n orders, 2 n where n is odd."""
    size = len(few)
    if size <= 3:
        yield from permutations(few)
        return
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(size)]
    for first in range(size):
        order = [few[(first + step) % size] for step in zigzag]
        yield order
        if size % 2:
            yield order[::-1]
