"""Which of a draft model's plans is taken, or none: by forecasts and by tries; and for how long a choice holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from edgellm.drafting.acceptance import AcceptanceModel
from edgellm.drafting.drafter import first_fitting
from edgellm.drafting.ratings import Account, Option
from edgellm.drafting.seconds import Seconds
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner

#: What is chosen anew must promise so many times the tokens a second of what is in use.
SWITCHING_GAIN = 1.02
#: The share of the time that tries may lose where drafting does not pay, and where it does that of trying other plans,
#: and the share of a round that a try counts as losing at least.
TRIES_SHARE, EXPLORATION_SHARE, LEAST_LOSS = 0.003, 0.02, 0.1
#: A round that gives nothing is feared as if it came so many times as often as it should: misses come in spells.
FEARED = 5.0
#: The draft model's plans are rated anew after so many plain steps, by which its figures fade a little.
REFRESHED = 8
#: Choosing takes the host some 50 us, half of a small model's step. A draft model's plan is kept for so many more
#: rounds, unless one gives nothing; plain steps for `PUT_OFF` of how long they were taken in a row, so that what pays
#: begins later by no more than this share, and for so many at most: choosing is a hundredth of them then
#: (tools/bench/learner_time.py). Settled with drafting_workloads.py: 0.5 lost a tenth of chats on an H200.
KEPT, PUT_OFF, MOST_KEPT = 3, 0.25, 128
#: Nodes of a draft model's plans that may be taken at once, and how many times as large the next may be as one of which
#: a candidate came: rounds of large trees cost most where nothing is known yet.
SMALL, LARGER = 8, 3


class Step(NamedTuple):
    """What is to be chosen: the next step of a runner's leading slots, under rules or not; none takes more than `room`
    tokens."""

    runner: DecodingRunner
    batch: int
    room: int
    ruled: bool

    def fits(self, plan: DraftPlan | None) -> bool:
        """Whether a round of the plan is ready, and there is room for it."""
        return plan is None or (plan.longest <= self.room and self.runner.is_ready(self.batch, plan, self.ruled))


class OwnPlans:
    """Chooses among plain steps and the plans of a draft model, as far as an account affords; where it is not
    `adaptive` the first plan that fits is all there is."""

    def __init__(self, plans: Sequence[DraftPlan], adaptive: bool, account: Account) -> None:
        self._plans, self._adaptive, self._account = tuple(plans), adaptive, account
        self.chances = {ruled: AcceptanceModel(plans) for ruled in (False, True)}
        #: What is to be done next, and how many steps were tries against the forecast.
        self.taken: DraftPlan | None = None
        self.explored = 0
        #: The options by batch and rules, the fastest first, and how many plain steps have ended since.
        self._rated: dict[tuple[int, bool], list[Option]] = {}
        self._stale = 0
        #: What is in use, for how many more steps it is kept, and for which; and how many nodes a tree may have.
        self.current: DraftPlan | None = None if adaptive else self._plans[0]
        self._kept, self._kept_for = 0, (0, False)
        self._largest = SMALL
        #: Seconds without any of the plans, those of all steps, and how many there were when each was in use last.
        self._undrafted, self._spent, self._used = 0.0, 0.0, dict.fromkeys([None, *plans], 0.0)

    def keeps(self, step: Step) -> bool:
        """Whether what is in use is taken for one more step, without a look at the others."""
        if self._kept <= 0 or self._kept_for != (step.batch, step.ruled) or not step.fits(self.current):
            return False
        self._kept -= 1
        self.taken = self.current
        return True

    def decide(self, step: Step, times: Seconds) -> None:
        """Take what looks best, or a try."""
        safe = self._safe(self._options(step.batch, step.ruled, times))
        best = self._best(safe, step)
        tried = self._worth_trying([option for option in safe if option is not best], best, step)
        self._kept_for, self.current = (step.batch, step.ruled), best.plan
        if tried is None:
            self._kept = KEPT if best.plan is not None else min(MOST_KEPT, int(PUT_OFF * times.alone))
            self.taken = best.plan
            return
        self.explored, self._kept = self.explored + 1, 0
        # One at a time, though the next is launched before it is read.
        self._undrafted, self._used[tried.plan] = 0.0, self._spent
        self.taken = tried.plan

    def otherwise(self, step: Step, times: Seconds) -> Option:
        """What is done without given candidates."""
        rated = self._options(step.batch, step.ruled, times)
        if self._adaptive:
            return self._best(self._safe(rated), step)
        plan = first_fitting(self._plans, *step)
        return next(option for option in rated if option.plan is plan)

    def ended(
        self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, ruled: bool, steps: int = 1
    ) -> None:
        """A round that gave each sequence so many tokens has ended, or so many plain steps."""
        if not self._plans:
            return
        self.chances[ruled].record(plan, emitted, steps)
        self._undrafted = self._undrafted + seconds if plan is None else 0.0
        self._spent += seconds
        self._used[plan] = self._spent
        if plan is not None and sum(emitted) > len(emitted):
            self._largest = max(self._largest, LARGER * plan.tree_size)
        elif plan is not None:
            self._kept = 0

    def forget_ratings(self, steps: int) -> None:
        """So many steps have ended: options are rated anew behind `REFRESHED` of them."""
        self._stale += steps
        if self._stale >= REFRESHED:
            self._rated, self._stale = {}, 0

    def _options(self, batch: int, ruled: bool, times: Seconds) -> list[Option]:
        """The options without given candidates, the fastest first."""
        rated = self._rated.get((batch, ruled))
        if rated is None:
            rated = self._rated[batch, ruled] = sorted(self.ratings(batch, ruled, times), key=lambda each: -each.rate)
        return rated

    def ratings(self, batch: int, ruled: bool, times: Seconds) -> list[Option]:
        """What steps of so many sequences should give and take: a plain one first."""
        reaches = self.chances[ruled].reaches()
        rated = [Option(None, float(batch), times.plain)]
        for plan, reach in reaches.items():
            seconds = times.of(plan)
            risk = max(0.0, seconds / times.plain - 1.0) * min(1.0, FEARED * (1.0 - reach[0]))
            rated.append(Option(plan, batch * (1.0 + sum(reach)), seconds, risk, reach))
        return rated

    def _safe(self, rated: Sequence[Option]) -> list[Option]:
        """Those that may lose no more than the account affords, plain steps among them, and of trees those of which a
        smaller one has shown that they may grow."""
        pays: list[float] = []
        for option in rated:
            if option.plan is None:
                break
            pays.append(option.risk)
        most = self._account.affordable(min(pays or [option.risk for option in rated if option.plan], default=0.0))
        return [
            option
            for option in rated
            if option.plan is None or (option.risk <= most and option.plan.tree_size <= self._largest)
        ]

    def _best(self, safe: Sequence[Option], step: Step) -> Option:
        """The fastest that fits, unless what is in use is nearly as fast."""
        best = next(option for option in safe if step.fits(option.plan))
        for option in safe:
            if option.plan is self.current and option.rate * SWITCHING_GAIN >= best.rate and step.fits(option.plan):
                return option
        return best

    def _worth_trying(self, others: Sequence[Option], best: Option, step: Step) -> Option | None:
        """An option to try against the forecast: where drafting does not pay the best draft, once the time without has
        paid for what it may lose, else what pays with its share of the time without it for what it should lose."""
        if best.plan is None:
            tried = next((option for option in others if step.fits(option.plan)), None)
            pays = tried is not None and tried.risk * best.seconds <= TRIES_SHARE * self._undrafted
            return tried if pays else None
        credit, tried = 0.0, None
        for option in others:
            loss = option.seconds * max(LEAST_LOSS, 1.0 - option.rate / best.rate)
            left = EXPLORATION_SHARE * (self._spent - self._used[option.plan]) / len(self._plans) - loss
            if left > credit and step.fits(option.plan):
                credit, tried = left, option
        return tried
