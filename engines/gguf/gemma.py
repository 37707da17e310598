"""What metadata of Gemma 2, 3 and 4 says, as their published `config.json` does."""

from __future__ import annotations

from typing import Any

from edgellm.engines.gguf.metadata import Metadata, attends

_Config = dict[str, Any]


def _wide(dtype: str) -> str:
    """Values go beyond float16."""
    return "bfloat16" if dtype == "float16" else dtype


def gemma_config(config: _Config, most_layers: int) -> _Config:
    """Gemma 2's and 3's: the largest model, of so many layers, scales attention by hidden size and heads, the others by
    the size of a head."""
    layers, heads, hidden = (config[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    return {
        "query_pre_attn_scalar": hidden / heads if layers == most_layers and heads and hidden else config["head_dim"],
        "dtype": _wide(config["dtype"]),
    }


def gemma3_config(metadata: Metadata, config: _Config) -> _Config:
    """Gemma 3's, whose layers without a window have a rotary embedding of their own."""
    layers = config["num_hidden_layers"]
    window, pattern = metadata.whole("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    if not window:
        window, pattern = None, [False] * layers
    rope = config["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa") or 10000.0}
    return gemma_config(config, 62) | {
        "sliding_window": window,
        "layer_types": [attends(not each, "sliding") for each in pattern] if isinstance(pattern, list) else None,
        "sliding_window_pattern": None if isinstance(pattern, list) else pattern,
        "rope_parameters": {
            "full_attention": rope if "rope_type" in rope else rope | {"rope_type": "default"},
            "sliding_attention": local,
        },
    }


def gemma4_config(metadata: Metadata, config: _Config) -> _Config:
    """Gemma 4's: sizes of heads, and their counts, are those of layers that attend to all; layers with a window have
    their own. The last layers, which attend to rows of earlier ones, may have MLPs twice as wide."""
    layers, shared = config["num_hidden_layers"], metadata.count("attention.shared_kv_layers", 0)
    kinds, size = metadata.layer_types() or [], metadata.count("attention.key_length_swa")
    if not kinds or len(kinds) != layers:
        raise metadata.error("attention.sliding_window_pattern", kinds, f"true or false for each of {layers} layers")
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.count(key, size) != size:
            raise metadata.error(key, metadata.get(key), f"'attention.key_length_swa', {size}")
    widths = metadata.of_layers("feed_forward_length")
    width, last, wide = widths[0], widths[-1], min(shared, layers)
    if len(widths) > 1 and (last not in (width, 2 * width) or widths != [width] * (layers - wide) + [last] * wide):
        raise metadata.error("feed_forward_length", widths, f"one, or twice that in each of the last {shared} layers")
    counts = metadata.of_layers("attention.head_count_kv")
    heads = dict(zip(kinds, counts if len(counts) == layers else counts * layers, strict=True))
    full = [layer for layer, kind in enumerate(kinds) if kind == attends(True, "")]
    own = {"head_dim": config["head_dim"], "num_key_value_heads": heads.get(attends(True, ""))}
    values = (metadata.has(f"blk.{layer}.attn_v.weight") for layer in full if layer < layers - shared)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa") or 10000.0}
    table = metadata.tensors.get("per_layer_token_embd.weight")
    return {
        "dtype": _wide(config["dtype"]),
        "head_dim": size,
        "num_key_value_heads": heads.get(attends(False, "sliding"), own["num_key_value_heads"]),
        "per_layer_config": {str(layer): own for layer in full},
        "attention_k_eq_v": not all(values),
        "layer_types": kinds,
        "sliding_window": metadata.whole("attention.sliding_window") or None,
        "num_kv_shared_layers": shared,
        "intermediate_size": width,
        "use_double_wide_mlp": last > width,
        "hidden_size_per_layer_input": metadata.count("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else config["vocab_size"],
        "enable_moe_block": metadata.count("expert_count", 0) > 0,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }
