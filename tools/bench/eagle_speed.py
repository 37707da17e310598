"""Speed of drafted rounds on a GPU with the shapes of published models, heads of matching shape, and random weights.

    python tools/bench/eagle_speed.py [rounds] [table] [--shapes llama-1b llama-8b] [--as orin] [--output RESULTS.json]
                                      [--mean 4.24] [--rounds 100] [--work DIRECTORY]
    python tools/bench/eagle_speed.py --shapes qwen3.5-2b --weights float16 int4 --chain 3 --mean 2.4

Heads are EAGLE-3's, and that for multi-token prediction of a model that ships with one; with `--chain` there are the
engines of a chain of that length alone.
`rounds`, for each configuration (chains, small trees, the tree of 10 / 6 / 60): a round as one CUDA graph; its engines,
each as a graph of its own and all together; its other kernels, with the engines left out of the graph; tokens per
second of a loop in which the host reads every round, against plain decoding of the same base without a draft; and how
often the host waits in a round, counted. `table`: rounds by tree size in plain steps (`round_table.py`). Weights are
random, so acceptance is SIMULATED: the lengths of the rounds are given (`simulated_acceptance.py`), every stage runs,
the acceptance kernel included. Needs TensorRT, pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import one_of, parse
from device_limits import device_limits, read_around
from probes import counted_waits, executor_name
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_model import WEIGHTS, loop_milliseconds, random_runner
from round_bench import PROMPT_TOKENS, ROUNDS_PER_SERIES, SERIES, RoundBench, plans_of, prepare
from round_table import measure_table
from simulated_acceptance import SCHEDULE_ROUNDS, schedule, simulated_mean

from edgellm.engines.speculation.draft_plan import DraftPlan

TARGETS = {"round_over_engines": 1.05, "other_kernels_us": 120.0, "host_waits": 1.0, "speedup": 2.0, "round_ms": 2.9}
#: By the base's weights, how many times as fast as plain decoding a chain of three with 2.4 tokens a round must be.
CHAIN_TARGETS = {"float16": 1.5, "int4": 1.25}


def measure_plan(bench: RoundBench, plan: DraftPlan, mean: float) -> dict[str, Any]:
    """The parts of a round of `plan` whose length is simulated with this mean."""
    lengths = schedule(mean, plan.steps)
    bench.fill(lengths)
    for _ in range(3):
        bench.runner.round(1, plan).wait()  # uncaptured, captured, replayed
    whole = bench.graph(plan)
    with bench.engines_replaced(None) as engines:
        for stage in bench.runner.prepare_round(1, plan).stages.values():
            stage()
    with bench.engines_replaced(lambda engine: None):
        others = bench.graph(plan)
    bench.runner.verification.before_acceptance = lambda tree: None
    with bench.engines_replaced(lambda engine: None):
        without_forcing = bench.graph(plan)
    bench.runner.verification.before_acceptance = bench.forced
    alone = [bench.backend.capture(engine.enqueue, engine.shape.name) for engine in engines]

    def one_after_another() -> None:
        for engine in engines:
            engine.enqueue()

    together = bench.backend.capture(one_after_another, "all engines")
    with read_around() as around:
        round_ms = bench.milliseconds(whole, lengths, plan)
    half = 1 + ROUNDS_PER_SERIES // 2  # engines do not lengthen the sequence: at the rounds' mean length
    phases = [
        (engine.shape.name, executor_name(engine), bench.milliseconds(launch, lengths, plan, half))
        for engine, launch in zip(engines, alone, strict=True)
    ]
    engines_ms = sum(span for *_, span in phases)
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
        **around.recorded(),
    }


def measure_loops(
    bench: RoundBench, plain: Any, rows: list[dict[str, Any]], plans: Sequence[DraftPlan], rounds: int
) -> dict[str, Any]:
    """Speeds of the loops, taking turns with plain decoding; added to `rows`. Returns what plain decoding took."""
    spans: dict[str, list[tuple[float, float]]] = {plan.name: [] for plan in plans}
    plain_ms, kept_ms = [], []
    for _ in range(SERIES):
        plain_ms.append(loop_milliseconds(plain, PROMPT_TOKENS, 200))
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


def verdict(row: dict[str, Any], chain_target: float | None) -> dict[str, bool]:
    """Which of its targets the configuration of 10 / 6 / 60, or a chain that has one, reaches."""
    if chain_target is not None:
        return {f"{chain_target} times plain decoding": row["speedup"] >= chain_target}
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
    for target, reached in results.get("targets", {}).items():
        print(f"{'reached' if reached else 'MISSED '}  {target}")


def measure_rounds(work: Path, shape: str, mean: float, rounds: int, weights: str, chain: int | None) -> dict[str, Any]:
    """Everything about the rounds of one model."""
    plain_directory, directory = prepare(work, shape, weights, chain)
    plans, found = plans_of(directory), dict[str, Any]()
    with random_runner(plain_directory) as plain, random_runner(directory) as runner:
        bench = RoundBench(runner)
        found["rounds"] = []
        for plan in plans:
            found["rounds"].append(measure_plan(bench, plan, simulated_mean(plan, plans[-1], mean)))
            print(json.dumps(found["rounds"][-1]), flush=True)
        found["plain"] = measure_loops(bench, plain, found["rounds"], plans, rounds)
        runner.stop(0)
    is_known = (chain, round(mean, 1)) == (3, 2.4)
    if chain is None or is_known:
        target = CHAIN_TARGETS.get(weights) if is_known else None
        found["targets"] = verdict(found["rounds"][-1], target)
    print(f"{shape} {weights}: a plain step takes {found['plain']['step_ms']:.4f} ms", flush=True)
    print_table(found)
    return found


def main() -> None:
    """Measure everything, print tables and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", type=one_of("rounds", "table"), default=["rounds"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-1b"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=[WEIGHTS[0]], help="of the base's layers")
    parser.add_argument("--chain", type=int, help="measure a chain of so many drafted tokens alone")
    parser.add_argument("--plans", nargs="+", default=[], help='of the table, as "chain 3" [default: all]')
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-eagle-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--mean", type=float, default=4.24, help="simulated tokens a round of the largest tree")
    parser.add_argument("--rounds", type=int, default=SCHEDULE_ROUNDS, help="rounds of a loop")
    arguments = parse(parser)
    started = time.perf_counter()
    results: dict[str, Any] = {**provenance(), "limits": device_limits()._asdict(), "weights": arguments.weights}
    for shape, weights in product(arguments.shapes, arguments.weights):
        found = results[f"{shape} {weights}"] = {}
        if "rounds" in arguments.sections:
            found |= measure_rounds(arguments.work, shape, arguments.mean, arguments.rounds, weights, arguments.chain)
        if "table" in arguments.sections:
            found["table"] = measure_table(arguments.work, shape, arguments.mean, weights, arguments.plans)
    results["seconds"] = time.perf_counter() - started
    report(results, arguments.output)


if __name__ == "__main__":
    main()
