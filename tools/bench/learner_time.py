"""What the host takes for the learner in each step: choosing a plan and taking note of what came of it.

    python -m tools.bench.learner_time [--steps 4000] [--step 120] [--profile]

The learner with all plans of a tree of 10/6/60 and the shipped model's runner are the real ones; one capture is
planned, so that plans are asked whether they are ready, as on a GPU. The device is imitated: a plain step takes
`--step` microseconds, rounds what captured ones are guessed to take. What is drafted is worth nothing ("plain"),
something ("rounds"), or changes every 300 steps ("changes"). Printed are microseconds of this thread's processor time a
step.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import time
from types import SimpleNamespace

from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.drafters import candidate_plans
from edgellm.drafting.learner import Learner
from edgellm.drafting.seconds import CAPTURED
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.opened_model import SHIPPED_MODEL
from tools.bench.drafting_workloads import LIMITS

#: How often a candidate is right, in turns of 300 steps.
TEXTS = {"plain": (0.05,), "rounds": (0.85,), "changes": (0.85, 0.05)}
FREE = SimpleNamespace(constraint=None, said=None, is_over=False, finished=False)


def microseconds(runner: DecodingRunner, chances: tuple[float, ...], steps: int, plain: float) -> tuple[float, float]:
    """What choosing and recording take on average."""
    learner, rng = Learner(0, True, None, candidate_plans(DraftingConfig(), LIMITS)), random.Random(1)
    spent = [0.0, 0.0]
    for number in range(steps):
        chance = chances[number // 300 % len(chances)]
        if learner.rest > 0:  # the loop takes these steps without it
            learner.rest, learner.rested_steps = learner.rest - 1, learner.rested_steps + 1
            learner.rested_seconds += plain * rng.uniform(0.98, 1.02)
            continue
        began = time.thread_time()
        plan, _ = learner.choose(runner, [FREE], 500, False)  # type: ignore[list-item]
        chosen = time.thread_time()
        count, seconds = 1, plain * rng.uniform(0.98, 1.02)
        if plan is not None:
            seconds *= CAPTURED.ratio(plan, 1)
            while count <= plan.steps and rng.random() < chance:
                count += 1
        began_recording = time.thread_time()
        learner.record(plan, [count], seconds)
        spent = [spent[0] + chosen - began, spent[1] + time.thread_time() - began_recording]
    return spent[0] / steps * 1e6, spent[1] / steps * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--step", type=float, default=120.0)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    directory = EngineDirectory.open(SHIPPED_MODEL)
    runner = DecodingRunner.open(open_backend("numpy", directory), directory)
    runner._steps.planned["a step"] = None  # type: ignore[assignment]
    profile = cProfile.Profile()
    for text, chances in TEXTS.items():
        if arguments.profile:
            profile.enable()
        choosing, recording = microseconds(runner, chances, arguments.steps, arguments.step * 1e-6)
        profile.disable()
        print(f"{text}: choose {choosing:.1f}, record {recording:.1f}, together {choosing + recording:.1f} us a step")
    if arguments.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(24)


if __name__ == "__main__":
    main()
