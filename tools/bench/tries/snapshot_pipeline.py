"""Times to a first token with a snapshot, for numbers of threads, sizes of sections and copies that are begun early.

    python tools/bench/tries/snapshot_pipeline.py [--work DIRECTORY] [--output RESULTS.json]

Takes the options of snapshot_speed.py, and must run on a quiet machine. Prints each line as it is measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_timer import gpu_milliseconds
from provenance import provenance
from snapshot_speed import Opened, add_options, medians, open_model, slot_reuse

from edgellm.decoding.slots import KVContents
from edgellm.engines.runners import rows as arriving_rows
from edgellm.snapshots import file as section_reading
from edgellm.snapshots import snapshot, transfer
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore

#: Sizes of sections, threads: of a first load.
HASHED = ((1 << 20, 12), (1 << 20, 16), (2 << 20, 8), (2 << 20, 12), (2 << 20, 16), (2 << 20, 24), (4 << 20, 16))
#: Bytes read at a time, threads: of later loads.
READ = ((1 << 21, 4), (1 << 21, 8), (1 << 22, 4), (1 << 22, 6), (1 << 22, 8), (1 << 22, 16), (1 << 23, 4), (1 << 23, 8))
#: Copies begun before anything else, and for each layer that is waited for; in turns, as clocks and neighbours change.
EARLY = ((8, 3), (2, 3), (4, 3), (2, 2)) * 3


class Tries:
    """Measures with one opened model and one snapshot."""

    def __init__(self, opened: Opened, folder: Path, repeats: int) -> None:
        self._opened, self._folder, self._repeats = opened, folder, repeats
        self.results: dict[str, float] = {}
        maker = SlotSnapshots(SnapshotStore(), opened.runner, opened.directory)
        self.snapshot = maker.compute(0, opened.system, KVContents(), "system")

    def slots(self, folder: Path | None = None) -> SlotSnapshots:
        """As a process sees them that has just begun."""
        return SlotSnapshots(SnapshotStore(folder=folder), self._opened.runner, self._opened.directory)

    def saved(self, section_bytes: int) -> Path:
        """A folder with the snapshot in sections of that size, which stays so in this process."""
        folder = self._folder / str(section_bytes)
        self.snapshot.__dict__.pop("sections", None)
        SnapshotStore(folder=folder).save(self.snapshot)
        return folder

    def take(self, name: str, snapshots: Callable[[], SlotSnapshots]) -> None:
        """Measure, print and keep the milliseconds of one kind."""
        try:
            found = medians(self._opened, self._repeats, snapshots)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            return
        self.results[name] = found["ms"]
        print(f"{name}: {found['ms']:.3f} ms, {min(found['all_ms'])}..{max(found['all_ms'])}", flush=True)

    def short_prefill(self) -> None:
        """What the question's own prefill takes the GPU and the host, with nothing around it."""
        opened, runner = self._opened, self._opened.runner
        ids = np.asarray(opened.questions[0], np.int32)

        def prefill() -> None:
            runner.base._prefill(0, ids, len(opened.system), 16, None)

        stream = runner.backend.device.stream
        self.results["short prefill, GPU"] = statistics.median(
            gpu_milliseconds(stream, prefill, 5, series=1) for _ in range(9)
        )
        times = []
        for _ in range(9):
            runner.backend.synchronize()
            started = time.perf_counter()
            prefill()
            times.append((time.perf_counter() - started) * 1000)
        self.results["short prefill, enqueued"] = statistics.median(times)
        for name in ("short prefill, GPU", "short prefill, enqueued"):
            print(f"{name}: {self.results[name]:.3f} ms", flush=True)

    def run(self) -> None:
        """All tries, of which each changes what the others leave at its default."""
        opened = self._opened
        for _ in range(2):
            medians(opened, 3, lambda: None)
        self.take("cold", lambda: None)
        self.results["slot"] = slot_reuse(opened, self._repeats)["ms"]
        print(f"slot: {self.results['slot']:.3f} ms", flush=True)
        if opened.runner.backend.name == "tensorrt":
            try:
                self.short_prefill()
            except Exception as error:
                print(f"short prefill: {type(error).__name__}: {error}", flush=True)
        in_memory = self.slots()
        in_memory.store.put(self.snapshot)
        for turn, (first, following) in enumerate(EARLY):
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(arriving_rows, "_FIRST", first))
                stack.enter_context(mock.patch.object(arriving_rows, "_NEXT", following))
                medians(opened, 2, lambda: in_memory)
                self.take(f"memory, {first} copies early and {following} a layer, {turn}", lambda: in_memory)
        in_memory.close()
        for section_bytes, threads in HASHED:
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(snapshot, "_SECTION_BYTES", section_bytes))
                stack.enter_context(mock.patch.object(section_reading, "_MOST_THREADS", threads))
                folder = self.saved(section_bytes)
                medians(opened, 2, lambda folder=folder: self.slots(folder))
                name = f"first load, sections of {section_bytes >> 10} KiB, {threads} threads"
                self.take(name, lambda folder=folder: self.slots(folder))
        folder = self.saved(snapshot._SECTION_BYTES)
        for read_bytes, threads in READ:
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(transfer, "_READ_BYTES", read_bytes))
                stack.enter_context(mock.patch.object(section_reading, "_MOST_READERS", threads))
                known = self.slots(folder)
                medians(opened, 1, lambda known=known: known)

                def after_another(known: SlotSnapshots = known) -> SlotSnapshots:
                    known._uploader.forget()
                    return known

                medians(opened, 2, after_another)
                self.take(f"later load, {read_bytes >> 10} KiB at a time, {threads} threads", after_another)
                known.close()


def main() -> None:
    """Try everything and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, repeats=9)
    arguments = parser.parse_args()
    opened = open_model(arguments)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
            tries = Tries(opened, Path(folder), arguments.repeats)
            tries.run()
            if arguments.output:
                arguments.output.write_text(json.dumps(provenance() | tries.results, indent=1) + "\n")
            del tries
    finally:
        opened.runner.close()


if __name__ == "__main__":
    main()
