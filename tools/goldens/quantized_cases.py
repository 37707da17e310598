"""What a golden model of packed weights is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    `beside_config` names another file than `config.json` that says it.
    """

    quantization: dict[str, Any]
    pack: Callable[[str, torch.nn.Linear], Packed | None]
    family: str = "llama"
    dtype: str = "float16"
    inner: int = 96
    beside_config: str | None = None


def shuffled_groups(columns: int, group: int) -> torch.Tensor:
    """The group of each column, int32, none where it would be in order."""
    return (torch.arange(columns) // group)[torch.randperm(columns)].to(torch.int32)
