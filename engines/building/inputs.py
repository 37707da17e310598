"""What a build takes from checkpoints, found good: the models' configurations and the files to bring along."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edgellm.engines.backends.device_layouts import with_delta_products
from edgellm.engines.building.shipped_draft import frequent_ids, read_vocabulary, write_vocabulary
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import HEAD_FILE, INDEX_FILE, SINGLE_FILE, VOCABULARY_FILE
from edgellm.engines.checkpoints.weights import counted
from edgellm.engines.directories.description import FORMAT_VERSION, ModelSource, edgellm_version, file_values
from edgellm.engines.directories.engine_directory import PREPROCESSOR_FILES, published_file_names
from edgellm.engines.directories.engine_parts import (
    DRAFT_FOLDER,
    LORA_FOLDER,
    VISION_FOLDER,
    is_adapter_name,
    is_weight_file,
)
from edgellm.engines.directories.kernel_folders import description_data
from edgellm.engines.errors import AdapterError, BuildError, CheckpointError
from edgellm.engines.families.audio_encoders import read_audio, without_lost_ears
from edgellm.engines.families.drafts import has_packed_head, read_draft, read_mtp
from edgellm.engines.families.embedding import checkpoint_decoder_config
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.families.vision_config import read_vision
from edgellm.engines.formats.digests import Cancelled, FileDigest, copy_hashed, current_digest, hash_file
from edgellm.engines.formats.small_files import check_ordinary, check_tokenizer_file, size_limit
from edgellm.engines.formats.strict_formats import plain_values
from edgellm.engines.lora.adapter import ADAPTER_FILES, LoraAdapter
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.config import HEADS, MTP, DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import (
    decoder_weights,
    embedding_name,
    head_format,
    head_weight_name,
    token_table,
    unread_tensors,
)
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.model.vision import VisionConfig
from edgellm.engines.quantization.config import MODELOPT_FILE
from edgellm.engines.quantizer.heads import packed_head
from edgellm.engines.quantizer.written_layout import write_tensors
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: What says, beside a draft's or a vision encoder's weights, what they are.
_CONFIGS = ("config.json", MODELOPT_FILE)
#: What a draft that the build packs is.
PACKED_FILES = ("config.json", SINGLE_FILE)
_DRAFT_PREFIX, _LORA_PREFIX, _VISION_PREFIX = f"{DRAFT_FOLDER}/", f"{LORA_FOLDER}/", f"{VISION_FOLDER}/"


class PublishedHead(NamedTuple):
    """A head [rows, columns] that is to be packed: the tensor `name` of the base's checkpoint, and in which format."""

    name: str
    shape: tuple[int, int]
    format: WeightFormat


@dataclass(frozen=True)
class BuildInputs:
    """`config` is the base's, with the features that `draft` takes; files by their names in the engine directory.

    `sources` are the checkpoints by `EngineShape.model`; the draft's, or the vision encoder's, is the base's where it
    ships with the model. `adapter_ranks` are the largest ranks of LoRA adapters, by their names. `head` is packed and
    written. `vocabulary` are the ids of a draft that ships with the model, where it has not all. `packed_draft` is the
    folder in the engine directory where the draft is a checkpoint of packed weights, made from its source.
    """

    sources: Mapping[str, Path]
    config: DecoderConfig
    draft: DraftConfig | None
    weights: Mapping[str, Path]
    published: Mapping[str, Path]
    adapter_ranks: Mapping[str, int]
    vision: VisionConfig | None = None
    audio: AudioConfig | None = None
    head: PublishedHead | None = None
    vocabulary: np.ndarray | None = None
    packed_draft: Path | None = None

    @property
    def models(self) -> dict[str, ModelConfig]:
        models = {"base": self.config, "draft": self.draft, "vision": self.vision, "audio": self.audio}
        return {name: config for name, config in models.items() if config is not None}

    @property
    def weight_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.weights.values())

    @property
    def head_bytes(self) -> int:
        return 0 if self.head is None else self.head.format.nbytes(*self.head.shape)

    @property
    def draft_bytes(self) -> int:
        return 0 if self.packed_draft is None else (self.packed_draft / SINGLE_FILE).stat().st_size

    @property
    def checkpoints(self) -> dict[str, Callable[[], Checkpoint]]:
        """What opens the checkpoint of each model, the draft's as it was packed."""
        own = {} if self.packed_draft is None else {"draft": self.packed_draft}
        return {model: partial(Checkpoint.open, path) for model, path in (*self.sources.items(), *own.items())}

    def description(
        self,
        dtype: str,
        attention: str,
        limits: EngineLimits,
        files: Mapping[str, FileDigest],
        tool_format: str | None,
        source: ModelSource | None = None,
    ) -> bytes:
        """The content of `edgellm.json`; `files` are the digests of all files by name."""
        prefixes = (_DRAFT_PREFIX, _VISION_PREFIX, _LORA_PREFIX)
        own = {name: file for name, file in files.items() if not name.startswith(prefixes)}
        values: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "created_with": edgellm_version(),
            "config": plain_values(self.config),
            "dtype": dtype,
            "attention": attention,
            "limits": plain_values(limits),
            "files": file_values(own),
        }
        if self.draft is not None:
            values["draft"] = {"config": plain_values(self.draft), "files": file_values(files, _DRAFT_PREFIX)}
        if self.adapter_ranks:
            values["lora"] = {
                name: {"rank": rank, "files": file_values(files, f"{_LORA_PREFIX}{name}/")}
                for name, rank in self.adapter_ranks.items()
            }
        if self.vision is not None:
            values["vision"] = {"config": plain_values(self.vision)}
            if apart := file_values(files, _VISION_PREFIX):
                values["vision"]["files"] = apart
        if tool_format is not None:
            values["tool_format"] = tool_format
        if source is not None:
            values["source"] = plain_values(source)
        return description_data(values)


def read_decoder_config(checkpoint: str | Path) -> DecoderConfig:
    """A checkpoint's dimensions; raises CheckpointError, and UnsupportedModelError for an unknown family."""
    with Checkpoint.open(checkpoint) as opened:
        return checkpoint_decoder_config(opened)


def read_vision_config(
    checkpoint: str | Path, vision_source: str | Path | None, config: DecoderConfig
) -> VisionConfig | None:
    """The vision encoder for a language model of dimensions `config`, its tensors checked; None for a text-only model.

    It is in the model's own `checkpoint` or, published apart, in `vision_source`. Raises CheckpointError and
    UnsupportedModelError.
    """
    with Checkpoint.open(checkpoint if vision_source is None else vision_source) as opened:
        if not isinstance(opened.config.get("vision_config"), dict):
            if vision_source is None:
                return None
            raise CheckpointError(f"{opened.path} is no vision encoder: its config.json has no vision_config")
        vision = read_vision(opened)
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
        if not any((opened.path / name).exists() for name in PREPROCESSOR_FILES):
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
    draft_source: str | Path | None,
    config: DecoderConfig,
    adapters: Mapping[str, LoraAdapter],
    vision: VisionConfig | None = None,
    vision_source: Path | None = None,
    vocabulary_file: Path | None = None,
) -> BuildInputs:
    """Check weights and tokenizer of a checkpoint of dimensions `config`, and a draft, as `choose_draft` gives it,
    against it.

    `vision` is what `read_vision_config` gave; its files are brought along from `vision_source`. A draft that ships
    with the model has the ids in `vocabulary_file` (None: those that are said most, or all where the head is packed).

    Raises CheckpointError, UnsupportedModelError for an unknown kind of draft, and BuildError for ids that are none.
    """
    draft, vocabulary = None, None
    sources = {"base": source, "draft": source, "vision": vision_source or source, "audio": source}
    published = {name: source / name for name in published_file_names(source)}
    with Checkpoint.open(source) as checkpoint:
        checkpoint.check([*decoder_weights(config), *token_table(config)], unread_tensors(config))
        for spec in token_table(config):
            if (read_packed := checkpoint.reader(spec.name, spec.shape)) is not None:
                read_packed(np.zeros(1, np.int32))  # which finds rows that are packed together
        config = with_delta_products(without_lost_ears(config, checkpoint), checkpoint)
        audio = read_audio(checkpoint) if "audio" in config.media else None
        weights = _weight_files(checkpoint, "", published)
        if not (source / "tokenizer.json").exists():
            raise CheckpointError(
                f"{source / 'tokenizer.json'} is missing: expected the tokenizer in the format of the tokenizers "
                "library. Convert an older one with transformers: "
                "AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(CHECKPOINT); of tekken.json, "
                'transformers.integrations.mistral.convert_tekken_tokenizer("tekken.json").save_pretrained(CHECKPOINT)'
            )
        check_tokenizer_file(source / "tokenizer.json", config.vocab_size, CheckpointError)
        if draft_source == MTP:
            if vocabulary_file is not None:
                vocabulary = read_vocabulary(vocabulary_file, config.vocab_size)
            elif not has_packed_head(checkpoint, config):
                vocabulary = frequent_ids(source / "tokenizer.json", config.vocab_size, config.eos_token_ids)
            draft = read_mtp(checkpoint, config, None if vocabulary is None else len(vocabulary))
        elif vocabulary_file is not None:
            raise BuildError(f"--draft-vocabulary is given, but no head that ships with {source} drafts: leave it out")
        elif draft_source is not None:
            sources["draft"] = Path(draft_source)
            with Checkpoint.open(draft_source) as opened:
                draft = read_draft(opened, checkpoint, config)
                weights |= _weight_files(opened, _DRAFT_PREFIX, published, _CONFIGS)
        if draft is not None:
            config = replace(config, feature_layers=draft.feature_layers)
    if vision is not None and vision_source is not None:
        with Checkpoint.open(vision_source) as opened:
            weights |= _weight_files(opened, _VISION_PREFIX, published, (*_CONFIGS, *PREPROCESSOR_FILES))
    for name, adapter in adapters.items():
        for file in ADAPTER_FILES:
            files = weights if is_weight_file(file) else published
            files[f"{_LORA_PREFIX}{name}/{file}"] = adapter.path / file
    for path in published.values():
        check_ordinary(path, size_limit(path.name), CheckpointError, "Copy it from the checkpoint's source")
    ranks = {name: each.rank for name, each in adapters.items()}
    return BuildInputs(sources, config, draft, weights, published, ranks, vision, audio, vocabulary=vocabulary)


def with_packed_head(inputs: BuildInputs, head: str, embeds_by_head: bool, dtype: str) -> BuildInputs:
    """The same with the model's head as `head` says, one of `HEADS`. Raises BuildError where the head is packed as
    published, or has rows that it cannot have in 4 bits."""
    if head == HEADS[0]:
        return inputs
    config, draft, source = inputs.config, inputs.draft, inputs.sources["base"]
    shape = (config.vocab_size, config.hidden_size)
    try:
        format = head_format(head, config.hidden_size, dtype)
    except ValueError as error:
        raise BuildError(f"--head is {head}, but {error}: take --head int8") from None
    assert format is not None
    name = head_weight_name(config)
    with Checkpoint.open(source) as checkpoint:
        published = checkpoint.weight_format(name, shape)
    if published is not None:
        raise BuildError(f"--head is {head}, but {source} has a packed head already ({published}): leave --head out")
    config = replace(config, head=head, embeds_by_head=embeds_by_head)
    if draft is not None:
        draft = replace(draft, base_head=head_weight_name(config), base_embedding=embedding_name(config))
    return replace(inputs, config=config, draft=draft, head=PublishedHead(name, shape, format))


def write_made_files(inputs: BuildInputs, folder: Path, progress: Callable[[int, int], None]) -> dict[str, FileDigest]:
    """Write what no checkpoint has, a packed head and the ids of a draft, to a folder; gives the digests by name, with
    those of a packed draft that is there. `progress` gets rows of the head done and in all. Raises OSError and
    CheckpointError."""
    made, head = dict[str, FileDigest](), inputs.head
    if inputs.packed_draft is not None:
        made = {f"{_DRAFT_PREFIX}{name}": hash_file(inputs.packed_draft / name) for name in PACKED_FILES}
    if inputs.vocabulary is not None:
        name = f"{_DRAFT_PREFIX}{VOCABULARY_FILE}"
        made[name] = write_vocabulary(folder / name, inputs.vocabulary)
    if head is not None:
        with Checkpoint.open(inputs.sources["base"]) as checkpoint:
            tensors = packed_head(checkpoint, head.name, head.format, counted(head.shape[0], progress))
            write_tensors(folder / HEAD_FILE, tensors)
        made[HEAD_FILE] = hash_file(folder / HEAD_FILE)
    return made


def _weight_files(
    checkpoint: Checkpoint, prefix: str, published: dict[str, Path], more: Sequence[str] = ()
) -> dict[str, Path]:
    """The weight files by name; the index of several, and what there is of `more`, joins the `published` files."""
    names = (*more, INDEX_FILE) if len(checkpoint.files) > 1 else more
    there = [name for name in names if (checkpoint.path / name).exists()]
    published |= {f"{prefix}{name}": checkpoint.path / name for name in there}
    return {f"{prefix}{path.name}": path for path in checkpoint.files}


def transfer_weights(
    sources: Mapping[str, Path], destination: Path, link: bool, advance: Callable[[int], None], stop: threading.Event
) -> tuple[dict[str, FileDigest], float]:
    """Copy (or link) and hash files, which get the names of `sources` below `destination`, in folders that are there:
    the digests by name, and the seconds that it took. Raises OSError, and Cancelled after the present block once `stop`
    is set."""
    started, digests = time.perf_counter(), dict[str, FileDigest]()
    for name, source in sources.items():
        target = destination / name
        if stop.is_set():
            raise Cancelled
        if link:
            target.symlink_to(os.path.realpath(source))
            digests[name] = current_digest(target)
            advance(digests[name].size)
        else:
            digests[name] = copy_hashed(source, target, stop, advance)
    return digests, time.perf_counter() - started
