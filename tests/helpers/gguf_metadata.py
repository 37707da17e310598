"""What llama.cpp's converter says of a published configuration: the metadata of a GGUF file, by architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
#: Those whose pairs of a rotation are neighbours.
PAIRED = ("llama", "mistral3", "granite", "smollm3", "granitemoe", "minicpm", *MAMBA)


def metadata_of(config: Config, kind: str) -> dict[str, Any]:
    """The metadata of an architecture, of which None is what the file does not say."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {**_sizes(config, kind), **_rotary(config, kind, rope.get("full_attention", rope))}
    own = _OWN.get(kind, lambda config, rope: {})(config, rope)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    metadata = {"general.architecture": kind, **{f"tokenizer.ggml.{key}": value for key, value in ends.items()}}
    return metadata | {f"{kind}.{key}": value for key, value in (found | own).items() if value is not None}


def _sizes(config: Config, kind: str) -> dict[str, Any]:
    """What is named alike whatever the architecture."""
    heads, drafting = config["num_attention_heads"], config.get("mtp_num_hidden_layers")
    return {
        "block_count": config["num_hidden_layers"] + (drafting or 0),
        "nextn_predict_layers": drafting,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("block_ff_dim") or config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": config.get("norm_eps") or config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "vocab_size": config["vocab_size"] if kind in (*PAIRED, "lfm2", "lfm2moe") else None,
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling"),
        "shortconv.l_cache": config.get("conv_L_cache"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "leading_dense_block_count": config.get("num_dense_layers"),
    }


def _rotary(config: Config, kind: str, own: Config) -> dict[str, Any]:
    """Bases and scalings of positions, `own` those of layers that attend to all."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    base = own.get("rope_theta", config.get("rope_theta", 10000.0))
    if kind == "hunyuan-dense":  # is stretched already
        base *= own["alpha"] ** (size / (size - 2))
    found = {
        "rope.freq_base": None if kind in ("gemma", "gemma2") else base,
        "rope.dimension_count": size if kind in PAIRED else None,
        "attention.temperature_scale": own.get("llama_4_scaling_beta"),
        "rope.scaling.yarn_log_multiplier": own.get("mscale_all_dim"),
    }
    scaling = own.get("rope_type") or own.get("type")
    if scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": scaling, "rope.scaling.factor": own["factor"]}
        found["rope.scaling.original_context_length"] = own.get("original_max_position_embeddings")
        found |= {f"rope.scaling.yarn_{key}": own.get(key) for key in ("beta_fast", "beta_slow")}
    return found


def _experts(config: Config, rope: Config) -> dict[str, Any]:
    return {"expert_feed_forward_length": config.get("moe_intermediate_size") or config["intermediate_size"]}


def _gpt_oss(config: Config, rope: Config) -> dict[str, Any]:
    return _experts(config, rope) | {"attention.sliding_window": config["sliding_window"]}


def _lfm2(config: Config, rope: Config) -> dict[str, Any]:
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    places = config.get("full_attn_idxs") or range(len(kinds))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    attends = (each == "full_attention" and layer in places for layer, each in enumerate(kinds))
    return {"attention.head_count_kv": [heads * each for each in attends]}


def _lfm2_moe(config: Config, rope: Config) -> dict[str, Any]:
    return _lfm2(config, rope) | _experts(config, rope) | {"expert_gating_func": 2}


def _mamba(config: Config, rope: Config) -> dict[str, Any]:
    """As Granite 4 and Nemotron-H name it."""
    kinds = config.get("layer_types") or config["layers_block_type"]
    attention = config.get("num_key_value_heads") or config["num_attention_heads"]
    heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
    return {
        "attention.head_count_kv": [attention * ("attention" in each and "linear" not in each) for each in kinds],
        "rope.scaling.finetuned": False,
        "context_length": 1 << 20,
        "ssm.conv_kernel": config.get("mamba_d_conv") or config.get("conv_kernel"),
        "ssm.state_size": config.get("mamba_d_state") or config.get("ssm_state_size"),
        "ssm.group_count": config.get("mamba_n_groups") or config.get("n_groups"),
        "ssm.inner_size": heads * (config.get("mamba_head_dim") or config["mamba_d_head"]),
        "ssm.time_step_rank": heads,
        "expert_shared_feed_forward_length": config.get("shared_intermediate_size"),
    }


def _nemotron(config: Config, rope: Config) -> dict[str, Any]:
    rows = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
    lengths = [rows.get(each, 0) for each in config.get("layer_types") or config["layers_block_type"]]
    return _mamba(config, rope) | {"feed_forward_length": lengths, "expert_used_count": None}


def _nemotron_moe(config: Config, rope: Config) -> dict[str, Any]:
    return _nemotron(config, rope) | {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": config["n_group"],
    }


def _minicpm(config: Config, rope: Config) -> dict[str, Any]:
    return {
        "embedding_scale": config["scale_emb"],
        "residual_scale": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        "logit_scale": config["hidden_size"] / config["dim_model_base"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }


def _windows(config: Config, rope: Config) -> dict[str, Any]:
    """Of OLMo-3, which is OLMo-2 there, and EXAONE 4."""
    if config["model_type"] == "olmo2" or config["sliding_window"] is None:
        return {}
    windowed = [each == "sliding_attention" for each in config["layer_types"]]
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": windowed}


def _starcoder2(config: Config, rope: Config) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": config["norm_epsilon"]}


def _gemma2(config: Config, rope: Config) -> dict[str, Any]:
    caps = {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return caps | {"attention.sliding_window": config["sliding_window"]}


def _gemma3(config: Config, rope: Config) -> dict[str, Any]:
    local = rope.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq"))
    return {"rope.freq_base_swa": local, "attention.sliding_window": config["sliding_window"]}


def _phi3(config: Config, rope: Config) -> dict[str, Any]:
    share = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    return {
        "rope.dimension_count": int(share * (config["hidden_size"] // config["num_attention_heads"])),
        "attention.sliding_window": config.get("sliding_window") or 0,
        "rope.scaling.original_context_length": config.get("original_max_position_embeddings", 4096),
    }


def _qwen3_5(config: Config, rope: Config) -> dict[str, Any]:
    recurrent = [each == "linear_attention" for each in config["layer_types"]]
    return {
        "attention.recurrent_layers": recurrent + [False] * config.get("mtp_num_hidden_layers", 0),
        "full_attention_interval": config.get("full_attention_interval", 4),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
    }


def _qwen3_5_moe(config: Config, rope: Config) -> dict[str, Any]:
    return _qwen3_5(config, rope) | _experts(config, rope)


def _gemma4(config: Config, rope: Config) -> dict[str, Any]:
    """Sizes of layers that attend to all, and of those with a window."""
    windowed, layers = [each == "sliding_attention" for each in config["layer_types"]], config["num_hidden_layers"]
    own, shared = next(iter(config["per_layer_config"].values())), config["num_kv_shared_layers"]
    found = {
        **{f"attention.{each}_length": own["head_dim"] for each in ("key", "value")},
        **{f"attention.{each}_length_swa": config["head_dim"] for each in ("key", "value")},
        "rope.dimension_count": own["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }
    if config.get("enable_moe_block"):
        found |= _experts(config, rope) | {"expert_count": config["num_experts"]}
        found["expert_used_count"] = config["top_k_experts"]
    if "num_key_value_heads" in own:
        counts = (config["num_key_value_heads"] if each else own["num_key_value_heads"] for each in windowed)
        found["attention.head_count_kv"] = list(counts)
    if config["use_double_wide_mlp"]:
        size = config["intermediate_size"]
        found["feed_forward_length"] = [size] * (layers - shared) + [2 * size] * shared
    return found


#: What an architecture says beside the sizes that all have, in their places where it says them otherwise.
_OWN: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    **{"gemma2": _gemma2, "gemma3": _gemma3, "gemma4": _gemma4, "phi3": _phi3, "starcoder2": _starcoder2},
    **{"minicpm": _minicpm, "olmo2": _windows, "exaone4": _windows, "lfm2": _lfm2, "lfm2moe": _lfm2_moe},
    **{"granitehybrid": _mamba, "nemotron_h": _nemotron, "nemotron_h_moe": _nemotron_moe},
    **{
        "qwen35": _qwen3_5,
        "qwen35moe": _qwen3_5_moe,
        "qwen3moe": _experts,
        "qwen3vlmoe": _experts,
        "gpt-oss": _gpt_oss,
    },
}
