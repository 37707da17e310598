"""What LoRA adapters cost on a GPU, with the shapes of Llama-3.2-1B and random weights.

    python tools/bench/lora_speed.py [--work DIRECTORY] [--rank 16] [--places 2] [--output RESULTS.json]

Needs TensorRT and pycuda. A step's time is the GPU's (CUDA events), the median of five series of 50; a switch's is wall
time until the adapter is on the device. Without an adapter steps run on the hand-written kernels, which apply none; the
TensorRT engine without adapters is timed as well, so that the adapters' own part can be told.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from gpu_timer import gpu_milliseconds
from provenance import provenance, report
from random_checkpoint import checkpoint_in

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter, LoraPair
from edgellm.engines.lora.config import adapted_projections
from edgellm.engines.model.config import DecoderConfig, EngineLimits
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues

PROMPT = [int(token) for token in np.random.default_rng(0).integers(0, 1000, 512)]


def random_adapter(config: DecoderConfig, rank: int, seed: int) -> LoraAdapter:
    """An adapter of every projection."""
    random, pairs = np.random.default_rng(seed), {}
    for each in adapted_projections(decoder_weights(config)):
        for module, rows in each.modules:
            a = random.standard_normal((rank, each.inputs), np.float32)
            b = random.standard_normal((rows, rank), np.float32)
            pairs[module] = LoraPair(a, b, ("float32", "float32"), 1e-4)
    return LoraAdapter(Path("random"), pairs, f"{seed:064d}")


def step_milliseconds(runner: BaseEngineRunner, name: str | None) -> dict[str, float]:
    """The decode step behind the prompt, free-running, and the prefill of the prompt."""
    stream, spans = runner.backend.stream, []
    for _ in range(5):  # each series begins at the same length, which grows with every step
        runner.set_adapter(0, name)
        runner.start(0, PROMPT, 0, SamplingValues()).wait()
        for _ in range(3):
            runner.decode(1).wait()
        captures = runner._steps.captures
        (step,) = captures[next(key for key in captures if key[0] == 1 and key[3] == (name is not None))]
        spans.append(gpu_milliseconds(stream, step, 50, series=1))
        runner.stop(0)

    def prefill() -> None:
        runner.set_adapter(0, name)
        runner.start(0, PROMPT, 0, SamplingValues())

    prefill()
    result = {"decode_ms": statistics.median(spans), "prefill_512_ms": gpu_milliseconds(stream, prefill, 10)}
    runner.stop(0)
    return result


def bare_plan_milliseconds(runner: BaseEngineRunner) -> float:
    """TensorRT's decode engine without adapters, as a graph, on the state that the runner is in."""
    shape = next(shape for shape in runner.limits.engine_shapes() if shape.phase == "decode")
    engine = runner.backend._plan_engine(shape)
    engine.attach(runner.backend, runner.backend.empty((max(1, engine.scratch_bytes),), "uint8"))
    bindings = runner.engine_weights() | runner._step_inputs(shape)._asdict()
    for name, cache in runner.caches.items():
        bindings[name] = bindings[f"present_{name}"] = cache[:1]
    engine.bind(bindings | {"logits": runner._logits[:1].reshape(1, 1, runner.config.vocab_size)})
    engine.enqueue()
    return gpu_milliseconds(runner.backend.stream, runner.backend.capture(engine.enqueue, "the plan"), 50)


def switch_milliseconds(runner: BaseEngineRunner, names: list[str]) -> list[float]:
    """Each switch to the next of more adapters than there are places: all of it is copied from the host."""
    spans = []
    for index in range(4 * len(names)):
        runner.backend.synchronize()
        started = time.perf_counter()
        runner.set_adapter(0, names[index % len(names)])
        runner.backend.synchronize()
        spans.append((time.perf_counter() - started) * 1000)
    runner.set_adapter(0, None)
    return spans[len(names) :]


def main() -> None:
    """Measure everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    checkpoint, engines = checkpoint_in(arguments.work), arguments.work / "engines-lora"
    limits = EngineLimits(1, 512, 1024, max_lora_rank=arguments.rank, lora_slots=arguments.places)
    build_engine_directory(checkpoint, engines, limits, weights="link", force=True)
    directory = EngineDirectory.open(engines)
    results: dict[str, Any] = dict(provenance())
    with open_runner("tensorrt", directory, with_adapters=True) as runner:
        names = [f"adapter {index}" for index in range(arguments.places + 1)]
        for index, name in enumerate(names):
            runner.adapters.add(name, random_adapter(directory.config, arguments.rank, index))
        results["places_mib"] = runner.memory_plan.items["LoRA adapters"] / 2**20
        results["without"] = step_milliseconds(runner, None)
        results["with_adapter"] = step_milliseconds(runner, names[0])
        runner.start(0, PROMPT, 0, SamplingValues()).wait()
        results["tensorrt_decode_without_ms"] = bare_plan_milliseconds(runner)
        runner.stop(0)
        spans = switch_milliseconds(runner, names)
        results["switch_ms"] = {"median": statistics.median(spans), "largest": max(spans)}
        runner.set_adapter(0, names[0])
        runner.backend.synchronize()
        started = time.perf_counter()
        runner.set_adapter(0, None)
        runner.set_adapter(0, names[0])
        runner.backend.synchronize()
        results["switch_to_a_loaded_one_ms"] = (time.perf_counter() - started) * 500
    report(results, arguments.output)


if __name__ == "__main__":
    main()
