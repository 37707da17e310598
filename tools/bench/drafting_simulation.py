"""Drafting without a model: known texts are played back through the decoding loop on a clock that devices move.

The loop, the drafter and the index of what was said are the real ones. What is played is the device: a step takes what
`Device` says, and gives the tokens of a known text. How far a draft model comes at each place of it is drawn once for
the text, so that every way to draft meets the same. `tools.bench.drafting_workloads` prints a table of many workloads.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.drafting.acceptance import tree_gain
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree

#: Of the chances that a guess of the draft model is right, what a level has of the level before.
DEEPER = 0.97
#: How much two rounds of the same plan differ (a standard deviation, as a share), and one in so many is interrupted.
NOISE, INTERRUPTED = 0.02, 2000


class Device(NamedTuple):
    """What steps take: a plain one so many seconds, a round over it `once`, `level` for each that a draft model
    proposes, `node` for each token that is verified, and `again` for each 64 of these beyond the first 64; `more` for
    each further sequence of a plain step. The host takes `host` seconds from a token to the next launch, and `ask`
    seconds to ask the index; steps are launched `ahead` of what was read. Plans differ by up to `uneven` from that.
    With a draft model loaded a plain step takes `upkeep` more. The learner takes the host `think` seconds to choose,
    the same to take note, and `rate` more to rate a draft model's plans anew."""

    name: str
    plain: float
    once: float
    level: float
    node: float
    more: float = 0.02
    host: float = 6e-5
    ask: float = 4e-5
    ahead: int = 1
    uneven: float = 0.08
    upkeep: float = 0.0
    think: float = 0.0
    rate: float = 0.0
    cold: int = 0
    again: float = 1.5

    def seconds(self, plan: DraftPlan | None, batch: int, drafts: bool) -> float:
        """Of a step, without noise."""
        plain = self.plain * (1.0 + self.more * (batch - 1))
        if plan is None:
            return plain * (1.0 + self.upkeep * drafts)
        levels = 0 if plan.is_given else plan.steps
        uneven = 1.0 + self.uneven * (2.0 * random.Random(f"{self.name} {plan.name}").random() - 1.0)
        more = self.once - 1.0 + self.level * levels + self.node * batch * (plan.tree_size - 1)
        more += self.again * max(0.0, batch * plan.tree_size / 64 - 1.0)
        return plain + more * self.plain * uneven


#: 1B shapes in fp16 on an H200; the same as an Orin has bandwidth and arithmetic, in fp16 and in int4 with a draft in
#: fp16 (2026-11-28-h200-boards.md.xz); the shipped model on two cores (2026-11-28-cpu-learner.md.xz), and on an H200,
#: where the host takes as long as a plain step (2026-11-29-h200-proofs.md.xz) and what the learner takes is not hidden;
#: SmolLM2 with the head of 2026-11-29-h200-head-training.md.xz there, as 2026-11-30-h200-forms.md.xz has it; of
#: more than 64 rows 2026-12-01-h200-slots.md has what they take.
H200 = Device("H200", 0.775e-3, 1.1, 0.155, 0.010)
ORIN = Device("Orin", 7.0e-3, 1.05, 0.105, 0.009, host=1.5e-4, ask=1e-4)
INT4 = Device("Orin int4", 3.4e-3, 1.35, 0.25, 0.03, host=1.5e-4, ask=1e-4)
CPU = Device("NumPy", 2.65e-3, 2.6, 0.2, 0.09, more=0.5, host=1e-4, ask=1e-4, ahead=0, again=0.0)
SHIPPED = Device("H200 shipped", 0.13e-3, 1.4, 0.16, 0.03, host=1.15e-4, think=2e-5, rate=5e-5, cold=8)
SMOLLM2 = Device("H200 SmolLM2", 0.45e-3, 1.57, 0.055, 0.033, host=1.15e-4, think=2e-5, rate=5e-5, cold=8)


@dataclass
class Text:
    """A prompt and an answer in tokens. `head[t]` is the chance that a chain's first guess of token t is right, and
    `luck[t]` what it must exceed; `forced[t]` whether rules leave that token alone. Without `rules` none are."""

    prompt: list[int]
    answer: list[int]
    head: list[float]
    luck: list[float]
    forced: list[bool] | None = None

    def reached(self, place: int, plan: DraftPlan) -> int:
        """How many tokens behind a place a round of the draft model guesses."""
        gain = 1.0 if plan.kind == "chain" else tree_gain(plan.tree_size - 1, plan.steps)
        count = 0
        while count < plan.steps and place + count < len(self.answer):
            miss = (1.0 - self.head[place + count] * DEEPER**count) ** gain
            if self.luck[place + count] < miss:
                break
            count += 1
        return count

    def followed(self, place: int, tree: GivenTree) -> int:
        """How many tokens behind a place are a path of given candidates."""
        node = -1
        for count, token in enumerate(self.answer[place:]):
            children = zip(tree.tokens, tree.parents, strict=True)
            found = [n for n, (each, parent) in enumerate(children) if parent == node and each == token]
            if not found:
                return count
            node = found[0]
        return len(self.answer) - place

    def round(self, place: int, plan: DraftPlan | None, tree: GivenTree | None) -> int:
        """How many tokens a step gives at a place."""
        if plan is None:
            return 1
        count = self.followed(place, tree) if tree is not None and plan.is_given else self.reached(place, plan)
        return min(1 + count, len(self.answer) - place)


@dataclass
class Forcing:
    """As `TokenConstraint` has it: rules that leave some tokens alone."""

    text: Text
    place: int = 0

    def forced(self, most: int) -> list[int]:
        """The tokens that come next, as far as there is no choice."""
        found: list[int] = []
        while len(found) < most and self.place + len(found) < len(self.text.answer):
            if not self.text.forced or not self.text.forced[self.place + len(found)]:
                break
            found.append(self.text.answer[self.place + len(found)])
        return found

    def try_advance(self, token: int) -> bool:
        """Whether the token may come; candidates of the index may wherever there is a choice."""
        self.place += 1
        return True

    def rollback(self, count: int) -> None:
        """Take tokens back."""
        self.place -= count

    def is_free(self) -> bool:
        """Whether all tokens may come."""
        return False


@dataclass
class Answering:
    """What `DecodingSequence` needs of its `OutputText`."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    wanted: int = 0

    @property
    def token_count(self) -> int:
        """Of the tokens so far."""
        return len(self.token_ids)

    def ends_at(self, token: int) -> bool:
        """Nothing but its length ends it."""
        return False

    def push(self, token: int) -> str:
        """Take a token."""
        self.token_ids.append(token)
        if len(self.token_ids) == self.wanted:
            self.finish_reason = "length"
        return ""


class Simulated:
    """A device at work, as runner and slot table that the loop takes, with its clock: `now` is the host's."""

    def __init__(self, device: Device, drafts: bool, seed: int = 0) -> None:
        self.device, self._drafts, self.now, self._free = device, drafts, 0.0, 0.0
        self.running: list[DecodingSequence] = []
        self.runner, self.planned, self.drafter = self, {}, None
        self.backend = SimpleNamespace(steps_ahead=device.ahead, computes_at_once=not device.ahead)
        self._texts: dict[int, Text] = {}
        self._places: dict[int, int] = {}
        self._random, self._cold = random.Random(seed), device.cold
        #: Seconds that steps took beyond what they take, which no way to draft can help.
        self.noise = 0.0

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """All trees are verified."""
        return True

    def is_ready(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Everything is captured."""
        return True

    def admit(self, text: Text, opened: Callable[[DecodingSequence], None]) -> None:
        """A sequence begins, behind its first token, which the prompt has given."""
        sequence = DecodingSequence(text.prompt, SamplingValues(), Answering(wanted=len(text.answer)))  # type: ignore[arg-type]
        sequence.room = sequence.wanted = len(text.answer)
        if text.forced is not None:
            sequence.rules = SimpleNamespace(constraint=Forcing(text))  # type: ignore[assignment]
        opened(sequence)
        self._texts[id(sequence)], self._places[id(sequence)] = text, 0
        self.running.append(sequence)

    def begin(self, batch: int) -> Any:
        """The forward pass of a plain step."""
        self._compute(self.device.seconds(None, batch, self._drafts))
        return True

    def decode(self, batch: int, rules: Any = None, begun: Any = None) -> Any:
        """See `DecodingRunner.decode`."""
        return self.round(batch, None, rules, None, begun)

    def round(self, batch: int, plan: Any, rules: Any = None, trees: Any = None, begun: Any = None) -> Any:
        """See `DecodingRunner.round`; without a plan a plain step."""
        self.now += self.device.host
        if begun is None:
            self._compute(self.device.seconds(plan, batch, self._drafts))
        ended, tokens = max(self._free, self.now), []
        for slot, sequence in enumerate(self.running[:batch]):
            text, place = self._texts[id(sequence)], self._places[id(sequence)]
            count = text.round(place, plan, None if trees is None else trees[slot])
            tokens.append(text.answer[place : place + count] or [1])
            self._places[id(sequence)] = place + count

        def wait() -> list[list[int]]:
            self.now = max(self.now, ended)
            return tokens

        if not self.device.ahead:
            wait()
        return SimpleNamespace(wait=wait)

    def release(self, slot: int, keep_rows: bool = True) -> None:
        """A sequence has ended; the last one takes its slot."""
        sequence, last = self.running[slot], self.running.pop()
        if sequence is not last:
            self.running[slot] = last
        self.ended(sequence)

    def ended(self, sequence: DecodingSequence) -> None:
        """Replaced by what lets a drafter know."""

    def _compute(self, seconds: float) -> None:
        noise = math.exp(NOISE * self._random.gauss(0.0, 1.0)) - 1.0
        noise += 4.0 * (self._random.random() < 1.0 / INTERRUPTED)
        if self._cold:
            self._cold, noise = self._cold - 1, 0.6 if self._random.random() < 0.75 else 3.0
        self._free, self.noise = max(self._free, self.now) + seconds * (1.0 + noise), self.noise + seconds * noise


@contextmanager
def clock_of(simulated: Simulated) -> Iterator[None]:
    """All clocks show what the simulated host's does."""
    real = time.perf_counter
    time.perf_counter = lambda: simulated.now
    try:
        yield
    finally:
        time.perf_counter = real


def played(
    simulated: Simulated, loop: DecodingLoop, answers: Sequence[Sequence[Text]], opened: Any
) -> list[list[float]]:
    """The decode seconds until each token of each sequence of a batch, over answers one after the other; the noise,
    which the drafter meets, is left out."""
    found: list[list[float]] = [[] for _ in answers[0]]
    with clock_of(simulated):
        for batch in answers:
            for text in batch:
                simulated.admit(text, opened)
            began, spent = simulated.now - simulated.noise, [each[-1] if each else 0.0 for each in found]
            places = {id(sequence): place for place, sequence in enumerate(simulated.running)}
            while simulated.running:
                for token in loop.advance():
                    place = places[id(token.sequence)]
                    found[place].append(spent[place] + simulated.now - simulated.noise - began)
    return found


def played_fixed(
    device: Device, plan: DraftPlan | None, answers: Sequence[Sequence[Text]], drafts: bool, index: Any = None
) -> list[list[float]]:
    """The same for one plan at every step, shorter at the end, without noise; nothing waits for the host. Of given
    candidates there are rounds wherever the index, or the rules, propose something."""
    found: list[list[float]] = [[] for _ in answers[0]]
    for batch in answers:
        now, spent = 0.0, [each[-1] if each else 0.0 for each in found]
        places, ruled = [0] * len(batch), any(text.forced is not None for text in batch)
        said = [None if index is None else index.open(text.prompt) for text in batch]
        while running := [slot for slot, text in enumerate(batch) if places[slot] < len(text.answer)]:
            taken, trees = plan, [GivenTree([], [])] * len(batch)
            if plan is not None and plan.is_given:
                for slot in running:
                    forced = Forcing(batch[slot], places[slot]).forced(plan.top_k)
                    trees[slot] = GivenTree(forced, range(-1, len(forced) - 1))
                    if not forced and index is not None:
                        proposal = index.propose(said[slot], plan.top_k, plan.steps, 3)
                        trees[slot] = GivenTree(proposal.tokens, proposal.parents)
                taken = plan if any(len(trees[slot].tokens) for slot in running) else None
            seconds = device.seconds(taken, len(running), drafts) + (0.0 if device.ahead else device.host)
            waits = (
                device.host + device.ask if device.ahead and (ruled or (plan is not None and plan.is_given)) else 0.0
            )
            now += max(seconds + waits, device.host)  # tokens are waited for to ask what follows, also in vain
            for slot in running:
                count = batch[slot].round(places[slot], taken, trees[slot] if taken is not None else None)
                if index is not None:
                    index.extend(said[slot], batch[slot].answer[places[slot] : places[slot] + count])
                places[slot] += count
                found[slot] += [spent[slot] + now] * count
        for sequence in said:
            if index is not None:
                index.close(sequence)
    return found
