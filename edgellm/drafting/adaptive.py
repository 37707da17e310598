"""Adaptive drafting on a device: measures what rounds cost there, once, and makes the controller that uses it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgellm.drafting.controller import DraftingController, candidate_plans
from edgellm.drafting.costs import PLAIN, RoundCosts, forget_round_costs, round_costs
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan

if TYPE_CHECKING:
    from edgellm.drafting.config import DraftingConfig
    from edgellm.engines.directories.engine_directory import EngineDirectory
    from edgellm.engines.speculation.runner import DecodingRunner

logger = logging.getLogger("edgellm.drafting")

#: Tokens before the measured rounds: a short conversation. What a long one costs more is load to the controller.
PROMPT_TOKENS = 64
#: Rounds of each configuration that are timed; the fastest counts, which is the one that other work delayed least.
REPEATS = 4
#: Rounds before: the first loads code, the second captures a graph. A backend that computes at once needs one.
WARM_UPS = 2
#: No more rounds are timed after so many seconds, if every configuration had one: a request waits meanwhile.
MOST_SECONDS = 1.0


def adaptive_drafting(config: DraftingConfig, directory: EngineDirectory, runner: DecodingRunner) -> DraftingController:
    """The controller for `config` on this device, with the round costs kept for it or measured now.

    Kept costs that rounds prove wrong by far are forgotten: the next start measures again. No sequence may be under
    way: measuring uses all slots. Raises EngineError if the engines cannot serve `config`.
    """
    plans = candidate_plans(config, runner.limits)
    backend = runner.backend.name
    names = [PLAIN, *(plan.name for plan in plans)]
    batches = runner.limits.batches if runner.backend.fixed_shapes else sorted({1, runner.limits.max_batch})
    costs = round_costs(directory, backend, names, batches, lambda: measure_round_costs(runner, plans, batches))
    return DraftingController(plans, costs, lambda: forget_round_costs(directory, backend))


def measure_round_costs(runner: DecodingRunner, plans: Sequence[DraftPlan], batches: Sequence[int]) -> RoundCosts:
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


def _measure_batch(runner: DecodingRunner, plans: Sequence[DraftPlan], batch: int) -> dict[str, float]:
    """The fewest seconds of a round by configuration."""
    fewest: dict[str, float] = {}
    sequences = _Sequences(runner, batch, any(plan.sampled or plan.acceptance == "typical" for plan in plans))

    def measure(plan: DraftPlan | None) -> float:
        # Once in so many plain steps the draft takes in what they left for it, which is part of their price.
        steps = runner.limits.accept_tokens if plan is None else 1
        sequences.make_room(steps if plan is None else plan.longest)
        before = time.perf_counter()
        for _ in range(steps):
            runner.step(batch, plan).wait()
        return (time.perf_counter() - before) / steps

    for _ in range(1 if runner.backend.computes_at_once else WARM_UPS):
        for plan in (None, *plans):
            measure(plan)
    started = time.perf_counter()
    # Configurations take turns, so that a busy moment of the machine does not meet one of them alone.
    for _ in range(REPEATS):
        for plan in (None, *plans):
            name = PLAIN if plan is None else plan.name
            fewest[name] = min(fewest.get(name, math.inf), measure(plan))
        if time.perf_counter() - started > MOST_SECONDS:
            break
    sequences.stop()
    return fewest


class _Sequences:
    """Sequences to measure with, in the leading slots: started anew where the context ends."""

    def __init__(self, runner: DecodingRunner, batch: int, sampled: bool) -> None:
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
