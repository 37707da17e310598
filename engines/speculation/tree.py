"""The device arrays of a round: candidates, the tree that the base verifies, and what the draft has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels.acceptance.contract import Accepted, NodeLogits, Pending
from edgellm.kernels.arrays import ITEM_SIZES, Array, leading
from edgellm.kernels.sampling.contract import StepInputs
from edgellm.kernels.tree.contract import Candidates, TreeNodes


@dataclass(frozen=True, eq=False)
class VerifiedTree:
    """One tree of T nodes in each of B slots, what the base computes of it, and what was accepted. `features` [B, T, F]
    compute are the base's; `emitted` [B, W+1] int32 holds how many tokens, and which."""

    plan: DraftPlan
    nodes: TreeNodes
    inputs: StepInputs
    logits: NodeLogits
    features: Array
    accepted: Accepted
    emitted: Array


@dataclass(frozen=True)
class TreeLimits:
    """The largest trees of a runner: `slots` of `nodes` tokens, the root included, of which `emitted` may be accepted,
    the bonus token included, over `keys` KV rows."""

    slots: int
    nodes: int
    emitted: int
    keys: int


def tree_bytes(config: DecoderConfig, limits: TreeLimits, dtype: str) -> int:
    """What the arrays of `VerifiedTrees` take, but for a few integers."""
    features = len(config.feature_layers) * config.hidden_size
    computed = (config.hidden_size + config.rotary_columns + features) * ITEM_SIZES[dtype]
    wide = (config.vocab_size + 6) * ITEM_SIZES["float32"]  # logits, and one of each of the node's own numbers
    return limits.slots * limits.nodes * (computed + wide + limits.nodes + limits.keys)


class VerifiedTrees:
    """Memory for trees up to `limits`, in any number of leading slots."""

    def __init__(self, backend: Backend, config: DecoderConfig, limits: TreeLimits) -> None:
        self._config, self._feature_size = config, len(config.feature_layers) * config.hidden_size
        slots, emitted = limits.slots, limits.emitted
        rows = slots * limits.nodes

        def integers(size: int) -> Array:
            return backend.zeros((size,), "int32")

        ancestors = backend.zeros((rows * limits.nodes,), "bool")
        self._nodes = TreeNodes(integers(rows), integers(rows), integers(rows), ancestors, integers(rows))
        self._embeds = backend.zeros((rows * config.hidden_size,), "compute")
        self._cos_sin = backend.zeros((rows * config.rotary_columns,), "compute")
        self._mask = backend.zeros((rows * limits.keys,), "bool")
        logits, thresholds = (backend.zeros((size,), "float32") for size in (rows * config.vocab_size, rows))
        self._logits = NodeLogits(logits, thresholds, integers(rows))
        self._features = backend.zeros((rows * self._feature_size,), "compute")
        self._accepted = Accepted(integers(slots * emitted), integers(slots * emitted), integers(slots))
        self._emitted = integers(slots * (emitted + 1))
        self._views: dict[tuple[int, DraftPlan, int, int], VerifiedTree] = {}

    def of(self, plan: DraftPlan, nodes: int, key_range: int, start: Array) -> VerifiedTree:
        """The arrays of a plan's tree, padded to `nodes`, of the leading slots, whose committed rows are `start` [B];
        made once."""
        batch, config = start.shape[0], self._config
        key = (batch, plan, nodes, key_range)
        if key in self._views:
            return self._views[key]
        per_node, per_path = (batch, nodes), (batch, plan.longest)
        vocabulary = (*per_node, config.vocab_size)
        self._views[key] = VerifiedTree(
            plan,
            _views(self._nodes, per_node, per_node, per_node, (*per_node, nodes), per_node),
            StepInputs(
                leading(self._embeds, (*per_node, config.hidden_size)),
                leading(self._cos_sin, (*per_node, config.rotary_columns)),
                leading(self._mask, (batch, 1, nodes, key_range)),
                start,
            ),
            _views(self._logits, vocabulary, per_node, per_node),
            leading(self._features, (*per_node, self._feature_size)),
            _views(self._accepted, per_path, per_path, (batch,)),
            leading(self._emitted, (batch, plan.longest + 1)),
        )
        return self._views[key]


class CandidateBuffers:
    """Memory for the candidates of plans, for any number of up to `slots` leading slots; of each slot, so many
    candidates, places in frontiers, and selected nodes."""

    def __init__(self, backend: Backend, slots: int, candidates: int, frontiers: int, selected: int) -> None:
        self._backend = backend
        scores = backend.zeros((slots * candidates,), "float32")
        sizes = candidates, candidates, frontiers, selected
        tokens, *others = (backend.zeros((slots * size,), "int32") for size in sizes)
        self._buffers = Candidates(tokens, scores, *others)
        self._views: dict[tuple[int, DraftPlan], Candidates] = {}

    def of(self, batch: int, plan: DraftPlan) -> Candidates:
        """The arrays of a plan for the `batch` leading slots; made once. Frontiers and selection of a static tree are
        constant."""
        if (batch, plan) in self._views:
            return self._views[batch, plan]
        shape = (batch, plan.candidates)
        frontiers = (batch, max(1, plan.levels - 1), plan.columns)
        selected = (batch, plan.selected)
        views = _views(self._buffers, shape, shape, shape, frontiers, selected)
        if plan.sampled:  # drawn tokens are written without their parents, which are those before them
            views = views._replace(parents=self._constant(range(-1, plan.steps - 1), shape))
        if plan.is_static:
            levels = plan.frontiers or [(-1,) * plan.columns]
            chosen = self._constant(levels, frontiers), self._constant(plan.selection, selected)
            views = views._replace(frontiers=chosen[0], selected=chosen[1])
        self._views[batch, plan] = views
        return views

    def _constant(self, values: Sequence, shape: tuple[int, ...]) -> Array:
        return uploaded(self._backend, np.broadcast_to(np.asarray(values, np.int32), shape))


def pending_entries(backend: Backend, slots: int, rows: int, feature_size: int) -> Pending:
    """Memory for what the draft has not seen yet, up to `rows` (`EngineLimits.accept_tokens`) entries of each slot."""
    return Pending(
        backend.zeros((slots, rows, feature_size), "compute"),
        backend.zeros((slots, rows), "int32"),
        backend.zeros((slots,), "int32"),
        backend.zeros((slots,), "int32"),
        backend.zeros((slots, 1), "int32"),
    )


def _views(buffers, *shapes):
    """A bundle of the first elements of a bundle of flat buffers, in these shapes."""
    return type(buffers)(*[leading(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)])
