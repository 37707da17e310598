"""Which rounds a plan leads to: by the state of the slots, and all that come up as sequences grow."""

from __future__ import annotations

from typing import NamedTuple

from edgellm.engines.model.limits import EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import LoadedEngines
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.round import RoundKey
from edgellm.engines.speculation.tree_verification import DRAWN, GREEDY, SAMPLED, TYPICAL, TreeVerification


class _RoundKind(NamedTuple):
    """Rounds alike but for the key ranges, named as in `RoundKey`. `engines` are the accept, propose and verify engine,
    each of the largest key range (None: it does not run), with the rows behind the committed ones that it needs."""

    batch: int
    plan: DraftPlan
    acceptance: str
    adapts: bool
    constrained: bool
    accept_tokens: int
    engines: tuple[tuple[EngineShape | None, int], ...]


class RoundKinds:
    """Gives the keys of rounds; what they have in common is looked up once."""

    def __init__(
        self,
        base: BaseEngineRunner,
        draft: EagleDraftEngineRunner | None,
        verification: TreeVerification,
        engines: LoadedEngines,
    ) -> None:
        self._limits, self._fixed_shapes = base.limits, base.backend.fixed_shapes
        self._draft, self._verification, self._engines = draft, verification, engines
        self._made: dict[tuple[int, DraftPlan, bool, bool, bool, int], _RoundKind] = {}

    def key(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, most_pending: int, longest: int
    ) -> RoundKey:
        """The round of `plan` in the `batch` leading slots, none of which has more pending entries, and the longest of
        whose sequences has so many committed rows. `plain`: all draw by argmax; `adapts`: one has an adapter. Raises
        EngineError where the engines cannot serve the plan."""
        asked = batch, plan, plain, adapts, constrained, most_pending
        return self._key(self._made.get(asked) or self._make(*asked), longest)

    def keys(self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool) -> list[RoundKey]:
        """All that come up as sequences grow, where engines have fixed shapes."""
        most_pending = 0 if self._draft is None else self._limits.accept_tokens
        kind = self._make(batch, plan, plain, adapts, constrained, most_pending)
        changes = {
            size - rows + 1
            for widest, rows in kind.engines
            if widest is not None
            for size in self._engines.key_ranges(widest)
        }
        longest = self._limits.kv_capacity - kind.plan.longest
        lengths = sorted({1, *(length for length in changes if 1 < length <= longest)})
        return list(dict.fromkeys(self._key(kind, length) for length in lengths))

    def bucket(self, batch: int) -> int:
        """How many slots the engines take for the `batch` leading ones."""
        return min(size for size in self._limits.batches if size >= batch) if self._fixed_shapes else batch

    def _make(
        self, batch: int, plan: DraftPlan, plain: bool, adapts: bool, constrained: bool, most_pending: int
    ) -> _RoundKind:
        served, bucket = plan.for_engines(self._limits, self._fixed_shapes), self.bucket(batch)
        acceptance = TYPICAL if plan.acceptance == "typical" else SAMPLED if plan.sampled else DRAWN
        if plain:
            served, acceptance = served.deterministic(), GREEDY
        draft, verification = self._draft, self._verification
        tokens = 0 if draft is None else draft.accept_shape_tokens(bucket, most_pending)
        widest, nodes = self._limits.tree_key_ranges[-1], verification.engine_nodes(served)
        engines: list[tuple[EngineShape | None, int]] = [(None, 0), (None, 0)]
        if draft is not None:
            engines[0] = draft.accept_shape(bucket, tokens, widest), tokens
            if not plan.is_given:
                behind = (served.steps - 1) * served.columns
                engines[1] = draft.propose_shape(bucket, served.columns, widest), behind
        engines.append((verification.shape(bucket, nodes, widest, adapts), nodes))
        kind = _RoundKind(bucket, served, acceptance, adapts, constrained, tokens, tuple(engines))
        self._made[batch, plan, plain, adapts, constrained, most_pending] = kind
        return kind

    def _key(self, kind: _RoundKind, length: int) -> RoundKey:
        ranges = [
            0 if widest is None else self._engines.key_range(widest, length + rows) for widest, rows in kind.engines
        ]
        return RoundKey(*kind[:-1], *ranges)
