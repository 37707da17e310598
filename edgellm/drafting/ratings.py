"""What plans are rated by: what a step should give, and what may be lost."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from edgellm.engines.speculation.draft_plan import DraftPlan


class Option(NamedTuple):
    """A step of `plan` (None: a plain one) that should give each sequence so many `tokens` on average in the time of
    `steps` plain ones: `rate` is tokens over steps."""

    plan: DraftPlan | None
    tokens: float
    steps: float
    rate: float


#: What is known of steps is looked at anew after so many plain ones at the most.
MOST_REST = 255


class Search:
    """When candidates of the host are looked for: looks, and rounds of them, are paid from a budget in plain steps. One
    in vain puts the next off, for longer each time, until looks cost no more than `LOOK_SHARE` of the steps between."""

    #: The budget at first and at most; this share of each token is added, and what rounds save. So much is overdrawn to
    #: use what was found, which takes slow hosts so long. Settled with drafting_workloads.py and host_time.py.
    FIRST, MOST, SHARE, OVERDRAFT, LOOK_SHARE = 4.0, 14.0, 0.005, 6.0, 0.01

    def __init__(self) -> None:
        #: The first step before which is looked again, and for how many steps a look in vain puts that off.
        self.begins, self.patience = 0, 0
        self._budget = self.FIRST

    def is_due(self, step: int, is_fresh: bool = True) -> bool:
        """Whether it is time to look before a step, or where that is not `is_fresh` to use what was found; until the
        budget is there again it is not."""
        missing = -self._budget - (0.0 if is_fresh else self.OVERDRAFT)
        if missing >= 0.0:
            self.begins = step + min(MOST_REST, 1 + int(missing / self.SHARE))
        return step >= self.begins

    def put_off(self, step: int, cost: float) -> None:
        """A look in vain before a step took so many plain steps."""
        self.begins = step + 1 + min(self.patience, int(cost / self.LOOK_SHARE))
        self.patience = min(2 * self.patience + 1, MOST_REST)

    def earn(self, tokens: float, saved: float) -> None:
        """Steps gave so many tokens, and saved so many plain steps."""
        self._budget = min(self.MOST, self._budget + self.SHARE * tokens + saved)


class Account:
    """What drafting may lose, in plain steps: less than a hundredth of any `WINDOW` tokens, and a tenth of what was
    saved lately, up to `MOST_EARNED` steps. What counts is the loss since the best place of the latest `WINDOW` tokens.

    A text that suits the drafts has hard spells, too. So `LATER` is left for tries behind that place, more and more of
    which may be spent as tokens pass, by their logarithm: a spell may be over soon, or late. And no round but the
    cheapest may lose more than one part in `CAREFUL` of what is left, so that several tell of a change.
    """

    #: Settled with tools/bench/drafting_workloads.py; a first round may take half a plain step more than was guessed.
    WINDOW, MOST_LOST, LATER, SOON, CAREFUL = 512, 4.6, 1.5, 8, 2.0
    #: Of what was saved over so many tokens this share may be lost, and at most so many steps. Without it a head that
    #: gives 1.28 of plain decoding in chats gave 1.10 (tools/bench/results/2026-11-28-cpu-learner.md).
    EARNED_OVER, EARNED_SHARE, MOST_EARNED = 1024.0, 0.1, 10.0

    def __init__(self) -> None:
        self._tokens = self._saved = self._earned = 0.0
        #: Places, in tokens, and what was saved up to them, each more than at all later ones; and what each round under
        #: way may lose.
        self._best, self.risks = deque([(0.0, 0.0)]), deque[float]()

    @property
    def left(self) -> float:
        """What may be lost, whatever comes of the steps under way."""
        earned = min(self.MOST_EARNED, self.EARNED_SHARE * max(0.0, self._earned))
        return self.MOST_LOST + earned - (self._best[0][1] - self._saved) - sum(self.risks)

    def affordable(self, cheapest: float) -> float:
        """What a draft model's round that is launched now may lose; its cheapest may lose `cheapest`."""
        passed = math.log1p((self._tokens - self._best[0][0]) / self.SOON) / math.log1p(self.WINDOW / self.SOON)
        left = self.left - self.LATER * (1.0 - passed)  # all of it behind `WINDOW` tokens
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
