"""The second half of a round: the base model verifies a tree, accepted tokens are chosen, the state advances."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import product

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.limits import GIVEN_TREES, EngineLimits, EngineShape
from edgellm.engines.model.memory_plan import GIVEN_NODES, kept_bytes
from edgellm.engines.model.states import decoder_states
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines, in_order
from edgellm.engines.runners.states import Kept, ReplayInputs
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.drafter import Drafter, Proposal
from edgellm.engines.speculation.tree import TreeLimits, VerifiedTree, VerifiedTrees, tree_bytes
from edgellm.kernels.acceptance.contract import Pending, TypicalBounds
from edgellm.kernels.arrays import ITEM_SIZES, Array
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.sampling.contract import SequenceState

#: How tokens are accepted: the argmax of plain logits; vanilla's own draws; typical acceptance; the p/q test.
GREEDY, DRAWN, TYPICAL, SAMPLED = "greedy", "drawn", "typical", "sampled"
#: The most given candidates that a round accepts one after the other.
GIVEN_DEPTH = 16
#: Tokens of the largest trees of given candidates, and of those where memory is short.
GIVEN_SIZES = (GIVEN_NODES, 16, 8)


def given_limits(limits: EngineLimits, nodes: int) -> TreeLimits:
    """The largest trees of given candidates without a draft."""
    return TreeLimits(limits.max_batch, nodes, GIVEN_DEPTH + 1, limits.tree_key_ranges[-1])


def given_tree_bytes(config: DecoderConfig, limits: EngineLimits, nodes: int, dtype: str) -> int:
    """What `TreeVerification` allocates for them; the logits of all nodes are the largest part."""
    size = given_limits(limits, nodes)
    pending = size.slots * size.emitted * len(config.feature_layers) * config.hidden_size * ITEM_SIZES[dtype]
    kept = kept_bytes(decoder_states(config, limits.kv_cache), size.slots, nodes)
    return tree_bytes(config, size, dtype) + pending + kept


def given_shapes(limits: EngineLimits, adapters: bool, taken: Callable[[EngineShape], bool]) -> list[EngineShape]:
    """The engines that verify given candidates without a draft, as far as they are `taken`: with adapters, too, where
    there are `adapters`."""
    keys = limits.tree_key_ranges[-1]
    shapes = [limits.base_shape("verify", *each, keys, each[1]) for each in product(limits.batches, GIVEN_TREES)]
    shapes += [limits.with_adapters(shape) for shape in shapes if adapters]
    return [shape for shape in shapes if taken(shape)]


class TreeVerification:
    """Owns the arrays of trees, and asks `engines` for those that verify. Of the `draft` it knows the largest trees,
    and what takes what was accepted. The arrays are made when they are first asked for.
    """

    def __init__(self, backend: Backend, base: BaseEngineRunner, draft: Drafter, engines: LoadedEngines) -> None:
        self._backend, self._base, self._draft, self._engines = backend, base, draft, engines
        self._sizes = base.limits.verify_sizes if draft.has_model else ()
        self._taken: dict[tuple[int, DraftPlan], bool] = {}
        #: Called between verification and acceptance of each round, for measurements with a given acceptance; captured
        #: like the rest. Set it before the first round.
        self.before_acceptance: Callable[[VerifiedTree], object] = lambda tree: None

    def tree(self, plan: DraftPlan, key_range: int, state: SequenceState) -> VerifiedTree:
        """The arrays of a plan's tree, padded to the engine's number of tokens, for sequences in a `state`."""
        return self._arrays[0].of(plan, self.engine_nodes(plan), key_range, state.kvcache_start_index)

    def reserve(self, nodes: int) -> None:
        """Take, without a draft, trees of up to `nodes` tokens, and allocate their arrays now, before the first round.
        Raises EngineError where memory is short."""
        if not self._draft.has_model:
            self._draft.trees = given_limits(self._base.limits, nodes)
            _ = self._arrays

    @property
    def most_nodes(self) -> int:
        return self._draft.trees.nodes

    @property
    def most_given(self) -> int:
        """The most given tokens that a round accepts one after the other."""
        return min(self._draft.trees.emitted - 1, GIVEN_DEPTH)

    def engine_nodes(self, plan: DraftPlan) -> int:
        """T: the tokens of the engine that verifies a plan's tree."""
        if not self._backend.fixed_shapes or not self._sizes:
            return plan.tree_size
        return next(size for size in self._sizes if size >= plan.tree_size)

    def takes(self, batch: int, plan: DraftPlan) -> bool:
        """Whether there are engines that verify a given plan's tree in so many slots, without a plan to be built."""
        asked = batch, plan
        if asked not in self._taken:  # a backend takes milliseconds to say, and rounds are chosen in microseconds
            self._taken[asked] = self._takes(batch, plan)
        return self._taken[asked]

    def _takes(self, batch: int, plan: DraftPlan) -> bool:
        nodes = self.engine_nodes(plan) if plan.tree_size <= self._draft.trees.nodes else 0
        if not nodes or plan.longest > self._draft.trees.emitted:
            return False
        if not self._backend.fixed_shapes:
            return True
        widest = self._draft.trees.keys
        shapes = [self.shape(batch, nodes, widest, adapts) for adapts in self._base.adapter_kinds]
        return all(self._engines.has(shape) or self._backend.takes_any_key_range(shape) for shape in shapes)

    def shape(self, batch: int, nodes: int, key_range: int, adapts: bool) -> EngineShape:
        shape = self._base.limits.base_shape("verify", batch, nodes, key_range, nodes)
        return self._base.limits.with_adapters(shape) if adapts else shape

    def verify_step(
        self, tree: VerifiedTree, proposal: Proposal, state: SequenceState, adapts: bool
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """What chooses the tree's nodes and lays it out behind the committed rows, and what computes logits and
        features of all. `state` is that of the tree's slots; `adapts` says whether one of them has an adapter."""
        (batch, nodes), inputs, plan = tree.nodes.tokens.shape, tree.inputs, tree.plan
        slots = slice(0, batch)
        shape = self.shape(batch, nodes, inputs.attention_mask.shape[3], adapts)
        engine = self._engines.bound(shape, slots, lambda: self._bindings(shape, tree))
        given = state, self._base.tables(slots), proposal.candidates, tree.nodes, inputs, proposal.expansion
        prepare = self._backend.draft_tree.prepare_verification
        return partial(prepare, plan.level(plan.levels), *given), engine.enqueue

    def accept_step(
        self, tree: VerifiedTree, proposal: Proposal, state: SequenceState, acceptance: str, constrained: bool
    ) -> Callable[[], None]:
        """What chooses what is accepted of the tree, by one of this module's rules, moves the accepted KV rows
        together, keeps their features for the draft, and takes the tokens into the state. With `constrained` masks and
        biases come before."""
        kernels, slots = self._backend.acceptance, slice(0, tree.nodes.tokens.shape[0])
        sampling = self._base.sampling
        rows, pending = sampling.rows(slots), rows_of(self._draft.pending, slots)
        logits, nodes, accepted, active = tree.logits, tree.nodes, tree.accepted, state.active
        steps: list[Callable[[], object]] = [lambda: self.before_acceptance(tree)]
        if constrained:
            steps.append(partial(sampling.constrain, slots, logits.logits))
        if acceptance == GREEDY:
            steps.append(partial(kernels.eagle_accept, logits.logits, nodes, active, accepted, self._workspace))
        elif acceptance == DRAWN:
            steps.append(partial(kernels.accept_draws, logits, nodes, state, rows, accepted))
        elif acceptance == SAMPLED:
            assert proposal.chain is not None
            drawn = rows, proposal.chain, accepted, self._workspace
            steps.append(partial(kernels.accept_sampled_draws, logits, nodes, state, *drawn))
        else:
            bounds = TypicalBounds(tree.plan.posterior_threshold, tree.plan.posterior_alpha)
            own = rows, bounds, accepted, self._workspace
            steps.append(partial(kernels.draw_nodes, logits, nodes, state, rows))
            steps.append(partial(kernels.typical_accept, logits, nodes, active, *own))
        kept = self._kept(tree)
        steps.append(self._base.states.commit(state.kvcache_start_index, accepted, tree.features, pending, kept))
        steps.append(partial(kernels.advance_accepted, accepted, state, pending, tree.emitted))
        return in_order(steps)

    @cached_property
    def _arrays(self) -> tuple[VerifiedTrees, Pending, ReplayInputs]:
        trees = self._draft.trees
        pending, kept = self._draft.pending, self._base.states.kept_inputs(trees.slots, trees.nodes)
        return VerifiedTrees(self._backend, self._base.config, trees), pending, kept

    def _bindings(self, shape: EngineShape, tree: VerifiedTree) -> dict[str, Array]:
        bound = self._base.engine_weights() | tree.inputs._asdict() | {"logits": tree.logits.logits}
        bound |= self._base.token_rows.bound(shape)
        if tree.features.shape[2]:
            bound["hidden_states"] = tree.features
        slots, states = slice(0, shape.batch), self._base.states
        if states.is_recurrent:
            bound["node_parents"] = tree.nodes.parents
        return bound | states.bound(slots, self._kept(tree)) | self._base.adapter_inputs(shape, slots)

    def _kept(self, tree: VerifiedTree) -> Kept:
        batch, nodes = tree.nodes.tokens.shape
        return self._arrays[2].of(batch, nodes)

    @cached_property
    def _workspace(self) -> Array:
        trees = self._draft.trees
        return self._backend.zeros((self._backend.acceptance.accept_workspace_size(trees.slots, trees.nodes),), "uint8")
