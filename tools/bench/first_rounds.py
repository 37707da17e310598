"""Whether the first rounds of a model that was just opened are as quick as later ones, and how long opening takes.

    python tools/bench/first_rounds.py [--output first-rounds.json]

Each kind of decoding opens the shipped model in a process of its own: `plain`, a `chain` and a `tree` of its draft
model, what adaptive drafting takes, `two` sequences at once (with the tree), and a JSON `schema`. The gaps between
rounds are those that a caller sees; prompts do not count. The first process has an empty cache and compiles all
kernels; later ones find its cubins, and nothing else. The goal: the longest gap of the first 200 rounds is at most 1.5
times that of the next 200, or 10 ms above their median; and nothing is compiled, loaded, built or captured after
opening.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from provenance import provenance, report

TIMES, MORE_SECONDS = 1.5, 0.010
TREE = {"draft_top_k": 10, "draft_steps": 4, "verify_tree_size": 16}
#: How a kind drafts ("auto": as this machine's preset says), how many sequences it answers at a time, whether rules say
#: what may come.
KINDS: dict[str, tuple[Any, int, bool]] = {
    "plain": (None, 1, False),
    "chain": ({"kind": "chain", "draft_steps": 3}, 1, False),
    "tree": (TREE, 1, False),
    "adaptive": ("auto", 1, False),
    "two": (TREE, 2, False),
    "schema": (None, 1, True),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "enum": ["front left", "front right", "back left", "back right"]},
        "things": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["place", "things", "count"],
    "additionalProperties": False,
}
QUESTIONS = ("Who are you?", "Tell me a story about a red cup.", "What is on the table?", "How do you pick up a ball?")


def run_kind(kind: str, rounds: int, backend: str) -> dict[str, Any]:
    """In this process: open, say a token, then twice so many rounds; the gaps between them in seconds."""
    from edgellm import Request, SamplingParams, SpecDecodeRuntime, Structure
    from edgellm.drafting.config import DraftingConfig
    from edgellm.engines.directories.engine_directory import EngineDirectory

    drafting, batch, ruled = KINDS[kind]
    config = DraftingConfig(**drafting) if isinstance(drafting, dict) else drafting
    own = EngineDirectory.with_kv_cache

    def with_batch(directory: EngineDirectory, kv_cache: str | None) -> EngineDirectory:
        found = own(directory, kv_cache)
        return replace(found, limits=replace(found.limits, max_batch=max(batch, found.limits.max_batch)))

    EngineDirectory.with_kv_cache = with_batch  # type: ignore[method-assign]
    began = time.perf_counter()
    with SpecDecodeRuntime(drafting=config, backend=backend) as runtime:
        opened = time.perf_counter() - began
        at_opening = dict(runtime.made.counts)
        print(f"{kind}: {runtime.made}", file=sys.stderr)
        structure = Structure(json=SCHEMA) if ruled else None
        params = SamplingParams(max_tokens=160, ignore_eos=not ruled, structure=structure)
        loop, gaps, asked = runtime.loop(), list[float](), 0
        while len(gaps) < 2 * rounds:
            sequences = []
            for _ in range(batch):
                message = {"role": "user", "content": QUESTIONS[asked % len(QUESTIONS)]}
                # Every other answer is sampled.
                drawn = replace(params, temperature=0.8, seed=asked) if asked // len(QUESTIONS) % 2 else params
                sequences.append(runtime.prepare(Request(messages=[message], params=drawn)))
                asked += 1
            for sequence in sequences:
                loop.admit(sequence)
                for _ in loop.settle():
                    if asked == batch:
                        print("first token", flush=True)
            before = time.perf_counter()
            while loop.running and not any(sequence.finished for sequence in sequences):
                for _ in loop.advance():
                    pass
                now = time.perf_counter()
                gaps.append(now - before)
                before = now
            loop.abandon()
        later = {name: count - at_opening[name] for name, count in runtime.made.counts.items()}
        made = {"counts": at_opening, "seconds": runtime.made.seconds, "graph_mib": runtime.made.graph_bytes / 2**20}
    return {"opening_seconds": opened, "at_opening": made, "later": later, "gaps": gaps[: 2 * rounds]}


def judged(found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The gaps of a kind in milliseconds, and whether they reach the goal."""
    gaps = found.pop("gaps")
    halves = {"first": gaps[:rounds], "next": gaps[rounds:]}
    longest = {name: max(half) for name, half in halves.items()}
    median = {name: statistics.median(half) for name, half in halves.items()}
    most = max(TIMES * longest["next"], median["next"] + MORE_SECONDS)
    found["longest_ms"] = {name: round(1000 * value, 3) for name, value in longest.items()}
    found["median_ms"] = {name: round(1000 * value, 3) for name, value in median.items()}
    found["place_of_longest"] = gaps.index(longest["first"])
    found["reached"] = longest["first"] <= most and not any(found["later"].values())
    return found


def in_a_process(kind: str, rounds: int, backend: str, cache: Path) -> tuple[float, dict[str, Any]]:
    """Seconds from the start of a process that runs a kind to its first token, and what it found."""
    command = [sys.executable, __file__, "--kind", kind, "--rounds", str(rounds), "--backend", backend]
    began, first = time.perf_counter(), 0.0
    environment = {**os.environ, "EDGELLM_CACHE_DIR": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            first = first or time.perf_counter() - began
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"{kind} failed")
    return first, json.loads(lines[-1])


def main() -> None:
    """Run every kind and print what was found, then a line of each for the results' page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="of the first, and of the next [default: %(default)s]")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds, backend = arguments.rounds, arguments.backend
    if arguments.kind:
        print(json.dumps(run_kind(arguments.kind, rounds, backend)))
        return
    kinds: dict[str, Any] = {}
    starts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        empty, kept = Path(folder) / "empty", Path(folder) / "kept"
        for number, kind in enumerate(KINDS):
            first, found = in_a_process(kind, rounds, backend, kept if number else empty)
            starts[f"{kind}, {'cubins kept' if number else 'empty cache'}"] = round(first, 2)
            kinds[kind] = judged(found, rounds)
            new = [each for each in ("empty", "kept") if (Path(folder) / each / "kernels").exists()]
            if new:  # all but the cubins goes
                kernels = shutil.copytree(Path(folder) / new[-1] / "kernels", Path(folder) / "kernels")
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir()
                kernels.rename(kept / "kernels")
        starts["plain, cubins kept"] = round(in_a_process("plain", 1, backend, kept)[0], 2)
    report({**provenance(), "seconds_to_first_token": starts, "kinds": kinds}, arguments.output)
    for kind, found in kinds.items():
        (longest, later), (median, usual) = found["longest_ms"].values(), found["median_ms"].values()
        verdict = "reached" if found["reached"] else "MISSED"
        print(f"| {kind} | {longest:.2f} / {later:.2f} | {median:.2f} / {usual:.2f} | {verdict} |")
    print("; ".join(f"{name}: {seconds:.1f} s" for name, seconds in starts.items()))


if __name__ == "__main__":
    main()
