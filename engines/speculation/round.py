"""Rounds: the stages of one, which are captured together or one by one, and what the host knows while they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from edgellm.engines.backends.base import Readback
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.tree_verification import DRAWN, GREEDY, SAMPLED, TYPICAL, TreeVerification


class RoundKey(NamedTuple):
    """What tells rounds apart, of `plan` in the `batch` leading slots.

    `acceptance` is a rule of `tree_verification`; `adapts` says whether a slot has an adapter, so that other engines
    verify; `constrained` whether masks or biases come before acceptance; `accept_tokens` are the tokens that the accept
    engine takes; the key ranges are those of the accept, propose and verify engines (0 for one that does not run).
    """

    batch: int
    plan: DraftPlan
    acceptance: str
    adapts: bool
    constrained: bool
    accept_tokens: int
    accept_range: int = 0
    propose_range: int = 0
    verify_range: int = 0


#: A round's key without key ranges, and its accept, propose and verify engine, each of the largest key range (None: it
#: does not run), with the rows behind the committed ones that it needs.
_RoundKind = tuple[RoundKey, list[tuple[EngineShape | None, int]]]


class RoundKinds:
    """Gives the keys of rounds; what they have in common is looked up once."""

    def __init__(
        self,
        base: BaseEngineRunner,
        draft: EagleDraftEngineRunner | None,
        verification: TreeVerification,
        engines: LoadedEngines,
    ) -> None:
        self._limits, self._fixed_shapes = base.limits, base.backend.fixed_shapes
        self._draft, self._verification, self._engines = draft, verification, engines
        self._made: dict[tuple[int, DraftPlan, bool, bool, bool, int], _RoundKind] = {}

    def key(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, most_pending: int, longest: int
    ) -> RoundKey:
        """The round of `plan` in the `batch` leading slots, none of which has more pending entries, and the longest of
        whose sequences has so many committed rows. `plain`: all draw by argmax; `adapts`: one has an adapter. Raises
        EngineError where the engines cannot serve the plan."""
        asked = batch, plan, plain, adapts, constrained, most_pending
        (key, engines), loaded = self._made.get(asked) or self._make(*asked), self._engines
        ranges = [0 if widest is None else loaded.key_range(widest, longest + rows) for widest, rows in engines]
        return RoundKey(*key[:-3], *ranges)

    def keys(self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool) -> list[RoundKey]:
        """All that come up as sequences grow, where engines have fixed shapes."""
        asked = batch, plan, plain, adapts, constrained, 0 if self._draft is None else self._limits.accept_tokens
        key, engines = self._make(*asked)
        changes = {
            size - rows + 1
            for widest, rows in engines
            if widest is not None
            for size in self._engines.key_ranges(widest)
        }
        longest = self._limits.kv_capacity - key.plan.longest
        lengths = sorted({1, *(length for length in changes if 1 < length <= longest)})
        return list(dict.fromkeys(self.key(*asked, length) for length in lengths))

    def bucket(self, batch: int) -> int:
        """How many slots the engines take for the `batch` leading ones."""
        return min(size for size in self._limits.batches if size >= batch) if self._fixed_shapes else batch

    def _make(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, most_pending: int
    ) -> _RoundKind:
        served, bucket = plan.for_engines(self._limits, self._fixed_shapes), self.bucket(batch)
        acceptance = TYPICAL if plan.acceptance == "typical" else SAMPLED if plan.sampled else DRAWN
        if plain:
            served, acceptance = served.deterministic(), GREEDY
        draft, verification = self._draft, self._verification
        tokens = 0 if draft is None else draft.accept_shape_tokens(bucket, most_pending)
        widest, nodes = self._limits.tree_key_ranges[-1], verification.engine_nodes(served)
        engines: list[tuple[EngineShape | None, int]] = [(None, 0), (None, 0)]
        if draft is not None:
            engines[0] = draft.accept_shape(bucket, tokens, widest), tokens
            if not plan.is_given:
                engines[1] = draft.propose_shape(bucket, served, widest), draft.rows_proposed(served)
        engines.append((verification.shape(bucket, nodes, widest, adapts), nodes))
        kind = RoundKey(bucket, served, acceptance, adapts, constrained, tokens), engines
        self._made[batch, plan, plain, adapts, constrained, most_pending] = kind
        return kind


def part_keys(key: RoundKey) -> tuple[Hashable, ...]:
    """By what the launches of a round are known: one, or with masks or biases two."""
    return ((key, BASE_VERIFY), (key, ACCEPTANCE)) if key.constrained else (key,)


class Round:
    """A round: what enqueues each of its `stages`, by name, in their order, with the arrays that they work on.

    `emitted` [B, W+1] int32 are the number of tokens of each slot, then these, then -1.
    """

    def __init__(
        self,
        base: BaseEngineRunner,
        draft: EagleDraftEngineRunner | None,
        verification: TreeVerification,
        key: RoundKey,
    ) -> None:
        self.key, self._base = key, base
        batch, plan = key.batch, key.plan
        state = base.sequences(slice(0, batch))
        self._candidates = verification.candidates(batch, plan)
        self._given = None if draft is None else draft.given(batch, plan)
        self._tree = verification.tree(plan, key.verify_range, state)
        self.emitted = self._tree.emitted
        lay_out, verify = verification.verify_step(self._tree, self._candidates, state, key.adapts)
        accept = verification.accept_step(self._tree, self._candidates, state, key.acceptance, key.constrained)
        self._laid_out: LaidOut | None = None
        if key.constrained and not plan.is_given:
            self._laid_out = LaidOut(base, self._tree.nodes.tokens, self._tree.nodes.parents)
        self.stages: dict[str, Callable[[], None]] = {}
        if draft is not None:
            self.stages[DRAFT_ACCEPT] = draft.accept_step(batch, key.accept_tokens, key.accept_range)
            if not plan.is_given:
                draw = partial(partial, verification.draw_child, batch, plan=plan)
                drawn = draw if key.acceptance == SAMPLED else None
                self.stages[DRAFT_PROPOSAL] = _in_order(draft.proposal(state, plan, key.propose_range, drawn))
        shown = [] if self._laid_out is None else [self._laid_out.show]
        self.stages[BASE_VERIFY] = _in_order([lay_out, *shown, verify])
        self.stages[ACCEPTANCE] = accept
        #: What is launched as one, with its key: all stages, or with masks or biases first those before acceptance.
        self.parts: list[tuple[Hashable, Mapping[str, Callable[[], None]]]] = [(key, self.stages)]
        if key.constrained:
            before = {name: stage for name, stage in self.stages.items() if name != ACCEPTANCE}
            self.parts = [*zip(part_keys(key), (before, {ACCEPTANCE: accept}), strict=True)]

    @property
    def shape(self) -> tuple[int, int]:
        """[B, T] of the trees, padded to what the engine takes."""
        batch, nodes = self._tree.nodes.tokens.shape
        return batch, nodes

    def give(self, trees: Sequence[GivenTree]) -> None:
        """Bring the candidates of each slot; for a plan that takes given ones, before its stages run."""
        backend = self._base.backend
        if self._given is not None:
            _, batch, nodes = self._given.nodes.shape
            padded = np.zeros((3, batch, nodes), np.int32)
            padded[:2] = _padded(trees, batch, nodes)
            for slot, tree in enumerate(trees):
                padded[2, slot, : len(tree.tokens)] = tree.leads
            backend.upload(self._given.nodes, padded)
            return
        batch, nodes = self._candidates.tokens.shape
        tokens, parents = _padded(trees, batch, nodes)
        backend.upload(self._candidates.tokens, tokens)
        backend.upload(self._candidates.parents, parents)

    def nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and parents [B, T] int32 of the trees of a constrained round in which a draft model proposes, as soon
        as they are laid out; while the base computes what follows them."""
        assert self._laid_out is not None
        return self._laid_out.wait()

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
    follow the sequence's last token.

    A chain may lead a joint tree: the draft model goes on behind it, as far as it has levels, as if it were certain of
    these tokens. Its other proposals stand beside it.
    """

    tokens: Sequence[int] | np.ndarray
    parents: Sequence[int] | np.ndarray
    leads: bool = False


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

    def __init__(self, base: BaseEngineRunner, *arrays: object) -> None:
        backend = self._backend = base.backend
        self._sources = arrays
        self._copies = [backend.host_visible(array.shape, "int32") for array in arrays]  # type: ignore[attr-defined]
        self._signal = backend.signal()

    def show(self) -> None:
        """Enqueue the copies and the signal."""
        for copy, source in zip(self._copies, self._sources, strict=True):
            self._backend.copy(copy, source)  # type: ignore[arg-type]
        self._signal.give()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """What was shown latest."""
        self._signal.wait()
        tokens, parents = (self._backend.seen(copy) for copy in self._copies)
        return tokens, parents


def _in_order(steps: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for step in steps:
            step()

    return run


class SlotProgress:
    """How far each slot is, as bounds that become exact when steps are read.

    Of each slot: `pending` entries that the draft has not seen, never too few; `base_rows` and `draft_rows` that were
    committed by the steps which were read. `lengths` are those of `BaseEngineRunner`, which rounds change, too.
    """

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self.pending, self.base_rows, self.draft_rows = ([0] * len(lengths) for _ in range(3))
        self._latest: StepReadback | None = None

    def start(self, slot: int, count: int) -> None:
        """A prompt of `count` tokens was prefilled: the last one's feature waits for the token drawn after it."""
        self.resume(slot, count, count - 1)

    def resume(self, slot: int, rows: int, draft_rows: int) -> None:
        """A sequence goes on in the slot, of which so many rows are committed."""
        self.pending[slot], self.base_rows[slot], self.draft_rows[slot] = rows - draft_rows, rows, draft_rows

    def stop(self, slot: int) -> None:
        """The slot is idle."""
        self.pending[slot] = 0

    def move(self, source: int, target: int) -> None:
        """The sequence of slot `source` goes on in slot `target`."""
        for known in (self.pending, self.base_rows, self.draft_rows):
            known[target] = known[source]

    def draft_took_pending(self, batch: int) -> None:
        """The draft has seen everything of the leading slots."""
        self.pending[:batch] = [0] * batch

    def launched(self, step: StepReadback) -> StepReadback:
        """A step is under way; of a plain one the base has counted the token already."""
        for slot in range(step.batch):
            if not self._lengths[slot]:
                continue
            if step.plan is None:
                self.pending[slot] += 1
            else:
                self._lengths[slot] += step.plan.longest
                self.pending[slot] = step.plan.longest
        self._latest = step
        return step

    def finish(self, step: StepReadback, counts: Sequence[int]) -> None:
        """A step was read, which gave each slot so many tokens."""
        for slot, count in enumerate(counts):
            if count == 0:
                continue
            if step.draft_accepted:
                self.draft_rows[slot] = self.base_rows[slot]
            self.base_rows[slot] += count
            if step.plan is not None:
                self._lengths[slot] += count - step.plan.longest
                if step is self._latest:
                    self.pending[slot] = count
        if step is self._latest:
            self._latest = None


@dataclass(eq=False)
class StepReadback:
    """The tokens of a round or, without a `plan`, of a plain step of `batch` slots, on their way to the host.

    `emitted` reads them; `draft_accepted` says whether the step began with the draft taking its pending entries.
    """

    progress: SlotProgress
    batch: int
    plan: DraftPlan | None
    emitted: Readback
    draft_accepted: bool
    _tokens: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one, else at least one."""
        if self._tokens is None:
            values = self.emitted.wait()[: self.batch].tolist()
            if self.plan is None:
                self._tokens = [[token] if token >= 0 else [] for token in values]
            else:
                self._tokens = [row[1 : 1 + row[0]] for row in values]
            self.progress.finish(self, [len(tokens) for tokens in self._tokens])
        return self._tokens
