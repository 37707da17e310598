"""The files of a folder of snapshots: written whole, deleted, noted as used, recognized while they are the same."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from edgellm.engines.errors import explained
from edgellm.errors import SnapshotError
from edgellm.kernels.atomic_write import sync_directory, unfinished_in, unfinished_sibling

SUFFIX = ".safetensors"


def is_snapshot_path(name: str) -> bool:
    """Whether a user who writes this means a file's path rather than the name of a snapshot."""
    return name.endswith(SUFFIX) or any(separator in name for separator in (os.sep, os.altsep) if separator)


def delete_file(path: Path) -> None:
    """Delete a snapshot's file; SnapshotError where that cannot be done, but for one that is gone already."""
    with explained(f"{path} cannot be deleted", partial(SnapshotError, reason="not deleted")):
        path.unlink(missing_ok=True)


def file_identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another that has its name, and from itself after a change of its content, but for one
    that was made behind the file system's back; None where there is none to be seen."""
    with suppress(OSError):
        return _identity(path.stat())
    return None


def same_content(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two identities differ at most by what `touch` changes."""
    return one[:-1] == other[:-1]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def opened_unchanged(path: Path, identity: tuple[int, ...] | None) -> Iterator[int]:
    """A descriptor for reading the file; SnapshotError where there is none any more that has this `identity`, but for
    the time of its last change: another process may have touched it."""
    changed = SnapshotError(f"{path} changed while it was opened", "replaced")
    try:
        file = path.open("rb", buffering=0)
    except OSError as error:
        raise changed from error
    with file:
        if identity is None or not same_content(_identity(os.fstat(file.fileno())), identity):
            raise changed
        yield file.fileno()


def last_used(path: Path) -> int:
    """When any process used the file last, as `touch` notes it, in nanoseconds; 0 where there is none to be seen."""
    with suppress(OSError):
        return path.stat().st_atime_ns
    return 0


def touch(path: Path) -> tuple[int, ...] | None:
    """Note on the disk that a file was used now, for every process; the time of its content's last change stays. Gives
    the identity that it has from now on."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return file_identity(path)


class StagedFile:
    """A hidden sibling of `target` to write into: `file`, at `path`. `commit` gives it the target's name.

    Leaving the context without a commit removes it. What a process that was killed left behind is removed on entry.
    Raises OSError.
    """

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> StagedFile:
        with suppress(FileNotFoundError):  # looked at once: another thread may remove it meanwhile
            if not stat.S_ISREG(self._target.stat().st_mode):
                raise OSError(errno.EEXIST, "what has the name is no file, and would be replaced by one")
        remove_abandoned(self._target.parent, self._target.name)
        while True:
            self.path = unfinished_sibling(self._target)
            self.file = self.path.open("xb")
            with suppress(OSError):  # where the file system has no locks nothing is taken for abandoned
                fcntl.flock(self.file, fcntl.LOCK_EX)  # says, until the process ends, that it is being written
            if self.path.exists():  # not taken for an abandoned one before it was locked
                return self
            self.file.close()

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # after a commit this name is gone
            self.path.unlink()
        self.file.close()

    def sync(self) -> None:
        """Put what was written on the disk, and have what is read of it come from there."""
        self.file.flush()
        os.fsync(self.file.fileno())
        with suppress(OSError):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Give the file its name, in place of one that has it; it must have been synced."""
        self.path.replace(self._target)
        sync_directory(self._target.parent)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in a folder of the files they wrote (of `name` alone, or all)."""
    for path in unfinished_in(folder, name):
        if path.is_symlink() or not path.is_file():  # opening a pipe would wait for ever
            continue
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another writes it
            path.unlink()
