"""Snapshots on disk: written whole or not at all, read without trust."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from edgellm.engines.directories.strict_json import JSONObject
from edgellm.errors import SnapshotError
from edgellm.snapshots.binding import SnapshotBinding
from edgellm.snapshots.content_digest import DIGEST_BYTES, RunningDigest, content_digest
from edgellm.snapshots.snapshot import (
    DIGEST,
    FORMAT_VERSION,
    METADATA_KEY,
    STATE_PREFIX,
    TOKEN_IDS,
    Snapshot,
    SnapshotFacts,
    TensorPlace,
)
from edgellm.snapshots.staged_file import StagedFile

DAMAGED, NO_SNAPSHOT, UNREADABLE = "damaged", "no snapshot", "unreadable"
_ADVICE = "Remove it and make it again: edgellm cache build"
_ROWS_NAME = re.compile(r"(base|draft)\.[kv]_cache_(0|[1-9][0-9]{0,3})")
_WRITE_BYTES = 8 << 20


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Write a snapshot to `path`, in place of what has the name, and return once it is on the disk and read back.

    At any moment before, also if power fails, `path` is what it was. Raises SnapshotError.
    """
    digest = RunningDigest(snapshot.body, snapshot.sections)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with StagedFile(path) as staged:
            body = memoryview(snapshot.body)
            for start in range(0, len(body), _WRITE_BYTES):
                staged.write(body[start : start + _WRITE_BYTES])
            expected = digest.finish()
            staged.write(memoryview(expected))
            staged.sync()
            _check_written(staged.path, path, snapshot, expected)
            staged.commit()
    except OSError as error:
        raise SnapshotError(
            f"the snapshot {path} cannot be written: {error.strerror or error}", "not written"
        ) from error
    finally:
        digest.cancel()


def read_snapshot(path: Path) -> Snapshot:
    """Map a snapshot and check its structure; its content is not verified yet. Raises SnapshotError."""
    file = _map_file(path)
    try:
        facts = _read_facts(path, file)
        places = _checked_places(path, facts, file.tensors)
        whole = _size(file)
        content = file.bytes_of(TensorInfo("content", "uint8", (whole,), path, 0, whole))
    finally:
        file.close()  # the view keeps the map
    return Snapshot(facts, content, places, is_mapped=True)


def verify_snapshot(path: Path | None, snapshot: Snapshot, found: bytes | None = None) -> None:
    """Compare the content with its digest, which was `found` or (None) is computed now; raises SnapshotError."""
    if snapshot.is_verified:
        return
    if found is None:
        found = content_digest(snapshot.body, snapshot.sections)
    stored = snapshot.tensor(DIGEST).tobytes()
    if found != stored:
        raise damaged(
            path or snapshot.facts.label,
            f"its content has the SHA-256 {found.hex()[:16]}..., it says {stored.hex()[:16]}...",
        )
    snapshot.is_verified = True


def check_binding(path: Path | None, snapshot: Snapshot, expected: SnapshotBinding) -> None:
    """Raise SnapshotError that names every difference from the `expected` binding."""
    differences = snapshot.facts.binding.differences(expected)
    if differences:
        name = repr(snapshot.facts.label) if path is None else path
        raise SnapshotError(
            f"the snapshot {name} was made otherwise: {'; '.join(differences.values())}. Make one for this model: "
            "edgellm cache build",
            f"other {next(iter(differences)).replace('_', ' ')}",
        )


def damaged(path: Path | str, cause: str) -> SnapshotError:
    """The error for a file that is not what was written."""
    return SnapshotError(f"the snapshot {path} is damaged: {cause}. {_ADVICE}", DAMAGED)


def _map_file(path: Path) -> SafetensorsFile:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise SnapshotError(f"{path} is {kind}: expected a snapshot that edgellm cache build made", NO_SNAPSHOT)
    try:
        return SafetensorsFile(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise _unreadable(path, error.__cause__) from error
        raise damaged(path, str(error)) from error


def _unreadable(path: Path, error: OSError) -> SnapshotError:
    return SnapshotError(f"the snapshot {path} cannot be read: {error.strerror or error}", UNREADABLE)


def _size(file: SafetensorsFile) -> int:
    """The file's size as its header, which was checked, says: the last tensor ends there."""
    return max((info.offset + info.nbytes for info in file.tensors.values()), default=0)


def _read_facts(path: Path, file: SafetensorsFile) -> SnapshotFacts:
    start = min((info.offset for info in file.tensors.values()), default=0)
    header = file.bytes_of(TensorInfo("header", "uint8", (start,), path, 0, start)).tobytes()
    length = int.from_bytes(header[:8], "little")
    try:
        metadata = json.loads(header[8 : 8 + length]).get("__metadata__") if header else None
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is not valid JSON ({error})") from error
    text = metadata.get(METADATA_KEY) if isinstance(metadata, dict) else None
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
            f"the snapshot {path} has the format version {version}, this EdgeLLM reads {FORMAT_VERSION}. Make it "
            "again with this version: edgellm cache build",
            "future version" if version > FORMAT_VERSION else "old version",
        )
    return values.dataclass(SnapshotFacts, binding=SnapshotBinding)


class _DamagedError(SnapshotError):
    """What `JSONObject` raises."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DAMAGED)


def _checked_places(path: Path, facts: SnapshotFacts, tensors: dict[str, TensorInfo]) -> dict[str, TensorPlace]:
    """The tensors, each of the dtype and length in tokens that the facts say; raises SnapshotError."""
    wanted: object
    found: object
    expected = {TOKEN_IDS: ("int32", (facts.tokens,)), DIGEST: ("uint8", (DIGEST_BYTES,))}
    for name in expected:
        if name not in tensors:
            raise damaged(path, f"the tensor {name!r} is missing")
    for name, info in tensors.items():
        if name in expected:
            wanted, found = expected[name], (info.dtype, info.shape)
        elif name.startswith(STATE_PREFIX):
            wanted, found = facts.binding.dtype, info.dtype
        elif (match := _ROWS_NAME.fullmatch(name)) and len(info.shape) == 3:
            rows = facts.tokens - (match[1] == "draft")
            wanted, found = (facts.binding.dtype, rows), (info.dtype, info.shape[1])
        else:
            raise damaged(path, f"the tensor {name!r:.80} of shape {list(info.shape)} belongs to no snapshot")
        if wanted != found:
            raise damaged(path, f"the tensor {name!r} has {found}, expected {wanted}, as its metadata say")
    if any(info.offset > tensors[DIGEST].offset for info in tensors.values()):
        raise damaged(path, f"the tensor {DIGEST!r} is not the last")
    return {name: TensorPlace(info.dtype, info.shape, info.offset) for name, info in tensors.items()}


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
