"""Makes the adapters of `tests/goldens/lora` with PEFT, and what PEFT computes with them.

    python tools/goldens/make_adapters.py tests/goldens/lora

Needs torch, transformers and peft. Each folder is an adapter as `save_pretrained` writes it, for the model of
`tests/goldens/decoder` whose name precedes the dot, and `expected.safetensors`: the float32 `logits` [2, T, V] that
PEFT computes in float32 for the `token_ids` of that model's own `expected.safetensors`, from the adapter's files read
again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from golden_folders import VERSIONS, write_folders
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
_BASES = Path(__file__).parents[2] / "tests" / "goldens" / "decoder"


def make_adapter(name: str, directory: Path) -> None:
    """Write one adapter with random matrices and what PEFT computes with it."""
    settings, dtype = ADAPTERS[name]
    base = _BASES / name.split(".", 1)[0]
    torch.manual_seed(list(ADAPTERS).index(name))
    model = peft.get_peft_model(_base_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():  # B starts at 0, where mistakes would not show
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(std=0.3)
    stored = {
        key: value.to(getattr(torch, dtype)).contiguous()
        for key, value in peft.get_peft_model_state_dict(model).items()
    }
    model.save_pretrained(directory)
    save_file(stored, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    _tidy(directory)
    token_ids = load_file(base / "expected.safetensors")["token_ids"]
    again = peft.PeftModel.from_pretrained(_base_model(base), directory, autocast_adapter_dtype=True).eval()
    with torch.no_grad():
        logits = again(token_ids).logits.float().contiguous()
        without = again.unload()(token_ids).logits
    save_file({"logits": logits}, directory / "expected.safetensors", metadata={**VERSIONS, "peft": peft.__version__})
    changed = (logits - without).abs()
    print(f"{name}: logits changed by {changed.mean():.3f} on average, {changed.max():.2f} at most")


def _base_model(base: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")


def _tidy(directory: Path) -> None:
    """Leave the files that make the adapter, without the path of the base."""
    (directory / "README.md").unlink(missing_ok=True)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_folders(__doc__, {name: partial(make_adapter, name) for name in ADAPTERS})
