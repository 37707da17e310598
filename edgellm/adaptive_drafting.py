"""Adaptive drafting on a device: measures what rounds cost there, once, and makes the controller that uses it."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.drafting_controller import DraftingController, candidate_plans
from edgellm.engines.draft_plan import DraftPlan
from edgellm.engines.sampling_state import SamplingValues
from edgellm.round_costs import PLAIN, RoundCosts, round_costs

if TYPE_CHECKING:
    from edgellm.drafting import DraftingConfig
    from edgellm.engines.eagle_runner import EagleRunner
    from edgellm.engines.engine_directory import EngineDirectory

logger = logging.getLogger("edgellm.drafting")

#: Tokens before the measured rounds: a short conversation.
PROMPT_TOKENS = 64
#: Rounds of each configuration that are timed; the median counts.
REPEATS = 5
#: Rounds before: the first loads code, the second captures a graph.
WARM_UPS = 2


def adaptive_drafting(config: DraftingConfig, directory: EngineDirectory, runner: EagleRunner) -> DraftingController:
    """The controller for `config` on this device, with the round costs kept for it or measured now.

    No sequence may be under way: measuring uses all slots. Raises EngineError if the engines cannot serve `config`.
    """
    plans = candidate_plans(config, runner.limits)
    names = [PLAIN, *(plan.name for plan in plans)]
    costs = round_costs(
        directory,
        runner.backend.name,
        names,
        runner.limits.batches,
        lambda: measure_round_costs(runner, plans, runner.limits.batches),
    )
    return DraftingController(plans, costs)


def measure_round_costs(runner: EagleRunner, plans: Sequence[DraftPlan], batches: Sequence[int]) -> RoundCosts:
    """Time rounds of all plans, and plain steps, for each batch size; leaves every slot idle."""
    started = time.perf_counter()
    measured: dict[str, dict[int, float]] = {name: {} for name in (PLAIN, *(plan.name for plan in plans))}
    for batch in batches:
        for name, seconds in _measure_batch(runner, plans, batch).items():
            measured[name][batch] = seconds
    logger.info(
        "Measured %d drafting configurations in %.1f s: %s",
        len(plans),
        time.perf_counter() - started,
        ", ".join(f"{name} {1000 * points[batches[0]]:.2f} ms" for name, points in measured.items()),
    )
    return RoundCosts(measured)


def _measure_batch(runner: EagleRunner, plans: Sequence[DraftPlan], batch: int) -> dict[str, float]:
    """The median seconds of a round by configuration."""
    spans: dict[str, list[float]] = {}
    sequences = _Sequences(runner, batch, any(plan.sampled or plan.acceptance == "typical" for plan in plans))

    def measure(plan: DraftPlan | None, steps: int) -> None:
        sequences.make_room(steps * (1 if plan is None else plan.longest))
        before = time.perf_counter()
        for _ in range(steps):
            runner.step(batch, plan).wait()
        spans.setdefault(PLAIN if plan is None else plan.name, []).append((time.perf_counter() - before) / steps)

    # Configurations take turns, so that a busy moment of the machine does not meet one of them alone.
    for _ in range(WARM_UPS + REPEATS):
        for plan in plans:
            measure(plan, 1)
    # Once in so many plain steps the draft takes in what they left for it, which is part of their price.
    for _ in range(WARM_UPS + REPEATS):
        measure(None, runner.limits.accept_tokens)
    sequences.stop()
    return {name: statistics.median(found[WARM_UPS:]) for name, found in spans.items()}


class _Sequences:
    """Sequences to measure with, in the leading slots: started anew where the context ends."""

    def __init__(self, runner: EagleRunner, batch: int, sampled: bool) -> None:
        self._runner, self._slots = runner, range(batch)
        self._prompt = [index % runner.config.vocab_size for index in range(self._length)]
        self._sampling = SamplingValues(temperature=1.0) if sampled else SamplingValues()
        self._start(reused=0)

    @property
    def _length(self) -> int:
        return min(PROMPT_TOKENS, self._runner.limits.kv_capacity // 2)

    def make_room(self, tokens: int) -> None:
        """See to it that `tokens` more fit."""
        if max(self._runner.base.lengths[slot] for slot in self._slots) + tokens > self._runner.limits.kv_capacity:
            self._start(reused=self._length - 1)

    def stop(self) -> None:
        """Leave all slots idle."""
        for slot in self._slots:
            self._runner.stop(slot)

    def _start(self, reused: int) -> None:
        for slot in self._slots:
            self._runner.start(slot, self._prompt, reused, self._sampling).wait()
