"""How much sooner the first token comes with a system prompt's snapshot, with the shapes of Llama-3.2-1B.

    python tools/bench/snapshot_speed.py [--work DIRECTORY] [--tokens 2000] [--question 16] [--output RESULTS.json]

Needs TensorRT and pycuda; weights and token ids are random. A time to first token is wall time from a request's token
ids to its first token on the host, the median of `--repeats`; nothing of a slot's earlier contents is reused. From disk
means a file that the operating system has in memory; at its first load it is hashed, at later ones it is known, and
only read again where another file was loaded in between (`disk_after_another`). The bus is measured in the same run:
one copy of as many bytes of pinned memory. `phases` are the host's milliseconds in each part of a request, `reading_ms`
what reading the file alone takes with so many threads. Run it on a quiet machine.
`--backend numpy --layers 2` rehearses it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from as_device import parse
from provenance import provenance, report
from random_checkpoint import LAYERS, checkpoint_in
from snapshot_phases import Phases, reading_speed

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
from edgellm.snapshots.file import SnapshotFolder
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.store import SnapshotStore
from edgellm.snapshots.transfer import RowCopy, Uploader
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

#: What the times are to be at most, relative to a prompt without a snapshot; of the bus, what the copy is to reach.
GOALS = {"memory": 0.15, "disk_first": 1.0, "disk_later": 0.25, "bus": 0.5}


@dataclass
class Opened:
    """A model, and the conversations that are asked for: a system prompt and questions, as token ids."""

    runner: DecodingRunner
    directory: EngineDirectory
    tokenizer: Tokenizer
    system: list[int]
    questions: list[list[int]]
    phases: Phases

    def first_token_ms(self, question: int, snapshots: SlotSnapshots | None) -> tuple[float, int]:
        """Wall time to the first token of an answer in an empty slot, and how many tokens of its prompt were reused."""
        answer = OutputText(self.tokenizer.detokenizer(), (), (), (), 1)
        prompt = self.system + self.questions[question % len(self.questions)]
        self.runner.backend.synchronize()
        started = time.perf_counter()
        sequence = DecodingSequence(prompt, SamplingValues(), answer, max_tokens=1)
        contents = [KVContents() for _ in range(self.runner.limits.max_batch)]
        for _ in answered(DecodingLoop(SlotTable(self.runner, contents, snapshots)), [sequence]):
            pass
        seconds = sequence.clock.first_token - started
        self.phases.request(seconds)
        return seconds * 1000, sequence.reused_tokens


def open_model(arguments: argparse.Namespace) -> Opened:
    """Make what is not there yet, and open it."""
    checkpoint = checkpoint_in(arguments.work, arguments.layers)
    engines = arguments.work / f"engines-snapshots-{arguments.layers}"
    limits = EngineLimits(1, 512, 4096)
    build_engine_directory(checkpoint, engines, limits, [], weights="link", force=True)  # plans when they are asked for
    directory = EngineDirectory.open(engines)
    runner = open_runner(open_backend(arguments.backend, directory), directory, None, None, None)
    random = np.random.default_rng(0)
    system, *questions = (
        random.integers(0, 1000, count).tolist() for count in (arguments.tokens, *[arguments.question] * 16)
    )
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    return Opened(runner, directory, tokenizer, system, questions, Phases(runner))


def medians(opened: Opened, repeats: int, snapshots: Callable[[], SlotSnapshots | None]) -> dict[str, Any]:
    """First-token times, each with what `snapshots` gives then; the reused tokens of all."""
    times, reused = [], set()
    for index in range(repeats):
        milliseconds, tokens = opened.first_token_ms(index, snapshots())
        times.append(milliseconds)
        reused.add(tokens)
    return {"ms": statistics.median(times), "all_ms": [round(each, 3) for each in times], "reused": sorted(reused)}


def copy_milliseconds(opened: Opened, snapshot: Snapshot, repeats: int) -> dict[str, float]:
    """The GPU's time of the copy of all rows to the device, and of one plain copy of as many bytes of pinned memory."""
    import pycuda.driver as cuda

    runner = opened.runner
    uploader, stream = Uploader(runner.backend), runner.backend.stream
    copies = [
        RowCopy(f"base.{each.name}", each.memory, snapshot.tensor(f"base.{each.name}"), each.rows)
        for each in runner.base.states.of_slot(0, snapshot.facts.tokens)
    ]
    nbytes = sum(copy.values.nbytes for copy in copies)
    target, source = cuda.mem_alloc(nbytes), snapshot.content[:nbytes]

    def plain() -> None:
        cuda.memcpy_htod_async(target, source, stream)

    def rows() -> None:
        runner.backend.wait_for(list(uploader.upload(copies))[-1][1])

    spans: dict[str, list[float]] = {"plain": [], "rows": []}
    for _ in range(repeats):  # in turns, so that both see the same clocks and the same neighbours
        spans["plain"].append(gpu_milliseconds(stream, plain, 5, series=1))
        spans["rows"].append(gpu_milliseconds(stream, rows, 5, series=1))
    plain_ms, rows_ms = (statistics.median(spans[name]) for name in ("plain", "rows"))
    return {
        "mib": nbytes / 2**20,
        "plain_ms": plain_ms,
        "rows_ms": rows_ms,
        "plain_gb_per_s": nbytes / plain_ms / 1e6,
        "rows_gb_per_s": nbytes / rows_ms / 1e6,
        "share_of_bus": plain_ms / rows_ms,
    }


def measure(opened: Opened, folder: Path, repeats: int) -> dict[str, Any]:
    """Everything, in the order in which a program would meet it."""
    runner, directory = opened.runner, opened.directory
    results: dict[str, Any] = {"prompt_tokens": len(opened.system) + len(opened.questions[0])}
    maker = SlotSnapshots(SnapshotStore(), runner, directory)
    snapshot = maker.compute(0, opened.system, KVContents(), "system")
    started = time.perf_counter()
    path, _ = SnapshotFolder(folder).save(snapshot)
    results["save_seconds"] = time.perf_counter() - started
    results["file_mib"] = snapshot.nbytes / 2**20
    maker.close()
    for _ in range(2):  # shapes and kernels are loaded, the clocks are up
        medians(opened, 3, lambda: None)

    def fresh() -> SlotSnapshots:
        """A process's first use of the file."""
        snapshots = SlotSnapshots(SnapshotStore(), runner, directory)
        snapshots.store.add_file(path)
        snapshots._uploader.reserve(snapshot.nbytes)
        return snapshots

    medians(opened, 2, fresh)
    results["cold"] = medians(opened, repeats, lambda: None)
    results["disk_first"] = medians(opened, repeats, fresh)
    known = fresh()
    medians(opened, 1, lambda: known)
    results["disk_later"] = medians(opened, repeats, lambda: known)

    def after_another() -> SlotSnapshots:
        """The memory that files are read through has had another one since."""
        known._uploader.forget()
        return known

    results["disk_after_another"] = medians(opened, repeats, after_another)
    in_memory = SlotSnapshots(SnapshotStore(), runner, directory)
    in_memory.store.put(snapshot)
    medians(opened, 1, lambda: in_memory)
    results["memory"] = medians(opened, repeats, lambda: in_memory)
    results["memory_before_prefill"] = without_overlap(opened, repeats, in_memory)
    results["slot"] = slot_reuse(opened, repeats)
    results["cold_again"] = medians(opened, repeats, lambda: None)
    cold = statistics.median([results["cold"]["ms"], results["cold_again"]["ms"]])
    kinds = ("memory", "memory_before_prefill", "disk_first", "disk_later", "disk_after_another", "slot")
    results["of_cold"] = {name: results[name]["ms"] / cold for name in kinds}
    reached = {name: share <= GOALS[name] for name, share in results["of_cold"].items() if name in GOALS}
    if runner.backend.name == "tensorrt":
        results["copy"] = copy_milliseconds(opened, snapshot, repeats)
        reached["bus"] = results["copy"]["share_of_bus"] >= GOALS["bus"]
    results["goals"], results["reached"] = GOALS, reached
    with opened.phases.watching():
        sources = {"memory": lambda: in_memory, "disk_later": lambda: known, "disk_first": fresh}
        sources["disk_after_another"] = after_another
        results["phases"] = {name: phases_of(opened, repeats, source) for name, source in sources.items()}
    memory = runner.backend.host_memory(snapshot.nbytes)
    results["reading_ms"] = {
        kind: {
            threads: round(reading_speed(path, memory, threads, kind == "hashed", 7), 3)
            for threads in (1, 2, 4, 8, 12, 16, 24, 32)
            if threads <= (os.cpu_count() or 1)
        }
        for kind in ("read", "hashed")
    }
    return results


def phases_of(opened: Opened, repeats: int, snapshots: Callable[[], SlotSnapshots]) -> dict[str, float]:
    """The host's milliseconds in each phase, medians; taking the times costs some."""
    opened.phases.take()
    medians(opened, repeats, snapshots)
    return opened.phases.take()


def without_overlap(opened: Opened, repeats: int, snapshots: SlotSnapshots) -> dict[str, Any]:
    """As from memory, but the prefill waits until all rows are there, rather than for those of its next layer."""
    base = opened.runner.base
    expect = base.expect_rows

    def expect_and_wait(transfers: Any) -> None:
        expect(transfers)
        base.await_rows()

    base.expect_rows = expect_and_wait
    try:
        return medians(opened, repeats, lambda: snapshots)
    finally:
        del base.expect_rows


def slot_reuse(opened: Opened, repeats: int) -> dict[str, Any]:
    """As the rest, but the rows are in the slot still: what is left is the question's own prefill."""
    contents, times = [KVContents()], []
    for index in range(repeats + 1):
        answer = OutputText(opened.tokenizer.detokenizer(), (), (), (), 1)
        prompt = opened.system + opened.questions[index % len(opened.questions)]
        opened.runner.backend.synchronize()
        started = time.perf_counter()
        sequence = DecodingSequence(prompt, SamplingValues(), answer, max_tokens=1)
        for _ in answered(DecodingLoop(SlotTable(opened.runner, contents)), [sequence]):
            pass
        times.append((sequence.clock.first_token - started) * 1000)
    return {"ms": statistics.median(times[1:]), "reused": [sequence.reused_tokens]}


def add_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    """What `open_model` and a measurement can be told."""
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edgellm-bench")
    parser.add_argument("--backend", choices=("tensorrt", "numpy"), default="tensorrt")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=2000, help="of the system prompt")
    parser.add_argument("--question", type=int, default=16, help="tokens that follow it")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--output", type=Path)


def main() -> None:
    """Measure everything and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=15)
    arguments = parse(parser)
    results: dict[str, Any] = dict(provenance()) | {"backend": arguments.backend, "cores": os.cpu_count()}
    opened = open_model(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
            results |= measure(opened, Path(folder), arguments.repeats)
    finally:
        opened.runner.close()
    report(results, arguments.output)
    shares = ", ".join(
        f"{name} {results[name]['ms']:.2f} ms ({share:.1%})" for name, share in results["of_cold"].items()
    )
    print(
        f"cold {results['cold']['ms']:.2f} / {results['cold_again']['ms']:.2f} ms; {shares}; copy {results.get('copy')}"
    )
    for name, phases in results["phases"].items():
        print(f"{name}: " + ", ".join(f"{phase} {milliseconds:.2f}" for phase, milliseconds in phases.items()))
    print("reading_ms:", results["reading_ms"])
    print("reached:", results["reached"])


if __name__ == "__main__":
    main()
