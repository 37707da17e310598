"""The configurations of encoders that see parts of pictures: SmolVLM's, LFM2-VL's and InternVL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm.engines.families.decoders import filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import ACTIVATIONS, Read, dimensions, read_tower, text_hidden_size
from edgellm.engines.formats.strict_formats import is_number
from edgellm.engines.model.config import LARGEST_MERGE

#: What stands for an image's tokens where the file does not say.
SMOLVLM_IMAGE_TOKEN, LFM2_VL_IMAGE_TOKEN, INTERNVL_IMAGE_TOKEN = 128257, 396, 151667
_IDEFICS3_VISION = {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
_INTERNVL_VISION = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}


def _read_smolvlm(top: ConfigFields) -> Read:
    """Idefics3's and SmolVLM's."""
    raw = top.values["vision_config"]
    towers = ("siglip_vision_model", "idefics3_vision", "smolvlm_vision", "idefics3")
    if raw.get("model_type") in towers[1:]:
        raw = raw | {"model_type": towers[0]}
    given = {key: value for key, value in raw.items() if value is not None}
    top.values = top.values | {"vision_config": _IDEFICS3_VISION | given}
    fields, values = read_tower(top, towers[0], towers[:1])
    side, merge = values["image_size"] // max(1, values["patch_size"]), top.size("scale_factor", 2, LARGEST_MERGE)
    _check_square(fields, values, side, merge)
    if side and not _has_places_of_its_own(side):
        fields.refuse("image_size", values["image_size"], f"{side} patches a side share positions as they are rounded")
    return fields, values | {
        "family": "smolvlm",
        "spatial_merge_size": merge,
        "image_token_id": top.token_id("image_token_id", SMOLVLM_IMAGE_TOKEN),
        "feature_layers": (values["num_layers"],),
        "tensor_prefix": "model.vision_model.",
        "projector_prefix": "model.connector.",
    }


def _has_places_of_its_own(side: int) -> bool:
    """Whether each patch of so many a side finds its own position by the fraction of the side at which it stands, as
    transformers rounds these to float32; for some sides (25, 29, 31, ..) neighbours find the same."""
    bounds = np.arange(1, side) * (1 / side) if side > 1 else np.zeros(0)
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    return bool((np.searchsorted(bounds.astype(np.float32), places, side="right") == np.arange(side)).all())


def _read_lfm2_vl(top: ConfigFields) -> Read:
    """Siglip2 for pictures of any shape."""
    raw, name = dict(top.values["vision_config"]), "siglip2_vision_model"
    if raw.get("model_type", name) != name:
        top.refuse("vision_config.model_type", raw["model_type"], f"supported is {name}")
    # It has no size of its own: that of the table of positions stands in its place while the rest is read.
    raw |= {"model_type": "siglip_vision_model", "image_size": None}
    top.values = top.values | {"vision_config": raw}
    fields, values = read_tower(top, "siglip_vision_model", ("siglip_vision_model",))
    positions, bias, has_norm = (
        fields.size("num_patches", 256),
        *(top.values.get(key, True) for key in ("projector_bias", "projector_use_layernorm")),
    )
    if round(positions**0.5) ** 2 != positions:
        fields.expect("num_patches", positions, "the square of a whole number")
    for key, value in (("projector_bias", bias), ("projector_use_layernorm", has_norm)):
        if not isinstance(value, bool):
            top.expect(key, value, "true or false")
    return fields, values | {
        "family": "lfm2_vl",
        "image_size": None,
        "spatial_merge_size": top.size("downsample_factor", 2, LARGEST_MERGE),
        "image_token_id": top.token_id("image_token_id", LFM2_VL_IMAGE_TOKEN),
        "num_position_embeddings": positions,
        "feature_layers": (values["num_layers"],),
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "projector_size": top.size("projector_hidden_size", 2560),
        "projector_bias": bool(bias),
        "projector_norm": bool(has_norm),
    }


def _read_internvl(top: ConfigFields) -> Read:
    """InternViT, whose class token is dropped behind the last layer."""
    given = dict(top.values["vision_config"])
    for key in ("image_size", "patch_size"):
        if isinstance(given.get(key), list) and len(set(given[key])) == 1:
            given[key] = given[key][0]  # height and width
    fields = ConfigFields(filled(given, _INTERNVL_VISION, is_part=True), None, top.family)
    names = {"depth": "num_hidden_layers", "heads": "num_attention_heads", "channels": "num_channels"}
    values, ratio = dimensions(top, fields, **names), top.values.get("downsample_ratio", 0.5)
    merge = round(1 / ratio) if is_number(ratio) and 1 / LARGEST_MERGE <= ratio <= 1 else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        top.expect("downsample_ratio", ratio, f"1 divided by a whole number up to {LARGEST_MERGE}")
    size, words = fields.size("image_size"), {"layer_norm": "", "rms_norm": "rms", None: ""}
    _check_square(fields, values, size // max(1, values["patch_size"]), merge)
    for key, expected in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        if top.values.get(key, expected) != expected:
            top.refuse(key, top.values[key], f"supported is {expected}")
    if not fields.switch("use_absolute_position_embeddings"):
        fields.refuse("use_absolute_position_embeddings", False, "supported is true")
    return fields, values | {
        "temporal_patch_size": 1,
        "spatial_merge_size": max(1, merge),
        "out_hidden_size": text_hidden_size(top),
        "activation": fields.word("hidden_act", ACTIVATIONS),
        "norm_eps": fields.positive("layer_norm_eps"),
        "image_token_id": top.token_id("image_token_id", INTERNVL_IMAGE_TOKEN),
        "tensor_prefix": "model.vision_tower.",
        "projector_prefix": "model.multi_modal_projector.",
        "image_size": size,
        "class_token": True,
        "feature_layers": (values["num_layers"],),
        "drops_first_row": True,
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "attention_bias": fields.switch("attention_bias"),
        "qk_norm": fields.switch("use_qk_norm"),
        "rms_norms": bool(fields.word("norm_type", words)),
        "final_norm": not fields.switch("use_mean_pooling"),
    }


def _check_square(fields: ConfigFields, values: dict[str, Any], side: int, merge: int) -> None:
    if values["patch_size"] and (not side or (merge and side % merge)):
        expected = f"a square whose side is a multiple of {merge} patches of {values['patch_size']}"
        fields.expect("image_size", fields.values.get("image_size"), expected)


#: By `model_type`.
READERS: dict[str, Callable[[ConfigFields], Read]] = {
    "smolvlm": _read_smolvlm,
    "idefics3": _read_smolvlm,
    "lfm2_vl": _read_lfm2_vl,
    "internvl": _read_internvl,
}
