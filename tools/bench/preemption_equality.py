"""Answers that gave way to others against the same answers undisturbed: random schedules of priorities.

    python -m tools.bench.preemption_equality [--model ENGINE_DIR] [--backend numpy] [--schedules 200] [--first 0]
                                              [--draftings plain ...] [--budgets none ...] [--kv-cache int8]
                                              [--output RESULTS.json]

The shipped model is built with three slots, its draft, its encoder of images and its adapters. A pool of requests of
every kind (greedy and sampled, with penalties, biases, structures, stop strings, log-probabilities, images, adapters)
is answered plainly, one at a time. Then each schedule lets some of them come at random rounds with random priorities,
and cancels some; schedules take turns with ways of drafting and with budgets for kept rows: none (all rows are computed
again), little (some are) and all. On NumPy every other schedule reuses rows of earlier prompts.

Exits with 1 where an answer differs: one whose rows were kept, or were computed again, or that never gave way.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

from edgellm import SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import KV_CACHES, EngineLimits
from edgellm.opened_model import SHIPPED_MODEL
from tools.bench.as_device import parse
from tools.bench.preemption_schedules import alone, is_right, random_schedule, request_pool, serve
from tools.bench.provenance import provenance

SLOTS = 3
LIMITS = EngineLimits(
    SLOTS,
    128,
    1024,
    draft_top_k=10,
    draft_steps=6,
    verify_tree_size=16,
    max_lora_rank=16,
    lora_slots=2,
    image_rows=(81,),
)
DRAFTINGS = {
    "plain": None,
    "chain": DraftingConfig(kind="chain", draft_steps=5),
    "tree": DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12, adaptive=False),
    "suffix": DraftingConfig(kind="suffix"),
}
#: Bytes for kept rows; a sequence of the shipped model takes one megabyte or two.
BUDGETS = {"none": 0, "little": 3 << 20, "all": 1 << 30}
#: What became of an answer's rows while it waited for others.
KINDS = ("undisturbed", "kept", "recomputed")


@dataclass
class Count:
    """How many answers there were of a kind, how many of them differ, and how often they gave way."""

    answers: int = 0
    differ: int = 0
    preemptions: int = 0


@dataclass
class Found:
    """What schedules of one way of drafting and one budget came to: a `Count` for each of `KINDS`."""

    drafting: str
    budget: str
    schedules: int = 0
    most_bytes: int = 0
    counts: dict[str, Count] = field(default_factory=lambda: {kind: Count() for kind in KINDS})
    differences: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A line of the printed table."""
        parts = [
            f"{kind} {count.answers} ({count.preemptions} times), {count.differ} differ"
            for kind, count in self.counts.items()
        ]
        kept = f"at most {self.most_bytes:,} bytes kept"
        return f"{self.drafting:7} {self.budget:7}: {self.schedules} schedules; {'; '.join(parts)}; {kept}"


def build(model: Path, target: Path, backend: str, kv_cache: str = "compute") -> Path:
    """An engine directory of the shipped model, or of one that has the same parts, with three slots."""
    adapters = {path.name: path for path in sorted((model / "lora").glob("*"))}
    targets = [] if backend == "numpy" else None
    limits = replace(LIMITS, kv_cache=kv_cache)
    build_engine_directory(
        model, target, limits, targets, draft=model / "draft", vision=model / "vision", adapters=adapters
    )
    return target


def compare(
    directory: Path, backend: str, seeds: range, ways: list[tuple[str, str]], requests: int, scenes: Path
) -> list[Found]:
    """Serve the schedules of these seeds, ways of drafting and budgets by turns."""
    with SpecDecodeRuntime(directory, backend=backend, drafting=None) as plain:
        pool = request_pool(requests, scenes, plain.tool_format is not None)
        expected = list(alone(plain, pool))
    found = {way: Found(*way) for way in ways}
    for drafting in dict.fromkeys(name for name, _ in ways):
        with SpecDecodeRuntime(directory, backend=backend, drafting=DRAFTINGS[drafting]) as runtime:
            for seed in seeds:
                way = ways[seed % len(ways)]
                if way[0] != drafting:
                    continue
                runtime._keeper.budget = BUDGETS[way[1]]
                served = serve(runtime, pool, random_schedule(seed, len(pool), SLOTS), backend == "numpy" and seed % 2)
                each = found[way]
                each.schedules, each.most_bytes = each.schedules + 1, max(each.most_bytes, served.most_bytes)
                for outcome in served.outcomes:
                    kind = KINDS[2 if outcome.recomputed else 1 if outcome.kept else 0]
                    count, right = each.counts[kind], is_right(outcome, expected[outcome.arrival.number], backend)
                    count.answers, count.differ = count.answers + 1, count.differ + (not right)
                    count.preemptions += outcome.kept + outcome.recomputed
                    if not right:
                        wanted = expected[outcome.arrival.number]
                        each.differences.append(f"schedule {seed}: {outcome}, expected {wanted}")
                        print(each.differences[-1], flush=True)
        for way, each in found.items():
            if way[0] == drafting:
                print(each.line(), flush=True)
    return list(found.values())


def is_fine(found: list[Found]) -> bool:
    """Whether nothing differs that must not."""
    return not any(each.counts[kind].differ for each in found for kind in KINDS)


def main() -> None:
    """Compare, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a directory as the shipped one")
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first schedule's number")
    parser.add_argument("--requests", type=int, default=48, help="requests in the pool")
    parser.add_argument("--draftings", nargs="+", choices=list(DRAFTINGS), default=list(DRAFTINGS))
    parser.add_argument("--budgets", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="compute")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser, times=False)
    ways = list(product(arguments.draftings, arguments.budgets))
    seeds = range(arguments.first, arguments.first + arguments.schedules)
    with tempfile.TemporaryDirectory() as folder:
        directory = build(arguments.model, Path(folder) / "engines", arguments.backend, arguments.kv_cache)
        found = compare(directory, arguments.backend, seeds, ways, arguments.requests, arguments.model)
    total = {kind: sum(each.counts[kind].answers for each in found) for kind in KINDS}
    differ = {kind: sum(each.counts[kind].differ for each in found) for kind in KINDS}
    print(", ".join(f"{kind}: {differ[kind]} of {total[kind]} differ" for kind in KINDS))
    if arguments.output is not None:
        content = provenance() | {"backend": arguments.backend, "kv_cache": arguments.kv_cache}
        content |= {"results": [asdict(each) for each in found]}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if is_fine(found) else 1)


if __name__ == "__main__":
    main()
