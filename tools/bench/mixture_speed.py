"""Decode of models with mixtures of experts and random weights, beside what a step reads of each kind.

    python tools/bench/mixture_speed.py [qwen3-30b-a3b:int4+int4 gpt-oss-20b:mxfp4 ...] [--tokens 128 8000]
                                        [--kv-cache compute int8] [--choices even skewed] [--kinds] [--as orin]
                                        [--output FILE]

Loops are those of `gpu_speed.py loops`, behind so many tokens, of which the largest number says the context. A step
reads megabytes of: experts that are chosen, what chooses them, other MLPs, attention and what else mixes tokens, the
head, KV rows, and recurrent states (read and written). `share` is what reading them takes of the step at the bandwidth
that is found before and behind; `longer`: by how many times a step takes more than its bytes do at the share that the
same model has behind the fewest tokens. Random routers choose evenly; `skewed`: as in `experts_speed.py`, by a number
of each expert that is added for the choice alone, in models that have none, too. `--kinds`: what each kernel of a step
takes. Beside a neighbour (`--as orin`) also what the board would take.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import measured_as, parse
from experts_speed import drawn_choices
from gpu_speed import CAPACITY, LOOP_STEPS, loop_behind, print_kinds
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_draft import SCALE
from random_model import WEIGHTS, RandomDirectory, random_runner, shape_directory

from edgellm.engines.model.config import Mixture
from edgellm.engines.model.limits import KV_CACHES, EngineLimits

#: The most milliseconds of a step behind the fewest tokens, on an H200 as a whole, and the most of `longer`.
MOST_MS, MOST_LONGER = {"qwen3-30b-a3b:int4+int4": 1.45}, 1.1
#: How the names of what is added for the choice end; rows that are drawn.
_CORRECTIONS, _DRAWS = ("expert_bias", "e_score_correction_bias"), 4096
_MODELS = ("qwen3-30b-a3b:int4+int4", "qwen3-30b-a3b:int4", "gpt-oss-20b:mxfp4", "lfm2-8b-a1b:int4")


def measure(
    work: Path, model: str, kv_cache: str, tokens: list[int], with_kinds: bool, skewed: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Loops of a model behind these numbers of tokens, in one context: the number, and what `loop_behind` finds."""
    shape, _, weights = model.partition(":")
    limits = EngineLimits(1, 16, max(CAPACITY, max(tokens) + 2 * LOOP_STEPS), kv_cache=kv_cache)
    directory = shape_directory(work, shape, limits, weights)
    directory = with_corrections(directory) if skewed else directory
    with random_runner(directory) as runner:
        if skewed:
            skew(runner, directory.config.mixture, directory.config.hidden_size)
        for count in sorted(tokens):
            runner.stop(0)  # so that all rows of the prompt are computed
            yield count, loop_behind(runner, directory, count)
        if with_kinds:
            print_kinds(runner, min(tokens))


def with_corrections(directory: RandomDirectory) -> RandomDirectory:
    """A directory whose mixture has a number of each expert for the choice alone."""
    config = directory.config
    return replace(directory, config=replace(config, mixture=replace(config.mixture, correction=True)))


def skew(runner: Any, mixture: Mixture, hidden: int) -> None:
    """Have each layer's experts chosen by ranks, other ones in each layer."""
    by_rank = corrections(mixture, hidden)
    for layer, name in enumerate(name for name in runner.weights if name.endswith(_CORRECTIONS)):
        ranks = np.random.default_rng(layer).permutation(mixture.experts)
        runner.backend.upload(runner.weights[name], by_rank[ranks])


def corrections(mixture: Mixture, hidden: int) -> np.ndarray:
    """What is added, float32 [E], by rank, so that a random router of normed rows chooses about as often as is drawn:
    as many of an expert's scores are then above one number, which is about the least score of those that are chosen."""
    random, count = np.random.default_rng(0), mixture.experts
    drawn = drawn_choices(random, np.arange(count), _DRAWS, mixture.chosen)
    shares = np.bincount(drawn.ravel(), minlength=count) / _DRAWS
    given = np.exp(random.normal(0, SCALE * hidden**0.5, (_DRAWS, count)))
    sums = 1 + given if mixture.scores == "sigmoid" else given.sum(axis=1, keepdims=True)
    return -np.quantile(given / sums, 1 - shares).astype(np.float32)


def row(name: str, tokens: int, found: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A line of the table; `first` is what was found behind the fewest tokens."""
    read = [f"{nbytes / 1e6:,.1f}" for nbytes in found["bytes"].values()]
    cells = [name, f"{tokens:,}", f"{found['loop_ms']:.3f}", *read, f"{found['read_share']:.1%}"]
    if "board_ms" in found:
        cells[2] += f" (board {found['board_ms']:.2f})"
    longer = first["read_share"] / found["read_share"]
    cells.append("" if found is first else f"{longer:.3f} ({_reached(longer, MOST_LONGER)})")
    return f"| {' | '.join(cells)} |"


def _reached(value: float, most: float) -> str:
    return f"{'reached' if value <= most else 'MISSED'}: {most}"


def main() -> None:
    """The whole of the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [shape for shape, config in SHAPES.items() if any("num_experts" in key for key in config)]
    known = f"SHAPE:WEIGHTS, of {', '.join(shapes)} and {', '.join(WEIGHTS)}"
    parser.add_argument("models", nargs="*", default=_MODELS, help=known)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 8000], help="behind which loops begin")
    parser.add_argument("--kv-cache", nargs="+", choices=KV_CACHES, default=["compute"])
    parser.add_argument("--choices", nargs="+", choices=("even", "skewed"), default=["even"])
    parser.add_argument("--kinds", action="store_true", help="and what each kernel of a step takes")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    results, has_head = dict[str, Any](provenance()), False
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            for kv_cache, choices in product(arguments.kv_cache, arguments.choices):
                name, first = model if kv_cache == "compute" else f"{model}, KV {kv_cache}", dict[str, Any]()
                name += ", skewed" if choices == "skewed" else ""
                own = model, kv_cache, arguments.tokens, arguments.kinds, choices == "skewed"
                for count, found in measure(Path(folder), *own):
                    first = first or found
                    results.setdefault(name, {})[str(count)] = found
                    if not has_head:
                        heads = ["MB of", "behind", "ms", *found["bytes"], "share", "longer"]
                        print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
                        has_head = True
                    print(row(name, count, found, first), flush=True)
                if name in MOST_MS and measured_as() is None:
                    print(f"{name}: {_reached(first['loop_ms'], MOST_MS[name])} ms", flush=True)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
