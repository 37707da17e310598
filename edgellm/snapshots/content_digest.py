"""SHA-256 over a snapshot's content, computed by several threads while the content is copied.

One SHA-256 reads half a gigabyte to two gigabytes a second, less than a bus moves, and cannot be divided. So the
digest is that of a list: SHA-256 of the SHA-256s, 32 bytes each, of all blocks of 1 MiB in their order.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

DIGEST_BYTES = 32
BLOCK_BYTES = 1 << 20
_MOST_THREADS = 16


class RunningDigest:
    """Hashes `content` [n] uint8, which must not change meanwhile, in threads of its own; `finish` waits for them."""

    def __init__(self, content: np.ndarray) -> None:
        starts = range(0, len(content), BLOCK_BYTES)
        threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1, len(starts)))
        self._pool = ThreadPoolExecutor(threads, "edgellm-digest")
        self._blocks = [self._pool.submit(_block_digest, content[start : start + BLOCK_BYTES]) for start in starts]

    def finish(self) -> bytes:
        """The digest, 32 bytes."""
        try:
            return hashlib.sha256(b"".join(block.result() for block in self._blocks)).digest()
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Leave out what has not begun; no thread touches the content afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def content_digest(content: np.ndarray) -> bytes:
    """The digest of `content` [n] uint8."""
    return RunningDigest(content).finish()


def _block_digest(block: np.ndarray) -> bytes:
    return hashlib.sha256(block).digest()
