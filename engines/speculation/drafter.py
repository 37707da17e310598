"""What the candidates of rounds come from: the host alone, or a draft model that goes along with the base.

A draft model has KV rows of its own, in which it takes the base's features. What the base has processed and the draft
has not are the pending entries: a feature each, and the token after it. Plain steps add to them, acceptance replaces
them, and each round begins with taking them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from edgellm.engines.backends.base import Backend, Readback
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner, FeatureUser, StepKey
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines, Stages
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import StepRules
from edgellm.engines.runners.states import ModelStates, SlotRows
from edgellm.engines.speculation.draft_plan import DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan
from edgellm.engines.speculation.tree import CandidateBuffers, TreeLimits, pending_entries
from edgellm.kernels.acceptance.contract import Chain, Pending
from edgellm.kernels.arrays import Array
from edgellm.kernels.contracts import rows_of
from edgellm.kernels.tree.contract import Candidates, Expansion


class Proposal(NamedTuple):
    """The candidates of a plan in the leading slots, which is all that verification sees of a drafter.

    `expansion` is what the last level is finished with, the mapping of the draft's ids among it (None: the candidates
    are there), `chain` is what a sampled one is drawn from.
    """

    candidates: Candidates
    expansion: Expansion | None = None
    chain: Chain | None = None


#: Takes a plain step, see `BaseEngineRunner.decode`.
Decode = Callable[..., "Readback | StepReadback"]


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

    def decoding(self, base: BaseEngineRunner) -> Decode:
        """What takes plain steps, and keeps what this drafter needs of them: without a model the base alone."""
        return base.decode

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
        """A sequence goes on in another slot, with which its own exchanges what it holds."""

    def close(self) -> None:
        """Let go of what is held on the device."""


class ModelDrafter(Drafter):
    """What drafters with a model have in common: the pending entries, and how far each slot is.

    A kind of draft model adds `prefill`, `accept_shape` and `accept_step`, which commit entries, and
    `proposing_engine`, `propose` and `own_proposal`, and allocates its states, in `models`.
    Everything is given to the device in order and nothing is waited for. Not thread-safe.
    """

    has_model = True

    def __init__(
        self,
        backend: Backend,
        limits: EngineLimits,
        base: BaseEngineRunner,
        engines: LoadedEngines,
        steps: CapturedSteps,
        feature_size: int,
    ) -> None:
        """`engines` are the draft's, `steps` run what is taken in beside rounds."""
        largest = limits.verify_sizes[-1], limits.accept_tokens, limits.tree_key_ranges[-1]
        super().__init__(backend, limits, TreeLimits(limits.max_batch, *largest), feature_size)
        self._base, self._engines, self._steps = base, engines, steps
        #: Of each slot: entries that the draft has not seen, never too few; rows of the base and of the draft that were
        #: committed by the steps which were read.
        self.unseen, self.base_rows, self.draft_rows = ([0] * limits.max_batch for _ in range(3))
        self._latest: StepReadback | None = None

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
        raise NotImplementedError

    def accept_shape(self, batch: int, tokens: int, key_range: int) -> EngineShape:
        raise NotImplementedError

    def accept_step(self, batch: int, tokens: int, key_range: int) -> Callable[[], None]:
        """What commits the pending entries of the leading slots; `tokens` is the engine's number of tokens, as `taken`
        says. The counts of the pending entries are left as they are."""
        raise NotImplementedError

    def proposing_engine(self, batch: int, plan: DraftPlan) -> tuple[EngineShape, int]:
        """The engine that `propose` runs, of the largest key range, and the rows behind the committed ones that it
        needs."""
        raise NotImplementedError

    def propose(self, batch: int, plan: DraftPlan, key_range: int) -> Callable[[], None]:
        """What writes the candidates of a plan, but for what the `expansion` of `own_proposal` finishes."""
        raise NotImplementedError

    def own_proposal(self, batch: int, plan: DraftPlan) -> Proposal:
        raise NotImplementedError

    def proposal(self, batch: int, plan: DraftPlan) -> Proposal:
        return super().proposal(batch, plan) if plan.is_given else self.own_proposal(batch, plan)

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

    def decoding(self, base: BaseEngineRunner) -> Decode:
        return self.decode

    def decode(self, batch: int, rules: StepRules | None = None, begun: StepKey | None = None) -> StepReadback:
        """A plain step. Where there is no room for another entry, the draft takes those that there are before."""
        full = max(self.unseen[:batch]) >= self.limits.accept_tokens
        if full:
            bucket = self._take_pending(batch)
            self.backend.upload(self.pending.counts[:bucket], np.zeros(bucket, np.int32))
            self.unseen[:batch] = [0] * batch
        emitted = self._base.decode(batch, rules, begun)
        step = StepReadback(self, self._base.lengths, batch, None, emitted, full)
        self.launched(step)
        return step

    def launched(self, step: StepReadback) -> None:
        for slot in range(step.batch):
            if self._base.lengths[slot]:
                self.unseen[slot] = self.unseen[slot] + 1 if step.plan is None else step.plan.longest
        self._latest = step

    def read(self, step: StepReadback, counts: Sequence[int]) -> None:
        for slot, count in enumerate(counts):
            if count:
                if step.draft_accepted:
                    self.draft_rows[slot] = self.base_rows[slot]
                self.base_rows[slot] += count
                if step is self._latest and step.plan is not None:
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
        self.states.swap(source, target)
        pending = self.pending
        for array in (pending.features, pending.token_ids, pending.counts, pending.last):
            self.backend.copy(array[target : target + 1], array[source : source + 1])
        for known in (self.unseen, self.base_rows, self.draft_rows):
            known[target] = known[source]

    @property
    def states(self) -> ModelStates:
        return self.models["draft"]

    def close(self) -> None:
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


@dataclass(eq=False)
class StepReadback:
    """The tokens of a round or, without a `plan`, of a plain step beside a draft model, of `batch` slots, on their way
    to the host.

    `emitted` reads them; `lengths` are those of `BaseEngineRunner`, bounds that become exact; `draft_accepted` says
    whether the step began with the draft taking its pending entries.
    """

    draft: Drafter
    lengths: list[int]
    batch: int
    plan: DraftPlan | None
    emitted: Readback
    draft_accepted: bool
    _tokens: list[list[int]] | None = None

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in order: none for an idle one, else at least one."""
        if self._tokens is None:
            values = self.emitted.wait()[: self.batch].tolist()
            if self.plan is None:
                self._tokens = [[token] if token >= 0 else [] for token in values]
            else:
                self._tokens = [row[1 : 1 + row[0]] for row in values]
                for slot, tokens in enumerate(self._tokens):
                    if tokens:
                        self.lengths[slot] += len(tokens) - self.plan.longest
            self.draft.read(self, [len(tokens) for tokens in self._tokens])
        return self._tokens
