"""Runs the engines of an EAGLE draft model: prefill of one slot, and the accept and propose steps of the leading slots.

The draft has KV caches and a rotary table of its own. Its entry i pairs the base's feature of row i with the token that
follows, i + 1, at position i. `prefill` and `accept` commit entries; `propose` writes behind them and commits nothing.
What the base has processed and the draft has not are the pending entries: at least one, whose token is the sequence's
last (the root of the next tree).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_draft_to_target
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DRAFT_EMBEDDING, DraftConfig
from edgellm.engines.model.draft_decoder import draft_engine_weights, draft_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.model.states import decoder_states
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines, in_order
from edgellm.engines.runners.media_inputs import MediaInputs
from edgellm.engines.runners.rows import StepBuffers, bound_inputs
from edgellm.engines.runners.states import ModelStates
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.drafter import ModelDrafter, Proposal
from edgellm.engines.speculation.tree import CandidateBuffers
from edgellm.kernels.acceptance.contract import Chain
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.sampling.contract import ModelTables, StepInputs
from edgellm.kernels.tree.contract import Candidates, Expansion, HiddenRows, candidate_count


class EagleDraftEngineRunner(ModelDrafter):
    """Owns engines, weights, KV caches and pending entries of a draft model with the dimensions `config`.

    Of the `base` runner the draft takes embedding and head where it has none of its own, images where it sees them, and
    each slot's difference of position and row, unless rows are its positions.
    """

    def __init__(
        self,
        backend: Backend,
        draft: DraftConfig,
        limits: EngineLimits,
        checkpoint: Checkpoint,
        base: BaseEngineRunner,
        engines: LoadedEngines,
        captured: CapturedSteps,
    ) -> None:
        super().__init__(backend, limits, base, engines, captured, draft.feature_size)
        self.config = draft
        own = backend.load_weights(checkpoint, draft_weights(draft))
        self._weights = {
            phase: draft_engine_weights(draft, phase, own, base.weights) for phase in ("prefill", "accept", "propose")
        }
        is_rotated_alike = bool(draft.decoder.mrope_section) or not base.config.mrope_section
        self._tables = ModelTables(
            own[DRAFT_EMBEDDING] if draft.has_embedding else base.weights[draft.base_embedding],
            uploaded(backend, rotary_table(draft.decoder, limits.kv_rows, limits.kv_capacity)),
            base.offsets if is_rotated_alike else backend.zeros((limits.max_batch,), "int32"),
        )
        mapping = load_draft_to_target(checkpoint, draft)
        inverse = np.full(draft.decoder.vocab_size, -1, np.int32)  # -1: the draft has no such id
        inverse[mapping] = np.arange(len(mapping), dtype=np.int32)
        self.draft_to_target, self.target_to_draft = uploaded(backend, mapping), uploaded(backend, inverse)
        layers = decoder_states(draft.decoder)
        self.models = {"draft": ModelStates(backend, layers, limits.max_batch, limits.kv_rows, self.pending.start)}
        top_k, steps = limits.draft_top_k, limits.draft_steps
        sizes = candidate_count(steps, top_k), max(1, steps - 1) * top_k, limits.verify_sizes[-1] - 1
        self._candidates = CandidateBuffers(backend, limits.max_batch, *sizes)
        self._media_inputs = MediaInputs(backend, draft.decoder, limits, self._tables.rotary)
        if draft.image_embeddings:
            self._media_inputs.rows = base.media_rows
        self._allocate_buffers()

    def prefill(self, slot, token_ids, features, position, chunk, media=None):
        count = len(token_ids)
        if not 0 < count <= chunk:
            raise EngineError(f"{count} tokens for a chunk of {chunk}: at least one, and no more, must be given")
        buffers = self._buffers
        ids = buffers.upload_prompt(token_ids, position, chunk)
        self.backend.upload(buffers.last_token_ids, np.asarray([[count - 1]], np.int32))
        widest = EngineShape("prefill", 1, chunk, self.limits.key_ranges[-1], self.limits.kv_rows, model="draft")
        shape = replace(widest, key_range=self._engines.key_range(widest, position + count))
        one = slice(slot, slot + 1)
        feature_rows = leading(features.reshape(-1), (1, chunk, self.config.feature_size))
        if self.backend.fixed_shapes:
            self._engines.hold(shape)
        inputs = buffers.inputs(shape, buffers.prefill_start)

        def bindings() -> dict[str, Array]:
            own = {"hidden_states_input": feature_rows, "last_token_ids": buffers.last_token_ids}
            return self._bindings(shape, one, inputs, own)

        engine = self._engines.bound(shape, one, bindings, keep=False)
        self.backend.kernels.prepare_step(self.tables(one), ids, inputs)
        tokens = position + 1, position + 1 + count
        self._media_inputs.write(slot, media, position, tokens, ids, inputs._asdict())
        engine.enqueue()

    def accept_step(self, batch: int, tokens: int, key_range: int) -> Callable[[], None]:
        """See `ModelDrafter`; `logits` and hidden states are those of the last ones."""
        slots = slice(0, batch)
        pending = rows_of(self.pending, slots)
        shape = self.accept_shape(batch, tokens, key_range)
        inputs = self._buffers.inputs(shape, pending.start)

        def bindings() -> dict[str, Array]:
            features = leading(pending.features.reshape(-1), (batch, tokens, self.config.feature_size))
            own = {"hidden_states_input": features, "last_token_ids": pending.last}
            return self._bindings(shape, slots, inputs, own)

        engine = self._engines.bound(shape, slots, bindings)
        ids = leading(pending.token_ids.reshape(-1), (batch, tokens))
        prepare = partial(self.backend.kernels.prepare_step, self.tables(slots), ids, inputs)
        return in_order([prepare, engine.enqueue])

    def candidates(self, batch: int, plan: DraftPlan) -> Candidates:
        return self._candidates.of(batch, plan)

    def expand_step(self, batch: int, level: int, plan: DraftPlan) -> Callable[[], None]:
        """What writes the candidates of `level` from the logits of the accept step (level 1) or of propose step
        level - 1."""
        logits = self.logits(batch, 1 if level == 1 else plan.columns)
        expansion = Expansion(self.draft_to_target, self._workspace)
        expand = self.backend.draft_tree.expand_frontier
        return partial(expand, plan.level(level), logits, self.candidates(batch, plan), expansion)

    def expansion(self, plan: DraftPlan) -> Expansion | None:
        """What the kernel that follows `expand` finishes; None where candidates are drawn."""
        return None if plan.sampled else Expansion(self.draft_to_target, self._workspace)

    def propose_step(
        self, batch: int, level: int, plan: DraftPlan, committed: Array, key_range: int
    ) -> Callable[[], None]:
        """What feeds the frontier of `level` to the draft, behind the `committed` [B] rows; `logits` are its then."""
        slots, width = slice(0, batch), plan.columns
        shape = self.propose_shape(batch, width, key_range)
        inputs = self._buffers.inputs(shape, self._propose_start[slots])
        fed = leading(self._fed, (batch, width, self.config.hidden_size))

        def bindings() -> dict[str, Array]:
            return self._bindings(shape, slots, inputs, {"hidden_states_from_draft": fed})

        engine = self._engines.bound(shape, slots, bindings)
        hidden = HiddenRows(self.hidden_states(batch, 1 if level == 1 else width), fed)
        given = self.tables(slots), self.candidates(batch, plan), hidden, inputs, self.expansion(plan)
        prepare = partial(self.backend.draft_tree.prepare_proposal, plan.level(level), committed, *given)
        return in_order([prepare, engine.enqueue])

    def accept_shape(self, batch: int, tokens: int, key_range: int) -> EngineShape:
        return EngineShape("accept", batch, tokens, key_range, self.limits.kv_rows, 1, "draft")

    def propose_shape(self, batch: int, width: int, key_range: int) -> EngineShape:
        return EngineShape("propose", batch, width, key_range, self.limits.kv_rows, width, "draft")

    def proposing_engine(self, batch: int, plan: DraftPlan) -> tuple[EngineShape, int]:
        """See `ModelDrafter`: levels stand one behind the other; the last one is not fed."""
        widest = self.limits.tree_key_ranges[-1]
        return self.propose_shape(batch, plan.columns, widest), (plan.steps - 1) * plan.columns

    def propose(self, batch: int, plan: DraftPlan, key_range: int) -> Callable[[], None]:
        """See `ModelDrafter`: level by level, from the accept step's logits on."""
        committed, extend = self._base.sequences(slice(0, batch)).kvcache_start_index, self.expand_step
        if plan.sampled:
            extend = self.draw_step
        steps = [extend(batch, 1, plan)]
        for level in range(1, plan.steps):
            steps += [self.propose_step(batch, level, plan, committed, key_range), extend(batch, level + 1, plan)]
        return in_order(steps)

    def own_proposal(self, batch: int, plan: DraftPlan) -> Proposal:
        candidates = self.candidates(batch, plan)
        chain = self.chain(batch, plan) if plan.sampled else None
        return Proposal(candidates, self.expansion(plan), chain)

    def draw_step(self, batch: int, level: int, plan: DraftPlan) -> Callable[[], None]:
        """What draws token `level` of a sampled chain from the latest logits, and keeps their distribution."""
        slots, logits = slice(0, batch), self.logits(batch, 1).reshape(batch, self.config.draft_vocab_size)
        rows, positions = self._base.sampling.rows(slots), self._base.sequences(slots).positions
        own = self.chain(batch, plan), self._draw_workspace
        return partial(self.backend.acceptance.draft_sample, level - 1, logits, rows, positions, *own)

    def chain(self, batch: int, plan: DraftPlan) -> Chain:
        shape = (batch, plan.steps, self.config.draft_vocab_size)
        tokens, probabilities = self.candidates(batch, plan).tokens, leading(self._probabilities, shape)
        return Chain(tokens, probabilities, self.draft_to_target, self.target_to_draft)

    @cached_property
    def _probabilities(self) -> Array:
        """The distributions that sampled chains are drawn from; allocated when they are first asked for."""
        size = self.limits.max_batch * self.limits.draft_steps * self.config.draft_vocab_size
        return self.backend.zeros((size,), "float32")

    @cached_property
    def _draw_workspace(self) -> Array:
        vocabulary = self.config.draft_vocab_size
        size = self.backend.acceptance.draft_workspace_size(self.limits.max_batch, vocabulary)
        return self.backend.zeros((size,), "uint8")

    def logits(self, batch: int, nodes: int) -> Array:
        """[B, nodes, Vd] float32 of the latest step: of accept (one node) or propose (K)."""
        return leading(self._logits, (batch, nodes, self.config.draft_vocab_size))

    def hidden_states(self, batch: int, nodes: int) -> Array:
        """[B, nodes, H] compute that the latest step put out, what the next propose step takes."""
        return leading(self._hidden, (batch, nodes, self.config.hidden_size))

    def close(self) -> None:
        self._weights.clear()
        super().close()

    def _allocate_buffers(self) -> None:
        backend, draft, limits = self.backend, self.config, self.limits
        slots, top_k = limits.max_batch, limits.draft_top_k
        tokens = slots * max(top_k, limits.accept_tokens, limits.draft_block)
        self._buffers = StepBuffers(backend, draft.decoder, limits, self._engines, tokens, "draft")
        self._propose_start = backend.zeros((slots,), "int32")
        self._hidden = backend.zeros((slots * top_k * draft.hidden_size,), "compute")
        self._fed = backend.zeros((slots * top_k * draft.hidden_size,), "compute")
        self._logits = backend.zeros((slots * max(top_k, limits.draft_block) * draft.draft_vocab_size,), "float32")
        size = backend.draft_tree.expand_workspace_size(slots, draft.draft_vocab_size, top_k, limits.draft_block)
        self._workspace = backend.zeros((size,), "uint8")

    def tables(self, slots: slice) -> ModelTables:
        return self._tables._replace(position_offsets=self._tables.position_offsets[slots])

    def _bindings(
        self, shape: EngineShape, slots: slice, inputs: StepInputs, own: dict[str, Array]
    ) -> dict[str, Array]:
        """Everything that an engine is bound to: what is the phase's `own`, and what all bind alike."""
        bound = own | self._weights[shape.phase] | bound_inputs(inputs) | self._outputs(shape)
        return bound | self.states.bound(slots)

    def _outputs(self, shape: EngineShape) -> dict[str, Array]:
        rows = shape.batch, shape.selected
        return {"logits": self.logits(*rows), "hidden_states": self.hidden_states(*rows)}
