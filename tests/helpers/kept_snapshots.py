"""Snapshots in memory, on disk and in files, what a runner forgets before they are restored, and a disk that fails."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.file import write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import StagedFile


def keep(snapshots: SlotSnapshots, made: Snapshot, place: str, folder: Path) -> None:
    """Keep a snapshot in the "memory" or on the "disk" of the store, or in a "file" of the folder that is loaded."""
    if place == "memory":
        snapshots.store.put(made)
    elif place == "disk":
        snapshots.store.save(made)
    else:
        write_snapshot(folder / "x", made)
        assert snapshots.load(folder / "x").memory is not None


def forget(runner: DecodingRunner) -> None:
    """Leave nothing of earlier prompts in the states: what is used of it would show."""
    for model in (runner.base, *([] if runner.draft is None else [runner.draft])):
        for tensor in model.states.tensors.values():
            tensor[...] = 77 if tensor.dtype == np.int8 else np.nan


def flip_what_is_written(patch: pytest.MonkeyPatch) -> None:
    """The disk holds other bytes than were written near the end of a snapshot."""
    sync = StagedFile.sync

    def sync_and_flip(self: StagedFile) -> None:
        sync(self)
        with self.path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\xff\x00\xff")

    patch.setattr(StagedFile, "sync", sync_and_flip)
