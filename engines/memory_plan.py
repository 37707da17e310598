"""How much memory a model takes, computed before any of it is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgellm.engines.decoder_config import DecoderConfig, EngineLimits, WeightSpec
from edgellm.kernels.arrays import ITEM_SIZES

MEBIBYTE = 1 << 20


@dataclass
class MemoryPlan:
    """Named amounts of memory in bytes."""

    items: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Sum of all items in bytes."""
        return sum(self.items.values())

    def describe(self) -> str:
        """One line an item, in MiB, with the total."""
        rows = [*self.items.items(), ("total", self.total)]
        return "\n".join(f"  {name:<28}{size / MEBIBYTE:>10.1f} MiB" for name, size in rows)


def kv_cache_shape(config: DecoderConfig, limits: EngineLimits) -> tuple[int, int, int, int]:
    """Shape of one layer's key cache (or value cache): [B, n_kv, rows, D]."""
    return (limits.max_batch, config.num_kv_heads, limits.kv_rows, config.head_dim)


def plan_memory(
    config: DecoderConfig, limits: EngineLimits, specs: Sequence[WeightSpec], dtype: str, scratch: int = 0
) -> MemoryPlan:
    """Memory of weights, KV caches, step buffers and sampling state; `scratch` is what the engines share, in bytes."""
    item = ITEM_SIZES[dtype]
    weights = sum(math.prod(spec.shape) for spec in specs) * item
    caches = 2 * config.num_layers * math.prod(kv_cache_shape(config, limits)) * item
    tokens = max(limits.max_batch, limits.prefill_chunk)
    step = tokens * ((config.hidden_size + config.rotary_dim) * item + max(limits.key_ranges) + ITEM_SIZES["int32"])
    sampling = limits.max_batch * config.vocab_size * 3 * ITEM_SIZES["float32"]
    rotary = limits.kv_rows * config.rotary_dim * ITEM_SIZES["float32"]
    return MemoryPlan(
        {
            "weights": weights,
            "KV caches": caches,
            "step buffers": step + rotary,
            "logits and sampling": sampling,
            "engine scratch": scratch,
        }
    )
