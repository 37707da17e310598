"""Drafts without a model: tokens that rules force, and what followed the last time that these tokens were said.

They cost the host some microseconds, and the device the verification alone. A round of them is worth what it is
expected to give in its time; both follow finished rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan, given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import SaidSequence, SuffixIndex

#: Nodes of the trees, the root included, and how many candidates may follow one another in them.
TREES = ((4, 3), (8, 7), (16, 15), (32, 16))
#: The most candidates below one token.
WIDTH = 3
#: What a round of given candidates must promise over what is done otherwise.
GAIN = 1.05
#: A first guess of what each verified token adds to a plain step, before rounds were timed.
NODE_COST = 0.04
#: How quickly times and calibration follow what is seen.
_PACE = 0.15
#: Rounds of a kind that are not timed: the first loads code, the second captures a graph.
_WARM_UPS = 2
_NOTHING = GivenTree(np.zeros(0, np.int32), np.zeros(0, np.int32))


class Drafted(Protocol):
    """What is known of a sequence that is drafted for."""

    said: SaidSequence | None
    is_over: bool

    @property
    def constraint(self) -> TokenConstraint | None:
        """The rules on its next token."""

    @property
    def finished(self) -> bool:
        """Whether its answer has ended, or failed."""


class Runs(Protocol):
    """The runner, as far as it matters here."""

    def takes_given(self, batch: int, plan: DraftPlan) -> bool:
        """Whether a round of the plan can run now."""


class GivenDrafting:
    """Proposes what the host knows, and chooses between rounds of it and what is done otherwise.

    Rules that force tokens are followed always; an `index` of what was said is asked where there is one.
    """

    def __init__(self, deepest: int, index: SuffixIndex | None = None) -> None:
        """`deepest`: the most candidates that the engines take one after the other."""
        self.index = index
        self.plans = tuple(given(nodes - 1, min(depth, deepest)) for nodes, depth in TREES)
        self._seconds: dict[tuple[str, int], float] = {}
        self._seen: dict[tuple[str, int], int] = {}
        self._others: dict[int, tuple[float, float]] = {}  # tokens and seconds of a round of another kind, by batch
        self._trust = 1.0  # of what the index promises
        self._promised = 0.0
        self._from_index = False

    def choose(self, runner: Runs, sequences: Sequence[Drafted], room: int) -> tuple[DraftPlan, list[GivenTree]] | None:
        """The best round of given candidates for sequences in the leading slots, none of which takes more than `room`
        tokens; None where something else is better, or there is nothing to propose."""
        batch, most = len(sequences), min(self.plans[-1].tree_size - 1, room - 1)
        found = [self._proposed(sequence, most) for sequence in sequences]
        longest = max(len(tree.tokens) for tree, _ in found)
        if not longest:
            return None
        best, best_rate = None, GAIN * self._other_rate(batch)
        for plan in self.plans:
            if plan.longest > room or not runner.takes_given(batch, plan):
                continue
            tokens = batch + sum(float(chances[: plan.top_k].sum()) for _, chances in found)
            rate = tokens / self._cost(plan, batch)
            if rate > best_rate:
                best, best_rate, self._promised = plan, rate, tokens - batch
            if longest <= plan.top_k:
                break
        if best is None:
            return None
        self._from_index = all(sequence.constraint is None for sequence in sequences)
        return best, [_cut(tree, best) for tree, _ in found]

    def promises(self, sequences: Sequence[Drafted]) -> bool:
        """Whether more than one token is to be expected of what can be proposed now, so that the tokens under way are
        worth waiting for."""
        return self.index is not None and any(
            float(self._proposed(sequence, 3)[1].sum()) > 1.0 for sequence in sequences
        )

    def record(self, plan: DraftPlan | None, emitted: Sequence[int], seconds: float) -> None:
        """A step has ended that gave each running sequence so many tokens; see `PlanChooser.record`."""
        batch = len(emitted)
        if plan is None or not plan.is_given:
            tokens, spent = self._others.get(batch, (sum(emitted), seconds))
            self._others[batch] = tokens + _PACE * (sum(emitted) - tokens), _followed(spent, seconds)
            return
        key = plan.name, batch
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] > _WARM_UPS:
            self._seconds[key] = _followed(self._seconds.get(key, seconds), seconds)
        if self._from_index and self._promised > 0:
            share = min(2.0, (sum(emitted) - batch) / self._promised)
            self._trust = min(1.0, max(0.05, self._trust * (1 + _PACE * (share - 1))))

    def _proposed(self, sequence: Drafted, most: int) -> tuple[GivenTree, np.ndarray]:
        """Up to `most` candidates, the likeliest first, and the probability that each is accepted."""
        constraint = sequence.constraint
        if most < 1 or sequence.is_over or sequence.finished:
            return _NOTHING, np.zeros(0)
        forced: list[int] = []
        if constraint is not None:
            try:
                forced = constraint.forced(min(most, self.plans[-1].steps))
            except ConstraintError:
                return _NOTHING, np.zeros(0)  # whoever asks for the mask hears of it
        if forced:
            return GivenTree(forced, range(-1, len(forced) - 1)), np.full(len(forced), 0.97) ** np.arange(len(forced))
        if self.index is None or sequence.said is None:
            return _NOTHING, np.zeros(0)
        found = self.index.propose(sequence.said, most, self.plans[-1].steps, WIDTH)
        tree, chances = GivenTree(found.tokens, found.parents), self._trust * np.exp(found.scores)
        return (tree, chances) if constraint is None else _allowed(constraint, tree, chances)

    def _cost(self, plan: DraftPlan, batch: int) -> float:
        plain = self._others.get(batch, (1.0, 1.0))[1]
        return self._seconds.get((plan.name, batch), plain * (1 + NODE_COST * plan.top_k))

    def _other_rate(self, batch: int) -> float:
        tokens, seconds = self._others.get(batch, (float(batch), 1.0))
        return tokens / seconds


def _followed(before: float, now: float) -> float:
    """A time that follows what is seen, outliers little."""
    return before * math.exp(_PACE * max(-0.7, min(0.7, math.log(max(now, 1e-9) / before))))


def _cut(tree: GivenTree, plan: DraftPlan) -> GivenTree:
    """The first candidates of a tree, as far as a plan has places and levels for them."""
    depths: list[int] = []
    places: dict[int, int] = {-1: -1}
    tokens: list[int] = []
    parents: list[int] = []
    for number, (token, parent) in enumerate(zip(tree.tokens[: plan.top_k], tree.parents[: plan.top_k], strict=True)):
        above = places.get(int(parent))
        if above is None or (above >= 0 and depths[above] >= plan.steps):
            continue
        places[number] = len(tokens)
        depths.append(1 if above < 0 else depths[above] + 1)
        tokens.append(int(token))
        parents.append(above)
    return GivenTree(tokens, parents)


def _allowed(constraint: TokenConstraint, tree: GivenTree, chances: np.ndarray) -> tuple[GivenTree, np.ndarray]:
    """What rules allow of a tree: the likeliest path alone, since a chain is tried at the least cost."""
    tokens: list[int] = []
    place = -1
    kept: list[float] = []
    for number, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent == place and constraint.try_advance(int(token)):
            tokens.append(int(token))
            kept.append(float(chances[number]))
            place = number
    constraint.rollback(len(tokens))
    return GivenTree(tokens, range(-1, len(tokens) - 1)), np.asarray(kept)
