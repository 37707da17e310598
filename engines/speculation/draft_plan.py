"""What one round drafts and verifies: the shape of the tree, and the rule of acceptance.

Candidates are numbered alike everywhere: the K children of the root are 0..K-1; for each level d >= 2, child `rank` of
the node in slot s of the frontier of level d-1 is K + (d-2) K^2 + s K + rank. A dynamic tree leaves frontier and
selection to the scores (EAGLE-2); a static one (a tree of choices, a chain) fixes both in advance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import DRAFT_RANGES, EngineLimits
from edgellm.kernels.errors import shown
from edgellm.kernels.tree.contract import Level, candidate_count, level_start

KINDS = ("tree", "chain", "choices")
#: The kind of plans whose candidates come from the host: a text said before, tokens that rules force.
GIVEN = "given"
ACCEPTANCES = ("exact", "typical")
#: The stages of a round in their order.
DRAFT_ACCEPT, DRAFT_PROPOSAL, BASE_VERIFY, ACCEPTANCE = "draft accept", "draft proposal", "base verify", "acceptance"

#: Far more choices than engines verify in a round.
MOST_CHOICES = 4096
#: A node of a static tree, as the ranks of the choices that lead to it from the root.
Choice = tuple[int, ...]


@dataclass(frozen=True)
class DraftPlan:
    """One way to draft and verify. Hashable: captured graphs are kept by it.

    `top_k` K is the width of a level, `steps` D the number of levels, `tree_size` V the number of verified nodes, the
    root included. Engines and arrays may be wider than the tree: `built_top_k`, where it is not 0, is their width.
    `choices` are the nodes of a static tree, every parent before its children. `sampled` chains are
    drawn from the draft's own distribution. `acceptance` "typical" is lossy, with the posterior threshold epsilon and
    the posterior alpha delta of `AcceptanceKernels.typical_accept`. Of the kind `GIVEN` up to K candidates, up to D
    deep, come with each round, and no draft model proposes. Build one with `tree`, `chain`, `choices_plan` or `given`.
    """

    # Plans are looked up several times in each step: three numbers are hashed, and the same in all processes.
    kind: str = field(hash=False)
    top_k: int
    steps: int
    tree_size: int
    choices: tuple[Choice, ...] = field(default=(), hash=False)
    sampled: bool = field(default=False, hash=False)
    acceptance: str = field(default="exact", hash=False)
    posterior_threshold: float = field(default=0.09, hash=False)
    posterior_alpha: float = field(default=0.3, hash=False)
    built_top_k: int = field(default=0, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, GIVEN):
            raise EngineError(f"the drafting kind is {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.acceptance not in ACCEPTANCES:
            raise EngineError(f"the acceptance is {self.acceptance!r}: expected one of {', '.join(ACCEPTANCES)}")
        for name, value, least in (
            ("draft_top_k", self.top_k, 1),
            ("draft_steps", self.steps, 1),
            ("verify_tree_size", self.tree_size, 2),
        ):
            if value < least:
                raise EngineError(f"{name} is {value}: expected at least {least}")
        most = candidate_count(self.levels, self.top_k) + 1
        if self.tree_size > most:
            raise EngineError(
                f"verify_tree_size is {self.tree_size}: a tree of draft_top_k {self.top_k} and draft_steps "
                f"{self.steps} has {most} nodes, the root included"
            )
        for name, share in (
            ("posterior_threshold", self.posterior_threshold),
            ("posterior_alpha", self.posterior_alpha),
        ):
            if not 0 < share <= 1:
                raise EngineError(f"{name} is {share}: expected a number above 0 and up to 1")
        if self.sampled and self.kind != "chain":
            raise EngineError(f"only a chain can be sampled from the draft's distribution, not a {self.kind}")
        if self.sampled and self.acceptance != "exact":
            raise EngineError("a sampled chain has its own exact test: typical acceptance does not apply to it")

    @cached_property
    def is_static(self) -> bool:
        """Whether no scores choose among the candidates."""
        return bool(self.choices) or self.is_given

    @cached_property
    def is_given(self) -> bool:
        return self.kind == GIVEN

    @cached_property
    def selected(self) -> int:
        """S: the most nodes of the tree that are chosen among the numbered candidates."""
        return len(self.selection) if self.is_static else min(self.tree_size - 1, self.candidates)

    @property
    def levels(self) -> int:
        """The levels by which candidates are numbered: given ones are all of one."""
        return 1 if self.is_given else self.steps

    @property
    def columns(self) -> int:
        """The nodes of a level that engines and arrays have room for: K, or more where the tree is narrower."""
        return self.built_top_k or self.top_k

    @cached_property
    def candidates(self) -> int:
        """C: how many candidates the arrays of all levels have together."""
        return candidate_count(self.levels, self.columns)

    def level(self, number: int) -> Level:
        return Level(number, self.top_k, not self.is_static)

    @cached_property
    def longest(self) -> int:
        """W: the most tokens that a round can emit, the bonus token included."""
        return self.steps + 1

    @cached_property
    def name(self) -> str:
        sizes = f"{self.kind} {self.tree_size - 1 if self.is_given else self.steps}"
        if self.kind not in ("chain", GIVEN):
            sizes = f"{self.kind} {self.top_k}/{self.steps}/{self.tree_size}"
        return sizes + (" sampled" if self.sampled else "") + (" typical" if self.acceptance == "typical" else "")

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """The candidates of a static tree that levels 1 .. D-1 go on from, K of each, -1 in unused slots."""
        slots, _ = self._numbered
        levels = []
        for level in range(1, self.levels):
            nodes = [node for node in slots if len(node) == level]
            levels.append((*map(self._candidate, nodes), *[-1] * (self.top_k - len(nodes))))
        return tuple(levels)

    @cached_property
    def selection(self) -> tuple[int, ...]:
        """The V-1 candidates of a static tree to verify, ascending."""
        return tuple(range(self.top_k)) if self.is_given else tuple(sorted(map(self._candidate, self.choices)))

    def shortened(self, steps: int) -> DraftPlan:
        """The same plan with at most `steps` levels, which must be at least 1."""
        if steps >= self.steps:
            return self
        choices = tuple(node for node in self.choices if len(node) <= steps)
        most = len(choices) or candidate_count(steps, self.top_k)
        return replace(self, steps=steps, tree_size=min(self.tree_size, most + 1), choices=choices)

    def for_engines(self, limits: EngineLimits, fixed_shapes: bool) -> DraftPlan:
        """The plan as engines of these limits take it; raises EngineError where they cannot.

        With `fixed_shapes` they propose for one node a level or for `draft_top_k` nodes, nothing in between: a narrower
        tree leaves nodes idle.
        """
        self.check(limits)
        if not fixed_shapes or self.levels == 1 or self.top_k in limits.propose_widths:
            return self
        if self.is_static:
            return replace(self, top_k=limits.draft_top_k)  # the same nodes, numbered for that width
        return replace(self, built_top_k=limits.draft_top_k)

    def deterministic(self) -> DraftPlan:
        """The same plan with exact acceptance and children that the draft does not draw."""
        return replace(self, sampled=False, acceptance="exact")

    def check(self, limits: EngineLimits) -> None:
        """Raise EngineError if engines of these limits cannot serve the plan. Whether they take given candidates is
        `TreeVerification.takes`'s to say."""
        if self.is_given:
            return
        if not limits.has_draft:
            raise EngineError("the engine directory has no draft model: build it with edgellm build --draft")
        described = f"tree of {len(self.choices)} choices" if self.kind == "choices" else self.kind
        for name, found, most in (
            ("draft_top_k", self.top_k, limits.draft_top_k),
            ("draft_steps", self.steps, limits.draft_steps),
            ("verify_tree_size", self.tree_size, limits.verify_sizes[-1]),
        ):
            if found > most:
                raise EngineError(
                    f"{name} is {found} for a {described}: the engines were built for at most {most}. Use a "
                    f"smaller one, or build with --{name.replace('_', '-')} {found}"
                )

    @cached_property
    def _numbered(self) -> tuple[dict[Choice, int], dict[Choice, int]]:
        """The frontier slots of the nodes that have children, and the candidate numbers of all."""
        inner = {node[:-1] for node in self.choices if len(node) > 1}
        slots: dict[Choice, int] = {}
        numbers: dict[Choice, int] = {}
        for level in range(1, self.steps + 1):
            nodes = [node for node in self.choices if len(node) == level]
            for node in nodes:
                parent = slots[node[:-1]] if level > 1 else 0  # the root is in none
                numbers[node] = level_start(level, self.top_k) + parent * self.top_k + node[-1]
            for slot, node in enumerate(sorted((n for n in nodes if n in inner), key=numbers.__getitem__)):
                slots[node] = slot
        return slots, numbers

    def _candidate(self, node: Choice) -> int:
        return self._numbered[1][node]


def tree(top_k: int, steps: int, tree_size: int, **rule: Any) -> DraftPlan:
    """A dynamic tree: the K best of a level's candidates go on, the V-1 best of all are verified. `tree_size` is cut to
    the candidates that there are. `rule` sets the fields of acceptance."""
    if top_k == 1 and tree_size >= 2:
        return chain(min(steps, tree_size - 1), **rule)
    most = candidate_count(steps, top_k) + 1 if top_k > 0 and steps > 0 else tree_size
    return DraftPlan("tree", top_k, steps, min(tree_size, most), **rule)


def chain(steps: int, **rule: Any) -> DraftPlan:
    """The draft's likeliest tokens one after another, or, with `sampled=True`, drawn from its distribution."""
    choices = tuple((0,) * depth for depth in range(1, steps + 1))
    return DraftPlan("chain", 1, steps, steps + 1, choices, **rule)


def given(nodes: int, depth: int) -> DraftPlan:
    """A tree of up to `nodes` candidates, up to `depth` one after the other, that come with each round."""
    return DraftPlan(GIVEN, nodes, depth, nodes + 1)


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
        raise EngineError(f"the choices are {shown(choices)}: expected a list of paths such as [[0], [1], [0, 0]]")
    if len(choices) > MOST_CHOICES:
        raise EngineError(f"there are {len(choices)} choices: expected at most {MOST_CHOICES}")
    nodes = [_node(path) for path in choices]
    known = set(nodes)
    if len(known) < len(nodes):
        (twice, _), *_ = Counter(nodes).most_common(1)
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
    if not whole or not path or min(path) < 0 or len(path) > DRAFT_RANGES["draft_steps"][1]:
        raise EngineError(
            f"the choice {shown(path)} is malformed: expected a list of up to "
            f"{DRAFT_RANGES['draft_steps'][1]} ranks from 0 on, such as [0, 2]"
        )
    return tuple(map(int, path))
