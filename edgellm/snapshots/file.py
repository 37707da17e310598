"""Snapshots on disk: written whole or not at all, read without trust; and the folder in which `edgellm cache build`
keeps them, within a budget, which several processes may share."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from edgellm.engines.errors import CheckpointError, explained
from edgellm.engines.formats.safetensors_file import SafetensorsFile, TensorInfo
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.formats.tensors import value_and_place
from edgellm.engines.model.states import is_recurrent, saved_dtype
from edgellm.errors import RequestError, SnapshotError
from edgellm.snapshots.binding import SnapshotBinding, binding_key
from edgellm.snapshots.snapshot import (
    BEGINNING,
    DIGEST,
    DIGEST_BYTES,
    FORMAT_VERSION,
    METADATA_KEY,
    PROMPT_KEY,
    STATE_PREFIX,
    TOKEN_IDS,
    Findings,
    Snapshot,
    SnapshotFacts,
    content_digest,
    content_findings,
)
from edgellm.snapshots.staging import SUFFIX, StagedFile, delete_file, file_identity, last_used, remove_abandoned, touch
from edgellm.snapshots.system_prompt import PromptRecord

DAMAGED, NO_SNAPSHOT, UNREADABLE, NOT_FINITE = "damaged", "no snapshot", "unreadable", "not finite"
_ADVICE = "Remove it and make it again: edgellm cache build"
_LENGTH_BYTES = 8
#: A file whose first bytes differ from `BEGINNING` by no more bits is a snapshot that was damaged there.
_MOST_FLIPPED_BITS = 8
#: Reasons for which `read_snapshot` refuses what is a snapshot all the same.
_OTHER_VERSIONS = ("old version", "future version")


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot to `path`, in place of what has the name, and return once it is on the disk and read back. At
    any moment before, also if power fails, `path` is what it was. Raises SnapshotError."""
    with explained(f"the snapshot {path} cannot be written", partial(SnapshotError, reason="not written")):
        path.parent.mkdir(parents=True, exist_ok=True)
        with StagedFile(path) as staged, ThreadPoolExecutor(1) as beside:
            examined = beside.submit(content_findings, snapshot.body, snapshot.sections)
            staged.file.write(snapshot.body)
            found = examined.result()
            if found.not_finite is not None:
                raise _not_finite(f"{path} is not written", snapshot, *found.not_finite, "not written")
            staged.file.write(found.digest)
            staged.sync()
            _check_written(staged.path, path, snapshot, found.digest)
            staged.commit()


def read_snapshot(path: Path) -> Snapshot:
    """Map a snapshot and check its structure; its content is not verified yet. Raises SnapshotError."""
    file = _map_file(path)
    try:
        facts, prompt = _read_metadata(path, file)
        _check_tensors(path, facts, file.tensors)
        whole = max(info.offset + info.nbytes for info in file.tensors.values())  # which the header was checked for
        content = file.bytes_of(TensorInfo("content", "uint8", (whole,), path, 0, whole))
    finally:
        file.close()  # the view keeps the map
    return Snapshot(facts, content, file.tensors, is_mapped=True, prompt=prompt)


def verify_snapshot(path: Path | None, snapshot: Snapshot, found: Findings | None = None) -> None:
    """Compare the content with its digest, and see that its values are finite, by what was `found` in it or (None) is
    now; raises SnapshotError."""
    if snapshot.is_verified:
        return
    if found is None:
        found = content_findings(snapshot.body, snapshot.sections)
    stored = snapshot.tensor(DIGEST).tobytes()
    if found.digest != stored:
        raise damaged(
            path or snapshot.facts.label,
            f"its content has the SHA-256 {found.digest.hex()[:16]}..., it says {stored.hex()[:16]}...",
        )
    if found.not_finite is not None:
        name = repr(snapshot.facts.label) if path is None else path
        raise _not_finite(f"{name} cannot be used", snapshot, *found.not_finite, NOT_FINITE)
    snapshot.is_verified = True


def check_binding(path: Path, snapshot: Snapshot, expected: SnapshotBinding) -> None:
    """Raise SnapshotError that names every difference from the `expected` binding."""
    if differences := snapshot.facts.binding.differences(expected):
        raise SnapshotError(
            f"the snapshot {path} was made otherwise: {'; '.join(differences.values())}. Make one for this model: "
            "edgellm cache build",
            f"other {next(iter(differences)).replace('_', ' ')}",
        )


def require_snapshot_file(path: Path) -> None:
    """Raise SnapshotError unless a file is a snapshot, of whatever format, or was one and is damaged.

    That is told by how an ordinary file begins; a link is none, wherever it leads. A header that can be read must have
    the text `METADATA_KEY` in its metadata. Of one that cannot, or that has it no more, the bytes behind the header's
    length must be `BEGINNING` but for `_MOST_FLIPPED_BITS` bits: so files are known that were cut behind it, or changed
    anywhere, and those are not of which nothing is left that tells.
    """
    try:
        _refuse_other_kinds(path, path.lstat().st_mode, "a snapshot")
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            begins = file.read(_LENGTH_BYTES + len(BEGINNING))[_LENGTH_BYTES:]
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(begins) == len(BEGINNING):
        flipped = int.from_bytes(begins, "little") ^ int.from_bytes(BEGINNING, "little")
        if bin(flipped).count("1") <= _MOST_FLIPPED_BITS:
            return
    try:
        read_snapshot(path)  # written by another program its header may have another order
    except SnapshotError as error:
        if error.reason not in _OTHER_VERSIONS:
            raise SnapshotError(
                f"{path} is no snapshot: it does not begin as one, nor as one that was damaged", NO_SNAPSHOT
            ) from error


def damaged(path: Path | str, cause: str) -> SnapshotError:
    """The error for a file that is not what was written."""
    return SnapshotError(f"the snapshot {path} is damaged: {cause}. {_ADVICE}", DAMAGED)


def too_large(snapshot: Snapshot, kind: str, budget: int) -> SnapshotError:
    """The error for a snapshot that is larger than a whole budget of bytes, of this `kind`."""
    return SnapshotError(
        f"the snapshot {snapshot.facts.label!r} takes {snapshot.nbytes:,} bytes, more than the whole {kind} budget of "
        f"{budget:,}: shorten the prompt or raise the budget",
        "too large",
    )


def _not_finite(what: str, snapshot: Snapshot, name: str, index: int, reason: str) -> SnapshotError:
    values = value_and_place(snapshot.tensor(name), snapshot.places[name].dtype, index)
    return SnapshotError(
        f"the snapshot {what}: the tensor {name!r} {list(snapshot.places[name].shape)} is {values}, expected finite "
        "numbers; a model computes others where it is damaged or its values are beyond the range of float16. Check it "
        "with edgellm info --verify, build it with --dtype bfloat16, then make the snapshot again: edgellm cache build",
        reason,
    )


def _map_file(path: Path) -> SafetensorsFile:
    try:
        _refuse_other_kinds(path, path.stat().st_mode, "a snapshot that edgellm cache build made")
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        return SafetensorsFile(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise _unreadable(path, error.__cause__) from error
        raise damaged(path, str(error)) from error


def _refuse_other_kinds(path: Path, mode: int, expected: str) -> None:
    if not stat.S_ISREG(mode):
        kind = "a link" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise SnapshotError(f"{path} is {kind}: expected {expected}", NO_SNAPSHOT)


def _unreadable(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"the snapshot {path} cannot be read: {error.strerror or error}", UNREADABLE)


def _read_metadata(path: Path, file: SafetensorsFile) -> tuple[SnapshotFacts, PromptRecord | None]:
    metadata = file.metadata if isinstance(file.metadata, dict) else {}
    text = metadata.get(METADATA_KEY)
    if not isinstance(text, str):
        raise SnapshotError(
            f"{path} holds no snapshot: its header has no text {METADATA_KEY!r} in __metadata__. Expected a file that "
            "edgellm cache build made",
            NO_SNAPSHOT,
        )
    values = JSONObject.parse(text.encode(), f"{path}: {METADATA_KEY}", _DamagedError, _ADVICE)
    version = values.get("format_version", "int")
    if version != FORMAT_VERSION:
        raise SnapshotError(
            f"the snapshot {path} has the format version {version}, this EdgeLLM reads {FORMAT_VERSION}. "
            "Make it again with this version: edgellm cache build",
            "future version" if version > FORMAT_VERSION else "old version",
        )
    facts, prompt = values.dataclass(SnapshotFacts, binding=SnapshotBinding), metadata.get(PROMPT_KEY)
    if prompt is None:
        return facts, None
    if not isinstance(prompt, str):
        raise damaged(path, f"{PROMPT_KEY} in its header is a {type(prompt).__name__}, expected text")
    try:
        return facts, PromptRecord.from_json(prompt)
    except RequestError as error:
        raise damaged(path, f"{PROMPT_KEY} in its header: {error}") from error


class _DamagedError(SnapshotError):
    """What `JSONObject` raises."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DAMAGED)


def _check_tensors(path: Path, facts: SnapshotFacts, tensors: dict[str, TensorInfo]) -> None:
    """Raise SnapshotError unless each tensor has the dtype and length in tokens that the facts say."""
    wanted: object
    found: object
    expected = {TOKEN_IDS: ("int32", (facts.tokens,)), DIGEST: ("uint8", (DIGEST_BYTES,))}
    for name in expected:
        if name not in tensors:
            raise damaged(path, f"the tensor {name!r} is missing")
    for name, info in tensors.items():
        if name in expected:
            wanted, found = expected[name], (info.dtype, info.shape)
        elif is_recurrent(name.removeprefix(STATE_PREFIX)) and name.startswith(STATE_PREFIX) and len(info.shape) == 3:
            wanted, found = "float32", info.dtype
        elif (dtype := _rows_dtype(name, facts.binding)) and len(info.shape) == 3:
            rows = facts.tokens - name.startswith("draft.")
            if name.startswith("base.") and 0 < facts.window_rows == info.shape[1] < rows:
                rows = facts.window_rows
            wanted, found = (dtype, rows), (info.dtype, info.shape[1])
        else:
            raise damaged(path, f"the tensor {name!r:.80} of shape {list(info.shape)} belongs to no snapshot")
        if wanted != found:
            raise damaged(path, f"the tensor {name!r} has {found}, expected {wanted}, as its metadata say")
    if any(info.offset > tensors[DIGEST].offset for info in tensors.values()):
        raise damaged(path, f"the tensor {DIGEST!r} is not the last")


def _rows_dtype(name: str, binding: SnapshotBinding) -> str | None:
    """The dtype of the rows under a name; None for a name of none."""
    model, _, own = name.partition(".")
    kinds = {"base": binding.kv_cache, "draft": "compute"}
    dtype = saved_dtype(own, kinds[model]) if model in kinds and not is_recurrent(own) else None
    return binding.dtype if dtype == "compute" else dtype


def _check_written(staged: Path, path: Path, snapshot: Snapshot, expected: bytes) -> None:
    """Read what was written from the disk; raises SnapshotError where it is not what it should be."""
    content = np.memmap(staged, np.uint8, "r")
    body, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    whole = len(content) == snapshot.nbytes and digest.tobytes() == expected
    if not whole or content_digest(body, snapshot.sections) != expected:
        raise SnapshotError(
            f"the snapshot {path} did not read back as it was written, and nothing was left behind: check disk and "
            "memory",
            "not written",
        )


logger = logging.getLogger("edgellm.snapshots")

DISK_BUDGET = 8 << 30


class SnapshotFolder:
    """Files take up to `budget` bytes: what any process used least recently goes first. What cannot be used stays, is
    not counted, and is warned of once, until it changes."""

    def __init__(self, path: Path, budget: int = DISK_BUDGET) -> None:
        self.path, self.budget = path, budget
        self._refused: dict[Path, tuple[int, ...] | None] = {}
        remove_abandoned(path)
        self._files()

    def path_of(self, snapshot: Snapshot) -> Path:
        """The file that `save` writes."""
        return self.path / f"{binding_key(snapshot.facts.binding, snapshot.token_ids)}{SUFFIX}"

    def save(self, snapshot: Snapshot, replaced: Sequence[Path] = ()) -> tuple[Path, list[Path]]:
        """Write a snapshot; its path, and those of files that were removed to make room. It is on the disk and read
        back when this returns; only then the files that are `replaced` by it are deleted. Raises SnapshotError."""
        path = self.path_of(snapshot)
        if snapshot.nbytes > self.budget:
            raise too_large(snapshot, "disk", self.budget)
        write_snapshot(path, snapshot)
        touch(path)
        for old in replaced:
            if old != path:
                delete_file(old)
        return path, self._make_room(path)

    def _make_room(self, kept: Path) -> list[Path]:
        """Delete files, the least recently used first, until the rest fits the budget; `kept` always stays."""
        files, removed = self._files(kept), list[Path]()
        size = sum(each.nbytes for each in files.values())
        for path, snapshot in files.items():
            if size > self.budget and path != kept:
                logger.info("snapshot %r is deleted: the disk budget is used up", snapshot.facts.label)
                removed.append(path)
                size -= snapshot.nbytes
                with suppress(SnapshotError):
                    delete_file(path)
        return removed

    def _files(self, *first: Path) -> dict[Path, Snapshot]:
        """What can be used: the `first` files, then the others, the least recently used first."""
        found: dict[Path, Snapshot] = {}
        known: dict[str, Path] = {}
        others = set(self.path.glob(f"*{SUFFIX}")).difference(first)
        for path in (*first, *sorted(others, key=last_used)):
            identity = file_identity(path)
            if self._refused.get(path, ()) == identity:
                continue
            try:
                snapshot = read_snapshot(path)
                same = known.setdefault(self.path_of(snapshot).name, path)
                if same != path:
                    raise SnapshotError(f"{path} holds the same snapshot as {same}: remove one", "duplicate")
                found[path] = snapshot
            except SnapshotError as error:
                logger.warning("%s", error)
                self._refused[path] = identity
        return found
