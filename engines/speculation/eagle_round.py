"""Rounds: the stages of one, which are captured together or one by one, and what the host knows while they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from edgellm.engines.backends.base import Readback
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.tree_verification import GREEDY, SAMPLED, TreeVerification


class RoundKey(NamedTuple):
    """What tells rounds apart, of `plan` in the `batch` leading slots.

    `acceptance` is a rule of `tree_verification`; `adapts` says whether a slot has an adapter, so that other engines
    verify; `accept_tokens` are the tokens that the accept engine takes; the key ranges are those of the accept, propose
    and verify engines.
    """

    batch: int
    plan: DraftPlan
    acceptance: str
    adapts: bool
    accept_tokens: int
    accept_range: int
    propose_range: int
    verify_range: int


class EagleRound:
    """A round: what enqueues each of its `stages`, by name, in their order, with the arrays that they work on.

    `emitted` [B, W+1] int32 are the number of tokens of each slot, then these, then -1.
    """

    def __init__(
        self, base: BaseEngineRunner, draft: EagleDraftEngineRunner, verification: TreeVerification, key: RoundKey
    ) -> None:
        self.key, self._base = key, base
        batch, plan = key.batch, key.plan
        state = base.sequences(slice(0, batch))
        candidates, tree = draft.candidates(batch, plan), verification.tree(batch, plan, key.verify_range)
        self._tree, self.emitted = tree, tree.emitted

        def extension(level: int) -> Callable[[], None]:
            """What adds the candidates of `level`, from the draft's latest logits."""
            if key.acceptance == SAMPLED:
                return partial(verification.draw_child, batch, level - 1, candidates)
            return draft.expand_step(batch, level, candidates)

        proposal = [extension(1)]
        for level in range(1, plan.steps):
            propose = draft.propose_step(batch, level, candidates, state.kvcache_start_index, key.propose_range)
            proposal += [propose, extension(level + 1)]

        def propose_all() -> None:
            for step in proposal:
                step()

        def accept() -> None:
            verification.accept(tree, state, key.acceptance)
            verification.advance(tree, state, draft.pending)

        self.stages: dict[str, Callable[[], None]] = {
            DRAFT_ACCEPT: draft.accept_step(batch, key.accept_tokens, key.accept_range),
            DRAFT_PROPOSAL: propose_all,
            BASE_VERIFY: verification.verify_step(tree, candidates, state, key.adapts),
            ACCEPTANCE: accept,
        }

    def logits(self, slot: int, count: int) -> np.ndarray:
        """The base's logits [count, V] float32 for the tokens that the round gave a slot, once it was waited for.

        Where tokens were drawn, acceptance has divided them by the temperature, which is undone here; penalties are
        not.
        """
        backend, tree = self._base.backend, self._tree
        nodes = backend.read(tree.accepted_indices[slot : slot + 1]).wait()[0, :count].tolist()
        rows = tree.logits[slot : slot + 1].reshape(*tree.logits.shape[1:])
        found = np.stack([backend.read(rows[node : node + 1]).wait()[0] for node in nodes])
        temperature = self._base.sampling.values(slice(slot, slot + 1))[0].temperature
        return found if self.key.acceptance == GREEDY or temperature == 0 else found * np.float32(temperature)


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
        self.pending[slot], self.base_rows[slot], self.draft_rows[slot] = 1, count, count - 1

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
