"""Runs the engines of an EAGLE draft model: prefill of one slot, and the accept and propose steps of the leading slots.

The draft has KV caches and a rotary table of its own. Its entry i pairs the base's feature of row i with the token that
follows, i + 1, at position i. `prefill` and `accept` commit entries; `propose` writes behind them and commits nothing.
What the base has processed and the draft has not are the pending entries: at least one, whose token is the sequence's
last (the root of the next tree). Plain steps add to them, acceptance replaces them, and each round begins with taking
them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from edgellm.engines.runners.base_runner import BaseEngineRunner, StepKey
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines, Stages, in_order
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.media_inputs import MediaInputs
from edgellm.engines.runners.rows import StepBuffers, bound_inputs
from edgellm.engines.runners.sampling_state import StepReadback, StepRules
from edgellm.engines.runners.states import ModelStates, SlotRows
from edgellm.engines.speculation.draft_plan import DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.drafter import Drafter, Proposal
from edgellm.engines.speculation.tree import CandidateBuffers, TreeLimits
from edgellm.kernels.acceptance.contract import Chain
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.sampling.contract import ModelTables, StepInputs
from edgellm.kernels.tree.contract import Candidates, Expansion, HiddenRows, candidate_count


class EagleDraftEngineRunner(Drafter):
    """Owns engines, weights, KV caches and pending entries of a draft model with the dimensions `config`, and knows how
    far each slot is.

    Of the `base` runner the draft takes embedding and head where it has none of its own, images where it sees them, and
    each slot's difference of position and row, unless rows are its positions. Everything is given to the device in
    order and nothing is waited for. Not thread-safe.
    """

    has_model = True

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
        """`engines` are the draft's, `captured` runs what is taken in beside rounds."""
        largest = limits.verify_sizes[-1], limits.accept_tokens, limits.tree_key_ranges[-1]
        super().__init__(backend, limits, TreeLimits(limits.max_batch, *largest), draft.feature_size)
        self.config = draft
        self._base, self._engines, self._steps = base, engines, captured
        #: Of each slot: entries that the draft has not seen, never too few; rows of the base and of the draft that were
        #: committed by the steps which were read.
        self.unseen, self.base_rows, self.draft_rows = ([0] * limits.max_batch for _ in range(3))
        self._latest: StepReadback | None = None
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
        slots, tokens = limits.max_batch, limits.max_batch * max(top_k, limits.accept_tokens, limits.draft_block)
        self._buffers = StepBuffers(backend, draft.decoder, limits, engines, tokens, "draft")
        self._propose_start = backend.zeros((slots,), "int32")
        self._hidden, self._fed = (backend.zeros((slots * top_k * draft.hidden_size,), "compute") for _ in range(2))
        self._logits = backend.zeros((slots * max(top_k, limits.draft_block) * draft.draft_vocab_size,), "float32")
        size = backend.draft_tree.expand_workspace_size(slots, draft.draft_vocab_size, top_k, limits.draft_block)
        self._workspace = backend.zeros((size,), "uint8")

    def prefill(
        self,
        slot: int,
        token_ids: np.ndarray,
        features: Array,
        position: int,
        chunk: int,
        media: PromptMedia | None = None,
    ) -> None:
        """Commit `token_ids` [n] int32, each with the feature before it, as rows `position`.. of the slot.

        `features` [1, >= chunk, F] compute holds the base's features of rows position..position + n - 1 first; `chunk`
        is the engine's number of tokens, at least n. `media` are those of the prompt, of which the tokens are from
        position + 1 on.
        """
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
        """What commits the pending entries of the leading slots, whose last ones `logits` and hidden states are of;
        `tokens` is the engine's number of tokens, as `taken` says. The counts of the entries are left as they are."""
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

    def proposal(self, batch: int, plan: DraftPlan) -> Proposal:
        if plan.is_given:
            return super().proposal(batch, plan)
        chain = self.chain(batch, plan) if plan.sampled else None
        return Proposal(self.candidates(batch, plan), self.expansion(plan), chain)

    def engines(self, batch: int, plan: DraftPlan, taken: int) -> list[tuple[EngineShape, int]]:
        """See `Drafter`: the one that takes in, and unless candidates are given the one that proposes."""
        takes = self.accept_shape(batch, taken, self.limits.tree_key_ranges[-1]), taken
        return [takes] if plan.is_given else [takes, self.proposing_engine(batch, plan)]

    def stages(self, batch: int, plan: DraftPlan, taken: int, key_ranges: Sequence[int]) -> dict[str, Callable]:
        stages = {DRAFT_ACCEPT: self.accept_step(batch, taken, key_ranges[0])}
        if not plan.is_given:
            stages[DRAFT_PROPOSAL] = self.propose(batch, plan, key_ranges[1])
        return stages

    def taken(self, batch: int) -> int:
        """See `Drafter`: several slots, and engines of fixed shapes, take as many as there can be."""
        return self.limits.accept_tokens if self.backend.fixed_shapes or batch > 1 else self.unseen[0]

    def decode(self, batch: int, rules: StepRules | None = None, begun: StepKey | None = None) -> StepReadback:
        """A plain step. Where there is no room for another entry, the draft takes those that there are before."""
        full = max(self.unseen[:batch]) >= self.limits.accept_tokens
        if full:
            bucket = self._take_pending(batch)
            self.backend.upload(self.pending.counts[:bucket], np.zeros(bucket, np.int32))
            self.unseen[:batch] = [0] * batch
        emitted = self._base.decode(batch, rules, begun)
        step = StepReadback(self.read, self._base.lengths, batch, 0, emitted, full)
        self.launched(step)
        return step

    def launched(self, step: StepReadback) -> None:
        for slot in range(step.batch):
            if self._base.lengths[slot]:
                self.unseen[slot] = step.longest or self.unseen[slot] + 1
        self._latest = step

    def read(self, step: StepReadback, counts: Sequence[int]) -> None:
        for slot, count in enumerate(counts):
            if count:
                if step.draft_accepted:
                    self.draft_rows[slot] = self.base_rows[slot]
                self.base_rows[slot] += count
                if step is self._latest and step.longest:
                    self.unseen[slot] = count
        if step is self._latest:
            self._latest = None

    def take_chunk(
        self, slot: int, following: np.ndarray, position: int, features: Array, media: PromptMedia | None
    ) -> None:
        """See `FeatureUser`: the draft's entries pair each feature with the token after it; the last has none yet."""
        self._base.await_rows()  # the draft's, too
        if len(following):
            chunk = features.shape[1] if self.backend.fixed_shapes else len(following)
            self.prefill(slot, following, features, position, chunk, media)

    def take_tokens(self, slots: slice, tokens: Array, features: Array) -> list[Callable[[], None]]:
        """See `FeatureUser`: a plain step's feature and token join the pending entries."""
        pending, state = rows_of(self.pending, slots), self._base.sequences(slots)
        return [partial(self.backend.acceptance.append_pending, features, tokens, state, pending)]

    def plan_captures(self) -> None:
        tokens = self.limits.accept_tokens
        for batch in self.limits.batches:
            widest = self.accept_shape(batch, tokens, self.limits.tree_key_ranges[-1])
            for rows in self._engines.key_ranges(widest):
                stages = partial(self._taking_step, batch, tokens, rows)
                self._steps.plan(("flush", batch, tokens, rows), stages, kind=f" of {batch} sequences, {rows} rows")

    def start(self, slot: int, count: int) -> None:
        """See `Drafter`: the last token's feature waits for the token drawn after it."""
        self.backend.upload(self.pending.counts[slot : slot + 1], np.zeros(1, np.int32))
        self._set_progress(slot, count, count - 1)

    def held(self, slot: int, rows: int, draft_rows: int | None) -> Iterator[SlotRows]:
        """See `Drafter`: the draft's rows, and the features of what it has not seen."""
        for model, states in self.models.items():
            for each in states.of_slot(slot, draft_rows or 0):
                yield each._replace(name=f"{model}.{each.name}")
        yield SlotRows("draft.features", self.pending.features[slot : slot + 1], rows - (draft_rows or 0))

    def resume(self, slot: int, text_ids: Sequence[int], draft_rows: int | None) -> None:
        assert draft_rows is not None
        pending, one, count = self.pending, slice(slot, slot + 1), len(text_ids) - 1 - draft_rows
        tokens = np.full(pending.token_ids[one].shape, -1, np.int32)
        tokens[0, :count] = text_ids[draft_rows + 1 :]
        self.backend.upload(pending.token_ids[one], tokens)
        for array, value in ((pending.counts, count), (pending.start, draft_rows), (pending.last, count - 1)):
            self.backend.upload(array[one], np.full(array[one].shape, value, np.int32))
        self._set_progress(slot, len(text_ids) - 1, draft_rows)

    def rows(self, slot: int) -> int | None:
        """See `Drafter`; entry i goes with base rows 0..i and token i + 1."""
        return self.draft_rows[slot]

    def complete(self, slot: int, batch: int) -> None:
        if self.unseen[slot]:
            self._take_pending(batch)
            self.draft_rows[slot] = self.base_rows[slot]

    def stop(self, slot: int) -> None:
        self.unseen[slot] = 0

    def move(self, source: int, target: int) -> None:
        pending = self.pending
        for array in (pending.features, pending.token_ids, pending.counts, pending.last):
            self.backend.copy(array[target : target + 1], array[source : source + 1])
        for known in (self.unseen, self.base_rows, self.draft_rows):
            known[target] = known[source]

    @property
    def states(self) -> ModelStates:
        return self.models["draft"]

    def close(self) -> None:
        self._weights.clear()
        self.states.clear()

    def _set_progress(self, slot: int, rows: int, draft_rows: int) -> None:
        self.unseen[slot], self.base_rows[slot], self.draft_rows[slot] = rows - draft_rows, rows, draft_rows

    def _take_pending(self, batch: int) -> int:
        """Enqueue the draft's step over the pending entries; for how many slots."""
        bucket, tokens = self.bucket(batch), self.taken(batch)
        widest = self.accept_shape(bucket, tokens, self.limits.tree_key_ranges[-1])
        key_range = self._engines.key_range(widest, max(self._base.lengths[:batch]) + tokens)
        self._steps.run(("flush", bucket, tokens, key_range), self._taking_step(bucket, tokens, key_range))
        return bucket

    def _taking_step(self, batch: int, tokens: int, key_range: int) -> Stages:
        return {DRAFT_ACCEPT: self.accept_step(batch, tokens, key_range)}

    def accept_shape(self, batch: int, tokens: int, key_range: int) -> EngineShape:
        return EngineShape("accept", batch, tokens, key_range, self.limits.kv_rows, 1, "draft")

    def propose_shape(self, batch: int, width: int, key_range: int) -> EngineShape:
        return EngineShape("propose", batch, width, key_range, self.limits.kv_rows, width, "draft")

    def proposing_engine(self, batch: int, plan: DraftPlan) -> tuple[EngineShape, int]:
        """The engine that `propose` runs, of the largest key range, and the rows behind the committed ones that it
        needs: levels stand one behind the other, and the last one is not fed."""
        widest = self.limits.tree_key_ranges[-1]
        return self.propose_shape(batch, plan.columns, widest), (plan.steps - 1) * plan.columns

    def propose(self, batch: int, plan: DraftPlan, key_range: int) -> Callable[[], None]:
        """What writes the candidates of a plan, but for what its `expansion` finishes: level by level, from the accept
        step's logits on."""
        committed, extend = self._base.sequences(slice(0, batch)).kvcache_start_index, self.expand_step
        if plan.sampled:
            extend = self.draw_step
        steps = [extend(batch, 1, plan)]
        for level in range(1, plan.steps):
            steps += [self.propose_step(batch, level, plan, committed, key_range), extend(batch, level + 1, plan)]
        return in_order(steps)

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
