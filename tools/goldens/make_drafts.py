"""Makes the golden files of `tests/goldens/draft`: tiny bases by transformers, and draft heads by `eagle_reference`.

    python tools/goldens/make_drafts.py tests/goldens/draft

Needs torch and transformers, as `make.py`; random tensors are only described, as there. `BASE/` is a checkpoint with
`expected.safetensors`: `token_ids` [T] int64 and `entering` [N, T, H], the hidden states that enter layers 1..N-1 and,
last, the one after the final norm, as transformers gives them in float32. `HEAD/` is a draft checkpoint with
`expected.safetensors`, for the base that its metadata name: what the head gives for the base's tokens (`prefill`, then
`accept`), and for two levels of a tree (`level1` with tokens, `level2` with tokens and parents), every node run as the
end of its own path.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from eagle_reference import Head
from golden_folders import VERSIONS, draw_tensors, whole, with_shares, write_folders
from safetensors.torch import load_file, save_file

TOKENS, ACCEPTED = 15, 3
HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 32, 80, 48
LEVEL1, LEVEL2 = [11, 4, 70], {"tokens": [9, 33, 2], "parents": [0, 0, 2]}

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
BASES = {
    "llama_base": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"num_hidden_layers": 7}),
    "qwen2_base": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"num_hidden_layers": 2}),
    "qwen3_base": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"num_hidden_layers": 5, "head_dim": 8, "tie_word_embeddings": True},
    ),
}

_LAYER = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@dataclass(frozen=True)
class Variation:
    """One head: `layers` are the layers of the base entered (N: after the final norm), `config` is its config.json."""

    base: str
    generation: str
    layers: tuple[int, ...]
    config: dict[str, Any]
    layer: str = "midlayer."
    prefix: str = ""
    own_embedding: bool = False
    reduced: bool = True
    biases: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    switches: dict[str, bool] = field(default_factory=dict)


_EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], **_LAYER}
_IDS = "eagle_aux_hidden_state_layer_ids"
VARIATIONS = {
    # As SafeAILab publishes it; heads of 8 x 4 = hidden size, since head_dim is not named.
    "eagle1": Variation(
        "llama_base",
        "1",
        (7,),
        {"architectures": ["LlamaForCausalLM"], **_LAYER, "head_dim": None, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "bias": False, "torch_dtype": "float32"},
        layer="layers.0.",
        reduced=False,
    ),
    "eagle2_biases": Variation(
        "qwen2_base",
        "1",
        (2,),
        {"architectures": ["LlamaForCausalLM"], **_LAYER, "qkv_bias": True},
        layer="layers.0.",
        own_embedding=True,
        reduced=False,
        biases=("fc", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
    ),
    "eagle3": Variation("llama_base", "3", (2, 3, 4), {**_EAGLE3, "draft_vocab_size": DRAFT_VOCABULARY}),
    "eagle3_named_layers": Variation(
        "qwen2_base",
        "3",
        (1,),
        {**_EAGLE3, "draft_vocab_size": DRAFT_VOCABULARY, _IDS: [1], "eagle_aux_hidden_state_convention": "entered"},
    ),
    "eagle3_speculators": Variation(
        "qwen3_base",
        "3",
        (1, 2, 4),
        {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": DRAFT_VOCABULARY,
            "norm_before_residual": True,
            "target_hidden_size": None,
            _IDS: [1, 2, 4],
            "transformer_layer_config": {**_LAYER, "model_type": "qwen3"},
        },
        layer="layers.0.",
        own_embedding=True,
        norms=("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"),
        switches={"norm_before_residual": True},
    ),
    "eagle3_norm_before_fc": Variation(
        "qwen3_base",
        "3",
        (1, 3, 4),
        {
            **_EAGLE3,
            "draft_vocab_size": DRAFT_VOCABULARY,
            "norm_before_fc": True,
            "attention_bias": True,
            "mlp_bias": True,
            "bias": True,
            _IDS: [0, 2, 3],
            "eagle_aux_hidden_state_convention": "output",
        },
        biases=(
            "fc",
            *(f"midlayer.self_attn.{name}_proj" for name in "qkvo"),
            *(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")),
        ),
        norms=("input_norm",),
    ),
    "eagle31": Variation(
        "llama_base",
        "3.1",
        (2, 3, 4),
        {**_EAGLE3, "fc_norm": True, "norm_output": True, "eagle_config": {_IDS: [1, 2, 3]}},
        layer="layers.0.",
        prefix="model.",
        reduced=False,
        norms=("fc_norm.0", "fc_norm.1", "fc_norm.2"),
        switches={"feed_back_normed": True},
    ),
}


def make_base(name: str, directory: Path) -> None:
    """Write a base and the hidden states that transformers gives for it."""
    config_class, model_class, settings = BASES[name]
    seed = list(BASES).index(name)
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = model_class(config_class(**{**_BASE, **settings, "rope_parameters": rope}))
    model.to(torch.float16).save_pretrained(directory)
    draw_tensors(directory / "model.safetensors", seed, _BASE["initializer_range"])
    with whole(directory) as complete:
        again = model_class.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager")
    token_ids = torch.randint(0, VOCABULARY, (1, TOKENS))
    with torch.no_grad():
        states = again(token_ids, output_hidden_states=True).hidden_states
    # hidden_states[i] enters layer i, but for the last, which has passed the final norm.
    expected = {"token_ids": token_ids[0], "entering": torch.cat(states[1:]).float().contiguous()}
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)
    print(f"{name}: features up to {expected['entering'].abs().max():.1f}")


def empty_tensors(variation: Variation) -> dict[str, torch.Tensor]:
    """Tensors of a head, without its mapping, as they are stored: names, shapes and the dtype."""
    config = variation.config.get("transformer_layer_config", variation.config)
    size = config["head_dim"] or HIDDEN // config["num_attention_heads"]
    query, kv, inner = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, 40
    is_first, count, layer = variation.generation == "1", len(variation.layers), variation.layer
    width = HIDDEN if is_first else 2 * HIDDEN
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 2 * HIDDEN if is_first else count * HIDDEN),
        f"{layer}self_attn.q_proj.weight": (query, width),
        f"{layer}self_attn.k_proj.weight": (kv, width),
        f"{layer}self_attn.v_proj.weight": (kv, width),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, query),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}mlp.gate_proj.weight": (inner, HIDDEN),
        f"{layer}mlp.up_proj.weight": (inner, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, inner),
    }
    if not is_first:
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "hidden_norm")}
        shapes["norm.weight"] = (HIDDEN,)
    if variation.own_embedding:
        shapes["embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    if variation.reduced:
        shapes["lm_head.weight"] = (DRAFT_VOCABULARY, HIDDEN)
    for name in variation.norms:
        width = {"input_norm": count * HIDDEN}.get(name, size if name.endswith(("q_norm", "k_norm")) else HIDDEN)
        shapes[f"{name}.weight"] = (width,)
    for name in variation.biases:
        shapes[f"{name}.bias"] = shapes[f"{name}.weight"][:1]
    dtype, inside = getattr(torch, config["torch_dtype"]), variation.prefix
    return {
        name if name == "lm_head.weight" else f"{inside}{name}": torch.zeros(shape, dtype=dtype)
        for name, shape in shapes.items()
    }


@torch.no_grad()
def make_head(name: str, directory: Path) -> None:
    """Write one head and what the reference computes of it."""
    variation, bases = VARIATIONS[name], directory.parent
    seed = 100 + list(VARIATIONS).index(name)
    torch.manual_seed(seed)
    with whole(bases / variation.base) as complete:
        base, states = (load_file(complete / f"{part}.safetensors") for part in ("model", "expected"))
    mapping = {}
    if variation.reduced:
        kept = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
        mapping["d2t"] = kept - torch.arange(DRAFT_VOCABULARY)
        mapping["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, kept, True)
    save_file(empty_tensors(variation) | mapping, directory / "model.safetensors")
    draw_tensors(directory / "model.safetensors", seed, 0.25, lambda name: name not in mapping)
    with whole(directory) as complete:
        stored = load_file(complete / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(variation.config, indent=2) + "\n")
    config = variation.config.get("transformer_layer_config", variation.config)
    tensors = {
        name.removeprefix(variation.prefix): tensor.float() for name, tensor in stored.items() if name not in mapping
    }
    embedding = base["model.embed_tokens.weight"].float()
    head = Head(
        tensors,
        variation.layer,
        variation.generation,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"] or HIDDEN // config["num_attention_heads"],
        config["rms_norm_eps"],
        config["rope_theta"],
        tensors.get("embed_tokens.weight", embedding),
        tensors.get("lm_head.weight", base.get("lm_head.weight", embedding).float()),
        **variation.switches,
    )
    expected = expected_values(head, states["token_ids"], states["entering"], variation.layers)
    metadata = {**VERSIONS, "base": variation.base, "layers": json.dumps(variation.layers)}
    save_file(with_shares(expected, "logits|hidden_states"), directory / "expected.safetensors", metadata=metadata)
    logits = expected["prefill_logits"]
    print(f"{name}: largest logit {logits.abs().max():.2f}, standard deviation {logits.std():.2f}")


def expected_values(
    head: Head, token_ids: torch.Tensor, entering: torch.Tensor, layers: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """Entry i pairs the features of token i with token i + 1; a node of level d follows its path of d - 1 nodes."""
    features = torch.cat([entering[layer - 1] for layer in layers], dim=-1)[:-1]
    rows = features if head.generation == "1" else head.fused(features)
    committed = token_ids[1:]
    logits, hidden = head.run(rows, committed)
    split = len(rows) - ACCEPTED
    values = {
        "prefill_logits": logits[:split],
        "prefill_hidden_states": hidden[:split],
        "accept_logits": logits[split:],
        "accept_hidden_states": hidden[split:],
    }

    def follow(path: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden state of the last of the nodes (hidden state taken, token)."""
        taken = torch.cat((rows, torch.stack([state for state, _ in path])))
        tokens = torch.cat((committed, torch.tensor([token for _, token in path])))
        path_logits, path_hidden = head.run(taken, tokens)
        return path_logits[-1], path_hidden[-1]

    first = [follow([(hidden[-1], token)]) for token in LEVEL1]
    second = []
    for token, parent in zip(LEVEL2["tokens"], LEVEL2["parents"], strict=True):
        second.append(follow([(hidden[-1], LEVEL1[parent]), (first[parent][1], token)]))
    for level, nodes in (("level1", first), ("level2", second)):
        values[f"{level}_logits"] = torch.stack([logit for logit, _ in nodes])
        values[f"{level}_hidden_states"] = torch.stack([state for _, state in nodes])
    values |= {
        "level1_tokens": torch.tensor(LEVEL1),
        "level2_tokens": torch.tensor(LEVEL2["tokens"]),
        "level2_parents": torch.tensor(LEVEL2["parents"]),
    }
    return {name: value.contiguous() for name, value in values.items()}


if __name__ == "__main__":
    bases = {name: partial(make_base, name) for name in BASES}
    write_folders(__doc__, bases | {name: partial(make_head, name) for name in VARIATIONS})
