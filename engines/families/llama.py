"""Llama, and the families that vary it by switches: Mistral, Ministral 3, Seed-OSS, CWM, Phi-3 and Phi-4, Granite 3,
SmolLM3, StarCoder2, MiniCPM, ERNIE 4.5, Hunyuan, OLMo-2 and 3, EXAONE 4."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edgellm.engines.families.decoders import Family, all_biases, biases, family_of, read_decoder, rotary_share
from edgellm.engines.families.fields import ConfigFields, every_layer, layer_count, windowed_but_every
from edgellm.engines.formats.strict_formats import is_number
from edgellm.engines.model.config import DecoderConfig

_LARGEST_SCALE = 1e6


def read_llama(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """`attention_bias` gives all four projections of the attention a bias, `mlp_bias` all three of the MLP. The first
    conversions of LLaMA call the positions `max_sequence_length`.

    `own` is what another family with these switches adds, for `read_decoder`.
    """
    if "max_sequence_length" in fields.values:
        fields.values = {"max_position_embeddings": fields.values["max_sequence_length"], **fields.values}
    return read_decoder(fields, **biases(fields), mlp_bias=fields.switch("mlp_bias"), **own)


LLAMA = Family("llama", "LlamaForCausalLM", read_llama)


#: No biases; a `sliding_window`, where there is one, as in the first releases, is that of every layer.
_read_mistral = partial(read_decoder, windowed=every_layer)
MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral)
#: With YaRN, and queries that are scaled at positions beyond the trained context.
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", _read_mistral)


@family_of("seed_oss", "SeedOssForCausalLM")
def SEED_OSS(fields: ConfigFields) -> DecoderConfig:
    """`attention_bias` is of query, key and value, `attention_out_bias` of the output."""
    output = fields.switch("attention_out_bias")
    return read_decoder(
        fields, **biases(fields) | {"attention_output_bias": output, "mlp_bias": fields.switch("mlp_bias")}
    )


#: Llama 3 with attention over a window in three of four layers: every fourth, from the first on, attends to all, unless
#: `layer_types` says otherwise. Attention has no biases.
CWM = Family(
    "cwm",
    "CwmForCausalLM",
    lambda fields: read_decoder(fields, windowed=lambda layer: layer % 4 > 0, mlp_bias=fields.switch("mlp_bias")),
)


@family_of("phi3", "Phi3ForCausalLM")
def PHI3(fields: ConfigFields) -> DecoderConfig:
    """Fused projections, and a rotary embedding of a part of each head, which is LongRoPE's or without scaling: the
    first files call LongRoPE "su", or "yarn"."""
    share = rotary_share(fields, 1.0)
    for key in ("attention_bias", "mlp_bias"):
        if fields.switch(key):
            fields.refuse(key, True, "which is not supported")
    scaling = fields.values.get("rope_scaling")
    if isinstance(scaling, dict):
        named = {key: "longrope" for key in ("type", "rope_type") if scaling.get(key) in ("su", "yarn")}
        fields.values = fields.values | {"rope_scaling": scaling | named}
    config = read_decoder(fields, rotary_share=share, windowed=every_layer, fused_projections=True)
    if config.rope_scaling is not None and config.rope_scaling["rope_type"] != "longrope":
        fields.refuse("rope_type", config.rope_scaling["rope_type"], "supported are default and longrope")
    return config


def read_granite(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """A scale each for embeddings, attention, residual stream and logits; those that are left out are 1, that of the
    attention too. Logits are divided by theirs. `own` is for `read_decoder`."""
    keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    embedding, residual, attention, logits = (fields.positive(key, 1.0, _LARGEST_SCALE) for key in keys)
    scales: dict[str, Any] = {"embedding_scale": embedding, "residual_scale": residual, "attention_scale": attention}
    return read_llama(fields, **scales, logits_scale=1 / logits, **own)


GRANITE = Family("granite", "GraniteForCausalLM", read_granite)


@family_of("minicpm", "MiniCPMForCausalLM")
def MINICPM(fields: ConfigFields) -> DecoderConfig:
    """MiniCPM 1, 2 and 4, whose class ships with the checkpoints: what layers add is multiplied by `scale_depth` over
    the square root of their number, logits by `dim_model_base` over the hidden size."""
    if fields.values.get("sparse_config") is not None:
        fields.refuse("sparse_config", {}, "attention to chosen blocks is not computed: take MiniCPM 4")
    keys = ("scale_emb", "scale_depth", "dim_model_base")
    embedding, depth, base = (fields.positive(key, 1.0, _LARGEST_SCALE) for key in keys)
    config = read_decoder(fields, **biases(fields), embedding_scale=embedding)
    residual, logits = depth / max(1, config.num_layers) ** 0.5, base / max(1, config.hidden_size)
    return replace(config, residual_scale=residual, logits_scale=logits)


@family_of("smollm3", "SmolLM3ForCausalLM")
def SMOLLM3(fields: ConfigFields) -> DecoderConfig:
    """Some layers have no rotary embedding: `no_rope_layers`, which may be longer than there are layers, holds 0 for
    each of them, else 1; without it they are the last of every so many layers."""
    fields.ignore("no_rope_layers")
    count, rotated = layer_count(fields), fields.values.get("no_rope_layers")
    if rotated is None:
        interval = fields.size("no_rope_layer_interval")
        rotated = [(index + 1) % interval if interval else 1 for index in range(count)]
    elif not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
        fields.expect("no_rope_layers", rotated, f"0 or 1 for each of {count} layers")
        rotated = [1] * count
    return read_llama(fields, nope_layers=tuple(index for index in range(count) if not rotated[index]))


#: Llama, but neighbours are rotated together.
ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    lambda fields: read_decoder(fields, **all_biases(fields), rotates_neighbours=True),
)


@family_of("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM")
def HUNYUAN(fields: ConfigFields) -> DecoderConfig:
    """Norms of query and key stand behind the rotary embedding, whose base is stretched by `alpha` once for all texts:
    what its files call dynamic (see `HunYuanDenseV1RotaryEmbedding` of transformers)."""
    alpha = fields.take_rotary("alpha")
    if fields.switch("use_cla"):
        fields.refuse("use_cla", True, "layers that share keys and values are not supported")
    own: dict[str, Any] = {"qk_norm": True, "norms_behind_rotation": True, "naming": "hunyuan"}
    config = read_decoder(fields, **biases(fields), **own)
    if alpha is None or config.rope_scaling is None or config.rope_scaling["rope_type"] != "dynamic":
        return config
    if not is_number(alpha) or not 1 <= alpha <= _LARGEST_SCALE:
        fields.expect("rope_scaling: alpha", alpha, f"a number from 1 to {_LARGEST_SCALE:g}")
        return config
    stretched = config.rope_theta * alpha ** (config.rotary_dim / max(1, config.rotary_dim - 2))
    return replace(config, rope_theta=stretched, rope_scaling=None)


@family_of("starcoder2", "Starcoder2ForCausalLM")
def STARCODER2(fields: ConfigFields) -> DecoderConfig:
    """Layer norms, and an MLP without a gate. The window is that of every layer."""
    fields.values = fields.values | {"rms_norm_eps": fields.positive("norm_epsilon")}
    own = all_biases(fields) | {"layer_norms": True, "gated_mlp": False, "naming": "starcoder2"}
    return read_decoder(fields, activations={"gelu_pytorch_tanh": "gelu_tanh"}, windowed=every_layer, **own)


#: Norms of what attention and MLP give, not of what they take.
_BEHIND: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True}


def _read_olmo2(fields: ConfigFields, **own: Any) -> DecoderConfig:
    """Norms of query and key are over all heads together. `own` is what OLMo 3 adds, for `read_decoder`."""
    return read_decoder(fields, **biases(fields), **_BEHIND, joint_qk_norm=True, **own)


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2)


@family_of("olmo3", "Olmo3ForCausalLM")
def OLMO3(fields: ConfigFields) -> DecoderConfig:
    """Windows in three of four layers, unless `layer_types` says otherwise; a scaling of the rotary embedding is that
    of the other layers alone."""
    theta = fields.take_rope_of_windows("rope_theta")
    config = _read_olmo2(fields, windowed=windowed_but_every(4))
    has_own = config.layer_kinds and (config.rope_scaling is not None or config.rope_theta != theta)
    return replace(config, local_rope_theta=theta if has_own else None)


@family_of("exaone4", "Exaone4ForCausalLM")
def EXAONE4(fields: ConfigFields) -> DecoderConfig:
    """With a `sliding_window` (32B) layers that attend to all have no rotary embedding: every
    `sliding_window_pattern`-th, unless `layer_types` says otherwise. Without one (1.2B) all layers attend to all, and
    have it."""
    pattern = 1
    if fields.values.get("layer_types") is None and fields.values.get("sliding_window") is not None:
        pattern = max(1, fields.size("sliding_window_pattern"))
    config = read_decoder(fields, windowed=windowed_but_every(pattern), **_BEHIND)
    if fields.values.get("sliding_window") is None:
        return config
    unrotated = (layer for layer in range(config.num_layers) if config.layer_kind(layer) == "attention")
    return replace(config, nope_layers=tuple(unrotated))
