"""What `edgellm.json` says of a directory, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from edgellm.engines.formats.digests import FileDigest
from edgellm.engines.formats.strict_formats import ADDED_LATER
from edgellm.kernels.atomic_write import write_atomically

DESCRIPTION_NAME = "edgellm.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ModelSource:
    """Where a checkpoint comes from: the hub's `repository` ORG/NAME, the `revision` that was asked for, the `commit`
    (40 hexadecimal digits) that it was then and, of a GGUF file, its name there."""

    repository: str
    revision: str
    commit: str
    file: str = field(default="", metadata=ADDED_LATER)

    def __str__(self) -> str:
        name = f"{self.repository}:{self.file}" if self.file else self.repository
        return f"{name}, revision {self.revision}, commit {self.commit}"


def file_values(files: Mapping[str, FileDigest], folder: str = "") -> dict[str, Any]:
    """What a description says of the files below a `folder`, as "draft/", by their names there."""

    def value(digest: FileDigest) -> dict[str, Any]:
        section = {"section": digest.section} if digest.section else {}
        return {"sha256": digest.sha256, "size": digest.size, **section}

    return {name[len(folder) :]: value(digest) for name, digest in files.items() if name.startswith(folder)}


def write_description(path: Path, data: bytes) -> None:
    """Write `edgellm.json` into a directory, whole or not at all; raises OSError."""
    write_atomically(path / DESCRIPTION_NAME, data)


def edgellm_version() -> str:
    """The installed version of EdgeLLM."""
    try:
        return metadata.version("edgellm")
    except metadata.PackageNotFoundError:
        return "unknown"
