"""How much of a draft should be accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from operator import mul

from edgellm.engines.speculation.draft_plan import DraftPlan

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
