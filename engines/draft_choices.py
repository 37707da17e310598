"""Static trees (EAGLE-1): which ranks of the draft's choices become nodes, checked and turned into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from edgellm.engines.speculation.draft_plan import Choice, DraftPlan
from edgellm.engines.errors import EngineError


def choices_plan(choices: Sequence[Sequence[int]], **rule: Any) -> DraftPlan:
    """The plan of a tree of choices, as wide and as deep as they need.

    A choice is the path of ranks from the root: [0, 2] is the third likeliest child of the root's likeliest child.
    Raises EngineError that names the malformed choice: not a list of whole numbers, twice there, without its parent,
    or without the likelier sibling before it. `rule` sets the acceptance of `DraftPlan`.
    """
    nodes = checked_choices(choices)
    steps = max(map(len, nodes))
    inner = {node[:-1] for node in nodes if len(node) > 1}
    widest = max([sum(len(node) == level for node in inner) for level in range(1, steps)], default=1)
    top_k = max(widest, max(node[-1] for node in nodes) + 1)
    return DraftPlan("choices", top_k, steps, len(nodes) + 1, nodes, **rule)


def checked_choices(choices: Any) -> tuple[Choice, ...]:
    """The nodes sorted by depth, then by path; raises EngineError (see `choices_plan`)."""
    if not isinstance(choices, (list, tuple)) or not choices:
        raise EngineError(f"the choices are {choices!r:.200}: expected a list of paths such as [[0], [1], [0, 0]]")
    nodes = [_node(path) for path in choices]
    known = set(nodes)
    if len(known) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise EngineError(f"the choice {list(twice)} is there twice")
    for node in nodes:
        if len(node) > 1 and node[:-1] not in known:
            raise EngineError(f"the choice {list(node)} has no parent: {list(node[:-1])} is missing")
        if node[-1] > 0 and (*node[:-1], node[-1] - 1) not in known:
            sibling = [*node[:-1], node[-1] - 1]
            raise EngineError(f"there is a gap before the choice {list(node)}: the likelier {sibling} is missing")
    return tuple(sorted(nodes, key=lambda node: (len(node), node)))


def _node(path: Any) -> Choice:
    whole = isinstance(path, (list, tuple)) and all(isinstance(r, Integral) and not isinstance(r, bool) for r in path)
    if not whole or not path or min(path) < 0:
        raise EngineError(f"the choice {path!r:.200} is malformed: expected a list of ranks from 0 on, such as [0, 2]")
    return tuple(map(int, path))
