"""The configurations and programs of encoders that see parts of pictures: SmolVLM's, LFM2-VL's, InternVL's and
MiniCPM-V's.

SmolVLM's, LFM2-VL's and MiniCPM-V's are SigLIP, the latter two of any number of patches; InternVL's has a class token
and scales what attention and MLP add. All put the patches of a token side by side before they are projected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import ACTIVATIONS, Read, read_tower
from edgellm.engines.families.vision_parts import (
    PROJECTOR,
    QKV,
    TOWER,
    TowerWeights,
    layer_steps,
    projection_steps,
    self_attention_steps,
    tower_steps,
)
from edgellm.engines.formats.strict_formats import is_integer, is_number
from edgellm.engines.model import encoder_steps
from edgellm.engines.model.config import LARGEST_MERGE
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Add, Input, LinearResidual, Norm, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig, embedding_rows


def _read_smolvlm(top: ConfigFields) -> Read:
    fields, values = read_tower(top, "idefics3_vision", "smolvlm_vision", "siglip_vision_model")
    merge = top.size("scale_factor", 2, LARGEST_MERGE)
    side = _checked_side(fields, values, merge)
    if not _has_places_of_its_own(side):
        fields.refuse("image_size", values["image_size"], f"of {side} patches a side two share a position as rounded")
    return fields, values | {
        "family": "smolvlm",
        "spatial_merge_size": merge,
        "image_token_id": top.token_id(top.image_key),
    }


def _has_places_of_its_own(side: int) -> bool:
    """Whether each patch of so many a side finds its own position by the fraction of the side at which it stands, as
    transformers rounds these to float32; for some sides (25, 29, 31, ..) neighbours find the same."""
    bounds = (np.arange(1, side) / max(1, side)).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(max(1, side)))
    return bool((np.searchsorted(bounds, places, side="right") == np.arange(side)).all())


def _read_lfm2_vl(top: ConfigFields) -> Read:
    """Siglip2 for pictures of any shape."""
    fields, values = read_tower(top, "siglip2_vision_model")
    return fields, values | {
        "image_size": None,
        "spatial_merge_size": top.size("downsample_factor", 2, LARGEST_MERGE),
        "image_token_id": top.token_id(top.image_key),
        "num_position_embeddings": fields.square("num_patches"),
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "projector_size": top.size("projector_hidden_size", 2560),
        "projector_bias": top.switch("projector_bias", True),
        "projector_norm": top.switch("projector_use_layernorm", True),
    }


def _read_internvl(top: ConfigFields) -> Read:
    """InternViT, whose class token is dropped behind the last layer."""
    _take_squares(top)
    fields, values = read_tower(top, "internvl_vision")
    ratio = top.values.get("downsample_ratio", 0.5)
    merge = round(1 / ratio) if is_number(ratio) and 1 / LARGEST_MERGE <= ratio <= 1 else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        top.expect("downsample_ratio", ratio, f"1 divided by a whole number up to {LARGEST_MERGE}")
    _checked_side(fields, values, merge)
    top.only(vision_feature_layer=-1, vision_feature_select_strategy="default")
    if not fields.switch("use_absolute_position_embeddings"):
        fields.refuse("use_absolute_position_embeddings", False, "supported is true")
    return fields, values | {
        "spatial_merge_size": max(1, merge),
        "image_token_id": top.token_id(top.image_key),
        "class_token": True,
        "projector_activation": top.word("projector_hidden_act", {**ACTIVATIONS, None: "gelu"}),
        "attention_bias": fields.switch("attention_bias"),
        "qk_norm": fields.switch("use_qk_norm"),
        "rms_norms": bool(fields.word("norm_type", {"layer_norm": "", "rms_norm": "rms", None: ""})),
        "final_norm": not fields.switch("use_mean_pooling"),
    }


def _read_minicpmv4_6(top: ConfigFields) -> Read:
    """SigLIP for pictures of any shape, which merges squares of four patches within its layers, and again behind."""
    _take_squares(top)
    fields, values = read_tower(top, "minicpmv4_6_vision")
    top.only(downsample_mode="16x", merger_times=1, drop_vision_last_layer=False, merge_kernel_size=[2, 2])
    fields.only(window_kernel_size=[2, 2])
    layer, layers = top.values.get("insert_layer_id", fields.values["insert_layer_id"]), values["num_layers"]
    if not is_integer(layer) or not 0 <= layer < max(1, layers):
        top.expect("insert_layer_id", layer, f"a layer, 0 to {layers - 1}")
    return fields, values | {
        "image_size": None,
        "spatial_merge_size": 4,
        "image_token_id": top.token_id(top.image_key),
        "num_position_embeddings": (values["image_size"] // max(1, values["patch_size"])) ** 2,
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


#: Of the layer norm in a projector, which has that of its class.
_PROJECTOR_EPSILON = 1e-5


def smolvlm_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """Idefics3's, too: one linear layer behind the tower's norm."""
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    connector = TowerWeights("connector.", config.projector_prefix)
    merged = config.merge_patches * config.hidden_size
    linear = connector.linear("modality_projection.proj", config.out_hidden_size, merged, False)
    return [
        *tower_steps(config, tower),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", config.hidden_size)),
        *_blocks(config, shape, "normed"),
        NormLinear("image_embeddings", (Input("merged"),), linear),
    ]


def lfm2_vl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, the padding behind them; positions are made for each grid."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    embedding = tower.linear("embeddings.patch_embedding", hidden, config.patch_elements)
    return [
        NormLinear("hidden_0", (Input("patches"),), embedding),
        Add("hidden_0", "hidden_0", "position_embeddings"),
        *layer_steps(config, tower, shape.tokens, "attention_mask"),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        *_merged(config, shape, "normed"),
        *_projector(config, config.projector_size or 0, config.projector_norm),
    ]


def minicpmv4_6_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, in these square by square, the padding behind them: behind one of the
    layers each square of four becomes one row, their mean and what an MLP makes of all four."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    assert config.merging_layer is not None  # which the family has
    rows, patch = shape.tokens, (config.in_channels, config.patch_size, config.patch_size)
    merging, wide, squares = config.merging_layer + 1, 4 * config.hidden_size, (1, rows // 4, 4 * config.hidden_size)
    value, name = f"hidden_{merging}", "vit_merger."
    first = tower.linear(f"{name}linear_1", 4 * config.intermediate_size, wide)
    second = tower.linear(f"{name}linear_2", hidden, 4 * config.intermediate_size)
    merger = TowerWeights("merger.", config.projector_prefix, 1e-6)
    linears = merger.linear("mlp.0.linear_1", wide, wide), merger.linear("mlp.0.linear_2", config.out_hidden_size, wide)
    embedding = tower.convolution("embeddings.patch_embedding", hidden, patch, True)
    return [
        NormLinear("hidden_0", (Input("patches"),), embedding),
        Add("hidden_0", "hidden_0", "position_embeddings"),
        *layer_steps(config, tower, rows, "attention_mask", range(merging)),
        *self_attention_steps(config, tower, name, value, value, (rows // 4, 4)),
        encoder_steps.AveragePool("means", value, hidden, 2, 2, rows // 2),
        Reshape("squares", value, squares),
        NormLinear("activation", (Input("squares", (tower.layer_norm(f"{name}pre_norm", wide),)),), first, "gelu_tanh"),
        LinearResidual(value, "activation", second, "means"),
        *layer_steps(config, tower, rows // 4, "merged_mask", range(merging, config.num_layers)),
        Normed("normed", f"hidden_{config.num_layers}", tower.layer_norm("post_layernorm", hidden)),
        *_merged(config, shape, "normed", 4),
        Normed("merged", "merged", merger.layer_norm("mlp.0.pre_norm", wide)),
        *projection_steps("image_embeddings", ["merged"], linears, "gelu"),
    ]


def internvl_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """InternViT: a class token, and what attention and MLP add is scaled column by column."""
    tower = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps)
    hidden, rows = config.hidden_size, config.tower_rows
    patch = (config.in_channels, config.patch_size, config.patch_size)
    embedding = tower.convolution("embeddings.patch_embeddings.projection", hidden, patch, bias=True)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        encoder_steps.Prepend("hidden", "hidden", tower.weight("embeddings.cls_token", hidden, part=(1, 1, hidden))),
        Add("hidden", "hidden", tower.weight("embeddings.position_embeddings", rows, hidden, part=(1, rows, hidden))),
    ]

    def norm(name: str) -> Norm:
        return tower.rms_norm(name, hidden) if config.rms_norms else tower.layer_norm(name, hidden)

    for index in range(config.num_layers):
        layer = f"encoder.layer.{index}."
        qkv = tower.linear(f"{layer}attention.qkv_proj", dict.fromkeys(QKV, hidden), hidden, config.attention_bias)
        steps.append(NormLinear("qkv", (Input("hidden", (norm(f"{layer}layernorm_before"),)),), qkv))
        query, key = (tower.rms_norm(f"{layer}attention.{part}_norm", hidden) for part in "qk")
        norms = (query, key) if config.qk_norm else None
        output, behind = tower.linear(f"{layer}attention.projection_layer", hidden, hidden), f"{layer}layernorm_after"
        first, second = tower.mlp(f"{layer}mlp.fc{{}}", config)
        steps += [
            encoder_steps.EncoderAttention(
                "context", "qkv", config.num_heads, config.head_dim, (1, rows), qk_norms=norms
            ),
            NormLinear("added", (Input("context"),), output),
            encoder_steps.ScaledResidual("hidden", "added", tower.weight(f"{layer}lambda_1", hidden), "hidden"),
            NormLinear("activation", (Input("hidden", (norm(behind),)),), first, config.activation),
            NormLinear("added", (Input("activation"),), second),
            encoder_steps.ScaledResidual("hidden", "added", tower.weight(f"{layer}lambda_2", hidden), "hidden"),
        ]
    if config.final_norm:
        steps.append(Normed("hidden", "hidden", tower.layer_norm("layernorm", hidden)))
    return [
        *steps,
        encoder_steps.DropFirst("features", "hidden", rows - 1),
        *_blocks(config, shape, "features"),
        *_projector(config, config.out_hidden_size, True),
    ]


def _blocks(config: VisionConfig, shape: EngineShape, value: str) -> list[Step]:
    """The patches of a square, in reading order, block by block, those of each side by side."""
    return [encoder_steps.Gather("blocks", value, "block_rows"), *_merged(config, shape, "blocks")]


def _merged(config: VisionConfig, shape: EngineShape, value: str, count: int = 0) -> list[Step]:
    """So many rows side by side, those of a token's patches where nothing is said."""
    merged = (1, embedding_rows(config, shape), (count or config.merge_patches) * config.hidden_size)
    return [Reshape("merged", value, merged)]


def _projector(config: VisionConfig, inner: int, has_norm: bool) -> list[Step]:
    """Two linear layers, whose input may be normed."""
    names, merged = TowerWeights(PROJECTOR, config.projector_prefix, _PROJECTOR_EPSILON), config.merge_patches
    merged *= config.hidden_size
    first = names.linear("linear_1", inner, merged, config.projector_bias)
    second = names.linear("linear_2", config.out_hidden_size, inner, config.projector_bias)
    steps: list[Step] = [Normed("merged", "merged", names.layer_norm("layer_norm", merged))] if has_norm else []
    return [*steps, *projection_steps("image_embeddings", ["merged"], (first, second), config.projector_activation)]
