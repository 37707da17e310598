"""What a draft of blocks costs on a GPU, beside a pass of an EAGLE head, with the shapes of a published model.

    python tools/bench/block_speed.py [--shapes llama-1b] [--block 16] [--as orin] [--output RESULTS.json]

Of either the draft's part of a round is one CUDA graph: of the block draft (5 layers, its base's head) the step that
takes what was accepted, the pass, and what makes a chain and a tree of it; of an EAGLE-3 head the step that takes what
was accepted, with its logits, which is one pass. Bytes are those of the weights that each reads. `ratio` is the block
draft's time over that of an EAGLE pass, times their bytes the other way round: 1 where both read as fast. Weights are
random. Needs pycuda and a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from device_limits import device_limits, read_around
from provenance import provenance, report
from random_checkpoint import SHAPES
from random_model import random_prompt, random_runner, shape_directory
from round_bench import CAPACITY, CHUNK, PROMPT_TOKENS

from edgellm.device.limits import gpu_milliseconds
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DRAFT_ACCEPT, DRAFT_PROPOSAL, DraftPlan, chain, tree
from edgellm.engines.speculation.runner import DecodingRunner

#: What a round's draft of block 16 may cost, in EAGLE passes of equal bytes.
TARGET = 1.3


def weight_bytes(directory: Any, phases: Sequence[str]) -> int:
    """The bytes of the weights, in 16 bits, that the draft's engines of these phases read."""
    config = directory.model_config("draft")
    programs = [model_program(config, EngineShape(phase, 1, 1, 1, 1, model="draft")) for phase in phases]
    return 2 * sum(math.prod(spec.shape) for program in programs for spec in program.weights.values())


def draft_milliseconds(runner: DecodingRunner, plan: DraftPlan, stages: Sequence[str]) -> float:
    """GPU time of these stages of a round, as one graph, behind a prompt of PROMPT_TOKENS."""
    prepared = runner.prepare_round(1, plan).stages
    steps: list[Callable[[], None]] = [prepared[name] for name in stages]

    def whole() -> None:
        for step in steps:
            step()

    whole()  # loads code, which a capture must not do
    launch = runner.backend.capture(whole, f"the draft of {plan.name}")
    if launch is whole:
        raise SystemExit(f"the draft of {plan.name} could not be captured")
    return gpu_milliseconds(runner.backend.stream, launch, 50, 5)


def measure(work: Path, shape: str, block: int) -> dict[str, Any]:
    """Times and bytes of both kinds, and their ratio."""
    tree_plan, found = tree(4, block - 1, 16), dict[str, Any]()
    sizes = {"draft_top_k": 4, "draft_steps": block - 1, "verify_tree_size": max(16, block)}
    kinds = {
        "eagle": (0, (DRAFT_ACCEPT,), [chain(1)], ("accept",)),
        "block": (block, (DRAFT_ACCEPT, DRAFT_PROPOSAL), [chain(block - 1), tree_plan], ("accept", "propose")),
    }
    for kind, (size, stages, plans, phases) in kinds.items():
        directory = shape_directory(work, shape, EngineLimits(1, CHUNK, CAPACITY, **sizes, draft_block=size))
        with random_runner(directory) as runner, read_around() as around:
            runner.start(0, random_prompt(PROMPT_TOKENS), 0, SamplingValues()).wait()
            runner.round(1, plans[0]).wait()
            spans = {plan.name: draft_milliseconds(runner, plan, stages) for plan in plans}
        found[kind] = {"ms": spans, "bytes": weight_bytes(directory, phases), **around.recorded()}
    eagle = min(found["eagle"]["ms"].values()) / found["eagle"]["bytes"]
    found["ratio"] = {name: ms / found["block"]["bytes"] / eagle for name, ms in found["block"]["ms"].items()}
    for name, ratio in found["ratio"].items():
        print(
            f"{'reached' if ratio <= TARGET else 'MISSED '}  {shape}, {name}: {ratio:.2f} EAGLE passes of equal bytes"
        )
    return found


def main() -> None:
    """Measure each of the shapes and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-1b"])
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-block-bench")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser)
    results: dict[str, Any] = {**provenance(), "limits": device_limits()._asdict(), "block": arguments.block}
    for shape in arguments.shapes:
        results[shape] = measure(arguments.work, shape, arguments.block)
    report(results, arguments.output)


if __name__ == "__main__":
    main()
