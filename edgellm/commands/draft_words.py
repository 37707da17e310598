"""A draft head in words, for `edgellm build` and `edgellm info`."""

from __future__ import annotations

from typing import Any


def draft_in_words(config: dict[str, Any]) -> str:
    """Kind, dimensions and features of a `DraftConfig` as a dictionary."""
    layer, kind = config["decoder"], f"EAGLE-{config['generation']}"
    if config["generation"] == "1":  # one kind of head: they differ in the tree
        kind, features = "EAGLE-1/2", "the last hidden state"
    else:
        features = f"the hidden states entering layers {', '.join(map(str, config['feature_layers']))}"
    shared = [name for name in ("embedding", "head") if not config[f"has_{name}"]]
    return (
        f"{kind}, {layer['num_heads']} query and {layer['num_kv_heads']} key-value heads of {layer['head_dim']}, "
        f"FFN {layer['intermediate_size']}, {config['draft_vocab_size']:,} tokens, takes {features}"
        + (f", shares the base's {' and '.join(shared)}" if shared else "")
    )


def draft_limits_in_words(limits: dict[str, Any]) -> str:
    """The largest tree of an `EngineLimits` as a dictionary."""
    return (
        f"trees up to {limits['draft_top_k']} wide and {limits['draft_steps']} deep, up to "
        f"{limits['verify_tree_size']} nodes verified"
    )
