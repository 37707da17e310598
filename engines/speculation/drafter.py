"""What the candidates of rounds come from: the host alone, or a draft model that goes along with the base.

A draft model has KV rows of its own, in which it takes the base's features. What the base has processed and the draft
has not are the pending entries: a feature each, and the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.base_runner import FeatureUser
from edgellm.engines.runners.sampling_state import StepReadback
from edgellm.engines.runners.states import ModelStates, SlotRows
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.tree import CandidateBuffers, TreeLimits, pending_entries
from edgellm.kernels.acceptance.contract import Chain, Pending
from edgellm.kernels.tree.contract import Candidates, Expansion


class Proposal(NamedTuple):
    """The candidates of a plan in the leading slots, which is all that verification sees of a drafter.

    `expansion` is what the last level is finished with, the mapping of the draft's ids among it (None: the candidates
    are there), `chain` is what a sampled one is drawn from.
    """

    candidates: Candidates
    expansion: Expansion | None = None
    chain: Chain | None = None


class Drafter(FeatureUser):
    """What goes along with the base model in the slots of a runner, and proposes what rounds verify, in trees up to
    `trees`. By itself it has no model: every candidate is the host's, forced by rules or said before. Each method says
    what a draft model's drafter does, and how to leave it.

    `models` are the states by the name under which snapshots keep them; `feature_size` is how many elements the base's
    features have.
    """

    has_model = False
    models: Mapping[str, ModelStates] = {}

    def __init__(self, backend: Backend, limits: EngineLimits, trees: TreeLimits, feature_size: int) -> None:
        self.backend, self.limits, self.trees = backend, limits, trees
        self.feature_size = feature_size

    @cached_property
    def pending(self) -> Pending:
        """What acceptance leaves of each slot; allocated when it is first asked for."""
        return pending_entries(self.backend, self.trees.slots, self.trees.emitted, self.feature_size)

    def bucket(self, batch: int) -> int:
        """How many slots the engines of rounds take for the `batch` leading ones."""
        return min(size for size in self.limits.batches if size >= batch) if self.backend.fixed_shapes else batch

    def proposal(self, batch: int, plan: DraftPlan) -> Proposal:
        """Where the candidates of a plan are for the leading slots, each time the same arrays; here those that the host
        gives."""
        return Proposal(self._host_candidates.of(batch, plan))

    @cached_property
    def _host_candidates(self) -> CandidateBuffers:
        nodes = self.trees.nodes - 1
        return CandidateBuffers(self.backend, self.trees.slots, nodes, nodes, nodes)

    def engines(self, batch: int, plan: DraftPlan, taken: int) -> list[tuple[EngineShape, int]]:
        """The engines that a round of a plan runs before the base verifies, each of the largest key range, with the
        rows behind the committed ones that it needs; `taken` is what `taken` says."""
        return []

    def stages(self, batch: int, plan: DraftPlan, taken: int, key_ranges: Sequence[int]) -> dict[str, Callable]:
        """What these engines enqueue over so many rows each, by the names of their stages, in order."""
        return {}

    def taken(self, batch: int) -> int:
        """How many entries of each of the leading slots the next round's engine takes in, pending ones and padding."""
        return 0

    def launched(self, step: StepReadback) -> None:
        """A step is under way: a plain one, or a round."""

    def read(self, step: StepReadback, counts: Sequence[int]) -> None:
        """It was read, and gave each slot so many tokens."""

    def plan_captures(self) -> None:
        """Plan the capture of what runs beside rounds."""

    def start(self, slot: int, count: int) -> None:
        """A prompt of `count` tokens is about to be prefilled; the draft has the rows that are reused."""

    def held(self, slot: int, rows: int, draft_rows: int | None) -> Iterator[SlotRows]:
        """What the device has of a sequence beside the base's `rows`, and `resume` cannot make anew."""
        return iter(())

    def resume(self, slot: int, text_ids: Sequence[int], draft_rows: int | None) -> None:
        """A text goes on in a slot that has what was `held`, and whose last token is not committed."""

    def rows(self, slot: int) -> int | None:
        """How many of the draft's rows are committed by work that was waited for; None without a model."""
        return None

    def complete(self, slot: int, batch: int) -> None:
        """Let a slot's rows, one of the leading ones, reach as far as the base's; everything was waited for. The
        others' pending entries stay: taken twice they give the same rows."""

    def stop(self, slot: int) -> None:
        """A slot is idle; its states stay."""

    def move(self, source: int, target: int) -> None:
        """A sequence goes on in another slot, where its states are already."""

    def close(self) -> None:
        """Let go of what is held on the device."""
