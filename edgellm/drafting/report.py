"""What was chosen, and why, for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.drafting.own_plans import Option
from edgellm.drafting.seconds import PLAIN


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


def forecasts(options: Sequence[Option], batch: int, plain: float) -> list[Forecast]:
    """Of so many sequences, whose plain step takes so many seconds; the fastest first."""
    found = []
    for each in sorted(options, key=lambda option: -option.rate):
        name, rate = PLAIN if each.plan is None else each.plan.name, batch * each.rate / plain
        found.append(Forecast(name, each.tokens, each.steps * plain, rate))
    return found


def why(chosen: str, ranked: Sequence[Forecast]) -> str:
    """What is said of a choice among forecasts: what it promises, and what else there was."""
    of = {each.name: each for each in ranked}
    draft = next((str(each) for each in ranked if each.name != PLAIN), "nothing was said before")
    return f"{of[PLAIN]}; the best draft, {draft}" if chosen == PLAIN else f"{of[chosen]}; {of[PLAIN]}"
