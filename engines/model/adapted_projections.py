"""The linear layers that LoRA adapters change, as the engines' inputs have them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineLimits
from edgellm.kernels.arrays import ITEM_SIZES

#: The input [B, S] that says how much of each of S adapters each of B sequences takes.
SCALES = "lora_scales"

_PROJECTION = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp|conv|linear_attn|mamba)\.\w+_proj)\.weight")


class LowRankUpdate(Protocol):
    """What an adapter adds to one linear layer: b @ a, of rank r."""

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """a [r, K] and b [N, r] float32, the adapter's scale multiplied into b."""


@dataclass(frozen=True)
class AdaptedProjection:
    """A linear layer of the engines [N, K] (`name`), and the layers of the checkpoint that are fused in it.

    `modules` are their names as published and their rows; they add up to N = `outputs`. K is `inputs`.
    """

    name: str
    inputs: int
    modules: tuple[tuple[str, int], ...]

    @property
    def outputs(self) -> int:
        """N."""
        return sum(rows for _, rows in self.modules)

    def edge(self, slots: int, rank: int) -> tuple[tuple[str, tuple[int, int]], tuple[str, tuple[int, int]]]:
        """Name and shape of the two engine inputs, A [S * P, K] and B [S * P, N], with P = rank * fused layers."""
        rows = slots * rank * len(self.modules)
        return (f"{self.name}.lora_a", (rows, self.inputs)), (f"{self.name}.lora_b", (rows, self.outputs))

    def pack(self, updates: Mapping[str, LowRankUpdate], rank: int) -> tuple[np.ndarray, np.ndarray]:
        """One adapter's rows of the two inputs, [P, K] and [P, N] float32; zeros where it changes nothing.

        `updates` has what it adds by module.
        """
        rows = rank * len(self.modules)
        a, b = np.zeros((rows, self.inputs), np.float32), np.zeros((rows, self.outputs), np.float32)
        row = column = 0
        for module, size in self.modules:
            if module in updates:
                low, high = updates[module].matrices()
                a[row : row + len(low)] = low
                b[row : row + len(low), column : column + size] = high.T
            row, column = row + rank, column + size
        return a, b


def adapted_projections(specs: Sequence[WeightSpec]) -> list[AdaptedProjection]:
    """Those among a decoder's weights that adapters can change: every linear layer but the embedding and the head."""
    found = []
    for spec in specs:
        if match := _PROJECTION.fullmatch(spec.name):
            modules = tuple((name.removesuffix(".weight"), shape[0]) for name, shape in spec.parts)
            found.append(AdaptedProjection(match[1], spec.shape[1], modules))
    return found


def adapter_bytes(projections: Iterable[AdaptedProjection], limits: EngineLimits, dtype: str) -> int:
    """Device memory of all adapter slots, in bytes."""
    edges = (edge for each in projections for edge in each.edge(limits.lora_slots, limits.lora_rank))
    return sum(math.prod(shape) for _, shape in edges) * ITEM_SIZES[dtype]
