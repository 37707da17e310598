"""How likely drafted tokens are accepted: estimated from finished rounds, by depth, with older rounds counting less."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Steps after which an observation counts for a third: some seconds of text, which is how fast texts change.
MEMORY = 48.0
#: Evidence (in tries) that never fades, so that a forgotten figure stays the best guess until there is a new one.
LASTING_EVIDENCE = 3.0
#: How many tries the first guess is worth, or what the depth before tells.
GUESSED_EVIDENCE = 2.0
#: How many tries the figures of the other kinds are worth.
BORROWED_EVIDENCE = 4.0
#: A first guess for chains, before anything was drafted: what good heads reach on text that suits them, so that where
#: drafting can gain the first rounds are drafted and soon tell.
FIRST_GUESS = 0.85
#: By how much a tree's levels of n nodes raise the logarithm of a miss: 1 + TREE_GAIN * ln(n). From published mean
#: acceptance lengths of chains and trees with the same head; it matters only until a kind has figures of its own.
TREE_GAIN = 0.18
_LARGEST = 0.99


@dataclass
class _Tally:
    """Decayed counts at one depth: `tried` rounds came this far, in `accepted` of them a drafted token was right."""

    accepted: float = 0.0
    tried: float = 0.0

    def fade(self) -> None:
        if self.tried > LASTING_EVIDENCE:
            factor = max(1.0 - 1.0 / MEMORY, LASTING_EVIDENCE / self.tried)
            self.accepted *= factor
            self.tried *= factor

    def chain_miss(self, gain: float) -> float:
        """ln(1 - a) of a chain, from a group with this gain, times the tries."""
        return self.tried / gain * math.log(1.0 - min(_LARGEST, self.accepted / self.tried)) if self.tried else 0.0


def tree_gain(nodes: int, steps: int) -> float:
    """The exponent g of 1 - a_tree = (1 - a_chain)^g for a tree of `nodes` drafted nodes on `steps` levels."""
    return 1.0 + TREE_GAIN * math.log(max(1.0, nodes / steps))


class AcceptanceModel:
    """Acceptance by depth for several groups of drafting configurations.

    Configurations of one group (all chains, say) have the same probability a_d that depth d is accepted once depth
    d - 1 was. A group with few figures borrows those of the others, by 1 - a = (1 - a_other)^(gain / gain_other), and
    a depth with few figures those of the depth before. `gains` names the groups with their gain (`tree_gain`).
    """

    def __init__(self, gains: Mapping[str, float], depth: int) -> None:
        self._gains = dict(gains)
        self._tallies = {group: [_Tally() for _ in range(depth)] for group in gains}
        self._depth = depth

    def record(self, group: str, steps: int, lengths: Sequence[int]) -> None:
        """Count a round of `steps` drafted depths that emitted `lengths` tokens (1 to steps + 1) in its sequences."""
        self.age()
        tallies = self._tallies[group]
        for length in lengths:
            for depth in range(1, min(steps, length) + 1):
                tallies[depth - 1].tried += 1.0
                tallies[depth - 1].accepted += length > depth

    def estimates(self) -> dict[str, list[float]]:
        """For each group a_1, a_2, ..., each given that the depth before was accepted."""
        misses = [self._misses(depth) for depth in range(self._depth)]
        return {group: self._group_estimates(group, misses) for group in self._gains}

    def age(self) -> None:
        """Let a step pass, with or without a draft: earlier ones count for less."""
        for tallies in self._tallies.values():
            for tally in tallies:
                tally.fade()

    def _group_estimates(self, group: str, misses: Sequence[tuple[float, float]]) -> list[float]:
        found = []
        gain = self._gains[group]
        guess = 1.0 - (1.0 - FIRST_GUESS) ** gain
        for tally, (tried, chain_miss) in zip(self._tallies[group], misses, strict=True):
            others = tried - tally.tried
            borrowed = 1.0 - math.exp(gain * (chain_miss - tally.chain_miss(gain)) / others) if others > 0.0 else 0.0
            # What the depth before tells counts as a few tries.
            guess = (GUESSED_EVIDENCE * guess + others * borrowed) / (GUESSED_EVIDENCE + others)
            weight = min(BORROWED_EVIDENCE, GUESSED_EVIDENCE + others)
            guess = (tally.accepted + weight * guess) / (tally.tried + weight)
            found.append(guess)
        return found

    def _misses(self, depth: int) -> tuple[float, float]:
        """The tries of all groups at a depth (from 0), and the sum of their `chain_miss`."""
        tallies = [(self._tallies[group][depth], gain) for group, gain in self._gains.items()]
        return sum(tally.tried for tally, _ in tallies), sum(tally.chain_miss(gain) for tally, gain in tallies)


def expected_tokens(acceptance: Sequence[float]) -> float:
    """Tokens that a round emits whose depths are accepted with these probabilities: 1 + a_1 + a_1 a_2 + ..."""
    total = reached = 1.0
    for probability in acceptance:
        reached *= probability
        total += reached
    return total
