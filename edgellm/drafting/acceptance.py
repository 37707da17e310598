"""How much of a draft is accepted: the counts of one answer, and the estimates that the controller decides by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


#: How likely a chain's token is right in some kinds of text, and how likely each kind is before anything was drafted:
#: good heads suit most texts, so that where drafting can gain the first rounds are drafted and soon tell.
KINDS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.72, 0.82, 0.9, 0.95)
FIRST = [each / 24 for each in (2, 2, 2, 2, 3, 4, 4, 3, 2)]
#: In every kind passages are easier and harder: the odds that a token is right are so many times as high, or as low.
SPREAD = 2.0
#: How likely a text is still of its kind one token later; and the share of what a round says of the kind that is
#: believed, as rounds that follow each other have more in common than the kind. As what is above settled with
#: tools/bench/drafting_workloads.py.
STAYS, BELIEVED = 1 - 1 / 200, 0.6
#: For how many tokens of a plan what is expected of it counts, and how many are remembered.
EVIDENCE, MEMORY = 64.0, 1024.0
#: By how much a tree's levels of n nodes raise the logarithm of a miss: 1 + TREE_GAIN * ln(n). From published mean
#: acceptance lengths of chains and trees with the same head; it matters only until a plan has figures of its own.
TREE_GAIN = 0.18


def tree_gain(nodes: int, steps: int) -> float:
    """The exponent g of 1 - a_tree = (1 - a_chain)^g for a tree of `nodes` drafted nodes on `steps` levels."""
    return 1.0 + TREE_GAIN * math.log(max(1.0, nodes / steps))


class _Expected:
    """What a round of a plan should give in each kind of text; what it gave, and should have, beside the root."""

    def __init__(self, plan: DraftPlan) -> None:
        gain, depths = 1.0 if plan.kind == "chain" else tree_gain(plan.tree_size - 1, plan.steps), range(plan.steps + 1)
        odds = [(each / (1.0 - each) * SPREAD, each / (1.0 - each) / SPREAD) for each in KINDS]
        #: How likely a level is right once the one before was, in easy and in hard passages; and that so many are.
        shares = [[1.0 - (1.0 + each) ** -gain for each in both] for both in odds]
        self.come = [[sum(share**depth for share in both) / 2 for both in shares] for depth in depths]
        self.tokens = [sum(each) for each in zip(*self.come, strict=True)]
        #: How likely it gives one token, two and so on, as far as that is believed.
        ends = [[a - b for a, b in zip(*each, strict=True)] for each in pairwise(self.come)]
        self.likely = [[each**BELIEVED for each in row] for row in (*ends, self.come[-1])]
        self.given = self.due = EVIDENCE

    def promised(self, kinds: Sequence[float]) -> float:
        """Tokens of a round."""
        return 1.0 + (sum(map(mul, self.tokens, kinds)) - 1.0) * self.given / self.due


class AcceptanceModel:
    """What the plans of a draft model give.

    How likely its tokens are right is another in each kind of text; which kind it is may change at every token, and is
    known from rounds by Bayes' rule. Where nothing is drafted it returns to what is likely at first. How much better or
    worse than that a plan does in all kinds, it shows itself.
    """

    def __init__(self, plans: Sequence[DraftPlan]) -> None:
        self._plans = {plan: _Expected(plan) for plan in plans}
        self._kinds = FIRST  # how likely the text is of each

    def record(self, plan: DraftPlan | None, lengths: Sequence[int], steps: int = 1) -> None:
        """Count a round of one of the plans that emitted `lengths` tokens (1 to steps + 1) in its sequences, of which n
        say as much as the root of n, as their texts may differ; or so many `steps` of another kind (None)."""
        tokens = float(steps) if plan is None else sum(lengths) / len(lengths)
        kept = STAYS**tokens
        changed = 1.0 - kept
        kinds = [kept * kind + changed * first for kind, first in zip(self._kinds, FIRST, strict=True)]
        if plan is not None:
            expected = self._plans[plan]
            power, said = len(lengths) ** -0.5, zip(*[expected.likely[length - 1] for length in lengths], strict=True)
            kinds = [kind * math.prod(each) ** power for kind, each in zip(kinds, said, strict=True)]
            whole = sum(kinds)
            kinds = [kind / whole for kind in kinds]
            fading = min(1.0, MEMORY / expected.due)
            expected.given = fading * expected.given + tokens - 1.0
            expected.due = fading * expected.due + sum(map(mul, expected.tokens, kinds)) - 1.0
        self._kinds = kinds

    def promises(self) -> list[tuple[DraftPlan, float]]:
        """The plans, with the tokens that a round of each should give."""
        return [(plan, expected.promised(self._kinds)) for plan, expected in self._plans.items()]

    def estimates(self) -> dict[str, list[float]]:
        """The shares a_1, a_2, ... of chains, and of each tree, that should be right where the depth before was."""
        found = {}
        for plan, expected in self._plans.items():
            come = [sum(map(mul, self._kinds, row)) for row in expected.come]
            name = plan.name if plan.kind == "tree" else plan.kind
            found[name] = [right / before for before, right in pairwise(come)]
        return found
