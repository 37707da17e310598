"""Answers the requests of a queue with an engine, as many at a time as fit: continuous batching, round by round."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from edgellm.decoding.loop import DecodingLoop, EmittedToken
from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import EngineError
from edgellm.generation import RequestState
from edgellm.requests import Chunk, Response
from edgellm.serving.metrics import Metrics
from edgellm.serving.queue import Call, RequestQueue
from edgellm.text.stop import FinishReason

logger = logging.getLogger("edgellm.serving")


class Engine(Protocol):
    """What answers requests: `edgellm.runtime.SpecDecodeRuntime`."""

    def loop(self) -> DecodingLoop:
        """The loop to answer requests with; asked for again after each call, which may have changed something."""

    def close(self) -> None:
        """Free everything."""


class RequestServer:
    """Takes requests from a `queue` as places become free, and ends them: finished, cancelled, late, or failed.

    A request that fails leaves the others alone. Where the engine itself fails, all that it was computing fail with the
    cause, and what waits is tried. Belongs to one thread; others may put into the queue, cancel, and ask for `running`.
    """

    def __init__(self, engine: Engine, queue: RequestQueue, metrics: Metrics) -> None:
        self._engine, self._queue, self._metrics = engine, queue, metrics
        self._loop = engine.loop()
        self._request_state: dict[DecodingSequence, RequestState] = {}

    @property
    def request_state(self) -> list[RequestState]:
        """The requests that are being computed."""
        return list(self._request_state.values())

    @property
    def running(self) -> int:
        """How many they are."""
        return len(self._request_state)

    def serve(self, after_round: Callable[[], None]) -> None:
        """Answer all that is queued, and call `after_round` after each round.

        What that raises, and an interrupt, leave all slots idle, and nothing of their rows to be reused.
        """
        try:
            while self._request_state or len(self._queue):
                self.round()
                after_round()
        except BaseException:
            self._loop.abandon(keep_rows=False)
            raise

    def round(self) -> None:
        """End what is unwanted, take in what has a place, and compute one round.

        Raises only where a failed engine cannot even be cleared.
        """
        try:
            self._round()
        except Exception as error:
            logger.error("the engine failed: %s", error, exc_info=error)
            self._loop.abandon(keep_rows=False)
            for sequence in self._request_state:
                if not sequence.finished:
                    sequence.failure = _failed_with(error)
            self._end_finished()

    def abandon(self) -> None:
        """Leave all slots idle; the requests are not ended."""
        self._loop.abandon()

    def _round(self) -> None:
        now = time.perf_counter()
        for late in self._queue.take_late(now):
            end_request(late, "deadline", self._metrics)
        for request_state in self._request_state.values():
            if (reason := request_state.unwanted(now)) is not None:
                _release_text(request_state, reason)
        self._deliver(self._loop.evict())
        self._admit()
        if self._loop.running:
            self._deliver(self._loop.advance())
            self._metrics.round()

    def _admit(self) -> None:
        """Begin those whose turn it is, as long as there is a place for the first."""
        while (entry := self._queue.first()) is not None:
            if isinstance(entry, Call):
                if self._loop.running:
                    return
                if self._queue.remove(entry):
                    entry.run()
                    self._loop = self._engine.loop()
                continue
            sequence, failure, reason = entry.sequence, None, entry.unwanted(time.perf_counter())
            try:
                if reason is None and not self._loop.has_place(sequence):
                    return
            except Exception as error:
                failure = error
            if not self._queue.remove(entry):
                continue
            if reason is not None or failure is not None:
                end_request(entry, reason or "cancelled", self._metrics, failure)
                continue
            self._request_state[sequence] = entry
            self._deliver(self._loop.settle())
            try:
                self._loop.admit(sequence)
            except Exception as error:
                sequence.failure = error
                self._end_finished()

    def _deliver(self, emitted: Iterator[EmittedToken]) -> None:
        """Hand the tokens of a round to those who wait for them, and end what is finished."""
        rounds: dict[DecodingSequence, list[EmittedToken]] = {}
        try:
            for each in emitted:
                rounds.setdefault(each.sequence, []).append(each)
        finally:
            for sequence, tokens in rounds.items():
                text = "".join(each.text for each in tokens)
                ids, flags = tuple(each.token_id for each in tokens), tuple(each.from_draft for each in tokens)
                logprobs = tuple(each.logprobs for each in tokens if each.logprobs is not None)
                self._request_state[sequence].deliver(Chunk(text, ids, flags, logprobs))
        self._end_finished()

    def _end_finished(self) -> None:
        for sequence, request_state in list(self._request_state.items()):
            if sequence.finished:
                del self._request_state[sequence]
                end_request(request_state, "cancelled", self._metrics, sequence.failure)


def end_request(
    request_state: RequestState, reason: FinishReason, metrics: Metrics, failure: Exception | None = None
) -> None:
    """Give a request its response, ended for `reason` where it was not finished; or what it failed with."""
    response: Response | None = None
    sequence = request_state.sequence
    if failure is None:
        _release_text(request_state, reason)
        failure = sequence.failure
    if failure is None:
        response = request_state.as_shown(sequence.response())
    metrics.ended(response, sequence.adapter)
    outcome = "failed" if response is None else response.finish_reason
    details: dict[str, Any] = {"outcome": outcome, "prompt_tokens": len(sequence.prompt_ids)}
    if response is not None:
        details |= {"completion_tokens": response.usage.completion_tokens}
        details |= {"total_seconds": response.timings.total_seconds}
    logger.info("request ended: %s", outcome, extra={"edgellm": details}, exc_info=failure)
    request_state.end(response, failure)


def _release_text(request_state: RequestState, reason: FinishReason) -> None:
    """Finish an answer, and show the text that was held back."""
    try:
        text = request_state.sequence.answer.finish(reason)
    except Exception as error:  # its text cannot be completed
        request_state.sequence.failure = error
        return
    if text:
        request_state.deliver(Chunk(text, ()))


def _failed_with(cause: Exception) -> Exception:
    error = EngineError(f"the engine failed while it computed this answer: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
