"""Which plan is taken: plain steps, a draft model's rounds, those of what the host knows, or both in one tree.

One learner rates all by what they should give and what they take: tokens a second of all sequences. What candidates
promise follows from the tokens that came, what rounds take from finished ones. Choices follow from finished steps
alone, never from a draft that is under way, so they cannot bias the output. What steps took over the plain steps that
their tokens would have taken is drawn from an `Account`, without which nothing is drafted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

from edgellm.drafting.drafter import Choice, Policy, first_fitting
from edgellm.drafting.own_plans import MOST_KEPT, REFRESHED, OwnPlans, Step
from edgellm.drafting.proposals import Drafted, HostProposals, Proposed
from edgellm.drafting.ratings import Account, DraftingReport, JointTokens, Option, reported
from edgellm.drafting.seconds import CAPTURED, COMPUTED, PLAIN, Seconds
from edgellm.engines.model.limits import GIVEN_TREES
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex

#: Nodes of the trees of given candidates, the root included, and given candidates of joint ones: where every shape is
#: captured, and where any is computed at once.
CAPTURED_TREES, COMPUTED_TREES = GIVEN_TREES, (3, 5, 8, 12, 16, 24, 32)
CAPTURED_JOINT, COMPUTED_JOINT = (7,), (3, 7)
#: Given candidates, whose promises are the best of many, must promise so many times the tokens a second of what is done
#: otherwise; and so must joint rounds, which give that in any case.
GAIN, JOINT_GAIN = 1.2, 1.05
#: No step counts as having taken so many times longer than expected: it was interrupted.
INTERRUPTED = 1.25
#: After so many rounds of given candidates one step is taken without, so that what they are compared with stays known.
MOST_ROUNDS = 50
#: Under rules, after so many steps that were waited for in vain the next ones begin early, until one was missed.
MOST_IN_VAIN = 2
#: How quickly what is seen is followed: shares of steps that could have been rounds, what rounds save, and what asking
#: takes.
_PACE, _WORTH_PACE, _ASKING_PACE = 0.05, 0.1, 0.1
#: What a round saves over its time, as a first guess.
FIRST_SAVED = 0.5
#: Asking in vain may cost this share of the steps' time, beside the account, and is put off for so many tokens at the
#: most. Where steps run ahead it costs nothing while the host waits for the device behind it, for more than `HIDDEN` of
#: a plain step: what it does itself behind a step takes some 50 us on a slow host, 0.4 of a small model's.
ASKED_SHARE, MOST_PATIENCE, HIDDEN = 0.003, 255, 0.5


class Learner(Policy):
    """Chooses the plan of each step, and the host's candidates for it.

    `own` are the plans of a draft model; where they are not `adaptive` the first that fits is what is done otherwise,
    and not a plain step. Tokens that rules force are always proposed, an `index` of what was said is asked where there
    is one: `deepest` is the most such candidates that the engines take one after the other (0: none), `ahead` whether
    steps are launched ahead, and shapes captured. Joint trees have at most `most_nodes`. `in_one_pass`: the draft model
    proposes all levels at once. Deterministic but for the seconds that it is told.
    """

    def __init__(
        self,
        deepest: int,
        ahead: bool,
        index: SuffixIndex | None = None,
        own: Sequence[DraftPlan] = (),
        adaptive: bool = True,
        most_nodes: int = 0,
        in_one_pass: bool = False,
    ) -> None:
        self.own, self._adaptive, self._ahead = tuple(own), adaptive, ahead
        self.looks_up = index is not None
        self.drafts = self.looks_up or bool(own)
        sizes, counts = (CAPTURED_TREES, CAPTURED_JOINT) if ahead else (COMPUTED_TREES, COMPUTED_JOINT)
        #: The plans of given candidates alone, by size.
        self.given_plans = tuple(given(nodes - 1, min(nodes - 1, deepest)) for nodes in sizes if deepest)
        self._joined: Callable[[DraftPlan], tuple[DraftPlan, ...]] = cache(
            lambda plan: tuple(plan.joined(count, min(count, deepest), most_nodes) for count in counts if deepest)
        )
        beside = (*self.given_plans, *(plan for each in own for plan in self._joined(each)))
        self.plans, self.forced_plans = ((*own, *beside), ()) if self.looks_up else (self.own, beside)
        self.host = HostProposals(max(sizes) - 1, deepest, index)
        self.account = Account()
        guess = CAPTURED if ahead else COMPUTED
        self._guess = guess.in_one_pass() if in_one_pass else guess
        self._times: dict[tuple[int, bool], Seconds] = {}
        self._latest: tuple[int, bool] = (1, False)
        self._best_compared: Option | None = None
        self._since, self._saved = 0, FIRST_SAVED
        self._choice = OwnPlans(own, adaptive, self.account)
        #: Plain steps that were not weighed yet, and their seconds.
        self._plain_steps, self._plain_seconds = 0, 0.0
        self._rounds: Counter[str] = Counter()
        self._joint = JointTokens()
        #: Seconds that asking for candidates took since the latest step ended, what it takes, when it was done, and how
        #: long the host still waits for the device then.
        self._asked_for, self._asking, self._asked_at, self._waits = 0.0, 0.0, 0.0, 0.0
        #: Without rules: whether a round of given candidates is under way, whether its tokens are known and what
        #: follows was not looked at, and how often another round was best then.
        self._under_way, self._ended, self._again = False, False, 0.5
        #: Under rules: how often a round was best, behind a plain step and behind a round; whether the latest step was
        #: one, or an answer has begun; whether it could have been, but had begun as a plain one; and how many steps
        #: were waited for since a round was best.
        self._shares, self._was_round, self._missed, self._in_vain = [0.5, 0.5], False, False, 0

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        self.host.open(sequence, prompt_ids)
        self.account.forget()
        self._under_way = self._ended = False
        if sequence.constraint is not None:
            self._was_round, self._in_vain = True, 0  # answers often begin with what is forced

    def take(self, sequence: Drafted, tokens: Sequence[int]) -> None:
        self.host.take(sequence, tokens)
        self._ended, self._under_way = self._ended or self._under_way, False

    def close(self, sequence: Drafted) -> None:
        self.host.close(sequence)

    def choose(
        self,
        runner: DecodingRunner,
        sequences: Sequence[Drafted],
        room: int,
        ruled: bool,
        known: bool = True,
        begun: bool = False,
        waited: bool = False,
    ) -> Choice:
        """See `Policy`. Where the device has `waited` the index is asked behind a round alone, and not under rules,
        where more is likely to be forced."""
        batch = len(sequences)
        times = self._times.get((batch, ruled))
        if times is None:  # nothing is weighed, or nothing was timed yet
            own = () if begun or self._adaptive else self.own
            return next((p for p in own if p.longest <= room and runner.is_ready(batch, p, ruled)), None), None
        if known and self.given_plans and (ruled or (self.looks_up and self._may_give(sequences))):
            asks = not waited or (self._ended and not ruled)
            found, best = self._asked(runner, sequences, room, ruled, asks, waited)
            if ruled:
                self._shares[self._was_round] += _PACE * ((best is not None) - self._shares[self._was_round])
                self._was_round, self._missed = best is not None and not begun, best is not None and begun
                self._in_vain = 0 if best is not None else self._in_vain + (not begun)
            else:
                self._under_way = best is not None
            if best is not None and not begun:
                self.account.launched(times.risk(best))
                return best, [each.cut(best) for each in found]
        if begun or not self.own:
            return None, None
        if not self._adaptive:
            plan = self._choice.current = first_fitting(self.own, runner, batch, room, ruled)
        else:
            step = Step(runner, batch, room, ruled)
            if not self._choice.keeps(step):
                self._weigh_plain()
                self._choice.decide(step, times)
            plan = self._choice.taken
        if plan is not None:
            self.account.launched(times.risk(plan) if self._adaptive else 0.0)
        return plan, None

    def _may_give(self, sequences: Sequence[Drafted]) -> bool:
        """Whether there is, or may be, something to give without rules."""
        said = [each.said for each in sequences if each.said is not None]
        self._under_way = False
        return (self._ended or any(each.proposed or each.is_due for each in said)) and self._affords

    @property
    def _affords(self) -> bool:
        """Whether rounds of given candidates may be taken, and the index asked."""
        return self.account.trusted > 0.0

    def _asked(
        self,
        runner: DecodingRunner,
        sequences: Sequence[Drafted],
        room: int,
        ruled: bool,
        asks: bool,
        waited: bool,
        ahead: bool = False,
    ) -> tuple[list[Proposed], DraftPlan | None]:
        """What is proposed for each sequence, and the best round of it: now, where the device may have `waited` for the
        host, or with `ahead` behind a step that is under way."""
        began = time.perf_counter()
        times = self._times[len(sequences), ruled]
        most = int(self._asking / (ASKED_SHARE * times.plain))
        patience = 0 if self._is_hidden(times) else min(MOST_PATIENCE, most)
        quiet = patience if asks and self._affords else None
        found = [self.host.proposed(sequence, room - 1, quiet) for sequence in sequences]
        best = self._best_given(runner, found, room, waited, ahead, ruled)
        for sequence in sequences if best is not None else ():
            if sequence.said is not None:
                sequence.said.quiet = sequence.said.patience = 0
        if self._ended and asks:
            self._again += 2 * _PACE * ((best is not None) - self._again)
            self._ended = False
        self._asked_at = time.perf_counter()
        self._asked_for += self._asked_at - began
        return found, best

    def _is_hidden(self, times: Seconds) -> bool:
        """Whether the device works for longer than the host asks."""
        return self._ahead and self._waits > HIDDEN * times.plain

    def _best_given(
        self, runner: DecodingRunner, found: Sequence[Proposed], room: int, waited: bool, ahead: bool, ruled: bool
    ) -> DraftPlan | None:
        batch, longest = len(found), max([len(each.chances) for each in found])
        if not longest or self._since >= MOST_ROUNDS:
            return None
        times = self._times[batch, ruled]
        other = self._choice.otherwise(Step(runner, batch, room, ruled), times)
        misses = math.prod([1.0 - each.first for each in found])
        if ahead:  # a round comes if the step under way draws a candidate; else the device will have waited in vain
            share, spent = 1.0 - misses, misses * times.waiting
            before = share * batch - sum([each.first for each in found])
        else:  # a plain step would be behind the same waiting, so that a round is charged with the rest alone
            share, spent, before = 1.0, -times.waiting if waited else 0.0, float(batch)
        ranked: list[tuple[float, DraftPlan, Option]] = []
        for plan in self.given_plans:
            affords = ruled or times.risk(plan) * misses <= self.account.trusted
            if plan.longest <= room and affords:
                count, seconds = plan.given_nodes + ahead, times.of(plan)
                tokens = before + sum([each.expected(count) for each in found])
                option = Option(plan, tokens, max(0.5 * share * seconds, share * seconds + spent))
                ranked.append((option.rate - GAIN * other.rate, plan, option))
            if longest <= plan.given_nodes + ahead:
                break
        for plan in () if other.plan is None else self._joined(other.plan):
            if plan.longest <= room:
                extra = sum([each.expected_beside(plan, other.reach) for each in found])
                option = Option(plan, (other.tokens + extra) * self._joint.ratio, times.of(plan))
                ranked.append((option.rate - JOINT_GAIN * other.rate, plan, option))
            if longest <= plan.given_nodes:
                break
        for margin, plan, option in sorted(ranked, key=lambda each: -each[0]):
            if runner.takes_given(batch, plan, ruled):
                self._best_compared = option
                if plan.is_joint:
                    self._joint.promise(option.tokens)
                return plan if margin > 0.0 else None
        return None

    def look_up(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> None:
        """Ask the index what follows the tokens that are known, where it is time to."""
        is_due = any(each.said is not None and each.said.is_due for each in sequences)
        if is_due and self._affords and (len(sequences), False) in self._times:
            self._asked(runner, sequences, room, False, True, False, True)

    def promises(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> bool:
        """See `Policy`: a round is taken if the tokens under way are among what is proposed. Nothing is asked but
        behind a round, when something is likely."""
        if not self.looks_up or not self._affords or (len(sequences), False) not in self._times:
            return False
        if not self._ended and not any(each.said is not None and each.said.proposed for each in sequences):
            return False
        return self._asked(runner, sequences, room, False, self._ended, False, True)[1] is not None

    def goes_on(self, batch: int, waits: float) -> bool:
        """See `Policy`: whether another round is likely to follow the one under way, and worth it."""
        times = self._times.get((batch, False))
        if times is None or not self._affords or self._since >= MOST_ROUNDS:
            return False
        return self.waits_for(times, self._again, waits)

    def expects_round(self, batch: int, waits: float) -> bool:
        """See `Policy`. A plain step that begins in a round's place draws the first token of what would have been
        given; the rest is given in the step behind it."""
        times = self._times.get((batch, True))
        if times is None or self._missed or self._choice.current is not None:
            return self._missed or self._choice.current is not None
        if self._since >= MOST_ROUNDS or self._in_vain >= MOST_IN_VAIN:
            return False
        return self.waits_for(times, self._shares[self._was_round], waits)

    def waits_for(self, times: Seconds, chance: float, seconds: float) -> bool:
        """Whether no plain step should be launched where a round comes with this `chance`, though the device waits so
        many seconds for the host then. Behind a plain step the round may still come: what that draws the round would
        have given for less, and it hides half of the waiting."""
        seconds = max(seconds, times.waiting)
        return chance * (times.plain * self._saved + 0.5 * seconds) > seconds

    def record(
        self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, ruled: bool = False, waited: bool = False
    ) -> None:
        """See `Policy`. Without rules there is nothing to weigh an always equal plan against."""
        if not (ruled or self._adaptive or self.looks_up):
            return
        batch, takes_given = len(emitted), plan is not None and plan.takes_given
        asked, self._asked_for = self._asked_for, 0.0
        if asked:
            pace = _ASKING_PACE if self._asking else 1.0
            self._asking += pace * (asked - self._asking)
            self._waits += pace * (time.perf_counter() - self._asked_at - self._waits)
        self._rounds[PLAIN if plan is None else plan.name] += 1
        times = self._times.get((batch, ruled))
        if self._latest != (batch, ruled):
            self._weigh_plain()
            self._latest = batch, ruled
        if times is None:
            if not takes_given:
                self._choice.ended(plan, emitted, seconds, ruled)
            self._first_step(plan, seconds)
            return
        seconds = max(seconds - (0.0 if self._is_hidden(times) else asked), 0.1 * seconds, 1e-9)
        if plan is None and not waited:
            self._since = 0
            self._plain_steps, self._plain_seconds = self._plain_steps + 1, self._plain_seconds + seconds
            if self._plain_steps >= (REFRESHED if self.looks_up or ruled else MOST_KEPT):
                self._weigh_plain()
            return
        self._weigh_plain()
        self.host.learn()
        tokens, expected = sum(emitted) / batch, times.plain if plan is None else times.of(plan)
        saved = tokens - min(seconds, INTERRUPTED * expected) / times.plain
        self.account.ended(tokens, saved * (plan is None or self._adaptive or takes_given), plan is not None)
        if plan is not None and takes_given:
            self._since += 1
            self._saved += _WORTH_PACE * (saved * times.plain / seconds - self._saved)
            if plan.is_joint:
                self._joint.record(sum(emitted))
        else:
            self._since = 0
            self._choice.ended(plan, emitted, seconds, ruled)
        times.record(plan, seconds, waited and plan is None)
        self._choice.forget_ratings(REFRESHED)

    def _weigh_plain(self) -> None:
        """Take notice of the plain steps since this was done last, all at once."""
        steps, seconds = self._plain_steps, self._plain_seconds
        if not steps:
            return
        self._plain_steps, self._plain_seconds = 0, 0.0
        self.host.learn()
        self._choice.ended(None, (), seconds, self._latest[1], steps)
        self.account.ended(steps, 0.0, False)
        self._times[self._latest].record(None, seconds / steps, False, steps)
        self._choice.forget_ratings(steps)

    def _first_step(self, plan: DraftPlan | None, seconds: float) -> None:
        """The first step of a batch size, under rules or not, has ended: from now on there are figures."""
        (batch, ruled), guess = self._latest, self._guess
        like = self._times.get((batch, not ruled)) or next(reversed(self._times.values()), None)
        plain = seconds if plan is None else seconds / guess.ratio(plan, batch)
        self._times[batch, ruled] = Seconds((*self.plans, *self.forced_plans), guess, batch, plain, like)

    def report(self) -> DraftingReport:
        """What was chosen for the latest batch size, and the figures behind it."""
        batch, ruled = self._latest
        acceptance = self._choice.chances[ruled].estimates() | (self.host.trust.shares() if self.looks_up else {})
        times = self._times.get(self._latest)
        options = [] if times is None else self._choice.ratings(batch, ruled, times)
        if options and self._best_compared is not None:
            options.append(self._best_compared)
        by_rate = None if self.own else max(options, key=lambda option: option.rate, default=None)
        chosen = self._choice.current if by_rate is None else by_rate.plan
        return reported(options, chosen, batch, (dict(self._rounds), self._choice.explored, acceptance))
