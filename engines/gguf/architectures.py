"""The architectures of GGUF files by llama.cpp's names: which family of the house each is, and how its metadata becomes
what a published `config.json` says. What is the same in all files of one, and how it calls its tensors, stands in
architectures.json.

llama.cpp's converter writes down less than was published: what follows from the architecture there stands here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from edgellm.engines.errors import UnsupportedModelError
from edgellm.engines.gguf.gemma import gemma3_config, gemma4_config, gemma_config
from edgellm.engines.gguf.metadata import Metadata, attends
from edgellm.engines.model.nearest import nearest

_Config = dict[str, Any]
_QUERY_BIASES = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")


@dataclass(frozen=True)
class Architecture:
    """The family `model_type`. `own` adds to the fields of `config.json` that all have, `constants` are the same in all
    files; a field of `numbers` is what a key of the metadata says, one of `wholes` too, or what stands behind the key
    where that says 0 or nothing; one of `tensors`, whether one of them is there. With `biased` tensors say which linear
    layers have biases. `permuted`: rows of q and k are in the order of rotated pairs. `shifted`: norms were stored with
    1 added, but for those whose names end with one of `unshifted`. Modules have the published names of `naming` (see
    `PUBLISHED`) and, besides, of `names`; `whole`: tensors that are no module's. With `alternating` rows of gate and up
    of an expert were published in turn, as one; with `joined` those of an MLP one behind the other. `tiled`: value
    heads stand apart that share a key head, where there are such. MLPs of layers are of one size, unless they are
    `uneven`, which `own` looks at.
    """

    model_type: str
    own: Callable[[Metadata, _Config], _Config]
    biased: bool = True
    constants: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    wholes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    permuted: bool = False
    shifted: bool = False
    unshifted: Sequence[str] = ()
    naming: str = "llama"
    names: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    alternating: bool = False
    joined: bool = False
    tiled: bool = True
    uneven: bool = False

    def config(self, metadata: Metadata, shared: _Config) -> _Config:
        """What `config.json` would say, None where it would say nothing; `shared` is what all architectures have."""
        biases = {
            "attention_bias": metadata.has(*_QUERY_BIASES) or None,
            "mlp_bias": metadata.has("blk.0.ffn_gate.bias") or None,
        }
        read: _Config = {name: metadata.number(key) for name, key in self.numbers.items()}
        read |= {name: metadata.whole(key) or usual for name, (key, usual) in self.wholes.items()}
        read |= {name: metadata.has(*tensors) for name, tensors in self.tensors.items()}
        own = {"model_type": self.model_type, **self.constants, **read, **self.own(metadata, shared)}
        return shared | own | (biases if self.biased else {})


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
    options = {**dict.fromkeys(_DRAFTS, "--draft (edgellm build) or --draft-checkpoint"), ENCODERS: "--mmproj"}
    advice = nearest(name, metadata.tensors)
    if name in options:
        advice = f". Such a file goes with a model: name it with {options[name]}"
    if known is _DRAFTS:
        advice = ". Name the file of a draft that was made for the model, or leave the draft out"
    if name == "gemma4-assistant":
        advice = ". An assistant drafts from keys and values of its model, which is not done: build without a draft"
    raise UnsupportedModelError(
        f"{metadata.path}: 'general.architecture' is {name!r:.80}; supported are {', '.join(known)}{advice}"
    )


#: The convention of a draft's layers: llama.cpp takes them for layers entered, as vLLM does, but its converter writes
#: down what others name by outputs, too; these are told by being the usual ones.
ENTERED_UNLESS_USUAL = "entered, unless the usual ones are output"


def _mistral3(metadata: Metadata, config: _Config) -> _Config:
    """Ministral 3, whose queries are scaled beyond the trained context; without that Mistral Small's language model."""
    beta, log = metadata.number("attention.temperature_scale"), metadata.number("rope.scaling.yarn_log_multiplier")
    if beta is None:
        return {"sliding_window": None}
    own = {"llama_4_scaling_beta": beta} | ({} if log is None else {"mscale": log, "mscale_all_dim": log})
    return {"model_type": "ministral3", "rope_parameters": config["rope_parameters"] | own}


def _qwen35(metadata: Metadata, config: _Config) -> _Config:
    interval, heads = metadata.count("full_attention_interval", 4), metadata.count("ssm.time_step_rank")
    size = metadata.count("ssm.inner_size")
    if not heads or size % heads:
        raise metadata.error("ssm.inner_size", size, f"a multiple of 'ssm.time_step_rank', {heads}")
    recurrent, types = metadata.get("attention.recurrent_layers"), None
    if isinstance(recurrent, list):
        types = [attends(not each, "linear") for each in recurrent[: config["num_hidden_layers"]]]
    return {
        "full_attention_interval": interval,
        "layer_types": types,
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_value_head_dim": size // heads,
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "mtp_num_hidden_layers": metadata.whole("nextn_predict_layers") or None,
        "rope_parameters": config["rope_parameters"] | metadata.sections(),
    }


def _olmo2(metadata: Metadata, config: _Config) -> _Config:
    """With a window it is OLMo 3, whose scaling of the rotary embedding is that of the layers without one."""
    found: _Config = {"dtype": metadata.dtype("bfloat16")}
    window, rope = metadata.whole("attention.sliding_window"), config["rope_parameters"]
    if not window:
        return found
    kinds = {"full_attention": rope, "sliding_attention": {"rope_theta": rope["rope_theta"]}}
    windowed = {"sliding_window": window, "layer_types": metadata.layer_types(), "rope_parameters": kinds}
    return found | {"model_type": "olmo3"} | windowed


def _minicpm(metadata: Metadata, config: _Config) -> _Config:
    """Of the first files, which do not say the scales, they are those of all models that were published then."""
    residual, logits = metadata.number("residual_scale"), metadata.number("logit_scale")
    return {
        "scale_emb": metadata.number("embedding_scale") or 12.0,
        "scale_depth": residual * (config["num_hidden_layers"] or 0) ** 0.5 if residual else 1.4,
        "dim_model_base": (config["hidden_size"] or 0) / logits if logits else 256,
    }


def _lfm2(metadata: Metadata, config: _Config) -> _Config:
    if metadata.whole("attention.sliding_window"):
        raise UnsupportedModelError(f"{metadata.path}: its layers look back on a window, which LFM2's do not here")
    kinds = ["full_attention" if heads else "conv" for heads in metadata.of_layers("attention.head_count_kv")]
    return {
        "layer_types": kinds,
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "block_auto_adjust_ff_dim": False,
    }


def _eagle3(metadata: Metadata, config: _Config) -> _Config:
    """`target_layers` are the ids that the head was published with."""
    ids = metadata.entries("target_layers", int, "whole numbers")
    reduced = metadata.tensors.get("d2t") or metadata.tensors.get("output.weight")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
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
    }


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
    return {"mlp_only_layers": sorted(int(layer[1]) for layer in dense if layer)} | _mixture(metadata)


def _qwen35moe(metadata: Metadata, config: _Config) -> _Config:
    shared = metadata.whole("expert_shared_feed_forward_length")
    return _qwen35(metadata, config) | _mixture(metadata) | {"shared_expert_intermediate_size": shared}


def _granitemoe(metadata: Metadata, config: _Config) -> _Config:
    """Without an expert that every token goes through, which the family does not have."""
    if metadata.whole("expert_shared_feed_forward_length"):
        raise UnsupportedModelError(
            f"{metadata.path}: it has a shared expert, which models of this architecture do not have here"
        )
    return _mixture(metadata)


def _space_fields(metadata: Metadata, heads: str, size: str, groups: str, state: str, width: str, bias: str) -> Any:
    """What a `config.json` says of these layers, by a family's names: their heads and the size of these, groups, the
    size of states, the width of convolutions, and whether these have biases."""
    count = metadata.count("ssm.time_step_rank")
    return {
        **{heads: count, size: metadata.count("ssm.inner_size") // max(1, count)},
        **{groups: metadata.whole("ssm.group_count"), state: metadata.whole("ssm.state_size")},
        width: metadata.whole("ssm.conv_kernel"),
        bias: any(name.endswith(".ssm_conv1d.bias") for name in metadata.tensors),
    }


def _granitehybrid(metadata: Metadata, config: _Config) -> _Config:
    """Without a rotary embedding, unless the file says that there is one."""
    experts, shared = metadata.whole("expert_count"), metadata.whole("expert_shared_feed_forward_length")
    names = (f"mamba_{each}" for each in ("n_heads", "d_head", "n_groups", "d_state", "d_conv", "conv_bias"))
    return {
        **(_mixture(metadata) if experts else {}),
        **{"num_experts": None, "num_local_experts": experts or 0},
        "shared_intermediate_size": shared or config["intermediate_size"],
        "layer_types": ["attention" if each else "mamba" for each in metadata.of_layers("attention.head_count_kv")],
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned") else "nope",
        "mamba_expand": metadata.count("ssm.inner_size") // max(1, metadata.count("embedding_length")),
        **_space_fields(metadata, *names),
    }


def _nemotron_h(metadata: Metadata, config: _Config) -> _Config:
    """Layers are told by what they have: heads of keys, rows of an MLP or of experts, or neither; none rotates."""
    scale, experts = metadata.number("expert_weights_scale") or 1.0, metadata.whole("expert_count")
    keys, rows = (metadata.of_layers(key) for key in ("attention.head_count_kv", "feed_forward_length"))
    sizes = list(zip(keys, rows, strict=True))[: config["num_hidden_layers"]]  # behind them stands a draft head
    block = "moe" if experts else "mlp"
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "use_conv_bias"
    return {
        **(_mixture(metadata, _SIGMOID, scale) if experts else {}),
        **{"routed_scaling_factor": scale, "norm_topk_prob": metadata.flag("expert_weights_norm")},
        "moe_shared_expert_intermediate_size": metadata.whole("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.whole("moe_latent_size"),
        "n_shared_experts": metadata.whole("expert_shared_count"),
        "layers_block_type": ["attention" if own else block if inner else "mamba" for own, inner in sizes],
        "layer_norm_epsilon": config["rms_norm_eps"] or metadata.number("attention.layer_norm_epsilon"),
        "rope_parameters": {"rope_theta": config["rope_parameters"]["rope_theta"]},
        **_space_fields(metadata, *names),
    }


def _lfm2moe(metadata: Metadata, config: _Config) -> _Config:
    scale, dense = metadata.number("expert_weights_scale") or 1.0, metadata.count("leading_dense_block_count", 0)
    return _lfm2(metadata, config) | {
        "num_dense_layers": dense,
        "use_expert_bias": metadata.has(f"blk.{dense}.exp_probs_b.bias"),
        "routed_scaling_factor": scale,
        **_mixture(metadata, _SIGMOID, scale),
    }


def _gpt_oss(metadata: Metadata, config: _Config) -> _Config:
    """Values go beyond float16. Of its rotary embedding the published files say that bounds are not rounded; the limit
    of the activation is that of all published models: files do not say it."""
    rope = config["rope_parameters"]
    return {
        "dtype": metadata.dtype("bfloat16"),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "rope_parameters": rope | {"truncate": False} if rope.get("rope_type") == "yarn" else rope,
        **_mixture(metadata, _SOFTMAX_OF_CHOSEN),
        "intermediate_size": metadata.whole("expert_feed_forward_length"),
    }


def _gemma4(metadata: Metadata, config: _Config) -> _Config:
    mixture = _mixture(metadata)
    return gemma4_config(metadata, config) | mixture | {"top_k_experts": mixture["num_experts_per_tok"]}


#: What architectures add, by their families.
_OWN: dict[str, Callable[[Metadata, _Config], _Config]] = {
    "mistral": _mistral3,
    "qwen3_5_text": _qwen35,
    "qwen3_moe": _qwen3moe,
    "qwen3_5_moe_text": _qwen35moe,
    "olmoe": lambda metadata, config: _mixture(metadata),
    "granitemoe": _granitemoe,
    "granitemoehybrid": _granitehybrid,
    "nemotron_h": _nemotron_h,
    "lfm2_moe": _lfm2moe,
    "gpt_oss": _gpt_oss,
    "gemma2": lambda metadata, config: gemma_config(config, 46),
    "gemma3_text": gemma3_config,
    "gemma4_text": _gemma4,
    "olmo2": _olmo2,
    "exaone4": lambda metadata, config: {"layer_types": metadata.layer_types()},
    "minicpm": _minicpm,
    "lfm2": _lfm2,
}
#: What `general.architecture` says of vision encoders.
ENCODERS = "clip"
#: What is said of architectures, their tensors and encoders, of tokens and sampling.
TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
#: What tensors of a layer, and beside the layers, are called in all architectures: see `weights.py`.
TENSOR_NAMES: dict[str, dict[str, str]] = TABLE["tensors"]


def _listed(kind: str, own: Mapping[str, Callable[[Metadata, _Config], _Config]]) -> dict[str, Architecture]:
    """Architectures of the table by llama.cpp's names, of which several may be alike."""
    found: dict[str, Architecture] = {}
    for names, values in TABLE[kind].items():
        adds = own.get(values["model_type"], lambda metadata, config: {})
        found |= dict.fromkeys(names.split(), Architecture(own=adds, **values))
    return found


#: Language models of Qwen2.5-VL and Qwen3-VL are those of Qwen2 and Qwen3 on texts; rows of q and k of ERNIE are
#: rotated as neighbours, as they were published; the base of Hunyuan's rotation is stretched already.
_ARCHITECTURES = _listed("models", _OWN)
#: Heads that draft for another model, of llama's layers.
_DRAFTS = _listed("drafts", {"llama": _eagle3})
