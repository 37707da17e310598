"""How a multimodal checkpoint's `config.json` becomes a `VisionConfig`, and its tensors are checked against that."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import gemma4_encoders, pixtral, tiled_vision, vision_fields
from edgellm.engines.families.decoders import SILU, class_defaults, filled
from edgellm.engines.families.fields import ConfigFields, first_prefix
from edgellm.engines.families.vision_encoders import host_weights, unused_tensors, vision_weights
from edgellm.engines.model.config import LARGEST_MERGE
from edgellm.engines.model.vision import VisionConfig

#: What `model_type` Qwen3.5's encoder has as published, and as transformers writes it.
_QWEN3_5_KINDS = (None, "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision")
#: The norms of Qwen's encoders have it fixed in their code.
_QWEN_EPSILON = 1e-6


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
    top = ConfigFields(filled(config, class_defaults(str(family))), None, str(family), dtype)
    fields, values = _READERS[family](top)
    top.wrong += [f"vision_config: {problem}" for problem in fields.wrong]
    top.unsupported += [f"vision_config: {problem}" for problem in fields.unsupported]
    top.raise_problems()
    tower, projector = _prefixes(bool(values.get("feature_layers")), ())
    return VisionConfig(tensor_prefix=tower, projector_prefix=projector, **values)


def _prefixes(is_tower: bool, names: Iterable[str]) -> list[str]:
    """What begins the `names` of tensors of the encoder, and of what leads from it to the language model."""
    kinds = ("towers", "projectors") if is_tower else ("qwen", "qwen")
    return [first_prefix(_PREFIXES[kind], names) for kind in kinds]


def _read_qwen2_5(top: ConfigFields) -> vision_fields.Read:
    fields, values = _read_qwen(top, "qwen2_5_vl_vision", SILU)
    merge, patch, window = values["spatial_merge_size"], values["patch_size"], fields.size("window_size")
    if merge and patch and (window % patch or window // patch % merge or not window):
        expected = f"a multiple of patch_size {patch} times spatial_merge_size {merge}"
        fields.expect("window_size", window, expected)
    layers = vision_fields.listed_layers(fields, "fullatt_block_indexes", values["num_layers"])
    seconds = fields.positive("tokens_per_second", 4, largest=1000)
    return fields, values | {"window_size": window, "full_attention_layers": layers, "tokens_per_second": seconds}


def _read_qwen3(top: ConfigFields) -> vision_fields.Read:
    fields, values = _read_qwen(top, "qwen3_vl_vision", vision_fields.ACTIVATIONS)
    return fields, values | {
        "family": "qwen3_vl",  # of mixtures, too
        "num_position_embeddings": fields.square("num_position_embeddings"),
        "deepstack_layers": vision_fields.listed_layers(fields, "deepstack_visual_indexes", values["num_layers"]),
    }


def _read_qwen3_5(top: ConfigFields) -> vision_fields.Read:
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


def _read_qwen(top: ConfigFields, part: str, activations: Mapping[str | None, str]) -> vision_fields.Read:
    """What Qwen's encoders have in common."""
    raw = dict(top.values["vision_config"])
    raw["in_channels"] = raw.get("in_channels", raw.get("in_chans"))  # the published files use the older name
    fields = ConfigFields(filled(raw, class_defaults(part), is_part=True), None, top.family)
    text = vision_fields.text_hidden_size(top)
    out_hidden_size = fields.size("out_hidden_size", text or None)
    if text and out_hidden_size and out_hidden_size != text:
        fields.wrong.append(f"out_hidden_size is {out_hidden_size}, but the language model's hidden_size is {text}")
    values = vision_fields.dimensions(top, fields, depth="depth", heads="num_heads", channels="in_channels") | {
        "temporal_patch_size": fields.size("temporal_patch_size", largest=LARGEST_MERGE),
        "spatial_merge_size": fields.size("spatial_merge_size", largest=LARGEST_MERGE),
        "out_hidden_size": out_hidden_size,
        "activation": fields.word("hidden_act", activations),
        "norm_eps": _QWEN_EPSILON,
        "image_token_id": top.token_id("image_token_id", smallest=1),
        "vision_start_token_id": top.token_id("vision_start_token_id"),
        "vision_end_token_id": top.token_id("vision_end_token_id"),
    }
    return fields, vision_fields.rotated(fields, values)


def _read_llava(top: ConfigFields) -> vision_fields.Read:
    fields, values = vision_fields.read_tower(top, "clip_vision_model", "siglip_vision_model")
    strategy = top.values.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        top.expect("vision_feature_select_strategy", strategy, "default or full")
    return fields, values | {
        "image_token_id": top.token_id(top.image_key, smallest=1),
        "class_token": top.values["vision_config"].get("model_type") != "siglip_vision_model",
        "feature_layers": vision_fields.feature_layers(top, values["num_layers"]),
        "drops_first_row": strategy == "default",
        "projector_activation": top.word("projector_hidden_act", {**vision_fields.ACTIVATIONS, None: "gelu"}),
        "projector_bias": top.switch("multimodal_projector_bias", True),
    }


def _read_paligemma(top: ConfigFields) -> vision_fields.Read:
    """SigLIP, and one linear layer behind its last norm; a token for each patch."""
    top.values = top.values | {"vision_config": class_defaults("paligemma_vision") | top.values["vision_config"]}
    fields, values = vision_fields.read_tower(top, "siglip_vision_model")
    return fields, values | {"image_token_id": top.token_id(top.image_key)}


def _read_gemma3(top: ConfigFields) -> vision_fields.Read:
    """A token is the mean of a square of patches: `mm_tokens_per_image` of them divide the image's square."""
    fields, values = vision_fields.read_tower(top, "siglip_vision_model")
    tokens = top.size("mm_tokens_per_image")
    patches, side = values["image_size"] // max(1, values["patch_size"]), math.isqrt(tokens)
    if side**2 != tokens or not side or patches % side:
        expected = f"the square of a whole number that divides {patches}, the patches along a side of the image"
        top.expect("mm_tokens_per_image", tokens, expected)
    return fields, values | {
        "spatial_merge_size": max(1, patches // max(1, side)),
        "image_token_id": top.token_id(top.image_key),
        "vision_start_token_id": top.token_id("boi_token_index"),
        "vision_end_token_id": top.token_id("eoi_token_index"),
    }


_READERS = {
    "qwen2_5_vl": _read_qwen2_5,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _read_qwen3),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _read_qwen3_5),
    "llava": _read_llava,
    "gemma3": _read_gemma3,
    "paligemma": _read_paligemma,
    "mistral3": pixtral.read_pixtral,
    "gemma4": gemma4_encoders.read_gemma4_vision,
    **tiled_vision.READERS,
}


#: What may begin the names of tensors, the newest layout first; longer beginnings before those that they begin with.
_PREFIXES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def read_vision(checkpoint: Checkpoint) -> VisionConfig | None:
    """The vision encoder of a checkpoint, its tensors checked; None for a text-only model.

    Raises UnsupportedModelError and CheckpointError as `read_vision_config` does, and CheckpointError that lists every
    missing, unknown and mis-shaped tensor.
    """
    config = read_vision_config(checkpoint.config, checkpoint.dtype)
    if config is None:
        return None
    tower, projector = _prefixes(bool(config.feature_layers), checkpoint.tensors)
    config = replace(config, tensor_prefix=tower, projector_prefix=projector)
    unread = unused_tensors(config) if config.feature_layers else ()
    problems = checkpoint.problems([*vision_weights(config), *host_weights(config)], encoders=True, unread=unread)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(
            f"{checkpoint.path}: the weights of the vision encoder do not fit config.json ({len(problems)} "
            f"differences):\n{listed}\nTake config.json and weights of one and the same model, or build it without "
            "images: --max-image-patches 0"
        )
    return config


def position_table(checkpoint: Checkpoint, config: VisionConfig, patches: int) -> np.ndarray | None:
    """The table of positions [positions, H] float32, Gemma 4's [2, positions, H] of columns and rows, those that images
    of so many patches have; None where the family has none. Raises CheckpointError where a value is infinite or NaN."""
    for spec in host_weights(config):
        table = load_numpy_weights(checkpoint, [spec])[spec.name]
        return table if table.ndim == 2 else table[:, : patches // config.spatial_merge_size].copy()
    return None
