"""The decoding loop: launches steps and rounds, reads their tokens, and decides when answers are finished.

One loop serves plain decoding and drafting, one sequence and several. Sequences keep the leading slots: where one is
finished, the last one takes its slot, and one that waits takes the last one's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgellm.decoding.sequence import DecodingSequence, StepMasks
from edgellm.decoding.slot_table import SlotTable
from edgellm.engines.runners.base_runner import StepKey
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.errors import EngineError, SnapshotError
from edgellm.requests import TokenLogprobs

logger = logging.getLogger("edgellm.serving")

#: How quickly what the host takes follows what is seen.
_PACE = 0.1


@dataclass
class _Launch:
    """A step under way: for `slots`, of `plan` (None: a plain step, or a prefill), launched at `seconds`.

    `wait` gives the tokens of each slot, in order: none for an idle one; of one each also as an array, idle ones -1.
    """

    wait: Callable[[], np.ndarray | list[list[int]]]
    slots: range
    plan: DraftPlan | None
    is_prefill: bool
    seconds: float
    #: The candidates that were given, of each slot; whether a sequence has rules.
    trees: Sequence[GivenTree] | None = None
    ruled: bool = False
    #: Whether it is a plain one until which the device had nothing to do; whether the drafter was asked, or rested.
    waited: bool = False
    asked: bool = False
    rests: bool = False
    #: What was waited for, when it was there, and for how long.
    tokens: list[list[int]] | None = None
    read: float = 0.0
    blocked: float = 0.0


class _Outlook(NamedTuple):
    """What the next step meets: the sequences `going` on, which need more tokens as far as is known, whether rules say
    which, and whether logits are `raw`, shown as penalties must not change them, which rounds do. `room` is how many
    tokens may follow those that are launched, and `may_follow` whether a step may be launched behind those under way:
    it is needed, there is room for it, and nobody wants to see the logits of the one before, which are there until
    then, also those of a last token. The drafter is `asked` unless it `rests`."""

    going: list[DecodingSequence]
    ruled: bool
    raw: bool
    room: int
    may_follow: bool
    asked: bool
    rests: bool


class EmittedToken(NamedTuple):
    """A token that a sequence got, the text that it completed, and whether the draft had proposed it."""

    sequence: DecodingSequence
    token_id: int
    text: str
    from_draft: bool
    logprobs: TokenLogprobs | None = None


class DecodingLoop:
    """Answers sequences in the slots of a runner, as the slots' drafter drafts.

    Where a slot is free, `settle` and `admit`; then `advance` round by round. Not thread-safe.
    """

    def __init__(self, slots: SlotTable) -> None:
        self.slots, self._runner, self._drafter = slots, slots.runner, slots.drafter
        #: The sequences that have a slot, in the slots' order.
        self.running = slots.running
        self._launches: deque[_Launch] = deque()
        self._last_read = 0.0
        #: The next step, where its forward pass is enqueued and the choice is not; and the seconds from the moment at
        #: which the host knows a token to the next launch: so long the device waits where nothing has begun.
        self._begun: StepKey | None = None
        self._waited = 0.0
        #: The same behind a round of given candidates, without rules, and how often it was seen.
        self._idle, self._idled = 0.0, 0

    def settle(self) -> Iterator[EmittedToken]:
        """Read what is under way, so that sequences can come and go; gives its tokens."""
        while self._launches:
            yield from self._read()

    def admit(self, sequence: DecodingSequence) -> None:
        """Launch the prefill of a sequence that has a place, or let one that gave way go on; no step is under way (see
        `settle`). What it raises is that sequence's failure: nothing has changed for the others."""
        slot, self._begun = len(self.running), None
        if (first := self.slots.admit(sequence)) is not None:
            self._launches.append(_Launch(first.wait, range(slot, slot + 1), None, True, time.perf_counter()))

    def give_way(self, sequence: DecodingSequence) -> None:
        """Take a sequence that runs out of its slot, from where `admit` lets it go on; no step is under way."""
        self._begun = None
        self.slots.give_way(sequence)

    def advance(self) -> Iterator[EmittedToken]:
        """Launch what may be launched, read the oldest launch, and take out what is finished; gives the tokens read.

        Read it to its end. What it raises is the engines' failure: `abandon` the sequences then. What was ended between
        two rounds is to be taken out before (see `evict`), so that nothing is computed for it.
        """
        self._launch_ahead()
        if self._launches:
            if self._drafter.looks_up and self._drafter.rest <= 0 and self._runner.backend.steps_ahead:
                self._look_up(self._outlook())
            yield from self._read()
        yield from self.evict()

    def evict(self) -> Iterator[EmittedToken]:
        """Take out the sequences that have ended; gives the tokens of others that were under way."""
        if any(sequence.finished for sequence in self.running):
            yield from self.settle()
            for slot in reversed(range(len(self.running))):
                if self.running[slot].finished:
                    self._begun = None
                    self.slots.release(slot)

    def abandon(self, keep_rows: bool = True) -> None:
        """Leave all slots idle; nothing of their rows is reused without `keep_rows`, or if a step under way fails."""
        while self._launches:
            try:
                launch = self._launches.popleft()
                if launch.tokens is None:
                    self._drawn(launch)
            except Exception as error:  # nobody wants its tokens
                logger.warning("a step that was given up failed: %s", error, exc_info=error)
                keep_rows = False
        self._begun = None
        while self.running:
            self.slots.release(len(self.running) - 1, keep_rows)

    def _launch_ahead(self) -> None:
        """Launch what the backend may run before a token of it is read; at least one step where none is under way."""
        while True:
            now = self._outlook()
            self._begin(now)
            if len(self._launches) > self._runner.backend.steps_ahead:
                return
            if self._launches and self._waits_for_tokens(now):
                for launch in self._launches:  # their text is read later
                    self._know(launch)
                now = self._outlook()
            if not now.going or (self._launches and not now.may_follow):
                return
            self._launch(now)

    def _outlook(self) -> _Outlook:
        running, drafter = self.running, self._drafter
        going: list[DecodingSequence] = []
        ruled = raw = needed = shown = False
        for each in running:
            if each.finished:
                continue
            shown = shown or each.logprobs is not None or each.is_unproven or each.is_suspicious
            if not each.is_over:
                going.append(each)
                ruled = ruled or each.rules is not None
                raw = raw or (each.logprobs is not None and each.sampling.penalizes)
                needed = needed or each.least < each.wanted
        room = min([each.room - each.most for each in running], default=0)  # slots go along until they are left
        rests = drafter.rest > 0 and not raw and drafter.rests_as == (len(running), ruled)
        asked = (ruled or drafter.drafts) and not raw and not rests
        return _Outlook(going, ruled, raw, room, room > 0 and needed and not shown, asked, rests)

    def _begin(self, now: _Outlook) -> None:
        """Where rules have to know the tokens under way before the next one is chosen, enqueue the forward pass behind
        them now, which needs them on the device alone; unless it is likely that no plain step comes next."""
        batch, waits = len(self.running), now.ruled and self._begun is None and self._runner.backend.steps_ahead > 0
        if not waits or not self._launches or not now.may_follow:
            return
        if not now.asked or not self._drafter.expects_round(batch, self._waited):
            self._begun = self._runner.begin(batch)

    def _waits_for_tokens(self, now: _Outlook) -> bool:
        """Whether what is launched next depends on tokens that are under way: rules on them, or a draft of what follows
        them that promises more than a step behind them."""
        if now.ruled or not now.asked or not self._drafter.looks_up:
            return now.ruled
        latest = self._launches[-1]
        if latest.trees is not None and latest.tokens is None:
            return self._drafter.goes_on(len(self.running), self._idle)
        if latest.is_prefill and latest.tokens is None:
            self._look_up(now)  # it takes longer than a step
        return self._drafter.promises(self._runner, self.running, now.room)

    def _look_up(self, now: _Outlook) -> None:
        """Ask what was said behind the tokens that are known, now that the device has what to do: what is found
        is given when the steps under way are done, if their tokens are among it."""
        if not now.ruled and now.asked and any(each.least < each.wanted for each in now.going):
            self._drafter.look_up(self._runner, self.running, now.room)

    def _drawn(self, launch: _Launch) -> list[list[int]]:
        """Wait for the tokens of a launch, each slot's, whether its sequence wants them or not."""
        found = launch.wait()
        tokens = found if isinstance(found, list) else [[token] if token >= 0 else [] for token in found.tolist()]
        for slot, emitted in zip(launch.slots, tokens, strict=True):
            self.running[slot].drawn += emitted
        return tokens

    def _know(self, launch: _Launch) -> list[list[int]]:
        """The tokens of a launch, waited for; sequences know them from now on."""
        if launch.tokens is None:
            began, tokens = time.perf_counter(), self._drawn(launch)
            launch.tokens, launch.read = tokens, time.perf_counter()
            launch.blocked = launch.read - began
            plan = launch.plan
            for slot, emitted in zip(launch.slots, tokens, strict=True):
                sequence = self.running[slot]
                if sequence.finished or not emitted:
                    continue
                if plan is not None:
                    sequence.most += len(emitted) - plan.longest
                    sequence.least += len(emitted) - 1
                sequence.know(emitted)
        return launch.tokens

    def _launch(self, now: _Outlook) -> None:
        seconds = time.perf_counter()  # what the host takes to choose belongs to the step
        batch, plan, trees = len(self.running), None, None
        begun, self._begun = self._begun, None
        known = all(launch.tokens is not None for launch in self._launches)
        waited = known and begun is None and self._runner.backend.steps_ahead > 0
        if now.asked:
            asked = self._runner, self.running, now.room, now.ruled, known, begun is not None, waited
            plan, trees = self._drafter.choose(*asked)
        elif now.rests:
            self._drafter.rest -= 1
        rules = StepMasks(self.running) if now.ruled else None
        if self._launches and known:
            self._notice_waiting(time.perf_counter() - self._launches[-1].read, rules is not None)
        wait: Callable[[], np.ndarray | list[list[int]]]
        if plan is None:
            wait = self._runner.decode(batch, rules, begun).wait
        else:
            wait = self._runner.round(batch, plan, rules, trees).wait
        kind = now.ruled, waited and plan is None, now.asked, now.rests
        self._launches.append(_Launch(wait, range(batch), plan, False, seconds, trees, *kind))
        for sequence in self.running:
            sequence.least += 1
            sequence.most += 1 if plan is None else plan.longest

    def _notice_waiting(self, seconds: float, ruled: bool) -> None:
        """The host has taken so long from the latest tokens to the launch of what follows them."""
        if ruled:
            self._waited += _PACE * (seconds - self._waited)
        elif self._launches[-1].trees is not None:
            self._idled += 1
            self._idle += max(_PACE, 1.0 / self._idled) * (seconds - self._idle)

    def _read(self) -> Iterator[EmittedToken]:
        """Take the tokens of the oldest launch."""
        launch = self._launches.popleft()
        tokens, now = self._know(launch), launch.read
        began = launch.seconds if launch.is_prefill else self._last_read
        seconds, self._last_read = now - max(began, self._last_read), now
        plan, counts = launch.plan, [len(emitted) for emitted in tokens if emitted]
        if launch.asked and counts:
            self._drafter.record(plan, counts, seconds, launch.ruled, launch.waited, launch.blocked)
        elif launch.rests:
            self._drafter.rested_steps += 1
            self._drafter.rested_seconds += seconds
        for slot, emitted in zip(launch.slots, tokens, strict=True):
            sequence = self.running[slot]
            if sequence.finished or not emitted:
                continue
            if sequence.tally is not None and not launch.is_prefill:
                drafted = None if launch.trees is None else len(launch.trees[slot].tokens)
                sequence.tally.step(plan, seconds, drafted)
            sequence.clock.step(now)
            logprobs: list[TokenLogprobs | None] = [None] * len(emitted)
            # Rows without a number give the id 0; their logits are there as long as no step follows: none is launched
            # then until the next token is there, which has the id 0 too where its row has no number.
            is_zero = 0 in emitted
            sequence.is_suspicious = is_zero and bool(self._launches)
            if sequence.logprobs is not None or sequence.is_unproven or (is_zero and not self._launches):
                of_round, base = self._runner.logits, self._runner.base
                logits = base.logits(slot)[np.newaxis] if plan is None else of_round(slot, len(emitted))
                if sequence.is_unproven:
                    try:
                        self.slots.prove(slot, logits)
                    except SnapshotError as error:
                        sequence.failure = error
                        continue
                if not np.isfinite(logits.max()):
                    sequence.failure = _not_finite()
                    continue
                if sequence.logprobs is not None:
                    logprobs = [*token_logprobs(logits, emitted, sequence.logprobs)]
            for place, token in enumerate(emitted, 1):
                try:
                    text = sequence.take(token)
                except Exception as error:  # the others go on
                    sequence.failure = error
                    break
                if sequence.tally is not None and not launch.is_prefill:
                    sequence.tally.token()
                logprob = logprobs[place - 1]
                if logprob is not None:
                    sequence.token_logprobs.append(logprob)
                from_draft = plan is not None and place < len(emitted)
                yield EmittedToken(sequence, token, text, from_draft, logprob)
                if sequence.finished:
                    break


def _not_finite() -> EngineError:
    return EngineError(
        "the model's logits behind this text are infinite or NaN. Build the model for bfloat16 (--dtype bfloat16), "
        "which has the range of float32; where it is so then, take another release of the model"
    )


def token_logprobs(logits: np.ndarray, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What is known of each token, drawn from a row of `logits` [n, V] float32 (forbidden ones -inf), and of the `top`
    likeliest (ties: the lower id)."""
    found = []
    for row, token in zip(logits.astype(np.float64), token_ids, strict=True):
        largest = row.max()
        values = row - (largest + np.log(np.exp(row - largest).sum()))
        likeliest: np.ndarray = np.empty(0, np.int64)
        if top:
            least = np.partition(values, -top)[-top] if top < len(values) else values.min()
            candidates = np.flatnonzero((values >= least) & (values > -np.inf))
            likeliest = candidates[np.argsort(-values[candidates], kind="stable")][:top]
        pairs = tuple((int(each), float(values[each])) for each in likeliest)
        found.append(TokenLogprobs(int(token), float(values[token]), pairs))
    return found
