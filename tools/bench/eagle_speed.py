"""Speed of EAGLE rounds on a GPU with the shapes of Llama-3.2-1B, a head of matching shape, and random weights.

    python tools/bench/eagle_speed.py [--work DIRECTORY] [--output RESULTS.json] [--mean 4.24] [--rounds 100]

For each configuration (chains, small trees, the tree of 10 / 6 / 60): a round as one CUDA graph; its engines, each as
a graph of its own and all together; its other kernels, with the engines left out of the graph; tokens per second of a
loop in which the host reads every round, against plain decoding of the same base without a draft; and how often the
host waits in a round, counted. Weights are random, so acceptance is SIMULATED: the lengths of the rounds are given
(`simulated_acceptance.py`), every stage runs, the acceptance kernel included. Needs TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timer import gpu_milliseconds
from probes import counted_waits, enqueue_replaced
from provenance import provenance
from random_checkpoint import LLAMA_3_2_1B, checkpoint_in
from random_draft import write_draft
from simulated_acceptance import SCHEDULE_ROUNDS, ForcedAcceptance, schedule, simulated_mean

from edgellm.drafting.adaptive import measure_round_costs
from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.controller import candidate_plans
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan
from edgellm.engines.speculation.eagle_runner import EagleRunner

CAPACITY = 1024
PROMPT_TOKENS = 500
#: Rounds between two events: few, since each makes the sequence longer.
ROUNDS_PER_SERIES = 20
SERIES = 5
TARGETS = {"round_over_engines": 1.05, "other_kernels_us": 120.0, "host_waits": 1.0, "speedup": 2.0, "round_ms": 2.9}


def prepare(work: Path) -> tuple[EngineDirectory, EngineDirectory]:
    """Write the checkpoints and build the engine directories, without and with the draft."""
    base, draft = checkpoint_in(work), work / "draft"
    if not (draft / "model.safetensors").exists():
        write_draft(draft, LLAMA_3_2_1B)
    sizes = {"draft_top_k": 10, "draft_steps": 6, "verify_tree_size": 60}
    plain, eagle = work / "plain", work / "eagle"
    common = {"weights": "link", "force": True}
    build_engine_directory(base, plain, EngineLimits(kv_capacity=CAPACITY), **common)
    build_engine_directory(base, eagle, EngineLimits(kv_capacity=CAPACITY, **sizes), draft=draft, **common)
    return EngineDirectory.open(plain), EngineDirectory.open(eagle)


class RoundBench:
    """Measures the rounds of one runner in slot 0."""

    def __init__(self, runner: EagleRunner) -> None:
        self.runner, self.backend = runner, runner.backend
        self.stream = runner.backend.stream
        self.forced = ForcedAcceptance(runner.backend)
        runner.verification.before_acceptance = self.forced
        self._prompt = [int(token) for token in np.random.default_rng(0).integers(0, 1000, PROMPT_TOKENS)]

    def fill(self, lengths: np.ndarray) -> None:
        """A sequence of PROMPT_TOKENS, whose next rounds will have these lengths."""
        self.runner.start(0, self._prompt, 0, SamplingValues()).wait()
        self.forced.use(lengths)

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
        self, launch: Callable[[], None], lengths: np.ndarray, plan: DraftPlan, rounds_before: int = 1
    ) -> float:
        """Median over the series of the GPU time of one launch, all from the state after `rounds_before` rounds."""

        def run_rounds() -> None:
            self.fill(lengths)
            for _ in range(rounds_before):
                self.runner.round(1, plan).wait()

        return gpu_milliseconds(self.stream, launch, ROUNDS_PER_SERIES, SERIES, before=run_rounds)

    def loop(self, plan: DraftPlan | None, lengths: np.ndarray, rounds: int) -> tuple[float, float]:
        """Seconds and tokens of a loop in which the host reads each round while the next one runs."""
        self.fill(lengths)
        step = self.runner.step
        self.backend.synchronize()
        unread, tokens = [step(1, plan)], 0
        begin = time.perf_counter()
        for _ in range(rounds):
            unread.append(step(1, plan))
            tokens += len(unread.pop(0).wait()[0])
        seconds = time.perf_counter() - begin
        unread.pop(0).wait()
        return seconds, tokens


def measure_plan(bench: RoundBench, plan: DraftPlan, mean: float) -> dict[str, Any]:
    """The parts of a round of `plan` whose length is simulated with this mean."""
    lengths = schedule(mean, plan.steps)
    bench.fill(lengths)
    for _ in range(3):
        bench.runner.round(1, plan).wait()  # uncaptured, captured, replayed
    whole = bench.graph(plan)
    with enqueue_replaced(None) as engines:
        for stage in bench.runner.prepare_round(1, plan).stages.values():
            stage()
    with enqueue_replaced(lambda engine: None):
        others = bench.graph(plan)
    bench.runner.verification.before_acceptance = None
    with enqueue_replaced(lambda engine: None):
        without_forcing = bench.graph(plan)
    bench.runner.verification.before_acceptance = bench.forced
    alone = [bench.backend.capture(engine.enqueue, engine.shape.name) for engine in engines]

    def one_after_another() -> None:
        for engine in engines:
            engine.enqueue()

    together = bench.backend.capture(one_after_another, "all engines")
    round_ms = bench.milliseconds(whole, lengths, plan)
    half = 1 + ROUNDS_PER_SERIES // 2  # engines do not lengthen the sequence: at the rounds' mean length
    phases = [
        (engine.shape.name, bench.milliseconds(launch, lengths, plan, half))
        for engine, launch in zip(engines, alone, strict=True)
    ]
    engines_ms = sum(span for _, span in phases)
    return {
        "configuration": plan.name,
        "simulated_mean": mean,
        "round_ms": round_ms,
        "engines_alone_ms": engines_ms,
        "engines_in_one_graph_ms": bench.milliseconds(together, lengths, plan, half),
        "round_over_engines": round_ms / engines_ms,
        "other_kernels_us": 1000 * bench.milliseconds(without_forcing, lengths, plan),
        "other_kernels_with_forcing_us": 1000 * bench.milliseconds(others, lengths, plan),
        "phases_ms": phases,
    }


def plain_loop(runner: Any, prompt: Sequence[int], steps: int) -> float:
    """Milliseconds of a plain step with the host reading every token while the next step runs."""
    runner.start(0, prompt, 0, SamplingValues()).wait()
    for _ in range(3):
        runner.decode(1).wait()
    unread = [runner.decode(1)]
    begin = time.perf_counter()
    for _ in range(steps):
        unread.append(runner.decode(1))
        unread.pop(0).wait()
    seconds = time.perf_counter() - begin
    unread.pop(0).wait()
    return seconds / steps * 1000


def measure_loops(
    bench: RoundBench, plain: Any, rows: list[dict[str, Any]], plans: Sequence[DraftPlan], rounds: int
) -> dict[str, Any]:
    """Speeds of the loops, taking turns with plain decoding; added to `rows`. Returns what plain decoding took."""
    spans: dict[str, list[tuple[float, float]]] = {plan.name: [] for plan in plans}
    plain_ms, kept_ms = [], []
    prompt = bench._prompt
    for _ in range(SERIES):
        plain_ms.append(plain_loop(plain, prompt, 200))
        for plan, row in zip(plans, rows, strict=True):
            lengths = schedule(row["simulated_mean"], plan.steps)
            spans[plan.name].append(bench.loop(plan, lengths, rounds))
        seconds, tokens = bench.loop(None, np.ones(SCHEDULE_ROUNDS), 200)
        kept_ms.append(seconds / tokens * 1000)
    vanilla = statistics.median(plain_ms)
    for plan, row in zip(plans, rows, strict=True):
        found = spans[plan.name]
        tokens = sum(count for _, count in found)
        row["found_mean"] = tokens / (rounds * len(found))
        row["loop_round_ms"] = statistics.median(seconds / rounds * 1000 for seconds, _ in found)
        row["tokens_per_second"] = statistics.median(count / seconds for seconds, count in found)
        row["speedup"] = row["tokens_per_second"] * vanilla / 1000
        lengths, counts = schedule(row["simulated_mean"], plan.steps), []
        for length in (rounds // 2, rounds):  # what the prompt and the loop's ends wait for is in both
            with counted_waits() as waits:
                bench.loop(plan, lengths, length)
            counts.append(Counter(waits))
        row["host_waits_by_kind"] = dict(counts[1] - counts[0])
        row["host_waits"] = sum(row["host_waits_by_kind"].values()) / (rounds - rounds // 2)
    return {"step_ms": vanilla, "step_with_draft_loaded_ms": statistics.median(kept_ms)}


def verdict(row: dict[str, Any]) -> dict[str, bool]:
    """Which of the targets the configuration of 10 / 6 / 60 reaches."""
    return {
        "round at most 1.05 times its engines alone": row["round_over_engines"] <= TARGETS["round_over_engines"],
        "other kernels at most 120 us": row["other_kernels_us"] <= TARGETS["other_kernels_us"],
        "at most one wait a round": row["host_waits"] <= TARGETS["host_waits"],
        "2.0 times plain decoding, or a round of 2.9 ms": row["speedup"] >= TARGETS["speedup"]
        or row["loop_round_ms"] <= TARGETS["round_ms"],
    }


def print_table(results: dict[str, Any]) -> None:
    """The rows for people."""
    names = (
        ("configuration", "s"),
        ("round_ms", ".3f"),
        ("engines_alone_ms", ".3f"),
        ("round_over_engines", ".3f"),
        ("other_kernels_us", ".1f"),
        ("found_mean", ".2f"),
        ("loop_round_ms", ".3f"),
        ("tokens_per_second", ".0f"),
        ("speedup", ".2f"),
        ("host_waits", ".2f"),
    )
    print("  ".join(name for name, _ in names))
    for row in results["rounds"]:
        print("  ".join(f"{format(row[name], kind):>{len(name)}}" for name, kind in names))
    for target, reached in results["targets"].items():
        print(f"{'reached' if reached else 'MISSED '}  {target}")


def main() -> None:
    """Measure everything, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-eagle-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--mean", type=float, default=4.24, help="simulated tokens a round of the largest tree")
    parser.add_argument("--rounds", type=int, default=SCHEDULE_ROUNDS, help="rounds of a loop")
    arguments = parser.parse_args()
    started = time.perf_counter()
    plain_directory, directory = prepare(arguments.work)
    print(f"built in {time.perf_counter() - started:.1f} s", flush=True)
    plans = candidate_plans(DraftingConfig.largest(directory.limits), directory.limits)
    results: dict[str, Any] = dict(provenance())
    with open_runner("tensorrt", plain_directory) as plain:
        runner = EagleRunner.open(open_backend("tensorrt", directory), directory)
        try:
            results["gpu"] = runner.backend.gpu.name
            bench = RoundBench(runner)
            results["rounds"] = []
            for plan in plans:
                mean = simulated_mean(plan, plans[-1], arguments.mean)
                results["rounds"].append(measure_plan(bench, plan, mean))
                print(json.dumps(results["rounds"][-1]), flush=True)
            results["plain"] = measure_loops(bench, plain, results["rounds"], plans, arguments.rounds)
            runner.stop(0)
            costs = measure_round_costs(runner, plans, [1])
            results["controller_costs_ms"] = {name: 1000 * points[1] for name, points in costs.measured.items()}
        finally:
            runner.close()
    results["targets"] = verdict(results["rounds"][-1])
    results["seconds"] = time.perf_counter() - started
    print_table(results)
    text = json.dumps(results, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
