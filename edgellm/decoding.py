"""The decoding loop: launches steps and rounds, reads their tokens, and decides when answers are finished.

One loop serves plain decoding and drafting, one sequence and several. Sequences keep the leading slots: where one is
finished, the last one takes its slot, and one that waits takes the last one's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgellm.drafting import PlanChooser
from edgellm.drafting_statistics import DraftingTally
from edgellm.engines.backend import Backend, Readback
from edgellm.engines.base_runner import BaseEngineRunner
from edgellm.engines.decoder_config import EngineLimits
from edgellm.engines.draft_plan import DraftPlan
from edgellm.engines.sampling_state import SamplingValues
from edgellm.responses import Timings
from edgellm.text.stop import Answer


@dataclass
class Clock:
    """When a request was accepted, began to be prefilled, gave its first token and its last (monotonic seconds)."""

    accepted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def timings(self) -> Timings:
        """The spans between them."""
        first = self.first_token or self.started
        return Timings(
            prefill_seconds=first - self.started,
            time_to_first_token=first - self.accepted,
            decode_seconds=max(0.0, self.last_token - first),
            total_seconds=time.perf_counter() - self.accepted,
        )


class KVContents:
    """Which tokens the KV rows of a slot belong to, so that the next request can reuse the prefix they share.

    A draft's row i was made of base rows up to i and of token i + 1. What of it is missing is recomputed from the
    base's features, so the base recomputes these rows, too. Rows are bound to the adapter that they were computed with,
    those of the draft, too: it takes the base's features.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._draft_rows: int | None = None
        self._adapter: str | None = None

    def bind(self, adapter: str | None) -> None:
        """Rows for this adapter's digest (None: no adapter) are wanted or written from now on: others are let go."""
        if adapter != self._adapter:
            self._ids, self._adapter = [], adapter
            self._draft_rows = None if self._draft_rows is None else 0

    def reusable(self, prompt_ids: Sequence[int]) -> int:
        """Rows to reuse for a prompt: the longest common prefix, but never the prompt's last token."""
        longest = min(len(self._ids), len(prompt_ids))
        common = next((i for i in range(longest) if self._ids[i] != prompt_ids[i]), longest)
        rows = min(common, len(prompt_ids) - 1)
        if self._draft_rows is not None:
            rows = min(rows, self._draft_rows, common - 1)
        return max(0, rows)

    def replace(self, token_ids: Sequence[int], draft_rows: int | None = None) -> None:
        """The rows now hold exactly these tokens; so many rows of the draft hold theirs (None: there is no draft)."""
        self._ids, self._draft_rows = list(token_ids), draft_rows


class SnapshotSource(Protocol):
    """Where rows of earlier prompts come from: `edgellm.snapshots.slot_snapshots.SlotSnapshots`."""

    def restore(self, slot: int, prompt_ids: Sequence[int], contents: KVContents, adapter: str | None) -> int:
        """Put rows that fit a prompt and an adapter's digest (None: no adapter) into an idle slot where that is better
        than its contents. Returns the rows taken."""


class StepTokens(Protocol):
    """The tokens of a step on their way to the host."""

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one."""


class Runner(Protocol):
    """What the loop needs: `engines.eagle_runner.EagleRunner`, or `PlainRunner`."""

    base: BaseEngineRunner
    backend: Backend
    limits: EngineLimits

    def start(self, slot: int, prompt_ids: Sequence[int], reused: int, sampling: SamplingValues) -> Readback:
        """Prefill a slot; gives its first token [1]."""

    def step(self, batch: int, plan: DraftPlan | None) -> StepTokens:
        """A round of `plan` for the leading slots, or a plain step."""

    def draft_rows(self, slot: int) -> int | None:
        """Committed rows of the draft, None without one."""

    def stop(self, slot: int) -> None:
        """Leave a slot idle."""

    def move(self, source: int, target: int) -> None:
        """Go on with the sequence of slot `source` in the idle slot `target`."""

    def close(self) -> None:
        """Free everything."""


class PlainRunner:
    """A base model without a draft, as the loop's runner."""

    def __init__(self, base: BaseEngineRunner) -> None:
        self.base, self.backend, self.limits = base, base.backend, base.limits
        self.start, self.stop, self.move, self.close = base.start, base.stop, base.move, base.close

    def step(self, batch: int, plan: DraftPlan | None) -> StepTokens:
        """A plain step; there are no plans."""
        return _PlainStep(self.base.decode(batch))

    def draft_rows(self, slot: int) -> int | None:
        """There is no draft."""
        return None


class _PlainStep:
    def __init__(self, emitted: Readback) -> None:
        self._emitted = emitted

    def wait(self) -> list[list[int]]:
        return [[token] if token >= 0 else [] for token in self._emitted.wait().tolist()]


@dataclass(eq=False)
class DecodingSequence:
    """A request that is being answered, with the LoRA adapter of that name (None: without one).

    `max_tokens` only keeps steps from being launched that it will not need.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingValues
    answer: Answer
    clock: Clock = field(default_factory=Clock)
    max_tokens: int | None = None
    tally: DraftingTally | None = None
    adapter: str | None = None
    adapter_digest: str | None = None
    reused_tokens: int = 0
    # Of tokens after the prompt: how many there may be, how many are launched at least and at most.
    room: int = 0
    least: int = 0
    most: int = 0

    @property
    def finished(self) -> bool:
        """Whether the answer has ended."""
        return self.answer.finish_reason is not None

    @property
    def wanted(self) -> int:
        """The most tokens that the answer can have."""
        return self.room if self.max_tokens is None else min(self.room, self.max_tokens)


@dataclass
class _Launch:
    """A step under way: for `slots`, of `plan` (None: a plain step, or a prefill), launched at `seconds`."""

    wait: Callable[[], list[list[int]]]
    slots: range
    plan: DraftPlan | None
    is_prefill: bool
    seconds: float


class DecodingLoop:
    """Answers sequences on a runner. `contents` are those of its slots; `chooser` picks plans (None: no drafting)."""

    def __init__(
        self,
        runner: Runner,
        contents: Sequence[KVContents],
        chooser: PlanChooser | None = None,
        snapshots: SnapshotSource | None = None,
    ) -> None:
        self._runner, self._contents, self._chooser = runner, contents, chooser
        self._snapshots = snapshots
        self._running: list[DecodingSequence] = []
        self._launches: deque[_Launch] = deque()
        self._last_read = 0.0

    def run(self, sequences: Sequence[DecodingSequence]) -> Iterator[tuple[DecodingSequence, int, str]]:
        """Answer all; yields (sequence, token id, text that it completed).

        `answer.finish("cancelled")` from outside ends a sequence at its next token, closing the iterator ends all. KV
        rows of the tokens up to then stay reusable.
        """
        waiting = deque(sequences)
        try:
            while waiting or self._running:
                while waiting and self._has_place(waiting[0]):
                    self._start(waiting.popleft())
                self._launch_ahead()
                yield from self._read()
                if any(sequence.finished for sequence in self._running):
                    while self._launches:
                        yield from self._read()
                    self._evict()
        finally:
            for launch in self._launches:
                launch.wait()
            self._launches.clear()
            while self._running:
                self._release(len(self._running) - 1)

    def _has_place(self, sequence: DecodingSequence) -> bool:
        """Whether a slot is free, and the engines hold its adapter or can: else it waits until others are finished."""
        slot, runner = len(self._running), self._runner
        return slot < runner.limits.max_batch and runner.base.has_adapter_place(slot, sequence.adapter)

    def _take_adapter(self, sequence: DecodingSequence) -> None:
        slot, base = len(self._running), self._runner.base
        base.set_adapter(slot, sequence.adapter)
        sequence.adapter_digest = base.adapter_digest(sequence.adapter)
        self._contents[slot].bind(sequence.adapter_digest)

    def _start(self, sequence: DecodingSequence) -> None:
        self._take_adapter(sequence)
        runner, slot = self._runner, len(self._running)
        contents, prompt_ids = self._contents[slot], sequence.prompt_ids
        sequence.clock.started = time.perf_counter()
        if self._snapshots is not None:
            self._snapshots.restore(slot, prompt_ids, contents, sequence.adapter_digest)
        reused = sequence.reused_tokens = contents.reusable(prompt_ids)
        # What a failure from here on leaves behind.
        contents.replace(prompt_ids[:reused], None if runner.draft_rows(slot) is None else reused)
        try:
            first = runner.start(slot, prompt_ids, reused, sequence.sampling)
        except BaseException:
            runner.base.set_adapter(slot, None)  # the slot stays idle: it must not keep an adapter's place
            raise
        sequence.room = runner.limits.kv_capacity - len(prompt_ids)
        sequence.least = sequence.most = 1
        self._running.append(sequence)
        slots = range(slot, slot + 1)
        self._launches.append(_Launch(lambda: [first.wait().tolist()], slots, None, True, time.perf_counter()))

    def _launch_ahead(self) -> None:
        """Launch what the backend may run before a token of it is read; at least one step where none is under way."""
        running = [sequence for sequence in self._running if not sequence.finished]
        while running and len(self._launches) <= self._runner.backend.steps_ahead:
            needed = any(sequence.least < sequence.wanted for sequence in running)
            fits = all(sequence.most < sequence.room for sequence in running)
            if self._launches and not (needed and fits):
                return
            self._launch(running)

    def _launch(self, running: Sequence[DecodingSequence]) -> None:
        room = min(sequence.room - sequence.most for sequence in running)
        batch = len(self._running)
        plan = None if self._chooser is None else self._chooser.next_plan(room, batch)
        seconds = time.perf_counter()
        step = self._runner.step(batch, plan)
        self._launches.append(_Launch(step.wait, range(batch), plan, False, seconds))
        for sequence in running:
            sequence.least += 1
            sequence.most += 1 if plan is None else plan.longest

    def _read(self) -> Iterator[tuple[DecodingSequence, int, str]]:
        """Take the tokens of the oldest launch."""
        launch = self._launches.popleft()
        tokens = launch.wait()
        now = time.perf_counter()
        seconds, self._last_read = now - max(launch.seconds, self._last_read), now
        plan, counts = launch.plan, [len(emitted) for emitted in tokens if emitted]
        if self._chooser is not None and not launch.is_prefill and counts:
            self._chooser.record(plan, counts, seconds)
        for slot, emitted in zip(launch.slots, tokens, strict=True):
            sequence = self._running[slot]
            if sequence.finished or not emitted:
                continue
            if plan is not None:
                sequence.most += len(emitted) - plan.longest
                sequence.least += len(emitted) - 1
            if sequence.tally is not None and not launch.is_prefill:
                sequence.tally.step(plan, seconds)
            for token in emitted:
                sequence.clock.last_token = now
                sequence.clock.first_token = sequence.clock.first_token or now
                text = sequence.answer.push(token)
                if sequence.tally is not None and not launch.is_prefill:
                    sequence.tally.token()
                if not sequence.finished and sequence.answer.token_count >= sequence.room:
                    text += sequence.answer.finish("context")
                yield sequence, token, text
                if sequence.finished:
                    break

    def _evict(self) -> None:
        """Take the finished sequences out; the last ones move to their slots."""
        for slot in reversed(range(len(self._running))):
            if not self._running[slot].finished:
                continue
            self._release(slot)

    def _release(self, slot: int) -> None:
        """Leave a slot idle, its rows reusable; unless it is the last one, the last one's sequence moves there."""
        sequence, runner = self._running[slot], self._runner
        runner.stop(slot)
        self._contents[slot].bind(sequence.adapter_digest)
        rows = [*sequence.prompt_ids, *sequence.answer.token_ids[:-1]]
        self._contents[slot].replace(rows, runner.draft_rows(slot))
        last = len(self._running) - 1
        if slot < last:
            runner.move(last, slot)
            self._running[slot] = self._running[last]
            self._contents[last].replace((), None if runner.draft_rows(slot) is None else 0)
        self._running.pop()
