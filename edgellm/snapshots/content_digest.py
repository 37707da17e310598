"""SHA-256 over a snapshot's content, computed by several threads.

One SHA-256 reads half a gigabyte to two gigabytes a second, less than a bus moves, and cannot be divided. So the
digest is that of a list: SHA-256 of the SHA-256s, 32 bytes each, of all sections of the content in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from edgellm.engines.processor_cores import usable_cores

DIGEST_BYTES = 32
_MOST_THREADS = 16


class Section(NamedTuple):
    """A part of a snapshot's image that is hashed by itself: `nbytes` from `offset` on, which are `groups` of the
    tensor `name`, from the group `first` on (the empty name: what is before the tensors)."""

    offset: int
    nbytes: int
    name: str = ""
    first: int = 0
    groups: int = 1


class RunningDigest:
    """Hashes the `sections` of `content` [n] uint8, which must not change meanwhile, in threads of its own; `finish`
    waits for them."""

    def __init__(self, content: np.ndarray, sections: Sequence[Section]) -> None:
        self._pool = ThreadPoolExecutor(max(1, min(usable_cores(), _MOST_THREADS, len(sections))), "edgellm-digest")
        self._digests = [
            self._pool.submit(section_digest, content[section.offset : section.offset + section.nbytes])
            for section in sections
        ]

    def finish(self) -> bytes:
        """The digest, 32 bytes."""
        try:
            return combined_digest(digest.result() for digest in self._digests)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Leave out what has not begun; no thread touches the content afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def content_digest(content: np.ndarray, sections: Sequence[Section]) -> bytes:
    """The digest of `content` [n] uint8."""
    return RunningDigest(content, sections).finish()


def section_digest(content: np.ndarray | memoryview) -> bytes:
    """The digest of one section's bytes."""
    return hashlib.sha256(content).digest()


def combined_digest(digests: Iterable[bytes]) -> bytes:
    """The digest of a content whose sections have these."""
    return hashlib.sha256(b"".join(digests)).digest()
