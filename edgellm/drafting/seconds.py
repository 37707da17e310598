"""What steps take on this device: plain ones as they were timed, rounds as guessed at first and then as timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from edgellm.engines.speculation.draft_plan import DraftPlan

#: The name of a step without a draft, and of one before which the device waited for the host.
PLAIN, WAITED = "plain", "waited"
#: Standard deviations of logarithms: of the load of the machine over a first plain step, of the first guess of rounds,
#: as far as all share it, of a plan's own, and of what waiting adds. Guesses were up to twice or half of what is
#: measured on an H200, two imitated boards and a CPU (tools/bench/results/2026-11-28-h200-boards.md).
LOAD_DOUBT, GUESS_DOUBT, OWN_DOUBT, WAITED_DOUBT = 0.3, 0.3, 0.25, 0.1
#: How far the load moves from one step to the next, how much steps alike differ, and after how many steps a third is
#: left of what rounds have shown: a plan that looked dear in a busy moment is not left out for ever.
LOAD_DRIFT, NOISE, MEMORY = 0.1, 0.15, 1500.0
#: Behind so many plain steps in a row the load is told apart from what rounds have shown.
TOLD_APART = 8
#: No step counts as slower or faster than expected by more than this factor: it was interrupted. A plan's first round
#: that is slower by this one is left out: it met cold caches.
LARGEST_SURPRISE, COLD = 2.0, 1.5


class Guess(NamedTuple):
    """Of a round's time over a plain step's: `once`, for each `level` that a draft model proposes, and for each `node`
    of each sequence that is verified. What a CPU computes row by row, a GPU hides behind reading the weights."""

    once: float
    level: float
    node: float

    def in_one_pass(self) -> Guess:
        """For a draft model that proposes all levels in one pass. It has several layers: not measured, two levels'."""
        return self._replace(once=self.once + 2 * self.level, level=0.0)

    def ratio(self, plan: DraftPlan, batch: int) -> float:
        """For a plan in so many sequences."""
        levels = 0 if plan.is_given else plan.steps
        return self.once + self.level * levels + self.node * batch * (plan.tree_size - 1)


#: Where steps are captured and run ahead, and where they are computed at once. Measured: 1.37 to 2.24 on a board that
#: is imitated, 1.56 to 2.95 on an H200, 2.9 to 10.7 on a CPU, for chains of 2 to trees of 60.
CAPTURED, COMPUTED = Guess(1.1, 0.12, 0.01), Guess(2.5, 0.2, 0.09)


class Seconds:
    """Seconds of the steps of one batch size, under rules or not, of which a plain one took `plain` seconds.

    The logarithm of what a round takes over the guess is a sum: of the load of the machine (other work, clocks, length
    of the context), which all steps share and which changes quickly, of what the guess of all rounds is wrong by, and
    of the plan's own. A Kalman filter follows finished steps: a round tells of the others as far as they share its
    error, and what it takes longer is load until plain steps say otherwise. What joint plans take over the draft
    model's own is a term for each number of given candidates.
    """

    def __init__(
        self, plans: Sequence[DraftPlan], guess: Guess, batch: int, plain: float, like: Seconds | None
    ) -> None:
        self._guess, self._batch, self._plain = guess, batch, plain
        names = dict.fromkeys([WAITED, *(name for plan in plans for name in _terms(plan))])
        self._place = {name: place for place, name in enumerate(names, 1)}
        # Place 0 is the load, whose variance is kept apart. It has no place that it returns to; the others return to
        # the guess, and their doubt to the first one.
        rounds = np.array([0.0, 0.0, *[GUESS_DOUBT] * (len(names) - 1)])
        own = np.array([0.0, WAITED_DOUBT, *[OWN_DOUBT] * (len(names) - 1)])
        self._doubt = np.outer(rounds, rounds) + np.diag(own**2)
        self._load, self._variance = 0.0, LOAD_DOUBT**2
        #: Plain steps since the latest other one.
        self.alone = 0
        self._logs, self._covariance = np.zeros(1 + len(names)), self._doubt.copy()
        if like is not None:  # what another batch size has shown is the first guess
            self._logs, self._covariance = like._logs.copy(), like._covariance + np.diag((own / 2) ** 2)
            self._covariance[0] = self._covariance[:, 0] = 0.0
        self._seen: set[DraftPlan] = set()
        self._terms_of: Callable[[DraftPlan], tuple[float, list[int]]] = cache(self._guessed)

    @property
    def plain(self) -> float:
        """Of a plain step now."""
        return self._plain * math.exp(self._load)

    @property
    def waiting(self) -> float:
        """How much longer a plain step takes where the device waits for the host before."""
        return self.plain * max(0.0, math.exp(self._logs[1]) - 1.0)

    def of(self, plan: DraftPlan) -> float:
        """Of a round now."""
        guessed, places = self._terms_of(plan)
        return self._plain * guessed * math.exp(self._load + sum([self._logs[place] for place in places]))

    def risk(self, plan: DraftPlan) -> float:
        """What a round may lose, in plain steps, if nothing is accepted."""
        return max(0.0, self.of(plan) / self.plain - 1.0)

    def record(self, plan: DraftPlan | None, seconds: float, waited: bool = False, steps: int = 1) -> None:
        """Take notice of a finished step, or of several plain ones that took so many seconds on average."""
        if plan is None:
            guessed, places = 1.0, [1] if waited else []
        else:
            guessed, places = self._terms_of(plan)
        expected = self._plain * guessed * math.exp(self._load + sum([self._logs[place] for place in places]))
        surprise, limit = math.log(max(seconds, 1e-9) / expected), steps * math.log(LARGEST_SURPRISE)
        if plan is not None and plan not in self._seen:
            self._seen.add(plan)
            if surprise > math.log(COLD):
                return
        surprise = max(-limit, min(limit, surprise))
        if not places and self.alone >= TOLD_APART:  # the load alone, in a tenth of the time
            self._variance += steps * LOAD_DRIFT**2
            gain = self._variance / (self._variance + NOISE**2 / steps)
            self._load, self._variance = self._load + gain * surprise, (1.0 - gain) * self._variance
        else:
            self._update([0, *places], surprise, steps)
        self.alone = 0 if places else self.alone + steps

    def _update(self, places: list[int], surprise: float, steps: int) -> None:
        """Steps of which these are the terms took longer than expected, by this logarithm."""
        passed, covariance = max(1, self.alone), self._covariance
        if passed > TOLD_APART:
            covariance[0] = covariance[:, 0] = 0.0
        kept = math.exp(-passed / MEMORY)
        self._logs *= kept
        covariance *= kept**2
        covariance += (1.0 - kept**2) * self._doubt
        covariance[0, 0] = self._variance + steps * LOAD_DRIFT**2
        shared = covariance[:, places].sum(axis=1)
        gain = shared / (shared[places].sum() + NOISE**2 / steps)
        self._logs += gain * surprise
        covariance -= np.outer(gain, shared)
        self._load, self._logs[0] = self._load + float(self._logs[0]), 0.0
        self._variance = float(covariance[0, 0])

    def _guessed(self, plan: DraftPlan) -> tuple[float, list[int]]:
        """What a plan's round should take over a plain step's, and the places of its errors."""
        return self._guess.ratio(plan, self._batch), [self._place[name] for name in _terms(plan)]


def _terms(plan: DraftPlan) -> list[str]:
    """What the error of a plan's guess is made of."""
    own, *joint = plan.name.split(" + ")
    return [own, *(f"+ {each}" for each in joint)]
