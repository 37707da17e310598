"""What the host proposes for a sequence: tokens that rules force, and what followed where the same was said, as far as
it came; and what is kept of one that is drafted for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal, SuffixIndex


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


#: The most candidates below one token; less likely ones are left out; how likely a forced token is: the text is forced,
#: but other tokens may spell it.
WIDTH, LEAST_CHANCE, FORCED_CHANCE = 3, 0.02, 0.97


NOTHING = Proposed(GivenTree([], []), [])  # no candidates


class Trust:
    """How often candidates came whose parent had come, over what the index promised, by the promise; of late."""

    #: Where the kinds of promises begin; what each comes at over its promise before anything was seen; for how many
    #: promised tokens this first guess counts, and what was seen at most; and the surest chance.
    KINDS, FIRST = (0.0, 0.35, 0.6, 0.8), (0.5, 0.7, 0.85, 0.95)
    FIRST_EVIDENCE, MEMORY, MOST = 6.0, 64.0, 0.99

    def __init__(self) -> None:
        self._promised, self._came = [0.0] * len(self.KINDS), [0.0] * len(self.KINDS)
        self.ratios = [*self.FIRST]

    def weighed(self, proposal: Proposal) -> Proposed:
        """A proposal with the probabilities that were seen in place of those that the index promises."""
        chances: list[float] = []
        for parent, promise in zip(proposal.parents, proposal.promises, strict=True):
            chance = min(self.MOST, promise * self.ratios[bisect_right(self.KINDS, promise) - 1])
            chances.append(chance * chances[parent] if parent >= 0 else chance)
        return Proposed(GivenTree(proposal.tokens, proposal.parents), chances, proposal.promises)

    def learn(self, proposed: Proposed, tokens: Sequence[int]) -> None:
        """Take note of the tokens that came where a tree was proposed."""
        reached, (said, parents) = {-1: 0}, proposed.tree
        for node, promise in enumerate(proposed.promises):
            depth = reached.get(parents[node])
            if depth is None or depth == len(tokens):
                continue
            kind, came = bisect_right(self.KINDS, promise) - 1, said[node] == tokens[depth]
            fading = min(1.0, self.MEMORY / (self._promised[kind] + 1.0))
            self._promised[kind] = fading * self._promised[kind] + promise
            self._came[kind] = fading * self._came[kind] + came
            guessed = self.FIRST_EVIDENCE * self.FIRST[kind]
            self.ratios[kind] = (self._came[kind] + guessed) / (self._promised[kind] + self.FIRST_EVIDENCE)
            if came:
                reached[node] = depth + 1


class HostProposals:
    """Proposes what rules force and, with an `index`, what followed the last tokens before: `nodes` candidates at the
    most, `depth` one after the other."""

    def __init__(self, nodes: int, depth: int, index: SuffixIndex | None) -> None:
        self.index, self._nodes, self._depth = index, nodes, depth
        self.trust = Trust()

    def open(self, sequence: Drafted, prompt_ids: Sequence[int]) -> None:
        """A sequence begins."""
        if self.index is not None:
            sequence.said = Said(self.index.open(prompt_ids))

    def close(self, sequence: Drafted) -> None:
        """A sequence has ended: later ones may say the same."""
        said, sequence.said = sequence.said, None
        if said is not None and self.index is not None:
            self._tell(sequence, said)
            self.index.close(said.history)

    def proposed(self, sequence: Drafted, most: int, asks: bool) -> Proposed:
        """What may follow the tokens of a sequence that are known, the likeliest first: of what rules force, `most`.
        With `asks` the index is asked where less than half of what it proposed is left."""
        constraint, said = sequence.constraint, sequence.said
        if most < 1 or sequence.is_over or sequence.finished:
            return NOTHING
        try:
            forced = [] if constraint is None else constraint.forced(min(most, self._depth))
        except ConstraintError:
            return NOTHING  # whoever asks for the mask hears of it
        if forced:
            path = GivenTree(forced, range(-1, len(forced) - 1))
            return Proposed(path, [FORCED_CHANCE**depth for depth in range(len(forced))])
        if said is None or self.index is None:
            return NOTHING
        if said.place < sequence.known:
            if said.proposed is not None:
                self.trust.learn(said.proposed, came := sequence.drawn[said.place : sequence.known])
                said.proposed = said.proposed.behind(came)
            said.place = sequence.known
        if asks and (said.proposed is None or 2 * len(said.proposed.chances) < said.whole):
            self._tell(sequence, said)
            width = WIDTH if constraint is None else 1  # each node needs a mask
            found = self.index.propose(said.history, self._nodes, self._depth, width, LEAST_CHANCE)
            said.proposed, said.whole = self.trust.weighed(found) if found.tokens else None, len(found.tokens)
        return said.proposed or NOTHING

    def _tell(self, sequence: Drafted, said: Said) -> None:
        """Let the index know the tokens that it does not know yet."""
        if said.told < sequence.known and self.index is not None:
            self.index.extend(said.history, sequence.drawn[said.told : sequence.known])
            said.told = sequence.known
