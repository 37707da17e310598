"""The files of a folder of snapshots: when they were used, whether they are still the same, and how they go."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgellm.errors import SnapshotError
from edgellm.kernels.cache_directory import user_cache_directory

SUFFIX = ".safetensors"


def snapshot_folder() -> Path:
    """Where snapshots lie on disk unless another folder is named; it may not exist yet."""
    return user_cache_directory() / "snapshots"


def delete_file(path: Path) -> None:
    """Delete a snapshot's file; SnapshotError where that cannot be done, but for one that is gone already."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise SnapshotError(f"{path} cannot be deleted: {error.strerror or error}", "not deleted") from error


def file_identity(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another that has its name, and from itself after a change of its content, but for one
    that was made behind the file system's back; None where there is none to be seen."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _identity(status)


def same_content(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two identities differ at most by what `touch` changes."""
    return one[:-1] == other[:-1]


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def opened_unchanged(path: Path | None, identity: tuple[int, ...] | None) -> Iterator[int | None]:
    """A descriptor for reading the file, None where there is none any more that has this `identity`, but for the time
    of its last change: another process may have touched it."""
    descriptor = None
    with suppress(OSError):
        descriptor = None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if descriptor is None or identity is None or not same_content(_identity(os.fstat(descriptor)), identity):
            yield None
        else:
            yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def last_used(path: Path) -> int:
    """When any process used the file last, as `touch` notes it, in nanoseconds; 0 where there is none to be seen."""
    try:
        return path.stat().st_atime_ns
    except OSError:
        return 0


def touch(path: Path) -> tuple[int, ...] | None:
    """Note on the disk that a file was used now, for every process; the time of its content's last change stays. Gives
    the identity that it has from now on."""
    with suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    return file_identity(path)
