"""What plans are rated by: what a step should give, and what may be lost; and which of a draft model's plans is taken,
or none, by forecasts and by tries, and for how long a choice holds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from edgellm.drafting.acceptance import AcceptanceModel
from edgellm.drafting.drafter import first_fitting
from edgellm.drafting.seconds import Seconds
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.runner import DecodingRunner


class Option(NamedTuple):
    """A step of `plan` (None: a plain one) that should give each sequence so many `tokens` on average in the time of
    `steps` plain ones: `rate` is tokens over steps."""

    plan: DraftPlan | None
    tokens: float
    steps: float
    rate: float


#: What is known of steps is looked at anew after so many plain ones at the most.
MOST_REST = 255


class Account:
    """What drafting may lose, in plain steps: less than a hundredth of any `WINDOW` tokens, and rounds that should pay
    a share of what was saved lately. What counts is the loss since the best place of the latest `WINDOW` tokens.

    A text that suits the drafts has hard spells, too. So `LATER` is left for tries behind that place, more and more of
    which may be spent as tokens pass, by their logarithm: a spell may be over soon, or late. And no round but the
    cheapest may lose more than one part in `CAREFUL` of what is left, so that several tell of a change.
    """

    #: Settled with tools/bench/drafting_workloads.py. The first steps of a process are slow: rounds that are weighed
    #: against them lose some `AT_FIRST` more than is seen.
    WINDOW, MOST_LOST, LATER, SOON, CAREFUL, AT_FIRST = 512, 4.6, 1.5, 8, 2.0, 2.5
    #: Of what was saved over so many tokens this share may be lost, and at most so many steps: between windows and what
    #: texts near the break-even gain (tools/bench/results/2026-11-30-cpu-learner-fast-device.md.xz).
    EARNED_OVER, EARNED_SHARE, MOST_EARNED = 1024.0, 0.2, 8.0

    def __init__(self) -> None:
        self._tokens = self._saved = self._earned = 0.0
        #: Places, in tokens, and what was saved up to them, each more than at all later ones; and what each round under
        #: way may lose.
        self._best, self.risks = deque([(0.0, self.AT_FIRST)]), deque[float]()

    def left(self, pays: bool) -> float:
        """What may be lost, whatever comes of the steps under way; where it `pays`, by the forecast, more."""
        earned = min(self.MOST_EARNED, self.EARNED_SHARE * max(0.0, self._earned)) if pays else 0.0
        return self.MOST_LOST + earned - (self._best[0][1] - self._saved) - sum(self.risks)

    def affordable(self, cheapest: float, pays: bool) -> float:
        """What a draft model's round that is launched now may lose; its cheapest may lose `cheapest`."""
        passed = math.log1p((self._tokens - self._best[0][0]) / self.SOON) / math.log1p(self.WINDOW / self.SOON)
        left = self.left(pays) - self.LATER * (1.0 - passed)  # all of it behind `WINDOW` tokens
        return max(min(left, cheapest), left / self.CAREFUL)

    def ended(self, tokens: float, saved: float, drafted: bool = True) -> None:
        """Steps, or one that was `drafted`, gave each sequence so many tokens, and saved so many plain steps."""
        if drafted and self.risks:
            self.risks.popleft()
        self._tokens, self._saved = self._tokens + tokens, self._saved + saved
        self._earned = self._earned * math.exp(-tokens / self.EARNED_OVER) + saved
        while self._best and self._best[-1][1] <= self._saved:
            self._best.pop()
        self._best.append((self._tokens, self._saved))
        while self._best[0][0] < self._tokens - self.WINDOW:
            self._best.popleft()


class Search:
    """When candidates of the host are looked for: looks, and rounds of them, are paid from an account. One in vain puts
    the next off, for longer each time, until looks cost no more than `LOOK_SHARE` of the steps between."""

    #: More than so many plain steps must be left for a look, to use what was found more than none; else it is put off
    #: for so many steps. Settled with drafting_workloads.py and host_time.py.
    LEAST_LEFT, PUT_OFF, LOOK_SHARE = 1.0, 32, 0.01

    def __init__(self, account: Account) -> None:
        #: The first step before which is looked again, and for how many steps a look in vain puts that off.
        self.begins, self.patience = 0, 0
        self._account = account

    def is_due(self, step: int, is_fresh: bool = True) -> bool:
        """Whether it is time to look before a step, or where that is not `is_fresh` to use what was found."""
        if self._account.left(True) <= (self.LEAST_LEFT if is_fresh else 0.0):
            self.begins = max(self.begins, step + self.PUT_OFF)
        return step >= self.begins

    def put_off(self, step: int, cost: float) -> None:
        """A look in vain before a step took so many plain steps."""
        self.begins = step + 1 + min(self.patience, int(cost / self.LOOK_SHARE))
        self.patience = min(2 * self.patience + 1, MOST_REST)


# Settled with tools/bench/drafting_workloads.py: tools/bench/results/2026-11-29-cpu-learner-small.md.xz.
#: What is chosen anew must promise so many times the tokens a second of what is in use.
SWITCHING_GAIN = 1.02
#: The share of the steps since a plan was used that trying it may lose, and that of a round that a try risks at least.
TRIES_SHARE, LEAST_LOSS = 0.0025, 0.1
#: Plans are rated anew behind a round, and after so many plain steps, by which a draft model's figures fade.
REFRESHED = 64
#: Choosing costs the host half of a small model's step (tools/bench/learner_time.py). A plan is kept for so many more
#: rounds, unless one gives nothing; plain steps for `PUT_OFF` of how many came in a row, so that what pays begins later
#: by no more, and for so many at most; where the host is late for them for `LEAST_KEPT` at least and as many as came in
#: a row, up to twice that most.
KEPT, PUT_OFF, MOST_KEPT, LEAST_KEPT = 7, 0.25, 128, 20
#: Where the host is late, a plain step between rounds takes twice as long as those in a row, and the first ones of a
#: process too. So behind the first so many rounds, then behind twice as many each time, up to so many, `AGAIN` plain
#: steps in a row tell what they take (tools/bench/results/2026-11-30-cpu-learner-fast-device.md.xz).
FIRST_AGAIN, LAST_AGAIN, AGAIN = 2, 512, 7
#: Nodes of plans that may be taken at once; how many times as large as one of which a candidate came the next may be.
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

    def __init__(self, plans: Sequence[DraftPlan], adaptive: bool, account: Account, is_late: bool) -> None:
        self._plans, self._adaptive, self._account = tuple(plans), adaptive, account
        self.chances = {ruled: AcceptanceModel(plans) for ruled in (False, True)}
        #: What is in use, for which batch size, under rules or not, and for how many more steps it is kept.
        self.current: DraftPlan | None = None if adaptive else next(iter(plans), None)
        self._kept_for, self.kept = (0, False), 0
        #: How many steps were tries against the forecast; plain steps since the latest round; the largest tree to take;
        #: whether the host is late for plain steps, as is thought until it was not for one behind another.
        self.explored, self._undrafted, self._largest, self.is_late = 0, 0, SMALL, is_late
        #: Rounds since plain steps came in a row, and behind how many these come again, by batch and rules.
        self._rounds, self._again = 0, dict[tuple[int, bool], int]()
        #: How many steps have ended, and how many had when each plan was in use last.
        self._steps, self._used = 0, dict.fromkeys([None, *plans], 0)
        #: The options by batch and rules, the fastest first, and how many plain steps have ended since.
        self._rated, self._stale = dict[tuple[int, bool], list[Option]](), 0

    def choose(self, step: Step, times: Seconds) -> DraftPlan | None:
        """The plan of the next step: what is in use while it is kept, then what looks best, or a try."""
        if not self._adaptive:
            self.current = first_fitting(self._plans, *step)
            return self.current
        if self.kept > 0 and self._kept_for == (step.batch, step.ruled) and step.fits(self.current):
            self.kept -= 1
            return self.current
        if self._stale >= REFRESHED:
            self._rated, self._stale = {}, 0
        safe = self._safe(step, times)
        best = self._best(safe, step)
        self._kept_for, self.current, self.kept = (step.batch, step.ruled), best.plan, KEPT
        again = self._again.get(self._kept_for, FIRST_AGAIN)
        if best.plan is not None and self.is_late and self._rounds >= again:
            self._again[self._kept_for] = min(2 * again, LAST_AGAIN)
            self.current, self.kept, self._stale = None, AGAIN, REFRESHED
            return None
        tried = self._worth_trying(safe, best, step)
        if tried is not None:
            self.explored, self.kept, self._undrafted = self.explored + 1, 0, 0
            if tried.plan is None:
                self.current = None
            self._used[tried.plan] = self._steps  # one at a time, though the next is launched before it is read
            return tried.plan
        if best.plan is None:
            share, most = (1.0, 2 * MOST_KEPT) if self.is_late else (PUT_OFF, MOST_KEPT)
            self.kept = max(LEAST_KEPT * self.is_late, min(most, int(share * self._undrafted)))
        return best.plan

    def otherwise(self, step: Step, times: Seconds) -> Option:
        """What is done without given candidates."""
        if self._adaptive:
            return self._best(self._safe(step, times), step)
        plan = first_fitting(self._plans, *step)
        return next(each for each in self.ratings(step.ruled, times) if each.plan is plan)

    def ended(self, plan: DraftPlan | None, emitted: Sequence[int], ruled: bool, steps: int = 1) -> None:
        """A round that gave each sequence so many tokens has ended, or so many plain steps."""
        self._stale += steps if plan is None else REFRESHED
        if self._plans and (plan is None or not plan.is_given):
            self.chances[ruled].record(plan, emitted, steps)
            self._steps += steps
            self._used[plan] = self._steps
            self._undrafted = self._undrafted + steps if plan is None else 0
            self._rounds = 0 if self._undrafted >= AGAIN else self._rounds + (plan is not None)
            if plan is not None and sum(emitted) > len(emitted):
                self._largest = max(self._largest, LARGER * plan.tree_size)
            elif plan is not None:
                self.kept = 0

    def ratings(self, ruled: bool, times: Seconds) -> list[Option]:
        """What steps should give and take: a plain one first."""
        rated = [(plan, tokens, times.ratio(plan)) for plan, tokens in self.chances[ruled].promises()]
        return [Option(None, 1.0, 1.0, 1.0), *[Option(*each, each[1] / each[2]) for each in rated]]

    def _safe(self, step: Step, times: Seconds) -> list[Option]:
        """Plain steps, and what the account affords, of trees as far as they may have grown; the fastest first."""
        rated = self._rated.get((step.batch, step.ruled))
        if rated is None:
            rated = sorted(self.ratings(step.ruled, times), key=lambda option: -option.rate)
            self._rated[step.batch, step.ruled] = rated
        place = next(place for place, option in enumerate(rated) if option.plan is None)
        least = min([option.steps for option in rated[:place] or rated[1:]], default=1.0)  # of those that pay, if any
        most, largest = 1.0 + self._account.affordable(least - 1.0, place > 0), self._largest
        return [each for each in rated if each.plan is None or (each.steps <= most and each.plan.tree_size <= largest)]

    def _best(self, safe: Sequence[Option], step: Step) -> Option:
        """The fastest that fits, or what is in use if it is nearly as fast."""
        best = next(each for each in safe if step.fits(each.plan))
        in_use = next((each for each in safe if each.plan is self.current), best)
        stays = in_use is best or (in_use.rate * SWITCHING_GAIN >= best.rate and step.fits(in_use.plan))
        return in_use if stays else best

    def _worth_trying(self, safe: Sequence[Option], best: Option, step: Step) -> Option | None:
        """An option to try against the forecast: the fastest that the steps since have paid for, where drafting does
        not pay those since the latest round for what it may lose, else those since it was used for what it should."""
        for each in [option for option in safe if option is not best]:
            loss, since = each.steps - 1.0, self._undrafted
            if best.plan is not None:
                loss = each.steps / best.steps * max(LEAST_LOSS, 1.0 - each.rate / best.rate)
                since = self._steps - self._used[each.plan]
            if loss <= TRIES_SHARE * since and step.fits(each.plan):
                return each
        return None
