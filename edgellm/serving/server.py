"""The server that answers queued requests with an engine, as many at a time as fit, round by round."""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any, Protocol

from edgellm.decoding.loop import DecodingLoop, EmittedToken
from edgellm.decoding.sequence import DecodingSequence
from edgellm.errors import DeviceLostError, EdgeLLMError, EngineError
from edgellm.generation import RequestState
from edgellm.metrics import Metrics
from edgellm.requests import Chunk, Response
from edgellm.serving.request_queue import Call, Entry, RequestQueue
from edgellm.text.output import FinishReason

logger = logging.getLogger("edgellm.serving")


class Engine(Protocol):
    """What answers requests: `edgellm.runtime.SpecDecodeRuntime`."""

    def loop(self) -> DecodingLoop:
        """The loop to answer requests with; asked for again after each call, which may have changed something."""

    def idle(self) -> bool:
        """Do a little, some milliseconds, of what was put off until nobody waits; whether there was any."""

    def lost(self) -> DeviceLostError | None:
        """What the device has failed with where nothing more can be computed on it."""

    def close(self) -> None:
        """Free everything."""


class RequestServer:
    """Takes requests from a `queue` as places become free, and ends them: finished, cancelled, late, or failed.

    A request that fails leaves the others alone. Where the engine itself fails, all that it was computing fail with the
    cause, and what waits is tried; where its device is lost, nothing is, and DeviceLostError is raised. Belongs to one
    thread; others may put into the queue, cancel, and ask for `running`.
    """

    def __init__(self, engine: Engine, queue: RequestQueue, metrics: Metrics) -> None:
        self._engine, self._queue, self._metrics = engine, queue, metrics
        self._loop = engine.loop()
        self._request_states: dict[DecodingSequence, RequestState] = {}
        # Those that gave way, in the order in which they go on.
        self._preempted: list[RequestState] = []

    @property
    def request_states(self) -> list[RequestState]:
        """The requests that have begun."""
        return [*self._request_states.values(), *self._preempted]

    @property
    def running(self) -> int:
        """How many requests are being computed."""
        return len(self._request_states)

    @property
    def preempted(self) -> int:
        """How many requests gave way to others, and wait to go on."""
        return len(self._preempted)

    def serve(self, after_round: Callable[[], None]) -> None:
        """Answer all that is queued, and call `after_round` after each round.

        What that raises, and an interrupt, leave all slots idle, and nothing of their rows to be reused.
        """
        try:
            while self.running or self.preempted or len(self._queue):
                self.round()
                after_round()
        except BaseException:
            self._loop.abandon(keep_rows=False)
            self.forget_preempted()
            raise

    def round(self) -> None:
        """End what is unwanted, take in what has a place, and compute one round.

        Raises only where a failed engine cannot even be cleared, or its device is lost.
        """
        try:
            self._round()
        except Exception as error:
            self._raise_if_lost(error)
            logger.error("the engine failed: %s", error, exc_info=error)
            self._loop.abandon(keep_rows=False)
            for sequence in self._request_states:
                if not sequence.finished:
                    sequence.failure = _engine_failure(error)
            self._end_finished()

    def _raise_if_lost(self, error: Exception) -> None:
        """Raise what the device was lost by where that is behind an error."""
        if isinstance(error, DeviceLostError):
            raise error
        if (lost := self._engine.lost()) is not None:
            raise lost from error

    def abandon(self) -> None:
        """Leave all slots idle; the requests are not ended."""
        self._loop.abandon()

    def forget_preempted(self) -> None:
        """Keep nothing of requests that gave way, which do not go on."""
        for request_state in self._preempted:
            self._loop.slots.forget(request_state.sequence)

    def _round(self) -> None:
        now = time.perf_counter()
        for request_state in self._request_states.values():
            if (reason := request_state.unwanted(now)) is not None:
                _release_text(request_state, reason)
        self._deliver(self._loop.evict())
        for waiting in tuple(self._preempted):
            reason = waiting.unwanted(now)
            if reason is not None or waiting.sequence.finished:
                self._take(waiting)
                self._end(waiting, reason)
        if self._queue.entries:
            for late in self._queue.take_late(now):
                end_request(late, "deadline", self._metrics)
        if self._queue.entries or self._preempted:
            self._admit()
        if self._loop.running:
            self._deliver(self._loop.advance())
            self._metrics.round()

    def _admit(self) -> None:
        """Begin those whose turn it is, as long as there is a place for the first, or others give way to it."""
        while (entry := self._first()) is not None:
            if isinstance(entry, Call):
                if self._loop.running:
                    return
                if self._queue.remove(entry):
                    entry.run()
                    self._loop = self._engine.loop()
                return  # the next one is another round's, before which what is late has ended
            sequence, failure, reason = entry.sequence, None, entry.unwanted(time.perf_counter())
            try:
                has_place = reason is not None or self._loop.slots.has_place(sequence)
            except Exception as error:
                failure, has_place = error, True
            if not has_place and not self._make_place(entry):
                return
            if not self._take(entry):
                continue
            if reason is not None or failure is not None:
                self._end(entry, reason, failure)
                continue
            self._request_states[sequence] = entry
            self._queue.begin(entry)
            self._deliver(self._loop.settle())
            try:
                self._loop.admit(sequence)
            except Exception as error:
                self._raise_if_lost(error)
                sequence.failure = error if isinstance(error, EdgeLLMError) else _engine_failure(error)
                self._loop.slots.forget(sequence)
                self._end_finished()

    def _first(self) -> Entry | None:
        """Whose turn it is: among equals whose clients have as few under way, one that gave way goes first; calls wait
        for all that have begun."""
        entry, shares = self._queue.first(), self._queue.shares
        if not self._preempted:
            return entry
        top = self._preempted[0].priority
        back = shares.first(takewhile(lambda each: each.priority == top, self._preempted))
        if entry is None or isinstance(entry, Call):
            return back
        return min(back, entry, key=lambda each: (-each.priority, shares.under_way[each.client]))

    def _make_place(self, entry: RequestState) -> bool:
        """Let others give way to a request; whether it has a place then."""
        if not self._giving_way(entry):
            return False
        self._deliver(self._loop.settle())
        self._deliver(self._loop.evict())
        if not self._loop.slots.has_place(entry.sequence):
            for request_state in self._giving_way(entry):
                self._give_way(request_state, request_state.priority == entry.priority)
        return self._loop.slots.has_place(entry.sequence)

    def _giving_way(self, entry: RequestState) -> list[RequestState]:
        """Those that would have to give way for a request to have a place; none where it would not have one even so.

        Of the lowest priority, those of the client with the most under way, of these the latest begun first. An equal
        does where its client has more under way than the other one will have, so that nobody takes the place back at
        once; and not again after its rows were lost, so that none is computed over and over.
        """
        slots, found = self._loop.slots, []
        under_way = self._queue.shares.under_way.copy()
        running = [self._request_states[each] for each in slots.movable]
        running.sort(key=lambda each: (each.priority, -under_way[each.client], -each.sequence.clock.started))
        for each in running:
            has_more = under_way[each.client] > under_way[entry.client] + 1 and not each.sequence.lost_rows
            if each.priority < entry.priority or (each.priority == entry.priority and has_more):
                under_way[each.client] -= 1
                found.append(each)
                if slots.has_place(entry.sequence, [each.sequence for each in found]):
                    return found
        return []

    def _give_way(self, request_state: RequestState, to_equal: bool) -> None:
        """Let a request wait until it goes on, for one of a higher priority or an equal."""
        sequence = request_state.sequence
        self._loop.give_way(sequence)
        del self._request_states[sequence]
        self._queue.end(request_state)
        self._preempted.insert(bisect_right(self._preempted, _order(request_state), key=_order), request_state)
        self._metrics.preempted(sequence.kept, to_equal)
        details = {"prompt_tokens": len(sequence.prompt_ids), "completion_tokens": sequence.answer.token_count}
        whose = "another client's" if to_equal else "one of a higher priority"
        logger.info("request gave way to %s", whose, extra={"edgellm": details})

    def _take(self, entry: RequestState) -> bool:
        """Take a request from where it waits; False where it is not there any more."""
        if entry not in self._preempted:
            return self._queue.remove(entry)
        self._preempted.remove(entry)
        return True

    def _end(self, entry: RequestState, reason: FinishReason | None, failure: Exception | None = None) -> None:
        """End a request that waited, and is not wanted any more or has failed."""
        self._loop.slots.forget(entry.sequence)
        end_request(entry, reason or "cancelled", self._metrics, failure)

    def _deliver(self, emitted: Iterator[EmittedToken]) -> None:
        """Hand the tokens of a round to those who wait for them, and end what is finished."""
        rounds: dict[DecodingSequence, list[Chunk]] = {}
        try:
            for each in emitted:
                logprobs, calls = () if each.logprobs is None else (each.logprobs,), each.sequence.take_call_deltas()
                chunk = Chunk(each.text, (each.token_id,), (each.from_draft,), logprobs, calls)
                rounds.setdefault(each.sequence, []).append(chunk)
        finally:
            if rounds:
                self._metrics.stepped(len(rounds), sum(map(len, rounds.values())))
            for sequence, chunks in rounds.items():
                self._request_states[sequence].deliver(chunks)
        self._end_finished()

    def _end_finished(self) -> None:
        for sequence, request_state in list(self._request_states.items()):
            if sequence.finished:
                del self._request_states[sequence]
                self._queue.end(request_state)
                end_request(request_state, "cancelled", self._metrics, sequence.failure)


def _engine_failure(error: Exception) -> EngineError:
    """What an answer fails with where the engine did."""
    failure = EngineError(f"the engine failed while it computed this answer: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _order(request_state: RequestState) -> tuple[int, float]:
    """The order in which those that gave way go on."""
    return -request_state.priority, request_state.sequence.clock.started


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
        details["completion_tokens"] = response.usage.completion_tokens
        details["total_seconds"] = response.timings.total_seconds
    logger.info("request ended: %s", outcome, extra={"edgellm": details}, exc_info=failure)
    request_state.end(response, failure)


def _release_text(request_state: RequestState, reason: FinishReason) -> None:
    """Finish an answer, and show the text that was held back."""
    try:
        text = request_state.sequence.answer.finish(reason)
    except Exception as error:  # its text cannot be completed
        request_state.sequence.failure = error
        return
    calls = request_state.sequence.take_call_deltas()
    if text or calls:
        request_state.deliver([Chunk(text, (), tool_calls=calls)])
