"""Plain steps and rounds of a runner alike: the tokens of each slot as a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from edgellm.engines.runners.base_runner import StepKey
from edgellm.engines.runners.sampling_state import SamplingValues, StepRules
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner


class _Step(NamedTuple):
    readback: Any

    def wait(self) -> list[list[int]]:
        """None for an idle slot."""
        found = self.readback.wait()
        return found if isinstance(found, list) else [[token] if token >= 0 else [] for token in found.tolist()]


def take_step(
    runner: DecodingRunner,
    batch: int,
    plan: DraftPlan | None,
    rules: StepRules | None = None,
    trees: Sequence[GivenTree] | None = None,
    begun: StepKey | None = None,
) -> _Step:
    """A round of a plan, or without one a plain step."""
    return _Step(runner.decode(batch, rules, begun) if plan is None else runner.round(batch, plan, rules, trees))


def fitting(plan: DraftPlan, room: int) -> DraftPlan | None:
    """The longest such plan that cannot emit more than `room` tokens; None where only plain decoding is left."""
    if plan.is_given:
        return plan if plan.longest <= room else None
    return plan.shortened(room - 1) if room >= 2 else None


def watch_steps(runner: DecodingRunner, watched: Callable[[Callable[[], Any], int, DraftPlan | None], Any]) -> None:
    """Let `watched(take, batch, plan)` give what `take()` does for each step of a runner (plan None: a plain one)."""
    decode, drafted = runner.decode, runner.round
    runner.decode = lambda batch, *more: watched(lambda: decode(batch, *more), batch, None)
    runner.round = lambda batch, plan, *more: watched(lambda: drafted(batch, plan, *more), batch, plan)


def stepped(
    runner: DecodingRunner,
    samplings: Sequence[SamplingValues],
    step: Callable[[int, list[list[int]]], tuple[DraftPlan | None, Sequence[GivenTree] | None]],
    count: int,
    prompts: Sequence[Sequence[int]],
) -> tuple[list[list[int]], int]:
    """The first `count` tokens of each slot, and how many steps they took; `step(number, found)` says what is done."""
    prompts = prompts[: len(samplings)]
    found = [
        runner.start(slot, prompt, 0, sampling).wait().tolist()
        for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    steps = 0
    while min(map(len, found)) < count:
        plan, trees = step(steps, found)
        if plan is not None and plan.is_given and not runner.takes_given(len(prompts), plan):
            plan = trees = None
        elif plan is not None:
            room = runner.limits.kv_capacity - max(len(p) + len(t) for p, t in zip(prompts, found, strict=True))
            plan = fitting(plan, room)
            trees = None if plan is None else trees
        for tokens, emitted in zip(found, take_step(runner, len(prompts), plan, None, trees).wait(), strict=True):
            tokens.extend(emitted)
        steps += 1
    for slot in range(len(prompts)):
        runner.stop(slot)
    return [tokens[:count] for tokens in found], steps


def answers(
    runner: DecodingRunner,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingValues],
    plans: Sequence[DraftPlan | None],
    count: int = 16,
) -> tuple[list[list[int]], int]:
    """The same by the plans in turn, with a tree for those that take one."""
    trees = [GivenTree([5, 6], [-1, 0])] * len(prompts)

    def step(number: int, found: list[list[int]]) -> tuple[DraftPlan | None, Sequence[GivenTree] | None]:
        plan = plans[number % len(plans)]
        return plan, trees if plan is not None and plan.is_given else None

    return stepped(runner, samplings, step, count, prompts)
