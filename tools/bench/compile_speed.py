"""What the kernels of engine directories take to compile for targets: modules, seconds, megabytes.

    python tools/bench/compile_speed.py [--target sm_87,sm_89] [--dtype float16] [--only 1b-draft] [--cuda 12.6]

Of the shipped model, and of the shapes of Llama-3.2-1B and Llama-3.1-8B (context 4,096, one sequence), plain and with
an EAGLE-3 head (trees of 10 / 6 / 60): for one board, the last of those that are listed, as when a model is opened
there and nothing is kept, and for all boards, as by `edgellm build --target`. Needs NVRTC and CUDA's headers, no GPU.
Processor time is that of this process and its threads; modules are compiled side by side on all cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance

from edgellm.engines.building.kernels import needed_for
from edgellm.engines.building.needed_kernels import WeightLayouts
from edgellm.engines.building.targets import Target, read_targets
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.compilations import compile_all
from edgellm.kernels.compiler import ModuleSource
from edgellm.opened_model import SHIPPED_MODEL

BASE = DecoderConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072, 1e-5, 5e5, 64, "float16", True)
LARGE = DecoderConfig("llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, 1e-5, 5e5, 128, "float16", False)


def head_of(base: DecoderConfig) -> DraftConfig:
    """An EAGLE-3 head whose layer has the base's shapes, with 32,000 tokens."""
    entering, embedding = (2, base.num_layers // 2, base.num_layers - 3), "model.embed_tokens.weight"
    layer = replace(base, num_layers=1, tie_word_embeddings=False)
    return DraftConfig(
        "3", layer, 32000, True, entering, "none", "midlayer.", False, True, embedding, embedding, False, False, False
    )


def directories(dtype: str) -> dict[str, Any]:
    """What is built for, by name: what `needed_for` asks of an engine directory, with its weights' layouts."""
    shipped = EngineDirectory.open(SHIPPED_MODEL)
    found: dict[str, Any] = {"shipped": (shipped, WeightLayouts(shipped.models, shipped.checkpoints, shipped.dtype))}
    uses: dict[str, tuple[dict[str, Any], EngineLimits]] = {
        "1b": ({"base": BASE}, EngineLimits(1, 2048, 4096)),
        "1b-draft": ({"base": BASE, "draft": head_of(BASE)}, EngineLimits(1, 2048, 4096, 10, 6, 60)),
        "8b": ({"base": LARGE}, EngineLimits(1, 2048, 4096)),
        "8b-draft": ({"base": LARGE, "draft": head_of(LARGE)}, EngineLimits(1, 2048, 4096, 10, 6, 60)),
    }
    for name, (models, limits) in uses.items():
        found[name] = SimpleNamespace(models=models, limits=limits, dtype=dtype), WeightLayouts.dense(models)
    return found


def measured(sources: list[ModuleSource], architecture: str, release: tuple[int, int] | None) -> dict[str, float]:
    """What compiling takes."""
    started, spent = time.perf_counter(), time.process_time()
    size = sum(len(module.code) for _, module in compile_all(sources, architecture, release))
    return {
        "modules": len(sources),
        "processor_seconds": round(time.process_time() - spent, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "megabytes": round(size / 1e6, 2),
    }


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--only", choices=("shipped", "1b", "1b-draft", "8b", "8b-draft"))
    parser.add_argument("--cuda", help="the release whose compiler is taken [default: the newest]")
    arguments = parser.parse_args()
    major, _, minor = (arguments.cuda or "").partition(".")
    release = (int(major), int(minor)) if major else None
    print(json.dumps(provenance()))
    for name, (directory, weights) in directories(arguments.dtype).items():
        if arguments.only in (None, name):
            for target in read_targets(arguments.target or ["sm_87"]):
                one = Target(target.capability, target.multiprocessors[-1:])
                for boards in dict.fromkeys((one, target)):
                    sources = needed_for(directory, weights, boards)
                    counts = ", ".join(map(str, boards.multiprocessors))
                    told = measured(sources, target.capability, release)
                    print(json.dumps({"model": name, "target": target.capability, "boards": counts} | told), flush=True)


if __name__ == "__main__":
    main()
