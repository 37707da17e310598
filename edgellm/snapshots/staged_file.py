"""A file that appears under its name only when it is complete and on the disk."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from edgellm.kernels.atomic_write import sync_directory

_MARK = ".partial-"


class StagedFile:
    """A hidden sibling of `target` to write into: `file`, at `path`. `commit` gives it the target's name.

    Leaving the context without a commit removes it. What a process that was killed left behind is removed on entry.
    Raises OSError.
    """

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> StagedFile:
        if self._target.exists() and not self._target.is_file():
            raise OSError(errno.EEXIST, "what has the name is no file, and would be replaced by one")
        remove_abandoned(self._target.parent, self._target.name)
        while True:
            self.path = self._target.with_name(f".{self._target.name}{_MARK}{secrets.token_hex(4)}")
            self.file = self.path.open("xb", buffering=0)
            fcntl.flock(self.file, fcntl.LOCK_EX)  # says, until the process ends, that it is being written
            if self.path.exists():  # not taken for an abandoned one before it was locked
                return self
            self.file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # after a commit this name is gone
            self.path.unlink()
        self.file.close()

    def write(self, data: memoryview) -> None:
        """Write all of `data`."""
        while data:
            data = data[self.file.write(data) :]

    def sync(self) -> None:
        """Put what was written on the disk, and have what is read of it come from there."""
        os.fsync(self.file.fileno())
        with suppress(OSError):
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def commit(self) -> None:
        """Give the file its name, in place of one that has it; it must have been synced."""
        self.path.replace(self._target)
        sync_directory(self._target.parent)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left in a folder of the files they wrote (of `name` alone, or all)."""
    pattern = "*" if name is None else glob.escape(name)
    for path in folder.glob(f".{pattern}{_MARK}*"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another writes it
            path.unlink()
