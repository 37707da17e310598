"""Ways of serving against one request at a time, token for token: snapshots, conversations, batches in every order.

    python -m tools.bench.serving_equality [--model ENGINE_DIR] [--backend numpy] [--prompts 100] [--tokens 32]
                                           [--ways snapshot ...] [--draftings plain ...] [--samplings greedy ...]
                                           [--kv-cache int8] [--weights int4] [--images] [--executor tensorrt]
                                           [--processes 1] [--record RECORD.jsonl] [--output RESULTS.json]

The model is built with eight slots, its draft and its adapters, for `--images` with its encoder: each question then
stands behind a picture. Its held-out conversations take turns with the adapters and without one, so that each request
switches. What is compared with is plain decoding of one request at a time, of whose rows nothing is reused. The ways:

    alone       again, one at a time, but for what earlier requests left
    snapshot    the conversation's system prompt is computed ahead
    turns       the answer and a next question follow, in a session with others in between
    batch of 3  in all six orders
    batch of 8  in 8 orders: each request once in each place, and once before each other (Williams 1949)

Every other order of a batch begins with slots that hold nothing, the next reuses what it left.

Answers go on behind the end of the turn, where the model means nothing by its tokens and the likeliest are close. Where
one differs, `gap` is how far plain decoding was from drawing the other token. Exits with 1 where a gap is larger than
rounding explains: 1e-4 on NumPy; on a GPU no answer may differ. What is done is written to the record as it comes; a
run that finds one goes on behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from edgellm.engines.backends.base import EXECUTORS
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.model.limits import KV_CACHES
from edgellm.opened_model import SHIPPED_MODEL
from tools.bench.as_device import enter, measured_as, parse
from tools.bench.differences import SAMPLINGS, Difference
from tools.bench.held_out_prompts import Messages, held_out_conversations, shown
from tools.bench.provenance import provenance
from tools.bench.quantized_model import WEIGHTS
from tools.bench.serving_comparison import DRAFTINGS, Served, Server, build, compare_all, line, merged
from tools.bench.serving_ways import SLOTS, WAYS, groups


@dataclass(frozen=True)
class Record:
    """A file with a line for each way of a share of the conversations that is done, and a heading: what is compared.

    Any process may add to it.
    """

    path: Path
    heading: dict[str, Any]

    def begin(self) -> None:
        """Make the file where it is not there; ValueError where it is that of another comparison."""
        if not self.path.exists():
            self._append(self.heading)
        elif not self.path.read_text().endswith("\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")  # what was cut off stays a line of its own
        if (found := json.loads(self.path.read_text().splitlines()[0])) != self.heading:
            raise ValueError(f"{self.path} records {found}, expected {self.heading}: remove it, or name another")

    def add(self, share: int, served: Served) -> None:
        """One way is done."""
        self._append({"share": share, **asdict(served)})
        print(f"share {share}: {line(served)}", flush=True)

    def done(self) -> list[tuple[int, Served]]:
        """All that is done, each with its share; a line that was not written to its end is none."""
        found = []
        for text in self.path.read_text().splitlines()[1:]:
            with suppress(ValueError):
                values = json.loads(text)
                values["differences"] = [Difference(**each) for each in values["differences"]]
                found.append((values.pop("share"), Served(**values)))
        return found

    def _append(self, values: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class Job(NamedTuple):
    """What one process does at a time."""

    share: int
    draftings: tuple[str, ...]
    samplings: tuple[str, ...]
    ways: tuple[str, ...]


def jobs_left(record: Record, arguments: argparse.Namespace, shares: int) -> list[Job]:
    """What is not recorded yet. On NumPy jobs are small, so that processes end together; on a GPU few, for each
    opens the engines."""
    done = {(share, served.drafting, served.sampling, served.way) for share, served in record.done()}
    samplings = [(name,) for name in arguments.samplings]
    if arguments.backend != "numpy":
        samplings = [tuple(arguments.samplings)]
    jobs = []
    for drafting, share, names in product(reversed(arguments.draftings), range(shares), samplings):
        ways = [way for way in arguments.ways if any((share, drafting, name, way) not in done for name in names)]
        if ways:
            jobs.append(Job(share, (drafting,), names, tuple(ways)))
    return jobs


def run_jobs(processes: int, jobs: Sequence[Job], call: Callable[[Job], Any]) -> list[str]:
    """Do all jobs, in so many processes; what failed, in words."""
    if processes == 1:
        for job in jobs:
            call(job)
        return []
    failures = []
    with ProcessPoolExecutor(processes, get_context("spawn"), enter, (measured_as(),)) as pool:
        running = {pool.submit(call, job): job for job in jobs}
        for future in as_completed(running):
            if (error := future.exception()) is not None:
                failures.append(f"{running[future]}: {type(error).__name__}: {error}")
                print(failures[-1], flush=True)
    return failures


def run_job(
    job: Job, directory: Path, server: Server, shares: Sequence[Sequence[Messages]], tokens: int, record: Record
) -> None:
    """One job; what it finds is in the record."""
    done = partial(record.add, job.share)
    first = job.share * SLOTS
    compare_all(directory, server, shares[job.share], tokens, job.ways, job.draftings, job.samplings, first, done)


def main() -> None:
    """Compare, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL, help="a directory with a model and its draft/")
    parser.add_argument("--backend", choices=("numpy", "tensorrt"), default="numpy")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--draftings", nargs="+", choices=list(DRAFTINGS), default=list(DRAFTINGS))
    parser.add_argument("--samplings", nargs="+", choices=list(SAMPLINGS), default=list(SAMPLINGS))
    parser.add_argument("--kv-cache", choices=KV_CACHES, default="compute")
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="of the base's layers")
    parser.add_argument("--images", action="store_true", help="each question stands behind a picture")
    parser.add_argument(
        "--executor", choices=EXECUTORS, default=EXECUTORS[0], help="tensorrt: with plans of all shapes"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path, help="by default it lies beside the results")
    parser.add_argument("--output", type=Path)
    arguments = parse(parser, times=False)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that are made
    asked = held_out_conversations(arguments.prompts)
    if arguments.images:
        asked = shown(asked, sorted((arguments.model / "scenes").glob("*.png")))
    server = Server(*(getattr(arguments, name) for name in Server._fields))
    shares = groups(asked, SLOTS if arguments.backend == "numpy" else max(1, len(asked)))
    heading = {name: getattr(arguments, name) for name in ("prompts", "tokens", "measured_as", *Server._fields)}
    heading["model"] = hash_bytes((arguments.model / "edgellm.json").read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        beside = Path(folder) / "record" if arguments.output is None else arguments.output.with_suffix(".jsonl")
        record = Record(arguments.record or beside, heading)
        record.begin()
        directory = build(arguments.model, Path(folder) / "engines", server)
        call = partial(
            run_job, directory=directory, server=server, shares=shares, tokens=arguments.tokens, record=record
        )
        failures = run_jobs(arguments.processes, jobs_left(record, arguments, len(shares)), call)
        left = jobs_left(record, arguments, len(shares))
        found = merged(record.done())
    print("\n".join(map(line, found)))
    explained = not left and all(served.explained for served in found)
    different = sum(len(served.differences) for served in found)
    prompts = len({each.prompt for served in found for each in served.differences})
    print(f"{sum(served.answers for served in found)} answers, {different} of {prompts} prompts differ; ", end="")
    print("every difference is explained by rounding" if explained else "some differences are not explained")
    if left:
        print(f"not done: {left}; failed: {failures}")
    if arguments.output is not None:
        content = provenance() | {"backend": arguments.backend, "results": [asdict(served) for served in found]}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if explained else 1)


if __name__ == "__main__":
    main()
