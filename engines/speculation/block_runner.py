"""Runs the engines of a draft that fills a block in one pass: DFlash (Chen et al. 2026), and JetSpec's causal kind.

Its row i is of the base's feature of row i alone, at position i: prefill and accept steps write rows and put nothing
out. A round's pass takes the sequence's last token and mask tokens behind it, writes their rows behind the committed
ones, where the next step overwrites them, and says of each place which tokens are likely there, whatever is taken
before it. So a chain has the likeliest token of each place, and a tree the paths whose probabilities have the largest
product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.model.config import DraftConfig
from edgellm.engines.model.draft_decoder import draft_program
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.kernels.arrays import Array
from edgellm.kernels.sampling.contract import SequenceState, StepInputs
from edgellm.kernels.tree.contract import Block, Expansion


class BlockDraftEngineRunner(EagleDraftEngineRunner):
    """See `EagleDraftEngineRunner`; the candidates of all levels come of one propose step."""

    def __init__(
        self,
        backend: Backend,
        draft: DraftConfig,
        limits: EngineLimits,
        checkpoint: Checkpoint,
        base: BaseEngineRunner,
        engines: LoadedEngines,
    ) -> None:
        super().__init__(backend, draft, limits, checkpoint, base, engines)
        assert draft.block is not None
        self._size, self._block = draft.block.size, Block(draft.block.mask_token_id, not draft.block.causal)
        places = np.arange(1, self._size, dtype=np.int32)
        self._guessed = uploaded(backend, np.tile(places, (limits.max_batch, 1)))

    def proposal(
        self,
        state: SequenceState,
        plan: DraftPlan,
        key_range: int,
        draw: Callable[[int], Callable[[], None]] | None = None,
    ) -> list[Callable[[], None]]:
        """See `EagleDraftEngineRunner.proposal`."""
        batch = state.active.shape[0]
        slots, shape = slice(0, batch), self.propose_shape(batch, plan, key_range)
        inputs = self._inputs(shape, state.kvcache_start_index)
        own = {"last_token_ids": self._guessed[slots]}
        engine = self._engines.bound(shape, slots, lambda: self._bindings(shape, slots, inputs, own))
        kernels = self.backend.draft_tree
        prepare = partial(kernels.prepare_block, self._block, state.token_ids, self.tables(slots), inputs)
        if draw is not None:
            return [prepare, engine.enqueue, *map(draw, range(plan.steps))]
        logits, expansion = self.logits(batch, self._size - 1), Expansion(self.draft_to_target, self._workspace)
        candidates = self.candidates(batch, plan)
        expand = partial(kernels.expand_block, plan.level(plan.steps), logits, candidates, expansion)
        return [prepare, engine.enqueue, expand]

    def rows_proposed(self, plan: DraftPlan) -> int:
        """Those of a block, whatever the plan."""
        return self._size

    def propose_shape(self, batch: int, plan: DraftPlan, key_range: int) -> EngineShape:
        """The engine that fills a block."""
        return EngineShape("propose", batch, self._size, key_range, self._kv_rows, self._size - 1, "draft")

    def drawn_from(self, batch: int, step: int) -> Iterator[tuple[slice, Array]]:
        """Row `step` of each slot's block, slot by slot: they do not stand one behind the other."""
        count = self._size - 1
        logits = self.logits(batch, count).reshape(batch * count, self.config.draft_vocab_size)
        for slot in range(batch):
            row = slot * count + step
            yield slice(slot, slot + 1), logits[row : row + 1]

    def expansion(self, plan: DraftPlan) -> None:
        """None: `proposal` leaves nothing to be finished."""
        return None

    def _bindings(
        self, shape: EngineShape, slots: slice, inputs: StepInputs, own: dict[str, Array]
    ) -> dict[str, Array]:
        """What rows and a block take; nothing else of what other drafts are bound to."""
        edge = draft_program(self.config, shape).edge
        bound = super()._bindings(shape, slots, inputs, own)
        return {name: array for name, array in bound.items() if name in edge}
