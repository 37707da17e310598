"""The engine directory: a model's published files, what it was built for, and the digests of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import HEAD_FILE, INDEX_FILE, SINGLE_FILE, foreign_model
from edgellm.engines.directories import engine_parts, kernel_folders
from edgellm.engines.directories.description import DESCRIPTION_NAME, FORMAT_VERSION, ModelSource, edgellm_version
from edgellm.engines.errors import CheckpointError, EngineDirectoryError
from edgellm.engines.families.audio_encoders import read_audio
from edgellm.engines.families.embedding import MODULES_FILE, POOLING_FILE, PROMPTS_FILE
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.formats.digests import FileDigest, current_digest, hash_bytes, recall_digest
from edgellm.engines.formats.small_files import CONFIG_BYTES, read_file
from edgellm.engines.formats.staged_directory import holds, is_vacant
from edgellm.engines.formats.strict_formats import JSONObject
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.config import HEADS, DecoderConfig, Mixture
from edgellm.engines.model.decoder import head_format
from edgellm.engines.model.limits import KV_CACHES, EngineLimits
from edgellm.engines.model.rotary import context_bounds
from edgellm.engines.quantization.config import folder_quantization
from edgellm.engines.quantization.layout import Quantization
from edgellm.kernels.errors import shown
from edgellm.kernels.gpu import GPU
from edgellm.kernels.kept import KeptKernels
from edgellm.kernels.user_paths import printable, user_cache_directory

DTYPES = ("float16", "bfloat16", "float32")
ATTENTION_SETTINGS = ("auto", "native", "composed")

#: Published files that an engine directory takes along, where the checkpoint has them. The first is required.
PUBLISHED_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "hf_quant_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "system_prompt.txt"),
    *("system_prompt_image.txt", "preprocessor_config.json", "processor_config.json", MODULES_FILE, POOLING_FILE),
    *("video_preprocessor_config.json", PROMPTS_FILE),
)
#: How a vision encoder wants its images: one of them is required, and the first that is there counts.
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

#: What else a directory may have, and the option that builds it.
_PARTS = {
    "draft": ("draft model", "--draft DRAFT_CHECKPOINT"),
    "vision": ("vision encoder", "--vision VISION_DIR, or from a multimodal CHECKPOINT"),
    "audio": ("encoder of speech", "from a CHECKPOINT that has one"),
}
_KEYS = (
    *("format_version", "created_with", "config", "dtype", "attention", "limits", "files"),
    *("draft", "lora", "vision", "tool_format", "source", kernel_folders.KERNELS_KEY),
)


@dataclass(frozen=True, eq=False)
class EngineDirectory:
    """What `edgellm.json` says. `dtype` is the compute dtype of the engines, `files` the digests by file name.

    `attention` is "auto", "native" or "composed"; `created_with` the version of EdgeLLM that wrote the directory;
    `description_sha256` the digest of `edgellm.json` itself, but for its kernels. With a `draft`,
    `config.feature_layers` are those that it takes. `adapters` are LoRA adapters by name. With a `vision` encoder the
    model takes images. `kernels` are the digests of the manifests of compiled kernels, by the names of their folders.
    `source` is where the checkpoint comes from, of one that has a name on the hub.
    """

    path: Path
    config: DecoderConfig
    dtype: str
    attention: str
    limits: EngineLimits
    files: Mapping[str, FileDigest]
    created_with: str
    description_sha256: str
    draft: engine_parts.EngineDraft | None = None
    adapters: Mapping[str, engine_parts.EngineAdapter] = field(default_factory=dict)
    vision: engine_parts.EngineVision | None = None
    #: The name of the format in which the model calls tools, where the build found or was given one.
    tool_format: str | None = None
    kernels: Mapping[str, FileDigest] = field(default_factory=dict)
    source: ModelSource | None = None

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> EngineDirectory:
        """Read a directory and check its files against their digests; EngineDirectoryError lists what differs.

        Weight files that are as they were when last hashed are trusted, unless `verify`.
        """
        directory = cls.read(path)
        differences = directory.differences(verify)
        if differences:
            listed = "\n".join(f"  {difference}" for difference in differences)
            raise EngineDirectoryError(
                f"{directory.path} differs from what its {DESCRIPTION_NAME} describes:\n{listed}\n"
                "Copy the directory anew or build it again: edgellm build --force CHECKPOINT ENGINE_DIR"
            )
        return directory

    @classmethod
    def read(cls, path: str | Path) -> EngineDirectory:
        """Read `edgellm.json` alone and check it strictly; raises EngineDirectoryError."""
        path = Path(path)
        description = path / DESCRIPTION_NAME
        foreign = foreign_model(path)
        if foreign is not None:
            raise EngineDirectoryError(foreign)
        if not path.is_dir():
            found = "is not a directory" if path.exists() else "does not exist"
            raise EngineDirectoryError(
                f"{path} {found}. Expected an engine directory, as edgellm build makes it (edgellm list shows what is "
                "here), a GGUF file, or a model's name on the hub, ORG/NAME (with --revision main if ORG is a folder)"
            )
        if not description.exists():
            hint = "edgellm build CHECKPOINT ENGINE_DIR"
            if (path / "config.json").exists():
                raise EngineDirectoryError(
                    f"{path} has no {DESCRIPTION_NAME}: it is a checkpoint, not an engine directory. "
                    f"Make one of it: {hint.replace('CHECKPOINT', str(path))}"
                )
            raise EngineDirectoryError(f"{path} has no {DESCRIPTION_NAME}. Make an engine directory: {hint}")
        return _parse(path, read_file(description, CONFIG_BYTES, EngineDirectoryError))

    def with_kv_cache(self, kind: str | None) -> EngineDirectory:
        """The same with KV rows of another kind, one of `KV_CACHES` (None: as it was built); EngineDirectoryError for
        an unknown one."""
        if kind is not None and not (isinstance(kind, str) and kind in KV_CACHES):
            raise EngineDirectoryError(f"kv_cache is {shown(kind)}: expected one of {', '.join(KV_CACHES)}, or None")
        if kind in (None, self.limits.kv_cache):
            return self
        # What was measured with one is not the other's.
        digest = hash_bytes(f"{self.description_sha256} {kind}".encode())
        return replace(self, limits=replace(self.limits, kv_cache=kind), description_sha256=digest)

    def with_hidden_layers(self, layers: Sequence[int] | None) -> EngineDirectory:
        """The same whose steps give out the hidden states that enter these layers, too (the number of layers: those
        behind the final norm); None: as it was built. EngineDirectoryError for what are no such layers, and for others
        than a draft takes, where there is one."""
        if layers is None:
            return self
        config, taken, last = self.config, self.config.feature_layers, self.config.num_layers
        if len(set(layers)) < len(layers) or not set(layers) <= set(taken or range(1, last + 1)):
            known = f"of {list(taken)}, which its draft takes" if taken else f"from 1 to {last}"
            expected = f"expected different layers of {self.name}, {known}"
            raise EngineDirectoryError(f"hidden_layers is {shown(layers)}: {expected}")
        if taken:
            return self
        digest = hash_bytes(f"{self.description_sha256} {list(layers)}".encode())
        return replace(self, config=replace(config, feature_layers=tuple(layers)), description_sha256=digest)

    @property
    def name(self) -> str:
        """How people know the model: its name on the hub or, of a GGUF file that was opened as it is, the file's; else
        that of the directory."""
        path = self.path.resolve()
        if self.source is not None:
            return self.source.repository
        files = self.weight_files if path.parent == file_folder().resolve() else ()
        return next(((path / file).resolve().stem for file in files if file.endswith(".gguf")), path.name)

    @property
    def video_tokens(self) -> int:
        """Of how many tokens a video may be: what the context holds; 0 for a model that takes none."""
        return self.limits.kv_capacity if "video" in self.config.media else 0

    @property
    def weight_files(self) -> tuple[str, ...]:
        """Names of the files of weights."""
        return tuple(name for name in self.files if engine_parts.is_weight_file(name))

    @property
    def plans_path(self) -> Path:
        """The folder of the plans; it may not exist."""
        return self.path / "plans"

    def kept_kernels(self, gpu: GPU) -> KeptKernels:
        """The compiled kernels for a GPU that are here, or in the user's cache."""
        folders = [self.path / kernel_folders.KERNELS_FOLDER / name for name in self.kernels]
        return KeptKernels(gpu, folders, f"edgellm build {self.path} --target {gpu.compute_capability}")

    def checkpoint(self) -> Checkpoint:
        """The weights, memory-mapped anew: the caller closes them. Raises CheckpointError."""
        return Checkpoint.open(self.path, head_format(self.config.head, self.config.hidden_size, self.dtype))

    def packed_models(self) -> dict[str, Quantization]:
        """What packs, by "base", "draft" and "vision", the weights, of those that have packed ones. Raises
        CheckpointError."""
        folders = {"base": self.path}
        if self.vision is not None and self.vision.files is not None:
            folders["vision"] = self.vision.path
        found = {model: folder_quantization(folder) for model, folder in folders.items()}
        if self.draft is not None:
            found["draft"] = self.draft.quantization()
        return {model: quantization for model, quantization in found.items() if quantization is not None}

    @property
    def packed_names(self) -> set[str]:
        """Which of `models` have packed weights, as published or by the build; a draft may share the base's head.
        Raises CheckpointError."""
        packed, draft = set(self.packed_models()), self.draft
        if self.config.head != HEADS[0]:
            packed |= {"base"} if draft is None or draft.config.has_head else {"base", "draft"}
        return packed

    @cached_property
    def audio(self) -> AudioConfig | None:
        """The encoder of speech, as the checkpoint describes it; None where there is none. Raises CheckpointError, and
        EngineDirectoryError for another than it was built for."""
        rows = self.limits.audio_rows
        if "audio" not in self.config.media:
            return None
        with self.checkpoint() as checkpoint:
            config = read_audio(checkpoint)
        own = config.run_rows
        if (own, config.out_hidden_size) != (rows, self.config.hidden_size):
            raise EngineDirectoryError(
                f"{self.path}: its encoder of speech has runs of {own} rows and a width of "
                f"{config.out_hidden_size}, expected {rows} and {self.config.hidden_size}: build the directory again"
            )
        return config

    @property
    def checkpoints(self) -> dict[str, Callable[[], Checkpoint]]:
        """What opens the weights of each of `models`."""
        parts = {
            "base": self,
            "draft": self.draft,
            "vision": self.vision,
            "audio": self if self.limits.audio_rows else None,
        }
        return {model: part.checkpoint for model, part in parts.items() if part is not None}

    @property
    def models(self) -> dict[str, ModelConfig]:
        """The configuration of each model that has engines, by `EngineShape.model`."""
        models: dict[str, ModelConfig | None] = {"base": self.config}
        models["audio"] = self.audio
        models["draft"] = None if self.draft is None else self.draft.config
        models["vision"] = None if self.vision is None else self.vision.config
        return {model: config for model, config in models.items() if config is not None}

    def model_config(self, model: str) -> ModelConfig:
        """The configuration of one of `models`; EngineDirectoryError where there is no such model."""
        if model not in self.models:
            what, option = _PARTS[model]
            raise EngineDirectoryError(
                f"{self.path} has no {what}. Build one with it: edgellm build CHECKPOINT ENGINE_DIR {option}"
            )
        return self.models[model]

    def differences(self, verify: bool = False, hash_weights: bool = True) -> list[str]:
        """One line for each file that is missing, foreign or not what was described.

        Without `verify`, remembered digests of large unchanged files are trusted; without `hash_weights`, a weight
        file with no remembered digest is checked by its size alone.
        """
        found = _differences(self.path, self.files, "", verify, hash_weights)
        kernels, parts = kernel_folders.manifests(self.kernels), self.part_files
        others = [engine_parts.DRAFT_FOLDER, engine_parts.VISION_FOLDER]
        others += [f"{engine_parts.LORA_FOLDER}/{name}" for name in adapter_names(self.path)]
        for folder, files in (dict.fromkeys(others) | parts | kernels).items():
            if files is not None:
                own = _differences(self.path / folder, files, f"{folder}/", verify, hash_weights)
                found += own
                if verify and folder in kernels and not own:  # else they are compared when they are loaded
                    found += kernel_folders.cubin_differences(self.path / folder)
            elif (self.path / folder).exists():
                found.append(f"{printable(folder)}/: not described")
        return found

    @property
    def part_files(self) -> dict[str, Mapping[str, FileDigest]]:
        """The files of each part that has some of its own, by its folder here: draft, vision encoder, adapters."""
        parts = {engine_parts.DRAFT_FOLDER: self.draft, engine_parts.VISION_FOLDER: self.vision}
        found = {folder: part.files for folder, part in parts.items() if part is not None and part.files is not None}
        return found | {f"{engine_parts.LORA_FOLDER}/{name}": each.files for name, each in self.adapters.items()}


def _differences(
    folder: Path, files: Mapping[str, FileDigest], prefix: str, verify: bool, hash_weights: bool
) -> list[str]:
    """What differs in one folder; `prefix` is put before the names."""
    found = []
    for name, expected in files.items():
        if (difference := _difference(folder / name, expected, verify, hash_weights)) is not None:
            linked = f" (a link to {(folder / name).readlink()})" if (folder / name).is_symlink() else ""
            found.append(f"{prefix}{name}: {difference}{linked}")
    foreign = [name for name in described_file_names(folder) if name not in files]
    return found + [f"{prefix}{printable(name)}: not described, but it would be read" for name in foreign]


def _difference(path: Path, expected: FileDigest, verify: bool, hash_weights: bool) -> str | None:
    """How a file differs from what was described, in words; None where it does not."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{size:,} bytes, expected {expected.size:,}"
        if engine_parts.is_weight_file(path.name) and not (verify or hash_weights):
            digest = recall_digest(path, expected.section) or expected
        else:
            digest = current_digest(path, not verify, expected.section)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if digest.sha256 == expected.sha256:
        return None
    return f"SHA-256 {digest.sha256[:16]}..., expected {expected.sha256[:16]}..."


def described_file_names(path: Path) -> list[str]:
    """Names of the files in a checkpoint or engine directory that are described by digests, in a fixed order."""
    index = [INDEX_FILE] if (path / INDEX_FILE).exists() else []
    weights = [file.name for ending in ("safetensors", "gguf") for file in path.glob(f"model*.{ending}")]
    return published_file_names(path) + index + sorted(weights)


def published_file_names(path: Path) -> list[str]:
    """Those of `PUBLISHED_FILES` that a directory has, and its further chat templates."""
    templates = sorted(
        f"{engine_parts.TEMPLATE_FOLDER}/{file.name}" for file in (path / engine_parts.TEMPLATE_FOLDER).glob("*.jinja")
    )
    return [name for name in PUBLISHED_FILES if (path / name).exists()] + list(
        filter(engine_parts.is_template_name, templates)
    )


def file_folder() -> Path:
    """Where the directories lie of GGUF files that are opened as they are, in the user's cache."""
    return user_cache_directory() / "gguf"


def adapter_names(path: Path) -> list[str]:
    """Names of the folders of LoRA adapters in an engine directory, sorted."""
    folder = path / engine_parts.LORA_FOLDER
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _parse(path: Path, data: bytes) -> EngineDirectory:
    advice = "Build the directory again: edgellm build --force CHECKPOINT ENGINE_DIR"
    values = JSONObject.parse(data, str(path / DESCRIPTION_NAME), EngineDirectoryError, advice)
    version = values.get("format_version", "int")
    if version != FORMAT_VERSION:
        raise values.error(f"'format_version' is {version}, this EdgeLLM ({edgellm_version()}) reads {FORMAT_VERSION}")
    values.refuse_other_keys(*_KEYS)
    draft, limits = None, values.object("limits").dataclass(EngineLimits)
    config = values.object("config").dataclass(DecoderConfig, mixture=Mixture)
    for name, bound in context_bounds(config).items():
        if limits.kv_capacity > bound:
            raise values.error(f"'kv_capacity' is {limits.kv_capacity}, by {name} expected at most {bound}")
    if (problem := limits.window_problem(config)) is not None:
        raise values.object("limits").error(f"'window_rows': {problem}")
    if (own := values.optional("draft")) is not None:
        draft = engine_parts.parse_draft(path / engine_parts.DRAFT_FOLDER, own)
    features = draft.config.feature_layers if draft else (config.num_layers,) if config.is_embedding else ()
    block = None if draft is None else draft.config.block
    if (draft is None) == limits.has_draft or config.feature_layers != features:
        raise values.error("'draft', 'limits' and 'config' disagree on whether there is a draft, or on its features")
    if limits.draft_block != (0 if block is None else block.size) or (block and limits.draft_steps >= block.size):
        raise values.error("'draft' and 'limits' disagree on the block that the draft fills")
    vision = None if (own := values.optional("vision")) is None else engine_parts.parse_vision(path, own)
    if (vision is None) == bool(limits.image_rows) or list(limits.image_rows) != sorted(set(limits.image_rows)):
        raise values.error(
            "'vision' and 'limits' disagree on whether there is a vision encoder, or 'image_rows' do not rise"
        )
    if bool(limits.audio_rows) != ("audio" in config.media):
        raise values.error("'config' and 'limits' disagree on whether there is an encoder of speech")
    files = engine_parts.parse_files(values.object("files"))
    engine_parts.check_head(values.object("config"), config.head, config.hidden_size, HEAD_FILE in files)
    engine_parts.check_agreement(values, config, draft, None if vision is None else vision.config)
    adapters = engine_parts.parse_adapters(path / engine_parts.LORA_FOLDER, values.optional("lora"))
    if bool(limits.lora_slots) != bool(limits.max_lora_rank) or any(
        adapter.rank > limits.max_lora_rank for adapter in adapters.values()
    ):
        raise values.error("'lora' and 'limits' disagree on the adapters or their ranks")
    return EngineDirectory(
        path=path,
        config=config,
        dtype=values.choice("dtype", DTYPES),
        attention=values.choice("attention", ATTENTION_SETTINGS),
        limits=limits,
        files=files,
        adapters=adapters,
        created_with=values.get("created_with", "str"),
        description_sha256=kernel_folders.digest_without_kernels(data, values.values),
        draft=draft,
        vision=vision,
        tool_format=values.get("tool_format", "str") if "tool_format" in values.values else None,
        source=None if (own := values.optional("source")) is None else own.dataclass(ModelSource),
        kernels=kernel_folders.parse_kernels(values.optional(kernel_folders.KERNELS_KEY)),
    )


def check_checkpoint_places(source: Path, target: Path, force: bool, kind: str = "checkpoint") -> None:
    """Raise CheckpointError where a checkpoint of the `kind`, made of a source, would overwrite something else."""
    if holds(target, source):
        raise CheckpointError(f"{target} is the source {source} or holds it: name another place for the new directory")
    if is_vacant(target):
        return
    is_checkpoint = any((target / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if not is_checkpoint or (target / DESCRIPTION_NAME).exists():
        raise CheckpointError(f"{target} exists and is no {kind}: name another place, or remove it yourself")
    if not force:
        raise CheckpointError(f"{target} exists: --force replaces it")
