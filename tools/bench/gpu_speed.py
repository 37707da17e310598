"""Speed on a GPU with the shapes of published models and random weights: build, decode step, loops, prefill, start.

    python tools/bench/gpu_speed.py [step] [loops] [windows] [prefill] [--shapes llama-1b llama-8b] [--as orin]
                                    [--output RESULTS.json] [--without-torch] [--work DIRECTORY]

`step`: build, decode step, loop and start of a process with Llama-3.2-1B's shapes. `loops`: decode loops from 128
tokens on of all `--shapes` and `--weights`, beside the time of the bytes that a step cannot do without (weights, the KV
rows in reach, recurrent states read and written) at the read bandwidth that is found before and behind each loop
(`device_limits.py`); beside a neighbour (`--as orin`) also what the board would take.
`windows`: loops behind few tokens and many of one model, the GPU's time of a step's engine there and of its attentions
alone, to windows and to all rows, and the memory that its states are planned with at that context, with windows and as
if every layer attended to all. `prefill`: prompts of `--prompts` tokens of all `--shapes`.
Needs TensorRT, pycuda and, for the yardstick, PyTorch with CUDA (which takes the whole GPU: it is left out where a part
is measured) and, for hybrid models, transformers. Times of steps are the GPU's (CUDA events),
medians of five; times of processes are wall time with a warm file cache. Peak memory is the resident set of the build
process. A step takes longer the more tokens the sequence has: the bare engine is timed at lengths spread over those of
the loop.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import is_beside, measured_as, one_of, parse, python
from device_limits import device_limits, read_around, scale_of_part
from neighbour import resting
from probes import executor_name, state_traffic, weight_bytes, weight_parts
from provenance import provenance, report
from random_checkpoint import LLAMA_3_2_1B, SHAPES, checkpoint_in
from random_model import WEIGHTS, RandomDirectory, loop_milliseconds, random_prompt, random_runner, shape_directory

from edgellm.device.forecast import BOARDS
from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import KV_CACHES, EngineLimits
from edgellm.engines.model.memory_plan import plan_memory
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues

CAPACITY = 1024
PROMPT_TOKENS = 500
REPEATS = 200
#: Steps of the loops of all shapes, and where they begin unless it is asked otherwise.
LOOP_STEPS, LOOP_TOKENS = 100, 128
#: The most milliseconds that a loop may take beyond the time of its bytes, on an H200 as a whole.
MOST_ABOVE = {
    ("lfm2-1.2b", "float16"): 0.30,
    ("lfm2-1.2b", "int4"): 0.25,
    ("qwen3.5-2b", "float16"): 0.50,
    ("qwen3.5-2b", "int4"): 0.45,
}
#: How many times what `torch.compile` takes a prompt may take.
MOST_OVER_TORCH = 1.5
#: How long PyTorch may take to compile and run what it is compared in.
TORCH_SECONDS = 240
#: Names of what was read and of what the neighbour got, before and behind a loop.
BANDWIDTHS = ("read_gb_per_s", "neighbour_gb_per_s")
#: What can be asked for.
SECTIONS = ("step", "loops", "windows", "prefill")
#: Tokens behind which loops of a model with windows are compared, its context, and how much longer the last may take.
WINDOW_TOKENS, WINDOW_CONTEXT, MOST_LONGER = (1000, 8000, 30000), 32768, 1.3


def run_build(checkpoint: Path, engine_directory: Path) -> dict[str, float]:
    """Run `edgellm build` in a process of its own; seconds and peak resident MiB."""
    command = [*python(), "-m", "edgellm", "build", str(checkpoint), str(engine_directory)]
    command += ["--kv-capacity", str(CAPACITY), "--force"]
    with resting():
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"the build failed:\n{output}")
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 2**20
    print(output)
    return {"seconds": seconds, "peak_resident_mib": usage.ru_maxrss / 1024, "weights_mib": weights}


def measure_steps(directory: EngineDirectory) -> dict[str, Any]:
    """Decode: the bare engine as a graph, the whole step free-running, the loop with the host reading each token.

    The bare engine is timed before and after each run of the loop, so that both see the same clocks.
    """
    results: dict[str, Any] = {}
    started = time.perf_counter()
    with open_runner("tensorrt", directory) as runner:
        results["open_seconds"] = time.perf_counter() - started
        stream, backend = runner.backend.stream, runner.backend
        prompt = random_prompt(PROMPT_TOKENS)

        def fill() -> None:
            runner.start(0, prompt, 0, SamplingValues()).wait()
            for _ in range(3):
                runner.decode(1).wait()

        fill()
        shape = next(shape for shape in runner.engines.loaded if shape.phase == "decode")
        engine = runner._engine(shape, slice(0, 1))
        results["decode_executor"] = executor_name(engine)
        bare = backend.capture(engine.enqueue, "the bare engine")
        ((step,),) = runner.steps.captures.values()
        committed = int(backend.read(runner._state.kvcache_start_index[:1]).wait()[0])
        results["loop_committed_rows"] = [committed, committed + REPEATS]

        def bare_milliseconds(rows: int, repeats: int) -> float:
            backend.upload(runner._state.kvcache_start_index[:1], np.asarray([rows], np.int32))
            bare()
            return gpu_milliseconds(stream, bare, repeats, series=1)

        def bare_over_the_loop() -> float:
            step = REPEATS // 10
            return statistics.mean(
                bare_milliseconds(rows, step) for rows in range(committed + step // 2, committed + REPEATS, step)
            )

        results["bare_engine_at_start_ms"] = statistics.median(bare_milliseconds(committed, 20) for _ in range(5))
        results["decode_step_ms"] = gpu_milliseconds(stream, step, 20, before=fill)
        bare_spans, loops = [], []
        with read_around() as around:
            for _ in range(5):
                bare_spans.append(bare_over_the_loop())
                loops.append(loop_milliseconds(runner, PROMPT_TOKENS, REPEATS))
                bare_spans.append(bare_over_the_loop())
        results["bare_engine_ms"] = statistics.median(bare_spans)
        nbytes = weight_bytes(directory.config, shape, directory.dtype)
        share = around.read_share("the bare engine", nbytes, results["bare_engine_ms"])
        results |= {"bare_engine_read_share": share, "bare_engine_bandwidth": around.recorded()}
        results["decode_loop_ms"] = statistics.median(loops)
        results["loop_over_bare_engine"] = results["decode_loop_ms"] / results["bare_engine_ms"]
        for count in (128, 512):
            ids = random_prompt(count)
            runner.start(0, ids, 0, SamplingValues()).wait()
            results[f"prefill_{count}_ms"] = gpu_milliseconds(
                stream, lambda ids=ids: runner.start(0, ids, 0, SamplingValues()), 10
            )
        results["memory_plan_mib"] = {name: size / 2**20 for name, size in runner.memory_plan.items.items()}
    return results


def first_token_seconds(engine_directory: Path) -> float:
    """From the start of an `edgellm generate` process to the first byte of its answer."""
    command = [*python(), "-m", "edgellm", "generate", "--raw", "hello", "--max-tokens", "64"]
    with resting():
        started = time.perf_counter()
        process = subprocess.Popen([*command, "--model", str(engine_directory)], stdout=subprocess.PIPE)
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.stdout.read()
        code = process.wait()
    if code:
        raise SystemExit("edgellm generate failed")
    return seconds


def measure_loop(
    work: Path, shape: str, tokens: int, kv_cache: str, weights: str, kinds: bool = False
) -> dict[str, Any]:
    """The decode loop of one model behind so many tokens, with the host reading each token while the next step runs;
    `kinds`: see `print_kinds`."""
    limits = EngineLimits(1, 16, max(CAPACITY, tokens + 2 * LOOP_STEPS), kv_cache=kv_cache)
    directory = shape_directory(work, shape, limits, weights)
    with random_runner(directory) as runner:
        found = loop_behind(runner, directory, tokens) | {"most_above_ms": MOST_ABOVE.get((shape, weights))}
        if kinds:
            print_kinds(runner, tokens)
        return found


def loop_behind(runner: BaseEngineRunner, directory: RandomDirectory, tokens: int) -> dict[str, Any]:
    """Wall time of a step behind so many tokens, and of its bytes at the bandwidth: `above_ms` more. Beside a neighbour
    `board_ms` is what the board would take."""
    with read_around() as around:
        spans = [loop_milliseconds(runner, tokens, LOOP_STEPS) for _ in range(6)][1:]
    decode, engine = next(loaded for loaded in runner.engines.loaded.items() if loaded[0].phase == "decode")
    packed, span = directory.layouts.get("base"), statistics.median(spans)
    weights = weight_parts(directory.config, decode, directory.dtype, packed)
    states = state_traffic(directory.config, directory.limits, directory.dtype, tokens + LOOP_STEPS // 2)
    share = around.read_share("the decode loop", sum(weights.values()) + sum(states.values()), span)
    found = {"board_ms": span * board_scale()} if is_beside() else {}
    return {
        "executor": executor_name(engine),
        "loop_ms": span,
        "weight_bytes": sum(weights.values()),
        "state_bytes": sum(states.values()),
        "bytes": weights | states,
        "bytes_ms": share * span,
        "above_ms": span - share * span,
        "read_share": share,
        "all_ms": spans,
        **around.recorded(),
        **found,
    }


def board_scale() -> float:
    """By how many times the board is slower than the part that stands for it."""
    limits, name = device_limits(), measured_as()
    return scale_of_part(BOARDS[name], limits.multiprocessors, limits.clock_ghz) if name in BOARDS else 1.0


def print_loop(name: str, found: dict[str, Any]) -> None:
    """One line."""
    most, above = found.get("most_above_ms"), found["above_ms"]
    target = "" if most is None else f" (at most {most:.2f}: {'reached' if above <= most else 'MISSED'})"
    read, beside = (" and ".join(f"{each:.0f}" for each in found.get(name, ())) for name in BANDWIDTHS)
    print(
        f"{name}: {found['loop_ms']:.4f} ms a token; its bytes take {found['bytes_ms']:.4f} at {read} GB/s before and "
        f"behind it ({found['read_share']:.1%}): {above:.4f} above{target}; {found['executor']}"
        + (f"; beside {beside} GB/s; on the board {found['board_ms']:.3f} ms" if beside else ""),
        flush=True,
    )


def measure_windows(work: Path, shape: str, kv_cache: str, weights: str) -> dict[str, Any]:
    """Loops of one model behind few tokens and many, in one context; what its states take with windows and without."""
    limits = EngineLimits(1, 16, WINDOW_CONTEXT, kv_cache=kv_cache)
    directory, found = shape_directory(work, shape, limits, weights), dict[str, Any]()
    with random_runner(directory) as runner:
        for tokens in WINDOW_TOKENS:
            runner.stop(0)  # so that all rows of the prompt are computed
            found[str(tokens)] = loop_behind(runner, directory, tokens)
            print_loop(f"{shape} behind {tokens} tokens", found[str(tokens)])
            times = found[str(tokens)]["gpu_us"] = step_microseconds(runner, tokens)
            print(f"{shape} behind {tokens} tokens, us of the GPU: {json.dumps(times)}", flush=True)
    few, many = (found[str(tokens)]["loop_ms"] for tokens in (WINDOW_TOKENS[0], WINDOW_TOKENS[-1]))
    found["longer"] = many / few
    reached = "reached" if found["longer"] <= MOST_LONGER else "MISSED"
    print(f"{shape}: {found['longer']:.3f} times as long (at most {MOST_LONGER}: {reached})")
    found["planned_mib"] = planned_memory(directory)
    for name, items in found["planned_mib"].items():
        print(f"{shape}, context {WINDOW_CONTEXT}, {name}: {json.dumps(items)} MiB", flush=True)
    return found


def step_microseconds(runner: BaseEngineRunner, tokens: int) -> dict[str, float]:
    """Of the GPU, for a decode step's engine behind so many tokens: the whole, the whole without its attentions, and of
    one layer's attention to all rows and of one to a window, where all of a kind follow each other."""
    engine, microseconds = decode_launches(runner, tokens)
    attends = ["keys_by_position::attention" in launch.name for launch in engine._launches]
    attentions = list(compress(engine._launches, attends))
    kinds: dict[str, list[Any]] = {"attention to all rows": [], "attention to a window": []}
    for step, launch in zip(engine.program.attentions, attentions, strict=True):
        kinds["attention to all rows" if step.window is None else "attention to a window"].append(launch)
    others = [launch for launch, is_attention in zip(engine._launches, attends, strict=True) if not is_attention]
    found = {"step": microseconds(engine._launches), "without attention": microseconds(others)}
    found |= {kind: microseconds(launches) / len(launches) for kind, launches in kinds.items() if launches}
    return {name: round(value, 2) for name, value in found.items()}


def decode_launches(runner: BaseEngineRunner, tokens: int) -> tuple[Any, Callable[[list[Any]], float]]:
    """The engine of decode steps, its launches prepared, and what times some of them as one graph behind so many
    tokens."""
    backend, start = runner.backend, runner._state.kvcache_start_index[:1]
    engine: Any = runner._engine(next(shape for shape in runner.engines.loaded if shape.phase == "decode"), slice(0, 1))
    engine.enqueue()  # which prepares its launches

    def microseconds(launches: list[Any]) -> float:
        graph = backend.capture(lambda: [launch() for launch in launches], "launches")
        backend.upload(start, np.asarray([tokens], np.int32))
        return 1000 * gpu_milliseconds(backend.stream, graph, 20, before=graph)

    return engine, microseconds


def print_kinds(runner: BaseEngineRunner, tokens: int) -> None:
    """Print what a decode step takes of the GPU, and how much less without the launches of each kernel."""
    engine, microseconds = decode_launches(runner, tokens)
    whole = microseconds(engine._launches)
    print(f"{whole:9.1f} us, {len(engine._launches)} launches; of these:")
    for name, count in Counter(launch.name for launch in engine._launches).most_common():
        less = whole - microseconds([launch for launch in engine._launches if launch.name != name])
        print(f"{less:9.1f} us, {less / count:6.2f} each of {count:3} {name}", flush=True)


def planned_memory(directory: RandomDirectory) -> dict[str, dict[str, float]]:
    """MiB by the memory plan with chunks of 2,048 tokens: of KV caches, and of all but engines' scratch and code."""
    config, limits = directory.config, replace(directory.limits, prefill_chunk=2048, window_rows=0)
    plans, specs = {}, decoder_weights(config)
    for name, rows in (("windows", limits.rows_for_window(config.window)), ("full caches", 0)):
        plan = plan_memory(config, replace(limits, window_rows=rows), specs, directory.dtype)
        sizes = {"KV caches": plan.items["KV caches"], "total": plan.total}
        plans[name] = {item: round(size / 2**20, 1) for item, size in sizes.items()}
    return plans


def measure_prefill(work: Path, shape: str, prompts: list[int], kv_cache: str, weights: str) -> dict[str, Any]:
    """Milliseconds of prompts of one model, of the GPU, each with its multiplications' share of `mma.sync`."""
    limits, found = EngineLimits(1, 2048, max(prompts) + 64, kv_cache=kv_cache), dict[str, Any]()
    directory = shape_directory(work, shape, limits, weights)
    config, started = directory.config, time.perf_counter()
    with random_runner(directory) as runner:
        for count in prompts:
            ids = random_prompt(count)
            runner.start(0, ids, 0, SamplingValues()).wait()
            found.setdefault("open_seconds", time.perf_counter() - started)
            span = gpu_milliseconds(
                runner.backend.stream, lambda ids=ids: runner.start(0, ids, 0, SamplingValues()), 3, series=3
            )
            operations = prefill_operations(config, count)
            found[str(count)] = {"ms": span, "mma_share": operations / (span * 1e9) / device_limits().mma_tflop_per_s}
        shapes = [each for each in runner.engines.loaded if each.phase == "prefill"]
        found["executors"] = {each.name: executor_name(runner.engines.loaded[each]) for each in shapes}
        found["memory_plan_mib"] = {name: size / 2**20 for name, size in runner.memory_plan.items.items()}
    return found


def print_prefill(name: str, found: dict[str, Any], prompts: list[int]) -> None:
    """A line for each prompt, and one for what it is compared with."""
    for count in prompts:
        own, compared = found[str(count)], ""
        if "over_torch" in own:
            reached = "reached" if own["over_torch"] <= MOST_OVER_TORCH else "MISSED"
            compared = f"; torch.compile {own['torch_compile_ms']:.3f}, {own['over_torch']:.2f} times"
            compared += f" (at most {MOST_OVER_TORCH}: {reached})"
        print(f"{name}, {count} tokens: {own['ms']:.3f} ms{compared}", flush=True)
    if "torch_compile" in found:
        print(f"{name}, torch.compile: {json.dumps(found['torch_compile'])[-1500:]}", flush=True)


def prefill_operations(config: DecoderConfig, count: int) -> float:
    """Multiplications and additions of a prompt: linear layers without the head, and attention below the diagonal."""
    specs = (spec for spec in decoder_weights(config) if ".layers." in spec.name and spec.dtype == "compute")
    weights = sum(int(np.prod(spec.shape)) for spec in specs if len(spec.shape) == 2)
    attended = sum(config.layer_kind(index) == "attention" for index in range(config.num_layers))
    return 2.0 * count * (weights + attended * config.query_size * count)


def with_yardstick(found: dict[str, Any], shape: str, prompts: list[int], seconds: int) -> dict[str, Any]:
    """The same, with what `torch.compile` takes for each prompt: of transformers' own model where that is hybrid."""
    is_hybrid = decoder_config(SHAPES[shape]).is_recurrent
    kind = "transformers" if is_hybrid else "prefill"
    torch = found["torch_compile"] = torch_yardstick(
        kind, json.dumps(SHAPES[shape]), *map(str, prompts), seconds=seconds
    )
    for count in map(str, prompts):
        if count in torch:
            found[count] |= {"torch_compile_ms": torch[count], "over_torch": found[count]["ms"] / torch[count]}
    return found


def torch_yardstick(*arguments: str, seconds: int = TORCH_SECONDS) -> dict[str, Any]:
    """What torch_reference.py prints for the arguments, in a process of its own; `failed` says why that is not all."""
    reference = [sys.executable, str(Path(__file__).parent / "torch_reference.py"), *arguments]
    failed = f"it took more than {seconds} s"
    try:
        answer = subprocess.run(reference, capture_output=True, text=True, check=False, timeout=seconds)
        output, failed = answer.stdout, answer.stderr[-2000:] if answer.returncode else ""
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    return found | {"failed": failed} if failed else found


def measure_all_of_one(work: Path, with_torch: bool) -> dict[str, Any]:
    """Build, steps and starts of a process with Llama-3.2-1B's shapes."""
    engines = work / "engines"
    results: dict[str, Any] = {"build": run_build(checkpoint_in(work), engines)}
    results |= measure_steps(EngineDirectory.open(engines))
    results["first_token_seconds"] = [first_token_seconds(engines) for _ in range(3)]
    if with_torch:
        results["torch_compile"] = torch_yardstick("decode", json.dumps(LLAMA_3_2_1B), str(CAPACITY))
        if "milliseconds" in results["torch_compile"]:
            results["step_over_torch"] = results["decode_step_ms"] / results["torch_compile"]["milliseconds"]
    return results


def main() -> None:
    """Measure what is asked for and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", type=one_of(*SECTIONS), default=["step"])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-1b"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4000, 8000], help="tokens of each prompt")
    parser.add_argument("--loop-tokens", type=int, default=LOOP_TOKENS, help="behind which the loops begin")
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="compute", help="of loops and prompts")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=[WEIGHTS[0]], help="of the same; each in turn")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--torch-seconds", type=int, default=TORCH_SECONDS, help="for its compilation and prompts")
    arguments = parse(parser)
    kv_cache = arguments.kv_cache
    with_torch = not arguments.without_torch and measured_as() is None
    results: dict[str, Any] = {**provenance(), "limits": device_limits()._asdict(), "kv_cache": kv_cache}
    results["weights"] = arguments.weights
    if "step" in arguments.sections:
        results |= measure_all_of_one(arguments.work, with_torch)
    models = [(shape, weights) for shape in arguments.shapes for weights in arguments.weights]
    for section in (each for each in ("loops", "windows", "prefill") if each in arguments.sections):
        results[section] = {}
        for shape, weights in models:
            name, kinds = f"{shape} {weights}", (kv_cache, weights)
            if section == "loops":
                found = measure_loop(arguments.work, shape, arguments.loop_tokens, *kinds)
                print_loop(name, found)
            elif section == "windows":
                found = measure_windows(arguments.work, shape, *kinds)
            else:
                found = measure_prefill(arguments.work, shape, arguments.prompts, *kinds)
                print_prefill(name, found, arguments.prompts)
                if with_torch:
                    found = with_yardstick(found, shape, arguments.prompts, arguments.torch_seconds)
                    print_prefill(name, found, arguments.prompts)
            results[section][name] = found
    report(results, arguments.output)


if __name__ == "__main__":
    main()
