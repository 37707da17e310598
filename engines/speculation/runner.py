"""Decodes: plain steps, and rounds that draft, verify and accept, mixed as the caller likes.

A round is one captured launch: the draft takes the pending entries (accept), proposes level by level, the base verifies
the best of it, acceptance walks the tree, and the state advances on the device. The host reads how many tokens each
slot got, and which. Candidates may be given by the host instead, with a draft model or without one, or beside the
draft's in one tree. Where rules say which tokens may come, a step is two launches: the host fills masks while the first
computes the logits, the second chooses. Rounds and plain steps leave the same state behind: they may follow each other
in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import product

import numpy as np

from edgellm.engines.backends.base import Backend, Readback
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner, StepKey
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines, Stages
from edgellm.engines.runners.prefill import Stops
from edgellm.engines.runners.prompt_images import PromptImages
from edgellm.engines.runners.sampling_state import SamplingValues, StepRules
from edgellm.engines.runners.states import SlotRows
from edgellm.engines.speculation.block_runner import BlockDraftEngineRunner
from edgellm.engines.speculation.draft_plan import DRAFT_ACCEPT, DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.round import (
    GivenTree,
    Round,
    RoundKey,
    RoundKinds,
    SlotProgress,
    StepReadback,
    padded_trees,
    part_keys,
)
from edgellm.engines.speculation.tree_verification import TreeVerification, given_shapes
from edgellm.kernels.arrays import Array
from edgellm.kernels.contracts import rows_of

_TREE_PHASES = ("verify", "accept", "propose")


class DecodingRunner:
    """A base model and its draft, each with its runner (`base`, and `draft`, which may be None).

    `limits.max_batch` slots each hold one sequence, the leading ones are decoded together. Readbacks must be waited for
    in the order in which they were made. Not thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        draft: DraftConfig | None,
        limits: EngineLimits,
        checkpoint: Checkpoint,
        draft_checkpoint: Checkpoint | None,
        progress: Callable[[int, int], None] | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
        vision_memory: Mapping[str, int] | None = None,
    ) -> None:
        self.backend, self.config, self.limits = backend, config, limits
        shapes = limits.engine_shapes() if adapters is None else limits.all_engine_shapes()
        rounds = [shape for shape in shapes if shape.model == "draft" or shape.phase in _TREE_PHASES]
        if draft is None and backend.fixed_shapes:
            rounds = given_shapes(limits, adapters is not None, backend.takes_any_key_range)
        self._engines = LoadedEngines(backend, rounds)
        user = None if draft is None else self
        self.base = BaseEngineRunner(
            backend, config, limits, checkpoint, progress, draft, user, adapters, vision_memory
        )
        self.draft: EagleDraftEngineRunner | None = None
        if draft is not None and draft_checkpoint is not None:
            kind = EagleDraftEngineRunner if draft.block is None else BlockDraftEngineRunner
            self.draft = kind(backend, draft, limits, draft_checkpoint, self.base, self._engines)
        self.verification = TreeVerification(backend, self.base, self.draft, self._engines)
        self._steps = CapturedSteps(backend)
        #: The rounds, and other steps, whose captures are planned: where there are none, every round is ready.
        self.planned: Mapping[Hashable, object] = self._steps.planned
        self._rounds: dict[RoundKey, Round] = {}
        self._latest_round: Round | None = None
        self._kinds = RoundKinds(self.base, self.draft, self.verification, self._engines)
        self._progress = SlotProgress(self.base.lengths)

    @classmethod
    def open(
        cls,
        backend: Backend,
        directory: EngineDirectory,
        progress: Callable[[int, int], None] | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
        vision_memory: Mapping[str, int] | None = None,
        drafts: bool = True,
    ) -> DecodingRunner:
        """The runner of a directory's base and, where it `drafts`, of its draft; `progress` gets the base's weights in
        bytes, done and in all.

        The base takes `adapters` and counts `vision_memory` as `BaseEngineRunner` does; the draft has none. Raises
        EngineDirectoryError where there is no draft that drafts, and what loading raises.
        """
        base, limits, more = directory.config, directory.limits, (progress, adapters, vision_memory)
        with closing(directory.checkpoint()) as base_files:
            if not drafts:
                return cls(backend, base, None, limits, base_files, None, *more)
            config, draft = directory.model_config("draft"), directory.draft
            assert isinstance(config, DraftConfig) and draft is not None
            with closing(draft.checkpoint()) as draft_files:
                return cls(backend, base, config, limits, base_files, draft_files, *more)

    def observe_stages(self, around: Callable[[str], AbstractContextManager[None]] | None) -> None:
        """Surround the enqueueing of each stage of rounds with what `around` gives for its name (None: nothing any
        more). Stages are then launched one by one, not as one graph: a round takes a little longer.
        """
        self._steps.around = around

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds spent so far in each stage of rounds, by name; empty where stages cannot be timed."""
        return self._steps.seconds

    def start(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        reused: int,
        sampling: SamplingValues,
        images: PromptImages | None = None,
        rules: StepRules | None = None,
        generated: int = 0,
        stops: Stops | None = None,
    ) -> Readback:
        """Starts as `BaseEngineRunner.start` does; the first `reused` rows must be there in the base and in the
        draft."""
        if self.draft is not None:
            self.backend.upload(self.draft.pending.counts[slot : slot + 1], np.zeros(1, np.int32))
        first = self.base.start(slot, prompt_ids, reused, sampling, images, rules, generated, stops)
        self._latest_round = None
        self._progress.start(slot, len(prompt_ids))
        return first

    def held(self, slot: int, rows: int, draft_rows: int | None) -> Iterator[SlotRows]:
        """What a slot holds on the device of a sequence that goes on from there, and `resume` cannot make anew: `rows`
        of the base, `draft_rows` of the draft, and the features of what the draft has not seen."""
        models = {"base": (self.base, rows)} | ({} if self.draft is None else {"draft": (self.draft, draft_rows or 0)})
        for model, (runner, count) in models.items():
            for each in runner.states.of_slot(slot, count):
                yield each._replace(name=f"{model}.{each.name}")
        if self.draft is not None:
            features = self.draft.pending.features[slot : slot + 1]
            yield SlotRows("draft.features", features, rows - (draft_rows or 0))

    def resume(
        self,
        slot: int,
        text_ids: Sequence[int],
        generated: int,
        draft_rows: int | None,
        sampling: SamplingValues,
        images: PromptImages | None = None,
    ) -> None:
        """Resumes as `BaseEngineRunner.resume` does, in a slot that has what was `held`: decoding goes on as it would
        have."""
        rows = len(text_ids) - 1
        self.base.resume(slot, text_ids, generated, sampling, images)
        if self.draft is not None and draft_rows is not None:
            pending, one, count = self.draft.pending, slice(slot, slot + 1), rows - draft_rows
            tokens = np.full(pending.token_ids[one].shape, -1, np.int32)
            tokens[0, :count] = text_ids[draft_rows + 1 :]
            self.backend.upload(pending.token_ids[one], tokens)
            for array, value in ((pending.counts, count), (pending.start, draft_rows), (pending.last, count - 1)):
                self.backend.upload(array[one], np.full(array[one].shape, value, np.int32))
        self._latest_round = None
        self._progress.resume(slot, rows, rows - 1 if draft_rows is None else draft_rows)

    def step(
        self,
        batch: int,
        plan: DraftPlan | None,
        rules: StepRules | None = None,
        trees: Sequence[GivenTree] | None = None,
        begun: StepKey | None = None,
    ) -> StepReadback:
        """A round of `plan`, or without one a plain step, which may have `begun`. `rules` fill masks while the logits
        are computed; `trees` are the candidates of each slot for a plan that takes given ones."""
        return self.decode(batch, rules, begun) if plan is None else self.round(batch, plan, rules, trees)

    def begin(self, batch: int) -> StepKey:
        """Begin a plain step before it is known which tokens it may choose; see `BaseEngineRunner.begin`."""
        return self.base.begin(batch)

    def decode(self, batch: int, rules: StepRules | None = None, begun: StepKey | None = None) -> StepReadback:
        """One token for each of the `batch` leading slots, without drafting; what drafting needs later is kept.

        Raises EngineError where a sequence has no KV row left.
        """
        progress = self._progress
        full = self.draft is not None and max(progress.pending[:batch]) >= self.limits.accept_tokens
        if full:
            self._flush(batch)
        emitted, self._latest_round = self.base.decode(batch, rules, begun), None
        return progress.launched(StepReadback(progress, batch, None, emitted, full))

    def round(
        self, batch: int, plan: DraftPlan, rules: StepRules | None = None, trees: Sequence[GivenTree] | None = None
    ) -> StepReadback:
        """Draft, or take the given `trees`, and verify for the `batch` leading slots; what they got is in the readback.

        Raises EngineError if the engines cannot serve the plan, or a sequence could outgrow the context.
        """
        if plan.takes_given != (trees is not None):
            raise EngineError(f"a round of {plan.name}: trees are given to a plan of given candidates, and to no other")
        longest = max(self.base.lengths[:batch])
        if longest + plan.longest > self.limits.kv_capacity:
            raise EngineError(
                f"a round of {plan.name} may emit {plan.longest} tokens, but a sequence of {longest} has room for "
                f"{self.limits.kv_capacity - longest} of {self.limits.kv_capacity}: take a shorter plan"
            )
        key = self._round_key(batch, plan, rules is not None)
        current = self._rounds.get(key) or self._make_round(key)
        if trees is not None:
            current.give(trees)
        if rules is None:
            self.base.sampling.clear_masks()
        first, *second = current.parts
        self._steps.run(*first)
        if rules is not None:
            known = trees if plan.is_given else None  # of a joint tree the draft model's part comes with the tree
            shown = current.nodes() if known is None else padded_trees(known, *current.shape)
            self.base.sampling.fill_masks(rules, shown[0].size, shown)
        for each in second:
            self._steps.run(*each)
        self._latest_round = current
        emitted = self.backend.read(current.emitted)
        return self._progress.launched(StepReadback(self._progress, batch, key.plan, emitted, True))

    def prepare_round(self, batch: int, plan: DraftPlan, ruled: bool = False) -> Round:
        """The round of a plan in the present state of the `batch` leading slots, ready to run: its stages run by
        themselves, too, in their order."""
        key = self._round_key(batch, plan, ruled)
        return self._rounds.get(key) or self._make_round(key)

    def is_ready(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Whether no capture of such a round is planned, so that it should wait for that (see `CapturedSteps`)."""
        return not self.planned or self.planned.keys().isdisjoint(part_keys(self._round_key(batch, plan, ruled)))

    def _round_key(self, batch: int, plan: DraftPlan, ruled: bool) -> RoundKey:
        """The key of a plan's round in the present state of the `batch` leading slots."""
        slots, base = slice(0, batch), self.base
        pending = 0 if self.draft is None else max(self._progress.pending[:batch])
        kind = base.sampling.plain(slots), base.adapts(slots), ruled or base.sampling.biased(slots)
        return self._kinds.key(batch, plan, *kind, pending, max(base.lengths[:batch]))

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Whether a round of a plan that takes given candidates can run now in the `batch` leading slots: there are
        engines that verify its tree, room for it, and no capture to wait for."""
        longest = max(self.base.lengths[:batch])
        bucket = self._kinds.bucket(batch)
        nodes = self.verification.engine_nodes(plan) if self.verification.takes(bucket, plan) else 0
        fits = longest + plan.longest <= self.limits.kv_capacity and longest + nodes <= self.limits.kv_rows
        return nodes > 0 and fits and self.is_ready(batch, plan, ruled)

    def plan_captures(self, plans: Sequence[DraftPlan], forced: Sequence[DraftPlan] = ()) -> None:
        """Plan the capture of plain steps, and of rounds of `plans`, of every kind, those of `forced` candidates under
        rules alone: plain steps first, then rounds without rules, then those under rules, of few sequences first. It is
        for backends of fixed shapes: elsewhere there are too many kinds."""
        self.base.plan_steps()
        batches, tokens = self.limits.batches, self.limits.accept_tokens
        for batch in () if self.draft is None else batches:
            widest = self.limits.draft_shape("accept", batch, tokens, self.limits.tree_key_ranges[-1])
            for rows in self._engines.key_ranges(widest):
                stages = partial(self._flush_step, batch, tokens, rows)
                self._steps.plan(("flush", batch, tokens, rows), stages, kind=f" of {batch} sequences, {rows} rows")
        kinds = [(*each, False) for each in product(plans, batches)]
        kinds += [(plan, batch, True) for batch, plan in product(batches, dict.fromkeys((*plans, *forced)))]
        for plan, batch, constrained in kinds:
            if plan.takes_given and not self.verification.takes(batch, plan):
                continue
            for plain, adapts in product((True, False), self.base.adapter_kinds):
                for key in self._kinds.keys(batch, plan, plain, adapts, constrained):
                    self._plan_round(key)

    def _plan_round(self, key: RoundKey) -> None:
        kind = f", {key.plan.name} of {key.batch} sequences, {key.verify_range} rows, {key.acceptance}"
        kind += ", with adapters" if key.adapts else ""
        for number, part in enumerate(part_keys(key)):

            def stages(number: int = number) -> Stages:
                current = self._rounds.get(key) or self._make_round(key)
                if key.plan.takes_given:
                    current.give(())
                return current.parts[number][1]

            self._steps.plan(part, stages, kind=kind)

    def capture_next(self) -> bool:
        """Capture the planned step whose turn it is, of those for which there is room; False where there is none. No
        slot may have a sequence: it runs, behind the rows that idle slots hold."""
        most = max(self._progress.base_rows) + max(1, self.verification.most_nodes)
        return most <= self.limits.kv_rows and (self.base.steps.capture_next() or self._steps.capture_next())

    @property
    def uncaptured(self) -> list[str]:
        """The stages that could not be captured of what was planned."""
        return self.base.steps.uncaptured + self._steps.uncaptured

    def forget_planned(self) -> None:
        """Capture what is still planned when it comes up the second time, as what was never planned."""
        self.base.steps.planned.clear()
        self._steps.planned.clear()

    def _make_round(self, key: RoundKey) -> Round:
        self._rounds[key] = Round(self.base, self.draft, self.verification, key)
        return self._rounds[key]

    def logits(self, slot: int, count: int) -> np.ndarray:
        """The base's logits [count, V] float32 for the `count` tokens that the latest step, or prefill, gave a slot,
        once it was waited for; see `Round.logits`."""
        if self._latest_round is None:
            return self.base.logits(slot)[np.newaxis]
        return self._latest_round.logits(slot, count)

    def draft_rows(self, slot: int) -> int | None:
        """How many of the draft's rows are committed by work that was waited for; entry i goes with base rows 0..i and
        token i + 1. None without a draft."""
        return None if self.draft is None else self._progress.draft_rows[slot]

    def stop(self, slot: int) -> None:
        """Leave `slot` idle; its states stay."""
        self.base.stop(slot)
        self._progress.stop(slot)

    def move(self, source: int, target: int) -> None:
        """Go on with the sequence of slot `source` in the idle slot `target`; `source` is idle then, and holds the KV
        rows that `target` held.

        Finished sequences make room this way: the running ones lead. Everything must have been waited for.
        """
        self.base.move(source, target)
        if self.draft is not None:
            self.draft.states.swap(source, target)
            pending = self.draft.pending
            for array in (pending.features, pending.token_ids, pending.counts, pending.last):
                self.backend.copy(array[target : target + 1], array[source : source + 1])
        self._progress.move(source, target)
        self.stop(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange what two idle slots hold."""
        for model in self._models():
            model.states.swap(first, second)

    def copy_rows(self, source: int, target: int) -> None:
        """Let the idle slot `target` hold what the idle slot `source` holds."""
        for model in self._models():
            model.states.copy(source, target)

    def _models(self) -> tuple[BaseEngineRunner | EagleDraftEngineRunner, ...]:
        return (self.base,) if self.draft is None else (self.base, self.draft)

    def close(self) -> None:
        """Free everything, as `BaseEngineRunner.close` does."""
        try:
            self.backend.synchronize()
        finally:
            self._steps.clear()
            self._rounds.clear()
            self._latest_round = None
            self._engines.clear()
            if self.draft is not None:
                self.draft.close()
            self.base.close()

    def take_chunk(
        self,
        slot: int,
        prompt_ids: np.ndarray,
        position: int,
        tokens: int,
        features: Array,
        images: PromptImages | None,
    ) -> None:
        """See `FeatureUser`: the draft's entries pair each feature with the token after it; the last has none yet."""
        assert self.draft is not None
        entries = prompt_ids[position + 1 : position + tokens + 1]
        self.base.await_rows()  # the draft's, too
        if len(entries):
            chunk = features.shape[1] if self.backend.fixed_shapes else len(entries)
            self.draft.prefill(slot, entries, features, position, chunk, images)

    def take_tokens(self, slots: slice, tokens: Array, features: Array) -> None:
        """See `FeatureUser`: a plain step's feature and token join the pending entries."""
        assert self.draft is not None
        pending, state = rows_of(self.draft.pending, slots), self.base.sequences(slots)
        self.backend.acceptance.append_pending(features, tokens, state, pending)

    def complete_draft(self, slot: int, batch: int) -> None:
        """Let the draft's rows of a slot, of the `batch` leading ones, reach as far as the base's; everything must have
        been waited for. The others' pending entries stay: taken twice they give the same rows."""
        if self.draft is not None and self._progress.pending[slot]:
            self._take_pending(batch)
            self._progress.draft_rows[slot] = self._progress.base_rows[slot]

    def _flush(self, batch: int) -> None:
        """Let the draft take the pending entries, so that there is room for more."""
        assert self.draft is not None
        bucket = self._take_pending(batch)
        counts = self.draft.pending.counts[:bucket]
        self.backend.upload(counts, np.zeros(bucket, np.int32))
        self._progress.draft_took_pending(batch)

    def _take_pending(self, batch: int) -> int:
        """Enqueue the draft's step over the pending entries; for how many slots."""
        assert self.draft is not None
        bucket = self._kinds.bucket(batch)
        tokens = self.draft.accept_shape_tokens(bucket, max(self._progress.pending[:batch]))
        widest = self.draft.accept_shape(bucket, tokens, self.limits.tree_key_ranges[-1])
        key_range = self._engines.key_range(widest, max(self.base.lengths[:batch]) + tokens)
        self._steps.run(("flush", bucket, tokens, key_range), self._flush_step(bucket, tokens, key_range))
        return bucket

    def _flush_step(self, batch: int, tokens: int, key_range: int) -> Stages:
        assert self.draft is not None
        return {DRAFT_ACCEPT: self.draft.accept_step(batch, tokens, key_range)}
