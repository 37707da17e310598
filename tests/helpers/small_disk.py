"""A small file system, and how it becomes full."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def mounted(disk: Path, mebibytes: int) -> Iterator[str | None]:
    """A new folder that is a file system of so many MiB; gives why it is none where none can be mounted."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(disk)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    try:
        yield None if found.returncode == 0 else found.stderr.strip() or "mount failed"
    finally:
        if found.returncode == 0:
            subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path, leave: int = 0) -> None:
    """Write until the file system has only `leave` bytes free."""
    with (disk / "filler").open("ab", buffering=0) as filler:
        while (free := shutil.disk_usage(disk).free) > leave:
            try:
                filler.write(bytes(min(1 << 20, free - leave)))
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return
