"""What people are told of drafting: the counts of one answer, and what was chosen, with the forecasts behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgellm.drafting.seconds import PLAIN
from edgellm.engines.speculation.draft_plan import BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan

if TYPE_CHECKING:
    from edgellm.drafting.own_plans import Option


@dataclass(frozen=True)
class DraftingStatistics:
    """Counts of one answer; its first token comes from the prompt and counts nowhere.

    `rounds` drafted, `plain_steps` did not. `drafted_tokens` were verified (without the root), `accepted_tokens` of
    them came into the answer; what lies behind its end does not count. `lengths[n]` is how many rounds gave n tokens,
    the bonus token included. `plans` counts rounds by the plan's name ("given N": up to N candidates that no draft
    model proposed), `tokens` what they gave. `seconds` are those of all rounds and steps; `draft_seconds` and
    `verify_seconds` those of the draft's and the base's part of the rounds, None where the parts cannot be timed.
    Rounds that serve several sequences count for each of them, seconds included.
    """

    rounds: int
    plain_steps: int
    drafted_tokens: int
    accepted_tokens: int
    lengths: tuple[int, ...]
    plans: Mapping[str, int]
    seconds: float
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round, the bonus token included; 0.0 without a round."""
        tokens = sum(count * length for length, count in enumerate(self.lengths))
        return tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """The share of rounds in which the drafted token 1, 2, ... was accepted."""
        reached = [sum(self.lengths[position + 1 :]) for position in range(1, len(self.lengths) - 1)]
        return tuple(count / self.rounds for count in reached)


class DraftingTally:
    """Counts for one answer. `stage_seconds` are the seconds spent in each stage so far, by name: they go on growing.

    Whoever keeps the answer keeps this, so it holds nothing of the runner.
    """

    def __init__(self, stage_seconds: Mapping[str, float]) -> None:
        self._stage_seconds = stage_seconds
        self._before = dict(stage_seconds)
        self._spent: dict[str, float] = {}
        self._rounds = self._plain_steps = self._drafted = 0
        self._lengths: Counter[int] = Counter()
        self._plans: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._plan = ""  # that of the latest round
        self._seconds = 0.0
        self._length: int | None = None  # that of the latest round, which its tokens raise; of a plain step none

    def start(self) -> None:
        """Leave out what the stages took up to now: the answer begins, or goes on, having waited for others."""
        self._before = {name: now - self._spent.get(name, 0.0) for name, now in self._stage_seconds.items()}

    def pause(self) -> None:
        """Leave out what the stages take until it starts again."""
        self._spent = self._stages()

    def _stages(self) -> dict[str, float]:
        return {name: seconds - self._before.get(name, 0.0) for name, seconds in self._stage_seconds.items()}

    def step(self, plan: DraftPlan | None, seconds: float, drafted: int | None = None) -> None:
        """A round, or without a plan a plain step, has given its tokens; they follow. `drafted` candidates were
        verified (None: as many as the plan has)."""
        self._seconds += seconds
        if plan is None:
            self._plain_steps += 1
            self._length = None
            return
        self._rounds += 1
        self._drafted += plan.tree_size - 1 if drafted is None else drafted
        self._plan = plan.name
        self._plans[plan.name] += 1
        self._lengths[0] += 1
        self._length = 0

    def token(self) -> None:
        """One of them came into the answer."""
        if self._length is not None:
            self._lengths[self._length] -= 1
            self._length += 1
            self._lengths[self._length] += 1
            self._tokens[self._plan] += 1

    def statistics(self) -> DraftingStatistics:
        """The counts so far."""
        lengths = tuple(self._lengths[length] for length in range(max(self._lengths, default=0) + 1))
        accepted = sum((length - 1) * count for length, count in self._lengths.items() if length)
        spent = self._stages()
        draft = spent.get(DRAFT_ACCEPT, 0.0) + spent.get(DRAFT_PROPOSAL, 0.0)
        return DraftingStatistics(
            self._rounds,
            self._plain_steps,
            self._drafted,
            accepted,
            lengths,
            dict(self._plans),
            self._seconds,
            draft if spent else None,
            spent.get(BASE_VERIFY, 0.0) if spent else None,
            dict(self._tokens),
        )


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
    forecast. `acceptance` holds, for a draft model's chains and each of its trees, how likely depth 1, 2, ... is
    accepted in a text like this once the depth before was; of what was said before, how often candidates came over what
    was promised. `forecasts` are sorted, the fastest first.
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
