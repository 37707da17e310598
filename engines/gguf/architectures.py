"""The architectures of GGUF files by llama.cpp's names: which family of the house each is, and how its metadata becomes
what a published `config.json` says.

llama.cpp's converter writes down less than was published: what follows from the architecture there stands here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from edgellm.engines.errors import UnsupportedModelError
from edgellm.engines.formats.gguf_file import GgufFile
from edgellm.engines.formats.tensors import STORAGE
from edgellm.engines.gguf.encoders import ENCODERS
from edgellm.engines.gguf.metadata import Metadata
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, Gguf

_Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """`own` adds to the fields of `config.json` that all have, `model_type` among them. `permuted`: rows of q and k are
    in the order of rotated pairs. `shifted`: norms were stored with 1 added, but for those whose names end with one of
    `unshifted`. `names` are modules that are called otherwise than Llama's.
    """

    own: Callable[[Metadata, _Config], _Config]
    permuted: bool = False
    shifted: bool = False
    unshifted: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


def model_config(files: Sequence[GgufFile]) -> _Config:
    """What `config.json` of the model would say; raises UnsupportedModelError for an architecture that the house does
    not have, and CheckpointError for metadata that is missing or wrong."""
    metadata = Metadata(files)
    own = architecture(metadata).own
    config: _Config = {
        "vocab_size": metadata.tensors["token_embd.weight"].shape[0] if metadata.has("token_embd.weight") else None,
        "hidden_size": metadata.whole("embedding_length"),
        "intermediate_size": metadata.same_in_all("feed_forward_length"),
        "num_hidden_layers": metadata.count("block_count") - metadata.count("nextn_predict_layers", 0),
        "num_attention_heads": metadata.same_in_all("attention.head_count"),
        "num_key_value_heads": metadata.key_value_heads(),
        "head_dim": metadata.whole("attention.key_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not metadata.has("output.weight"),
        "bos_token_id": metadata.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(metadata) or None,
        "dtype": _dtype(metadata),
        "num_experts": metadata.whole("expert_count") or None,
        "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        "rope_parameters": _rope(metadata, files),
        "quantization_config": {"quant_method": Gguf.method} if _is_packed(metadata) else None,
    }
    if metadata.flag("attention.causal") is False:
        raise UnsupportedModelError(f"{metadata.path}: its tokens see later ones, supported is text that is generated")
    values = metadata.whole("attention.value_length")
    if values not in (None, config["head_dim"]):
        raise metadata.error("attention.value_length", values, f"'attention.key_length', {config['head_dim']}")
    found = config | own(metadata, config)
    return {key: value for key, value in found.items() if value is not None or key == "sliding_window"}


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

#: What ends a turn or a text, where files name but one of several such tokens.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
_CONTROL = 3


def end_tokens(metadata: Metadata) -> list[int]:
    """The tokens that end an answer: those that the file names, first, and control tokens that always do."""
    named = (metadata.whole(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata.entries("tokenizer.ggml.tokens", str, "texts")
    kinds = metadata.entries("tokenizer.ggml.token_type", int, "whole numbers")
    usual = (
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _ENDS
    )
    return list(dict.fromkeys(each for each in (*named, *usual) if each is not None))


def _is_packed(metadata: Metadata) -> bool:
    return any(info.dtype in PACKED_TYPES for info in metadata.tensors.values())


def _dtype(metadata: Metadata, packed: str = "float16") -> str:
    """The dtype that the model computes in: that of most of its matrices, or what it is where these are `packed`."""
    sizes: Counter[str] = Counter()
    for info in metadata.tensors.values():
        sizes[info.dtype] += info.nbytes if len(info.shape) > 1 else 0
    most = sizes.most_common(1)[0][0] if sizes else ""
    return most if most in STORAGE else packed


def _rope(metadata: Metadata, files: Sequence[GgufFile]) -> _Config:
    """The base and the scaling of the rotary embedding, and the part of a head that is rotated."""
    base = {"rope_theta": metadata.number("rope.freq_base") or 10000.0}
    rotated, whole = metadata.whole("rope.dimension_count"), metadata.whole("attention.key_length")
    if whole is None:
        whole = (metadata.whole("embedding_length") or 0) // max(1, metadata.same_in_all("attention.head_count") or 0)
    if rotated and whole:
        base["partial_rotary_factor"] = rotated / whole
    long, short = (metadata.values(f"rope_factors_{name}.weight", files) for name in ("long", "short"))
    if long is not None and short is not None:
        given: _Config = {
            "rope_type": "longrope",
            "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.attn_factor"),
            "long_factor": long.reshape(-1).tolist(),
            "short_factor": short.reshape(-1).tolist(),
        }
        return base | {key: value for key, value in given.items() if value is not None}
    factors = metadata.values("rope_freqs.weight", files)
    if factors is not None:
        return base | _by_factors(metadata, factors.reshape(-1), base["rope_theta"])
    kind, factor = metadata.text("rope.scaling.type"), metadata.number("rope.scaling.factor")
    if kind in (None, "none"):
        return base
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling |= {
            "original_max_position_embeddings": metadata.whole("rope.scaling.original_context_length"),
            "attention_factor": metadata.number("rope.scaling.yarn_attn_factor"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast"),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow"),
        }
    return base | {key: value for key, value in scaling.items() if value is not None}


#: Where the blend ends in all of Llama's, in rotations within the 8,192 tokens that llama.cpp takes for trained.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _by_factors(metadata: Metadata, factors: np.ndarray, theta: float) -> _Config:
    """The scaling whose frequencies are divided by `factors` [rotary_dim / 2]: Llama 3's, where it is that."""
    factor, trained = float(factors.max(initial=1)), 8192
    with np.errstate(all="ignore"):  # what is wrong with them is found where they are used
        turns = trained * np.float64(theta) ** -(np.arange(len(factors)) / max(1, len(factors))) / (2 * np.pi)
        kept = np.clip((turns - 1.0) / 3.0, 0, 1)
        is_llama3 = np.allclose(1 / (kept + (1 - kept) / factor), factors, rtol=1e-5)
    if is_llama3:
        return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": trained} | _LLAMA3
    same = [float(each) for each in factors]
    given = {"short_factor": same, "long_factor": same, "attention_factor": 1.0}
    return {"rope_type": "longrope", "original_max_position_embeddings": metadata.whole("context_length")} | given


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
    found = {"model_type": "olmo2", "dtype": _dtype(metadata, "bfloat16")} | _has_biases(metadata, config)
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
