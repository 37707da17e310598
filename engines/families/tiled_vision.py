"""The configurations of encoders that see parts of pictures: SmolVLM's, LFM2-VL's, InternVL's and MiniCPM-V's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import ACTIVATIONS, Read, read_tower
from edgellm.engines.formats.strict_formats import is_integer, is_number
from edgellm.engines.model.config import LARGEST_MERGE


def _read_smolvlm(top: ConfigFields) -> Read:
    fields, values = read_tower(top, "idefics3_vision", ("idefics3_vision", "smolvlm_vision", "siglip_vision_model"))
    merge = top.size("scale_factor", 2, LARGEST_MERGE)
    side = _checked_side(fields, values, merge)
    if not _has_places_of_its_own(side):
        fields.refuse("image_size", values["image_size"], f"of {side} patches a side two share a position as rounded")
    return fields, values | {
        "family": "smolvlm",
        "spatial_merge_size": merge,
        "image_token_id": top.token_id(top.image_key),
        "feature_layers": (values["num_layers"],),
    }


def _has_places_of_its_own(side: int) -> bool:
    """Whether each patch of so many a side finds its own position by the fraction of the side at which it stands, as
    transformers rounds these to float32; for some sides (25, 29, 31, ..) neighbours find the same."""
    bounds = (np.arange(1, side) / max(1, side)).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(max(1, side)))
    return bool((np.searchsorted(bounds, places, side="right") == np.arange(side)).all())


def _read_lfm2_vl(top: ConfigFields) -> Read:
    """Siglip2 for pictures of any shape."""
    fields, values = read_tower(top, "siglip2_vision_model", ("siglip2_vision_model",))
    return fields, values | {
        "image_size": None,
        "spatial_merge_size": top.size("downsample_factor", 2, LARGEST_MERGE),
        "image_token_id": top.token_id(top.image_key),
        "num_position_embeddings": fields.square("num_patches"),
        "feature_layers": (values["num_layers"],),
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "projector_size": top.size("projector_hidden_size", 2560),
        "projector_bias": top.switch("projector_bias", True),
        "projector_norm": top.switch("projector_use_layernorm", True),
    }


def _read_internvl(top: ConfigFields) -> Read:
    """InternViT, whose class token is dropped behind the last layer."""
    _take_squares(top)
    fields, values = read_tower(top, "internvl_vision", ("internvl_vision",))
    ratio = top.values.get("downsample_ratio", 0.5)
    merge = round(1 / ratio) if is_number(ratio) and 1 / LARGEST_MERGE <= ratio <= 1 else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        top.expect("downsample_ratio", ratio, f"1 divided by a whole number up to {LARGEST_MERGE}")
    _checked_side(fields, values, merge)
    for key, expected in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
        if top.values.get(key, expected) != expected:
            top.refuse(key, top.values[key], f"supported is {expected}")
    if not fields.switch("use_absolute_position_embeddings"):
        fields.refuse("use_absolute_position_embeddings", False, "supported is true")
    return fields, values | {
        "spatial_merge_size": max(1, merge),
        "image_token_id": top.token_id(top.image_key),
        "class_token": True,
        "feature_layers": (values["num_layers"],),
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "attention_bias": fields.switch("attention_bias"),
        "qk_norm": fields.switch("use_qk_norm"),
        "rms_norms": bool(fields.word("norm_type", {"layer_norm": "", "rms_norm": "rms", None: ""})),
        "final_norm": not fields.switch("use_mean_pooling"),
    }


def _read_minicpmv4_6(top: ConfigFields) -> Read:
    """SigLIP for pictures of any shape, which merges squares of four patches within its layers, and again behind."""
    _take_squares(top)
    fields, values = read_tower(top, "minicpmv4_6_vision", ("minicpmv4_6_vision",))
    for found, key, expected in (
        *((top, "downsample_mode", "16x"), (top, "merger_times", 1), (top, "drop_vision_last_layer", False)),
        *((top, "merge_kernel_size", [2, 2]), (fields, "window_kernel_size", [2, 2])),
    ):
        if found.values.get(key, expected) != expected:
            found.refuse(key, found.values[key], f"supported is {expected}")
    layer, layers = top.values.get("insert_layer_id", fields.values["insert_layer_id"]), values["num_layers"]
    if not is_integer(layer) or not 0 <= layer < max(1, layers):
        top.expect("insert_layer_id", layer, f"a layer, 0 to {layers - 1}")
    return fields, values | {
        "image_size": None,
        "spatial_merge_size": 4,
        "image_token_id": top.token_id(top.image_key),
        "num_position_embeddings": (values["image_size"] // max(1, values["patch_size"])) ** 2,
        "feature_layers": (layers,),
        "merging_layer": layer,
    }


def _take_squares(top: ConfigFields) -> None:
    """Sizes of both edges, where they are alike, become one number."""
    given = dict(top.values["vision_config"])
    for key in ("image_size", "patch_size"):
        if isinstance(given.get(key), list) and len(set(map(str, given[key]))) == 1:
            given[key] = given[key][0]  # height and width
    top.values = top.values | {"vision_config": given}


def _checked_side(fields: ConfigFields, values: dict[str, Any], merge: int) -> int:
    """Patches along a side of the square picture, which `merge` of them must divide."""
    side = int(values["image_size"] // max(1, values["patch_size"]))
    if merge and side % merge:
        expected = f"a side of a multiple of {merge} patches of {values['patch_size']}"
        fields.expect("image_size", values["image_size"], expected)
    return side


#: By `model_type`.
READERS: dict[str, Callable[[ConfigFields], Read]] = {
    "smolvlm": _read_smolvlm,
    "idefics3": _read_smolvlm,
    "lfm2_vl": _read_lfm2_vl,
    "internvl": _read_internvl,
    "minicpmv4_6": _read_minicpmv4_6,
}
