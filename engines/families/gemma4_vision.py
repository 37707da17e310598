"""Gemma 4's vision encoder: images of any shape in a budget of tokens, heads normed and turned by rows and columns,
linear layers whose inputs and outputs have bounds, and tokens that are means of squares of patches."""

from __future__ import annotations

from edgellm.engines.families.decoders import class_defaults, filled
from edgellm.engines.families.fields import ConfigFields
from edgellm.engines.families.vision_fields import Read, dimensions, rotated, text_hidden_size
from edgellm.engines.families.vision_parts import (
    TOWER,
    BoundedLayer,
    TowerWeights,
    bounded_linears,
    bounded_qkv,
    bounds,
)
from edgellm.engines.model.config import LARGEST_MERGE
from edgellm.engines.model.encoder_steps import AveragePool, ClippedGate, EncoderAttention, NormedHeads, StandardNorm
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.steps import Add, Input, Norm, NormLinear, Step
from edgellm.engines.model.vision import VisionConfig


def read_gemma4_vision(top: ConfigFields) -> Read:
    """Each head of queries has keys and values of its own, and heads fill the width."""
    raw = top.values["vision_config"]
    if raw.get("model_type", "gemma4_vision") != "gemma4_vision":
        top.refuse("vision_config.model_type", raw["model_type"], "supported is gemma4_vision")
    fields = ConfigFields(filled(raw, class_defaults("gemma4_vision"), is_part=True), None, top.family)
    values = dimensions(top, fields, depth="num_hidden_layers", heads="num_attention_heads", channels="num_channels")
    heads = values["num_heads"]
    for key, expected in {"head_dim": values["hidden_size"] // max(1, heads), "num_key_value_heads": heads}.items():
        if fields.size(key) != expected:
            fields.refuse(key, fields.values[key], f"supported is {expected}")
    if fields.switch("attention_bias"):
        fields.refuse("attention_bias", True, "supported is false")
    rope = raw.get("rope_parameters")
    kind = rope.get("rope_type", "axial") if isinstance(rope, dict) else "axial"
    if kind not in ("axial", "default"):
        fields.refuse("rope_parameters.rope_type", kind, "supported is axial")
    return fields, rotated(fields, values) | {
        "temporal_patch_size": 1,
        "spatial_merge_size": fields.size("pooling_kernel_size", largest=LARGEST_MERGE),
        "out_hidden_size": text_hidden_size(top),
        "activation": fields.word("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"}),
        "norm_eps": fields.positive("rms_norm_eps"),
        "image_token_id": top.token_id(top.image_key),
        "vision_start_token_id": top.token_id("boi_token_id"),
        "vision_end_token_id": top.token_id("eoi_token_id"),
        "num_position_embeddings": fields.size("position_embedding_size"),
        "feature_layers": (values["num_layers"],),
        "clipped": fields.switch("use_clipped_linears"),
        "standardized": fields.switch("standardize"),
    }


def gemma4_vision_steps(config: VisionConfig, shape: EngineShape) -> list[Step]:
    """The patches come in blocks of a token, the padding behind them. The rows are divided by what the language model
    multiplies by."""
    tower, hidden = TowerWeights(TOWER, config.tensor_prefix, config.norm_eps), config.hidden_size
    projector = TowerWeights("embed_vision.", config.projector_prefix)
    embedding = tower.linear("patch_embedder.input_proj", hidden, config.patch_elements, False)
    steps: list[Step] = [
        NormLinear("hidden", (Input("patches"),), embedding),
        Add("hidden", "hidden", "position_embeddings"),
    ]
    for index in range(config.num_layers):
        steps += _Layer(config, tower, f"encoder.layers.{index}.").steps(shape.tokens)
    merge, out = config.spatial_merge_size, config.out_hidden_size
    standard = (tower.weight("std_bias", hidden), tower.weight("std_scale", hidden)) if config.standardized else None
    linear = projector.linear("embedding_projection", out, hidden, False)
    return [
        *steps,
        AveragePool("pooled", "hidden", hidden, merge, merge, shape.tokens // merge),
        StandardNorm("pooled", "pooled", hidden**0.5, config.norm_eps, standard),
        NormLinear("image_embeddings", (Input("pooled"),), linear, scale=out**-0.5),
    ]


class _Layer(BoundedLayer):
    """The steps of one layer."""

    def steps(self, rows: int) -> list[Step]:
        """Both parts, each normed before and behind."""
        config, heads, hidden = self._config, self._config.num_heads, self._config.hidden_size
        folder = f"{self._prefix}self_attn."
        query, key = (self._tower.rms_norm(f"{folder}{each}_norm", config.head_dim) for each in "qk")
        seen = (1, rows), "attention_mask", "rotary_cos_sin"
        return [
            *bounded_qkv(self._tower, folder, self._norm("input_layernorm"), hidden, config.clipped),
            NormedHeads("qkv", "qkv", heads, (query, key)),
            EncoderAttention("context", "qkv", heads, config.head_dim, *seen),
            *self._added("context", "self_attn.o_proj", hidden, "post_attention_layernorm"),
            *self._activated("activation", self._norm("pre_feedforward_layernorm")),
            *self._added("activation", "mlp.down_proj", config.intermediate_size, "post_feedforward_layernorm"),
        ]

    def _activated(self, output: str, norm: Norm) -> list[Step]:
        """What the gate lets through."""
        hidden, inner, activation = self._config.hidden_size, self._config.intermediate_size, self._config.activation
        if not self._config.clipped:
            parts = {f"{name}.linear": inner for name in ("gate_proj", "up_proj")}
            joined = self._tower.linear(f"{self._prefix}mlp.gate_up_proj", parts, hidden, False)
            return [NormLinear(output, (Input("hidden", (norm,)),), joined, activation, gated=True)]
        names, folder = ("gate_proj", "up_proj"), f"{self._prefix}mlp."
        gate, up = (bounds(self._tower, f"{folder}{name}", "output") for name in names)
        steps = bounded_linears(self._tower, folder, norm, dict.fromkeys(names, inner), hidden)
        return [*steps, ClippedGate(output, *names, (gate, up), activation)]
