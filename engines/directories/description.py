"""What `edgellm.json` says of a directory, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from edgellm.engines.directories.kernel_folders import description_data
from edgellm.engines.formats.digests import FileDigest
from edgellm.engines.formats.strict_formats import ADDED_LATER, plain_values
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.vision import VisionConfig
from edgellm.kernels.atomic_write import write_atomically

DESCRIPTION_NAME = "edgellm.json"
FORMAT_VERSION = 1
#: What a description may have beside what each has.
DRAFT_KEY, LORA_KEY, VISION_KEY, TOOL_KEY, SOURCE_KEY = "draft", "lora", "vision", "tool_format", "source"


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


class BuiltParts(NamedTuple):
    """What a description says of the parts beside a model: the configuration and the files of the draft head, rank and
    files of each LoRA adapter, the vision encoder's configuration and its own files, if it has any."""

    draft: tuple[DraftConfig, Mapping[str, FileDigest]] | None
    adapters: Mapping[str, tuple[int, Mapping[str, FileDigest]]]
    vision: tuple[VisionConfig, Mapping[str, FileDigest] | None] | None


def description_bytes(
    config: DecoderConfig,
    dtype: str,
    attention: str,
    limits: EngineLimits,
    files: Mapping[str, FileDigest],
    parts: BuiltParts,
    tool_format: str | None,
    source: ModelSource | None,
) -> bytes:
    """The content of `edgellm.json`; `files` are those of the model itself."""
    draft, adapters, vision = parts
    values: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "created_with": edgellm_version(),
        "config": plain_values(config),
        "dtype": dtype,
        "attention": attention,
        "limits": plain_values(limits),
        "files": _file_values(files),
    }
    if draft is not None:
        values[DRAFT_KEY] = {"config": plain_values(draft[0]), "files": _file_values(draft[1])}
    if adapters:
        values[LORA_KEY] = {name: {"rank": rank, "files": _file_values(own)} for name, (rank, own) in adapters.items()}
    if vision is not None:
        values[VISION_KEY] = {"config": plain_values(vision[0])}
        if vision[1] is not None:
            values[VISION_KEY]["files"] = _file_values(vision[1])
    if tool_format is not None:
        values[TOOL_KEY] = tool_format
    if source is not None:
        values[SOURCE_KEY] = plain_values(source)
    return description_data(values)


def _file_values(files: Mapping[str, FileDigest]) -> dict[str, Any]:
    def value(digest: FileDigest) -> dict[str, Any]:
        section = {"section": digest.section} if digest.section else {}
        return {"sha256": digest.sha256, "size": digest.size, **section}

    return {name: value(digest) for name, digest in files.items()}


def write_description(path: Path, data: bytes) -> None:
    """Write `edgellm.json` into a directory, whole or not at all; raises OSError."""
    write_atomically(path / DESCRIPTION_NAME, data)


def edgellm_version() -> str:
    """The installed version of EdgeLLM."""
    try:
        return metadata.version("edgellm")
    except metadata.PackageNotFoundError:
        return "unknown"
