"""Writes published checkpoints as llama.cpp's converter does: its names, and what it changes in tensors.

Names were compared with gguf-py 0.19.0, the changes follow the converter's description.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import tokenizers
from gguf_metadata import MAMBA, PAIRED, metadata_of
from gguf_writing import Tensor, dense, random_blocks, write_gguf
from golden_files import golden_folder, read_tensors
from mtp_checkpoints import golden_checkpoint
from safetensors.numpy import load_file, save_file

from edgellm.engines.formats.gguf_file import GgufFile, open_split
from edgellm.engines.gguf.model_config import model_config

#: By `model_type`, llama.cpp's name.
ARCHITECTURES = {
    **{"llama": "llama", "mistral": "llama", "ministral3": "mistral3", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{
        "qwen3_5_text": "qwen35",
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3_text": "gemma3",
        "gemma4_text": "gemma4",
        "phi3": "phi3",
        "granite": "granite",
    },
    **{"smollm3": "smollm3", "olmo2": "olmo2", "lfm2": "lfm2", "seed_oss": "seed_oss"},
    **{"starcoder2": "starcoder2", "olmo3": "olmo2", "exaone4": "exaone4", "minicpm": "minicpm"},
    **{"ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense"},
    **{"qwen3_moe": "qwen3moe", "olmoe": "olmoe", "granitemoe": "granitemoe", "lfm2_moe": "lfm2moe"},
    **{"gpt_oss": "gpt-oss", "qwen3_5_moe_text": "qwen35moe"},
    **{"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h"},
}
#: Golden folders, one of each architecture, of which it is known what llama.cpp's converter writes; its output type.
CONVERTED = {
    **dict.fromkeys(("llama_llama3", "llama_biases_head_dim_10", "ministral3", "qwen2_yarn", "qwen3"), "f16"),
    **dict.fromkeys(("qwen3_5_text", "gemma", "phi3_partial_tied", "granite_biases", "smollm3_list_tied"), "f16"),
    **dict.fromkeys(("lfm2", "seed_oss", "gemma4"), "f16"),
    **dict.fromkeys(("gemma3", "gemma4_plain", "olmo2", "starcoder2"), "bf16"),
    **dict.fromkeys(("qwen3_moe", "olmoe", "lfm2_moe", "qwen3_5_moe_text"), "f16"),
    **dict.fromkeys(("granitemoe", "gpt_oss"), "bf16"),
}
_SHIFTED = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe")
_WITH_POST_NORM = ("gemma2", "gemma3", "gemma4", "olmo2", "exaone4", "seed_oss", "qwen35", "qwen35moe", "gpt-oss")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in ("q", "k", "v", "qkv")},
    **{f"self_attn.{each}": "attn_output" for each in ("o_proj", "out_proj")},
    **{f"self_attn.{each}_{norm}": f"attn_{each}_norm" for each in "qk" for norm in ("norm", "layernorm")},
    **{f"self_attn.{name}_layernorm": f"attn_{name[0]}_norm" for name in ("query", "key")},
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
    **{"mlp.gate_up_proj": "ffn_up", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    **{"feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up"},
    **{"operator_norm": "attn_norm", "input_layernorm": "attn_norm", "ffn_norm": "ffn_norm"},
    **{f"conv.{each}": f"shortconv.{each}" for each in ("conv", "in_proj", "out_proj")},
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    **{"per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"},
    "layer_scalar": "layer_output_scale.weight",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    **dict.fromkeys(("mlp.gate", "mlp.router", "feed_forward.gate", "block_sparse_moe.router.layer"), "ffn_gate_inp"),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{each}_proj": f"ffn_{each}_shexp" for each in ("gate", "up", "down")},
    **{f"mlp.experts.{each}_proj": f"ffn_{each}_exps" for each in ("gate", "up", "down")},
    **{f"mamba.{each}": f"ssm_{name}" for each, name in (("in_proj", "in"), ("out_proj", "out"), ("norm", "norm"))},
    **{"mamba.conv1d": "ssm_conv1d", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d", "mamba.dt_bias": "ssm_dt.bias"},
    "self_attn.sinks": "attn_sinks.weight",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
_OF_EXPERT = re.compile(r"(.+)\.(?:mlp|feed_forward)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERTS_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MTP = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}


#: Types of a model's layers as llama.cpp mixes them, and a step for each way in which kernels get one.
MIXTURE = {
    **{"attn_q": "q4_k", "attn_k": "q4_k", "attn_v": "q6_k", "attn_output": "q4_0"},
    **{"ffn_gate": "q8_0", "ffn_up": "q8_0", "ffn_down": "iq4_xs"},
}
MIXTURE_HEADS, _HIDDEN, _VOCABULARY = 4, 256, 96


def write_mixture(folder: Path, kinds: Mapping[str, str] = MIXTURE, head: str = "q8_0", scale: float = 0.01) -> Path:
    """A folder with a Llama of two layers in a GGUF file of random blocks, with factors as `random_blocks` has them, or
    of random values of the kinds float16 and float32."""

    def made(kind: str, shape: tuple[int, int]) -> Tensor:
        if kind.startswith("float"):
            return dense((50 * scale * random.standard_normal(shape)).astype(kind))
        return random_blocks(kind, shape, random, scale)

    random, rows = np.random.default_rng(11), {"attn_k": _HIDDEN // 2, "attn_v": _HIDDEN // 2}
    own = {"block_count": 2, "embedding_length": _HIDDEN, "feed_forward_length": _HIDDEN, "context_length": 64}
    own |= {"attention.head_count": MIXTURE_HEADS, "attention.head_count_kv": 2}
    own |= {"attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in own.items()}
    norm = dense(random.uniform(0.5, 1.5, _HIDDEN).astype(np.float32))
    tensors = {"token_embd.weight": random_blocks("q8_0", (_VOCABULARY, _HIDDEN), random, scale)}
    for layer in range(2):
        for name, kind in kinds.items():
            shape = rows.get(name, _HIDDEN), _HIDDEN
            tensors[f"blk.{layer}.{name}.weight"] = made(kind, shape)
        tensors |= {f"blk.{layer}.{name}.weight": norm for name in ("attn_norm", "ffn_norm")}
    tensors |= {"output_norm.weight": norm, "output.weight": random_blocks(head, (_VOCABULARY, _HIDDEN), random, scale)}
    folder.mkdir(exist_ok=True)
    file = write_gguf(folder / "model.gguf", metadata, tensors)
    (folder / "config.json").write_text(json.dumps(model_config(open_split(file))))
    return folder


def write_model(
    checkpoint: Path, target: Path, more: dict[str, Any] | None = None, kinds: Any = None, kind: str | None = None
) -> Path:
    """The checkpoint in a folder as a GGUF file at `target`. `more` is further metadata, None of keys to leave out;
    `kinds` gives, for a name of the file and its values, what is written in the place of a dense tensor. Of another
    architecture it is of `kind`."""
    config = json.loads((checkpoint / "config.json").read_text())
    stored = {name: each for file in checkpoint.glob("model*.safetensors") for name, each in read_tensors(file).items()}
    tensors = {name: _values(*each) for name, each in stored.items()}
    kind = kind or ARCHITECTURES[config["model_type"]]
    if kind == "nemotron_h":
        config["num_hidden_layers"] = len(config["layers_block_type"])
        kind += "_moe" * ("moe" in config["layers_block_type"])
    if kind in MAMBA:
        tensors = _as_llamas(tensors, config)
        stored = {name: next(iter(stored.values())) for name in tensors}
    metadata = {key: each for key, each in (metadata_of(config, kind) | (more or {})).items() if each is not None}
    written: dict[str, Tensor] = {}
    tensors, stored = _with_stacks(tensors, {name: each[0] for name, each in stored.items()}, kind)
    if tensors.keys() >= {"lm_head.weight"} and config.get("tie_word_embeddings", False):
        del tensors["lm_head.weight"]
    for name, values in tensors.items():
        new = _name(name, kind, config["num_hidden_layers"])
        changed = _changed(name, values, kind, config)
        packed = None if kinds is None else kinds(new, changed)
        written[new] = packed or _dense(changed, "F32" if "gate_inp" in new or "ssm_norm" in new else stored[name])
    factors = rope_factors(config)
    if factors is not None:
        written["rope_freqs.weight"] = _dense(factors, "F32")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in scaling and kind in ("phi3", "minicpm"):
            written[f"rope_factors_{length}.weight"] = _dense(np.array(scaling[f"{length}_factor"], np.float32), "F32")
    return write_gguf(target, metadata, written)


def _as_llamas(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of hybrids by the names of others: parts of a layer by what they are, gates and ups apart."""
    found = {}
    for published, values in tensors.items():
        name = (
            published.replace("backbone.", "model.").replace(".embeddings.", ".embed_tokens.").replace("norm_f", "norm")
        )
        name = re.sub(r"(layers\.\d+\.)norm\.", r"\1input_layernorm.", name)
        name = name.replace("mixer.gate.e_score_correction_bias", "feed_forward.expert_bias")
        name = name.replace("mixer.shared_experts.", "mlp.shared_expert.")
        name = re.sub(r"mixer\.([qkvo]_proj)", r"self_attn.\1", name)
        name = re.sub(r"mixer\.(up_proj|down_proj|gate\.|experts\.)", r"mlp.\1", name).replace(".mixer.", ".mamba.")
        mlp = "mlp.shared_expert" if config.get("num_local_experts") else "mlp"
        if "shared_mlp.input_linear" in name:
            halves = zip(("gate", "up"), np.split(values, 2), strict=True)
            found |= {name.replace("shared_mlp.input_linear", f"{mlp}.{part}_proj"): own for part, own in halves}
        else:
            found[name.replace("shared_mlp.output_linear", f"{mlp}.down_proj")] = values
    return found


def _with_stacks(
    tensors: dict[str, np.ndarray], dtypes: dict[str, str], kind: str
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Values and dtypes by name, with the matrices of all experts in one tensor, gate and up apart."""
    found: dict[str, np.ndarray] = {}
    kinds: dict[str, str] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}

    def add(name: str, values: np.ndarray, dtype: str) -> None:
        found[name], kinds[name] = values, dtype

    for name, values in tensors.items():
        match, dtype = _OF_EXPERT.fullmatch(name), dtypes[name]
        if match is not None:
            module = f"{match[1]}.mlp.experts.{_EXPERTS_PARTS.get(match[3], match[3])}.weight"
            experts.setdefault(module, {})[int(match[2])] = values
            kinds[module] = dtype
        elif ".experts." in name or ".block_sparse_moe.input_" in name or ".block_sparse_moe.output_" in name:
            ending = "bias" if name.endswith("_bias") else "weight"
            turned = values.swapaxes(1, 2) if kind == "gpt-oss" and ending == "weight" else values
            module = f"{name.split('.mlp.')[0].split('.block_sparse_moe.')[0]}.mlp.experts"
            parts = (("down", turned),)
            if "gate_up_proj" in name or "input_linear" in name:
                half = turned.shape[1] // 2
                halves = (
                    (turned[:, ::2], turned[:, 1::2]) if kind == "gpt-oss" else (turned[:, :half], turned[:, half:])
                )
                parts = tuple(zip(("gate", "up"), halves, strict=True))
            for part, own in parts:
                add(f"{module}.{part}_proj.{ending}", own, "F32" if ending == "bias" else dtype)
        else:
            add(name, values, dtype)
    stacks = {name: np.stack([each[number] for number in sorted(each)]) for name, each in experts.items()}
    return found | stacks, kinds


def converted_checkpoint(name: str, place: Path) -> Path:
    """One of `CONVERTED` in a new folder, as the converter takes it: Qwen3.5 with a head for drafts, mixtures without
    the dense layers and the head of their own that it knows of no published model."""
    if name.startswith("qwen3_5"):
        return golden_checkpoint(name, place)
    copytree(golden_folder("decoder") / name, place)
    if name not in ("qwen3_moe", "lfm2_moe"):
        return place
    tensors, path = load_file(place / "model.safetensors"), place / "config.json"
    if name == "qwen3_moe":
        tensors = {key.replace("rs.2.", "rs.1."): each for key, each in tensors.items() if "layers.1." not in key}
        changed: dict[str, Any] = {"num_hidden_layers": 2, "mlp_only_layers": []}
    else:
        del tensors["lm_head.weight"]
        changed = {"tie_word_embeddings": True}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return place


def contents(path: Path) -> dict[str, dict[str, Any]]:
    """What a file says of its architecture, numbers of 32 bits in their shortest form, and a digest of each tensor
    behind its layer."""
    file = GgufFile(path)
    prefix = f"{file.metadata['general.architecture']}."
    metadata = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    short = {key: float(str(np.float32(each))) if isinstance(each, float) else each for key, each in metadata.items()}
    digests: dict[str, str] = {}
    for name, info in sorted(file.tensors.items()):
        data = file.bytes_of(info)
        if name.endswith("ssm_a"):  # exponentials, which libraries round differently
            data = np.round(data.view(np.float32), 4)
        digest = hashlib.sha256(f"{info.dtype}{info.shape}".encode() + data.tobytes()).hexdigest()[:7]
        layer = re.match(r"blk\.(\d+)\.", name)
        kind = name[layer.end() :] if layer else name
        digests[kind] = f"{digests.get(kind, '')} {layer[1] if layer else '-'}:{digest}".strip()
    return {"metadata": dict(sorted(short.items())), "tensors": digests}


def byte_pairs(published: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata of a tokenizer of byte pairs, without the beginning of the keys, with a token that is not used."""
    described = json.loads(published.to_str())
    vocabulary = published.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    added = {token["content"]: 3 if token["special"] else 4 for token in described["added_tokens"]}
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, "[PAD]"],
        "token_type": [*(added.get(token, 1) for token in tokens), 5],
        "merges": [" ".join(pair) for pair in described["model"]["merges"]],
    }


def _values(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32).reshape(shape)


def _dense(values: np.ndarray, dtype: str) -> Tensor:
    """Vectors and kernels as float32, matrices as they were published."""
    if dtype == "F32" or values.ndim == 1 or values.shape[-1] < 8:
        return Tensor("float32", values.shape, np.ascontiguousarray(values, np.float32).tobytes())
    if dtype == "F16":
        return Tensor("float16", values.shape, values.astype(np.float16).tobytes())
    bits = np.ascontiguousarray(values).view(np.uint32) >> 16
    return Tensor("bfloat16", values.shape, bits.astype(np.uint16).tobytes())


def _name(name: str, kind: str, layers: int) -> str:
    match = re.fullmatch(r"(model\.layers\.|mtp\.layers\.)(\d+)\.(.+?)(\.weight|\.bias)?", name)
    if match is None:
        module, _, ending = name.rpartition(".")
        if module.startswith("mtp."):
            return f"blk.{layers}.{_MTP[module.removeprefix('mtp.')]}.{ending}"
        return f"{_NAMES[module]}.{ending}"
    layer = int(match[2]) + (layers if match[1].startswith("mtp") else 0)
    inner = match[3]
    if inner == "post_attention_layernorm":
        own = "post_attention_norm" if kind in _WITH_POST_NORM else "ffn_norm"
    else:
        own = _NAMES[inner]
    return f"blk.{layer}.{own}{match[4] or ''}"


def _changed(name: str, values: np.ndarray, kind: str, config: dict[str, Any]) -> np.ndarray:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    module = name.split(".")[-2]
    if kind in PAIRED and module in heads:
        count = heads[module] or config["num_attention_heads"]
        paired = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
        return paired.swapaxes(1, 2).reshape(values.shape)
    is_norm = name.endswith("norm.weight") or "pre_fc_norm" in name
    if kind in _SHIFTED and is_norm and not name.endswith("linear_attn.norm.weight"):
        return values + 1
    if "conv.conv.weight" in name:
        return values[:, 0]
    if "linear_attn." in name:
        return _delta(name, values, config)
    if ".mamba." in name:
        groups = config.get("mamba_n_groups") or config.get("n_groups")
        own = {"A_log": lambda: -np.exp(values)[:, None], "D": lambda: values[:, None]}
        own |= {"conv1d.weight": lambda: values[:, 0], "norm.weight": lambda: values.reshape(groups, -1)}
        return own.get(name.split(".mamba.")[1], lambda: values)()
    return values


def _delta(name: str, values: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Value heads of one key head apart, decays as they are applied, kernels without the channel."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size, first = config["linear_value_head_dim"], 2 * keys * config["linear_key_head_dim"]
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith("conv1d.weight"):
        values = values[:, 0]

    def tiled(part: np.ndarray, each: int) -> np.ndarray:
        grouped = part.reshape(keys, heads // keys, each, *part.shape[1:])
        return grouped.swapaxes(0, 1).reshape(part.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate((values[:first], tiled(values[first:], size)))
    if name.endswith("in_proj_z.weight"):
        return tiled(values, size)
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(tiled(values.T, size).T)
    return values if name.endswith("linear_attn.norm.weight") else tiled(values, 1)


def rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """By which the frequencies of Llama 3 are divided, or those of Gemma 4."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        pairs = next(iter(config["per_layer_config"].values()))["head_dim"] // 2
        rotated = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)
    if rope.get("rope_type") != "llama3":
        return None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = config.get("rope_theta", rope.get("rope_theta")) ** -(np.arange(0, size, 2) / size)
    trained, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    lengths = 2 * np.pi / frequencies
    smooth = (trained / lengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    found = np.where(lengths < trained / high, 1.0, np.where(lengths > trained / low, rope["factor"], blended))
    return found.astype(np.float32)
