"""The device arrays of a round: candidates, the tree that the base verifies, and what the draft has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.model.config import DecoderConfig, EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.draft_tree_interface import candidate_count


@dataclass(frozen=True, eq=False)
class VerifiedTree:
    """One tree of T nodes in each of B slots, and what was accepted of it (W = longest path + 1).

    `tokens`, `parents`, `depths`, `draw_positions`, `drawn` [B, T] int32; `ancestors` [B, T, T] bool; `thresholds`
    [B, T] and `logits` [B, T, V] float32; `features` [B, T, F] compute; `inputs_embeds`, `rope_rotary_cos_sin`,
    `attention_mask` as the verify engine takes them; `accepted_indices`, `accepted_ids` [B, W], `lengths` [B] and
    `emitted` [B, W+1] int32. See `edgellm.kernels.acceptance_interface` for their meaning.
    """

    plan: DraftPlan
    tokens: Array
    parents: Array
    depths: Array
    ancestors: Array
    draw_positions: Array
    inputs_embeds: Array
    rope_rotary_cos_sin: Array
    attention_mask: Array
    logits: Array
    features: Array
    thresholds: Array
    drawn: Array
    accepted_indices: Array
    accepted_ids: Array
    lengths: Array
    emitted: Array


class VerifiedTrees:
    """Memory for the tree of any plan that engines of `limits` serve, in any number of leading slots."""

    def __init__(self, backend: Backend, config: DecoderConfig, limits: EngineLimits, feature_size: int) -> None:
        self._config, self._feature_size = config, feature_size
        slots, nodes, emitted = limits.max_batch, limits.verify_sizes[-1], limits.accept_tokens
        rows = slots * nodes
        sizes = {
            "tokens": (rows, "int32"),
            "parents": (rows, "int32"),
            "depths": (rows, "int32"),
            "ancestors": (rows * nodes, "bool"),
            "draw_positions": (rows, "int32"),
            "inputs_embeds": (rows * config.hidden_size, "compute"),
            "rope_rotary_cos_sin": (rows * config.rotary_dim, "compute"),
            "attention_mask": (rows * limits.tree_key_ranges[-1], "bool"),
            "logits": (rows * config.vocab_size, "float32"),
            "features": (rows * feature_size, "compute"),
            "thresholds": (rows, "float32"),
            "drawn": (rows, "int32"),
            "accepted_indices": (slots * emitted, "int32"),
            "accepted_ids": (slots * emitted, "int32"),
            "lengths": (slots, "int32"),
            "emitted": (slots * (emitted + 1), "int32"),
        }
        self._buffers = {name: backend.zeros((size,), dtype) for name, (size, dtype) in sizes.items()}
        self._views: dict[tuple[int, DraftPlan, int, int], VerifiedTree] = {}

    def of(self, batch: int, plan: DraftPlan, nodes: int, key_range: int) -> VerifiedTree:
        """The arrays of a plan's tree in the `batch` leading slots, padded to `nodes`; made once."""
        key = (batch, plan, nodes, key_range)
        if key not in self._views:
            self._views[key] = self._make(*key)
        return self._views[key]

    def _make(self, batch: int, plan: DraftPlan, nodes: int, key_range: int) -> VerifiedTree:
        config, per_node, per_path = self._config, (batch, nodes), (batch, plan.longest)
        shapes = {
            "tokens": per_node,
            "parents": per_node,
            "depths": per_node,
            "ancestors": (batch, nodes, nodes),
            "draw_positions": per_node,
            "inputs_embeds": (batch, nodes, config.hidden_size),
            "rope_rotary_cos_sin": (batch, nodes, config.rotary_dim),
            "attention_mask": (batch, 1, nodes, key_range),
            "logits": (batch, nodes, config.vocab_size),
            "features": (batch, nodes, self._feature_size),
            "thresholds": per_node,
            "drawn": per_node,
            "accepted_indices": per_path,
            "accepted_ids": per_path,
            "lengths": (batch,),
            "emitted": (batch, plan.longest + 1),
        }
        return VerifiedTree(plan, **{name: leading(self._buffers[name], shape) for name, shape in shapes.items()})


@dataclass(frozen=True, eq=False)
class Candidates:
    """Of B slots: `tokens`, `scores`, `parents` [B, C], `frontiers` [B, F, K], `selected` [B, V-1].

    See `edgellm.kernels.draft_tree_interface` for their meaning. Frontiers and selection of a static tree are constant.
    """

    plan: DraftPlan
    tokens: Array
    scores: Array
    parents: Array
    frontiers: Array
    selected: Array


class CandidateBuffers:
    """Memory for the candidates of any plan that engines of `limits` serve, for any number of leading slots."""

    def __init__(self, backend: Backend, limits: EngineLimits) -> None:
        self._backend = backend
        slots, top_k, steps = limits.max_batch, limits.draft_top_k, limits.draft_steps
        candidates = slots * candidate_count(steps, top_k)
        self._tokens = backend.zeros((candidates,), "int32")
        self._scores = backend.zeros((candidates,), "float32")
        self._parents = backend.zeros((candidates,), "int32")
        self._frontiers = backend.zeros((slots * max(1, steps - 1) * top_k,), "int32")
        self._selected = backend.zeros((slots * (limits.verify_sizes[-1] - 1),), "int32")
        self._views: dict[tuple[int, DraftPlan], Candidates] = {}

    def of(self, batch: int, plan: DraftPlan) -> Candidates:
        """The arrays of a plan for the `batch` leading slots; made once."""
        views = self._views.get((batch, plan))
        if views is None:
            views = self._views[batch, plan] = self._make(batch, plan)
        return views

    def _make(self, batch: int, plan: DraftPlan) -> Candidates:
        shape = (batch, plan.candidates)
        frontiers = (batch, max(1, plan.steps - 1), plan.top_k)
        selected = (batch, plan.tree_size - 1)
        parents, idle = leading(self._parents, shape), (-1,) * plan.top_k
        if plan.sampled:  # drawn tokens are written without their parents, which are those before them
            parents = self._constant(range(-1, plan.steps - 1), shape)
        chosen = leading(self._frontiers, frontiers), leading(self._selected, selected)
        if plan.is_static:
            chosen = self._constant(plan.frontiers or [idle], frontiers), self._constant(plan.selection, selected)
        return Candidates(plan, leading(self._tokens, shape), leading(self._scores, shape), parents, *chosen)

    def _constant(self, values: Sequence, shape: tuple[int, ...]) -> Array:
        """The values of one slot, for every slot."""
        return uploaded(self._backend, np.broadcast_to(np.asarray(values, np.int32), shape))


class PendingEntries:
    """What the draft has not seen yet, of each slot; P = `EngineLimits.accept_tokens`.

    `features` [S, P, F] compute and `token_ids` [S, P] are the entries, `counts` [S] how many there are, `start` [S]
    the draft's committed rows, where they belong, `last` [S, 1] the index of the last of them; all but features int32.
    """

    def __init__(self, backend: Backend, slots: int, rows: int, feature_size: int) -> None:
        self.features = backend.zeros((slots, rows, feature_size), "compute")
        self.token_ids = backend.zeros((slots, rows), "int32")
        self.counts = backend.zeros((slots,), "int32")
        self.start = backend.zeros((slots,), "int32")
        self.last = backend.zeros((slots, 1), "int32")
