"""Files that are either whole or not there, and names of what is not whole yet, which who writes it has locked."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: What such names have between the target's name and so many random bytes in hexadecimal digits.
_MARK, _MARK_BYTES = ".partial-", 4


def unfinished_sibling(target: Path) -> Path:
    """A new hidden name beside `target`, for what gets its name when it is whole."""
    return target.with_name(f".{target.name}{_MARK}{secrets.token_hex(_MARK_BYTES)}")


def unfinished_in(folder: Path, name: str | None = None) -> Iterable[Path]:
    """What a folder has under names of `unfinished_sibling`, of targets of this name, or of all."""
    pattern = "*" if name is None else glob.escape(name)
    return folder.glob(f".{pattern}{_MARK}{'[0-9a-f]' * 2 * _MARK_BYTES}")


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
