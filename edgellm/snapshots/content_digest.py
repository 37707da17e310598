"""SHA-256 over a snapshot's content, and the search for infinities and NaN in its values, by several threads.

One SHA-256 reads half a gigabyte to two gigabytes a second, less than a bus moves, and cannot be divided. So the
digest is that of a list: SHA-256 of the SHA-256s, 32 bytes each, of all sections of the content in their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from edgellm.engines.backends.platform import usable_cores
from edgellm.engines.formats.tensors import STORAGE
from edgellm.kernels.sampling.twin import first_not_finite

DIGEST_BYTES = 32
_MOST_THREADS = 16


class Section(NamedTuple):
    """A part of a snapshot's image that is hashed by itself: `nbytes` from `offset` on, which are `groups` of the
    tensor `name`, from the group `first` on (the empty name: what is before the tensors). Of the format `dtype` (a key
    of `STORAGE`) are values that must be finite; the empty text: there are none."""

    offset: int
    nbytes: int
    name: str = ""
    first: int = 0
    groups: int = 1
    dtype: str = ""


class SectionFindings(NamedTuple):
    """The digest of a section, and the tensor's index, in C order, of its first value that is infinite or NaN (-1:
    none)."""

    digest: bytes
    not_finite: int = -1


class Findings(NamedTuple):
    """The digest of a content, 32 bytes, and the first value that is infinite or NaN, if there is one: its tensor's
    name and its index there, in C order."""

    digest: bytes
    not_finite: tuple[str, int] | None = None


class RunningDigest:
    """Examines the `sections` of `content` [n] uint8, which must not change meanwhile, in threads of its own; `finish`
    waits for them."""

    def __init__(self, content: np.ndarray, sections: Sequence[Section]) -> None:
        self._pool = ThreadPoolExecutor(max(1, min(usable_cores(), _MOST_THREADS, len(sections))), "edgellm-digest")
        self._sections = sections
        self._findings = [
            self._pool.submit(examine, content[section.offset : section.offset + section.nbytes], section)
            for section in sections
        ]

    def finish(self) -> Findings:
        """What was found."""
        try:
            return combined_findings(zip(self._sections, (each.result() for each in self._findings), strict=True))
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Leave out what has not begun; no thread touches the content afterwards."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def content_findings(content: np.ndarray, sections: Sequence[Section]) -> Findings:
    """What is found in `content` [n] uint8."""
    return RunningDigest(content, sections).finish()


def content_digest(content: np.ndarray, sections: Sequence[Section]) -> bytes:
    """The digest of `content` [n] uint8, whatever its values are."""
    return content_findings(content, [section._replace(dtype="") for section in sections]).digest


def examine(content: np.ndarray, section: Section) -> SectionFindings:
    """Hash a section's bytes `content` [n] uint8 and look at its values while they are in the processor's cache."""
    digest = section_digest(content)
    if not section.dtype:
        return SectionFindings(digest)
    values = content.view(STORAGE[section.dtype])
    found = first_not_finite(values)
    return SectionFindings(digest, found if found < 0 else section.first * (len(values) // section.groups) + found)


def section_digest(content: np.ndarray | memoryview) -> bytes:
    """The digest of one section's bytes."""
    return hashlib.sha256(content).digest()


def combined_findings(found: Iterable[tuple[Section, SectionFindings]]) -> Findings:
    """What is found in a content that consists of these sections, in their order."""
    sections = list(found)
    not_finite = ((section.name, each.not_finite) for section, each in sections if each.not_finite >= 0)
    digest = hashlib.sha256(b"".join(each.digest for _, each in sections)).digest()
    return Findings(digest, next(not_finite, None))
