"""LoRA (Hu et al. 2021) for the network in PyTorch, and its export in PEFT's layout."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tools.demo_model.model import Model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """A frozen linear layer and the trained product of two matrices, which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features, device=base.weight.device) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def add_adapter(model: Model, rank: int, alpha: float) -> dict[str, LoraLinear]:
    """Freeze the model and wrap every linear layer of its layers, in place; the wrapped ones by their names."""
    model.requires_grad_(False)
    adapted = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in TARGETS:
            parent, _, child = name.rpartition(".")
            adapted[name] = LoraLinear(module, rank, alpha)
            setattr(model.get_submodule(parent), child, adapted[name])
    return adapted


def export_adapter(adapted: dict[str, LoraLinear], directory: Path, rank: int, alpha: float) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` (fp16) as PEFT does."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in adapted.items():
        for kind, values in (("A", layer.a), ("B", layer.b)):
            stored = values.detach().half().cpu().contiguous()
            tensors[f"base_model.model.{name}.lora_{kind}.weight"] = stored
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": list(TARGETS),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
