"""SHA-256 digests of files, and the memory of those that take long to compute, and of what was found in the files.

One SHA-256 reads half a gigabyte to two gigabytes a second and cannot be divided. So the digest of a large file is that
of a list: SHA-256 of the SHA-256s, 32 bytes each, of its sections of `SECTION_BYTES` in their order, which threads hash
side by side. The hub, and earlier releases, have the digests of whole files.

Digests tell corruption and mix-ups, not an attacker who can write the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.engines.formats.small_files import open_ordinary, ordinary_bytes, size_limit, too_large
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.user_paths import user_cache_directory

logger = logging.getLogger("edgellm.digests")

#: Larger reads gain nothing: the digest is the slower part.
BLOCK_BYTES = 4 << 20
#: Hashing less than this at every start takes no time that anyone notices.
SMALL_FILE_BYTES = 1 << 20
#: Files of more bytes are hashed in sections of so many.
SECTION_BYTES = 64 << 20
_MOST_THREADS = 16
_RECORD_BYTES = 1 << 16
#: What a record calls digests, by their sections.
_KINDS = {0: "sha256", SECTION_BYTES: "sections_sha256"}


@dataclass(frozen=True)
class FileDigest:
    """SHA-256 of a file, or of its sections of so many bytes (0: of the whole), as 64 hexadecimal digits; its size in
    bytes."""

    sha256: str
    size: int
    section: int = 0


def hash_bytes(data: bytes) -> str:
    """SHA-256 of `data` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path, section: int = 0) -> FileDigest:
    """Read an ordinary file in blocks, the whole or several sections at a time; raises OSError."""
    hashing, size = _Hashing(section), 0
    if not section:
        for block in file_blocks(path):
            hashing.update(block)
            size += len(block)
        return FileDigest(hashing.hexdigest(), size)
    with open_ordinary(path) as file:
        starts = range(0, os.fstat(file.fileno()).st_size, section)

        def hash_section(start: int) -> tuple[bytes, int]:
            digest, done, view = hashlib.sha256(), 0, memoryview(bytearray(BLOCK_BYTES))
            while count := os.preadv(file.fileno(), [view[: section - done]], start + done):
                digest.update(view[:count])
                done += count
            return digest.digest(), done

        with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "edgellm-digest") as pool:
            found = list(pool.map(hash_section, starts))
    return FileDigest(hash_bytes(b"".join(each for each, _ in found)), sum(count for _, count in found), section)


def section_of(size: int) -> int:
    """The sections, in bytes, in which a file of this size is hashed here; 0: whole."""
    return SECTION_BYTES if size > SECTION_BYTES else 0


class _Hashing:
    """The digest of what comes one after another, of the whole or of sections."""

    def __init__(self, section: int) -> None:
        self._section, self._left, self._own, self._all = section, section, hashlib.sha256(), hashlib.sha256()

    def update(self, block: memoryview) -> None:
        while self._section and len(block) >= self._left:
            self._own.update(block[: self._left])
            self._all.update(self._own.digest())
            block, self._left, self._own = block[self._left :], self._section, hashlib.sha256()
        self._left -= len(block)
        self._own.update(block)

    def hexdigest(self) -> str:
        if self._section and self._left < self._section:
            self._all.update(self._own.digest())
        return (self._all if self._section else self._own).hexdigest()


def file_blocks(path: Path) -> Iterator[memoryview]:
    """The content of an ordinary file, a block in memory at a time."""
    view = memoryview(bytearray(BLOCK_BYTES))
    with open_ordinary(path) as file:
        while count := file.readinto(view):
            yield view[:count]


@dataclass(frozen=True)
class _Record:
    """What is remembered of a file that was as `identity` says: its digests by their sections, and in `finite` the
    `_names_digest` of sets of tensors."""

    identity: dict[str, int | str]
    digests: dict[int, str]
    finite: tuple[str, ...]

    @classmethod
    def read(cls, real: Path) -> _Record | None:
        values = {}
        with suppress(OSError, ValueError, RecursionError):
            values = json.loads(ordinary_bytes(_record_path(real), _RECORD_BYTES))
        if not isinstance(values, dict):
            return None
        identity, finite = values.get("file"), values.get("finite", [])
        digests = {section: values.get(key) for section, key in _KINDS.items()}
        found = {section: digest for section, digest in digests.items() if isinstance(digest, str)}
        if not isinstance(identity, dict) or not found or not isinstance(finite, list):
            return None
        return cls(identity, found, tuple(each for each in finite if isinstance(each, str)))

    def write(self, real: Path) -> None:
        """Raises OSError."""
        digests = {_KINDS[section]: digest for section, digest in self.digests.items()}
        path = _record_path(real)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"file": self.identity, **digests, "finite": self.finite}, indent=1).encode())


def recall_digest(path: Path, section: int | None = None) -> FileDigest | None:
    """The digest remembered for the file as it now stands (real path, size, times, inode), or None.
    `section` as for `current_digest`."""
    real = Path(os.path.realpath(path))
    try:
        status = real.stat()
    except OSError:
        return None
    record, kind = _Record.read(real), section_of(status.st_size) if section is None else section
    if record is None or kind not in record.digests or record.identity != _identity(real, status):
        return None
    return FileDigest(record.digests[kind], status.st_size, kind)


def remember_digest(path: Path, digest: FileDigest, earlier: Path | None = None) -> None:
    """Remember the digest of the file as it now stands; where the cache cannot be written, the next start hashes. What
    was found in a file of that digest, which had its name, or the name `earlier`, is still known."""
    real, was = Path(os.path.realpath(path)), Path(os.path.realpath(earlier or path))
    records = [record for record in map(_Record.read, (was, real)) if record]
    kind, sha256 = digest.section, digest.sha256
    try:
        identity = _identity(real, real.stat())
        same = [each for each in records if each.digests.get(kind) == sha256]
        same += [each for each in records if each.identity == identity and kind not in each.digests]
        digests = {own: each for record in same for own, each in record.digests.items()}
        if was != real:
            _record_path(was).unlink(missing_ok=True)
        finite = next((record.finite for record in same), ())
        _Record(identity, digests | {kind: sha256}, finite).write(real)
    except OSError as error:
        logger.debug("the digest of %s is not remembered: %s", path, error)


def is_known_finite(path: Path, status: os.stat_result, tensors: Iterable[str]) -> bool:
    """Whether the values of these tensors were found to be finite in the file, whose `status` is that of its opening.
    False where its digest is not remembered, as that of a small file never is."""
    real = Path(os.path.realpath(path))
    record = _Record.read(real)
    return bool(record and record.identity == _identity(real, status) and _names_digest(tensors) in record.finite)


def remember_finite(path: Path, status: os.stat_result, tensors: Iterable[str]) -> None:
    """Note beside the remembered digest of the file, whose `status` is that of its opening, that the values of these
    tensors are finite. Where there is none, or the cache cannot be written, the next start looks again."""
    real = Path(os.path.realpath(path))
    record, found = _Record.read(real), _names_digest(tensors)
    try:
        if record and record.identity == _identity(real, status) == _identity(real, real.stat()):
            replace(record, finite=(*(each for each in record.finite if each != found), found)).write(real)
    except OSError as error:
        logger.debug("it is not remembered that the values of %s are finite: %s", path, error)


def current_digest(path: Path, trust_memory: bool = True, section: int | None = None) -> FileDigest:
    """The file's digest: remembered where the file is large and unchanged since, else computed and remembered. It is
    that of sections of `section` bytes (None: `section_of` its size; 0: of the whole). Raises OSError."""
    size = path.stat().st_size
    kind = section_of(size) if section is None else section
    if size < SMALL_FILE_BYTES:
        return hash_file(path, kind)
    remembered = recall_digest(path, kind) if trust_memory else None
    if remembered is not None:
        return remembered
    logger.info("Checking %s (%.0f MiB) by its digest", path, size / (1 << 20))
    before = _identity(path, path.stat())
    digest = hash_file(path, kind)
    if _identity(path, path.stat()) == before:  # a file that changed meanwhile has no one digest to remember
        remember_digest(path, digest)
    return digest


def _identity(path: Path, status: os.stat_result) -> dict[str, int | str]:
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}  # programs set back the first
    return {"path": str(path), "size": status.st_size, **times, "inode": status.st_ino}


def _names_digest(tensors: Iterable[str]) -> str:
    return hash_bytes(json.dumps(sorted(tensors)).encode())


def _record_path(real: Path) -> Path:
    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    return user_cache_directory() / "digests" / f"{name}.json"


class Cancelled(Exception):
    """The copy was stopped."""


def copy_hashed(
    source: Path,
    destination: Path,
    stop: threading.Event | None = None,
    advance: Callable[[int], None] | None = None,
    limit: int | None = None,
) -> FileDigest:
    """Copy an ordinary file in one pass that also hashes it; `advance` gets the bytes of each block.

    Only one block is in memory at a time. Raises OSError, also for more than `limit` bytes and for what is no ordinary
    file, or Cancelled once `stop` is set.
    """
    section = section_of(source.stat().st_size)
    hashing, size = _Hashing(section), 0
    with destination.open("xb", buffering=0) as writer:
        for block in file_blocks(source):
            if stop is not None and stop.is_set():
                raise Cancelled
            hashing.update(block)
            written = 0
            while written < len(block):
                written += writer.write(block[written:])
            size += written
            if limit is not None and size > limit:
                raise too_large(source, None, limit)
            if advance is not None:
                advance(written)
        os.fsync(writer.fileno())
    return FileDigest(hashing.hexdigest(), size, section)


def copy_published(source: Path, destination: Path) -> FileDigest:
    """`copy_hashed` for a file of a checkpoint that holds no weights, into a folder that is made if there is none."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    return copy_hashed(source, destination, limit=size_limit(source.name))
