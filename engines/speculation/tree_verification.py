"""The second half of a round: the base model verifies a tree, accepted tokens are chosen, the state advances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.tree import Candidates, PendingEntries, VerifiedTree, VerifiedTrees
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.interface import SequenceState

#: How tokens are accepted: the argmax of plain logits; vanilla's own draws; typical acceptance; the p/q test.
GREEDY, DRAWN, TYPICAL, SAMPLED = "greedy", "drawn", "typical", "sampled"


class TreeVerification:
    """Owns the verify engines and the arrays of the tree. `draft` supplies q and the mapping of sampled chains."""

    def __init__(
        self, backend: Backend, base: BaseEngineRunner, draft: EagleDraftEngineRunner, engines: LoadedEngines
    ) -> None:
        self._backend, self._base, self._draft, self._engines = backend, base, draft, engines
        self._sizes, self._kv_rows = base.limits.verify_sizes, base.limits.kv_rows
        self._trees = VerifiedTrees(backend, base.config, base.limits, draft.config.draft.feature_size)
        self._draft_probabilities: Array | None = None
        self._workspaces: dict[str, Array] = {}
        #: Called between verification and acceptance of each round, for measurements with a given acceptance; captured
        #: like the rest. Set it before the first round.
        self.before_acceptance: Callable[[VerifiedTree], None] | None = None

    def tree(self, batch: int, plan: DraftPlan, key_range: int) -> VerifiedTree:
        """The arrays of a plan's tree, padded to the engine's number of tokens."""
        return self._trees.of(batch, plan, self.engine_nodes(plan), key_range)

    def engine_nodes(self, plan: DraftPlan) -> int:
        """T: the tokens of the engine that verifies a plan's tree."""
        if not self._backend.fixed_shapes:
            return plan.tree_size
        return next(size for size in self._sizes if size >= plan.tree_size)

    def verify_step(
        self, tree: VerifiedTree, candidates: Candidates, state: SequenceState, adapts: bool
    ) -> Callable[[], None]:
        """What chooses the tree's nodes, lays it out behind the committed rows, and computes logits and features of
        all. `state` is that of the tree's slots; `adapts` says whether one of them has an adapter."""
        batch, nodes = tree.tokens.shape
        slots, base = slice(0, batch), self._base
        shape = EngineShape("verify", batch, nodes, tree.attention_mask.shape[3], self._kv_rows, nodes)
        if adapts:
            shape = base.limits.with_adapters(shape)
        engine = self._engines.bound(shape, slots, lambda: self._bindings(shape, tree, state.kvcache_start_index))
        prepare = partial(
            self._backend.draft_tree.prepare_verification,
            not tree.plan.is_static,
            tree.plan.candidates,
            state.token_ids,
            state.positions,
            state.kvcache_start_index,
            base.offsets[slots],
            base.rotary,
            base.embedding,
            candidates.tokens,
            candidates.scores,
            candidates.parents,
            candidates.frontiers,
            candidates.selected,
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.ancestors,
            tree.draw_positions,
            tree.inputs_embeds,
            tree.rope_rotary_cos_sin,
            tree.attention_mask,
            self._draft.expansion(tree.plan.steps, candidates),
        )

        def verify() -> None:
            prepare()
            engine.enqueue()

        return verify

    def accept(self, tree: VerifiedTree, state: SequenceState, acceptance: str) -> None:
        """Choose what is accepted of the tree, by one of this module's rules."""
        if self.before_acceptance is not None:
            self.before_acceptance(tree)
        batch, nodes = tree.tokens.shape
        slots, sampling = slice(0, batch), self._base.sampling
        accepted = (tree.accepted_indices, tree.accepted_ids, tree.lengths)
        if acceptance == GREEDY:
            self._backend.acceptance.eagle_accept(
                tree.logits,
                tree.tokens,
                tree.parents,
                tree.depths,
                state.active,
                None,
                *accepted,
                self._workspace("eagle_accept"),
            )
        elif acceptance == DRAWN:
            self._backend.acceptance.accept_draws(
                tree.logits,
                state.token_counts,
                tree.tokens,
                tree.parents,
                tree.depths,
                tree.ancestors,
                tree.draw_positions,
                state.active,
                sampling.slot_draws(slots),
                sampling.node_draws(batch, nodes),
                tree.thresholds,
                tree.drawn,
                *accepted,
            )
        elif acceptance == SAMPLED:
            self._backend.acceptance.accept_sampled_draws(
                tree.logits,
                state.token_counts,
                tree.tokens,
                tree.ancestors,
                self._probabilities(batch, tree.plan.steps),
                self._draft.target_to_draft,
                tree.draw_positions,
                state.active,
                sampling.slot_draws(slots),
                sampling.node_draws(batch, nodes),
                tree.thresholds,
                *accepted,
                self._workspace("sampling"),
            )
        else:
            self._accept_typical(tree, state)

    def advance(self, tree: VerifiedTree, state: SequenceState, pending: PendingEntries) -> None:
        """Move the accepted KV rows together, keep their features for the draft, and take the tokens into the state."""
        slots = slice(0, tree.tokens.shape[0])
        acceptance = self._backend.acceptance
        accepted = (tree.accepted_indices, tree.lengths)
        caches, features = list(self._base.caches.values()), pending.features[slots]
        acceptance.move_accepted(caches, state.kvcache_start_index, *accepted, tree.features, features)
        acceptance.advance_accepted(
            tree.accepted_ids,
            tree.lengths,
            state.active,
            state.token_ids,
            state.kvcache_start_index,
            state.positions,
            state.token_counts,
            pending.token_ids[slots],
            pending.counts[slots],
            pending.start[slots],
            pending.last[slots],
            tree.emitted,
        )

    def draw_child(self, batch: int, step: int, candidates: Candidates) -> None:
        """Draw token `step` of a sampled chain from the draft's latest logits, and keep its distribution."""
        slots = slice(0, batch)
        draws = self._base.sampling.slot_draws(slots)
        logits = self._draft.logits(batch, 1)
        self._backend.acceptance.draft_sample(
            logits.reshape(batch, logits.shape[2]),
            self._draft.draft_to_target,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seeds,
            draws.sequences,
            self._base.sequences(slots).positions,
            step,
            candidates.tokens,
            self._probabilities(batch, candidates.plan.steps),
            self._workspace("draft_sample", self._draft.config.draft.draft_vocab_size),
        )

    def _accept_typical(self, tree: VerifiedTree, state: SequenceState) -> None:
        batch, nodes = tree.tokens.shape
        acceptance, kernels, sampling = self._backend.acceptance, self._backend.kernels, self._base.sampling
        slot, node = sampling.slot_draws(slice(0, batch)), sampling.node_draws(batch, nodes)
        acceptance.process_tree_logits(
            tree.logits,
            state.token_counts,
            tree.tokens,
            tree.ancestors,
            slot.repetition_penalty,
            slot.presence_penalty,
            slot.frequency_penalty,
            slot.temperature,
            tree.logits,
        )
        rows = batch * nodes
        logits, thresholds = tree.logits.reshape(rows, tree.logits.shape[2]), tree.thresholds.reshape(rows)
        kernels.filter_threshold(logits, node.top_k, node.top_p, node.min_p, thresholds)
        draw = (node.temperature, node.seeds, node.sequences, tree.draw_positions.reshape(rows))
        kernels.sample(logits, thresholds, *draw, tree.drawn.reshape(rows))
        acceptance.typical_accept(
            tree.logits,
            tree.thresholds,
            slot.temperature,
            tree.drawn,
            tree.tokens,
            tree.parents,
            tree.depths,
            state.active,
            tree.plan.posterior_threshold,
            tree.plan.posterior_alpha,
            tree.accepted_indices,
            tree.accepted_ids,
            tree.lengths,
            self._workspace("sampling"),
        )

    def _bindings(self, shape: EngineShape, tree: VerifiedTree, start: Array) -> dict[str, Array]:
        batch = tree.tokens.shape[0]
        bound = self._base.engine_weights() | {
            "inputs_embeds": tree.inputs_embeds,
            "rope_rotary_cos_sin": tree.rope_rotary_cos_sin,
            "attention_mask": tree.attention_mask,
            "kvcache_start_index": start,
            "logits": tree.logits,
            "hidden_states": tree.features,
        }
        for name, cache in self._base.caches.items():
            bound[name] = bound[f"present_{name}"] = cache[:batch]
        return bound | self._base.adapter_inputs(shape, slice(0, batch))

    def _probabilities(self, batch: int, steps: int) -> Array:
        """The draft's distributions of a sampled chain [B, D, U] float32; allocated when first needed."""
        limits, vocabulary = self._base.limits, self._draft.config.draft.draft_vocab_size
        if self._draft_probabilities is None:
            size = limits.max_batch * limits.draft_steps * vocabulary
            self._draft_probabilities = self._backend.zeros((size,), "float32")
        return leading(self._draft_probabilities, (batch, steps, vocabulary))

    def _workspace(self, use: str, vocabulary: int = 0) -> Array:
        """The workspace of an acceptance kernel, for the largest tree; allocated when first needed."""
        if use not in self._workspaces:
            acceptance, limits = self._backend.acceptance, self._base.limits
            slots, nodes, base_vocabulary = limits.max_batch, limits.verify_sizes[-1], self._base.config.vocab_size
            size = {
                "eagle_accept": lambda: acceptance.eagle_accept_workspace_size(slots, nodes, base_vocabulary),
                "sampling": lambda: acceptance.sampling_workspace_size(slots, nodes, base_vocabulary),
                "draft_sample": lambda: acceptance.draft_sample_workspace_size(slots, vocabulary),
            }[use]()
            self._workspaces[use] = self._backend.zeros((size,), "uint8")
        return self._workspaces[use]
