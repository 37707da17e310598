"""What an engine directory may hold beside its language model, each in a folder of its own, and how it is described."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.directories.digests import FileDigest
from edgellm.engines.directories.strict_json import JSONObject
from edgellm.engines.lora.adapter import ADAPTER_FILES, LoraAdapter, adapter_digest
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.draft_config import FEATURE_NORMS, GENERATIONS, DraftConfig
from edgellm.engines.model.vision import ACTIVATIONS, VISION_FAMILIES, VisionConfig

#: Where the draft head lies in an engine directory.
DRAFT_FOLDER = "draft"
#: Where a vision encoder lies that was published apart from its language model.
VISION_FOLDER = "vision"
#: Where LoRA adapters lie, each in a folder that bears its name.
LORA_FOLDER = "lora"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: The folder of further chat templates (`tool_use.jinja`), each a file of the model.
TEMPLATE_FOLDER = "additional_chat_templates"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class EngineDraft:
    """The draft head of an engine directory: its configuration and the digests of its files, by name in `path`."""

    path: Path
    config: DraftConfig
    files: Mapping[str, FileDigest]

    def checkpoint(self) -> Checkpoint:
        """The weights, memory-mapped anew: the caller closes them. Raises CheckpointError."""
        return Checkpoint.open(self.path)


@dataclass(frozen=True, eq=False)
class EngineVision:
    """The vision encoder of an engine directory. One that was published apart has `files`, by name in `path`; else it
    is in the model's own files (`files` is None)."""

    path: Path
    config: VisionConfig
    files: Mapping[str, FileDigest] | None = None

    def checkpoint(self) -> Checkpoint:
        """The weights, memory-mapped anew: the caller closes them. Raises CheckpointError."""
        return Checkpoint.open(self.path)


@dataclass(frozen=True, eq=False)
class EngineAdapter:
    """A LoRA adapter of an engine directory: its largest rank and the digests of its files, by name in `path`."""

    path: Path
    rank: int
    files: Mapping[str, FileDigest]

    @property
    def digest(self) -> str:
        """That of the `LoraAdapter` which `read` gives."""
        return adapter_digest({name: file.sha256 for name, file in self.files.items()})

    def read(self, config: DecoderConfig) -> LoraAdapter:
        """The adapter's matrices; raises AdapterError."""
        return LoraAdapter.read(self.path, config)


def parse_draft(folder: Path, values: JSONObject) -> EngineDraft:
    """The section "draft"."""
    values.refuse_other_keys("config", "files")
    config = values.object("config").dataclass(DraftConfig, decoder=DecoderConfig)
    for key, choices in (("generation", GENERATIONS), ("feature_norm", FEATURE_NORMS)):
        choice(values.object("config"), key, choices)
    return EngineDraft(folder, config, parse_files(values.object("files")))


def parse_adapters(folder: Path, values: JSONObject) -> dict[str, EngineAdapter]:
    """The section "lora"."""
    adapters = {}
    for name in values.values:
        if not is_adapter_name(name):
            raise values.error(f"{name!r} is not a plain name")
        entry = values.object(name)
        entry.refuse_other_keys("rank", "files")
        files = parse_digests(entry.object("files"))
        if set(files) != set(ADAPTER_FILES):
            raise entry.error(f"expected the files {' and '.join(ADAPTER_FILES)}")
        adapters[name] = EngineAdapter(folder / name, entry.get("rank", "int"), files)
    return adapters


def parse_vision(path: Path, values: JSONObject) -> EngineVision:
    """The section "vision" of the engine directory `path`."""
    values.refuse_other_keys("config", "files")
    config = values.object("config").dataclass(VisionConfig)
    for key, choices in (
        ("family", VISION_FAMILIES),
        ("activation", ACTIVATIONS),
        ("projector_activation", ACTIVATIONS),
    ):
        choice(values.object("config"), key, choices)
    if "files" not in values.values:
        return EngineVision(path, config)
    return EngineVision(path / VISION_FOLDER, config, parse_files(values.object("files")))


def choice(values: JSONObject, key: str, choices: Iterable[str]) -> str:
    """The text under `key`, one of `choices`."""
    value = values.get(key, "str")
    if value not in choices:
        raise values.error(f"{key!r} is {value!r}, expected one of {', '.join(choices)}")
    return value


def parse_files(values: JSONObject) -> dict[str, FileDigest]:
    """Digests by file name of a model: its configuration and its weights are among them."""
    files = parse_digests(values)
    if "config.json" not in files or not any(map(is_weight_file, files)):
        raise values.error("expected at least config.json and one .safetensors file")
    return files


def parse_digests(values: JSONObject) -> dict[str, FileDigest]:
    files = {}
    for name in values.values:
        if not _FILE_NAME.fullmatch(name) and not is_template_name(name):
            raise values.error(f"{name!r} is not a plain file name")
        entry = values.object(name)
        entry.refuse_other_keys("sha256", "size")
        sha256 = entry.get("sha256", "str")
        if not _SHA256.fullmatch(sha256):
            raise entry.error(f"'sha256' is {sha256!r}, expected 64 hexadecimal digits")
        files[name] = FileDigest(sha256, entry.get("size", "count"))
    return files


def is_weight_file(name: str) -> bool:
    """Whether a file of an engine directory holds weights."""
    return name.endswith(".safetensors")


def is_template_name(name: str) -> bool:
    """Whether a file is one of the further chat templates."""
    folder, _, file = name.partition("/")
    return folder == TEMPLATE_FOLDER and file.endswith(".jinja") and _FILE_NAME.fullmatch(file) is not None


def is_adapter_name(name: str) -> bool:
    """Whether an adapter's folder may be called so."""
    return _FILE_NAME.fullmatch(name) is not None
