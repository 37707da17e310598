"""The architectures of GGUF files by llama.cpp's names: which family of the house each is, and how its metadata becomes
what a published `config.json` says.

llama.cpp's converter writes down less than was published: what follows from the architecture there stands here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from edgellm.engines.errors import UnsupportedModelError
from edgellm.engines.gguf.encoders import ENCODERS
from edgellm.engines.gguf.metadata import Metadata

_Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """`own` adds to the fields of `config.json` that all have, `model_type` among them. `permuted`: rows of q and k are
    in the order of rotated pairs. `shifted`: norms were stored with 1 added, but for those whose names end with one of
    `unshifted`. `names` are modules that are called otherwise than Llama's. With `alternating` rows
    of gate and up of an expert were published in turn, as one.
    """

    own: Callable[[Metadata, _Config], _Config]
    permuted: bool = False
    shifted: bool = False
    unshifted: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    alternating: bool = False


def architecture(metadata: Metadata) -> Architecture:
    """The model's, or the draft's; UnsupportedModelError, which lists those that are known, where there is none."""
    found = _ARCHITECTURES.get(metadata.architecture) or _DRAFTS.get(metadata.architecture)
    return _known(metadata, _ARCHITECTURES) if found is None else found


def check_draft(metadata: Metadata, expected: bool) -> None:
    """UnsupportedModelError where a file is no draft that is `expected`, or no model."""
    if (metadata.architecture in _DRAFTS) != expected:
        _known(metadata, _DRAFTS if expected else _ARCHITECTURES)


def _known(metadata: Metadata, known: Mapping[str, Architecture]) -> NoReturn:
    name = metadata.architecture
    options = {**dict.fromkeys(_DRAFTS, "--draft"), ENCODERS: "--mmproj"}
    advice = f". Such a file goes with a model: name it with {options[name]}" if name in options else ""
    raise UnsupportedModelError(
        f"{metadata.path}: 'general.architecture' is {name!r:.80}; supported are {', '.join(known)}{advice}"
    )


#: The convention of a draft's layers: llama.cpp takes them for layers entered, as vLLM does, but its converter writes
#: down what others name by outputs, too; these are told by being the usual ones.
ENTERED_UNLESS_USUAL = "entered, unless the usual ones are output"


def _has_biases(metadata: Metadata, config: _Config) -> _Config:
    return {
        "attention_bias": metadata.has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias") or None,
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias") or None,
    }


def _llama(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "llama"} | _has_biases(metadata, config)


def _mistral3(metadata: Metadata, config: _Config) -> _Config:
    """Ministral 3, whose queries are scaled beyond the trained context; without that Mistral Small's language model."""
    beta, log = metadata.number("attention.temperature_scale"), metadata.number("rope.scaling.yarn_log_multiplier")
    if beta is None:
        return {"model_type": "mistral", "sliding_window": None}
    own = {"llama_4_scaling_beta": beta} | ({} if log is None else {"mscale": log, "mscale_all_dim": log})
    return {"model_type": "ministral3", "rope_parameters": config["rope_parameters"] | own}


def _qwen2(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "qwen2"}


def _qwen3(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "qwen3"} | _has_biases(metadata, config)


def _qwen35(metadata: Metadata, config: _Config) -> _Config:
    interval, heads = metadata.count("full_attention_interval", 4), metadata.count("ssm.time_step_rank")
    size = metadata.count("ssm.inner_size")
    if not heads or size % heads:
        raise metadata.error("ssm.inner_size", size, f"a multiple of 'ssm.time_step_rank', {heads}")
    layers, recurrent = config["num_hidden_layers"], metadata.get("attention.recurrent_layers")
    return {
        "model_type": "qwen3_5_text",
        "full_attention_interval": interval,
        "layer_types": [_attends(not each, "linear") for each in recurrent[:layers]]
        if isinstance(recurrent, list)
        else None,
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_value_head_dim": size // heads,
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "mtp_num_hidden_layers": metadata.whole("nextn_predict_layers") or None,
        "rope_parameters": config["rope_parameters"] | metadata.sections(),
    } | _has_biases(metadata, config)


_TANH_GELU = "gelu_pytorch_tanh"


def _gemma(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "gemma", "hidden_act": _TANH_GELU} | _has_biases(metadata, config)


def _gemma3(metadata: Metadata, config: _Config) -> _Config:
    """The largest, of 62 layers, scales attention by hidden size and heads, the others by the size of a head. Values go
    beyond float16."""
    layers, heads, hidden = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    scalar = hidden / heads if layers == 62 and heads and hidden else config["head_dim"]
    window, pattern = metadata.whole("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    if not window:
        window, pattern = None, [False] * layers
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa") or 10000.0}
    return {
        "model_type": "gemma3_text",
        "hidden_activation": _TANH_GELU,
        "hidden_act": _TANH_GELU,
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": [_attends(not each, "sliding") for each in pattern] if isinstance(pattern, list) else None,
        "sliding_window_pattern": None if isinstance(pattern, list) else pattern,
        "dtype": "bfloat16" if config["dtype"] == "float16" else config["dtype"],
        "rope_parameters": {
            "full_attention": rope if "rope_type" in rope else rope | {"rope_type": "default"},
            "sliding_attention": local,
        },
    } | _has_biases(metadata, config)


def _attends(to_all: bool, otherwise: str) -> str:
    return f"{'full' if to_all else otherwise}_attention"


def _phi3(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "phi3", "sliding_window": metadata.whole("attention.sliding_window") or None}


def _granite(metadata: Metadata, config: _Config) -> _Config:
    return {
        "model_type": "granite",
        "attention_multiplier": metadata.number("attention.scale"),
        "embedding_multiplier": metadata.number("embedding_scale"),
        "residual_multiplier": metadata.number("residual_scale"),
        "logits_scaling": metadata.number("logit_scale"),
    } | _has_biases(metadata, config)


def _smollm3(metadata: Metadata, config: _Config) -> _Config:
    """Every fourth layer has no rotary embedding."""
    return {"model_type": "smollm3", "no_rope_layer_interval": 4} | _has_biases(metadata, config)


def _olmo2(metadata: Metadata, config: _Config) -> _Config:
    """With a window it is OLMo 3, whose scaling of the rotary embedding is that of the layers without one."""
    found = {"model_type": "olmo2", "dtype": metadata.dtype("bfloat16")} | _has_biases(metadata, config)
    window, rope = metadata.whole("attention.sliding_window"), config["rope_parameters"]
    if not window:
        return found
    kinds = {"full_attention": rope, "sliding_attention": {"rope_theta": rope["rope_theta"]}}
    windowed = {"sliding_window": window, "layer_types": _windowed(metadata), "rope_parameters": kinds}
    return found | {"model_type": "olmo3"} | windowed


def _windowed(metadata: Metadata) -> list[str] | None:
    """Which layers look back on a window; None where the file does not say."""
    pattern = metadata.flags("attention.sliding_window_pattern")
    return [_attends(not each, "sliding") for each in pattern] or None


def _exaone4(metadata: Metadata, config: _Config) -> _Config:
    """Without a window all layers attend to all."""
    window = metadata.whole("attention.sliding_window") or None
    return {"model_type": "exaone4", "sliding_window": window, "layer_types": _windowed(metadata)}


def _ernie4_5(metadata: Metadata, config: _Config) -> _Config:
    """Neighbours are rotated together, as they were published."""
    return {"model_type": "ernie4_5", "use_bias": metadata.has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")}


def _hunyuan(metadata: Metadata, config: _Config) -> _Config:
    """The base is stretched already."""
    return {"model_type": "hunyuan_v1_dense"} | _has_biases(metadata, config)


def _minicpm(metadata: Metadata, config: _Config) -> _Config:
    residual, logits = metadata.number("residual_scale"), metadata.number("logit_scale")
    return {
        "model_type": "minicpm",
        "scale_emb": metadata.number("embedding_scale"),
        "scale_depth": residual and residual * (config["num_hidden_layers"] or 0) ** 0.5,
        "dim_model_base": logits and (config["hidden_size"] or 0) / logits,
    } | _has_biases(metadata, config)


def _lfm2(metadata: Metadata, config: _Config) -> _Config:
    if metadata.whole("attention.sliding_window"):
        raise UnsupportedModelError(f"{metadata.path}: its layers look back on a window, which LFM2's do not here")
    kinds = ["full_attention" if heads else "conv" for heads in metadata.of_layers("attention.head_count_kv")]
    return {
        "model_type": "lfm2",
        "layer_types": kinds,
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "block_auto_adjust_ff_dim": False,
    }


def _seed_oss(metadata: Metadata, config: _Config) -> _Config:
    return {
        "model_type": "seed_oss",
        "attention_bias": metadata.has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "attention_out_bias": metadata.has("blk.0.attn_output.bias"),
        "mlp_bias": metadata.has("blk.0.ffn_gate.bias"),
    }


def _starcoder2(metadata: Metadata, config: _Config) -> _Config:
    """The window is that of all published models: files do not say it."""
    return {
        "model_type": "starcoder2",
        "norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "sliding_window": metadata.whole("attention.sliding_window") or 4096,
        "use_bias": metadata.has("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
    }


def _eagle3(metadata: Metadata, config: _Config) -> _Config:
    """`target_layers` are the ids that the head was published with."""
    ids = metadata.entries("target_layers", int, "whole numbers")
    reduced = metadata.tensors.get("d2t") or metadata.tensors.get("output.weight")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config["vocab_size"] or metadata.whole("vocab_size"),
        "draft_vocab_size": reduced.shape[0] if reduced else None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": config["rope_parameters"] | metadata.sections(),
        "eagle_aux_hidden_state_layer_ids": ids or None,
        "eagle_aux_hidden_state_convention": ENTERED_UNLESS_USUAL if ids else None,
        "target_hidden_size": metadata.whole("target_hidden_size"),
        "norm_before_residual": metadata.flag("norm_before_residual"),
        "norm_before_fc": metadata.flag("norm_before_fc"),
    } | _has_biases(metadata, config)


#: How scores of experts are made, by llama.cpp's numbers.
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3


def _mixture(metadata: Metadata, scores: int = _SOFTMAX, scale: float = 1.0) -> _Config:
    """How many experts each token goes through and how large they are. UnsupportedModelError where the file says of
    their scores what the architecture's are not."""
    for key, own in (("expert_gating_func", scores), ("expert_weights_scale", scale), ("expert_group_count", 1)):
        found = metadata.number(key)
        if found and found != own:
            raise UnsupportedModelError(f"{metadata.path}: {key!r} of its experts is {found}, supported is {own}")
    return {
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _qwen3moe(metadata: Metadata, config: _Config) -> _Config:
    dense = (re.fullmatch(r"blk\.(\d{1,4})\.ffn_gate\.weight", name, re.ASCII) for name in metadata.tensors)
    own = {
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(int(layer[1]) for layer in dense if layer),
    }
    return own | _mixture(metadata) | _has_biases(metadata, config)


def _qwen35moe(metadata: Metadata, config: _Config) -> _Config:
    shared = metadata.whole("expert_shared_feed_forward_length")
    own = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": shared}
    return _qwen35(metadata, config) | _mixture(metadata) | own


def _olmoe(metadata: Metadata, config: _Config) -> _Config:
    return {"model_type": "olmoe", "norm_topk_prob": False} | _mixture(metadata) | _has_biases(metadata, config)


def _granitemoe(metadata: Metadata, config: _Config) -> _Config:
    """Without an expert that every token goes through, which the family does not have."""
    if metadata.whole("expert_shared_feed_forward_length"):
        raise UnsupportedModelError(
            f"{metadata.path}: it has a shared expert, which models of this architecture do not have here"
        )
    return _granite(metadata, config) | _mixture(metadata) | {"model_type": "granitemoe"}


def _lfm2moe(metadata: Metadata, config: _Config) -> _Config:
    scale, dense = metadata.number("expert_weights_scale") or 1.0, metadata.count("leading_dense_block_count", 0)
    return _lfm2(metadata, config) | {
        "model_type": "lfm2_moe",
        "num_dense_layers": dense,
        "norm_topk_prob": True,
        "use_expert_bias": metadata.has(f"blk.{dense}.exp_probs_b.bias"),
        "routed_scaling_factor": scale,
        **_mixture(metadata, _SIGMOID, scale),
    }


def _gpt_oss(metadata: Metadata, config: _Config) -> _Config:
    """Values go beyond float16. Of its rotary embedding the published files say that bounds are not rounded; the limit
    of the activation is that of all published models: files do not say it."""
    rope = config["rope_parameters"]
    return {
        "model_type": "gpt_oss",
        "dtype": metadata.dtype("bfloat16"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "rope_parameters": rope | {"truncate": False} if rope.get("rope_type") == "yarn" else rope,
        **_mixture(metadata, _SOFTMAX_OF_CHOSEN),
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
    } | _has_biases(metadata, config)


_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_POST_NORMS = _POST_NORM | {"post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA3_NORMS = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_HUNYUAN_NAMES = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_LFM2_NAMES = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.*.w1",
    "ffn_up_exps": "feed_forward.experts.*.w3",
    "ffn_down_exps": "feed_forward.experts.*.w2",
}
_GRANITE_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{each}_exps": f"block_sparse_moe.experts.*.{each}_proj" for each in ("gate", "up", "down")},
}
_QWEN35_NAMES = _POST_NORM | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
#: By llama.cpp's names. Language models of Qwen2.5-VL and Qwen3-VL are those of Qwen2 and Qwen3 on texts.
_ARCHITECTURES = {
    "llama": Architecture(_llama, permuted=True),
    "mistral3": Architecture(_mistral3, permuted=True),
    "qwen2": Architecture(_qwen2),
    "qwen2vl": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen3vl": Architecture(_qwen3),
    "qwen35": Architecture(_qwen35, shifted=True, unshifted=("ssm_norm",), names=_QWEN35_NAMES),
    "qwen3moe": Architecture(_qwen3moe),
    "qwen35moe": Architecture(_qwen35moe, shifted=True, unshifted=("ssm_norm",), names=_QWEN35_NAMES),
    "olmoe": Architecture(_olmoe),
    "granitemoe": Architecture(_granitemoe, permuted=True, names=_GRANITE_NAMES),
    "lfm2moe": Architecture(_lfm2moe, names=_LFM2_NAMES),
    "gpt-oss": Architecture(_gpt_oss, names=_POST_NORM | {"ffn_gate_inp": "mlp.router"}, alternating=True),
    "gemma": Architecture(_gemma, shifted=True),
    "gemma3": Architecture(_gemma3, shifted=True, names=_GEMMA3_NORMS),
    "phi3": Architecture(_phi3, names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "granite": Architecture(_granite, permuted=True),
    "smollm3": Architecture(_smollm3, permuted=True),
    "olmo2": Architecture(_olmo2, names=_POST_NORMS),
    "exaone4": Architecture(_exaone4, names=_POST_NORMS),
    "minicpm": Architecture(_minicpm, permuted=True),
    "ernie4_5": Architecture(_ernie4_5),
    "hunyuan-dense": Architecture(_hunyuan, names=_HUNYUAN_NAMES),
    "lfm2": Architecture(_lfm2, names=_LFM2_NAMES),
    "seed_oss": Architecture(_seed_oss, names=_POST_NORM),
    "starcoder2": Architecture(_starcoder2, names={"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
}
#: Heads that draft for another model, of llama's layers.
_DRAFTS = {
    "eagle3": Architecture(
        _eagle3,
        permuted=True,
        names={"attn_norm_2": "hidden_norm", "fc": "model.fc", "enc.output_norm": "model.input_norm"},
    )
}
