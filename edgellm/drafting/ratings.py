"""What plans are rated by: what a step should give, and what may be lost."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from edgellm.drafting.seconds import PLAIN
from edgellm.engines.speculation.draft_plan import DraftPlan


@dataclass(frozen=True)
class Forecast:
    """What a plan should give: tokens of a sequence and seconds in a round, tokens per second of all."""

    name: str
    tokens: float
    seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        milliseconds, rate = self.seconds * 1000, self.tokens_per_second
        return f"{self.name}: {self.tokens:.2f} tokens in {milliseconds:.2f} ms, {rate:.0f} tokens/s"


@dataclass(frozen=True)
class DraftingReport:
    """What was chosen for the latest batch size, and why.

    `rounds` counts finished rounds by plan, plain steps included; `explored` those that were tried against the
    forecast. `acceptance` holds, by group of the draft model's plans, the estimated probability that depth 1, 2, ... is
    accepted once the depth before was; of what was said before, how often candidates came over what was promised.
    `forecasts` are sorted, the fastest first.
    """

    chosen: str
    reason: str
    rounds: dict[str, int]
    explored: int
    acceptance: dict[str, list[float]]
    forecasts: list[Forecast] = field(default_factory=list)


class Option(NamedTuple):
    """A step of `plan` (None: a plain one) that should give `tokens` in all in so many `seconds`, and may lose `risk`
    plain steps, as far as that is to be feared."""

    plan: DraftPlan | None
    tokens: float
    seconds: float
    risk: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def forecast(self, batch: int) -> Forecast:
        """For people."""
        return Forecast(PLAIN if self.plan is None else self.plan.name, self.tokens / batch, self.seconds, self.rate)


class Account:
    """What drafting, and looking for what to draft, may lose in plain steps: less than a hundredth of any `WINDOW`
    tokens, and where it has saved time lately a tenth of that, up to `MOST_EARNED`: it is worth more than what the next
    text may cost. The loss that counts is that since the best place of the latest `WINDOW` tokens.

    A text that suits the drafts has hard spells, too. So not all is lost at once: `LATER` is left for tries behind that
    place, more and more of which may be spent as tokens pass, by their logarithm: a spell may be over soon, or late.
    And no round may lose more than the `CAREFUL`th part of what is left, so that more than one tells of a change.
    """

    #: Settled with tools/bench/drafting_workloads.py; a first round may take half a plain step more than was guessed.
    #: The cheapest on a CPU, guessed to lose 2.1, may be tried still.
    WINDOW, MOST_LOST, LATER, SOON, CAREFUL = 512, 4.6, 1.0, 8, 1.6
    #: Of what was saved over so many tokens this share may be lost, and at most so many steps. Without it a head that
    #: gives 1.28 of plain decoding in chats gave 1.10 (tools/bench/results/2026-11-28-cpu-learner.md).
    EARNED_OVER, EARNED_SHARE, MOST_EARNED = 1024.0, 0.1, 10.0

    def __init__(self) -> None:
        self._tokens = self._saved = self._earned = 0.0
        #: Places, in tokens, and what was saved up to them: each more than at all later ones.
        self._best: deque[tuple[float, float]] = deque([(0.0, 0.0)])
        #: What each of a draft model's rounds under way may lose; none is where sequences come.
        self.risks: deque[float] = deque()

    @property
    def left(self) -> float:
        """What may be lost, whatever comes of the rounds under way."""
        earned = min(self.MOST_EARNED, self.EARNED_SHARE * max(0.0, self._earned))
        return self.MOST_LOST + earned - (self._best[0][1] - self._saved) - sum(self.risks)

    @property
    def affordable(self) -> float:
        """What a draft model's round that is launched now may lose."""
        since_best = self._tokens - self._best[0][0]  # up to `WINDOW`
        for_later = 1.0 - math.log1p(since_best / self.SOON) / math.log1p(self.WINDOW / self.SOON)
        return (self.left - self.LATER * for_later) / self.CAREFUL

    def ended(self, tokens: float, saved: float) -> None:
        """Steps gave each sequence so many tokens, and saved so many plain steps."""
        self._tokens, self._saved = self._tokens + tokens, self._saved + saved
        self._earned = self._earned * math.exp(-tokens / self.EARNED_OVER) + saved
        while self._best and self._best[-1][1] <= self._saved:
            self._best.pop()
        self._best.append((self._tokens, self._saved))
        while self._best[0][0] < self._tokens - self.WINDOW:
            self._best.popleft()
