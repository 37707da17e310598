"""Which plan is taken: plain steps, a draft model's rounds, or rounds of what the host knows.

One learner rates all by the tokens that they should give in the time of a plain step. Choices follow from finished
steps alone, never from a draft that is under way, so they cannot bias the output. What steps, and looking for
candidates of the host, took over the plain steps that their tokens would have taken is drawn from an `Account`, without
which no draft model is asked and nothing is looked for. Behind a look in vain the decoding loop asks nothing a while.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from edgellm.drafting.drafter import Choice, Policy
from edgellm.drafting.own_plans import MOST_REST, Account, Option, OwnPlans, Search, Step
from edgellm.drafting.proposals import Drafted, HostProposals, Proposed
from edgellm.drafting.report import DraftingReport, forecasts, why
from edgellm.drafting.seconds import CAPTURED, COMPUTED, LARGEST_SURPRISE, PLAIN, Seconds
from edgellm.engines.model.limits import GIVEN_TREES
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.suffix_index import SuffixIndex

#: Nodes of trees of given candidates, the root included: where shapes are captured, and where any is computed at once.
CAPTURED_TREES, COMPUTED_TREES = GIVEN_TREES, (3, 5, 8, 12, 16, 24, 32)
#: Given candidates, the best promises of many, must promise so many times the tokens a second of what else is done.
GAIN = 1.2
#: What a round of given candidates saves over its time in plain steps, and how often one comes behind another, or is
#: found under rules, as first guesses; how quickly the first is followed, as how long the host waits, and the second.
FIRST_SAVED, FIRST_CHANCE, _PACE, _FIND_PACE = 0.5, 0.5, 0.1, 0.05
#: Where the host waits for the device for less than this share of a plain step, steps that it was asked for are late.
#: What plain ones take in a row a `SAMPLE` tells, `LEAST` of which ended before it chose again; under rules there is
#: one in each so many steps (tools/bench/results/2026-11-29-cpu-learner-small.md.xz).
LEAST_BLOCKED, SAMPLE, LEAST, SAMPLED_EACH = 0.3, 6, 4, 96


class Learner(Policy):
    """Chooses the plan of each step, and the host's candidates for it.

    `own` are the plans of a draft model; where they are not `adaptive` the first that fits is taken in place of plain
    steps. Tokens that rules force are proposed, and what an `index` of what was said finds: `deepest` is the most such
    candidates that the engines take one after the other (0: none), `ahead` whether steps are launched ahead, and shapes
    captured. `in_one_pass`: the draft model proposes all levels at once. `experts`: `chosen` and `read` of `Guess`.
    """

    def __init__(
        self,
        deepest: int,
        ahead: bool,
        index: SuffixIndex | None = None,
        own: Sequence[DraftPlan] = (),
        adaptive: bool = True,
        in_one_pass: bool = False,
        experts: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        self.own, self._adaptive, self._ahead = tuple(own), adaptive, ahead
        self.looks_up = index is not None
        self.drafts = self.looks_up or bool(own)
        sizes = CAPTURED_TREES if ahead else COMPUTED_TREES
        self.given_plans = tuple(given(nodes - 1, min(nodes - 1, deepest)) for nodes in sizes if deepest)
        of_all = (*own, *self.given_plans)
        self.plans, self.forced_plans = (of_all, ()) if self.looks_up else (self.own, self.given_plans)
        self.host, self.account = HostProposals(max(sizes) - 1, deepest, index), Account()
        guess = (CAPTURED if ahead else COMPUTED)._replace(chosen=experts[0], read=experts[1])
        self._guess = guess.in_one_pass() if in_one_pass else guess
        #: By batch size and rules, as all figures that are kept; the latest, and what was compared with plain steps.
        self._times: dict[tuple[int, bool], Seconds] = {}
        self._latest, self._best_compared = (1, False), tuple[Option, ...]()
        self._choice, self._rounds = OwnPlans(own, adaptive, self.account, ahead), Counter[str]()
        #: How many steps were chosen; of steps without rules and of those under rules when candidates are looked for.
        self._chosen, self.searches = 0, (Search(self.account), Search(self.account))
        #: Seconds that looking took since the latest step ended, as far as the device did not hide it, and for how long
        #: the host waits for the device in a step.
        self._looked, self._blocked = 0.0, [0.0, 0.0]
        self._saved, self._finds = FIRST_SAVED, FIRST_CHANCE
        #: Whether behind a round of given candidates nothing was looked for yet; whether one was found too late.
        self._behind_round, self._missed = False, False

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        self.host.open(sequence, prompt_ids)
        self.account.risks.clear()
        self._behind_round = False

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
        """See `Policy`. Where the device has `waited` the index is asked behind a round alone, not under rules."""
        if self.rested_steps:
            self._count_rests(not self.own or self.rested_steps >= LEAST)
        step = Step(runner, len(sequences), room, ruled)
        self._chosen, self.rest, self.rests_as = self._chosen + 1, 0, (step.batch, ruled)
        times = self._times.get(self.rests_as)
        if times is None:  # nothing is weighed, or nothing was timed yet
            self.rest = SAMPLE if self.own and self._adaptive and self._ahead else 0
            if begun or self._adaptive:
                return None, None
            ready = (each for each in self.own if each.longest <= room and runner.is_ready(step.batch, each, ruled))
            return next(ready, None), None
        search = self.searches[ruled]
        is_late = self._ahead and self._blocked[True] < LEAST_BLOCKED * times.plain
        if ruled and is_late and self._chosen >= search.begins + SAMPLED_EACH:
            search.begins = self._chosen + SAMPLE
        if known and self._looks(ruled, not (self._missed or waited)):
            asks = not waited or (self._behind_round and not ruled)
            found, best = self._look(step, sequences, asks, waited)
            self._missed, self._behind_round = begun and best is not None, not begun and best is not None
            if best is not None and not begun:
                self.account.risks.append(times.ratio(best) - 1.0)
                return best, [each.cut(best) for each in found]
        plan = self._choice.choose(step, times) if self.own and not begun else None
        if plan is not None:
            self.account.risks.append(times.ratio(plan) - 1.0 if self._adaptive else 0.0)
        else:  # plain steps follow until there is something to look for or to choose
            rests = [self._choice.kept] if self.own else []
            if self.given_plans and (ruled or self.looks_up):
                rests.append(search.begins - self._chosen - 1)
            self.rest = max(0, min(rests, default=MOST_REST))
            self._choice.kept -= self.rest
        return plan, None

    def _looks(self, ruled: bool, is_fresh: bool = True) -> bool:
        """Whether it is time to look for candidates, `is_fresh` or what was found, and the account affords it."""
        may_find = bool(self.given_plans) and (ruled or self.looks_up)
        return may_find and self.searches[ruled].is_due(self._chosen, is_fresh)

    def _look(
        self, step: Step, sequences: Sequence[Drafted], asks: bool, waited: bool = False
    ) -> tuple[list[Proposed], DraftPlan | None]:
        """What is proposed for each sequence, and the best round of it, if one pays; `asks`: the index, too."""
        began = time.perf_counter()
        found = [self.host.proposed(sequence, step.room - 1, asks) for sequence in sequences]
        best = self._best_given(step, found)
        if step.ruled:
            self._finds += _FIND_PACE * ((best is not None) - self._finds)
        self._charge(step, began, best is not None, waited)
        return found, best

    def _charge(self, step: Step, began: float, found: bool, waited: bool = False) -> None:
        """A look has ended, which costs nothing where the device, which has not `waited`, is at work for longer."""
        search, seconds = self.searches[step.ruled], time.perf_counter() - began
        if found:
            search.patience = 0
        if not self._ahead or waited or self._blocked[step.ruled] <= seconds:
            self._looked += seconds
            if not found:
                search.put_off(self._chosen, seconds / self._times[step.batch, step.ruled].plain)

    def _best_given(self, step: Step, found: Sequence[Proposed]) -> DraftPlan | None:
        longest = max([len(each.chances) for each in found])
        if not longest:
            return None
        times = self._times[step.batch, step.ruled]
        other, ranked = self._choice.otherwise(step, times), []
        for plan in self.given_plans:
            if plan.longest <= step.room:
                tokens = 1.0 + sum([sum(each.chances[: plan.top_k]) for each in found]) / step.batch
                steps = times.ratio(plan)
                ranked.append(Option(plan, tokens, steps, tokens / steps))
            if longest <= plan.top_k:
                break
        for option in sorted(ranked, key=lambda each: -each.rate):
            if step.runner.takes_given(step.batch, option.plan, step.ruled):  # type: ignore[arg-type]
                self._best_compared = (option,)
                return option.plan if option.rate > GAIN * other.rate else None
        return None

    def look_up(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> None:
        """Ask the index what follows the tokens that are known, where it is time to."""
        step = Step(runner, len(sequences), room, False)
        if (step.batch, False) in self._times and self._looks(False):
            began = time.perf_counter()
            found = [self.host.proposed(sequence, room - 1, True) for sequence in sequences]
            self._charge(step, began, any(each.chances for each in found))

    def promises(self, runner: DecodingRunner, sequences: Sequence[Drafted], room: int) -> bool:
        """See `Policy`: a round is taken if the tokens under way are among what is proposed. Nothing is asked but
        behind a round, when something is likely."""
        if (len(sequences), False) not in self._times or not self._looks(False, False):
            return False
        asks = self._behind_round
        if not asks and not any(each.said is not None and each.said.proposed for each in sequences):
            return False
        self._behind_round = False
        return self._look(Step(runner, len(sequences), room, False), sequences, asks)[1] is not None

    def goes_on(self, batch: int, waits: float) -> bool:
        """See `Policy`: whether another round is likely to follow the one under way, and worth it."""
        times = self._times.get((batch, False))
        return times is not None and self._looks(False, False) and self.waits_for(times, FIRST_CHANCE, waits)

    def expects_round(self, batch: int, waits: float) -> bool:
        """See `Policy`. A plain step that begins in a round's place draws the first token of what would have been
        given; the rest is given in the step behind it."""
        times = self._times.get((batch, True))
        if times is None or self._choice.current is not None:
            return self._choice.current is not None
        is_due = self.searches[True].is_due(self._chosen + 1, not self._missed)
        return is_due and (self._missed or self.waits_for(times, self._finds, waits))

    def waits_for(self, times: Seconds, chance: float, seconds: float) -> bool:
        """Whether the device should wait so long for the host where a round comes with this `chance`: a plain step that
        begins in its place would hide half of the waiting."""
        return chance * (self._saved * times.plain + 0.5 * seconds) > seconds

    def record(
        self,
        plan: DraftPlan | None,
        emitted: Sequence[int],
        seconds: float,
        ruled: bool = False,
        waited: bool = False,
        blocked: float = 0.0,
    ) -> None:
        """See `Policy`. Without rules there is nothing to weigh an always equal plan against."""
        if not (ruled or self._adaptive or self.looks_up):
            return
        if self.rested_steps:  # the host chose while they ran
            self._count_rests(not self.own)
        batch, looked, self._looked = len(emitted), min(self._looked, 0.9 * seconds), 0.0
        if plan is None or not ruled:  # under rules the host has nothing to do beside a round
            self._blocked[ruled] += _PACE * (blocked - self._blocked[ruled])
        self._rounds[PLAIN if plan is None else plan.name] += 1
        self._latest = batch, ruled
        times = self._times.get(self._latest)
        if plan is None and not ruled and times is not None:
            self._choice.is_late = self._ahead and blocked < LEAST_BLOCKED * seconds
        self._choice.ended(plan, emitted, ruled)
        if times is None:  # from now on there are figures
            self._blocked[ruled] = blocked
            like = self._times.get((batch, not ruled)) or next(reversed(self._times.values()), None)
            plain = seconds if plan is None else seconds / self._guess.ratio(plan, batch)
            plans = (*self.plans, *self.forced_plans)
            self._times[self._latest] = Seconds(plans, self._guess, batch, plain, like)
            return
        seconds, cost = max(seconds - looked, 1e-9), looked / times.plain
        tokens, saved, is_own = sum(emitted) / batch, 0.0, plan is not None and not plan.is_given
        late = seconds - blocked > (1.0 - LEAST_BLOCKED) * times.plain and bool(self.own) and self._ahead and not ruled
        waited = plan is None and (waited or late)
        if waited or (plan is not None and (self._adaptive or not is_own)):
            saved = tokens - min(seconds / times.plain, LARGEST_SURPRISE * times.ratio(plan))
        if plan is not None and plan.is_given:
            self._saved += _PACE * (saved * times.plain / seconds - self._saved)
        self.account.ended(tokens, saved - cost, plan is not None)
        times.record(plan, seconds, waited, late)

    def _count_rests(self, learns: bool) -> None:
        """Take notice of the plain steps that were not asked for meanwhile, all at once. Where the host chose meanwhile
        nothing is learned of what they take, but they may have lost time."""
        steps, seconds, ruled = self.rested_steps, self.rested_seconds, self.rests_as[1]
        self.rested_steps, self.rested_seconds = 0, 0.0
        self._chosen += steps
        self._rounds[PLAIN] += steps
        self._choice.ended(None, (), ruled, steps)
        saved, times = 0.0, self._times.get(self.rests_as)
        if times is not None and learns:
            times.record(None, seconds / steps, steps=steps)
        elif times is not None:
            saved = steps - min(seconds / times.plain, LARGEST_SURPRISE * steps)
        self.account.ended(steps, saved, False)

    def report(self) -> DraftingReport:
        """What was chosen for the latest batch size, and the figures behind it."""
        (batch, ruled), times = self._latest, self._times.get(self._latest)
        said_before = {"said before": self.host.trust.ratios} if self.looks_up else {}
        acceptance, rounds = self._choice.chances[ruled].estimates() | said_before, Counter(self._rounds)
        rounds[PLAIN] += self.rested_steps
        counted = dict(+rounds), self._choice.explored, acceptance
        if times is None:
            return DraftingReport(PLAIN, "nothing was timed yet", *counted)
        options = [*self._choice.ratings(ruled, times), *self._best_compared]
        ranked, current = forecasts(options, batch, times.plain), self._choice.current
        chosen = ranked[0].name if not self.own else PLAIN if current is None else current.name
        return DraftingReport(chosen, why(chosen, ranked), *counted, ranked)
