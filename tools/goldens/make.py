"""Makes the golden files of `tests/goldens/decoder` with transformers, which is the reference of every model family.

    python tools/goldens/make.py tests/goldens/decoder

Needs torch and transformers (any release with `rope_parameters`, 5.0 or later). Each folder is a checkpoint as
`save_pretrained` writes it, its random weights only described (`tests/helpers/golden_files.py`), and
`expected.safetensors`: `token_ids` [2, T] int64 and the float32 `logits` [2, T, V] that transformers computes in
float32 after it has read the checkpoint again, and of some the tokens `generated` [1, N] int64 behind the first ones of
the first sequence, the likeliest each.
`rotary.safetensors` holds, for each case of `rotary.json`, the frequencies and a few rows of cosines and sines.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, pack, whole, with_shares, write_folders
from rotary_cases import ROTARY_CASES
from safetensors.torch import save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from variations import PROMPT_LENGTH, VARIATIONS, VOCABULARY

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "ministral3": (transformers.Ministral3Config, transformers.Ministral3ForCausalLM),
    "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
    "exaone4": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM),
    "ernie4_5": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, transformers.HunYuanDenseV1ForCausalLM),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "nemotron_h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM),
    "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
    "cwm": (transformers.CwmConfig, transformers.CwmForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "mistral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration),
    "starcoder2": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4_unified_text": (transformers.Gemma4UnifiedTextConfig, transformers.Gemma4UnifiedForCausalLM),
    "lfm2": (transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
}
_ROTARY_HEAD_DIM = 32


def make_model(name: str, directory: Path) -> None:
    """Write one checkpoint and what transformers computes from it."""
    variation = VARIATIONS[name]
    config_class, model_class = _CLASSES[variation.family]
    seed = list(VARIATIONS).index(name) if variation.seed is None else variation.seed
    torch.manual_seed(seed)
    model = model_class(config_class(**variation.config)).to(getattr(torch, variation.dtype))
    model.save_pretrained(directory, **({"max_shard_size": "20KB"} if variation.shards else {}))
    if variation.layout == "old":
        rewrite_as_old_layout(directory / "config.json")
    for number, path in enumerate(sorted(directory.glob("model*.safetensors"))):
        draw_tensors(path, 100 * seed + number, variation.deviation)
    token_ids = torch.randint(0, VOCABULARY, (2, variation.length))
    with whole(directory) as complete:
        again = model_class.from_pretrained(complete, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = again(token_ids).logits
    expected = with_shares({"token_ids": token_ids, "logits": logits})
    if variation.generated:
        expected["generated"] = generate(again, token_ids[:1, :PROMPT_LENGTH], variation.generated)
    save_file(expected, directory / "expected.safetensors", metadata=VERSIONS)
    if variation.layout == "minicpm":
        rewrite_as_minicpm(directory / "config.json")
    print(f"{name}: largest logit {logits.abs().max():.2f}, standard deviation {logits.std():.2f}")


def generate(model: Any, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` tokens [1, count] behind a text [1, T], each the likeliest, by steps of one token; no near ties."""
    chosen, cache, gap = [], None, float("inf")
    with torch.no_grad():
        for _ in range(count):
            output = model(token_ids, past_key_values=cache, use_cache=True)
            best = output.logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            token_ids, cache = best.indices[None, :1], output.past_key_values
            chosen.append(token_ids)
    if gap < 1e-3:
        raise SystemExit(f"two tokens are as good as equally likely ({gap:.2g}): take another seed")
    return torch.cat(chosen, dim=1)


def rewrite_as_old_layout(path: Path) -> None:
    """`rope_parameters` and `dtype` as transformers 4 wrote them, and Gemma 3's layers."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, types = rope["full_attention"], config.pop("layer_types")
        config["sliding_window_pattern"] = types.index("full_attention") + 1
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    share = rope.pop("partial_rotary_factor", 1.0)
    if share != 1:
        config["partial_rotary_factor"] = share
    # Llama 3 and Gemma 3 were published with the new name of the key, everything before it with the old one.
    key = "rope_type" if kind == "llama3" or "rope_local_base_freq" in config else "type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "lfm2":
        del config["layer_types"]
        config["block_ff_dim"] = config.pop("intermediate_size")
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    config["transformers_version"] = "4.41.0"
    path.write_text(json.dumps(config, indent=2) + "\n")


def rewrite_as_minicpm(path: Path) -> None:
    """Granite's configuration with MiniCPM's names, and scales as its class has them, which transformers has not."""
    config = json.loads(path.read_text())
    del config["attention_multiplier"]  # MiniCPM's is that of most: the size of a head ** -0.5
    config["scale_emb"] = config.pop("embedding_multiplier")
    config["scale_depth"] = round(config.pop("residual_multiplier") * config["num_hidden_layers"] ** 0.5, 6)
    config["dim_model_base"] = config["hidden_size"] / config.pop("logits_scaling")
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = rope.pop("rope_theta"), rope
    config |= {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_rotary(directory: Path) -> None:
    """Frequencies and rows of the tables of all cases."""
    tensors: dict[str, torch.Tensor] = {}
    cases: dict[str, Any] = {}
    for name, (positions, rope, length) in ROTARY_CASES.items():
        config = transformers.LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            head_dim=_ROTARY_HEAD_DIM,
            max_position_embeddings=positions,
            rope_parameters=dict(rope),
        )
        if rope["rope_type"] == "default":
            compute = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters
        else:
            compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
        frequencies, attention_factor = compute(config, device="cpu", seq_len=length)
        rows = torch.tensor([0, 1, 2, 3, 17, 255, 1023, length - 1])
        angles = rows[:, None].float() * frequencies
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor
        tensors |= {f"{name}.frequencies": frequencies.contiguous(), f"{name}.rows": rows, f"{name}.table": table}
        cases[name] = {
            "max_position_embeddings": positions,
            "rope_parameters": rope,
            "length": length,
            "attention_factor": float(attention_factor),
        }
    save_file(tensors, directory / "rotary.safetensors", metadata=VERSIONS)
    pack(directory / "rotary.safetensors")
    written = {"head_dim": _ROTARY_HEAD_DIM, "versions": VERSIONS, "cases": cases}
    (directory / "rotary.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_model, name) for name in VARIATIONS}, make_rotary)
