"""SHA-256 digests of files, and the memory of those that take long to compute.

Digests tell corruption and mix-ups, not an attacker who can write the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from edgellm.engines.directories.small_files import open_ordinary, ordinary_bytes
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.cache_directory import user_cache_directory

logger = logging.getLogger("edgellm.digests")

#: Larger reads gain nothing: the digest is the slower part.
BLOCK_BYTES = 4 << 20
#: Hashing less than this at every start takes no time that anyone notices.
SMALL_FILE_BYTES = 1 << 20
_RECORD_BYTES = 1 << 16


@dataclass(frozen=True)
class FileDigest:
    """SHA-256 of a file as 64 hexadecimal digits, and its size in bytes."""

    sha256: str
    size: int


def hash_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> FileDigest:
    """Read a whole ordinary file in blocks; raises OSError."""
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    with open_ordinary(path) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size += count
    return FileDigest(digest.hexdigest(), size)


def recall_digest(path: Path) -> FileDigest | None:
    """The digest remembered for the file as it now stands (real path, size, modification time, inode), or None."""
    real = Path(os.path.realpath(path))
    try:
        stored = json.loads(ordinary_bytes(_record_path(real), _RECORD_BYTES))
        if stored["file"] != _identity(real):
            return None
        digest, size = stored["sha256"], stored["file"]["size"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return FileDigest(digest, size) if isinstance(digest, str) else None


def remember_digest(path: Path, digest: FileDigest) -> None:
    """Remember the digest of the file as it now stands; where the cache cannot be written, the next start hashes."""
    real = Path(os.path.realpath(path))
    record = _record_path(real)
    try:
        content = {"file": _identity(real), "sha256": digest.sha256}
        record.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(content, indent=1).encode())
    except OSError as error:
        logger.debug("the digest of %s is not remembered: %s", path, error)


def current_digest(path: Path, trust_memory: bool = True) -> FileDigest:
    """The file's digest: remembered where the file is large and unchanged since, else computed and remembered.

    Raises OSError.
    """
    size = path.stat().st_size
    if size < SMALL_FILE_BYTES:
        return hash_file(path)
    remembered = recall_digest(path) if trust_memory else None
    if remembered is not None:
        return remembered
    logger.info("Checking %s (%.0f MiB) by its digest", path, size / (1 << 20))
    before = _identity(path)
    digest = hash_file(path)
    if _identity(path) == before:  # a file that changed meanwhile has no one digest to remember
        remember_digest(path, digest)
    return digest


def _identity(path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _record_path(real: Path) -> Path:
    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    return user_cache_directory() / "digests" / f"{name}.json"


def usable_cores() -> int:
    """The cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
