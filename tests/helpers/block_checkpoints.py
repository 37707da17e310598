"""Tiny DFlash drafts: random ones, and some that agree with their base on the token behind the last one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

BLOCK, MASK_TOKEN, LAYERS = 6, 318, 2
_INNER = 128


def write_block_draft(directory: Path, base: Path, agreeing: bool = True, seed: int = 5, **changes: Any) -> Path:
    """A draft of a base whose next token depends on its current one; `changes` are those of config.json.

    What an `agreeing` one says of every place is what follows the last token: its attention, which looks at all rows
    alike, passes that token's embedding on, as features give it nothing and mask tokens are projected out.
    """
    random = np.random.default_rng(seed)
    config = json.loads((base / "config.json").read_text())
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    size = config.get("head_dim") or hidden // heads

    def matrix(rows: int, columns: int, scale: float = 0.2) -> np.ndarray:
        return random.standard_normal((rows, columns)) * scale

    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        "hidden_norm.weight": np.ones(hidden),
        "norm.weight": np.ones(hidden),
    }
    for layer in range(LAYERS):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        tensors |= {
            f"layers.{layer}.input_layernorm.weight": np.ones(hidden),
            f"layers.{layer}.post_attention_layernorm.weight": np.ones(hidden),
            f"{attention}q_proj.weight": matrix(heads * size, hidden),
            f"{attention}k_proj.weight": matrix(kv_heads * size, hidden),
            f"{attention}v_proj.weight": matrix(kv_heads * size, hidden),
            f"{attention}o_proj.weight": matrix(hidden, heads * size),
            f"{attention}q_norm.weight": random.uniform(0.5, 1.5, size),
            f"{attention}k_norm.weight": random.uniform(0.5, 1.5, size),
            f"{mlp}gate_proj.weight": matrix(_INNER, hidden),
            f"{mlp}up_proj.weight": matrix(_INNER, hidden),
            f"{mlp}down_proj.weight": matrix(hidden, _INNER),
        }
        if agreeing:
            tensors[f"{attention}q_proj.weight"] *= 0
            tensors[f"{mlp}down_proj.weight"] *= 0.01
            tensors[f"{attention}o_proj.weight"] *= 0.01
    if agreeing:
        assert heads == kv_heads and heads * size == hidden
        mask = load_file(base / "model.safetensors")["model.embed_tokens.weight"][MASK_TOKEN].astype(np.float32)
        tensors["layers.0.self_attn.v_proj.weight"] = np.eye(hidden) - np.outer(mask, mask) / (mask @ mask)
        tensors["layers.0.self_attn.o_proj.weight"] = 1000 * np.eye(hidden)
        tensors["fc.weight"] *= 0
    own = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "intermediate_size": _INNER,
        "head_dim": size,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 1]},
    }
    kept = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    shared = {key: config[key] for key in (*kept, "rms_norm_eps", "rope_theta", "hidden_act") if key in config}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shared | own | {"torch_dtype": "float16"} | changes))
    halves = {name: values.astype(np.float16) for name, values in tensors.items()}
    save_file(halves, directory / "model.safetensors")
    return directory
