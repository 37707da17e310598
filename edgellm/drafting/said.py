"""What may follow a running sequence: what is kept of it for an index of what was said, and trees of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from edgellm.drafting.worth import Proposed
from edgellm.engines.errors import ConstraintError
from edgellm.engines.speculation.constraints import TokenConstraint
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.suffix_index import Proposal


class Drafted(Protocol):
    """A sequence that is drafted for; `said` is what `GivenDrafting` keeps of it."""

    said: Said | None
    is_over: bool

    @property
    def constraint(self) -> TokenConstraint | None:
        """The rules on its next token."""

    @property
    def finished(self) -> bool:
        """Whether its answer has ended, or failed."""


class Said:
    """What is kept of a running sequence: its `history` in the index, the `news` that it does not know yet, and what
    was `proposed` for its end."""

    def __init__(self, history: Any) -> None:
        self.history = history
        self.news: list[int] = []
        self.proposed: Proposed | None = None
        #: How many candidates there were when the index was asked, and whether that was in vain as far as is known.
        self.whole, self.was_asked = 0, False
        #: How many tokens are let go after it was asked in vain, and how many of these are to come.
        self.patience = self.quiet = 0

    @property
    def is_due(self) -> bool:
        """Whether it is time to ask the index: less than half of what it proposed is left."""
        left = 0 if self.proposed is None else len(self.proposed.chances)
        return self.quiet <= 0 and (self.proposed is None or 2 * left < self.whole)


def chain_of(tokens: Sequence[int], leads: bool = False) -> GivenTree:
    """A tree of one path; whether it `leads` a joint one."""
    return GivenTree(tokens, range(-1, len(tokens) - 1), leads)


#: No candidates.
NOTHING = Proposed.of(chain_of([]), [])


def cut(tree: GivenTree, plan: DraftPlan) -> GivenTree:
    """The first candidates of a tree, as far as a plan has places for them: it has the levels then, too."""
    return GivenTree(tree.tokens[: plan.given_nodes], tree.parents[: plan.given_nodes], tree.leads)


def allowed(constraint: TokenConstraint, found: Proposal) -> Proposal:
    """What rules allow of a proposal: the likeliest path alone, since a chain is tried at the least cost."""
    path: list[int] = []
    try:
        for node, parent in enumerate(found.parents):
            if parent == (path[-1] if path else -1) and constraint.try_advance(found.tokens[node]):
                path.append(node)
    except ConstraintError:
        pass  # the path ends there
    finally:
        constraint.rollback(len(path))
    scores, promises = ([values[node] for node in path] for values in (found.scores, found.promises))
    return Proposal([found.tokens[node] for node in path], [*range(-1, len(path) - 1)], scores, promises, found.match)
