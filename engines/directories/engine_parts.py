"""What an engine directory may hold beside its language model, each in a folder of its own, and how it is described."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weight_files import HEAD_FILE, SINGLE_FILE, VOCABULARY_FILE, is_shard_name
from edgellm.engines.families.embedding import POOLING_FILE
from edgellm.engines.formats.digests import SECTION_BYTES, FileDigest
from edgellm.engines.formats.strict_formats import JSONObject, as_json
from edgellm.engines.lora.adapter import ADAPTER_FILES, LoraAdapter, adapter_digest
from edgellm.engines.model import config as model_config
from edgellm.engines.model.config import DecoderConfig, DraftBlock, DraftConfig, Mixture
from edgellm.engines.model.decoder import embedding_name, head_format, head_weight_name
from edgellm.engines.model.draft_decoder import MAPPING, draft_weights, mtp_draft
from edgellm.engines.model.limits import LARGEST_DRAFT_BLOCK
from edgellm.engines.model.vision import LARGEST_IMAGE_SIDE, VisionConfig
from edgellm.engines.quantization.config import folder_quantization
from edgellm.engines.quantization.layout import Quantization

#: Where the draft head lies in an engine directory.
DRAFT_FOLDER = "draft"
#: Where a vision encoder lies that was published apart from its language model.
VISION_FOLDER = "vision"
#: Where LoRA adapters lie, each in a folder that bears its name.
LORA_FOLDER = "lora"

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: What a vision encoder of a family always has.
_FAMILY_FIELDS = {
    **dict.fromkeys(("llava", "gemma3", "paligemma", "smolvlm"), ("image_size", "feature_layers")),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), ("num_position_embeddings",)),
    **dict.fromkeys(("minicpmv4_6", "gemma4"), ("num_position_embeddings", "feature_layers")),
    "mistral3": ("feature_layers",),
    "qwen2_5_vl": ("window_size",),
    "lfm2_vl": ("num_position_embeddings", "feature_layers", "projector_size"),
    "internvl": ("image_size", "feature_layers", "class_token"),
}
#: The folder of further chat templates (`tool_use.jinja`), each a file of the model.
TEMPLATE_FOLDER = "additional_chat_templates"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, eq=False)
class EngineDraft:
    """The draft head of an engine directory: its configuration and the digests of its files, by name in `path`.

    The weights of a head for multi-token prediction are among the model's own, unless the build has packed them; a file
    says which rows of the model's head it has, where it has not all.
    """

    path: Path
    config: DraftConfig
    files: Mapping[str, FileDigest]

    @property
    def _is_inside(self) -> bool:
        """Whether its weights are among the model's own."""
        return self.config.generation == model_config.MTP and SINGLE_FILE not in self.files

    def checkpoint(self) -> Checkpoint:
        """The weights, memory-mapped anew: the caller closes them. Raises CheckpointError."""
        opened = Checkpoint.open(self.path.parent if self._is_inside else self.path)
        if self.config.generation == model_config.MTP and self.config.has_mapping:
            opened.use_shortlist(self.path / VOCABULARY_FILE, MAPPING, head_weight_name(self.config.decoder))
        return opened

    def quantization(self) -> Quantization | None:
        """What packs its weights; None where they are dense. Raises CheckpointError."""
        if not self._is_inside:
            return folder_quantization(self.path)
        found = folder_quantization(self.path.parent)
        if found is None:
            return None
        parts = [
            part for spec in draft_weights(self.config) for part in spec.parts if part[0] != model_config.DRAFT_HEAD
        ]
        with self.checkpoint() as opened:
            return found if any(opened.layout(*part) is not None for part in parts) else None


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
        """The digest of the `LoraAdapter` which `read` gives."""
        return adapter_digest({name: file.sha256 for name, file in self.files.items()})

    def read(self, config: DecoderConfig) -> LoraAdapter:
        """The adapter's matrices; raises AdapterError."""
        return LoraAdapter.read(self.path, config)


def parse_draft(folder: Path, values: JSONObject) -> EngineDraft:
    """The section "draft"."""
    values.refuse_other_keys("config", "files")
    config = values.object("config").dataclass(DraftConfig, decoder=DecoderConfig, mixture=Mixture, block=DraftBlock)
    files = (parse_digests if config.generation == model_config.MTP else parse_files)(values.object("files"))
    expected = {VOCABULARY_FILE} if config.has_mapping else set()
    if config.generation == model_config.MTP and files.keys() - {"config.json", SINGLE_FILE} != expected:
        raise values.error(f"its files are {', '.join(files) or 'none'}, expected {', '.join(expected) or 'none'}")
    return EngineDraft(folder, config, files)


def parse_adapters(folder: Path, values: JSONObject | None) -> dict[str, EngineAdapter]:
    """The section "lora", if there is one."""
    adapters: dict[str, EngineAdapter] = {}
    if values is None:
        return adapters
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
    if (files := values.optional("files")) is None:
        return EngineVision(path, config)
    return EngineVision(path / VISION_FOLDER, config, parse_files(files))


def check_head(config: JSONObject, head: str, columns: int, has_file: bool) -> None:
    """Raise the error of a description whose `head` has rows that it cannot have, or that does not agree with its
    files."""
    try:
        format = head_format(head, columns, "float32")
    except ValueError as error:
        raise config.error(f"'head' is {head!r}, but {error}") from None
    if (format is not None) != has_file:
        raise config.error(f"'head' is {head!r}, but {'the' if has_file else 'no'} file {HEAD_FILE} is described")
    tied, embeds = config.values.get("tie_word_embeddings"), config.values.get("embeds_by_head")
    if embeds and not (tied and has_file):
        raise config.error("'embeds_by_head' is true, expected a packed head and 'tie_word_embeddings' true")


def check_agreement(
    values: JSONObject, config: DecoderConfig, draft: EngineDraft | None, vision: VisionConfig | None
) -> None:
    """Raise the error of a description whose sizes contradict each other, so that no weights can have them."""
    _check_decoder(values.object("config"), config)
    if draft is not None:
        own, decoder = values.object("draft").object("config"), draft.config.decoder
        _check_decoder(own.object("decoder"), decoder)
        if draft.config.generation == model_config.MTP:
            reduced = draft.config.draft_vocab_size if draft.config.has_mapping else None
            if draft.config != mtp_draft(config, reduced):
                raise own.error("it is not the head for multi-token prediction of this model")
        for key in ("vocab_size", "hidden_size"):
            found, expected = getattr(decoder, key), getattr(config, key)
            if found != expected:
                raise own.error(f"{key!r} of its decoder is {found}, that of the model {expected}")
        require = partial(_require, own, draft.config)
        for key, name in (("base_embedding", embedding_name(config)), ("base_head", head_weight_name(config))):
            require(getattr(draft.config, key) == name, key, f"expected {name!r}")
        block = draft.config.block
        require(
            (block is None) == (draft.config.generation != model_config.DFLASH),
            "generation",
            f"with {block} as its block",
        )
        if block is not None:
            inside = 2 <= block.size <= LARGEST_DRAFT_BLOCK and 0 <= block.mask_token_id < config.vocab_size
            require(inside, "block", f"expected 2 to {LARGEST_DRAFT_BLOCK} tokens, and a token of the model")
        within = draft.config.draft_vocab_size <= config.vocab_size
        require(within, "draft_vocab_size", f"the model has {config.vocab_size} tokens")
    if vision is not None:
        _check_vision(values.object("vision").object("config"), vision, config)


def _require(values: JSONObject, config: object, holds: bool, key: str, expected: str) -> None:
    """Raise the error of `values` that says what the `config` has under `key` and what is `expected`, unless that
    `holds`."""
    if not holds:
        found = getattr(config, key)
        shown = as_json(list(found)) if isinstance(found, tuple) else repr(found)
        raise values.error(f"{key!r} is {shown:.200}, {expected}")


def _check_vision(values: JSONObject, vision: VisionConfig, config: DecoderConfig) -> None:
    require = partial(_require, values, vision)
    heads, hidden = vision.num_heads, config.hidden_size
    require(vision.hidden_size % heads == 0, "hidden_size", f"expected a multiple of 'num_heads', {heads}")
    require(vision.out_hidden_size == hidden, "out_hidden_size", f"the model's hidden size {hidden}")
    has_token = vision.image_token_id < config.vocab_size
    require(has_token, "image_token_id", f"the model has {config.vocab_size} tokens")
    for key in _FAMILY_FIELDS.get(vision.family, ()):
        require(bool(getattr(vision, key)), key, f"but a vision encoder of {vision.family} has one")
    merge, window = vision.spatial_merge_size, vision.window_size
    token_side = vision.patch_size * merge
    is_whole = window is None or (window > 0 and window % token_side == 0)
    require(is_whole, "window_size", f"expected a multiple of a token's side, {token_side}")
    side, patch = vision.image_side, vision.patch_size
    fits = vision.image_size is None or 1 <= side <= LARGEST_IMAGE_SIDE
    require(fits, "image_size", f"expected 1 to {LARGEST_IMAGE_SIDE} patches of {patch}")
    divides = side % merge == 0
    require(divides, "spatial_merge_size", f"expected a divisor of the image's side, {side} patches")
    tokens = vision.token_count((1, side, side))
    if config.image_tokens not in (0, tokens) and not config.images_vary:
        raise values.error(f"an image has {tokens} tokens, but 'image_tokens' of the model is {config.image_tokens}")
    is_square = vision.family == "gemma4" or vision.position_side**2 == (vision.num_position_embeddings or 0)
    require(is_square, "num_position_embeddings", "expected a square")
    for key in ("full_attention_layers", "deepstack_layers", "feature_layers"):
        _check_layers(values, vision, key, vision.num_layers)


def _check_decoder(values: JSONObject, config: DecoderConfig) -> None:
    require = partial(_require, values, config)
    divides = config.num_heads % config.num_kv_heads == 0
    require(divides, "num_heads", f"expected a multiple of 'num_kv_heads', {config.num_kv_heads}")
    _check_rows(values, config)
    is_normed = config.post_norms or not config.layer_scalars
    require(is_normed, "layer_scalars", "expected false where layers are not normed behind what they add")
    head_size = config.full_heads[1] if config.full_heads else config.head_dim
    fits = config.rotary_dim % 2 == 0 and config.rotary_dim <= head_size
    require(fits, "rotary_dim", f"expected an even number up to {head_size}, the elements of a head")
    section, half = config.mrope_section, config.rotary_dim // 2
    fits = not section or (len(section) == 3 and sum(section) == half)
    require(fits, "mrope_section", f"expected three numbers with a sum of {half}")
    require(0 < config.rms_norm_eps <= 1, "rms_norm_eps", "expected a number above 0 and up to 1")
    kinds, layers = config.layer_kinds, config.num_layers
    fits = not kinds or (len(kinds) == layers and set(kinds) <= set(model_config.LAYER_KINDS))
    require(fits, "layer_kinds", f"expected for each of {layers} layers one of {', '.join(model_config.LAYER_KINDS)}")
    require(not kinds or set(kinds) != {"mlp"}, "layer_kinds", "expected a layer that mixes tokens")
    require("mlp" not in kinds or config.lone_parts, "lone_parts", "expected true where layers are MLPs alone")
    least, most = model_config.CONV_WIDTHS
    fits = not config.is_recurrent or least <= config.conv_width <= most
    require(fits, "conv_width", f"expected {least} to {most}")
    fits = not (config.joint_qk_norm and config.attention_gate)
    require(fits, "joint_qk_norm", "expected false where gates stand between the heads")
    fits = not (config.rotates_neighbours and config.qk_norm)
    require(fits, "rotates_neighbours", "expected false where heads are normed")
    fits = not (config.norms_behind_rotation and config.joint_qk_norm)
    require(fits, "norms_behind_rotation", "expected false where heads are normed together")
    fits = not config.value_norms or (config.qk_norm and not config.joint_qk_norm)
    require(fits, "value_norms", "expected false where queries and keys are not normed head by head")
    fits = not (config.layer_norms and config.qk_norm)
    require(fits, "layer_norms", "expected false where heads are normed")
    _check_delta(values, config)
    if config.mixture is not None:
        own, mixture = values.object("mixture"), config.mixture
        _require(own, mixture, mixture.chosen <= mixture.experts, "chosen", f"there are {mixture.experts} experts")
        _check_layers(own, mixture, "dense_layers", layers - 1)
        beside = mixture.shared_size > 0 and not mixture.shared_gate and config.residual_scale == 1
        fits = beside or not mixture.latent_size
        _require(own, mixture, fits, "latent_size", "expected 0 but beside an expert of all tokens without a gate")
        for key in ("post_norms", "layer_scalars", "layer_embedding_size"):  # parts of an MLP that experts do not have
            fits = mixture.beside_mlp or not getattr(config, key)
            require(fits, key, "expected none of it where a 'mixture' stands for MLPs")
        fits = not mixture.beside_mlp or (config.post_norms and config.residual_scale == 1 and not config.layer_norms)
        require(fits, "post_norms", "expected RMS norms, and a 'residual_scale' of 1, where experts stand beside MLPs")
    _check_layers(values, config, "feature_layers", layers)
    _check_layers(values, config, "nope_layers", layers - 1)
    has_window = "window" not in kinds or bool(config.sliding_window)
    require(has_window, "sliding_window", "expected the window of those 'layer_kinds'")
    require(config.deepstack_layers <= layers, "deepstack_layers", f"the model has {layers} layers")
    if beyond := [token for token in config.eos_token_ids if token >= config.vocab_size]:
        raise values.error(f"'eos_token_ids' has {beyond[0]}, the model has {config.vocab_size} tokens")


def _check_rows(values: JSONObject, config: DecoderConfig) -> None:
    """Key-value heads of layers that attend to all, and the layers that attend to the rows of others."""
    require, heads, layers = partial(_require, values, config), config.full_heads, config.num_layers
    fits = not heads or (len(heads) == 2 and min(heads) > 0 and config.num_heads % heads[0] == 0)
    require(fits, "full_heads", "expected the numbers of key-value heads, a divisor of 'num_heads', and of elements")
    kinds = [config.layer_kind(index) for index in range(layers)] if len(config.layer_kinds) in (0, layers) else []
    first = layers - config.shared_rows
    fits = not config.shared_rows or (first > 0 and set(kinds[first:]) <= set(kinds[:first]) & {"attention", "window"})
    require(
        fits, "shared_rows", f"expected fewer than {layers} layers, and one with rows of each of their kinds before"
    )


def _check_delta(values: JSONObject, config: DecoderConfig) -> None:
    """What layers with a delta rule multiply by, and what the checkpoint calls their parts."""
    require = partial(_require, values, config)
    has_delta, heads, products = "delta" in config.layer_kinds, config.delta_heads, config.delta_products
    has_matrices = has_delta or "mamba" in config.layer_kinds
    fits = not has_matrices or (len(heads) == 4 and min(heads) >= 1 and heads[1] % heads[0] == 0)
    expected = "expected the numbers of key heads, of value heads, a multiple of that, and their sizes"
    require(fits, "delta_heads", expected)
    counted = tuple(list(dict.fromkeys(products)).index(number) for number in products)
    fits = not products or (has_delta and len(products) == len(model_config.DELTA_PROJECTIONS) and counted == products)
    parts = ", ".join(model_config.DELTA_PROJECTIONS)
    expected = f"expected the number of the linear layer of each of {parts}, counted as they come up"
    require(fits, "delta_products", expected)
    require(not products or products[2] == products[3], "delta_products", "expected one number for the last two")


def _check_layers(values: JSONObject, config: object, key: str, count: int) -> None:
    layers = getattr(config, key)
    fits = len(set(layers)) == len(layers) and max(layers, default=0) <= count
    _require(values, config, fits, key, f"expected different layers from 0 to {count}")


def parse_files(values: JSONObject) -> dict[str, FileDigest]:
    """Digests by file name of a model: its configuration and its weights are among them."""
    files = parse_digests(values)
    if "config.json" not in files or not any(map(is_weight_file, files)):
        raise values.error("expected at least config.json and one .safetensors file, or GGUF file")
    return files


def parse_digests(values: JSONObject) -> dict[str, FileDigest]:
    """Digests by name."""
    files = {}
    for name in values.values:
        if not (_FILE_NAME.fullmatch(name) or is_shard_name(name) or is_template_name(name) or name == POOLING_FILE):
            raise values.error(f"{name!r} is not a plain file name")
        entry = values.object(name)
        entry.refuse_other_keys("sha256", "size", "section")
        sha256 = entry.get("sha256", "str")
        if not _SHA256.fullmatch(sha256):
            raise entry.error(f"'sha256' is {sha256!r}, expected 64 hexadecimal digits")
        section = entry.get("section", "count") if "section" in entry.values else 0
        if section not in (0, SECTION_BYTES):
            raise entry.error(f"'section' is {section}, expected {SECTION_BYTES}")
        files[name] = FileDigest(sha256, entry.get("size", "count"), section)
    return files


def is_weight_file(name: str) -> bool:
    """Whether a file of an engine directory holds weights."""
    return name.endswith((".safetensors", ".gguf"))


def is_template_name(name: str) -> bool:
    """Whether a file is one of the further chat templates."""
    folder, _, file = name.partition("/")
    return folder == TEMPLATE_FOLDER and file.endswith(".jinja") and _FILE_NAME.fullmatch(file) is not None


def is_adapter_name(name: str) -> bool:
    """Whether an adapter's folder may be called so."""
    return _FILE_NAME.fullmatch(name) is not None
