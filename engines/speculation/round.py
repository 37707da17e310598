"""Rounds: the stages of one, which are captured together or one by one, and what tells rounds apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines, in_order
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DraftPlan
from edgellm.engines.speculation.drafter import Drafter
from edgellm.engines.speculation.tree_verification import DRAWN, GREEDY, SAMPLED, TYPICAL, TreeVerification
from edgellm.kernels.arrays import Array


class RoundKey(NamedTuple):
    """What tells rounds apart, of `plan` in the `batch` leading slots.

    `acceptance` is a rule of `tree_verification`; `adapts` says whether a slot has an adapter, so that other engines
    verify; `constrained` whether masks or biases come before acceptance; `taken` are the pending entries that the draft
    takes in; `key_ranges` are those of the drafter's engines, in order, and of the one that verifies.
    """

    batch: int
    plan: DraftPlan
    acceptance: str
    adapts: bool
    constrained: bool
    taken: int
    key_ranges: tuple[int, ...] = ()

    @property
    def verify_range(self) -> int:
        return self.key_ranges[-1]


#: A round's key without key ranges, and its engines, each of the largest key range, with the rows behind the committed
#: ones that it needs.
_RoundKind = tuple[RoundKey, list[tuple[EngineShape, int]]]


class RoundKinds:
    """Gives the keys of rounds; what they have in common is looked up once."""

    def __init__(
        self, base: BaseEngineRunner, draft: Drafter, verification: TreeVerification, engines: LoadedEngines
    ) -> None:
        self._base, self._draft, self._verification, self._engines = base, draft, verification, engines
        self._made: dict[tuple[int, DraftPlan, bool, bool, bool, int], _RoundKind] = {}

    def key(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, taken: int, longest: int
    ) -> RoundKey:
        """The round of `plan` in the `batch` leading slots, of which the draft takes in so many entries, and the
        longest of whose sequences has so many committed rows. `plain`: all draw by argmax; `adapts`: one has an
        adapter. Raises EngineError where the engines cannot serve the plan."""
        asked = batch, plan, plain, adapts, constrained, taken
        (key, engines), loaded = self._made.get(asked) or self._make(*asked), self._engines
        ranges = tuple([loaded.key_range(widest, longest + rows) for widest, rows in engines])
        return RoundKey(*key[:-1], ranges)

    def keys(self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool) -> list[RoundKey]:
        """All that come up as sequences grow, where engines have fixed shapes."""
        asked = batch, plan, plain, adapts, constrained, self._draft.taken(batch)
        key, engines = self._make(*asked)
        changes = {size - rows + 1 for widest, rows in engines for size in self._engines.key_ranges(widest)}
        longest = self._base.limits.kv_capacity - key.plan.longest
        lengths = sorted({1, *(length for length in changes if 1 < length <= longest)})
        return list(dict.fromkeys(self.key(*asked, length) for length in lengths))

    def _make(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, taken: int
    ) -> _RoundKind:
        limits, verification = self._base.limits, self._verification
        served, bucket = plan.for_engines(limits, self._base.backend.fixed_shapes), self._draft.bucket(batch)
        acceptance = TYPICAL if plan.acceptance == "typical" else SAMPLED if plan.sampled else DRAWN
        if plain:
            served, acceptance = served.deterministic(), GREEDY
        widest, nodes = limits.tree_key_ranges[-1], verification.engine_nodes(served)
        engines = [
            *self._draft.engines(bucket, served, taken),
            (verification.shape(bucket, nodes, widest, adapts), nodes),
        ]
        kind = RoundKey(bucket, served, acceptance, adapts, constrained, taken), engines
        self._made[batch, plan, plain, adapts, constrained, taken] = kind
        return kind


def part_keys(key: RoundKey) -> tuple[Hashable, ...]:
    """By what the launches of a round are known: one, or with masks or biases two."""
    return ((key, BASE_VERIFY), (key, ACCEPTANCE)) if key.constrained else (key,)


class Round:
    """A round: what enqueues each of its `stages`, by name, in their order, with the arrays that they work on.
    `emitted` [B, W+1] int32 are the number of tokens of each slot, then these, then -1."""

    def __init__(self, base: BaseEngineRunner, draft: Drafter, verification: TreeVerification, key: RoundKey) -> None:
        self.key, self._base = key, base
        batch, plan = key.batch, key.plan
        state = base.sequences(slice(0, batch))
        proposal = self._proposal = draft.proposal(batch, plan)
        self._tree = verification.tree(plan, key.verify_range, state)
        self.emitted = self._tree.emitted
        lay_out, verify = verification.verify_step(self._tree, proposal, state, key.adapts)
        accept = verification.accept_step(self._tree, proposal, state, key.acceptance, key.constrained)
        before: dict[str, Callable[[], None]] = draft.stages(batch, plan, key.taken, key.key_ranges)
        laid_out = [lay_out]
        if key.constrained and not plan.is_given:
            self._laid_out = LaidOut(base, self._tree.nodes.tokens, self._tree.nodes.parents)
            laid_out.append(self._laid_out.show)
        if rows := base.token_rows.stages(self._tree.nodes.tokens):
            before |= {"tree layout": in_order(laid_out)} | dict(rows)
            laid_out = []
        before[BASE_VERIFY] = in_order([*laid_out, verify])
        self.stages: dict[str, Callable[[], None]] = before | {ACCEPTANCE: accept}
        #: What is launched as one, with its key: all stages, or with masks or biases first those before acceptance.
        self.parts: list[tuple[Hashable, Mapping[str, Callable[[], None]]]] = [(key, self.stages)]
        if key.constrained:
            self.parts = [*zip(part_keys(key), (before, {ACCEPTANCE: accept}), strict=True)]

    def give(self, trees: Sequence[GivenTree]) -> None:
        """Bring the candidates of each slot, for a given plan; before its stages run."""
        upload, candidates = self._base.backend.upload, self._proposal.candidates
        tokens, parents = _padded(trees, *candidates.tokens.shape)
        upload(candidates.tokens, tokens)
        upload(candidates.parents, parents)

    def nodes(self, trees: Sequence[GivenTree]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents [B, T] int32 of the trees of a constrained round, these where they are given: where a
        draft model proposes as soon as they are laid out, while the base computes what follows them."""
        shape = self._tree.nodes.tokens.shape
        return padded_trees(trees, *shape) if self.key.plan.is_given else self._laid_out.wait()

    def logits(self, slot: int, count: int) -> np.ndarray:
        """The base's logits [count, V] float32 for the tokens that the round gave a slot, once it was waited for, after
        masks and biases.

        Where tokens were drawn, acceptance has divided them by the temperature, which is undone here; penalties are
        not.
        """
        backend, tree = self._base.backend, self._tree
        nodes = backend.read(tree.accepted.indices[slot : slot + 1]).wait()[0, :count].tolist()
        logits = tree.logits.logits
        rows = logits[slot : slot + 1].reshape(*logits.shape[1:])
        found = np.stack([backend.read(rows[node : node + 1]).wait()[0] for node in nodes])
        temperature = self._base.sampling.values(slice(slot, slot + 1))[0].temperature
        return found if self.key.acceptance == GREEDY or temperature == 0 else found * np.float32(temperature)


class GivenTree(NamedTuple):
    """Candidates for one slot: `tokens` [N], and the `parents` [N] int32 of each, an earlier place, -1 of those that
    follow the sequence's last token."""

    tokens: Sequence[int] | np.ndarray
    parents: Sequence[int] | np.ndarray


def padded_trees(trees: Sequence[GivenTree], batch: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and parents [batch, nodes] int32 of trees with their roots, as `TreeNodes` has them: place 0 is the root,
    whose token is not told (-1); what is behind a tree, or has no slot, is padding."""
    tokens, parents = np.full((2, batch, nodes), -1, np.int32)
    tokens[:, 1:], parents[:, 1:] = _padded(trees, batch, nodes - 1)
    for slot, tree in enumerate(trees):
        parents[slot, 1 : len(tree.tokens) + 1] += 1
    return tokens, parents


def _padded(trees: Sequence[GivenTree], batch: int, nodes: int) -> np.ndarray:
    """The same [2, batch, nodes] without the roots: parents are numbered as in `GivenTree`."""
    padded = np.full((2, batch, nodes), -1, np.int32)
    for slot, tree in enumerate(trees):
        padded[0, slot, : len(tree.tokens)] = tree.tokens
        padded[1, slot, : len(tree.tokens)] = tree.parents
    return padded


class LaidOut:
    """Copies of the tokens and parents of trees in memory that the host sees, and the signal that they are there."""

    def __init__(self, base: BaseEngineRunner, *arrays: Array) -> None:
        self._backend, self._sources = base.backend, arrays
        self._copies = [self._backend.host_visible(array.shape, "int32") for array in arrays]
        self._signal = self._backend.signal()

    def show(self) -> None:
        for copy, source in zip(self._copies, self._sources, strict=True):
            self._backend.copy(copy, source)
        self._signal.give()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        self._signal.wait()
        tokens, parents = (self._backend.seen(copy) for copy in self._copies)
        return tokens, parents
