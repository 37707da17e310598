"""Snapshots in memory, on disk and in files, what a runner forgets before they are restored, and a disk that fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.runners.media import PromptMedia
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.file import SnapshotFolder, write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import StagedFile
from edgellm.snapshots.store import SnapshotStore


def keep(snapshots: SlotSnapshots, made: Snapshot, place: str, folder: Path) -> None:
    """Keep a snapshot in the "memory" of the store, on the "disk" in a file that it uses, or load such a "file"."""
    if place == "memory":
        snapshots.store.put(made)
    elif place == "disk":
        save(snapshots.store, made, folder)
    else:
        write_snapshot(folder / "x", made)
        assert snapshots.load(folder / "x").memory is not None


def save(store: SnapshotStore, made: Snapshot, folder: Path) -> Path:
    """Save a snapshot in a folder, and let a store use it from there."""
    path, _ = SnapshotFolder(folder).save(made)
    store.add_file(path)
    return path


def taken(
    snapshots: SlotSnapshots,
    slot: int,
    token_ids: Sequence[int],
    label: str,
    adapter: str | None = None,
    images: PromptMedia | None = None,
) -> Snapshot:
    """A snapshot of a slot whose first rows hold these tokens, computed with an adapter's digest and with images."""
    snapshot = snapshots._unfilled(token_ids, label, adapter, images, None)
    snapshots._fill(slot, snapshot)
    return snapshot


def forget(runner: DecodingRunner) -> None:
    """Leave nothing of earlier prompts in the states: what is used of it would show."""
    for model in (runner.base, *([] if not runner.draft.has_model else [runner.draft])):
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
