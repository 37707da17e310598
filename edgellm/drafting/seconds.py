"""What steps take on this device: plain ones as they were timed, rounds as guessed at first and then as timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
#: No step counts as slower or faster than expected by more than this factor: it was interrupted. A plan's first round
#: that is slower by this one is left out: it met cold caches.
LARGEST_SURPRISE, COLD = 2.0, 1.5


class Guess(NamedTuple):
    """Of a round's time over a plain step's: `once`, for each `level` that a draft model proposes, and for each `node`
    of each sequence that is verified. What a CPU computes row by row, a GPU hides behind reading the weights."""

    once: float
    level: float
    node: float

    def ratio(self, plan: DraftPlan, batch: int) -> float:
        """For a plan in so many sequences."""
        levels = 0 if plan.is_given else plan.steps
        return self.once + self.level * levels + self.node * batch * (plan.tree_size - 1)


#: Where steps are captured and run ahead, and where they are computed at once. Measured: 1.37 to 2.24 on a board that
#: is imitated, 1.56 to 2.95 on an H200, 2.2 to 8 on a CPU, for chains of 2 to trees of 60.
CAPTURED, COMPUTED = Guess(1.1, 0.12, 0.01), Guess(1.4, 0.2, 0.08)


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
        if like is None:
            rounds = np.array([0.0, 0.0, *[1.0] * (len(names) - 1)])
            own = np.array([LOAD_DOUBT, WAITED_DOUBT, *[OWN_DOUBT] * (len(names) - 1)])
            self._logs = np.zeros(1 + len(names))
            self._covariance = GUESS_DOUBT**2 * np.outer(rounds, rounds) + np.diag(own**2)
        else:  # what another batch size has shown is the first guess
            self._logs, self._covariance = like._logs.copy(), like._covariance.copy()
            self._logs[0] = self._covariance[0] = self._covariance[:, 0] = 0.0
            self._covariance += np.diag([LOAD_DOUBT**2, 0.0, *[(OWN_DOUBT / 2) ** 2] * (len(names) - 1)])
        # The load has no place that it returns to, the others return to the guess, and their doubt to the first one.
        kept = math.exp(-1.0 / MEMORY)
        self._kept = np.array([1.0, *[kept] * len(names)])
        rounds = np.array([0.0, 0.0, *[GUESS_DOUBT] * (len(names) - 1)])
        own = np.array([0.0, WAITED_DOUBT, *[OWN_DOUBT] * (len(names) - 1)])
        self._drift = (1.0 - kept**2) * (np.outer(rounds, rounds) + np.diag(own**2))
        self._drift[0, 0] = LOAD_DRIFT**2
        self._seen: set[DraftPlan] = set()
        self._known: dict[DraftPlan, tuple[float, list[int]]] = {}

    @property
    def plain(self) -> float:
        """Of a plain step now."""
        return self._plain * math.exp(self._logs[0])

    @property
    def waiting(self) -> float:
        """How much longer a plain step takes where the device waits for the host before."""
        return self.plain * max(0.0, math.exp(self._logs[1]) - 1.0)

    def of(self, plan: DraftPlan) -> float:
        """Of a round now."""
        guessed, places = self._terms_of(plan)
        return self._plain * guessed * math.exp(sum([self._logs[place] for place in places]))

    def record(self, plan: DraftPlan | None, seconds: float, waited: bool = False) -> None:
        """Take notice of a finished step."""
        guessed, places = (1.0, [0, 1] if waited else [0]) if plan is None else self._terms_of(plan)
        expected = self._plain * guessed * math.exp(sum([self._logs[place] for place in places]))
        surprise, limit = math.log(max(seconds, 1e-9) / expected), math.log(LARGEST_SURPRISE)
        if plan is not None and plan not in self._seen:
            self._seen.add(plan)
            if surprise > math.log(COLD):
                return
        self._logs *= self._kept
        self._covariance = self._covariance * self._kept * self._kept[:, None] + self._drift
        shared = self._covariance[:, places].sum(axis=1)
        gain = shared / (shared[places].sum() + NOISE**2)
        self._logs += gain * max(-limit, min(limit, surprise))
        self._covariance -= np.outer(gain, shared)

    def _terms_of(self, plan: DraftPlan) -> tuple[float, list[int]]:
        if plan not in self._known:
            places = [0, *(self._place[name] for name in _terms(plan))]
            self._known[plan] = self._guess.ratio(plan, self._batch), places
        return self._known[plan]


def _terms(plan: DraftPlan) -> list[str]:
    """What the error of a plan's guess is made of."""
    own, *joint = plan.name.split(" + ")
    return [own, *(f"+ {each}" for each in joint)]
