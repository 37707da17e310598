"""Weights into an engine directory: copied or linked, and hashed on the way."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from edgellm.engines.directories.digests import BLOCK_BYTES, FileDigest, current_digest


class Cancelled(Exception):
    """The copy was told to stop."""


def copy_hashed(
    source: Path, destination: Path, stop: threading.Event, advance: Callable[[int], None] | None = None
) -> FileDigest:
    """Copy a file in one pass that also hashes it; `advance` gets the bytes of each block.

    Only one block is in memory at a time. Raises OSError, or Cancelled once `stop` is set.
    """
    digest, size = hashlib.sha256(), 0
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    with source.open("rb", buffering=0) as reader, destination.open("xb", buffering=0) as writer:
        while count := reader.readinto(buffer):
            if stop.is_set():
                raise Cancelled
            block = view[:count]
            digest.update(block)
            written = 0
            while written < count:
                written += writer.write(block[written:])
            size += count
            if advance is not None:
                advance(count)
        os.fsync(writer.fileno())
    return FileDigest(digest.hexdigest(), size)


class WeightTransfer:
    """Copies (or links) and hashes files in a thread of its own, while plans are built; `seconds` that it took.

    `sources` has the files by the names that they get below `destination`, in folders that are there.
    """

    def __init__(
        self,
        sources: Mapping[str, Path],
        destination: Path,
        link: bool,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self._sources = dict(sources)
        self._destination = destination
        self._link = link
        self._advance = advance
        self.seconds = 0.0
        self._stop = threading.Event()
        self._result: Future[dict[str, FileDigest]] = Future()
        self._thread = threading.Thread(target=self._run, name="edgellm-weights", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def has_failed(self) -> bool:
        """Whether it has ended with an error, so that other work is in vain."""
        return self._result.done() and self._result.exception() is not None

    def result(self) -> dict[str, FileDigest]:
        """Wait for the end: digests by name. Raises OSError."""
        return self._result.result()

    def cancel(self) -> None:
        """Stop after the present block and wait for the thread, so that it writes nothing more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            digests = {name: self._transfer(name, source) for name, source in self._sources.items()}
            self.seconds = time.perf_counter() - started
            self._result.set_result(digests)
        except BaseException as error:  # it belongs to the thread that asks for the result
            self._result.set_exception(error)

    def _transfer(self, name: str, source: Path) -> FileDigest:
        target = self._destination / name
        if not self._link:
            return copy_hashed(source, target, self._stop, self._advance)
        if self._stop.is_set():
            raise Cancelled
        target.symlink_to(os.path.realpath(source))
        digest = current_digest(target)
        if self._advance is not None:
            self._advance(digest.size)
        return digest
