"""The folder in which `edgellm cache build` keeps snapshots, within a budget; several processes may share it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgellm.errors import SnapshotError
from edgellm.snapshots.binding import binding_key
from edgellm.snapshots.file import read_snapshot, too_large, write_snapshot
from edgellm.snapshots.prefixes import token_key
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import SUFFIX, delete_file, file_identity, last_used, remove_abandoned, touch

logger = logging.getLogger("edgellm.snapshots")

DISK_BUDGET = 8 << 30


class SnapshotFolder:
    """Files take up to `budget` bytes: what any process used least recently goes first. What cannot be used stays, is
    not counted, and is warned of once, until it changes."""

    def __init__(self, path: Path, budget: int = DISK_BUDGET) -> None:
        self.path, self.budget = path, budget
        self._refused: dict[Path, tuple[int, ...] | None] = {}
        remove_abandoned(path)
        self._files()

    def path_of(self, snapshot: Snapshot) -> Path:
        """The file that `save` writes."""
        return self.path / f"{binding_key(snapshot.facts.binding, token_key(snapshot.token_ids))}{SUFFIX}"

    def save(self, snapshot: Snapshot, replaced: Sequence[Path] = ()) -> tuple[Path, list[Path]]:
        """Write a snapshot; its path, and those of files that were removed to make room. It is on the disk and read
        back when this returns; only then the files that are `replaced` by it are deleted. Raises SnapshotError."""
        path = self.path_of(snapshot)
        if snapshot.nbytes > self.budget:
            raise too_large(snapshot, "disk", self.budget)
        write_snapshot(path, snapshot)
        touch(path)
        for old in replaced:
            if old != path:
                delete_file(old)
        return path, self._make_room(path)

    def _make_room(self, kept: Path) -> list[Path]:
        """Delete files, the least recently used first, until the rest fits the budget; `kept` always stays."""
        files, removed = self._files(kept), list[Path]()
        size = sum(each.nbytes for each in files.values())
        for path, snapshot in files.items():
            if size > self.budget and path != kept:
                logger.info("snapshot %r is deleted: the disk budget is used up", snapshot.facts.label)
                removed.append(path)
                size -= snapshot.nbytes
                with suppress(SnapshotError):
                    delete_file(path)
        return removed

    def _files(self, *first: Path) -> dict[Path, Snapshot]:
        """What can be used: the `first` files, then the others, the least recently used first."""
        found: dict[Path, Snapshot] = {}
        known: dict[str, Path] = {}
        others = set(self.path.glob(f"*{SUFFIX}")).difference(first)
        for path in (*first, *sorted(others, key=last_used)):
            identity = file_identity(path)
            if self._refused.get(path, ()) == identity:
                continue
            try:
                snapshot = read_snapshot(path)
                same = known.setdefault(self.path_of(snapshot).name, path)
                if same != path:
                    raise SnapshotError(f"{path} holds the same snapshot as {same}: remove one", "duplicate")
                found[path] = snapshot
            except SnapshotError as error:
                logger.warning("%s", error)
                self._refused[path] = identity
        return found
