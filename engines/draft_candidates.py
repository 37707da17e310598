"""The arrays in which a round's candidates grow, and the constants of static trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.model.config import EngineLimits
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.draft_tree_interface import candidate_count


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
