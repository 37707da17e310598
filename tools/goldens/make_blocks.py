"""Makes the golden files of `tests/goldens/dflash`: DFlash drafts of the bases in `tests/goldens/draft`, by SpecForge.

    python tools/goldens/make_blocks.py tests/goldens/dflash

Needs torch, transformers and specforge (0.2), whose `DFlashDraftModel` computes what is expected, as its own
generation calls it: over a text's features, with its cache. Each folder is a checkpoint, of random tensors that are
only described; its `expected.safetensors` has a share of the `logits` [2, S-1, V] of the places of two blocks: behind
the first `STARTS[0]` tokens of the base's text, then behind `STARTS[1]`, when the features between have been added. A
causal block is SpecForge's under a mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from golden_folders import VERSIONS, draw_tensors, golden_folder, whole, with_shares, write_folders
from safetensors.torch import load_file, save_file
from specforge.modeling.draft.dflash import DFlashDraftModel
from transformers import DynamicCache, Qwen3Config

STARTS, BLOCK, MASK_TOKEN = (9, 12), 6, 77
HIDDEN, VOCABULARY, DRAFT_VOCABULARY = 32, 80, 48
_BASES = golden_folder("draft")
_DECODER = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    """One draft: the layers of the base whose output it takes, its config.json, and the mask of its block."""

    base: str
    layers: tuple[int, ...]
    config: dict[str, Any] = field(repr=False)
    causal: bool = False
    reduced: bool = False


def published(*layers: int, **own: Any) -> dict[str, Any]:
    """As z-lab and SpecForge write it."""
    part = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(layers), **own}
    return {"architectures": ["DFlashDraftModel"], **_DECODER, "block_size": BLOCK, "dflash_config": part}


VARIATIONS = {
    "dflash": Variation("llama_base", (1, 4), published(1, 4)),
    "jetspec": Variation("qwen3_base", (0, 1, 3), published(0, 1, 3, causal_head=True), causal=True),
    # speculators names the layers entered, and drafts may have fewer tokens than their base.
    "speculators": Variation(
        "qwen3_base",
        (1, 2),
        {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": _DECODER,
        }
        | {"draft_vocab_size": DRAFT_VOCABULARY, "block_size": BLOCK, "mask_token_id": MASK_TOKEN}
        | {"aux_hidden_state_layer_ids": [2, 3], "sample_from_anchor": False, "torch_dtype": "float16"},
        reduced=True,
    ),
}


@torch.no_grad()
def make_draft(name: str, directory: Path) -> None:
    """Write one draft and what SpecForge computes of it."""
    variation, seed = VARIATIONS[name], 700 + list(VARIATIONS).index(name)
    torch.manual_seed(seed)
    config = Qwen3Config(**_DECODER, attn_implementation="eager")
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.block_size, config.num_target_layers = BLOCK, 7
    config.dflash_config = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(variation.layers)}
    draft = DFlashDraftModel(config).eval().float()
    empty = {key: tensor.half().contiguous() for key, tensor in draft.state_dict().items()}
    mapping = {}
    if variation.reduced:
        empty["lm_head.weight"] = torch.zeros(DRAFT_VOCABULARY, HIDDEN, dtype=torch.float16)
        kept = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
        mapping["d2t"] = kept - torch.arange(DRAFT_VOCABULARY)
        mapping["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, kept, True)
    save_file(empty | mapping, directory / "model.safetensors")
    draw_tensors(directory / "model.safetensors", seed, 0.25, lambda key: key not in mapping)
    (directory / "config.json").write_text(json.dumps(variation.config) + "\n")
    with whole(directory) as complete:
        stored = {key: tensor.float() for key, tensor in load_file(complete / "model.safetensors").items()}
    base, states = (load_file(_BASES / variation.base / f"{part}.safetensors") for part in ("model", "expected"))
    embedding = base["model.embed_tokens.weight"].float()
    head = stored.pop("lm_head.weight", base.get("lm_head.weight", embedding).float())
    draft.load_state_dict({key: tensor for key, tensor in stored.items() if key not in mapping})
    logits = block_logits(draft, states, variation, embedding, head)
    metadata = {**VERSIONS, "specforge": version("specforge"), "base": variation.base}
    save_file(with_shares({"logits": logits}), directory / "expected.safetensors", metadata=metadata)
    print(f"{name}: largest logit {logits.abs().max():.2f}, standard deviation {logits.std():.2f}")


def block_logits(
    draft: DFlashDraftModel,
    states: dict[str, torch.Tensor],
    variation: Variation,
    embedding: torch.Tensor,
    head: torch.Tensor,
) -> torch.Tensor:
    """Logits [2, S-1, V] of the places behind the last token, of a block at each of `STARTS`."""
    features = torch.cat([states["entering"][layer] for layer in variation.layers], dim=-1)
    cache, taken, found = DynamicCache(), 0, []
    for start in STARTS:
        tokens = torch.full((BLOCK,), MASK_TOKEN)
        tokens[0] = states["token_ids"][start]
        mask = None
        if variation.causal:
            mask = torch.ones(BLOCK, start + BLOCK, dtype=torch.bool).tril(start)[None, None]
        hidden = draft(
            position_ids=torch.arange(taken, start + BLOCK)[None],
            attention_mask=mask,
            noise_embedding=embedding[tokens][None],
            target_hidden=features[taken:start][None],
            past_key_values=cache,
            use_cache=True,
            is_causal=False,
        )
        cache.crop(-BLOCK)  # SpecForge names what stays, which transformers no longer takes
        taken = start
        found.append(hidden[0, 1:] @ head.T)
    return torch.stack(found)


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_draft, name) for name in VARIATIONS})
