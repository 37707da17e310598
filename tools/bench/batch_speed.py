"""Tokens per second of several sequences at once, without a draft, with the shapes of Llama-3.2-1B and random weights.

    python tools/bench/batch_speed.py [--work DIRECTORY] [--batches 1 2 4 8] [--tokens 256] [--output RESULTS.json]

Needs TensorRT and pycuda. What is timed is the loop that serves requests, with the host reading every token: from the
first token of the last sequence that begins to the end of the first that ends, tokens of all, the median of
`--repeats`. `step_ms` is the GPU's time of the captured step alone. `--backend numpy --layers 2` rehearses it.
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
from probes import executor_name
from provenance import provenance, report
from random_checkpoint import LAYERS, checkpoint_in

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.runner import open_runner
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.contents import KVContents
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

#: How many times the tokens per second of one sequence eight are to yield.
GOAL = 4.0


def run_batch(runner: DecodingRunner, tokenizer: Tokenizer, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per second while all of the sequences are being answered."""
    sequences = [
        DecodingSequence(
            prompt, SamplingValues(), OutputText(tokenizer.detokenizer(), (), (), (), tokens), max_tokens=tokens
        )
        for prompt in prompts
    ]
    loop = DecodingLoop(SlotTable(runner, [KVContents() for _ in range(runner.limits.max_batch)]))
    begun: float | None = None
    counted = 0
    for _ in answered(loop, sequences):
        if begun is None:
            if all(sequence.answer.token_count for sequence in sequences):
                begun, counted = time.perf_counter(), sum(sequence.answer.token_count for sequence in sequences)
        elif any(sequence.finished for sequence in sequences):
            return (sum(sequence.answer.token_count for sequence in sequences) - counted) / (
                time.perf_counter() - begun
            )
    raise SystemExit("no sequence came to its end")


def step_milliseconds(runner: DecodingRunner, prompts: list[list[int]], steps: int) -> float:
    """The GPU's time of one captured decode step of all sequences."""
    base, batch = runner.base, len(prompts)
    spans = []
    for _ in range(3):
        for slot, prompt in enumerate(prompts):
            base.start(slot, prompt, 0, SamplingValues()).wait()
        for _ in range(3):
            base.decode(batch).wait()
        (step,) = next(launches for key, launches in base.steps.captures.items() if key[0] == batch)
        spans.append(gpu_milliseconds(runner.backend.stream, step, steps, series=1))
        for slot in range(batch):
            base.stop(slot)
    return statistics.median(spans)


def measure(runner: DecodingRunner, directory: EngineDirectory, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each batch, in turns, and the steps' own times."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, arguments.prompt).tolist() for _ in range(max(arguments.batches))]
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    rates: dict[int, list[float]] = {batch: [] for batch in arguments.batches}
    for batch in arguments.batches:  # kernels are loaded and steps captured before anything counts
        run_batch(runner, tokenizer, prompts[:batch], 16)
    for _ in range(arguments.repeats):
        for batch, found in rates.items():
            found.append(run_batch(runner, tokenizer, prompts[:batch], arguments.tokens))
    results: dict[str, Any] = {
        "tokens_per_second": {str(batch): statistics.median(found) for batch, found in rates.items()},
        "all": {str(batch): [round(rate, 1) for rate in found] for batch, found in rates.items()},
    }
    alone = results["tokens_per_second"]["1"]
    results["times_one"] = {batch: rate / alone for batch, rate in results["tokens_per_second"].items()}
    if runner.backend.name == "tensorrt":
        results["decode_executors"] = {
            shape.name: executor_name(engine)
            for shape, engine in runner.base.engines.loaded.items()
            if shape.phase == "decode"
        }
        results["step_ms"] = {
            str(batch): step_milliseconds(runner, prompts[:batch], 100) for batch in arguments.batches
        }
    results["goal"] = GOAL
    results["reached"] = results["times_one"].get("8", 0.0) >= GOAL
    return results


def main() -> None:
    """Measure everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--backend", choices=("tensorrt", "numpy"), default="tensorrt")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    checkpoint = checkpoint_in(arguments.work, arguments.layers)
    engines = arguments.work / f"engines-batch-{arguments.layers}"
    limits = EngineLimits(max(arguments.batches), 512, 1024)
    build_engine_directory(checkpoint, engines, limits, [], weights="link", force=True)  # plans when they are asked for
    directory = EngineDirectory.open(engines)
    runner = open_runner(open_backend(arguments.backend, directory), directory, None, None, None)
    settings = {"backend": arguments.backend, "prompt_tokens": arguments.prompt, "answer_tokens": arguments.tokens}
    results = dict(provenance()) | settings
    try:
        results |= measure(runner, directory, arguments)
    finally:
        runner.close()
    report(results, arguments.output)


if __name__ == "__main__":
    main()
