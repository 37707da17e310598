"""How much of a draft is accepted: the counts of one answer, and the estimates that the controller decides by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul

from edgellm.engines.speculation.draft_plan import BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan


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


#: Steps after which an observation counts for a third: some seconds of text, which is how fast texts change.
MEMORY = 48.0
#: They fade after so many steps at once.
FADED = 4
#: Evidence (in tries) that never fades, so that a forgotten figure stays the best guess until there is a new one.
LASTING_EVIDENCE = 3.0
#: How many tries the first guess is worth, or what the depth before tells.
GUESSED_EVIDENCE = 2.0
#: How many tries the figures of all kinds are worth.
SHARED_EVIDENCE = 4.0
#: A first guess for chains, before anything was drafted: what good heads reach on text that suits them, so that where
#: drafting can gain the first rounds are drafted and soon tell.
FIRST_GUESS = 0.85
#: By how much a tree's levels of n nodes raise the logarithm of a miss: 1 + TREE_GAIN * ln(n). From published mean
#: acceptance lengths of chains and trees with the same head; it matters only until a kind has figures of its own.
TREE_GAIN = 0.18
_LARGEST = 0.99


@dataclass
class _DepthCounts:
    """At one depth of a group: to it some rounds came, as many as `tried` now count for, and in this `share` of them a
    drafted token was right. `miss` is the logarithm of the rest, of a chain."""

    tried: float = 0.0
    share: float = 0.0
    miss: float = 0.0


def tree_gain(nodes: int, steps: int) -> float:
    """The exponent g of 1 - a_tree = (1 - a_chain)^g for a tree of `nodes` drafted nodes on `steps` levels."""
    return 1.0 + TREE_GAIN * math.log(max(1.0, nodes / steps))


class AcceptanceModel:
    """Acceptance by depth of the plans of a draft model.

    Plans of one group, all chains or the trees of one shape, have the same probability a_d that depth d is accepted
    once depth d - 1 was. A group with few figures goes by those of all, which tell by 1 - a = (1 - a_chain)^gain, with
    the gains of `tree_gain`, what a chain would have, and a depth with few figures by those of the depth before.
    """

    def __init__(self, plans: Sequence[DraftPlan]) -> None:
        self._groups = {plan: plan.name if plan.kind == "tree" else plan.kind for plan in plans}
        self._gains = {group: tree_gain(plan.tree_size - 1, plan.steps) for plan, group in self._groups.items()}
        levels = {group: max([plan.steps for plan in plans if self._groups[plan] == group]) for group in self._gains}
        self._tallies = {group: [_DepthCounts() for _ in range(levels[group])] for group in self._gains}
        self._unfaded = 0

    def record(self, plan: DraftPlan | None, lengths: Sequence[int], steps: int = 1) -> None:
        """Count a round of one of the plans that emitted `lengths` tokens (1 to steps + 1) in its sequences; with it,
        and with so many `steps` of another kind (None), earlier ones count for less."""
        self._unfaded += steps
        if self._unfaded >= FADED:
            self._fade()
        if plan is None:
            return
        group = self._groups[plan]
        for depth, tally in enumerate(self._tallies[group][: min(plan.steps, max(lengths))], 1):
            reached = sum([length >= depth for length in lengths])
            came = sum([length > depth for length in lengths])
            tally.tried += reached
            tally.share += (came - reached * tally.share) / tally.tried
            tally.miss = math.log(1.0 - min(_LARGEST, tally.share)) / self._gains[group]

    def _fade(self) -> None:
        kept, self._unfaded = (1.0 - 1.0 / MEMORY) ** self._unfaded, 0
        for tallies in self._tallies.values():
            for tally in tallies:
                if tally.tried > LASTING_EVIDENCE:
                    tally.tried = max(LASTING_EVIDENCE, kept * tally.tried)

    def promises(self) -> list[tuple[DraftPlan, float]]:
        """The plans, with the tokens that a round of each should give."""
        of_groups = self.estimates().items()
        tokens = {group: [*accumulate(accumulate(shares, mul), initial=1.0)] for group, shares in of_groups}
        return [(plan, tokens[group][plan.steps]) for plan, group in self._groups.items()]

    def estimates(self) -> dict[str, list[float]]:
        """The shares a_1, a_2, ... of each group, each given that the depth before was accepted."""
        misses, miss = list[float](), math.log(1.0 - FIRST_GUESS)
        for depth in zip_longest(*self._tallies.values(), fillvalue=_DepthCounts()):
            missed = sum([tally.tried * tally.miss for tally in depth]) + GUESSED_EVIDENCE * miss
            miss = missed / (sum([tally.tried for tally in depth]) + GUESSED_EVIDENCE)
            misses.append(miss)
        found: dict[str, list[float]] = {}
        for group, gain in self._gains.items():
            shares = found[group] = []
            for tally, miss in zip(self._tallies[group], misses, strict=False):  # not all are as deep
                shared = SHARED_EVIDENCE * (1.0 - math.exp(gain * miss))
                shares.append((tally.tried * tally.share + shared) / (tally.tried + SHARED_EVIDENCE))
        return found
