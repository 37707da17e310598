"""Snapshots on disk as people name them: a file, what its name begins with, or the prompt's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm.engines.model.memory_plan import MEBIBYTE
from edgellm.errors import RequestError, SnapshotError
from edgellm.kernels.user_paths import user_path
from edgellm.snapshots.binding import NONE
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.file import read_snapshot
from edgellm.snapshots.staging import SUFFIX, snapshot_folder


@dataclass(frozen=True)
class SnapshotOnDisk:
    """A file with its snapshot, or with the reason why it holds none that can be used."""

    path: Path
    snapshot: Snapshot | None
    error: SnapshotError | None = None

    def opened(self) -> Snapshot:
        """The snapshot; raises the SnapshotError that says why it cannot be used."""
        if self.snapshot is None:
            raise self.error or SnapshotError(f"{self.path} holds no snapshot", "empty")
        return self.snapshot

    @property
    def label(self) -> str | None:
        """The prompt's name, where it can be read."""
        return None if self.snapshot is None else self.snapshot.facts.label

    def values(self) -> dict[str, Any]:
        """All there is to say, as JSON values; sizes in bytes."""
        if self.snapshot is None:
            return {"path": str(self.path), "error": str(self.error), "reason": self.error and self.error.reason}
        return {"path": str(self.path), "bytes": self.snapshot.nbytes, **asdict(self.snapshot.facts)}

    def line(self) -> str:
        """A row of the list."""
        if self.snapshot is None:
            return f"cannot be used: {self.error and self.error.reason}"
        facts = self.snapshot.facts
        drafted = ", draft" if facts.binding.has_draft else ""
        adapted = "" if facts.binding.adapter == NONE else f", adapter {facts.binding.adapter[:8]}"
        return (
            f"{facts.label:<42}{facts.tokens:>7,} tokens {self.snapshot.nbytes / MEBIBYTE:>9,.1f} MiB  "
            f"{facts.binding.backend} {facts.binding.dtype}{drafted}{adapted}, {facts.model}"
        )


def snapshot_files(folder: Path) -> Iterator[SnapshotOnDisk]:
    """The snapshots in a folder, those that cannot be used among them."""
    yield from (_read(path) for path in sorted(folder.glob(f"*{SUFFIX}")))


def _read(path: Path) -> SnapshotOnDisk:
    try:
        return SnapshotOnDisk(path, read_snapshot(path))
    except SnapshotError as error:
        return SnapshotOnDisk(path, None, error)


def find_snapshot(name: str, folder: Path) -> SnapshotOnDisk:
    """The snapshot that a name means; RequestError where that is none or several."""
    path = user_path(name)
    if path.exists() or path.is_symlink():
        return _read(path)
    found = [item for item in snapshot_files(folder) if item.path.name.startswith(name) or item.label == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise RequestError(f"{name!r} may be {', '.join(item.path.stem for item in found)}: write more of one of them")
    raise RequestError(f"there is no snapshot {name!r}, neither a file nor in {folder}: edgellm cache list shows them")


def chosen_folder(folder: Path | None) -> Path:
    """The folder that was asked for, else the one in the user's cache directory. Raises RequestError for a file."""
    if folder is None:
        return snapshot_folder()
    folder = user_path(folder)
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--folder {folder} is a file: expected the folder that holds snapshots")
    return folder
