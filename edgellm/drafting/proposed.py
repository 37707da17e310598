"""What is proposed for a sequence, and what is kept of one that is drafted for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree


class Proposed(NamedTuple):
    """A tree of candidates, the likeliest first, with the probability `chances` of each that it comes; `promises` say
    how likely that is if its parent comes, by the index (none where that was not asked)."""

    tree: GivenTree
    chances: Sequence[float]
    promises: Sequence[float] = ()

    def cut(self, plan: DraftPlan) -> GivenTree:
        """The first candidates, as far as a plan has places for them: it has the levels then, too."""
        return GivenTree(self.tree.tokens[: plan.top_k], self.tree.parents[: plan.top_k])

    def behind(self, tokens: Sequence[int]) -> Proposed | None:
        """What is left of it behind tokens that came; None where they are not a path of candidates, or nothing is."""
        (said, parents), place = self.tree, -1
        for token in tokens:
            same = (n for n in range(place + 1, len(said)) if parents[n] == place and said[n] == token)
            if (place := next(same, -1)) < 0:
                return None
        moved = {place: -1}  # the nodes behind that place, and where they stand then
        for node in range(place + 1, len(said)):
            if parents[node] in moved:
                moved[node] = len(moved) - 1
        kept, came = [*moved][1:], self.chances[place]
        tree = GivenTree([said[node] for node in kept], [moved[parents[node]] for node in kept])
        chances = [self.chances[node] / came for node in kept]
        return Proposed(tree, chances, [self.promises[node] for node in kept]) if kept else None


@dataclass
class Said:
    """What is kept of a running sequence: its `history` in the index, how many of its tokens that was `told`, and what
    was `proposed` behind the first `place` tokens, of how many candidates at first (`whole`)."""

    history: Any
    told: int = 0
    place: int = 0
    whole: int = 0
    proposed: Proposed | None = None


class Drafted(Protocol):
    """A sequence that is drafted for; `said` is what `HostProposals` keeps of it. So many of the tokens that were
    `drawn` for it are `known` as its answer's."""

    said: Said | None
    drawn: list[int]
    known: int
    is_over: bool

    @property
    def constraint(self) -> TokenConstraint | None:
        """The rules on its next token."""

    @property
    def finished(self) -> bool:
        """Whether its answer has ended, or failed."""
