"""Files that are either whole or not there."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` through a temporary file in the same folder, which must exist; raises OSError.

    The bytes are on the disk before the file gets its name, so that no reader and no loss of power shows a part. What
    has the name and is no file, such as a device or a pipe, stays and gets the bytes.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put the names in a folder on the disk, where the file system can."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
