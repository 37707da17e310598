"""Several requests of one caller, answered as many at a time as fit: for `LLM.handle`, and in one thread alone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from edgellm.errors import EdgeLLMError, QueueFullError, RequestError, require_kind
from edgellm.generation import Generation, RequestState
from edgellm.metrics import Metrics
from edgellm.requests import Chunk, Request, Response, request_list
from edgellm.serving.request_queue import RequestQueue
from edgellm.serving.server import Engine, RequestServer

OnChunk = Callable[[Chunk], object]


def handle_requests(
    submit: Callable[[Request], Generation], metrics: Metrics, requests: Sequence[Request]
) -> list[Response | EdgeLLMError]:
    """The responses, or what requests failed with, in their order; `submit` queues one, and counts no refusal.

    Whatever ends this early, an interrupt, too, cancels what is not finished.
    """
    requests = request_list(requests)
    queued: list[Generation | EdgeLLMError] = []
    unfinished: deque[Generation] = deque()
    watched = any(getattr(request, "stop_when", None) is not None for request in requests)
    changed = threading.Event() if watched else None
    try:
        for request in requests:
            found = _submit_when_possible(submit, request, unfinished, changed)
            if isinstance(found, EdgeLLMError):
                metrics.refused()
            queued.append(found)
        return [_result(each, unfinished, changed) for each in queued]
    finally:
        for generation in unfinished:
            if not generation.finished:
                generation.cancel()


def with_others(answers: Sequence[Response | EdgeLLMError]) -> Response:
    """The first of several answers of one prompt, which knows the others; raises the first failure among them."""
    found: list[Response] = []
    for answer in answers:
        if isinstance(answer, EdgeLLMError):
            raise answer
        found.append(answer)
    return replace(found[0], others=tuple(found[1:]))


def failure_of(error: Exception) -> EdgeLLMError:
    """What a request has failed with, as a result."""
    if isinstance(error, EdgeLLMError):
        return error
    failure = RequestError(f"the request failed with {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _submit_when_possible(
    submit: Callable[[Request], Generation],
    request: Request,
    unfinished: deque[Generation],
    changed: threading.Event | None,
) -> Generation | EdgeLLMError:
    """Queue a request, waiting for earlier ones of the same caller where the queue is full."""
    while True:
        try:
            generation = submit(request)
        except QueueFullError as error:
            if not unfinished:
                return error
            _result(unfinished[0], unfinished, changed)
            unfinished.popleft()
        except EdgeLLMError as error:
            return error
        else:
            unfinished.append(generation)
            if changed is not None:
                generation.on_change(changed.set)
            return generation


def _result(
    generation: Generation | EdgeLLMError, unfinished: Iterable[Generation], changed: threading.Event | None
) -> Response | EdgeLLMError:
    """What has come of a request. Where an event is set by what has `changed` of any, the `stop_when` of all that are
    `unfinished` are called meanwhile."""
    if isinstance(generation, EdgeLLMError):
        return generation
    while changed is not None and not generation.finished:
        changed.wait()
        changed.clear()
        for other in unfinished:
            other.look_ahead()
    try:
        return generation.result()
    except Exception as error:
        return failure_of(error)


def serve_all(
    engine: Engine, metrics: Metrics, states: Sequence[RequestState | EdgeLLMError], callbacks: Sequence[OnChunk | None]
) -> list[Response | Exception]:
    """Answer requests with an engine in this thread, and call each one's callback between rounds.

    The results are in their order; one that was refused already has its error for a result.
    """
    queue = RequestQueue(max(1, len(states)))
    readers: dict[RequestState, OnChunk] = {}
    for each, callback in zip(states, callbacks, strict=True):
        if isinstance(each, RequestState):
            queue.put(each)
            metrics.accepted()
            if callback is not None or each.stop_when is not None:  # which is called by reading
                readers[each] = callback or (lambda chunk: None)

    def hand_over() -> None:
        """What a callback raises ends its request, which fails with that, and leaves the others alone."""
        for request_state, on_chunk in list(readers.items()):
            try:
                while (chunk := request_state.take()) is not None:
                    on_chunk(chunk)
            except Exception as error:  # of the callback, or of the request's own `stop_when`
                del readers[request_state]
                request_state.sequence.failure = error  # the next round takes it out
                if request_state.ended:
                    request_state.end(None, error)

    RequestServer(engine, queue, metrics).serve(after_round=hand_over)
    return [each if isinstance(each, Exception) else each.outcome() for each in states]


def callbacks_of_each(on_chunk: Any, count: int | None) -> list[OnChunk | None]:
    """The callbacks of `count` requests, None where one has none; `count` None: of one that is not in a list.

    Raises RequestError for what is not a callable or None for each.
    """
    if count is None:
        named = {"on_chunk": on_chunk}
    else:
        given = [None] * count if on_chunk is None else on_chunk
        expected = f"a list with a callable or None for each of the {count} requests"
        require_kind(isinstance(given, Sequence) and not isinstance(given, (str, bytes)), "on_chunk", given, expected)
        if len(given) != count:
            raise RequestError(f"on_chunk has {len(given)} entries: expected {expected}")
        named = {f"on_chunk[{index}]": each for index, each in enumerate(given)}
    for name, callback in named.items():
        require_kind(callback is None or callable(callback), name, callback, "a callable that takes a Chunk, or None")
    return list(named.values())
