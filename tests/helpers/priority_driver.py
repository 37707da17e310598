"""Requests with priorities to a server without a thread, round by round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgellm import Request, Response, SamplingParams, SpecDecodeRuntime
from edgellm.generation import RequestState
from edgellm.metrics import Metrics
from edgellm.serving.request_queue import RequestQueue
from edgellm.serving.server import RequestServer

#: Of the fixture `priority_engines`.
SLOTS = 3
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


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
        assert all(state.sequence.kept is None and state.sequence.media is None for state in self.states)
        return [state.outcome() for state in self.states]
