"""A snapshot's content: one safetensors image, the same bytes in memory and on disk.

Header (`__metadata__.edgellm_snapshot` is JSON: `SnapshotFacts`, and beside it `edgellm_prompt`, where there is one:
`PromptRecord`), then the tensors without holes, the rows first:
`base.k_cache_0` [n_kv, N, head_dim] and so on, `draft.k_cache_0` [n_kv, N - 1, head_dim] (of int8 also their scales,
`base.k_scale_0` [n_kv, N, 1] float32), recurrent states after N - 1 tokens under `base.state.*` (float32; see
`edgellm.engines.runners.states.ModelStates.saved`), so that N tokens are of use for a prompt of them alone, too,
`token_ids` [N] int32, and last `sha256` [32] uint8, the `content_digest` of every byte before it.

One SHA-256 reads half a gigabyte to two gigabytes a second, less than a bus moves, and cannot be divided. So the digest
is that of a list: SHA-256 of the SHA-256s, 32 bytes each, of all `Snapshot.sections` in their order, which threads hash
side by side, and search for infinities and NaN.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgellm.engines.formats.safetensors_file import TensorInfo, file_header
from edgellm.engines.formats.strict_formats import bounded, canonical_json, plain_values
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.model.limits import LARGEST_CONTEXT, MOST_GPUS
from edgellm.kernels.compilations import usable_cores
from edgellm.kernels.sampling.twin import first_not_finite
from edgellm.snapshots.binding import SnapshotBinding
from edgellm.snapshots.system_prompt import PromptRecord

FORMAT_VERSION = 3
METADATA_KEY, PROMPT_KEY = "edgellm_snapshot", "edgellm_prompt"
TOKEN_IDS, DIGEST = "token_ids", "sha256"
STATE_PREFIX = "base.state."
#: NumPy's dtype of a tensor by the project's name of its dtype.
NUMPY_DTYPES: dict[str, np.dtype] = STORAGE | {name: np.dtype(name) for name in ("int32", "int8", "uint8")}

#: How every snapshot's header begins, behind the 8 bytes of its length; damaged files are known by it.
BEGINNING = json.dumps({"__metadata__": {METADATA_KEY: "{"}}, separators=(",", ":")).encode()[: -len('"}}')]
#: The tensors begin at a multiple of it, in bytes.
_ALIGNMENT = 64
#: A section is hashed by one thread, and copied in one piece.
_SECTION_BYTES = 2 << 20
DIGEST_BYTES, _MOST_THREADS = 32, 16


@dataclass(frozen=True)
class SnapshotFacts:
    """What a snapshot says of itself: `tokens` is N, `created` the time (ISO 8601, UTC), `model` and `label` are for
    people. Layers that look back on a window have the latest `window_rows` rows at most (0: there are none). So many
    `gpus` made it: another number sums in another order, and its rows may differ in their last bits."""

    format_version: int
    tokens: int
    binding: SnapshotBinding
    label: str
    model: str
    created: str
    created_with: str
    window_rows: int = field(default=0, metadata=bounded(2 * LARGEST_CONTEXT, True))
    gpus: int = field(default=1, metadata=bounded(MOST_GPUS, True))


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


class Snapshot:
    """Facts, and the image `content` [bytes] uint8 with its tensors' places by name; in memory it has no file.

    `is_verified` says that the content is known to be what was made: it was made here, or agrees with its digest.
    `is_mapped` says that it is a file's memory map rather than `Backend.host_memory`. `prompt` is what the tokens were
    rendered from, None where they are no system prompt's.
    """

    def __init__(
        self,
        facts: SnapshotFacts,
        content: np.ndarray,
        places: Mapping[str, TensorInfo],
        is_mapped: bool,
        prompt: PromptRecord | None = None,
    ) -> None:
        self.facts, self.content, self.places, self.prompt = facts, content, places, prompt
        self.is_mapped = is_mapped
        self.is_verified = not is_mapped
        self._views: dict[str, np.ndarray] = {}

    @classmethod
    def allocate(
        cls,
        facts: SnapshotFacts,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        allocate: Callable[[int], np.ndarray],
        prompt: PromptRecord | None = None,
    ) -> Snapshot:
        """An image with room for `tensors` (dtype, shape), which the caller fills; `allocate(n)` gives [n] uint8."""
        metadata = {METADATA_KEY: canonical_json(plain_values(facts)).decode()}
        if prompt is not None:
            metadata[PROMPT_KEY] = prompt.to_json()
        ends = {TOKEN_IDS: ("int32", (facts.tokens,)), DIGEST: ("uint8", (DIGEST_BYTES,))}
        header, places = file_header(Path(), {**tensors, **ends}, metadata, _ALIGNMENT)
        content = allocate(places[DIGEST].offset + DIGEST_BYTES)
        content[: len(header)] = np.frombuffer(header, np.uint8)
        return cls(facts, content, places, is_mapped=False, prompt=prompt)

    def unread(self, allocate: Callable[[int], np.ndarray]) -> Snapshot:
        """Room for the same in memory of its own, to be filled and verified; `allocate(n)` gives [n] uint8."""
        snapshot = Snapshot(self.facts, allocate(self.nbytes), self.places, False, self.prompt)
        snapshot.is_verified = False
        return snapshot

    @property
    def body(self) -> np.ndarray:
        """Every byte but the digest."""
        return self.content[:-DIGEST_BYTES]

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The body, in order: what is before the tensors, and each tensor in pieces of up to 2 MiB (but at least one)
        of what its first axis counts."""
        places = sorted((place.offset, name, place) for name, place in self.places.items() if name != DIGEST)
        found = [Section(0, places[0][0])]
        for offset, name, place in places:
            groups = place.shape[0] if place.shape and place.nbytes else 1
            dtype = place.dtype if place.dtype in STORAGE else ""
            each, first = place.nbytes // groups, 0
            while first < groups and place.nbytes:
                count = min(groups - first, max(1, _SECTION_BYTES // each))
                found.append(Section(offset + first * each, count * each, name, first, count, dtype))
                first += count
        return tuple(found)

    @property
    def nbytes(self) -> int:
        return len(self.content)

    @cached_property
    def token_ids(self) -> np.ndarray:
        """[N] int32."""
        return self.tensor(TOKEN_IDS).copy()

    @property
    def rows(self) -> list[str]:
        """Names of the tensors that hold KV rows."""
        return [name for name in self.places if name not in (TOKEN_IDS, DIGEST) and not name.startswith(STATE_PREFIX)]

    @property
    def states(self) -> list[str]:
        """Names of the tensors that hold recurrent states; with any, all tokens but the last are reused or none."""
        return [name for name in self.places if name.startswith(STATE_PREFIX)]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as a view of the content, bfloat16 as uint16."""
        if name not in self._views:
            place = self.places[name]
            data = self.content[place.offset : place.offset + place.nbytes]
            self._views[name] = data.view(NUMPY_DTYPES[place.dtype]).reshape(place.shape)
        return self._views[name]


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
    index = section.first * (len(values) // section.groups) + found
    return Findings(digest, (section.name, index) if found >= 0 else None)


def section_digest(content: np.ndarray | memoryview) -> bytes:
    """The digest of one section's bytes."""
    return hashlib.sha256(content).digest()


def combined_findings(sections: Iterable[Findings]) -> Findings:
    """What is found in a content by what is in its sections, in their order."""
    found = list(sections)
    not_finite = next((each.not_finite for each in found if each.not_finite is not None), None)
    return Findings(hashlib.sha256(b"".join(each.digest for each in found)).digest(), not_finite)
