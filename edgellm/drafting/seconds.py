"""What steps take on this device: plain ones as they were timed, rounds as guessed at first and then as timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels.decode.contract import MAX_TILED_ROWS

PLAIN = "plain"  # the name of a step without a draft
#: Standard deviations of logarithms: of the load of the machine over a first plain step, of what waiting for the host
#: adds to it, of the first guess of rounds, as far as all share it, and of a plan's own. Guesses were up to twice or
#: half of what is measured on an H200, two imitated boards and a CPU (2026-11-28-h200-boards.md.xz).
LOAD_DOUBT, WAITED_DOUBT, GUESS_DOUBT, OWN_DOUBT = 0.3, 0.1, 0.3, 0.25
#: How far the load moves from one step to the next, how much steps alike differ, and after how many steps a third is
#: left of what rounds have shown, which fades after so many at once: no plan is left out for ever for a busy moment.
LOAD_DRIFT, NOISE, MEMORY, FADED = 0.05, 0.15, 1500.0, 32
#: A step that is slower or faster than expected by more than this factor was interrupted, or met cold caches.
LARGEST_SURPRISE = 2.0


class Guess(NamedTuple):
    """Of a round's time over a plain step's: `once`, for each `level` that a draft model proposes, for each `node` of
    each sequence that is verified, and `again` where more than `MAX_TILED_ROWS` are, for each so many more: weights are
    gone through once more then.

    `chosen` of a mixture's experts are what a token goes through (a share of all of them), and `read` is their share of
    what a plain step reads: a round takes longer by the further experts that its tokens choose, evenly. `latency` are
    seconds that each level, and what is beside of a draft model's round, take however small the model is.
    """

    once: float
    level: float
    node: float
    chosen: float = 1.0
    read: float = 0.0
    latency: float = 0.0
    again: float = 0.0

    def in_one_pass(self) -> Guess:
        """For a draft model that proposes all levels in one pass, of several layers: not measured, two levels'."""
        return self._replace(once=self.once + 2 * self.level, level=0.0)

    def ratio(self, plan: DraftPlan, batch: int, plain: float = math.inf) -> float:
        """For a plan in so many sequences, where a plain step takes so many seconds."""
        levels = 0 if plan.is_given or not self.level else plan.steps
        least, whole = (self._distinct(rows) for rows in (batch, batch * plan.tree_size))
        experts = self.read * (whole - least) / (1 - self.read + self.read * least)
        once = self.once + self.latency * (levels + 2 if levels else 0) / plain
        again = self.again * max(0.0, batch * plan.tree_size / MAX_TILED_ROWS - 1.0)
        return once + self.level * levels + self.node * batch * (plan.tree_size - 1) + again + experts

    def _distinct(self, rows: int) -> float:
        """How many times the experts of one token so many go through."""
        return (1 - (1 - self.chosen) ** rows) / self.chosen


#: Where steps are captured and run ahead, and where they are computed at once. Measured: 1.37 to 2.24 on a board that
#: is imitated, 1.56 to 2.95 on an H200, 2.9 to 10.7 on a CPU, for chains of 2 to trees of 60; of 64 to 480 rows 2.7 to
#: 17.5 on an H200 (2026-12-01-h200-slots.md).
CAPTURED, COMPUTED = Guess(1.1, 0.12, 0.01, latency=2e-5, again=1.5), Guess(2.5, 0.2, 0.09)


class Seconds:
    """Seconds of the steps of one batch size, under rules or not, of which a plain one took `plain` seconds.

    The logarithm of what a round takes over the guess is a sum: of the load (other work, clocks, long contexts), which
    all steps share and which changes quickly, of what the guess of all rounds is wrong by, and of the plan's own. Each
    finished step moves its terms by their shares of the variance (a Kalman filter). Rounds alone tell the sum of the
    first two: their errors are kept as one that depends on the other, so that plain steps correct both.
    """

    def __init__(
        self, plans: Sequence[DraftPlan], guess: Guess, batch: int, plain: float, like: Seconds | None
    ) -> None:
        self._plain, self._load, self._variance = plain, 0.0, LOAD_DOUBT**2
        # Of plans, of waiting, and of all rounds: terms but the load return to the guess, their variances to these.
        self._first = [*[OWN_DOUBT**2] * len(plans), WAITED_DOUBT**2, GUESS_DOUBT**2]
        self._terms = {plan: (guess.ratio(plan, batch, plain), place) for place, plan in enumerate(plans)}
        self._logs, self._variances = [0.0] * len(self._first), [*self._first]
        if like is not None:  # what another batch size has shown is the first guess
            self._logs = [*like._logs]
            self._variances = [min(a, b + 0.25 * a) for a, b in zip(self._first, like._variances, strict=True)]
        #: Of the load and of what all rounds share; rounds since their terms faded.
        self._covariance, self._unfaded = 0.0, 0

    @property
    def plain(self) -> float:
        """Of a plain step now."""
        return self._plain * math.exp(self._load)

    def ratio(self, plan: DraftPlan | None) -> float:
        """Of a round, in plain steps; of None of a plain step before which the device waits for the host."""
        if plan is None:
            return math.exp(self._logs[-2])
        guessed, place = self._terms[plan]
        return guessed * math.exp(self._logs[place] + self._logs[-1])

    def of(self, plan: DraftPlan | None) -> float:
        """The same in seconds now."""
        return self.plain * self.ratio(plan)

    def record(
        self, plan: DraftPlan | None, seconds: float, waited: bool = False, late: bool = False, steps: int = 1
    ) -> None:
        """Take notice of a finished step, or of several plain ones that took so many seconds on average. Where the host
        was `late` that says nothing of the load."""
        is_plain = plan is None and not waited
        expected = self.plain if is_plain else self.of(plan)
        place = -2 if plan is None else self._terms[plan][1]
        surprise, limit = math.log(max(seconds, 1e-9) / expected), steps * math.log(LARGEST_SURPRISE)
        if abs(surprise) > limit:  # the more it is, the less it says
            surprise = limit**2 / surprise
        logs, variances = self._logs, self._variances
        self._variance += steps * LOAD_DRIFT**2
        self._unfaded += steps
        if self._unfaded >= FADED and not is_plain:
            kept, self._unfaded = math.exp(-self._unfaded / MEMORY), 0
            self._covariance *= kept
            logs[:] = [kept * log for log in logs]
            variances[:] = [a + kept**2 * (b - a) for a, b in zip(self._first, variances, strict=True)]
        # How each term goes with what was measured (a covariance), which says how much of the surprise is its. Late
        # steps and fading know nothing of what the load goes with: that is no more than both variances allow.
        most = math.sqrt(self._variance * variances[-1])
        self._covariance = max(-most, min(most, self._covariance))
        between = 0.0 if late else self._covariance
        load, shared, own = (0.0 if late else self._variance), between, 0.0 if is_plain else variances[place]
        total = load + own + NOISE**2 / steps
        if plan is not None:
            load, shared = load + between, between + variances[-1]
            total += shared + between
        for where, part in ((place, own), (-1, shared)):
            logs[where] += part / total * surprise
            variances[where] -= part**2 / total
        self._load += load / total * surprise
        self._variance -= load**2 / total
        self._covariance -= load * shared / total
