"""How a multimodal checkpoint's `config.json` becomes a `VisionConfig`, and its tensors are checked against that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families.decoders import SILU, filled
from edgellm.engines.families.fields import ConfigFields, first_prefix
from edgellm.engines.families.vision_encoders import host_weights, unused_tensors, vision_weights
from edgellm.engines.formats.strict_formats import is_integer, is_number
from edgellm.engines.model.config import LARGEST_DEPTH, LARGEST_MERGE
from edgellm.engines.model.vision import LARGEST_IMAGE_SIDE, LARGEST_PATCH, VisionConfig

#: What the families' published configurations leave out, by their names.
_QWEN_DEFAULTS = {"num_heads": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN2_5_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "depth": 32,
    "hidden_act": "silu",
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN3_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_TOWER_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_ACTIVATIONS: dict[str | None, str] = {
    **SILU,
    **{"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"},
}
#: What `model_type` Qwen3.5's encoder has as published, and as transformers writes it.
_QWEN3_5_KINDS = (None, "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision")
#: The norms of Qwen's encoders have it fixed in their code.
_QWEN_EPSILON = 1e-6
#: What the language model has where LLaVA's and Gemma 3's files do not say.
_TEXT_HIDDEN_SIZES = {"llava": 4096, "gemma3": 2304}
#: Gemma 3's, where the file does not say.
GEMMA3_TOKENS, GEMMA3_IMAGE_TOKEN = 256, 262144
_GEMMA3_START, _GEMMA3_END = 255999, 256000


def read_vision_config(config: Mapping[str, Any], dtype: str | None = None) -> VisionConfig | None:
    """The vision encoder that a checkpoint's `config.json` describes; None for a text-only model.

    `dtype` ("float16", "bfloat16" or "float32") is what the tensors have, used where the file does not say. The
    prefixes of tensor names are those of the newest layout; `read_vision` sets them as a checkpoint has them. Raises
    UnsupportedModelError for a feature that is not implemented, CheckpointError for fields that are missing, of a wrong
    type or inconsistent; either lists all problems.
    """
    family = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict) or family not in _READERS:
        return None
    top = ConfigFields(dict(config), None, str(family), dtype)
    fields, values = _READERS[family](top)
    top.wrong += [f"vision_config: {problem}" for problem in fields.wrong]
    top.unsupported += [f"vision_config: {problem}" for problem in fields.unsupported]
    top.raise_problems()
    return VisionConfig(**values)


#: The fields of `vision_config`, and the arguments of `VisionConfig`.
_Read = tuple[ConfigFields, dict[str, Any]]


def _read_qwen2_5(top: ConfigFields) -> _Read:
    fields, values = _read_qwen(top, _QWEN2_5_DEFAULTS, SILU)
    merge, patch, window = values["spatial_merge_size"], values["patch_size"], fields.size("window_size")
    if merge and patch and (window % patch or window // patch % merge or not window):
        expected = f"a multiple of patch_size {patch} times spatial_merge_size {merge}"
        fields.expect("window_size", window, expected)
    layers = _layers(fields, "fullatt_block_indexes", values["num_layers"])
    return fields, values | {"window_size": window, "full_attention_layers": layers}


def _read_qwen3(top: ConfigFields) -> _Read:
    fields, values = _read_qwen(top, _QWEN3_DEFAULTS, _ACTIVATIONS)
    positions = fields.size("num_position_embeddings")
    if round(positions**0.5) ** 2 != positions:
        fields.expect("num_position_embeddings", positions, "the square of a whole number")
    layers = _layers(fields, "deepstack_visual_indexes", values["num_layers"])
    own = {"family": "qwen3_vl", "num_position_embeddings": positions, "deepstack_layers": layers}  # of mixtures, too
    return fields, values | own


def _read_qwen3_5(top: ConfigFields) -> _Read:
    """Qwen3-VL's encoder, of which the language model takes the last layer's features alone."""
    given = top.values["vision_config"]
    kind, taps = given.get("model_type"), given.get("deepstack_visual_indexes")
    if kind not in _QWEN3_5_KINDS:
        top.refuse("vision_config: model_type", kind, f"supported are {' and '.join(filter(None, _QWEN3_5_KINDS))}")
    if taps not in (None, []):
        top.refuse("vision_config: deepstack_visual_indexes", taps, "supported are no layers")
    top.values = top.values | {"vision_config": given | {"deepstack_visual_indexes": []}}
    fields, values = _read_qwen3(top)
    return fields, values | {"family": "qwen3_5"}  # that of its mixtures, too


def _read_qwen(top: ConfigFields, defaults: Mapping[str, Any], activations: Mapping[str | None, str]) -> _Read:
    """What Qwen's encoders have in common."""
    raw = dict(top.values["vision_config"])
    raw["in_channels"] = raw.get("in_channels", raw.get("in_chans"))  # the published files use the older name
    fields = ConfigFields(filled(raw, defaults, is_part=True), None, top.family)
    rope = raw.get("rope_parameters")
    theta = rope.get("rope_theta", 10000.0) if isinstance(rope, dict) else 10000.0
    if not is_number(theta) or theta <= 0:
        fields.expect("rope_parameters.rope_theta", theta, "a number above 0")
        theta = 10000.0
    text = _text_hidden_size(top)
    out_hidden_size = fields.size("out_hidden_size", text or None)
    if text and out_hidden_size and out_hidden_size != text:
        fields.wrong.append(f"out_hidden_size is {out_hidden_size}, but the language model's hidden_size is {text}")
    values = _dimensions(top, fields, depth="depth", heads="num_heads", channels="in_channels") | {
        "temporal_patch_size": fields.size("temporal_patch_size", largest=LARGEST_MERGE),
        "spatial_merge_size": fields.size("spatial_merge_size", largest=LARGEST_MERGE),
        "out_hidden_size": out_hidden_size,
        "activation": fields.word("hidden_act", activations),
        "norm_eps": _QWEN_EPSILON,
        "image_token_id": top.token_id("image_token_id", smallest=1),
        "vision_start_token_id": top.token_id("vision_start_token_id"),
        "vision_end_token_id": top.token_id("vision_end_token_id"),
        "tensor_prefix": "model.visual.",
        "projector_prefix": "model.visual.",
        "rope_theta": float(theta),
    }
    head_dim = values["hidden_size"] // max(1, values["num_heads"])
    if head_dim % 4:
        fields.wrong.append(f"the head size is {head_dim}, expected a multiple of 4: rows and columns turn by halves")
    return fields, values


def _read_llava(top: ConfigFields) -> _Read:
    fields, values = _read_tower(top, "clip_vision_model", tuple(_TOWERS))
    strategy = top.values.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        top.expect("vision_feature_select_strategy", strategy, "default or full")
    bias = top.values.get("multimodal_projector_bias", True)
    if not isinstance(bias, bool):
        top.expect("multimodal_projector_bias", bias, "true or false")
    key = "image_token_index" if "image_token_index" in top.values else "image_token_id"
    return fields, values | {
        "spatial_merge_size": 1,
        "image_token_id": top.token_id(key, smallest=1),
        "class_token": top.values["vision_config"].get("model_type") != "siglip_vision_model",
        "feature_layers": _feature_layers(top, values["num_layers"]),
        "drops_first_row": strategy == "default",
        "projector_activation": top.word("projector_hidden_act", {**_ACTIVATIONS, None: "gelu"}),
        "projector_bias": bool(bias),
    }


def _read_gemma3(top: ConfigFields) -> _Read:
    """A token is the mean of a square of patches: `mm_tokens_per_image` of them divide the image's square."""
    fields, values = _read_tower(top, "siglip_vision_model", ("siglip_vision_model",))
    tokens = top.size("mm_tokens_per_image", GEMMA3_TOKENS)
    patches, side = values["image_size"] // max(1, values["patch_size"]), math.isqrt(tokens)
    if side**2 != tokens or not side or patches % side:
        expected = f"the square of a whole number that divides {patches}, the patches along a side of the image"
        top.expect("mm_tokens_per_image", tokens, expected)
    return fields, values | {
        "spatial_merge_size": max(1, patches // max(1, side)),
        "image_token_id": top.token_id("image_token_index", GEMMA3_IMAGE_TOKEN),
        "vision_start_token_id": top.token_id("boi_token_index", _GEMMA3_START),
        "vision_end_token_id": top.token_id("eoi_token_index", _GEMMA3_END),
        "feature_layers": (values["num_layers"],),
    }


def _read_tower(top: ConfigFields, usual: str, supported: tuple[str, ...]) -> _Read:
    """What CLIP and SigLIP have in common."""
    raw = top.values["vision_config"]
    tower = raw.get("model_type", usual)
    if not isinstance(tower, str) or tower not in supported:
        top.refuse("vision_config.model_type", tower, f"supported are {', '.join(supported)}")
        tower = usual
    fields = ConfigFields(filled(raw, _TOWER_DEFAULTS | _TOWERS[tower], is_part=True), None, top.family)
    names = {"depth": "num_hidden_layers", "heads": "num_attention_heads", "channels": "num_channels"}
    dimensions, image_size = _dimensions(top, fields, **names), fields.size("image_size")
    patch = dimensions["patch_size"]
    if patch and image_size < patch:
        fields.wrong.append(f"image_size is {image_size}, smaller than patch_size {patch}")
    elif patch and image_size // patch > LARGEST_IMAGE_SIDE:
        fields.wrong.append(f"image_size is {image_size}: expected at most {LARGEST_IMAGE_SIDE} patches a side")
    values = dimensions | {
        "temporal_patch_size": 1,
        "out_hidden_size": _text_hidden_size(top),
        "activation": fields.word("hidden_act", _ACTIVATIONS),
        "norm_eps": fields.positive("layer_norm_eps"),
        "tensor_prefix": "model.vision_tower.",
        "projector_prefix": "model.multi_modal_projector.",
        "image_size": image_size,
    }
    if not values["out_hidden_size"]:
        top.wrong.append("text_config.hidden_size is missing, expected that of the language model")
    return fields, values


_READERS = {
    "qwen2_5_vl": _read_qwen2_5,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _read_qwen3),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _read_qwen3_5),
    "llava": _read_llava,
    "gemma3": _read_gemma3,
}


def _dimensions(top: ConfigFields, fields: ConfigFields, depth: str, heads: str, channels: str) -> dict[str, Any]:
    """What every encoder has, under the family's names."""
    sizes: dict[str, Any] = {
        "family": top.family,
        "dtype": _dtype(top),
        "hidden_size": fields.size("hidden_size"),
        "intermediate_size": fields.size("intermediate_size"),
        "num_layers": fields.size(depth, largest=LARGEST_DEPTH),
        "num_heads": fields.size(heads),
        "in_channels": fields.size(channels),
        "patch_size": fields.size("patch_size", largest=LARGEST_PATCH),
    }
    if sizes["num_heads"] and sizes["hidden_size"] % sizes["num_heads"]:
        fields.wrong.append(f"hidden_size {sizes['hidden_size']} is not a multiple of {heads} {sizes['num_heads']}")
    if sizes["in_channels"] not in (0, 3):
        fields.refuse(channels, sizes["in_channels"], "supported are images of 3 channels")
    return sizes


def _layers(fields: ConfigFields, key: str, depth: int) -> tuple[int, ...]:
    """Distinct layer indices in ascending order: outputs are told apart by their place in this list."""
    value = fields.values.get(key)
    if (
        not isinstance(value, list)
        or not all(is_integer(index) and 0 <= index < depth for index in value)
        or value != sorted(set(value))
    ):
        fields.expect(key, value, f"ascending layer indices from 0 to {depth - 1}")
        return ()
    return tuple(value)


def _feature_layers(top: ConfigFields, depth: int) -> tuple[int, ...]:
    """`vision_feature_layer` counted from the first hidden state: 0 enters the first layer, `depth` leaves the last."""
    value = top.values.get("vision_feature_layer", -2)
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(is_integer(index) and -depth - 1 <= index <= depth for index in listed):
        top.expect("vision_feature_layer", value, f"one index or several from {-depth - 1} to {depth}")
        return (depth,)
    return tuple(index % (depth + 1) for index in listed)


def _text_hidden_size(top: ConfigFields) -> int:
    """The language model's: newer files have it in `text_config`, older ones of Qwen's at the top; 0 if neither.

    LLaVA's and Gemma 3's leave it out where it is that of their classes.
    """
    text = top.values.get("text_config")
    value = text.get("hidden_size") if isinstance(text, dict) else None
    value = top.values.get("hidden_size") if value is None else value
    if value is None and isinstance(text, dict):
        value = _TEXT_HIDDEN_SIZES.get(top.family)
    return value if is_integer(value) and value > 0 else 0


def _dtype(top: ConfigFields) -> str:
    text = top.values.get("text_config")
    declared = (text.get("dtype") or text.get("torch_dtype")) if isinstance(text, dict) else None
    return top.dtype(declared if isinstance(declared, str) else None)


#: What may begin the names of tensors, the newest layout first; longer beginnings before those that they begin with.
_QWEN_PREFIXES = ("model.visual.", "visual.")
_TOWER_PREFIXES = (
    "model.vision_tower.vision_model.",
    "model.vision_tower.",
    "vision_tower.vision_model.",
    "vision_tower.",
)
_PROJECTOR_PREFIXES = ("model.multi_modal_projector.", "multi_modal_projector.")


def read_vision(checkpoint: Checkpoint) -> VisionConfig | None:
    """The vision encoder of a checkpoint, its tensors checked; None for a text-only model.

    Raises UnsupportedModelError and CheckpointError as `read_vision_config` does, and CheckpointError that lists every
    missing, unknown and mis-shaped tensor.
    """
    config = read_vision_config(checkpoint.config, checkpoint.dtype)
    if config is None:
        return None
    names = checkpoint.tensors
    if config.image_side:
        tower, projector = first_prefix(_TOWER_PREFIXES, names), first_prefix(_PROJECTOR_PREFIXES, names)
    else:
        tower = projector = first_prefix(_QWEN_PREFIXES, names)
    config = replace(config, tensor_prefix=tower, projector_prefix=projector)
    unread = unused_tensors(config) if config.image_side else ()
    problems = checkpoint.problems([*vision_weights(config), *host_weights(config)], vision=True, unread=unread)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{checkpoint.path}: the weights of the vision encoder do not fit config.json ({len(problems)} "
            f"differences):\n{listed}\nTake config.json and weights of one and the same model, or build it without "
            "images: --max-image-patches 0"
        )
    return config


def position_table(checkpoint: Checkpoint, config: VisionConfig) -> np.ndarray | None:
    """The table of positions [positions, H] float32 of Qwen3-VL and Qwen3.5; None where the family has none.

    Raises CheckpointError where a value is infinite or NaN.
    """
    for spec in host_weights(config):
        return load_numpy_weights(checkpoint, [spec])[spec.name]
    return None
