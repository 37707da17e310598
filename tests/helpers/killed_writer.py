"""A program that writes snapshots over one file in child processes, kills them, and looks at what is left.

`killed_writer.py FOLDER SEED KILLS lines|moments`: children are killed before a line of the writing code ("lines": line
1, 2, ... of a first write, so that no point between two lines is left out), or at random moments of endless writing.
Prints one JSON object: how often the old and the new snapshot was there, and how many half-written files were left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from edgellm.errors import SnapshotError
from edgellm.snapshots.binding import LAYOUT, NONE, SnapshotBinding
from edgellm.snapshots.file import read_snapshot, verify_snapshot, write_snapshot
from edgellm.snapshots.snapshot import FORMAT_VERSION, TOKEN_IDS, Snapshot, SnapshotFacts
from edgellm.snapshots.staging import remove_abandoned

BINDING = SnapshotBinding("1" * 64, "2" * 64, NONE, NONE, NONE, "float32", LAYOUT, "numpy", None)
TOKENS = 2000


def make(number: int) -> Snapshot:
    """A snapshot of about 2 MiB whose every row, and recurrent state, is its number."""
    label = f"number {number}"
    facts = SnapshotFacts(FORMAT_VERSION, TOKENS, BINDING, label, "a model", "2026-01-01T00:00:00+00:00", "0")
    rows = ("float32", (2, TOKENS, 64))
    tensors = {"base.k_cache_0": rows, "base.v_cache_0": rows, "base.state.delta_matrix_1": ("float32", (4, 32, 64))}
    snapshot = Snapshot.allocate(facts, tensors, lambda nbytes: np.empty(nbytes, np.uint8))
    for name in tensors:
        snapshot.tensor(name)[...] = number
    snapshot.tensor(TOKEN_IDS)[...] = np.arange(TOKENS)
    return snapshot


def found_number(path: Path) -> int:
    """Which snapshot the file is, read and verified as any user would; raises SnapshotError."""
    snapshot = read_snapshot(path)
    verify_snapshot(path, snapshot)
    number = int(snapshot.tensor("base.k_cache_0")[0, 0, 0])
    for name in (*snapshot.rows, *snapshot.states):
        if not (snapshot.tensor(name) == number).all():
            raise SnapshotError(f"{path} mixes snapshots", "mixed")
    return number


def kill_before_line(number: int) -> None:
    """End this process by SIGKILL before the `number`th line that it runs in the code that writes snapshots."""
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "snapshots" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def child(path: Path, new: Snapshot, old: Snapshot, line: int | None) -> None:
    """Write, and never return."""
    if line is not None:
        kill_before_line(line)
        write_snapshot(path, new)
        os._exit(0)
    while True:
        write_snapshot(path, new)
        write_snapshot(path, old)


def main() -> None:
    folder, seed, kills, kind = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    path, generator = folder / "x.safetensors", random.Random(seed)
    counts = {"old": 0, "new": 0, "left behind": 0, "survived": 0}
    old, new = make(1), make(2)
    write_snapshot(path, new)
    started = time.perf_counter()
    write_snapshot(path, old)
    longest = 4 * (time.perf_counter() - started)
    for number in range(1, kills + 1):
        if kind == "lines":
            write_snapshot(path, old)
        before = found_number(path)
        process = os.fork()
        if process == 0:
            child(path, new, old, number if kind == "lines" else None)
        if kind == "moments":
            time.sleep(generator.random() * longest)
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        counts["survived"] += os.WIFEXITED(status)
        now = found_number(path)  # raises where it is broken
        counts["old" if now == before else "new"] += 1
        counts["left behind"] += len(list(folder.iterdir())) - 1
        remove_abandoned(folder)
        if [file.name for file in folder.iterdir()] != [path.name]:
            raise SystemExit(f"{sorted(folder.iterdir())} are left")
        if kind == "lines" and os.WIFEXITED(status):
            break
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
