"""One configuration of a round on its fixed memory: the stages that are captured, together or one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from edgellm.engines.speculation.draft_plan import ACCEPTANCE, BASE_VERIFY, DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.tree_verification import GREEDY, SAMPLED
from edgellm.kernels.arrays import Array

if TYPE_CHECKING:
    from edgellm.engines.speculation.eagle_runner import EagleRunner


class EagleRound:
    """A round of `plan` in the `batch` leading slots.

    `acceptance` is a rule of `tree_verification`; `adapts` says whether a slot has an adapter, so that other engines
    verify; `accept_tokens` are the tokens that the accept engine takes; the key ranges are those of the accept, propose
    and verify engines.
    """

    def __init__(
        self,
        runner: EagleRunner,
        batch: int,
        plan: DraftPlan,
        acceptance: str,
        adapts: bool,
        accept_tokens: int,
        accept_range: int,
        propose_range: int,
        verify_range: int,
    ) -> None:
        self.key = (batch, plan, acceptance, adapts, accept_tokens, accept_range, propose_range, verify_range)
        self.plan = plan
        self._runner, self._batch, self._acceptance = runner, batch, acceptance
        self._accept_tokens, self._accept_range, self._propose_range = accept_tokens, accept_range, propose_range
        self._candidates = runner.draft.candidates(batch, plan)
        self._tree = runner.verification.tree(batch, plan, verify_range)

    @property
    def stages(self) -> dict[str, Callable[[], None]]:
        """What enqueues each stage, by name, in their order."""
        return {
            DRAFT_ACCEPT: self._accept_draft,
            DRAFT_PROPOSAL: self._propose,
            BASE_VERIFY: self._verify,
            ACCEPTANCE: self._accept,
        }

    @property
    def emitted(self) -> Array:
        """[B, W+1] int32: the number of tokens of each slot, then these, then -1."""
        return self._tree.emitted

    def logits(self, slot: int, count: int) -> np.ndarray:
        """The base's logits [count, V] float32 for the tokens that the round gave a slot, once it was waited for.

        Where tokens were drawn, acceptance has divided them by the temperature, which is undone here; penalties are
        not.
        """
        backend, tree = self._runner.backend, self._tree
        nodes = backend.read(tree.accepted_indices[slot : slot + 1]).wait()[0, :count].tolist()
        rows = tree.logits[slot : slot + 1].reshape(*tree.logits.shape[1:])
        found = np.stack([backend.read(rows[node : node + 1]).wait()[0] for node in nodes])
        temperature = self._runner.base.sampling.values(slice(slot, slot + 1))[0].temperature
        return found if self._acceptance == GREEDY or temperature == 0 else found * np.float32(temperature)

    def _accept_draft(self) -> None:
        self._runner.draft.accept(self._batch, self._accept_tokens, self._accept_range)

    def _propose(self) -> None:
        draft, batch, candidates = self._runner.draft, self._batch, self._candidates
        committed = self._runner.base.sequences(slice(0, batch)).kvcache_start_index
        self._extend(1)
        for level in range(1, self.plan.steps):
            draft.propose(batch, level, candidates, committed, self._propose_range)
            self._extend(level + 1)

    def _extend(self, level: int) -> None:
        """The candidates of `level`, from the draft's latest logits."""
        if self._acceptance == SAMPLED:
            self._runner.verification.draw_child(self._batch, level - 1, self._candidates)
        else:
            self._runner.draft.expand(self._batch, level, self._candidates)

    def _verify(self) -> None:
        self._runner.verification.verify(self._tree, self._candidates)

    def _accept(self) -> None:
        runner = self._runner
        if runner.before_acceptance is not None:
            runner.before_acceptance(self._tree)
        runner.verification.accept(self._tree, self._acceptance)
        runner.verification.advance(self._tree, runner.draft.pending)
