"""New tokens of sequences with images among them, each of whose tokens sees all of its image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from window_cases import ring_caches

from edgellm.kernels.prefill.contract import KeyValueRows, RowScales


@dataclass(frozen=True)
class AheadCase:
    """Sequences of `starts` committed tokens, each with so many new `tokens`, of which `images` are (first, tokens).

    With a `window` caches are rings of `rows` rows; `int8`: their rows are.
    """

    starts: tuple[int, ...]
    tokens: int
    images: tuple[tuple[int, int], ...] = ()
    heads: int = 4
    kv_heads: int = 2
    size: int = 64
    rows: int = 704
    window: int = 0
    int8: bool = False

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.size**-0.5

    def arrays(self) -> dict[str, np.ndarray]:
        """The arguments, in float32 or int8 and int32; rows that nobody may look at are not numbers, or of int8
        anything."""
        random = np.random.default_rng(self.tokens + sum(self.starts) + self.window)
        batch, width = len(self.starts), (self.heads + 2 * self.kv_heads) * self.size
        seen = np.array(self.starts, np.int32)[:, None] + np.arange(self.tokens, dtype=np.int32)
        for first, count in self.images:
            seen[:, first : first + count] = seen[:, first + count - 1 : first + count]
        arrays = {
            "qkv": random.standard_normal((batch, self.tokens, width), np.float32),
            "start": np.array(self.starts, np.int32),
            "queries": np.full((batch, self.tokens, self.heads * self.size), np.nan, np.float32),
            "context": np.full((batch, self.tokens, self.heads * self.size), np.nan, np.float32),
            "last_seen": seen,
        }
        shape = (batch, self.kv_heads, self.rows, self.size)
        return arrays | ring_caches(random, shape, self.starts, self.window, self.int8)

    def run(self, kernels: Any, arrays: dict[str, Any], causal: bool = False, **tiling: int) -> None:
        """Rows of the new tokens, then attention, on arrays of either kind; `tiling` is another than the fastest of the
        device."""
        rows = KeyValueRows(arrays["k_cache"], arrays["v_cache"], arrays["start"], self.window)
        scales = RowScales(arrays["k_scale"], arrays["v_scale"]) if self.int8 else None
        queries = arrays["queries"]
        kernels.prepare_heads(arrays["qkv"], None, None, rows, scales, None, queries)()
        given = (queries, rows, self.scale, arrays["context"], scales)
        if causal:
            kernels.causal_attention(*given, **tiling)()
        else:
            kernels.attention_ahead(*given, arrays["last_seen"], **tiling)()

    def expected(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The context by the formula in float64, once the new rows are written: token by token, head by head."""
        context = np.empty(arrays["context"].shape)
        caches = [arrays[f"{kind}_cache"].astype(np.float64) for kind in "kv"]
        if self.int8:
            caches = [cache * arrays[f"{kind}_scale"] for cache, kind in zip(caches, "kv", strict=True)]
        for b, start in enumerate(self.starts):
            for t in range(self.tokens):
                first = max(0, start + t + 1 - self.window) if self.window else 0
                rows = np.arange(first, arrays["last_seen"][b, t] + 1) % self.rows
                for head in range(self.heads):
                    keys, values = (cache[b, head * self.kv_heads // self.heads, rows] for cache in caches)
                    columns = slice(head * self.size, (head + 1) * self.size)
                    scores = keys @ arrays["qkv"][b, t, columns].astype(np.float64) * self.scale
                    weights = np.exp(scores - scores.max())
                    context[b, t, columns] = weights @ values / weights.sum()
        return context


#: Images shorter and longer than a window, a tile and a warp's queries, at a step's beginning and end, over tiles.
CASES = {
    "one": AheadCase((0, 37), 60, ((5, 20),)),
    "several": AheadCase((100,), 200, ((0, 16), (20, 81), (199 - 64, 65)), 2, 1),
    "all_is_an_image": AheadCase((64, 63), 130, ((0, 130),), 2, 2),
    "no_image": AheadCase((10,), 70),
    "a_window_that_is_shorter": AheadCase((0, 5, 300), 100, ((3, 64), (70, 20)), 2, 1, rows=192, window=11),
    "a_window_that_is_longer": AheadCase((0, 777), 90, ((10, 64),), 2, 1, rows=256, window=100),
    "gemma_3": AheadCase((30,), 300, ((14, 256),), 2, 1, 256, rows=384),
    "gemma_3_in_a_window": AheadCase((700,), 272, ((8, 256),), 2, 1, 256, rows=448, window=130),
    "int8": AheadCase((37,), 90, ((20, 64),), 2, 1, int8=True),
    "int8_in_a_window": AheadCase((500,), 90, ((20, 64),), 2, 1, 256, 192, 40, True),
    "heads_of_96": AheadCase((100,), 140, ((30, 70),), 2, 1, 96),
    "heads_of_128": AheadCase((20,), 150, ((11, 128),), 2, 1, 128),
}
