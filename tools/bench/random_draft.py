"""Writes an EAGLE-3 head with random weights for a base of `random_checkpoint.py`, for measuring speed only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

DRAFT_VOCABULARY = 32000
#: Standard deviation of the weights; the head's is larger, so that the draft is as sure of its tokens as a trained one
#: and a tree of 60 nodes has paths of all depths.
SCALE, HEAD_SCALE = 0.02, 0.25


def draft_config(base: dict, draft_vocabulary: int = DRAFT_VOCABULARY) -> dict:
    """The config.json of a head for a base with the `config.json` values `base`, in the published layout."""
    taken = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "torch_dtype",
    )
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocabulary,
        "tie_word_embeddings": False,
        **{key: base[key] for key in taken},
    }


def write_draft(directory: Path, base: dict, draft_vocabulary: int = DRAFT_VOCABULARY, seed: int = 1) -> None:
    """Write config and normally distributed fp16 weights; the draft's tokens are spread evenly over the base's."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(draft_config(base, draft_vocabulary), indent=2))
    hidden, inner = base["hidden_size"], base["intermediate_size"]
    query, key_value = (base[f"num_{name}_heads"] * base["head_dim"] for name in ("attention", "key_value"))
    matrices = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (key_value, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (draft_vocabulary, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    random = np.random.default_rng(seed)
    tensors = {f"{name}.weight": np.ones(hidden, np.float16) for name in norms}
    for name, shape in matrices.items():
        scale = np.float32(HEAD_SCALE if name == "lm_head.weight" else SCALE)
        tensors[name] = (random.standard_normal(shape, np.float32) * scale).astype(np.float16)
    target = np.linspace(0, base["vocab_size"] - 1, draft_vocabulary).astype(np.int64)
    tensors["d2t"] = target - np.arange(draft_vocabulary)
    tensors["t2d"] = np.isin(np.arange(base["vocab_size"]), target)
    save_file(tensors, directory / "model.safetensors")
