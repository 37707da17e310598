"""Rounds of an EAGLE draft on a model with random weights, of given lengths, as benchmarks run and time them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from probes import enqueue_replaced
from random_model import WEIGHTS, RandomDirectory, random_prompt, shape_directory
from simulated_acceptance import ForcedAcceptance

from edgellm.device.limits import gpu_milliseconds
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafters import candidate_plans
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain
from edgellm.engines.speculation.runner import DecodingRunner

#: Prompts are prefilled in chunks that kernels take, so that no plans are built for them.
CHUNK, CAPACITY = 16, 1024
PROMPT_TOKENS = 500
#: Rounds between two events: few, since each makes the sequence longer.
ROUNDS_PER_SERIES = 20
SERIES = 5


def prepare(
    work: Path, shape: str = "llama-1b", weights: str = WEIGHTS[0], chain_length: int | None = None
) -> tuple[RandomDirectory, RandomDirectory]:
    """The engine directories of a model, without and with the draft; its layers are of `weights`. With the engines of a
    chain of `chain_length` tokens alone, or those of a tree of 10 / 6 / 60."""
    steps = {"draft_top_k": 10, "draft_steps": 6, "verify_tree_size": 60}
    if chain_length is not None:
        steps = {"draft_top_k": 1, "draft_steps": chain_length, "verify_tree_size": chain_length + 1}
    plain, drafted = EngineLimits(1, CHUNK, CAPACITY), EngineLimits(1, CHUNK, CAPACITY, **steps)
    return shape_directory(work, shape, plain, weights), shape_directory(work, shape, drafted, weights)


def plans_of(directory: EngineDirectory) -> list[DraftPlan]:
    """Those that the controller chooses among, the largest tree last; where there are no trees, the longest chain."""
    limits = directory.limits
    if limits.draft_top_k == 1:
        return [chain(limits.draft_steps)]
    return candidate_plans(DraftingConfig.largest(limits), limits)


class RoundBench:
    """Measures the rounds of one runner in slot 0."""

    def __init__(self, runner: DecodingRunner) -> None:
        self.runner, self.backend = runner, runner.backend
        self.stream = runner.backend.stream
        self.forced = ForcedAcceptance(runner.backend)
        runner.verification.before_acceptance = self.forced
        self.prompt = random_prompt(PROMPT_TOKENS)
        self._kept = 0

    def fill(self, lengths: np.ndarray) -> None:
        """A sequence of PROMPT_TOKENS, whose next rounds will have these lengths; its rows are computed once."""
        self.runner.start(0, self.prompt, self._kept, SamplingValues()).wait()
        self._kept = PROMPT_TOKENS - 1
        self.forced.use(lengths)

    @contextmanager
    def engines_replaced(self, replacement: Callable[[Any], None] | None) -> Iterator[list[Any]]:
        """`enqueue_replaced` for the rounds that are prepared meanwhile: a prepared round holds what its engines were
        enqueued by."""
        prepared, self.runner._rounds = self.runner._rounds, {}
        try:
            with enqueue_replaced(replacement) as listed:
                yield listed
        finally:
            self.runner._rounds = prepared

    def graph(self, plan: DraftPlan) -> Callable[[], None]:
        """The whole round as a graph, made anew."""
        stages = self.runner.prepare_round(1, plan).stages.values()

        def whole() -> None:
            for stage in stages:
                stage()

        whole()  # loads code, which a capture must not do
        captured = self.backend.capture(whole, f"the round {plan.name}")
        if captured is whole:
            raise SystemExit(f"the round {plan.name} could not be captured")
        return captured

    def milliseconds(
        self,
        launch: Callable[[], None],
        lengths: np.ndarray,
        plan: DraftPlan,
        rounds_before: int = 1,
        repeats: int = ROUNDS_PER_SERIES,
        series: int = SERIES,
    ) -> float:
        """Median over the series, each of so many `repeats`, of the GPU time of one launch, all from the state after
        `rounds_before` rounds."""

        def run_rounds() -> None:
            self.fill(lengths)
            for _ in range(rounds_before):
                self.runner.round(1, plan).wait()

        return gpu_milliseconds(self.stream, launch, repeats, series, before=run_rounds)

    def loop(self, plan: DraftPlan | None, lengths: np.ndarray, rounds: int) -> tuple[float, float]:
        """Seconds and tokens of a loop in which the host reads each round while the next one runs."""
        self.fill(lengths)
        step = partial(self.runner.decode, 1) if plan is None else partial(self.runner.round, 1, plan)
        self.backend.synchronize()
        unread, tokens = [step()], 0
        begin = time.perf_counter()
        for _ in range(rounds):
            unread.append(step())
            emitted = unread.pop(0).wait()[0]
            tokens += 1 if plan is None else len(emitted)
        seconds = time.perf_counter() - begin
        unread.pop(0).wait()
        return seconds, tokens
