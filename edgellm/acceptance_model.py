"""How likely drafted tokens are accepted: estimated from finished rounds, by depth, with older rounds counting less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Rounds after which an observation counts for a third: some seconds of text, which is how fast texts change.
MEMORY = 32.0
#: The same for kinds of drafting that are not in use: their last figures fade more slowly than rounds bring new ones.
IDLE_MEMORY = 192.0
#: Evidence (in tries) that never fades, so that a forgotten figure stays the best guess while its uncertainty grows.
LASTING_EVIDENCE = 3.0
#: How many tries the figures of the other kinds are worth.
BORROWED_EVIDENCE = 4.0
#: A first guess for chains, before anything was drafted: what published heads reach on common text.
FIRST_GUESS = 0.7
#: By how much a tree's levels of n nodes raise the logarithm of a miss: 1 + TREE_GAIN * ln(n). From published mean
#: acceptance lengths of chains and trees with the same head; it matters only until a kind has figures of its own.
TREE_GAIN = 0.18
_LARGEST = 0.99


@dataclass
class _Tally:
    """Decayed counts at one depth: `tried` rounds came this far, in `accepted` of them a drafted token was right."""

    accepted: float = 0.0
    tried: float = 0.0

    def fade(self, memory: float) -> None:
        if self.tried > LASTING_EVIDENCE:
            factor = max(1.0 - 1.0 / memory, LASTING_EVIDENCE / self.tried)
            self.accepted *= factor
            self.tried *= factor


def tree_gain(nodes: int, steps: int) -> float:
    """The exponent g of 1 - a_tree = (1 - a_chain)^g for a tree of `nodes` drafted nodes on `steps` levels."""
    return 1.0 + TREE_GAIN * math.log(max(1.0, nodes / steps))


class AcceptanceModel:
    """Acceptance by depth for several groups of drafting configurations.

    Configurations of one group (all chains, say) have the same probability a_d that depth d is accepted once depth
    d - 1 was. A group with few figures borrows those of all groups, by 1 - a = (1 - a_other)^(gain / gain_other), and
    a depth with few figures those of the depth before. `gains` names the groups with their gain (`tree_gain`).
    """

    def __init__(self, gains: Mapping[str, float], depth: int) -> None:
        self._gains = dict(gains)
        self._tallies = {group: [_Tally() for _ in range(depth)] for group in gains}
        self._idle = dict.fromkeys(gains, 0)
        self._depth = depth

    def record(self, group: str, steps: int, lengths: Sequence[int]) -> None:
        """Count a round of `steps` drafted depths that emitted `lengths` tokens (1 to steps + 1) in its sequences."""
        self._age(group)
        tallies = self._tallies[group]
        for length in lengths:
            for depth in range(1, min(steps, length) + 1):
                tallies[depth - 1].tried += 1.0
                tallies[depth - 1].accepted += length > depth

    def record_plain(self) -> None:
        """Count a step without a draft: the figures age."""
        self._age(None)

    def estimates(self) -> dict[str, list[tuple[float, float]]]:
        """For each group, mean and standard error of a_1, a_2, ..., each given that the depth before was accepted."""
        borrowed = [self._borrowed(depth) for depth in range(self._depth)]
        return {group: self._group_estimates(group, borrowed) for group in self._gains}

    def _age(self, used: str | None) -> None:
        for name, tallies in self._tallies.items():
            self._idle[name] = 0 if name == used else self._idle[name] + 1
            for tally in tallies:
                tally.fade(MEMORY if name == used else IDLE_MEMORY)

    def _borrowed(self, depth: int) -> tuple[float, float]:
        """ln(1 - a) of a chain at a depth (from 0), as all groups together have it, and on how many tries."""
        evidence = total = 0.0
        for name, gain in self._gains.items():
            tally = self._tallies[name][depth]
            if tally.tried > 0.0:
                evidence += tally.tried
                total += tally.tried / gain * math.log(1.0 - min(_LARGEST, tally.accepted / tally.tried))
        return (total / evidence if evidence else 0.0), evidence

    def _group_estimates(self, group: str, borrowed: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        found = []
        gain = self._gains[group]
        staleness = math.sqrt(1.0 + self._idle[group] / IDLE_MEMORY)
        before = 1.0 - (1.0 - FIRST_GUESS) ** gain
        for tally, (chain_miss, evidence) in zip(self._tallies[group], borrowed, strict=True):
            # The depth before counts as one try.
            guess = (before + evidence * (1.0 - math.exp(gain * chain_miss))) / (1.0 + evidence)
            weight = min(BORROWED_EVIDENCE, 1.0 + evidence)
            mean = (tally.accepted + weight * guess) / (tally.tried + weight)
            # One try more on either side: a run of equal outcomes leaves some doubt.
            smoothed = (mean * (tally.tried + weight) + 1.0) / (tally.tried + weight + 2.0)
            error = math.sqrt(smoothed * (1.0 - smoothed) / (tally.tried + 1.0))
            # The text may have changed since. Without a bound, so that every group gets another chance some day.
            found.append((mean, error * staleness))
            before = mean
        return found


def expected_tokens(estimates: Sequence[tuple[float, float]], steps: int, optimism: float = 0.0) -> float:
    """Tokens that a round of `steps` depths emits: 1 + a_1 + a_1 a_2 + ...

    `estimates` are means and standard errors of a_d; `optimism` raises each a_d by that many standard errors.
    """
    total = reached = 1.0
    for mean, error in estimates[:steps]:
        reached *= min(_LARGEST, mean + optimism * error)
        total += reached
    return total
