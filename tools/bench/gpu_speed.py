"""Speed on a GPU with the shapes of Llama-3.2-1B and random weights: build, decode step, loop, start of a process.

    python tools/bench/gpu_speed.py [--work DIRECTORY] [--output RESULTS.json] [--without-torch]

Needs TensorRT, pycuda and, for the yardstick, PyTorch with CUDA. Times of steps are the GPU's (CUDA events), medians of
five; times of processes are wall time with a warm file cache. Peak memory is the resident set of the build process.
A step takes longer the more tokens the sequence has: the bare engine is timed at lengths spread over those of the loop.
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
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timer import gpu_milliseconds
from provenance import provenance, report
from random_checkpoint import LLAMA_3_2_1B, checkpoint_in

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues

CAPACITY = 1024
PROMPT = "x" * 500
REPEATS = 200


def run_build(checkpoint: Path, engine_directory: Path) -> dict[str, float]:
    """Run `edgellm build` in a process of its own; seconds and peak resident MiB."""
    command = [sys.executable, "-m", "edgellm", "build", str(checkpoint), str(engine_directory)]
    command += ["--kv-capacity", str(CAPACITY), "--force"]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the build failed:\n{output}")
    weights = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 2**20
    print(output)
    return {
        "seconds": time.perf_counter() - started,
        "peak_resident_mib": usage.ru_maxrss / 1024,
        "weights_mib": weights,
    }


def measure_steps(directory: EngineDirectory) -> dict[str, Any]:
    """Decode: the bare engine as a graph, the whole step free-running, the loop with the host reading each token.

    The bare engine is timed before and after each run of the loop, so that both see the same clocks.
    """
    results: dict[str, Any] = {}
    started = time.perf_counter()
    with open_runner("tensorrt", directory) as runner:
        results["open_seconds"] = time.perf_counter() - started
        stream, backend = runner.backend.stream, runner.backend
        prompt = [int(token) for token in np.random.default_rng(0).integers(0, 1000, len(PROMPT))]

        def fill() -> None:
            runner.start(0, prompt, 0, SamplingValues()).wait()
            for _ in range(3):
                runner.decode(1).wait()

        fill()
        shape = next(shape for shape in runner.engines.loaded if shape.phase == "decode")
        engine = runner._engine(shape, slice(0, 1))
        results["decode_engine"] = type(engine).__name__
        bare = backend.capture(engine.enqueue, "the bare engine")
        ((step,),) = runner._steps.captures.values()
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
        for _ in range(5):
            bare_spans.append(bare_over_the_loop())
            fill()
            unread = [runner.decode(1)]
            begin = time.perf_counter()
            for _ in range(REPEATS):
                unread.append(runner.decode(1))
                unread.pop(0).wait()
            loops.append((time.perf_counter() - begin) / REPEATS * 1000)
            unread.pop(0).wait()
            bare_spans.append(bare_over_the_loop())
        results["bare_engine_ms"] = statistics.median(bare_spans)
        results["decode_loop_ms"] = statistics.median(loops)
        results["loop_over_bare_engine"] = results["decode_loop_ms"] / results["bare_engine_ms"]
        for count in (128, 512):
            ids = prompt[:count] if count <= len(prompt) else (prompt * 2)[:count]
            runner.start(0, ids, 0, SamplingValues()).wait()
            results[f"prefill_{count}_ms"] = gpu_milliseconds(
                stream, lambda ids=ids: runner.start(0, ids, 0, SamplingValues()), 10
            )
        results["memory_plan_mib"] = {name: size / 2**20 for name, size in runner.memory_plan.items.items()}
    return results


def first_token_seconds(engine_directory: Path) -> float:
    """From the start of an `edgellm generate` process to the first byte of its answer."""
    command = [sys.executable, "-m", "edgellm", "generate", "--raw", "hello", "--max-tokens", "64"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--model", str(engine_directory)], stdout=subprocess.PIPE)
    process.stdout.read(1)
    seconds = time.perf_counter() - started
    process.stdout.read()
    if process.wait():
        raise SystemExit("edgellm generate failed")
    return seconds


def main() -> None:
    """Measure everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--without-torch", action="store_true")
    arguments = parser.parse_args()
    engines = arguments.work / "engines"
    results: dict[str, Any] = dict(provenance())
    results["build"] = run_build(checkpoint_in(arguments.work), engines)
    directory = EngineDirectory.open(engines)
    results |= measure_steps(directory)
    results["first_token_seconds"] = [first_token_seconds(engines) for _ in range(3)]
    if not arguments.without_torch:
        reference = [sys.executable, str(Path(__file__).parent / "torch_reference.py")]
        answer = subprocess.run(
            [*reference, json.dumps(LLAMA_3_2_1B), str(CAPACITY)], capture_output=True, text=True, check=False
        )
        if answer.returncode:
            raise SystemExit(f"the PyTorch yardstick failed:\n{answer.stderr}")
        results["torch_compile"] = json.loads(answer.stdout.splitlines()[-1])
        results["step_over_torch"] = results["decode_step_ms"] / results["torch_compile"]["milliseconds"]
    report(results, arguments.output)


if __name__ == "__main__":
    main()
