"""Runs the engines of a draft that fills a block in one pass: DFlash (Chen et al. 2026), and JetSpec's causal kind.

Its row i is of the base's feature of row i alone, at position i: prefill and accept steps write rows and put nothing
out. A round's pass takes the sequence's last token and mask tokens behind it, writes their rows behind the committed
ones, where the next step overwrites them, and says of each place which tokens are likely there, whatever is taken
before it. So a chain has the likeliest token of each place, and a tree the paths whose probabilities have the largest
product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edgellm.engines.model.draft_decoder import draft_program
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.captured_steps import in_order
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.kernels.arrays import Array
from edgellm.kernels.sampling.contract import StepInputs
from edgellm.kernels.tree.contract import Block, Expansion


class BlockDraftEngineRunner(EagleDraftEngineRunner):
    """See `EagleDraftEngineRunner`, whose prefill and accept steps it has; the candidates of all levels come of one
    pass."""

    name = "block"

    def proposing_engine(self, batch: int, plan: DraftPlan) -> tuple[EngineShape, int]:
        """See `EagleDraftEngineRunner`: a whole block, whatever the plan."""
        return self._shape(batch, self.limits.tree_key_ranges[-1]), self.limits.draft_block

    def propose(self, batch: int, plan: DraftPlan, key_range: int) -> Callable[[], None]:
        assert self.config.block is not None
        state, slots, shape = self._base.sequences(slice(0, batch)), slice(0, batch), self._shape(batch, key_range)
        inputs = self._buffers.inputs(shape, state.kvcache_start_index)
        engine = self._engines.bound(shape, slots, lambda: self._bindings(shape, slots, inputs, {}))
        block = Block(self.config.block.mask_token_id, not self.config.block.causal)
        prepare = partial(self.backend.draft_tree.prepare_block, block, state.token_ids, self.tables(slots), inputs)
        if plan.sampled:
            expand = [self.draw_step(batch, level, plan) for level in range(1, plan.steps + 1)]
        else:
            given = self.logits(batch, self.limits.draft_block), self.candidates(batch, plan)
            expansion = Expansion(self.draft_to_target, self._workspace)
            expand = [partial(self.backend.draft_tree.expand_block, plan.level(plan.steps), *given, expansion)]
        return in_order([prepare, engine.enqueue, *expand])

    def expansion(self, plan: DraftPlan) -> None:
        """None: `propose` leaves nothing to be finished."""
        return None

    def draw_step(self, batch: int, level: int, plan: DraftPlan) -> Callable[[], None]:
        """See `EagleDraftEngineRunner`; slot by slot, as the rows of a level do not stand one behind the other."""
        count, chain = self.limits.draft_block, self.chain(batch, plan)
        logits, draws = self.logits(batch, count).reshape(batch * count, self.config.draft_vocab_size), []
        for slot in range(batch):
            one, row = slice(slot, slot + 1), slot * count + level
            own = chain._replace(tokens=chain.tokens[one], probabilities=chain.probabilities[one])
            rows, positions = self._base.sampling.rows(one), self._base.sequences(one).positions
            place = level - 1, logits[row : row + 1]
            draw = self.backend.acceptance.draft_sample
            draws.append(partial(draw, *place, rows, positions, own, self._draw_workspace))
        return in_order(draws)

    def _shape(self, batch: int, key_range: int) -> EngineShape:
        (shape,) = self.limits.propose_shapes(batch, key_range)
        return shape

    def _bindings(
        self, shape: EngineShape, slots: slice, inputs: StepInputs, own: dict[str, Array]
    ) -> dict[str, Array]:
        """What a step of rows or of a block takes, and nothing else of what other drafts are bound to."""
        edge = draft_program(self.config, shape).edge
        bound = super()._bindings(shape, slots, inputs, own)
        return {name: array for name, array in bound.items() if name in edge}

    def _outputs(self, shape: EngineShape) -> dict[str, Array]:
        return {"logits": self.logits(shape.batch, shape.tokens)} if shape.phase == "propose" else {}
