"""What the readers of vision encoders share: dimensions, rotary embeddings, and the towers of CLIP and SigLIP."""

from __future__ import annotations

from typing import Any

from edgellm.engines.families.decoders import SILU, class_defaults, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.formats.strict_formats import is_integer, is_number
from edgellm.engines.model.config import LARGEST_DEPTH
from edgellm.engines.model.vision import LARGEST_IMAGE_SIDE, LARGEST_PATCH

ACTIVATIONS: dict[str | None, str] = {
    **SILU,
    **{"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu"},
}
#: What the language model has where LLaVA's and Gemma 3's files do not say.
_TEXT_HIDDEN_SIZES = {"voxtral_realtime": 3072, "llava": 4096, "gemma3": 2304, "paligemma": 2048}

#: The fields of `vision_config`, and the arguments of `VisionConfig`.
Read = tuple[ConfigFields, dict[str, Any]]


def part_of(top: ConfigFields, *kinds: str) -> ConfigFields:
    """The fields of the encoder, with the defaults of its class: one of these `kinds`, by default the first."""
    raw = top.values["vision_config"]
    kind = raw.get("model_type", kinds[0])
    if not isinstance(kind, str) or kind not in kinds:
        verb = "is" if len(kinds) == 1 else "are"
        top.refuse("vision_config.model_type", kind, f"supported {verb} {', '.join(kinds)}")
        kind = kinds[0]
    return ConfigFields(filled(raw, class_defaults(kind), is_part=True), None, top.family)


def read_tower(top: ConfigFields, *kinds: str) -> Read:
    """What CLIP and SigLIP have in common, of these `kinds`; a patch is a token, taken behind the last layer, unless
    the caller says otherwise."""
    fields = part_of(top, *kinds)
    names = {"depth": "num_hidden_layers", "heads": "num_attention_heads", "channels": "num_channels"}
    sizes, image_size = dimensions(top, fields, **names), fields.size("image_size")
    patch = sizes["patch_size"]
    if patch and image_size < patch:
        fields.wrong.append(f"image_size is {image_size}, smaller than patch_size {patch}")
    elif patch and image_size // patch > LARGEST_IMAGE_SIDE:
        fields.wrong.append(f"image_size is {image_size}: expected at most {LARGEST_IMAGE_SIDE} patches a side")
    values = sizes | {
        "temporal_patch_size": 1,
        "out_hidden_size": text_hidden_size(top),
        "activation": fields.word("hidden_act", ACTIVATIONS),
        "norm_eps": fields.positive("layer_norm_eps"),
        "image_size": image_size,
        "spatial_merge_size": 1,
        "feature_layers": (sizes["num_layers"],),
    }
    if not values["out_hidden_size"]:
        top.wrong.append("text_config.hidden_size is missing, expected that of the language model")
    return fields, values


def dimensions(top: ConfigFields, fields: ConfigFields, depth: str, heads: str, channels: str) -> dict[str, Any]:
    """What every encoder has, under the family's names."""
    text = top.section("text_config")
    declared = text.get("dtype") or text.get("torch_dtype")
    sizes: dict[str, Any] = {
        "family": top.family,
        "dtype": top.dtype(declared if isinstance(declared, str) else None),
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


def listed_layers(fields: ConfigFields, key: str, depth: int) -> tuple[int, ...]:
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


def rotated(fields: ConfigFields, values: dict[str, Any]) -> dict[str, Any]:
    """The `values` of an encoder whose heads are turned by rows and columns, and the base of that; the first files have
    it by itself."""
    theta = fields.section("rope_parameters").get("rope_theta", fields.values.get("rope_theta", 10000.0))
    if not is_number(theta) or theta <= 0:
        fields.expect("rope_parameters.rope_theta", theta, "a number above 0")
        theta = 10000.0
    head_dim = values["hidden_size"] // max(1, values["num_heads"])
    if head_dim % 4:
        fields.wrong.append(f"the head size is {head_dim}, expected a multiple of 4: rows and columns turn by halves")
    return values | {"rope_theta": float(theta)}


def feature_layers(top: ConfigFields, depth: int, usual: int = -2) -> tuple[int, ...]:
    """`vision_feature_layer`, or the `usual`, counted from the first hidden state: 0 enters the first layer, `depth`
    leaves the last."""
    value = top.values.get("vision_feature_layer", usual)
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(is_integer(index) and -depth - 1 <= index <= depth for index in listed):
        top.expect("vision_feature_layer", value, f"one index or several from {-depth - 1} to {depth}")
        return (depth,)
    return tuple(index % (depth + 1) for index in listed)


def text_hidden_size(top: ConfigFields) -> int:
    """The language model's: newer files have it in `text_config`, older ones of Qwen's at the top; 0 if neither.
    LLaVA's and Gemma 3's leave it out where it is that of their classes."""
    text = top.values.get("text_config")
    value = text.get("hidden_size") if isinstance(text, dict) else None
    value = top.values.get("hidden_size") if value is None else value
    if value is None and isinstance(text, dict):
        value = _TEXT_HIDDEN_SIZES.get(top.family)
    return value if is_integer(value) and value > 0 else 0
