"""The second half of a round: the base model verifies a tree, accepted tokens are chosen, the state advances."""

from __future__ import annotations

from collections.abc import Callable

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.tree import VerifiedTree, VerifiedTrees
from edgellm.kernels.acceptance.contract import Chain, Pending, TypicalBounds
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.tree.contract import Candidates

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
        start = self._base.sequences(slice(0, batch)).kvcache_start_index
        return self._trees.of(plan, self.engine_nodes(plan), key_range, start)

    def engine_nodes(self, plan: DraftPlan) -> int:
        """T: the tokens of the engine that verifies a plan's tree."""
        if not self._backend.fixed_shapes:
            return plan.tree_size
        return next(size for size in self._sizes if size >= plan.tree_size)

    def verify(self, tree: VerifiedTree, candidates: Candidates) -> None:
        """Choose the tree's nodes, lay it out behind the committed rows, and compute logits and features of all."""
        batch, nodes = tree.nodes.tokens.shape
        slots, base, level = slice(0, batch), self._base, tree.plan.level(tree.plan.steps)
        shape = EngineShape("verify", batch, nodes, tree.inputs.attention_mask.shape[3], self._kv_rows, nodes)
        shape = base.engine_shape(shape, slots)
        engine = self._engines.bound(shape, slots, lambda: self._bindings(shape, tree))
        self._backend.draft_tree.prepare_verification(
            level,
            base.sequences(slots),
            base.tables(slots),
            candidates,
            tree.nodes,
            tree.inputs,
            self._draft.expansion(tree.plan),
        )
        engine.enqueue()

    def accept(self, tree: VerifiedTree, acceptance: str) -> None:
        """Choose what is accepted of the tree, by one of this module's rules."""
        if self.before_acceptance is not None:
            self.before_acceptance(tree)
        slots, kernels = slice(0, tree.nodes.tokens.shape[0]), self._backend.acceptance
        state, rows = self._base.sequences(slots), self._base.sampling.rows(slots)
        logits, nodes, accepted = tree.logits, tree.nodes, tree.accepted
        if acceptance == GREEDY:
            kernels.eagle_accept(logits.logits, nodes, state.active, accepted, self._workspace())
        elif acceptance == DRAWN:
            kernels.accept_draws(logits, nodes, state, rows, accepted)
        elif acceptance == SAMPLED:
            chain = self._chain(self._draft.candidates(slots.stop, tree.plan), tree.plan)
            kernels.accept_sampled_draws(logits, nodes, state, rows, chain, accepted, self._workspace())
        else:
            bounds = TypicalBounds(tree.plan.posterior_threshold, tree.plan.posterior_alpha)
            kernels.draw_nodes(logits, nodes, state, rows)
            kernels.typical_accept(logits, nodes, state.active, rows, bounds, accepted, self._workspace())

    def advance(self, tree: VerifiedTree, pending: Pending) -> None:
        """Move the accepted KV rows together, keep their features for the draft, and take the tokens into the state."""
        slots, acceptance = slice(0, tree.nodes.tokens.shape[0]), self._backend.acceptance
        state, pending, caches = self._base.sequences(slots), rows_of(pending, slots), list(self._base.caches.values())
        acceptance.move_accepted(caches, state.kvcache_start_index, tree.accepted, tree.features, pending)
        acceptance.advance_accepted(tree.accepted, state, pending, tree.emitted)

    def draw_child(self, batch: int, step: int, plan: DraftPlan) -> None:
        """Draw token `step` of a sampled chain from the draft's latest logits, and keep its distribution."""
        slots, logits = slice(0, batch), self._draft.logits(batch, 1)
        self._backend.acceptance.draft_sample(
            step,
            logits.reshape(batch, logits.shape[2]),
            self._base.sampling.rows(slots),
            self._base.sequences(slots).positions,
            self._chain(self._draft.candidates(batch, plan), plan),
            self._workspace(of_draft=True),
        )

    def _chain(self, candidates: Candidates, plan: DraftPlan) -> Chain:
        """The sampled chains of the slots; memory for the draft's distributions is allocated when first needed."""
        limits, vocabulary = self._base.limits, self._draft.config.draft.draft_vocab_size
        if self._draft_probabilities is None:
            size = limits.max_batch * limits.draft_steps * vocabulary
            self._draft_probabilities = self._backend.zeros((size,), "float32")
        shape = (candidates.tokens.shape[0], plan.steps, vocabulary)
        probabilities = leading(self._draft_probabilities, shape)
        return Chain(candidates.tokens, probabilities, self._draft.draft_to_target, self._draft.target_to_draft)

    def _bindings(self, shape: EngineShape, tree: VerifiedTree) -> dict[str, Array]:
        batch = shape.batch
        bound = self._base.engine_weights() | tree.inputs._asdict()
        bound |= {"logits": tree.logits.logits, "hidden_states": tree.features}
        for name, cache in self._base.caches.items():
            bound[name] = bound[f"present_{name}"] = cache[:batch]
        return bound | self._base.adapter_inputs(shape, slice(0, batch))

    def _workspace(self, of_draft: bool = False) -> Array:
        """The workspace of the acceptance kernels, for the largest tree, or of draws from the draft; allocated when
        first needed."""
        use = "draft" if of_draft else "accept"
        if use not in self._workspaces:
            acceptance, limits = self._backend.acceptance, self._base.limits
            slots, vocabulary = limits.max_batch, self._draft.config.draft.draft_vocab_size
            if of_draft:
                size = acceptance.draft_workspace_size(slots, vocabulary)
            else:
                size = acceptance.accept_workspace_size(slots, limits.verify_sizes[-1])
            self._workspaces[use] = self._backend.zeros((size,), "uint8")
        return self._workspaces[use]
