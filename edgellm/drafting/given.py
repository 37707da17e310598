"""Drafts without a model: tokens that rules force, and what followed the last time that these tokens were said.

They cost the host some microseconds, and the device the verification alone. A round of them, or of them beside a draft
model's in one tree, is taken where it is expected to give more tokens a second than what is done otherwise. What
candidates promise follows from the tokens that came, whichever step gave them; what rounds cost from finished ones.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, Protocol

from edgellm.drafting.choosers import PlanChooser
from edgellm.drafting.controller import DraftingReport, Forecast
from edgellm.drafting.costs import PLAIN
from edgellm.drafting.said import NOTHING, Drafted, Said, allowed, chain_of, cut
from edgellm.drafting.worth import WAITED, Proposed, Rates, Trust, rate_name
from edgellm.engines.errors import ConstraintError
from edgellm.engines.model.limits import GIVEN_TREES
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal

#: Nodes of the trees, the root included: where every shape is captured, and where any is computed at once.
CAPTURED_TREES, COMPUTED_TREES = GIVEN_TREES, (3, 5, 8, 12, 16, 24, 32)
#: A first guess of a round's time over a plain step's: of the round, and of each of its tokens.
CAPTURED_COST, COMPUTED_COST = (1.1, 0.005), (1.4, 0.07)
#: The most given candidates of joint trees, and a first guess of what each adds to the draft model's rounds.
CAPTURED_JOINT, COMPUTED_JOINT = (7,), (3, 7)
CAPTURED_JOINT_COST, COMPUTED_JOINT_COST = 0.005, 0.03
#: Rounds of a tree that are not timed: the first meets cold caches.
WARM_UPS = 1
#: The most candidates below one token.
WIDTH = 3
#: A round must promise so many times the tokens a second of what is done otherwise.
GAIN = 1.15
#: So many times, of a joint round: where the given candidates do not come it still gives what the draft model proposes.
JOINT_GAIN = 1.05
#: After so many rounds one step is taken without, so that what they are compared with stays known as load changes.
MOST_ROUNDS = 50
#: Under rules, after so many steps that were waited for in vain the next ones begin early, until one was missed.
MOST_IN_VAIN = 2
#: How quickly the share of steps under rules that could have been rounds follows what is seen.
_PACE = 0.05
#: Where what the index proposed was not worth a round, it is asked again after so many tokens at the most.
MOST_PATIENCE = 15
#: Candidates that are less likely are left out.
LEAST_CHANCE = 0.02
#: How likely a forced token is: the text is forced, but other tokens may spell it.
FORCED_CHANCE = 0.97


class Runs(Protocol):
    """The runner, as far as it matters here."""

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Whether a round of the plan can run now, under rules or not."""


class Proposer(Protocol):
    """Proposes what may follow a sequence that it knows: `SuffixIndex`, which says what each of these does."""

    def open(self, prompt_tokens: Sequence[int]) -> Any:
        """A sequence with this prompt."""

    def extend(self, sequence: Any, tokens: Sequence[int]) -> None:
        """Take note of its tokens."""

    def close(self, sequence: Any) -> None:
        """It has ended."""

    def propose(self, sequence: Any, nodes: int, depth: int, width: int, least: float = 0.0) -> Proposal:
        """A tree of what may follow."""


class GivenDrafting:
    """Proposes what the host knows, and chooses between rounds of it and what is done otherwise.

    Tokens that rules force are always proposed; an `index` of what was said is asked where there is one. `deepest` is
    the most candidates that the engines take one after the other, `captured` whether they take only some shapes, which
    are captured. What `chooser` would take of a draft model is joined with given candidates in one tree of at most
    `most_nodes`. Deterministic but for the seconds that it is told.
    """

    def __init__(
        self,
        deepest: int,
        captured: bool,
        index: Proposer | None = None,
        chooser: PlanChooser | None = None,
        most_nodes: int = 0,
    ) -> None:
        self.index, self._chooser = index, chooser
        counts = CAPTURED_JOINT if captured else COMPUTED_JOINT
        self._joint_cost = CAPTURED_JOINT_COST if captured else COMPUTED_JOINT_COST
        self._joined: Callable[[DraftPlan], tuple[DraftPlan, ...]] = cache(
            lambda plan: tuple(plan.joined(count, min(count, deepest), most_nodes) for count in counts)
        )
        sizes = CAPTURED_TREES if captured else COMPUTED_TREES
        self.plans = tuple(given(nodes - 1, min(nodes - 1, deepest)) for nodes in sizes)
        self._first_cost = CAPTURED_COST if captured else COMPUTED_COST
        self._rates: dict[tuple[int, bool], Rates] = {}
        #: The plans of given candidates alone: each with its name and places, by size.
        self._own = [(plan, plan.name, plan.given_nodes) for plan in self.plans]
        self._trust = Trust()
        #: Seconds that the index took since the latest step ended, and before that since the one before.
        self._asking, self._asked_before = 0.0, 0.0
        self._lessons: list[tuple[Proposed, Sequence[int]]] = []  # learned when the next step is under way
        #: Of the rounds under way, in order, whether the index proposed what was given.
        self._indexed: deque[bool] = deque()
        self._rounds: dict[str, int] = {}
        self._latest: tuple[Forecast, Forecast] | None = None
        #: How many tokens the latest sequence to end was let go for at last, without rules and with.
        self._patience = [0, 0]
        #: Without rules: whether a round is under way, whether its tokens are known and what follows was not looked at,
        #: and how often another round was best then.
        self._under_way, self._ended, self._again = False, False, 0.5
        #: Under rules: how often a round was best, behind a plain step and behind a round; whether the latest step was
        #: one, or an answer has begun; whether it could have been, but had begun as a plain one; and how many steps
        #: were waited for since a round was best.
        self._shares, self._was_round, self._missed, self._in_vain = [0.5, 0.5], False, False, 0

    @property
    def joint_plans(self) -> list[DraftPlan]:
        """The joint plans of all that the draft model may propose."""
        own = () if self._chooser is None else self._chooser.plans
        return [plan for each in own for plan in self._joined(each)]

    @property
    def looks_up(self) -> bool:
        """Whether there is an index to ask."""
        return self.index is not None

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        """A sequence begins."""
        if self.index is not None:
            sequence.said = Said(self.index.open(prompt_ids))
            sequence.said.patience = self._patience[sequence.constraint is not None] // 2
            self._under_way = self._ended = False
        self._indexed.clear()  # no round is under way
        if sequence.constraint is not None:
            self._was_round, self._in_vain = True, 0  # answers often begin with what is forced

    def take(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        """A sequence said these tokens, by whichever step. What was proposed behind them stays proposed."""
        said = sequence.said
        if said is None or not tokens:
            return
        if said.proposed is not None and said.proposed.kinds:
            self._lessons.append((said.proposed, tokens))
            said.proposed = said.proposed.behind(tokens)
        else:
            said.proposed = None
        said.news += tokens
        said.quiet -= len(tokens)
        self._ended, self._under_way = self._ended or self._under_way, False

    def close(self, sequence: Drafted) -> None:
        """A sequence has ended: later ones may say what it said."""
        said, sequence.said = sequence.said, None
        if said is not None and self.index is not None:
            self._patience[sequence.constraint is not None] = said.patience
            self._tell(said)
            self.index.close(said.history)

    def choose(
        self, runner: Runs, sequences: Sequence[Drafted], room: int, begun: bool = False, waited: bool = False
    ) -> tuple[DraftPlan, list[GivenTree]] | None:
        """The best round of given candidates for sequences in the leading slots, all of whose tokens are known and none
        of which takes more than `room` tokens; None where something else is better, there is nothing to propose, or a
        plain step has `begun`. `waited` says whether the device has nothing to do meanwhile: then the index is asked
        behind a round alone, and not under rules, where more is likely to be forced."""
        ruled = any(sequence.constraint is not None for sequence in sequences)
        rates = self._rates.get((len(sequences), ruled))
        if rates is None or not (ruled or (self.index is not None and rates.affords)):
            return None
        asks = not waited or (self._ended and not ruled)
        found, best = self._asked(runner, rates, sequences, room, asks, waited)
        if ruled:
            self._shares[self._was_round] += _PACE * ((best is not None) - self._shares[self._was_round])
            self._was_round, self._missed = best is not None and not begun, best is not None and begun
            self._in_vain = 0 if best is not None else self._in_vain + (not begun)
        else:
            self._under_way = best is not None
        if best is None or begun:
            return None
        self._indexed.append(any(each.kinds for each in found))
        return best, [cut(each.tree, best) for each in found]

    def expects_round(self, batch: int, waits: float) -> bool:
        """Whether a round is so likely to be the next step under rules that nothing should begin before the host knows
        the tokens under way, though the device `waits` so many seconds for it then. A plain step that begins in a
        round's place draws the first token of what would have been given; the rest is given in the step behind it."""
        rates = self._rates.get((batch, True))
        if self._missed or rates is None:
            return self._missed
        if rates.rounds >= MOST_ROUNDS or self._in_vain >= MOST_IN_VAIN:
            return False
        return rates.waits_for(self._shares[self._was_round], waits)

    def goes_on(self, batch: int, waits: float) -> bool:
        """Whether another round is so likely to follow the one under way, and worth so much, that no plain step should
        be launched behind it, though the device `waits` so many seconds for the host then."""
        rates = self._rates.get((batch, False))
        if rates is None or not rates.affords or rates.rounds >= MOST_ROUNDS:
            return False
        return rates.waits_for(self._again, waits)

    def promises(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> bool:
        """Whether a round should follow the plain step that is under way, so that its tokens are worth waiting for: it
        is taken if they are among what is proposed. Nothing is asked but behind a round, when something is likely."""
        rates = self._rates.get((len(sequences), False))
        if self.index is None or rates is None or not rates.affords:
            return False
        asks = self._ended
        if not asks and not any(each.said is not None and each.said.proposed for each in sequences):
            return False
        return self._asked(runner, rates, sequences, room, asks, False, True)[1] is not None

    def look_up(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> None:
        """Ask the index what follows the tokens that are known, where it is time to: while the device computes what was
        launched already."""
        rates = self._rates.get((len(sequences), False))
        if self.index is None or rates is None or not rates.affords:
            return
        if any(each.said is not None and each.said.is_due for each in sequences):
            self._asked(runner, rates, sequences, room, True, False, True)

    def _asked(
        self,
        runner: Runs,
        rates: Rates,
        sequences: Sequence[Drafted],
        room: int,
        asks: bool,
        waited: bool,
        ahead: bool = False,
    ) -> tuple[list[Proposed], DraftPlan | None]:
        """What is proposed for each sequence, and the best round of it: now, where the device may have `waited` for the
        host, or with `ahead` behind a step that is under way."""
        found = [self._proposed(sequence, room - 1, asks and rates.affords) for sequence in sequences]
        ruled = any(sequence.constraint is not None for sequence in sequences)
        best = self._best(runner, rates, found, room, waited, ahead, ruled)
        if best is None:
            self._ask_less(sequences)
        else:
            for sequence in sequences:
                if sequence.said is not None:
                    sequence.said.patience, sequence.said.was_asked = 0, False
        if self._ended and asks:
            self._again += 2 * _PACE * ((best is not None) - self._again)
            self._ended = False
        return found, best

    def record(
        self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, ruled: bool = False, waited: bool = False
    ) -> None:
        """A step has ended that gave each running sequence so many tokens, under rules or not; see
        `PlanChooser.record`. `waited` says whether the device did until the host had chosen it."""
        for lesson in self._lessons:
            self._trust.learn(*lesson)
        self._lessons.clear()
        taken = plan if plan is not None and plan.takes_given else None
        name = PLAIN if taken is None else taken.name
        self._rounds[name] = self._rounds.get(name, 0) + 1
        key, asked = (len(emitted), ruled), self._asking + self._asked_before
        self._asking, self._asked_before = 0.0, self._asking
        rates, seconds = self._rates.get(key), max(seconds, 1e-9)
        indexed = self._indexed.popleft() if taken is not None and self._indexed else True
        if rates is not None:
            rates.record(taken, emitted, seconds, waited, asked, indexed)
        elif taken is None:
            self._rates[key] = Rates(self._guesses(len(emitted), seconds), sum(emitted), WARM_UPS)

    def report(self) -> DraftingReport:
        """What was chosen so far, and the forecasts of the latest choice between a round and what is done otherwise."""
        forecasts = sorted(self._latest or (), key=lambda forecast: -forecast.tokens_per_second)
        words = [f"{each.name}: {each.tokens:.2f} tokens in {each.seconds * 1000:.2f} ms" for each in forecasts]
        reason = "; ".join(words) or "nothing was said before"
        chosen = forecasts[0].name if forecasts else "plain"
        return DraftingReport(chosen, reason, dict(self._rounds), 0, self._trust.shares(), forecasts)

    def _best(
        self, runner: Runs, rates: Rates, found: Sequence[Proposed], room: int, waited: bool, ahead: bool, ruled: bool
    ) -> DraftPlan | None:
        batch, longest = len(found), max([len(each.chances) for each in found])
        if not longest or rates.rounds >= MOST_ROUNDS:
            return None
        other = rates.other()  # a draft model's rounds count there, too
        if ahead:  # a round comes if the step under way draws a candidate; else the device will have waited in vain
            firsts = [each.first for each in found]
            misses = math.prod([1.0 - first for first in firsts])
            share, spent, before = 1.0 - misses, misses * rates.waiting, (1.0 - misses) * batch - sum(firsts)
        else:  # a plain step would be behind the same waiting, so that a round is charged with the rest alone
            share, spent, before = 1.0, -rates.waiting if waited else 0.0, float(batch)
        ranked: list[tuple[float, DraftPlan, float, float]] = []
        least = GAIN * other.tokens_per_second
        for plan, name, nodes in self._own:
            if plan.longest <= room:
                tokens, seconds = before + sum([each.expected(nodes + ahead) for each in found]), rates.seconds(name)
                charged = max(0.5 * share * seconds, share * seconds + spent)
                ranked.append((tokens / charged - least, plan, tokens, charged))
            if longest <= nodes + ahead:
                break
        beside = None if self._chooser is None else self._chooser.likely(room, batch)
        for plan in () if beside is None else self._joined(beside):
            if plan.longest <= room:
                tokens, seconds = rates.joined(plan, found), rates.seconds(rate_name(plan))
                margin = tokens / seconds - JOINT_GAIN * other.tokens_per_second
                ranked.append((margin, plan, tokens, seconds))
            if longest <= plan.given_nodes:
                break
        ranked.sort(key=itemgetter(0), reverse=True)
        for margin, plan, tokens, seconds in ranked:
            if runner.takes_given(batch, plan, ruled):
                self._latest = other, Forecast(plan.name, tokens, seconds, tokens / seconds)
                if plan.is_joint:
                    rates.promise(tokens)
                return plan if margin > 0.0 else None
        return None

    def _proposed(self, sequence: Drafted, most: int, asks: bool) -> Proposed:
        """What may follow the tokens of a sequence that are known, the likeliest first: of what rules force, `most`."""
        constraint, said = sequence.constraint, sequence.said
        if most < 1 or sequence.is_over or sequence.finished:
            return NOTHING
        forced: list[int] = []
        if constraint is not None:
            try:
                forced = constraint.forced(min(most, self.plans[-1].steps))
            except ConstraintError:
                return NOTHING  # whoever asks for the mask hears of it
        if forced:
            return Proposed.of(chain_of(forced, True), [FORCED_CHANCE**depth for depth in range(len(forced))])
        if said is None or self.index is None:
            return NOTHING
        if asks and said.is_due:
            began = time.perf_counter()
            self._tell(said)
            largest = self.plans[-1]
            found = self.index.propose(said.history, largest.top_k, largest.steps, WIDTH, LEAST_CHANCE)
            said.proposed = self._trust.weighed(found if constraint is None else allowed(constraint, found))
            said.whole, said.was_asked = len(found.tokens), True
            self._asking += time.perf_counter() - began
        return said.proposed or NOTHING

    def _ask_less(self, sequences: Sequence[Drafted]) -> None:
        """What the index proposed was not worth a round: let more and more tokens go before it is asked again."""
        for sequence in sequences:
            said = sequence.said
            if said is not None and said.was_asked:
                said.patience = min(2 * said.patience + 1, MOST_PATIENCE)
                said.quiet, said.was_asked = said.patience, False

    def _tell(self, said: Said) -> None:
        """Let the index know the tokens that it does not know yet."""
        if said.news and self.index is not None:
            self.index.extend(said.history, said.news)
            said.news = []

    def _guesses(self, batch: int, seconds: float) -> Mapping[str, float]:
        """Seconds of the steps of a batch, one of which took `seconds`, before rounds were timed: those of given
        candidates alone need no draft model, and cost what plain steps do."""
        once, each = self._first_cost
        plain = (None if self._chooser is None else self._chooser.plain_seconds(batch)) or seconds
        guessed = {PLAIN: seconds, WAITED: seconds}
        guessed |= {rate_name(plan): plain * (once + each * batch * plan.tree_size) for plan in self.plans}
        return guessed | {
            rate_name(plan): seconds * (1.0 + self._joint_cost * batch * plan.given_nodes) for plan in self.joint_plans
        }
