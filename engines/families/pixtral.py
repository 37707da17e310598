"""Pixtral, the vision encoder of Mistral 3: images of any size, layers made as those of language models, positions by a
rotary embedding of rows and columns alone, and squares of patches merged before they are projected."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engines.families import vision_fields, vision_parts
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.model.config import LARGEST_MERGE
from edgellm.engines.model.encoder_steps import EncoderAttention
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Input, Normed, NormLinear, Reshape, Step
from edgellm.engines.model.vision import VisionConfig

#: The norms of the tower have it fixed in their code.
_EPSILON = 1e-5


def read_pixtral(top: ConfigFields) -> vision_fields.Read:
    """What is merged is normed with the language model's epsilon."""
    fields, text = vision_fields.part_of(top, "pixtral"), top.section("text_config")
    values = vision_fields.dimensions(
        top, fields, depth="num_hidden_layers", heads="num_attention_heads", channels="num_channels"
    )
    layers = vision_fields.feature_layers(top, values["num_layers"], -1)
    if len(layers) > 1:
        top.refuse("vision_feature_layer", top.values["vision_feature_layer"], "supported is one layer")
    usual = 4096 if text.get("model_type") == "ministral3" else 5120
    return fields, vision_fields.rotated(fields, values) | {
        "temporal_patch_size": 1,
        "spatial_merge_size": top.size("spatial_merge_size", 2, largest=LARGEST_MERGE),
        "out_hidden_size": vision_fields.text_hidden_size(top) or usual,
        "activation": fields.word("hidden_act", vision_fields.ACTIVATIONS),
        "norm_eps": ConfigFields({"rms_norm_eps": 1e-5, **text}, None, top.family).positive("rms_norm_eps"),
        "image_token_id": top.token_id(top.image_key),
        "feature_layers": layers,
        "projector_activation": top.word("projector_hidden_act", {**vision_fields.ACTIVATIONS, None: "gelu"}),
        "projector_bias": top.switch("multimodal_projector_bias"),
    }


def pixtral_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in merge blocks, the padding behind them: what is merged is a convolution over them."""
    tower = vision_parts.TowerWeights(vision_parts.TOWER, config.tensor_prefix, _EPSILON)
    projector = vision_parts.TowerWeights(vision_parts.PROJECTOR, config.projector_prefix, config.norm_eps)
    hidden, inner, out, rows = config.hidden_size, config.intermediate_size, config.out_hidden_size, shape.tokens
    patch = (config.in_channels, config.patch_size, config.patch_size)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), tower.convolution("patch_conv", hidden, patch, bias=False)),
        Normed("hidden", "hidden", tower.rms_norm("ln_pre", hidden)),
    ]
    for index in range(vision_parts.used_layers(config)):
        layer, heads = f"transformer.layers.{index}.", (config.num_heads, config.head_dim)
        qkv, gated = dict.fromkeys(vision_parts.QKV, hidden), {"gate_proj": inner, "up_proj": inner}
        first, second = (tower.rms_norm(f"{layer}{part}_norm", hidden) for part in ("attention", "ffn"))
        joined = tower.linear(f"{layer}attention.qkv_proj", qkv, hidden, bias=False)
        output = tower.linear(f"{layer}attention.o_proj", hidden, hidden, bias=False)
        gate_up = tower.linear(f"{layer}feed_forward.gate_up_proj", gated, hidden, bias=False)
        down = tower.linear(f"{layer}feed_forward.down_proj", hidden, inner, bias=False)
        attention = EncoderAttention("context", "qkv", *heads, (1, rows), "attention_mask", "rotary_cos_sin")
        steps += vision_parts.attention_steps("hidden", first, joined, attention, output)
        steps += vision_parts.mlp_steps("hidden", second, gate_up, down, config.activation, gated=True)
    merged = config.merge_patches * hidden
    merging = projector.linear("patch_merger.merging_layer", hidden, merged, bias=False)
    merging = replace(merging, weight=replace(merging.weight, kernel=config.merge_patches))
    linears = (
        projector.linear("linear_1", out, hidden, config.projector_bias),
        projector.linear("linear_2", out, out, config.projector_bias),
    )
    return [
        *steps,
        Normed("hidden", "hidden", projector.rms_norm("norm", hidden)),
        Reshape("blocks", "hidden", (1, rows // config.merge_patches, merged)),
        NormLinear("merged", (Input("blocks"),), merging),
        *vision_parts.projection_steps("image_embeddings", ["merged"], linears, config.projector_activation),
    ]
