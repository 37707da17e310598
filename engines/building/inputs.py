"""What a build takes from checkpoints, found good: the models' configurations and the files to bring along."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from edgellm.engines.building.checks import check_tokenizer
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.config import DecoderConfig
from edgellm.engines.model.descriptions import ModelConfig, vision_describer
from edgellm.engines.directories.digests import FileDigest
from edgellm.engines.model.draft_config import DraftConfig
from edgellm.engines.directories.engine_directory import PREPROCESSOR_FILES, PUBLISHED_FILES, WEIGHT_INDEX
from edgellm.engines.directories.engine_parts import (DRAFT_FOLDER, LORA_FOLDER, VISION_FOLDER, is_adapter_name, is_weight_file)
from edgellm.engines.errors import AdapterError, CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.eagle import read_draft
from edgellm.engines.lora.adapter import ADAPTER_FILES, LoraAdapter
from edgellm.engines.tensor_names import is_multimodal
from edgellm.engines.model.vision import VisionConfig

_DRAFT_PREFIX, _LORA_PREFIX, _VISION_PREFIX = f"{DRAFT_FOLDER}/", f"{LORA_FOLDER}/", f"{VISION_FOLDER}/"


@dataclass(frozen=True)
class BuildInputs:
    """`config` is the base's, with the features that `draft` takes; files by their names in the engine directory.

    `adapter_ranks` are the largest ranks of LoRA adapters, by their names. The `vision` encoder is in the model's own
    files, or was published apart and has files in a folder of its own.
    """

    config: DecoderConfig
    draft: DraftConfig | None
    weights: Mapping[str, Path]
    published: Mapping[str, Path]
    adapter_ranks: Mapping[str, int]
    vision: VisionConfig | None = None

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The configuration of each model, by `EngineShape.model`."""
        models: dict[str, ModelConfig | None] = {"base": self.config, "draft": self.draft, "vision": self.vision}
        return {name: config for name, config in models.items() if config is not None}

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files."""
        return sum(path.stat().st_size for path in self.weights.values())

    def draft_description(self, files: Mapping[str, FileDigest]) -> tuple[DraftConfig, dict[str, FileDigest]] | None:
        """What `description_bytes` is told about the draft; `files` are the digests of all files by name."""
        if self.draft is None:
            return None
        return self.draft, _below(_DRAFT_PREFIX, files)

    def vision_description(
        self, files: Mapping[str, FileDigest]
    ) -> tuple[VisionConfig, dict[str, FileDigest] | None] | None:
        """What `description_bytes` is told about the vision encoder."""
        if self.vision is None:
            return None
        return self.vision, _below(_VISION_PREFIX, files) or None

    def adapter_descriptions(self, files: Mapping[str, FileDigest]) -> dict[str, tuple[int, dict[str, FileDigest]]]:
        """What `description_bytes` is told about the adapters."""
        return {name: (rank, _below(f"{_LORA_PREFIX}{name}/", files)) for name, rank in self.adapter_ranks.items()}


def read_decoder_config(checkpoint: str | Path) -> DecoderConfig:
    """A checkpoint's dimensions; raises CheckpointError, and UnsupportedModelError for an unknown family."""
    with Checkpoint.open(checkpoint) as opened:
        return decoder_config(opened.config, opened.generation_config, dtype=opened.dtype)


def read_vision_config(
    checkpoint: str | Path, vision_source: str | Path | None, config: DecoderConfig
) -> VisionConfig | None:
    """The vision encoder for a language model of dimensions `config`, its tensors checked; None for a text-only model.

    It is in the model's own `checkpoint` or, published apart, in `vision_source`. Raises CheckpointError and
    UnsupportedModelError.
    """
    with Checkpoint.open(checkpoint if vision_source is None else vision_source) as opened:
        if not is_multimodal(opened.config):
            if vision_source is None:
                return None
            raise CheckpointError(f"{opened.path} is no vision encoder: its config.json has no vision_config")
        vision = vision_describer().read(opened)
        if vision is None:
            return None
        if vision.out_hidden_size != config.hidden_size:
            raise CheckpointError(
                f"{opened.path} makes embeddings of {vision.out_hidden_size} elements, the language model takes "
                f"{config.hidden_size}: take the vision encoder of this very model"
            )
        if vision.image_token_id >= config.vocab_size:
            raise CheckpointError(
                f"{opened.path}: image_token_id is {vision.image_token_id}, but the language model has "
                f"{config.vocab_size} tokens: take the vision encoder of this very model"
            )
        if not any((opened.path / name).is_file() for name in PREPROCESSOR_FILES):
            raise CheckpointError(
                f"{opened.path / PREPROCESSOR_FILES[0]} is missing: it says how images become input. Copy it from the "
                "checkpoint's source"
            )
        return vision


def read_adapters(sources: Mapping[str, str | Path], config: DecoderConfig) -> dict[str, LoraAdapter]:
    """The adapters of a model of dimensions `config`; AdapterError for a name that a folder cannot have, or an adapter
    that does not fit."""
    for name in sources:
        if not is_adapter_name(name):
            raise AdapterError(
                f"an adapter cannot be called {name!r}: expected letters, digits, '.', '_' and '-', a letter, digit or "
                "'_' at first"
            )
    return {name: LoraAdapter.read(path, config) for name, path in sources.items()}


def read_inputs(
    source: Path,
    draft_source: Path | None,
    config: DecoderConfig,
    adapters: Mapping[str, LoraAdapter],
    vision: VisionConfig | None = None,
    vision_source: Path | None = None,
) -> BuildInputs:
    """Check weights and tokenizer of a checkpoint of dimensions `config`, and a draft against it.

    `vision` is what `read_vision_config` gave; its files are brought along from `vision_source`.

    Raises CheckpointError, and UnsupportedModelError for an unknown kind of draft.
    """
    draft, weights = None, dict[str, Path]()
    published = {name: source / name for name in PUBLISHED_FILES if (source / name).exists()}
    with Checkpoint.open(source) as checkpoint:
        checkpoint.check(decoder_weights(config))
        weights |= _weight_files(checkpoint, "", published)
        check_tokenizer(source, config.vocab_size)
        if draft_source is not None:
            with Checkpoint.open(draft_source) as opened:
                draft = read_draft(opened, checkpoint, config)
                published[f"{_DRAFT_PREFIX}config.json"] = draft_source / "config.json"
                weights |= _weight_files(opened, _DRAFT_PREFIX, published)
            config = replace(config, feature_layers=draft.feature_layers)
    if vision is not None and vision_source is not None:
        with Checkpoint.open(vision_source) as opened:
            for name in ("config.json", *PREPROCESSOR_FILES):
                if (vision_source / name).exists():
                    published[f"{_VISION_PREFIX}{name}"] = vision_source / name
            weights |= _weight_files(opened, _VISION_PREFIX, published)
    for name, adapter in adapters.items():
        for file in ADAPTER_FILES:
            files = weights if is_weight_file(file) else published
            files[f"{_LORA_PREFIX}{name}/{file}"] = adapter.path / file
    ranks = {name: each.rank for name, each in adapters.items()}
    return BuildInputs(config, draft, weights, published, ranks, vision)


def own_files(files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    """Those of the base, of all files by name."""
    return {name: file for name, file in files.items() if "/" not in name}


def _below(prefix: str, files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    return {name[len(prefix) :]: file for name, file in files.items() if name.startswith(prefix)}


def _weight_files(checkpoint: Checkpoint, prefix: str, published: dict[str, Path]) -> dict[str, Path]:
    """The weight files by name; the index of several is noted among the `published` files."""
    if len(checkpoint.files) > 1:
        published[f"{prefix}{WEIGHT_INDEX}"] = checkpoint.path / WEIGHT_INDEX
    return {f"{prefix}{path.name}": path for path in checkpoint.files}
