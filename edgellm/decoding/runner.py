"""What the decoding loop needs of the engines, and how they are opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.base import Backend, Readback
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.lora.slots import require_adapters
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner, StepKey
from edgellm.engines.runners.prefill import Stops
from edgellm.engines.runners.prompt_images import PromptImages
from edgellm.engines.runners.sampling_state import SamplingValues, StepRules
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.draft_runner import EagleDraftEngineRunner
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.tree_verification import GIVEN_SIZES, given_tree_bytes
from edgellm.errors import DeviceMemoryError, RequestError


class StepTokens(Protocol):
    """The tokens of a step on their way to the host."""

    def wait(self) -> np.ndarray | list[list[int]]:
        """The tokens of each slot, in order: none for an idle one. Of one each, also as an array [B], idle ones -1."""


class Runner(Protocol):
    """What the loop needs: `edgellm.engines.speculation.runner.DecodingRunner`, which may be observed."""

    base: BaseEngineRunner
    #: None: no draft model proposes.
    draft: EagleDraftEngineRunner | None
    backend: Backend
    limits: EngineLimits

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
        """Prefill a slot; gives its next token [1], one that the rules allow. The last `generated` tokens are drawn.
        On the way is done what `stops` has for places."""

    def resume(
        self,
        slot: int,
        text_ids: Sequence[int],
        generated: int,
        draft_rows: int | None,
        sampling: SamplingValues,
        images: PromptImages | None = None,
    ) -> None:
        """Go on in a slot that holds what it held of a text, whose last `generated` tokens were drawn."""

    def step(
        self,
        batch: int,
        plan: DraftPlan | None,
        rules: StepRules | None = None,
        trees: Sequence[GivenTree] | None = None,
        begun: StepKey | None = None,
    ) -> StepTokens:
        """A plain step of the leading slots, which may have `begun`, or a round of `plan`, of the `trees` where its
        candidates are given."""

    def begin(self, batch: int) -> StepKey:
        """Begin a plain step of the leading slots while their tokens are under way: all but the choice under rules."""

    def takes_given(self, batch: int, plan: DraftPlan) -> bool:
        """Whether a round of a plan of given candidates can run now in the leading slots."""

    def logits(self, slot: int, count: int) -> np.ndarray:
        """The model's logits [count, V] float32 for the `count` tokens that the latest step, or prefill, gave a slot,
        once it was waited for."""

    def draft_rows(self, slot: int) -> int | None:
        """Committed rows of the draft, None without one."""

    def complete_draft(self, slot: int, batch: int) -> None:
        """Let the draft model's rows of one of the leading slots reach as far as the base's."""

    def stop(self, slot: int) -> None:
        """Leave a slot idle."""

    def move(self, source: int, target: int) -> None:
        """Go on with the sequence of slot `source` in the idle slot `target`."""

    def swap_rows(self, first: int, second: int) -> None:
        """Exchange what two idle slots hold."""

    def copy_rows(self, source: int, target: int) -> None:
        """Let the idle slot `target` hold what the idle slot `source` holds."""

    def close(self) -> None:
        """Free everything."""


def open_runner(
    backend: Backend,
    directory: EngineDirectory,
    drafting: DraftingConfig | None,
    adapters: Mapping[str, LoraAdapter] | None,
    progress: Callable[[int, int], None] | None,
    vision_memory: Mapping[str, int] | None = None,
) -> DecodingRunner:
    """A runner with the directory's draft model if the `drafting` needs one; RequestError where it has none.

    `vision_memory` is what a vision encoder takes (bytes by name). Trees of what was said before are planned for where
    they are asked for and no draft model has larger ones; smaller ones where memory is short.
    """
    if drafting is None:
        return DecodingRunner.open(backend, directory, progress, adapters, vision_memory, drafts=False)
    if not drafting.needs_draft_model:
        return _open_for_given(backend, directory, adapters, progress, vision_memory or {})
    if directory.draft is None:
        raise RequestError(
            f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
            "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), or leave drafting out"
        )
    drafting.plan(directory.limits)  # refused before anything is loaded
    return DecodingRunner.open(backend, directory, progress, adapters, vision_memory)


def _open_for_given(
    backend: Backend,
    directory: EngineDirectory,
    adapters: Mapping[str, LoraAdapter] | None,
    progress: Callable[[int, int], None] | None,
    memory: Mapping[str, int],
) -> DecodingRunner:
    """A runner without a draft model, with room for the largest trees of given candidates that fit into memory."""
    for nodes in GIVEN_SIZES:
        trees = given_tree_bytes(directory.config, directory.limits, nodes, backend.compute_dtype)
        known = {**memory, f"trees of {nodes} candidates": trees}
        try:
            runner = DecodingRunner.open(backend, directory, progress, adapters, known, drafts=False)
        except DeviceMemoryError:
            if nodes == GIVEN_SIZES[-1]:
                raise
            continue
        runner.verification.reserve(nodes)
        return runner
    raise AssertionError("there are sizes")


def read_adapters(
    directory: EngineDirectory, sources: Mapping[str, str | Path] | None
) -> dict[str, LoraAdapter] | None:
    """The directory's adapters and those of `sources`, or None where none is wanted, or the engines take none."""
    if sources is None or not (directory.limits.has_lora or sources):
        return None
    require_adapters(directory.limits)
    described = {name: adapter.path for name, adapter in directory.adapters.items()}
    return {name: LoraAdapter.read(path, directory.config) for name, path in (described | dict(sources)).items()}
