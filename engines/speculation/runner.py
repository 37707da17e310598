"""Decodes: plain steps, and rounds that draft, verify and accept, mixed as the caller likes.

A round is one captured launch: the draft takes the pending entries (accept), proposes level by level, the base verifies
the best of it, acceptance walks the tree, and the state advances on the device. The host reads how many tokens each
slot got, and which. Candidates may be given by the host instead, with a draft model or without one. Where rules say
which tokens may come, a step is two launches: the host fills masks while the first computes the logits, the second
chooses. Rounds and plain steps leave the same state behind: they may follow each other in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import product
from typing import Any

import numpy as np

from edgellm.engines.backends.base import Backend, Readback
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.memory_plan import GIVEN_NODES
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines, Stages
from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.runners.sampling_state import SamplingValues, StepReadback, StepRules
from edgellm.engines.runners.states import SlotRows
from edgellm.engines.speculation.block_runner import BlockDraftEngineRunner
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.drafter import Drafter
from edgellm.engines.speculation.round import GivenTree, Round, RoundKey, RoundKinds, part_keys
from edgellm.engines.speculation.tree_verification import TreeVerification, given_limits, given_shapes

_TREE_PHASES = ("verify", "accept", "propose")


class DecodingRunner:
    """A base model with its runner, `base`, and what drafts beside it, `draft`.

    `limits.max_batch` slots each hold one sequence, the leading ones are decoded together. Readbacks must be waited for
    in the order in which they were made. Not thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        config: DecoderConfig,
        limits: EngineLimits,
        checkpoint: Checkpoint,
        draft: tuple[DraftConfig, Checkpoint] | None = None,
        progress: Callable[[int, int], None] | None = None,
        adapters: Mapping[str, LoraAdapter] | None = None,
        vision_memory: Mapping[str, int] | None = None,
    ) -> None:
        self.backend, self.config, self.limits = backend, config, limits
        shapes = limits.engine_shapes() if adapters is None else limits.all_engine_shapes()
        rounds = [shape for shape in shapes if shape.model == "draft" or shape.phase in _TREE_PHASES]
        if draft is None and backend.fixed_shapes:
            rounds = given_shapes(limits, adapters is not None, backend.takes_any_key_range)
        self._engines, self._steps = LoadedEngines(backend, rounds), CapturedSteps(backend)
        more = progress, None if draft is None else draft[0], adapters, vision_memory
        self.base = BaseEngineRunner(backend, config, limits, checkpoint, *more)
        self.draft: Drafter
        #: Take a plain step, and begin one before it is known which tokens it may choose; see `BaseEngineRunner`. What
        #: drafting needs later is kept.
        self.decode: Callable[..., Readback | StepReadback]
        self.decode, self.begin = self.base.decode, self.base.begin
        if draft is None:
            features = len(config.feature_layers) * config.hidden_size
            self.draft = Drafter(backend, limits, given_limits(limits, GIVEN_NODES), features)
        else:
            beside = self.base, self._engines, self._steps
            draft_config, draft_checkpoint = draft
            kind = EagleDraftEngineRunner if draft_config.block is None else BlockDraftEngineRunner
            drafting = kind(backend, draft_config, limits, draft_checkpoint, *beside)
            self.draft, self.decode = drafting, drafting.decode
        self.base.feature_user = self.draft
        self.verification = TreeVerification(backend, self.base, self.draft, self._engines)
        #: The rounds, and other steps, whose captures are planned: where there are none, every round is ready.
        self.planned: Mapping[Hashable, object] = self._steps.planned
        self._rounds: dict[RoundKey, Round] = {}
        self._latest_round: Round | None = None
        self._kinds = RoundKinds(self.base, self.draft, self.verification, self._engines)

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
                return cls(backend, base, limits, base_files, None, *more)
            config, draft = directory.model_config("draft"), directory.draft
            assert isinstance(config, DraftConfig) and draft is not None
            with closing(draft.checkpoint()) as draft_files:
                return cls(backend, base, limits, base_files, (config, draft_files), *more)

    def observe_stages(self, around: Callable[[str], AbstractContextManager[None]] | None) -> None:
        """Surround the enqueueing of each stage of rounds with what `around` gives for its name (None: nothing any
        more). Stages are then launched one by one, not as one graph: a round takes a little longer.
        """
        self._steps.around = around

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds spent so far in each stage of rounds, by name; empty where stages cannot be timed."""
        return self._steps.seconds

    def start(self, slot: int, prompt_ids: Sequence[int], reused: int, *others: Any, **more: Any) -> Readback:
        """Starts as `BaseEngineRunner.start` does; the first `reused` rows must be there in the base and in the
        draft."""
        self.draft.start(slot, len(prompt_ids))
        return self.base.start(slot, prompt_ids, reused, *others, **more)

    def held(self, slot: int, rows: int, draft_rows: int | None) -> Iterator[SlotRows]:
        """What a slot holds on the device of a sequence that goes on from there, and `resume` cannot make anew: `rows`
        of the base, `draft_rows` of the draft, and the features of what the draft has not seen."""
        for each in self.base.states.of_slot(slot, rows):
            yield each._replace(name=f"base.{each.name}")
        yield from self.draft.held(slot, rows, draft_rows)

    def resume(
        self,
        slot: int,
        text_ids: Sequence[int],
        generated: int,
        draft_rows: int | None,
        sampling: SamplingValues,
        media: PromptMedia | None = None,
    ) -> None:
        """Resumes as `BaseEngineRunner.resume` does, in a slot that has what was `held`: decoding goes on as it would
        have."""
        self.base.resume(slot, text_ids, generated, sampling, media)
        self.draft.resume(slot, text_ids, draft_rows)

    def round(
        self, batch: int, plan: DraftPlan, rules: StepRules | None = None, trees: Sequence[GivenTree] | None = None
    ) -> StepReadback:
        """Draft, or take the given `trees`, and verify for the `batch` leading slots; what they got is in the readback.
        Raises EngineError if the engines cannot serve the plan, or a sequence could outgrow the context."""
        if plan.is_given != (trees is not None):
            raise EngineError(f"a round of {plan.name}: trees are given to a plan of given candidates, and to no other")
        longest = max(self.base.lengths[:batch])
        if longest + plan.longest > self.limits.kv_capacity:
            raise EngineError(
                f"a round of {plan.name} may emit {plan.longest} tokens, but a sequence of {longest} has room for "
                f"{self.limits.kv_capacity - longest} of {self.limits.kv_capacity}: take a shorter plan"
            )
        current = self.prepare_round(batch, plan, rules is not None)
        if trees is not None:
            current.give(trees)
        first, *second = current.parts
        self._steps.run(*first)
        for each in second:
            self.base.sampling.obey(rules, trees=None if rules is None else current.nodes(trees or ()))
            self._steps.run(*each)
        self._latest_round, lengths = current, self.base.lengths
        for slot in range(batch):
            lengths[slot] += current.key.plan.longest if lengths[slot] else 0
        emitted, longest = self.backend.read(current.emitted), current.key.plan.longest
        step = StepReadback(self.draft.read, lengths, batch, longest, emitted, True)
        self.draft.launched(step)
        return step

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
        kind = base.sampling.plain(slots), base.adapts(slots), ruled or base.sampling.biased(slots)
        return self._kinds.key(batch, plan, *kind, self.draft.taken(batch), max(base.lengths[:batch]))

    def takes_given(self, batch: int, plan: DraftPlan, ruled: bool = False) -> bool:
        """Whether a round of a plan of given candidates can run now in the `batch` leading slots: there are engines
        that verify its tree, room for it, and no capture to wait for."""
        longest = max(self.base.lengths[:batch])
        bucket = self.draft.bucket(batch)
        nodes = self.verification.engine_nodes(plan) if self.verification.takes(bucket, plan) else 0
        fits = longest + plan.longest <= self.limits.kv_capacity and longest + nodes <= self.limits.kv_rows
        return nodes > 0 and fits and self.is_ready(batch, plan, ruled)

    def plan_captures(self, plans: Sequence[DraftPlan], forced: Sequence[DraftPlan] = ()) -> None:
        """Plan the capture of plain steps, and of rounds of `plans`, of every kind, those of `forced` candidates under
        rules alone: plain steps first, then rounds without rules, then those under rules, of few sequences first. It is
        for backends of fixed shapes: elsewhere there are too many kinds."""
        self.base.plan_steps()
        self.draft.plan_captures()
        batches = self.limits.batches
        kinds = [(*each, False) for each in product(plans, batches)]
        kinds += [(plan, batch, True) for batch, plan in product(batches, dict.fromkeys((*plans, *forced)))]
        for plan, batch, constrained in kinds:
            if plan.is_given and not self.verification.takes(batch, plan):
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
                if key.plan.is_given:
                    current.give(())
                return current.parts[number][1]

            self._steps.plan(part, stages, kind=kind)

    def capture_next(self) -> bool:
        """Capture the planned step whose turn it is, of those for which there is room; False where there is none. No
        slot may have a sequence: it runs, behind the rows that idle slots hold."""
        most = max(self.base.left) + max(1, self.verification.most_nodes)
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
        """The base's logits [count, V] float32 for the `count` tokens that the latest step, a round, gave a slot, once
        it was waited for; see `Round.logits`. Those of other steps are the base's."""
        assert self._latest_round is not None
        return self._latest_round.logits(slot, count)

    def stop(self, slot: int) -> None:
        """Leave `slot` idle; its states stay."""
        self.base.stop(slot)
        self.draft.stop(slot)

    def move(self, source: int, target: int) -> None:
        """Go on with the sequence of slot `source` in the idle slot `target`; `source` is idle then, and holds the KV
        rows that `target` held.

        Finished sequences make room this way: the running ones lead. Everything must have been waited for.
        """
        self._move_drafts(source, target, self.base.rows_held(source, target), True)
        self.base.move(source, target)
        self.draft.move(source, target)
        self.stop(source)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange what two idle slots hold."""
        self._move_drafts(first, second, self.base.rows_held(first, second), True)
        self.base.swap_rows(first, second)

    def copy_rows(self, source: int, target: int) -> None:
        """Let the idle slot `target` hold what the idle slot `source` holds."""
        self._move_drafts(source, target, self.base.rows_held(source), False)
        self.base.copy_rows(source, target)

    def _move_drafts(self, source: int, target: int, rows: int, swaps: bool) -> None:
        for states in self.draft.models.values():  # none has more rows than the base
            states.move(source, target, rows, swaps)

    def close(self) -> None:
        """Free everything, as `BaseEngineRunner.close` does."""
        try:
            self.backend.synchronize()
        finally:
            self._steps.clear()
            self._rounds.clear()
            self._latest_round = None
            self._engines.clear()
            self.draft.close()
            self.base.close()
