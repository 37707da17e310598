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

from edgellm.engines.formats.tensors import STORAGE
from edgellm.kernels.compilations import usable_cores
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


class Findings(NamedTuple):
    """The digest of a section or a content, 32 bytes, and its first value that is infinite or NaN, if there is one: its
    tensor's name and its index there, in C order."""

    digest: bytes
    not_finite: tuple[str, int] | None = None


def content_findings(content: np.ndarray, sections: Sequence[Section]) -> Findings:
    """What threads find in `content` [n] uint8, which must not change meanwhile."""
    parts = (content[section.offset : section.offset + section.nbytes] for section in sections)
    with ThreadPoolExecutor(max(1, min(usable_cores(), _MOST_THREADS, len(sections))), "edgellm-digest") as pool:
        return combined_findings(pool.map(examine, parts, sections))


def content_digest(content: np.ndarray, sections: Sequence[Section]) -> bytes:
    """The digest of `content` [n] uint8, whatever its values are."""
    return content_findings(content, [section._replace(dtype="") for section in sections]).digest


def examine(content: np.ndarray, section: Section) -> Findings:
    """Hash a section's bytes `content` [n] uint8 and look at its values while they are in the processor's cache."""
    digest = section_digest(content)
    if not section.dtype:
        return Findings(digest)
    values = content.view(STORAGE[section.dtype])
    found = first_not_finite(values)
    return Findings(
        digest, (section.name, section.first * (len(values) // section.groups) + found) if found >= 0 else None
    )


def section_digest(content: np.ndarray | memoryview) -> bytes:
    """The digest of one section's bytes."""
    return hashlib.sha256(content).digest()


def combined_findings(sections: Iterable[Findings]) -> Findings:
    """What is found in a content by what is in its sections, in their order."""
    found = list(sections)
    not_finite = next((each.not_finite for each in found if each.not_finite is not None), None)
    return Findings(hashlib.sha256(b"".join(each.digest for each in found)).digest(), not_finite)
