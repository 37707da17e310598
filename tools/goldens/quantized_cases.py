"""What a golden model of packed weights is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Packed:
    """The tensors of a packed layer by the endings of their names, and its `weight` as the package dequantizes it."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor
    input_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Case:
    """A model of one `family`: what its configuration says, and what becomes of a linear layer (None: it stays dense).

    `beside_config` names another file than `config.json` that says it; `settings` are the model's beside the common
    ones.
    """

    quantization: dict[str, Any]
    pack: Callable[[str, torch.nn.Linear], Packed | None]
    family: str = "llama"
    dtype: str = "float16"
    inner: int = 96
    beside_config: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


#: Of a tiny Qwen3.5: a layer of the gated delta rule whose gates b and a are dense, and one of gated attention.
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # Rounding is less magnified where values are near zero.
    "rms_norm_eps": 1e-3,
    "initializer_range": 0.13,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def shuffled_groups(columns: int, group: int) -> torch.Tensor:
    """The group of each column, int32, none where it would be in order."""
    return (torch.arange(columns) // group)[torch.randperm(columns)].to(torch.int32)
