"""Random schedules of clients' requests with priorities, served round by round, and the answers that they must have.

A schedule says at which round which request comes, with which priority, and at which round it is cancelled; it runs
without a thread and without a clock, so that it is the same every time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgellm import Request, Response, SamplingParams, SpecDecodeRuntime
from edgellm.decoding.sequence import DecodingSequence
from edgellm.generation import RequestState
from edgellm.metrics import Metrics
from edgellm.requests import Chunk
from edgellm.serving.request_queue import RequestQueue
from edgellm.serving.server import RequestServer
from edgellm.snapshots.contents import KVContents
from edgellm.structure.description import Structure
from tools.bench.held_out_prompts import as_they_are, held_out_conversations

#: By how much log-probabilities may differ, which rounding changes: float32 on NumPy, 16 bits on a GPU.
_LOGPROB_TOLERANCES = {"numpy": 1e-3, "tensorrt": 0.05}
ACTION = {
    "type": "object",
    "properties": {
        "action": {"enum": ["go", "grasp", "wait"]},
        "speed": {"type": "integer", "minimum": 0, "maximum": 90},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["action", "speed", "note"],
    "additionalProperties": False,
}
TOOL = {
    "name": "go",
    "description": "Drive somewhere.",
    "parameters": {"type": "object", "properties": {"to": {"enum": ["dock", "door"]}}, "required": ["to"]},
}


@dataclass(frozen=True)
class Answer:
    """What of an answer has to be the same: its tokens, its text, why it ended, its calls, the text of the stream, and
    its tokens' log-probabilities but for rounding."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    calls: tuple[tuple[str, str], ...] = ()
    streamed: str = ""
    logprobs: tuple[float, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, response: Response, chunks: Sequence[Chunk]) -> Answer:
        """That of a response, which came in chunks."""
        calls = tuple((call.name, str(call.arguments)) for call in response.tool_calls)
        logprobs = tuple(each.logprob for each in response.logprobs or ())
        streamed = "".join(chunk.text for chunk in chunks)
        return cls(response.token_ids, response.text, response.finish_reason, calls, streamed, logprobs)

    def begins(self, whole: Answer) -> bool:
        """Whether it is what a cancellation leaves of the whole answer."""
        count = len(self.token_ids)
        return self.token_ids == whole.token_ids[:count] and whole.streamed.startswith(self.streamed[:-8])


@dataclass(frozen=True)
class Arrival:
    """A client's request, by its number in the pool, that comes at a round, and is cancelled at one (None: never)."""

    round: int
    number: int
    priority: int
    cancelled: int | None = None
    client: str = ""


@dataclass
class Outcome:
    """What came of a request: its `answer`, or the error that it failed with; how often its rows were kept when it
    gave way, and how often they had to be computed again."""

    arrival: Arrival
    answer: Answer | Exception
    kept: int = 0
    recomputed: int = 0


@dataclass
class Served:
    """The outcomes of a schedule, the rounds that it took, and the bytes that were kept at most."""

    outcomes: list[Outcome] = field(default_factory=list)
    rounds: int = 0
    most_bytes: int = 0


class _Unused(KVContents):
    """Rows that nobody reuses."""

    def reusable(self, prompt_ids: Any, adapter: Any = None) -> int:
        return 0


def request_pool(count: int, model: Path, with_tools: bool, seed: int = 0) -> list[Request]:
    """Requests of every kind to the shipped model: greedy and sampled, with penalties, biases, stop strings,
    structures, log-probabilities, images, adapters and, where it takes them, tools."""
    chosen, found = random.Random(seed), []
    scenes = sorted((model / "scenes").glob("*.png"))
    conversations = [each for each in held_out_conversations(4 * count) if isinstance(each[-1]["content"], str)]
    for number in range(count):
        messages = as_they_are(conversations[number % len(conversations)])
        params = SamplingParams(
            temperature=chosen.choice((0.0, 0.7, 1.1)),
            top_p=chosen.choice((1.0, 0.9)),
            repetition_penalty=chosen.choice((1.0, 1.15)),
            frequency_penalty=chosen.choice((0.0, 0.2)),
            seed=number,
            max_tokens=chosen.randrange(2, 36),
            stop=chosen.choice(((), (), ("the", "."))),
            ignore_eos=chosen.random() < 0.6,
            logprobs=chosen.choice((None, None, None, 2)),
            logit_bias=chosen.choice(({}, {}, {17: 2.5, 40: -4.0})),
        )
        more: dict[str, Any] = {"adapter": chosen.choice((None, None, "json", "pirate"))}
        kind = chosen.choice(("text", "text", "image", "schema", "regex", "tools"))
        if kind == "image":
            part = {"type": "image", "image": str(chosen.choice(scenes))}
            text = {"type": "text", "text": messages[-1]["content"]}
            messages = [*messages[:-1], {"role": "user", "content": [part, text]}]
        elif kind == "schema":
            params = replace(params, stop=(), ignore_eos=False, structure=Structure(json=ACTION))
        elif kind == "regex":
            regex = Structure(regex="[a-z]{3,9}( [0-9]{2,4}){1,6}")
            params = replace(params, ignore_eos=False, structure=regex)
        elif kind == "tools" and with_tools:
            more |= {"tools": [TOOL], "tool_choice": chosen.choice(("auto", "required", "none"))}
        found.append(Request(messages=messages, params=params, **more))
    return found


def random_schedule(seed: int, pool: int, slots: int) -> list[Arrival]:
    """A schedule that fills the slots several times over; one of four clients asks more than the others."""
    chosen, clients, found = random.Random(seed), random.Random(seed), []
    for _ in range(chosen.randrange(2 * slots, 5 * slots)):
        first = chosen.randrange(0, 24)
        cancelled = first + chosen.randrange(0, 25) if chosen.random() < 0.15 else None
        number, priority = chosen.randrange(pool), chosen.choice((-1, 0, 0, 1, 2, 3, 5, 8))
        found.append(Arrival(first, number, priority, cancelled, clients.choice("aaaabcd")))
    return sorted(found, key=lambda arrival: arrival.round)


def serve(runtime: SpecDecodeRuntime, pool: Sequence[Request], schedule: Sequence[Arrival], reuses: bool) -> Served:
    """Serve a schedule, with rows of earlier prompts or without."""
    kind = KVContents if reuses else _Unused
    runtime._contents[:] = [kind() for _ in runtime._contents]
    if runtime.has_draft_model:
        for contents in runtime._contents:
            contents.replace((), 0)
    queue = RequestQueue(len(schedule) + 1)
    server, served = RequestServer(runtime, queue, Metrics()), Served()
    given_way = _watch(server)
    waiting, states = list(schedule), []
    while waiting or server.running or server.preempted or len(queue):
        for arrival in [each for each in waiting if each.round <= served.rounds]:
            waiting.remove(arrival)
            request = replace(pool[arrival.number], priority=arrival.priority)
            state = RequestState(runtime.prepare(request), discard=queue.remove, client=arrival.client)
            states.append((arrival, state))
            queue.put(state)
        for arrival, state in states:
            if arrival.cancelled == served.rounds:
                state.cancelled = True
        server.round()
        served.rounds += 1
        served.most_bytes = max(served.most_bytes, runtime.kept_bytes)
    assert runtime.kept_bytes == 0, "rows were left behind"
    for arrival, state in states:
        chunks = []
        while (chunk := state.take()) is not None:
            chunks.append(chunk)
        outcome = state.outcome()
        answer = outcome if isinstance(outcome, Exception) else Answer.of(outcome, chunks)
        served.outcomes.append(Outcome(arrival, answer, *given_way.get(state.sequence, (0, 0))))
    return served


def alone(runtime: SpecDecodeRuntime, pool: Sequence[Request]) -> Iterator[Answer]:
    """The answers to requests one at a time, of whose rows nothing is reused."""
    for number in range(len(pool)):
        answer = serve(runtime, pool, [Arrival(0, number, 0)], False).outcomes[0].answer
        if isinstance(answer, Exception):
            raise answer
        yield answer


def is_right(outcome: Outcome, expected: Answer, backend: str) -> bool:
    """Whether an answer is that of the same request undisturbed, as far as it was not cancelled."""
    found, tolerance = outcome.answer, _LOGPROB_TOLERANCES[backend]
    if isinstance(found, Exception):
        return False
    count = len(found.logprobs)
    if count != min(len(expected.logprobs), len(found.token_ids)):
        return False
    if any(abs(one - other) > tolerance for one, other in zip(found.logprobs, expected.logprobs, strict=False)):
        return False
    return found.begins(expected) if found.finish_reason == "cancelled" else found == expected


def _watch(server: RequestServer) -> dict[DecodingSequence, tuple[int, int]]:
    """How often rows were kept, and how often not, of each sequence that gave way."""
    found: dict[DecodingSequence, tuple[int, int]] = {}
    places = server._loop.slots
    give_way = places.give_way

    def watched(sequence: DecodingSequence) -> None:
        give_way(sequence)
        kept, recomputed = found.get(sequence, (0, 0))
        is_kept = sequence.kept is not None
        found[sequence] = kept + is_kept, recomputed + (not is_kept)

    places.give_way = watched  # type: ignore[method-assign]
    return found
