"""What dtypes within TensorRT's engines do to logits, and cost: variants of the decoder's network on one GPU.

    python -m tools.bench.tries.prefill_noise --wide residual norm [--answers] [--prompts 24]

Of the shipped model: how far logits are from NumPy's in float32, and how far a prompt's are apart whose last tokens are
computed behind reused rows, in spacings of float16 at the largest logit; with `--answers` then answers in batches of 8,
with adapters in between, against the same alone. Prints lines as they are measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgellm.engines.building import builder
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import EngineLimits
from edgellm.engines.runners.comparison import open_runner
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.llm import SHIPPED_MODEL
from edgellm.text.tokenizer import Tokenizer
from tools.bench.draw_comparison import spacing
from tools.bench.held_out_prompts import held_out_conversations
from tools.bench.serving_comparison import build, compare_all, line
from tools.bench.tries.prefill_networks import FLAGS, set_wide

#: Tokens at a prompt's end that are computed behind reused rows.
ENDS = (3, 12, 40)


def report(text: str) -> None:
    """A line, at once."""
    print(text, flush=True)


def errors(work: Path, prompts: int) -> None:
    """Of prefill and decode alone."""
    build_engine_directory(SHIPPED_MODEL, work / "alone", EngineLimits(1, 128, 1024), [], force=True)
    directory = EngineDirectory.open(work / "alone")
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    asked = [tokenizer.encode_chat(messages) for messages in held_out_conversations(prompts)]
    reference = []
    with open_runner("numpy", directory) as runner:
        for ids in asked:
            runner.start(0, ids, 0, SamplingValues()).wait()
            reference.append(runner.logits(0).copy())
            runner.stop(0)
    distances: dict[str, list[float]] = {}
    with open_runner("tensorrt", directory) as runner:
        for ids, expected in zip(asked, reference, strict=True):
            unit = spacing(float(np.abs(expected).max()), "float16")

            def logits(reused: int, ids: list[int] = ids) -> np.ndarray:
                runner.start(0, ids, reused, SamplingValues()).wait()
                found = runner.logits(0).copy()
                runner.stop(0)
                return found

            whole = logits(0)
            found = {f"last {end} behind reused rows": logits(len(ids) - end) for end in ENDS if end < len(ids)}
            for start in range(0, len(ids), 16):  # all rows by short prefills, which are hand-written kernels
                runner.start(0, ids[: start + 16], start, SamplingValues()).wait()
                runner.stop(0)
            kernels = logits(16 * ((len(ids) - 1) // 16))
            for name, values in found.items():
                distances.setdefault(f"whole, {name}", []).append(float(np.abs(whole - values).max()) / unit)
            distances.setdefault("whole, kernels", []).append(float(np.abs(whole - kernels).max()) / unit)
            distances.setdefault("whole, float32", []).append(float(np.abs(whole - expected).max()) / unit)
            distances.setdefault("kernels, float32", []).append(float(np.abs(kernels - expected).max()) / unit)
    for name, values in distances.items():
        report(f"  {name}: median {statistics.median(values):.2f} spacings, largest {max(values):.2f}")


def answers(work: Path, prompts: int) -> None:
    """Of batches with adapters."""
    directory = build(SHIPPED_MODEL, work / "served", "tensorrt")
    conversations = held_out_conversations(prompts)
    ways = ("alone", "turns", "batch of 3", "batch of 8")
    for served in compare_all(directory, "tensorrt", conversations, 32, ways, ["plain"]):
        gaps = sorted((each.gap / each.allowed * 4 for each in served.differences), reverse=True)
        report(f"  {line(served)}")
        report(f"  gaps in spacings: {[round(gap, 2) for gap in gaps[:12]]}")


def attempt(step: Callable[..., None], *arguments: object) -> None:
    """A failure is printed, and the rest is measured."""
    started = time.perf_counter()
    try:
        step(*arguments)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    report(f"  ({time.perf_counter() - started:.0f} s)")


def main() -> None:
    """Measure one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wide", nargs="*", choices=list(FLAGS), default=[])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--answers", action="store_true")
    arguments = parser.parse_args()
    set_wide(" ".join(arguments.wide))
    builder.choose_platforms = lambda targets: ((), "")  # plans are made here, on first use, with what was set
    report(f"wide: {' '.join(arguments.wide) or 'nothing'}")
    with tempfile.TemporaryDirectory() as folder:
        attempt(errors, Path(folder), arguments.prompts)
        if arguments.answers:
            attempt(answers, Path(folder), arguments.prompts)


if __name__ == "__main__":
    main()
