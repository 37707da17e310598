"""Families whose layers have a mixture of experts where others have an MLP: Qwen3-MoE, OLMoE, Granite 3 MoE,
Granite 4, LFM2-MoE, gpt-oss, Qwen3.5-MoE, Qwen3-VL-MoE, Nemotron-H."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from edgellm.engines.families import hybrid
from edgellm.engines.families.decoders import SILU, Family, biases, family_of, read_decoder
from edgellm.engines.families.fields import ConfigFields, every_layer, layer_count
from edgellm.engines.families.llama import read_granite
from edgellm.engines.families.qwen import read_qwen3_vl
from edgellm.engines.formats.strict_formats import is_integer
from edgellm.engines.model.config import LARGEST_EXPERTS, DecoderConfig, Mixture

#: Fields of a mixture, but for those that say how one is trained or run, not what it computes.
_OF_EXPERTS = re.compile(r"(?!.*(loss|jitter|overlap|output_router_logits)).*(expert|rout|moe|topk|scor)")


def read_mixture(fields: ConfigFields, size: str, usual: int, **own: Any) -> Mixture:
    """How many experts there are (`usual` where the file does not say), how many of them a token goes through, and how
    large they are, which is in the field `size`; problems are noted in `fields`, unknown fields among them. `own` is
    what else the family says of its `Mixture`, and has read."""
    names = "num_experts", "n_routed_experts", "num_local_experts"
    key = next((name for name in names if fields.values.get(name) is not None), names[-1])
    count = fields.size(key, usual, LARGEST_EXPERTS)
    for other in names:
        if count and fields.values.get(other) not in (None, count):
            fields.expect(other, fields.values[other], f"{count}, as {key} says")
    fields.ignore(*names, "moe_intermediate_size")  # GGUF files say it of every mixture
    chosen = fields.size("num_experts_per_tok", largest=LARGEST_EXPERTS)
    if chosen > count > 0:
        fields.wrong.append(f"num_experts_per_tok is {chosen}, but there are {count} experts")
    if "normalized" not in own and not fields.switch("norm_topk_prob", True):
        fields.refuse("norm_topk_prob", False, "supported is true, as the family always normalizes")
    mixture = Mixture(count, chosen, fields.size(size), **own)
    fields.refuse_unknown(_OF_EXPERTS)
    return mixture


def _read_qwen3_moe(
    fields: ConfigFields, mrope: tuple[tuple[int, ...], bool] = ((), False), usual: int = 128
) -> DecoderConfig:
    """Qwen3's attention. Layers of `mlp_only_layers` have an MLP, and those whose number, counted from 1, is no
    multiple of `decoder_sparse_step`. A window is that of every layer. `mrope` is for
    `read_decoder`, `usual` for `read_mixture`."""
    given, step = fields.values.get("mlp_only_layers"), fields.size("decoder_sparse_step")
    listed, layers = [] if given is None else given, range(layer_count(fields))
    if not isinstance(listed, list) or not all(is_integer(each) for each in listed):
        fields.expect("mlp_only_layers", given, "a list of layers")
        listed = []
    dense = tuple(layer for layer in layers if layer in listed or (step and (layer + 1) % step))
    own: dict[str, Any] = {"dense_layers": dense, "normalized": fields.switch("norm_topk_prob")}
    mixture = read_mixture(fields, "moe_intermediate_size", usual, **own)
    return read_decoder(fields, mrope=mrope, windowed=every_layer, **biases(fields), qk_norm=True, mixture=mixture)


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe)


def _read_qwen3_vl_moe_text(fields: ConfigFields, mrope: tuple[tuple[int, ...], bool]) -> DecoderConfig:
    """Qwen3-MoE's layers; shares are always normalized, and there are no windows."""
    fields.values = fields.values | {"norm_topk_prob": True, "sliding_window": None}
    return _read_qwen3_moe(fields, mrope, usual=60)


_read_qwen3_vl_moe = partial(read_qwen3_vl, read=_read_qwen3_vl_moe_text, text="qwen3_vl_moe_text")
QWEN3_VL_MOE = Family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _read_qwen3_vl_moe)


@family_of("olmoe", "OlmoeForCausalLM")
def OLMOE(fields: ConfigFields) -> DecoderConfig:
    """Norms of query and key over all heads together; shares are not normalized by default. `clip_qkv` is refused."""
    mixture = read_mixture(fields, "intermediate_size", 64, normalized=fields.switch("norm_topk_prob"))
    own: dict[str, Any] = {"qk_norm": True, "joint_qk_norm": True, "mixture": mixture}
    return read_decoder(fields, **biases(fields), **own)


#: Granite's scales; the router's scores are the softmax over the chosen.
GRANITE_MOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    lambda fields: read_granite(fields, mixture=read_mixture(fields, "intermediate_size", 8), naming="granitemoe"),
)


@family_of("granitemoehybrid", "GraniteMoeHybridForCausalLM")
def GRANITE4(fields: ConfigFields) -> DecoderConfig:
    """With Granite 3's experts beside the MLP, which every token goes through whole, or without them."""
    if fields.values["num_local_experts"] == 0:
        return hybrid.read_granite4(fields)
    shared = fields.size("shared_intermediate_size")
    mixture = read_mixture(fields, "intermediate_size", 8, shared_size=shared, shared_gate=False)
    return hybrid.read_granite4(fields, mixture=mixture)


#: The letters of `hybrid_override_pattern`, and what the class calls such layers.
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_OLD = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_limit": "time_step_limit"}
_NEMOTRON_TYPES = {**hybrid.MIXER_TYPES, "mlp": "mlp", "moe": "mlp"}


@family_of("nemotron_h", "NemotronHForCausalLM")
def NEMOTRON_H(fields: ConfigFields) -> DecoderConfig:
    """Layers that are one part each: Mamba-2, attention without a rotary embedding, an MLP without a gate, or a mixture
    of such. Step sizes have the limits of `time_step_limit`, as published: transformers 5 takes `time_step_min` for the
    lower one, of whole prompts alone."""
    values = fields.values | {own: fields.values[old] for old, own in _NEMOTRON_OLD.items() if old in fields.values}
    pattern = values.get("hybrid_override_pattern")
    types = next((values[key] for key in ("layers_block_type", "layer_types") if values.get(key) is not None), None)
    if types is None and isinstance(pattern, str) and set(pattern) <= set(_PATTERN):
        types = [_PATTERN[letter] for letter in pattern]
    if not isinstance(types, list):
        fields.expect("hybrid_override_pattern", pattern, f"a text of {' '.join(_PATTERN)}, or layers_block_type")
        types = ["attention"]
    fields.values = values | {
        "layer_types": types,
        "num_hidden_layers": len(types) or 1,
        "head_dim": values.get("head_dim") or values.get("attention_head_dim") or 128,
        "rms_norm_eps": fields.positive("layer_norm_epsilon"),
        "hidden_act": values.get("mlp_hidden_act"),
    }
    kinds = fields.layer_kinds(_NEMOTRON_TYPES, [])
    if set(kinds) <= {"mlp"}:
        fields.refuse("hybrid_override_pattern", pattern, "supported are models with layers that mix tokens")
    fields.word("mamba_hidden_act", SILU)
    if fields.switch("use_bias"):
        fields.refuse("use_bias", True, "supported are projections without biases")
    own: dict[str, Any] = {"mlp_bias": fields.switch("mlp_bias"), "gated_mlp": False, "lone_parts": True}
    if "moe" in types:
        if "mlp" not in types:  # then no layer has an MLP of another size
            fields.values = fields.values | {"intermediate_size": fields.values.get("moe_intermediate_size")}
        own["mixture"] = _nemotron_mixture(fields, tuple(i for i, each in enumerate(types) if each != "moe"))
    else:
        fields.ignore("n_routed_experts", "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
    names = "n_groups", "mamba_num_heads", "ssm_state_size", "conv_kernel", "use_conv_bias"
    own |= hybrid.read_mamba(fields, kinds, fields.size("mamba_head_dim"), names)
    own |= {"naming": "nemotron_h", "nope_layers": tuple(range(len(types)))}
    return read_decoder(fields, activations={"relu2": "relu_squared"}, **biases(fields), **own)


def _nemotron_mixture(fields: ConfigFields, dense: tuple[int, ...]) -> Mixture:
    """A sigmoid of each score and a correction of the choice; beside the experts one for all tokens."""
    supported = {
        "n_shared_experts": (1, "one expert that every token goes through"),
        "mlp_bias": (False, "experts without biases"),
    }
    for key, (neutral, words) in supported.items():
        fields.ignore(key)
        if fields.values.get(key) not in (None, neutral):
            fields.refuse(key, fields.values[key], f"supported are {words}")
    own: dict[str, Any] = {
        **{"scores": "sigmoid", "correction": True, "epsilon": 1e-20, "shared_gate": False, "gated": False},
        "normalized": fields.switch("norm_topk_prob"),
        "scale": fields.positive("routed_scaling_factor", 1.0, 1e6),
        "shared_size": fields.size("moe_shared_expert_intermediate_size"),
        "latent_size": 0 if fields.values.get("moe_latent_size") is None else fields.size("moe_latent_size"),
    }
    return read_mixture(fields, "moe_intermediate_size", 8, dense_layers=dense, **own)


@family_of("lfm2_moe", "Lfm2MoeForCausalLM")
def LFM2_MOE(fields: ConfigFields) -> DecoderConfig:
    """LFM2's layers, of which the first `num_dense_layers` have an MLP; scores are sigmoids, and with
    `use_expert_bias` a bias of each expert takes part in the choice alone."""
    layers = layer_count(fields)
    own: dict[str, Any] = {
        "scores": "sigmoid",
        "correction": fields.switch("use_expert_bias"),
        "normalized": fields.switch("norm_topk_prob"),
        "epsilon": 1e-6,
        "scale": fields.positive("routed_scaling_factor", 1.0, 1e6),
        "dense_layers": tuple(range(fields.count("num_dense_layers", None, layers))),
    }
    mixture = read_mixture(fields, "moe_intermediate_size", 32, **own)
    return hybrid.read_lfm2_layers(fields, ["full_attention"] * layers, mixture=mixture)


@family_of("gpt_oss", "GptOssForCausalLM")
def GPT_OSS(fields: ConfigFields) -> DecoderConfig:
    """Attention with sinks and biases, within a window in every other layer, the first included; experts with biases
    and an activation of their own (`Mixture.limit`)."""
    fields.ignore("swiglu_alpha", "experts_per_token")
    if fields.values.get("experts_per_token") not in (None, count := fields.values.get("num_experts_per_tok")):
        fields.expect("experts_per_token", fields.values["experts_per_token"], f"{count}, as num_experts_per_tok says")
    fields.only(swiglu_alpha=1.702)
    limit = fields.positive("swiglu_limit", 7.0, 1e6)
    mixture = read_mixture(fields, "intermediate_size", 128, biases=True, limit=limit)
    own: dict[str, Any] = {"attention_sinks": True, "naming": "gpt_oss", "mixture": mixture}
    return read_decoder(fields, windowed=lambda layer: layer % 2 == 0, **biases(fields), **own)


def _read_qwen3_5_moe_text(fields: ConfigFields) -> DecoderConfig:
    """Qwen3.5's layers, each with a mixture and an expert that every token goes through."""
    shared = fields.size("shared_expert_intermediate_size")
    mixture = read_mixture(fields, "moe_intermediate_size", 256, shared_size=shared)
    fields.values = fields.values | {"intermediate_size": mixture.size or 1}  # there is no MLP of another size
    return hybrid.read_qwen3_5_text(fields, mixture=mixture)


QWEN3_5_MOE_TEXT = Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _read_qwen3_5_moe_text)
_read_qwen3_5_moe = partial(hybrid.read_qwen3_5, text=QWEN3_5_MOE_TEXT)
QWEN3_5_MOE = Family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _read_qwen3_5_moe)
