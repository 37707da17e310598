"""Holds the reading of GGUF files, and the test writer of such files, to llama.cpp's own converter.

    PYTHONPATH=LLAMA_CPP:LLAMA_CPP/gguf-py python tools/goldens/make_converted.py \\
        --golden tests/goldens/gguf/converted.json --table TABLE.md

What it needs stands in `llama_cpp.py` beside it. Two kinds of models are converted:

Tiny ones of every architecture, of the kind that metadata can say in full, with random weights, each as published (16
bits) and as Q8_0. Our NumPy logits of the former are compared with transformers' on the checkpoint, those of the latter
with our own on the values that gguf-py dequantizes, which are read as the former are. Lines of a table.

Folders of `tests/goldens/decoder`: what the converter wrote of each, as metadata and a digest of each tensor, is the
golden that `tests/engines/families/test_gguf_converted.py` compares with what the test writer makes of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from golden_folders import pack, randomize_vectors
from llama_cpp import (
    convert,
    has_same_tokenizer,
    our_reading,
    transformers_logits,
    types,
    write_dequantized,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from gguf_models import CONVERTED, contents, converted_checkpoint

VOCABULARY, LENGTH = 128, 24  # the converter names the token 107 in every Gemma
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5},
    **{"initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}
#: Beyond the length trained on queries are scaled, which no backend computes: texts there are refused.
_SCALED = {
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    "original_max_position_embeddings": LENGTH,
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    **{"num_hidden_layers": 4, "head_dim": 32, "rms_norm_eps": 1e-3},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True},
        "mrope_section": [2, 1, 1],
    },
}
_GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
_GEMMA3 = _GEMMA | {
    **{"num_hidden_layers": 7, "sliding_window": 5, "query_pre_attn_scalar": 32},
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": _ROPE,
    },
}
_NO_WINDOWS = {"num_hidden_layers": 2, "sliding_window_pattern": 1, "layer_types": ["full_attention"] * 2}
_GEMMA4 = _GEMMA | {
    **{"num_hidden_layers": 6, "sliding_window": 5, "final_logit_softcapping": 30.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": _ROPE,
    },
    "global_head_dim": 64,
}
_OF_EACH_LAYER = {
    **{"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 3},
    "use_double_wide_mlp": True,
}
_KEYS_AS_VALUES = {
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "num_kv_shared_layers": 0,
}
_PHI4_ROPE = _ROPE | {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 64}
_GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.5}
_LFM2 = {"norm_eps": 1e-5, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
_OTHER_ORDER = {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"]}
_WIDE = {"head_dim": 32, "attention_bias": True, "mlp_bias": True}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_QWEN3_5_MOE = _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 64}
_GPT_OSS = {
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "sliding_window": 8},
    "rope_parameters": _YARN | {"truncate": False},
}
_FUSED_EXPERTS = "the same, gate and up of experts in one tensor"
_WITH_HEAD, _FUSED = "Qwen3.5, a head for drafts", "the same, q, k and v in one tensor"
#: By a name: the `model_type`, and what is other than usual. Windows are shorter than the text.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama 3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **_LLAMA3}}),
    "Llama, wide heads, biases": ("llama", _WIDE),
    _FUSED: ("llama", _WIDE),
    "Mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "Ministral 3": ("ministral3", {"head_dim": 32, "rope_parameters": _YARN | _SCALED}),
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen2, YaRN": ("qwen2", {"rope_parameters": _YARN}),
    "Qwen3": ("qwen3", {"head_dim": 32}),
    _WITH_HEAD: ("qwen3_5_text", _DELTA | {"mtp_num_hidden_layers": 1}),
    "Qwen3.5, layers in another order": ("qwen3_5_text", _DELTA | _OTHER_ORDER),
    "Gemma": ("gemma", _GEMMA),
    "Gemma 3": ("gemma3_text", _GEMMA3),
    "Gemma 3, no windows": ("gemma3_text", _GEMMA3 | _NO_WINDOWS),
    "Gemma 4 E2B and E4B": ("gemma4_text", _GEMMA4 | _OF_EACH_LAYER),
    "Gemma 4 31B": ("gemma4_text", _GEMMA4 | _KEYS_AS_VALUES),
    "Phi-3": ("phi3", {"sliding_window": None}),
    "Phi-4-mini": ("phi3", {"tie_word_embeddings": True, "rope_parameters": _PHI4_ROPE, "sliding_window": 64}),
    "Granite": ("granite", _GRANITE),
    "SmolLM3": ("smollm3", {"num_hidden_layers": 5}),
    "OLMo-2": ("olmo2", {}),
    "LFM2": ("lfm2", _LFM2 | {"block_multiple_of": 32}),
    "StarCoder2": ("starcoder2", {"norm_epsilon": 1e-5, "tie_word_embeddings": True, "sliding_window": None}),
    "Seed-OSS": ("seed_oss", {"head_dim": 32, "attention_bias": True, "attention_out_bias": False}),
    "Qwen3-MoE": ("qwen3_moe", _EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "OLMoE": ("olmoe", _EXPERTS | {"intermediate_size": 32, "num_key_value_heads": 4}),
    "Granite 3 MoE": ("granitemoe", _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "LFM2-MoE": ("lfm2_moe", _LFM2 | _EXPERTS | {"num_dense_layers": 1}),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", _QWEN3_5_MOE),
    _FUSED_EXPERTS: ("qwen3_5_moe_text", _QWEN3_5_MOE),
}
_FLOAT16 = ("Llama", "Llama, wide heads, biases")
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4},
    "out_hidden_size": _COMMON["hidden_size"],
}
_QWEN3_VISION = _QWEN_VISION | {"num_position_embeddings": 16}
_MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_INTERLEAVED = {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_interleaved": True}}
#: Language models of vision models: the same, with the configuration of the encoder, which the converter leaves out.
OF_VISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL": ("qwen2_5_vl", {"rope_parameters": _MROPE}, {**_QWEN_VISION, "fullatt_block_indexes": [0]}),
    "Qwen3-VL": ("qwen3_vl", _INTERLEAVED, {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}),
    "Qwen3.5": ("qwen3_5", _DELTA, _QWEN3_VISION),
    "Mistral Small": (
        "mistral3",
        {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
        {**_VISION, "model_type": "pixtral", "head_dim": 16},
    ),
    "Gemma 3, 4B and larger": ("gemma3", _GEMMA3, {**_VISION, "model_type": "siglip_vision_model"}),
}


def write_checkpoint(name: str, folder: Path) -> transformers.PreTrainedModel:
    """A tiny model in a folder, with random weights of a seed that the name gives; returns it in float32."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little"))
    if name in MODELS:
        kind, own = MODELS[name]
        config = transformers.AutoConfig.for_model(kind, **{"rope_parameters": _ROPE, **_COMMON, **own})
        make = transformers.AutoModelForCausalLM
    else:
        kind, own, vision = OF_VISION[name]
        text, tied = {**_COMMON, **own}, own.get("tie_word_embeddings", False)
        settings = {"text_config": {"rope_parameters": _ROPE, **text}, "vision_config": vision}
        tokens = {f"{each}_token_id": VOCABULARY - 1 for each in ("image", "video", "vision_start", "vision_end")}
        config = transformers.AutoConfig.for_model(kind, **settings, **tokens, tie_word_embeddings=tied)
        make = transformers.AutoModelForImageTextToText
    model = make.from_config(config, dtype=torch.float32)
    randomize_vectors(model.named_parameters())
    model.to(torch.float16 if name in _FLOAT16 else torch.bfloat16).save_pretrained(folder)
    if name == _WITH_HEAD:
        _add_head(folder)
    write_tokenizer(folder)
    return make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _add_head(folder: Path) -> None:
    """A head for multi-token prediction with random weights of the dtype that the file has."""
    tensors, hidden = load_file(folder / "model.safetensors"), _COMMON["hidden_size"]
    layer = {name.partition("layers.3.")[2]: each for name, each in tensors.items() if "layers.3." in name}
    head = {f"mtp.layers.0.{name}": torch.randn_like(each) for name, each in layer.items()}
    head |= {f"mtp.{name}.weight": torch.rand(hidden).bfloat16() for name in _NORMS}
    head["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})


_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


def compare(name: str, place: Path) -> str:
    """A line of the table."""
    model = write_checkpoint(name, place / "model")
    token_ids = np.random.default_rng(5).integers(3, VOCABULARY - 1, (1, LENGTH))
    options = ("--no-mtp",) if name.startswith("Qwen3.5") and name != _WITH_HEAD else ()
    options = {_FUSED: ("--fuse-qkv",), _FUSED_EXPERTS: ("--fuse-gate-up-exps", "--no-mtp")}.get(name, options)
    expected = transformers_logits(model, token_ids)
    published = convert(place / "model", "auto", place / "published.gguf", *options)
    quantized = convert(place / "model", "q8_0", place / "quantized.gguf", *options)
    dense, packed = (our_reading(file, token_ids, place / file.stem)[0] for file in (published, quantized))
    values, _ = our_reading(write_dequantized(quantized, place / "values.gguf"), token_ids, place / "values")
    kinds = list(types(quantized).values())
    same = "yes" if has_same_tokenizer(published, place / "model") else "NO"
    differences = f"{_largest(dense, expected):.1e} | {_largest(packed, values):.1e}"
    return (
        f"| {name} | {np.abs(expected).max():.1f} | {differences} | {kinds.count('Q8_0')} of {len(kinds)} "
        f"| {_largest(packed, expected):.2g} | {same} |"
    )


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


HEAD = """| Model | largest logit | 16 bits against transformers | Q8_0 against gguf-py's values | tensors in Q8_0 | \
Q8_0 against transformers | tokenizer the same |
|---|---:|---:|---:|---:|---:|---|"""


def main() -> None:
    """Write the golden and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--names", nargs="*", choices=[*MODELS, *OF_VISION], default=[*MODELS, *OF_VISION])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        if arguments.golden:
            write_golden(arguments.golden, Path(place))
        if arguments.table:
            lines = [HEAD]
            for number, name in enumerate(arguments.names):
                (Path(place) / str(number)).mkdir()
                lines.append(compare(name, Path(place) / str(number)))
                print(lines[-1], flush=True)
            arguments.table.write_text("\n".join(lines) + "\n")


#: Whose norms the converter adds 1 to, in the dtype that they have, where float16 has no room for the sum.
_SHIFTED = ("gemma", "qwen3_5_text", "qwen3_5_moe_text")


def _widen(folder: Path) -> None:
    """Make all tensors float32."""
    for file in folder.glob("model*.safetensors"):
        tensors = {name: each.float() for name, each in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})


def write_golden(path: Path, place: Path) -> None:
    """What the converter writes of golden folders."""
    found = {}
    for name, kind in CONVERTED.items():
        folder = converted_checkpoint(name, place / name)
        write_tokenizer(folder)
        if json.loads((folder / "config.json").read_text())["model_type"] in _SHIFTED and kind == "f16":
            _widen(folder)
        found[name] = contents(convert(folder, kind, place / f"{name}.gguf"))
    lines = (f"{json.dumps(name)}:{json.dumps(each, separators=(',', ':'))}" for name, each in found.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    pack(path)


if __name__ == "__main__":
    main()
