"""What given candidates are worth: how likely they come, what their rounds take, and what asking for them may take."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from edgellm.drafting.controller import CostModel, Forecast
from edgellm.drafting.costs import PLAIN, RoundCosts
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal

#: The share of the steps' time that the index may take, and seconds that it may take at first and at most beyond.
ASKING_SHARE, FIRST_CREDIT, MOST_CREDIT = 0.02, 0.02, 0.05
#: Of each kind of step so many are timed one after the other, then one in so many.
OFTEN, SELDOM = 16, 8
#: A plain step before which the device waited for the host: for its tokens, and for it to choose.
WAITED = "waited"
#: How quickly the tokens of other steps follow what is seen.
_PACE = 0.15
#: What joint rounds give at first over what they promise, for how many tokens this first guess counts, and what was
#: seen at most. Both drafts are often right at the same places, so it is less than two that know nothing of each other
#: give.
JOINT_FIRST, JOINT_EVIDENCE, JOINT_MEMORY = 0.95, 16.0, 160.0


def rate_name(plan: DraftPlan) -> str:
    """Under which name the time of a plan of given candidates is kept: joint ones by what is given, whichever plan of
    the draft model's that is beside, since their times follow those of its rounds."""
    return f"joint {plan.given_nodes}" if plan.is_joint else plan.name


class Proposed(NamedTuple):
    """A tree of candidates, the likeliest first, with the probability `chances` of each that it comes, and the `sums`
    of these up to each, with 0 before the first.

    `promises` say for each how likely it is if its parent comes, by the index, and `kinds` which of the counts of
    `Trust` it belongs to; both are empty where the index was not asked.
    """

    tree: GivenTree
    chances: Sequence[float]
    sums: Sequence[float]
    promises: Sequence[float]
    kinds: Sequence[int]

    @classmethod
    def of(
        cls, tree: GivenTree, chances: Sequence[float], promises: Sequence[float] = (), kinds: Sequence[int] = ()
    ) -> Proposed:
        """With the sums."""
        return cls(tree, chances, [*accumulate(chances, initial=0.0)], promises, kinds)

    def expected(self, count: int) -> float:
        """How many of the first `count` candidates should come."""
        return self.sums[min(count, len(self.chances))]

    def expected_beside(self, plan: DraftPlan, reach: Sequence[float]) -> float:
        """How many more tokens than its draft model's a joint plan should give with these candidates: where these come
        and that one's do not, which come to depth d + 1 with probability `reach[d]`, whatever comes of the others; and
        those that come behind a chain that leads."""
        count = plan.given_nodes
        if self.tree.leads:
            chances = self.chances[:count]
            behind = chances[-1] * sum(reach[: max(0, plan.steps - len(chances))]) if chances else 0.0
            return max(0.0, sum(chances) + behind - sum(reach))
        depths: list[int] = []
        found = 0.0
        for parent, chance in zip(self.tree.parents[:count], self.chances, strict=False):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            found += chance * (1.0 - reach[depth] if depth < len(reach) else 1.0)
        return found


class Trust:
    """How often candidates came whose parent had come, over what the index promised: by the promise, and by how much
    was found again. Recent ones count most."""

    #: Where the kinds begin, by promise and by the length of the match; what each kind comes at over its promise
    #: before anything was seen; and for how many promised tokens this first guess counts, and what was seen at most.
    PROMISES, MATCHES = (0.0, 0.35, 0.6, 0.8), (0, 8)
    FIRST = (0.5, 0.7, 0.85, 0.95)
    FIRST_EVIDENCE, MEMORY = 6.0, 64.0
    MOST = 0.99

    def __init__(self) -> None:
        kinds = len(self.PROMISES) * len(self.MATCHES)
        self._promised, self._came = [0.0] * kinds, [0.0] * kinds
        self._ratios = [*self.FIRST] * len(self.MATCHES)

    def weighed(self, proposal: Proposal) -> Proposed:
        """A proposal with the probabilities that were seen in place of those that the index promises."""
        tokens, parents, scores = proposal.tokens.tolist(), proposal.parents.tolist(), proposal.scores.tolist()
        first = len(self.PROMISES) * (sum(proposal.match >= least for least in self.MATCHES) - 1)
        ratios = self._ratios
        chances: list[float] = []
        promises: list[float] = []
        kinds: list[int] = []
        for parent, score in zip(parents, scores, strict=True):
            promise = math.exp(score - (scores[parent] if parent >= 0 else 0.0))
            kind = first + bisect_right(self.PROMISES, promise) - 1
            chance = min(self.MOST, promise * ratios[kind])
            chances.append(chance * (chances[parent] if parent >= 0 else 1.0))
            promises.append(promise)
            kinds.append(kind)
        return Proposed.of(GivenTree(tokens, parents), chances, promises, kinds)

    def learn(self, proposed: Proposed, tokens: Sequence[int]) -> None:
        """Take note of the tokens that came where a tree was proposed."""
        if not proposed.kinds:
            return
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(proposed.tree.parents):
            children.setdefault(int(parent), []).append(node)
        place = -1
        for token in tokens:
            following = None
            for node in children.get(place, ()):
                kind, came = proposed.kinds[node], proposed.tree.tokens[node] == token
                fading = min(1.0, self.MEMORY / (self._promised[kind] + 1.0))
                self._promised[kind] = fading * self._promised[kind] + proposed.promises[node]
                self._came[kind] = fading * self._came[kind] + came
                guessed = self.FIRST_EVIDENCE * self.FIRST[kind % len(self.FIRST)]
                self._ratios[kind] = (self._came[kind] + guessed) / (self._promised[kind] + self.FIRST_EVIDENCE)
                following = node if came else following
            if following is None:
                return
            place = following

    def shares(self) -> dict[str, list[float]]:
        """By the kind of match, the ratio for each kind of promise."""
        ratios, size = self._ratios, len(self.PROMISES)
        return {
            f"match of {least} or more": ratios[size * row : size * (row + 1)] for row, least in enumerate(self.MATCHES)
        }


class Rates:
    """What the steps of one batch size take, the `tokens` that those without given candidates give, and how many
    `rounds` were taken since the latest of these."""

    def __init__(self, guesses: Mapping[str, float], tokens: float, warm_ups: int) -> None:
        self.tokens, self.rounds = tokens, 0
        self._costs = CostModel(RoundCosts({name: {1: value} for name, value in guesses.items()}), list(guesses))
        self._most_warm_ups = warm_ups
        self._warm_ups: dict[str, int] = {}
        self._seen = dict.fromkeys(guesses, 0)
        self._seconds: dict[str, float] = {}
        #: How often the draft model's own rounds came to each depth; what joint rounds promised and gave.
        self._reach: list[float] = []
        self._promise, self._promised, self._came = 0.0, JOINT_EVIDENCE, JOINT_FIRST * JOINT_EVIDENCE

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float, waited: bool = False) -> None:
        """A step has ended, of a plan that took given candidates or (None) another one."""
        name, tokens = (WAITED if waited else PLAIN) if plan is None else rate_name(plan), sum(emitted)
        self.rounds = 0 if plan is None else self.rounds + 1
        if plan is not None and plan.is_joint and self._promise:
            fading = min(1.0, JOINT_MEMORY / self._promised)
            self._promised = fading * self._promised + self._promise
            self._came = fading * self._came + tokens
        if plan is not None and self._warm_ups.setdefault(plan.name, 0) < self._most_warm_ups:
            self._warm_ups[plan.name] += 1
            return
        if plan is None:
            self.tokens += _PACE * (tokens - self.tokens)
            self._follow(emitted)
        self._seen[name] += 1
        if self._seen[name] <= OFTEN or self._seen[name] % SELDOM == 0:  # taking notice has a price, too
            self._costs.record(name, 1, seconds)
            self._seconds.clear()

    def _follow(self, emitted: Sequence[int]) -> None:
        reach = self._reach
        reach += [0.0] * (max(emitted) - 1 - len(reach))
        for depth in range(len(reach)):
            reached = sum([count > depth + 1 for count in emitted]) / len(emitted)
            reach[depth] += _PACE * (reached - reach[depth])

    def joined(self, plan: DraftPlan, proposals: Sequence[Proposed]) -> float:
        """The tokens that a joint round should give: those of the draft model's rounds, and what is proposed for each
        sequence beside; as far as earlier joint rounds gave what that says."""
        extra = sum([each.expected_beside(plan, self._reach) for each in proposals])
        return (self.tokens + extra) * self._came / self._promised

    def promise(self, tokens: float) -> None:
        """A joint round is taken that should give so many tokens."""
        self._promise = tokens * self._promised / self._came

    def seconds(self, name: str) -> float:
        """What a step should take."""
        if name not in self._seconds:
            self._seconds[name] = self._costs.seconds(name, 1)
        return self._seconds[name]

    def other(self, waited: bool) -> Forecast:
        """What a step without given candidates should give, where the device has `waited` for the host already, or else
        where it would not."""
        seconds = self.seconds(WAITED if waited and self._seen[WAITED] else PLAIN)
        return Forecast(PLAIN, self.tokens, seconds, self.tokens / seconds)


class Budget:
    """The host's seconds for asking the index: a share of the time of all steps, and what rounds of its candidates
    saved. So a model whose steps are as quick as the host is not slowed where nothing is said again."""

    def __init__(self) -> None:
        self._credit, self._price = FIRST_CREDIT, 0.0

    @property
    def affords(self) -> bool:
        """Whether there is enough for one more time."""
        return self._credit >= self._price

    def spend(self, seconds: float) -> None:
        """It was asked, which took so long; the first time may take much longer than all others."""
        seconds = min(seconds, 2.0 * self._price if self._price else FIRST_CREDIT / 4)
        self._credit -= seconds
        self._price = seconds if self._price == 0.0 else self._price + _PACE * (seconds - self._price)

    def earn(self, seconds: float) -> None:
        """So much may be spent later."""
        self._credit = min(MOST_CREDIT, self._credit + seconds)
