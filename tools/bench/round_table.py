"""Rounds of a model by tree size, in plain steps and milliseconds, and each engine's share of the read bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from as_device import measured_as
from device_limits import read_around
from probes import executor_name, weight_bytes
from random_model import RandomDirectory, random_prompt, random_runner
from round_bench import PROMPT_TOKENS, RoundBench, plans_of, prepare
from simulated_acceptance import schedule, simulated_mean

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.sampling_state import SamplingValues

#: Few: a round of a large model in a part of a GPU takes tens of milliseconds.
REPEATS, SERIES = 10, 3
#: How many plain steps a round may take where base and draft have 4 bits: on the whole GPU, and as an Orin.
TARGETS = {None: {"tree 10/4/16": 1.9, "chain 3": 1.6}, "orin": {"tree 10/4/16": 1.6, "chain 3": 1.45}}


def measure_table(work: Path, shape: str, mean: float, weights: str, only: Sequence[str] = ()) -> dict[str, Any]:
    """`rounds` and `engines` of a model; also printed, as Markdown. Lengths of the rounds are simulated. `only` names
    plans (none: all)."""
    plain_directory, directory = prepare(work, shape, weights)
    with random_runner(plain_directory) as plain:
        plain_ms = plain_step(plain, PROMPT_TOKENS)
        (decode,) = (engine for each, engine in plain.engines.loaded.items() if each.phase == "decode")
        engines = {decode.shape.name: engine_row(plain.backend, decode, plain_directory)}
    decode_ms, plans, rounds = engines[decode.shape.name]["ms"], plans_of(directory), []
    with random_runner(directory) as runner:
        bench = RoundBench(runner)
        for plan in (each for each in plans if not only or each.name in only):
            tokens = simulated_mean(plan, plans[-1], mean)
            lengths = schedule(tokens, plan.steps)
            bench.fill(lengths)
            for _ in range(3):
                runner.round(1, plan).wait()
            graph = bench.graph(plan)
            with read_around() as around:
                round_ms = bench.milliseconds(graph, lengths, plan, repeats=REPEATS, series=SERIES)
            with bench.engines_replaced(None) as listed:
                for stage in runner.prepare_round(1, plan).stages.values():
                    stage()
            names = dict.fromkeys(engine.shape.name for engine in listed)
            for engine in listed:
                if engine.shape.name not in engines:
                    engines[engine.shape.name] = engine_row(runner.backend, engine, directory)
            rounds.append(
                {
                    "configuration": plan.name,
                    "round_ms": round_ms,
                    "plain_steps": round_ms / plain_ms,
                    "simulated_tokens": tokens,
                    "ms_a_token": round_ms / tokens,
                    "speedup": plain_ms * tokens / round_ms,
                    "on_tensorrt": [name for name in names if engines[name]["executor"].startswith("TensorRT")],
                    **around.recorded(),
                }
            )
    for row in engines.values():
        row["decode_steps"] = row["ms"] / decode_ms
    found = {"plain_ms": plain_ms, "rounds": rounds, "engines": engines}
    print(markdown(shape, found), flush=True)
    for row in rounds if weights == "int4" else ():
        if most := TARGETS.get(measured_as(), {}).get(row["configuration"]):
            reached = "reached" if row["plain_steps"] <= most else "MISSED "
            print(f"{reached}  {shape}, {row['configuration']}: {row['plain_steps']:.2f} plain steps, at most {most}")
    return found


def plain_step(runner: BaseEngineRunner, tokens: int) -> float:
    """Milliseconds of a plain step of the GPU behind a prompt of so many tokens."""
    prompt, kept = random_prompt(tokens), 0

    def fill() -> None:
        nonlocal kept
        runner.start(0, prompt, kept, SamplingValues()).wait()
        kept = tokens - 1
        for _ in range(3):
            runner.decode(1).wait()

    fill()
    ((step,),) = runner.steps.captures.values()
    return gpu_milliseconds(runner.backend.stream, step, REPEATS, SERIES, before=fill)


def engine_row(backend: Any, engine: Any, directory: RandomDirectory) -> dict[str, Any]:
    """An engine as a graph of its own, on what it is bound to: its executor, milliseconds, and share of bandwidth."""
    launch = backend.capture(engine.enqueue, engine.shape.name)
    with read_around() as around:
        milliseconds = gpu_milliseconds(backend.stream, launch, REPEATS, SERIES, before=launch)
    packed = directory.layouts.get(engine.shape.model)
    nbytes = weight_bytes(directory.model_config(engine.shape.model), engine.shape, directory.dtype, packed)
    share = around.read_share(engine.shape.name, nbytes, milliseconds)
    found = {"executor": executor_name(engine), "ms": milliseconds, "bytes": nbytes, "read_share": share}
    return found | around.recorded()


def markdown(shape: str, found: dict[str, Any]) -> str:
    """Both tables."""
    lines = [f"{shape}: a plain step takes {found['plain_ms']:.3f} ms", ""]
    lines += ["| round | ms | plain steps | tokens, simulated | ms a token | on TensorRT |", "|---" * 6 + "|"]
    lines += [
        f"| {row['configuration']} | {row['round_ms']:.3f} | {row['plain_steps']:.2f} | {row['simulated_tokens']:.2f} "
        f"| {row['ms_a_token']:.3f} | {', '.join(row['on_tensorrt']) or 'nothing'} |"
        for row in found["rounds"]
    ]
    lines += ["", "| engine | runs on | ms | decode steps | share of read bandwidth |", "|---" * 5 + "|"]
    lines += [
        f"| {name} | {row['executor']} | {row['ms']:.3f} | {row['decode_steps']:.2f} | {row['read_share']:.0%} |"
        for name, row in found["engines"].items()
    ]
    return "\n".join(lines) + "\n"
