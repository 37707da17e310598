"""What each kernel adds to an EAGLE round, with the shapes of Llama-3.2-1B: times with it less times without it.

    python tools/bench/round_parts.py [--work DIRECTORY] [--plans "tree 10/6/60" "chain 5"]

For each plan: the round, its kernels that are no engine's alone, and both without each of these kernels (whose results
then are those of an earlier round). For each step of the draft: its engine alone, and without each of its launches.
`--as orin` and the like: see `as_device.py`. Needs TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from random_model import random_runner
from round_bench import RoundBench, plans_of, prepare
from simulated_acceptance import schedule, simulated_mean

from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.kernels import launcher
from edgellm.kernels.launch import Kernel, KernelModule, Launch

MEAN = 4.24
PARTS = (
    "prepare_step",
    "draft_expand",
    "draft_proposal",
    "draft_verification",
    "eagle_accept",
    "move_accepted",
    "advance_accepted",
    "decode_norms_linear_wide",
)


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Meanwhile kernels whose names begin so are not launched."""
    prepared, at_once = Launch.__call__, launcher.launch_kernel

    def call(launch: Launch) -> None:
        if not launch.name.startswith(name):
            prepared(launch)

    def enqueue(module: KernelModule, kernel: Kernel, *arguments: Any) -> None:
        if not kernel.expression.startswith(name):
            at_once(module, kernel, *arguments)

    Launch.__call__, launcher.launch_kernel = call, enqueue
    try:
        yield
    finally:
        Launch.__call__, launcher.launch_kernel = prepared, at_once


class PartsBench(RoundBench):
    """Rounds of one plan at a time, in microseconds."""

    def use(self, plan: DraftPlan, mean: float) -> None:
        self.plan, self.lengths = plan, schedule(mean, plan.steps)
        self.fill(self.lengths)
        for _ in range(3):
            self.runner.round(1, plan).wait()

    def whole(self) -> float:
        return 1000 * self.milliseconds(self.graph(self.plan), self.lengths, self.plan)

    def others(self) -> float:
        """Of the kernels that are no engine's, without those that force acceptance."""
        self.runner.verification.before_acceptance = lambda tree: None
        try:
            with self.engines_replaced(lambda engine: None):
                launch = self.graph(self.plan)
        finally:
            self.runner.verification.before_acceptance = self.forced
        return 1000 * self.milliseconds(launch, self.lengths, self.plan)

    def line(self, name: str, before: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
        whole, others = self.whole(), self.others()
        less = "" if before == (0.0, 0.0) else f"  less {before[0] - whole:7.1f} {before[1] - others:7.1f}"
        print(f"{self.plan.name:14s} {name:48s} round {whole:8.1f}  others {others:7.1f}{less}", flush=True)
        return whole, others

    def engines(self) -> None:
        """Each engine of the round alone and without each of its launches, as a graph of several steps."""
        with self.engines_replaced(None) as listed:
            for stage in self.runner.prepare_round(1, self.plan).stages.values():
                stage()
        for engine in {engine.shape: engine for engine in listed}.values():
            launches = getattr(engine, "_launches", [])
            whole = self._repeated(engine.enqueue)
            print(f"{engine.shape.name:32s} {whole:8.1f} us, {len(launches)} launches", flush=True)
            if len(launches) > 20:
                continue
            for left in launches:
                rest = [launch for launch in launches if launch is not left]
                without = self._repeated(lambda rest=rest: [launch() for launch in rest])
                print(f"    less {whole - without:6.1f} without {left.name}", flush=True)

    def _repeated(self, step: Callable[[], object], count: int = 10) -> float:
        def many() -> None:
            for _ in range(count):
                step()

        self.fill(self.lengths)
        many()
        launch = self.backend.capture(many, "repeated steps")
        return 1000 * self.milliseconds(launch, self.lengths, self.plan) / count


def main() -> None:
    """Print one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-eagle-bench")
    parser.add_argument("--plans", nargs="+", default=["tree 10/6/60", "chain 5"])
    arguments = parse(parser)
    _, directory = prepare(arguments.work)
    plans = {plan.name: plan for plan in plans_of(directory)}
    with random_runner(directory) as runner:
        bench = PartsBench(runner)
        for name in arguments.plans:
            plan = plans[name]
            bench.use(plan, simulated_mean(plan, list(plans.values())[-1], MEAN))
            before = bench.line("all")
            for part in PARTS:
                try:
                    with left_out(part):
                        bench.line(f"without {part}", before)
                except Exception:
                    traceback.print_exc()
            bench.line("all, again", before)
            bench.engines()


if __name__ == "__main__":
    main()
