"""Makes the adapters of `tests/goldens/lora` with PEFT, and what PEFT computes with them.

    python tools/goldens/make_adapters.py tests/goldens/lora

Needs torch, transformers and peft. Each folder is an adapter as `save_pretrained` writes it, its random matrices only
described (`tests/helpers/golden_files.py`), for the model whose name precedes the dot, and `expected.safetensors`: the
float32 logits that PEFT computes in float32 for the inputs of that model's own `expected.safetensors`, from the
adapter's files read again. For a model of `tests/goldens/decoder` these are the `logits` [2, T, V] of the `token_ids`,
for one of `tests/goldens/image_prompts` those [1 + n, V] after the prompt with images and of the tokens `continued`
after it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from golden_folders import VERSIONS, draw_tensors, golden_folder, whole, with_shares, write_folders
from make_image_prompts import IMAGE
from safetensors.torch import load_file, save_file

_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Settings of each adapter, and the dtype that it is stored in.
ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "llama_untied.all_linear": ({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}, "float32"),
    "llama_untied.attention": ({"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"]}, "float16"),
    "llama_untied.rank_stabilized": (
        {"r": 9, "lora_alpha": 4, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "down_proj"]},
        "float32",
    ),
    "llama_biases_head_dim_10.all": ({"r": 2, "lora_alpha": 6, "target_modules": _ALL}, "bfloat16"),
    "qwen2.patterns": (
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": _ALL,
            "rank_pattern": {"down_proj": 2, r"layers\.0\.self_attn\.(q|k)_proj": 6, "q_proj": 5},
            "alpha_pattern": {r"layers\.1\..*": 10, "model.layers.0.mlp.up_proj": 1.5},
        },
        "float32",
    ),
    "qwen3.one_layer": (
        {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
        "float16",
    ),
    "qwen3.pattern_of_targets": (
        {"r": 1, "lora_alpha": 2, "target_modules": r".*\.(mlp\..*|self_attn\.k)_proj", "exclude_modules": ["up_proj"]},
        "bfloat16",
    ),
    "qwen3_biases_bfloat16.all": ({"r": 8, "lora_alpha": 8, "target_modules": _ALL}, "bfloat16"),
}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LANGUAGE = "model.language_model.layers"
#: The same for models that take images. Regular expressions are as training programs write them.
IMAGE_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2_5_vl.alphas": (
        {
            "r": 4,
            "lora_alpha": 4,
            "target_modules": _ATTENTION,
            "alpha_pattern": {f"{_LANGUAGE}.{layer}.self_attn.{name}": 14 for layer in (0, 2) for name in _ATTENTION},
        },
        "float32",
    ),
    "qwen2_5_vl.pattern_of_targets": (
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": rf"^(model\.language_model(?=\.).*\.({'|'.join(_ALL)}))$",
            "rank_pattern": {f"{_LANGUAGE}.1.mlp.up_proj": 7, f"{_LANGUAGE}.0.self_attn.k_proj": 2},
        },
        "bfloat16",
    ),
    "qwen2_5_vl_old.first_names": (
        {
            "r": 3,
            "lora_alpha": 3,
            "target_modules": rf"^(model(?=\.).*\.({'|'.join(_ALL)}))$",
            "alpha_pattern": {"model.layers.1.mlp.down_proj": 6, r"model\.layers\.2\..*": 4},
        },
        "float16",
    ),
    "qwen3_vl.full_names": (
        {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": [
                f"{_LANGUAGE}.{layer}.{name}" for layer in (0, 2) for name in ("self_attn.q_proj", "mlp.up_proj")
            ],
            "rank_pattern": {f"{_LANGUAGE}.2.mlp.up_proj": 1},
            "alpha_pattern": {f"{_LANGUAGE}.0.self_attn.q_proj": 2},
        },
        "float16",
    ),
    "qwen3_vl.all_but_vision": (
        {"r": 2, "lora_alpha": 4, "target_modules": "all-linear", "exclude_modules": r"model\.visual\..*"},
        "bfloat16",
    ),
    "qwen3_vl.parts_of_names": (
        {
            "r": 2,
            "lora_alpha": 6,
            "target_modules": r".*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj|gate_proj).*?"
            r"|\bmodel\.layers\.\d{1,}\.(?:self_attn|mlp)\.(?:q_proj|v_proj|gate_proj)",
        },
        "float16",
    ),
    "llava_qwen3.all_but_vision": (
        {
            "r": 3,
            "lora_alpha": 6,
            "target_modules": _ALL,
            "exclude_modules": r"model\.vision_tower\..*",
            "rank_pattern": {f"{_LANGUAGE}.0.self_attn.q_proj": 5},
            "alpha_pattern": {f"{_LANGUAGE}.1.mlp.gate_proj": 15},
        },
        "float16",
    ),
    "llava_qwen3.one_layer": (
        {"r": 4, "lora_alpha": 16, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
        "float16",
    ),
    "llava_llama_old.first_names": (
        {
            "r": 2,
            "lora_alpha": 2,
            "target_modules": rf"^(language_model(?=\.).*\.({'|'.join(_ALL)}))$",
            "rank_pattern": {"language_model.model.layers.2.mlp.down_proj": 4},
            "alpha_pattern": {f"language_model.model.layers.{layer}.self_attn.q_proj": 10 for layer in range(3)},
        },
        "float16",
    ),
    "llava_mistral.all_but_vision": (
        {"r": 2, "lora_alpha": 5, "target_modules": _ALL, "exclude_modules": r"model\.vision_tower\..*"},
        "float32",
    ),
    "qwen3_5.recurrent": (
        {
            "r": 2,
            "lora_alpha": 4,
            "target_modules": rf"{_LANGUAGE}\.\d+\.(linear_attn\.(in_proj_qkv|out_proj)|mlp\.up_proj)",
        },
        "float16",
    ),
    "gemma3_window_6.all": (
        {"r": 2, "lora_alpha": 4, "target_modules": rf"{_LANGUAGE}.*\.({'|'.join(_ALL)})"},
        "float16",
    ),
    "gemma3_window_24.attention": (
        {"r": 2, "lora_alpha": 6, "target_modules": rf"{_LANGUAGE}.*\.(q_proj|v_proj)"},
        "float16",
    ),
}
#: Of the families whose projections, scales or layers differ from Llama's.
VARIED_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "phi3.fused": (
        {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": ["qkv_proj", "gate_up_proj"],
            "rank_pattern": {r"layers\.1\.mlp\.gate_up_proj": 7},
        },
        "float32",
    ),
    "phi3_partial_tied.all_linear": ({"r": 3, "lora_alpha": 6, "target_modules": "all-linear"}, "float16"),
    "granite_tied.all": ({"r": 4, "lora_alpha": 12, "target_modules": _ALL}, "bfloat16"),
    "smollm3_list_tied.attention": ({"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}, "float16"),
    "olmo2.all": ({"r": 3, "lora_alpha": 6, "target_modules": _ALL}, "float16"),
    "lfm2.all_linear": ({"r": 2, "lora_alpha": 6, "target_modules": "all-linear"}, "float16"),
    "qwen3_5_text_narrow.all_linear": ({"r": 2, "lora_alpha": 3, "target_modules": "all-linear"}, "float16"),
    "starcoder2.mlp": ({"r": 2, "lora_alpha": 6, "target_modules": ["v_proj", "c_fc", "c_proj"]}, "float16"),
    "granite4.other_names": (
        {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "input_linear", "output_linear"]},
        "float16",
    ),
    "nemotron_h.mixers": (  # PEFT leaves out what a layer of Mamba-2 puts out
        {"r": 2, "lora_alpha": 5, "target_modules": ["in_proj", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
        "float16",
    ),
}


class _FirstNames(torch.nn.Module):
    """A model's own modules, below the names that they had in the first releases of its family."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        inner = model.model
        if hasattr(inner, "visual"):
            self.visual, self.model, self.lm_head = inner.visual, inner.language_model, model.lm_head
        else:
            self.vision_tower, self.multi_modal_projector = inner.vision_tower, inner.multi_modal_projector
            self.language_model = torch.nn.Module()
            self.language_model.model, self.language_model.lm_head = inner.language_model, model.lm_head


def make_adapter(name: str, directory: Path) -> None:
    """Write one adapter with random matrices and what PEFT computes with it."""
    kinds = ADAPTERS | IMAGE_ADAPTERS | VARIED_ADAPTERS
    settings, dtype = kinds[name]
    _, named = _base_model(name)
    task = {"task_type": "CAUSAL_LM"} if name not in IMAGE_ADAPTERS else {}
    adapted = peft.get_peft_model(named, peft.LoraConfig(**task, **settings))
    published = {
        key: value.to(getattr(torch, dtype)).contiguous()
        for key, value in peft.get_peft_model_state_dict(adapted).items()
    }
    adapted.save_pretrained(directory)
    save_file(published, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    draw_tensors(directory / "adapter_model.safetensors", list(kinds).index(name), 0.3)  # B, too, which starts at 0
    _tidy(directory)
    model, named = _base_model(name)
    compute = _image_logits if name in IMAGE_ADAPTERS else _text_logits
    without = compute(name, model)
    with whole(directory) as complete:
        again = peft.PeftModel.from_pretrained(named, complete, autocast_adapter_dtype=True).eval()
        drawn = load_file(complete / "adapter_model.safetensors")
    found = peft.get_peft_model_state_dict(again)
    if any(not torch.equal(found[key].to(value.dtype), value) for key, value in drawn.items()):
        raise RuntimeError(f"{name}: PEFT did not read what it wrote")
    expected = compute(name, model)
    metadata = {**VERSIONS, "peft": peft.__version__}
    save_file(with_shares(expected), directory / "expected.safetensors", metadata=metadata)
    changed = (expected["logits"] - without["logits"]).abs()
    print(f"{name}: logits changed by {changed.mean():.3f} on average, {changed.max():.2f} at most")


def _base(name: str) -> Path:
    return golden_folder("image_prompts" if name in IMAGE_ADAPTERS else "decoder") / name.split(".", 1)[0]


def _base_model(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model that computes, and the one of the same modules whose names PEFT sees."""
    kind = transformers.AutoModelForImageTextToText if name in IMAGE_ADAPTERS else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(_base(name), dtype=torch.float32, attn_implementation="eager").eval()
    return model, _FirstNames(model) if name.endswith(".first_names") else model


@torch.no_grad()
def _text_logits(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    token_ids = load_file(_base(name) / "expected.safetensors")["token_ids"]
    return {"logits": model(token_ids).logits.float()}


@torch.no_grad()
def _image_logits(name: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    inputs = load_file(_base(name) / "expected.safetensors")
    token_ids = torch.cat((inputs["token_ids"], inputs["continued"]))[None]
    pixels = {"pixel_values": inputs["pixel_values"]}
    if "positions" in inputs:
        pixels |= {"image_grid_thw": inputs["grids"], "mm_token_type_ids": (token_ids == IMAGE).int()}
    elif "greedy" in inputs:  # images that see themselves
        pixels |= {"token_type_ids": (token_ids == IMAGE).int()}
    return {"logits": model(input_ids=token_ids, **pixels).logits[0, len(inputs["token_ids"]) - 1 :].float()}


def _tidy(directory: Path) -> None:
    """Leave the files that make the adapter, without the path and the class of the base."""
    (directory / "README.md").unlink(missing_ok=True)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = config["auto_mapping"] = None
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_adapter, name) for name in ADAPTERS | IMAGE_ADAPTERS | VARIED_ADAPTERS})
