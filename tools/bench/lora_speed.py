"""What LoRA adapters cost on a GPU, with the shapes of Llama-3.2-1B and random weights.

    python tools/bench/lora_speed.py [steps] [runner] [--work DIRECTORY] [--rank 16] [--places 4] [--output FILE]

`steps`: engines of hand-written kernels alone, as CUDA graphs, of adapters of all projections: decode steps of one
sequence and of four, each with another adapter, and verify steps of one; in engines without adapters ("without"), with
places of which no sequence takes one ("none"), and with one for each ("taken"). With --parts also without single
kernels, which shows where the difference lies. Needs pycuda.

`runner`: decode steps and prefill of a whole runner, and how long a switch takes. Needs TensorRT and pycuda. A step's
time is the GPU's (CUDA events), the median of five series; a switch's is wall time until the adapter is on the device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from kernel_speed import LLAMA, Bench
from provenance import provenance, report
from random_checkpoint import checkpoint_in

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter, LoraPair
from edgellm.engines.model.adapted_projections import adapted_projections
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.kernels.arrays import DeviceArray

#: Rows of the caches, and of the context before the new tokens.
KV_ROWS, START = 1088, 530
#: Of the decode step of several sequences.
SEQUENCES = 4

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
        captures = runner.steps.captures
        (step,) = captures[next(key for key in captures if key[0] == 1 and key[2] == (name is not None))]
        spans.append(gpu_milliseconds(stream, step, 50, series=1))
        runner.stop(0)

    def prefill() -> None:
        runner.set_adapter(0, name)
        runner.start(0, PROMPT, 0, SamplingValues())

    prefill()
    result = {"decode_ms": statistics.median(spans), "prefill_512_ms": gpu_milliseconds(stream, prefill, 10)}
    runner.stop(0)
    return result


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


def time_runner(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Decode steps and prefill with an adapter and without, and switches."""
    checkpoint, engines = checkpoint_in(arguments.work), arguments.work / "engines-lora"
    limits = EngineLimits(1, 512, 1024, max_lora_rank=arguments.rank, lora_slots=arguments.places)
    build_engine_directory(checkpoint, engines, limits, weights="link", force=True)
    directory = EngineDirectory.open(engines)
    with open_runner("tensorrt", directory, with_adapters=True) as runner:
        names = [f"adapter {index}" for index in range(arguments.places + 1)]
        for index, name in enumerate(names):
            runner.adapters.add(name, random_adapter(directory.config, arguments.rank, index))
        results["places_mib"] = runner.memory_plan.items["LoRA adapters"] / 2**20
        results["without"] = step_milliseconds(runner, None)
        results["with_adapter"] = step_milliseconds(runner, names[0])
        spans = switch_milliseconds(runner, names)
        results["switch_ms"] = {"median": statistics.median(spans), "largest": max(spans)}
        runner.set_adapter(0, names[0])
        runner.backend.synchronize()
        started = time.perf_counter()
        runner.set_adapter(0, None)
        runner.set_adapter(0, names[0])
        runner.backend.synchronize()
        results["switch_to_a_loaded_one_ms"] = (time.perf_counter() - started) * 500


class Steps:
    """Engines of kernels on weights, adapters and caches that all share."""

    def __init__(self, rank: int, places: int) -> None:
        self.bench, self.rank, self.places = Bench(), rank, places
        array, self.arrays = self.bench.array, {}
        for spec in decoder_weights(LLAMA):
            self.arrays[spec.name] = array(spec.shape, scale=50 if len(spec.shape) == 1 else 1)
        for each in adapted_projections(decoder_weights(LLAMA)):
            self.arrays |= {name: array(size) for name, size in each.edge(places, rank)}
        for layer, kind in product(range(LLAMA.num_layers), "kv"):
            cache = array((SEQUENCES, LLAMA.num_kv_heads, KV_ROWS, LLAMA.head_dim))
            self.arrays[f"{kind}_cache_{layer}"] = cache

    def engine(self, shape: EngineShape, taken: bool) -> KernelEngine:
        """An engine that has run once; `taken`: every sequence takes an adapter, each another one."""
        bench, batch, rows = self.bench, shape.batch, shape.tokens
        choice, reason = kernel_choice(LLAMA, shape, "float16", bench.tiled.gpu)
        if choice is None:
            raise SystemExit(f"{shape.name} does not run on kernels: {reason}")
        kernels = StepKernels(bench.kernels, bench.tiled, bench.tiled.gpu)
        engine = KernelEngine(kernels, choice, LLAMA, shape, "float16")
        engine.attach(bench.device, bench.device.empty((engine.scratch_bytes,), "uint8"))
        mask = np.arange(KV_ROWS) <= START + np.arange(rows)[None, None, :, None] % 7
        scales = np.arange(batch)[:, None] == np.arange(self.places) if taken else np.zeros((batch, self.places))
        bound = {name: array[:batch] if "_cache_" in name else array for name, array in self.arrays.items()}
        bound |= {f"present_{name}": array for name, array in bound.items() if "_cache_" in name}
        bound |= {
            "inputs_embeds": bench.array((batch, rows, LLAMA.hidden_size), scale=50),
            "rope_rotary_cos_sin": bench.array((batch, rows, LLAMA.rotary_dim), scale=50),
            "attention_mask": self._uploaded(np.repeat(mask, batch, axis=0)),
            "kvcache_start_index": self._uploaded(np.full(batch, START, np.int32)),
            "lora_scales": self._uploaded(scales.astype(np.float16)),
            "logits": bench.device.empty((batch, rows, LLAMA.vocab_size), "float32"),
        }
        engine.bind({name: array for name, array in bound.items() if name in engine.tensors})
        engine.enqueue()
        return engine

    def microseconds(self, engine: KernelEngine, left_out: str | None = None) -> float:
        """Of a step, or of one without the launches whose name has `left_out`."""
        launches = [each for each in engine._launches if left_out is None or left_out not in each.name]

        def enqueue() -> None:
            for launch in launches:
                launch()

        return self.bench.microseconds([enqueue], "step")

    def _uploaded(self, values: np.ndarray) -> DeviceArray:
        array = self.bench.device.empty(values.shape, values.dtype.name)
        self.bench.device.upload(array, values)
        return array


def time_steps(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Each step in three ways: microseconds, and how many times those without adapters."""
    steps = Steps(arguments.rank, arguments.places)
    shapes = [("decode", 1, 1), ("decode", SEQUENCES, 1), *(("verify", 1, tokens) for tokens in arguments.tokens)]
    for phase, batch, tokens in shapes:
        plain = EngineShape(phase, batch, tokens, KV_ROWS, KV_ROWS, tokens)
        adapted = replace(plain, lora_slots=arguments.places, lora_rank=arguments.rank)
        engines = {"without": steps.engine(plain, False), "none": steps.engine(adapted, False)}
        engines["taken"] = steps.engine(adapted, True)
        name, found = f"{phase} {batch} x {tokens}", {}
        for way, engine in engines.items():
            found[way] = steps.microseconds(engine)
            print(f"{name:14s} {way:8s} {found[way]:9.1f} us {found[way] / found['without']:6.3f}", flush=True)
        if arguments.parts:
            for left_out in ("norm_linear", "norm_gate_up", "residual", "tiled::linear<", "gate_up", "attention"):
                rest = {way: steps.microseconds(engine, left_out) for way, engine in engines.items()}
                if all(rest[way] < 0.98 * found[way] for way in rest):
                    spent = {way: found[way] - rest[way] for way in rest}
                    print(
                        f"    {left_out:14s}", "  ".join(f"{way} {span:.1f}" for way, span in spent.items()), flush=True
                    )
        results[name] = found


SECTIONS = {"steps": time_steps, "runner": time_runner}


def main() -> None:
    """Measure what was asked for and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=SEQUENCES)
    parser.add_argument("--tokens", type=int, nargs="*", default=[8, 16], help="of the verify steps")
    parser.add_argument("--parts", action="store_true", help="steps without single kernels, too")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    results: dict[str, Any] = dict(provenance())
    for section in arguments.sections:
        SECTIONS[section](arguments, results)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
