"""What drafting did for an answer: counted while it grows, reported with the response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgellm.engines.speculation.draft_plan import BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan


@dataclass(frozen=True)
class DraftingStatistics:
    """Counts of one answer; its first token comes from the prompt and counts nowhere.

    `rounds` drafted, `plain_steps` did not. `drafted_tokens` were verified (without the root), `accepted_tokens` of
    them came into the answer; what lies behind its end does not count. `lengths[n]` is how many rounds gave n tokens,
    the bonus token included. `plans` counts rounds by the plan's name. `seconds` are those of all rounds and steps;
    `draft_seconds` and `verify_seconds` those of the draft's and the base's part of the rounds, None where the parts
    cannot be timed. Rounds that serve several sequences count for each of them, seconds included.
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
    """Counts for one answer. `stage_seconds` gives the seconds spent in each stage so far, by name."""

    def __init__(self, stage_seconds: Callable[[], Mapping[str, float]]) -> None:
        self._stage_seconds = stage_seconds
        self._before = dict(stage_seconds())
        self._rounds = self._plain_steps = self._drafted = 0
        self._lengths: Counter[int] = Counter()
        self._plans: Counter[str] = Counter()
        self._seconds = 0.0
        self._length: int | None = None

    def start(self) -> None:
        """Leave out what the stages took up to now: the answer begins, having waited for others."""
        self._before = dict(self._stage_seconds())

    def step(self, plan: DraftPlan | None, seconds: float) -> None:
        """A round, or without a plan a plain step, has given its tokens; they follow."""
        self._close_round()
        self._seconds += seconds
        if plan is None:
            self._plain_steps += 1
            return
        self._rounds += 1
        self._drafted += plan.tree_size - 1
        self._plans[plan.name] += 1
        self._length = 0

    def token(self) -> None:
        """One of them came into the answer."""
        if self._length is not None:
            self._length += 1

    def statistics(self) -> DraftingStatistics:
        """The counts so far."""
        self._close_round()
        lengths = tuple(self._lengths[length] for length in range(max(self._lengths, default=0) + 1))
        accepted = sum((length - 1) * count for length, count in self._lengths.items() if length)
        now = self._stage_seconds()
        spent = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items()}
        draft = spent.get(DRAFT_ACCEPT, 0.0) + spent.get(DRAFT_PROPOSAL, 0.0)
        return DraftingStatistics(
            self._rounds,
            self._plain_steps,
            self._drafted,
            accepted,
            lengths,
            dict(self._plans),
            self._seconds,
            draft if now else None,
            spent.get(BASE_VERIFY, 0.0) if now else None,
        )

    def _close_round(self) -> None:
        if self._length is not None:
            self._lengths[self._length] += 1
            self._length = None
