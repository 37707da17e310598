"""Sequences with committed rows and new tokens, for the attention of prefill steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows


@dataclass(frozen=True)
class Case:
    """Sequences of `starts` committed rows, each with so many new `tokens`."""

    starts: tuple[int, ...]
    tokens: int
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    rotary: int = 16
    rows: int = 700
    norm: bool = False
    offset: float = 0.0
    epsilon: float = 1e-5
    largest: float = 1.0

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.size**-0.5

    def arrays(self) -> dict[str, np.ndarray]:
        """The arguments in float32; rows behind the committed ones are not numbers."""
        random = np.random.default_rng(self.tokens + sum(self.starts))
        batch, width = len(self.starts), (self.heads + 2 * self.kv_heads) * self.size
        arrays = {
            "qkv": random.standard_normal((batch, self.tokens, width), np.float32) * np.float32(self.largest),
            "start": np.array(self.starts, np.int32),
            "queries": np.full((batch, self.tokens, self.heads * self.size), np.nan, np.float32),
            "context": np.full((batch, self.tokens, self.heads * self.size), np.nan, np.float32),
        }
        if self.rotary:
            angles = random.uniform(0, 6, (batch, self.tokens, self.rotary // 2))
            arrays["rotary"] = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32)
        for name in ("q_norm", "k_norm"):
            if self.norm:
                arrays[name] = random.uniform(0.5, 1.5, self.size).astype(np.float32)
        for name in ("k_cache", "v_cache"):
            arrays[name] = random.standard_normal((batch, self.kv_heads, self.rows, self.size), np.float32)
            for b, start in enumerate(self.starts):
                arrays[name][b, :, start:] = np.nan
        return arrays

    def run(self, kernels: Any, arrays: dict[str, Any], **tiling: int) -> None:
        """Both kernels on arrays of either kind; `tiling` is another than the fastest of the device."""
        norms = None
        if self.norm:
            norms = HeadNorms(arrays["q_norm"], arrays["k_norm"], self.epsilon, self.offset)
        rows = KeyValueRows(arrays["k_cache"], arrays["v_cache"], arrays["start"])
        queries = arrays["queries"]
        kernels.prepare_heads(arrays["qkv"], norms, arrays.get("rotary"), rows, None, None, queries)()
        kernels.causal_attention(queries, rows, self.scale, arrays["context"], **tiling)()


CASES = {
    "one_token": Case((0,), 1),
    "first_rows": Case((0,), 16, 1, 1),
    "a_row_behind_a_tile": Case((64,), 65, 4, 4, rotary=64),
    "uneven": Case((37,), 150),
    "sequences": Case((0, 63, 64, 300), 33, norm=True),
    "blocks": Case((190,), 300, 2, 1, rotary=64),
    "narrow": Case((77,), 20, 3, 1, 24, 24, norm=True),
    "heads_of_96": Case((100,), 140, 2, 1, 96, 96),
    "heads_of_128": Case((130,), 200, 6, 2, 128, 128, norm=True),
    "heads_of_256": Case((31,), 100, 8, 1, 256, 256, 160, norm=True, offset=1.0),
    "sixteen_queries_a_key": Case((5,), 40, 16, 1),
    "no_rotation": Case((100,), 40, rotary=0, norm=True),
    "large_values": Case((200,), 130, largest=2.0),
}
