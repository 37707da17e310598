"""New tokens of sequences whose rows are rings, of which each token sees a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from decode_models import ancestors, random_parents

from edgellm.kernels.decode.contract import AttentionStep, AttentionWeights
from edgellm.kernels.prefill.contract import HeadNorms, KeyValueRows, RotaryPart, RowScales
from edgellm.kernels.quantization.rows import quantize_rows

EPSILON = 1e-6


def ring_caches(
    random: np.random.Generator, shape: tuple[int, int, int, int], starts: Sequence[int], window: int, int8: bool
) -> dict[str, np.ndarray]:
    """KV caches [B, kv heads, rows, size] of sequences of `starts` tokens, rings where there is a `window` (0: none),
    with scales where they are `int8`. Rows that nobody may look at are not numbers, or of int8 anything."""
    caches, rows = {}, shape[2]
    for kind in "kv":
        values = random.standard_normal(shape, np.float32)
        if int8:
            caches[f"{kind}_cache"], caches[f"{kind}_scale"] = quantize_rows(values)
            continue
        for b, start in enumerate(starts):
            held = np.arange(max(0, start + 1 - window) if window else 0, start) % rows
            values[b, :, np.setdiff1d(np.arange(rows), held)] = np.nan
        caches[f"{kind}_cache"] = values
    return caches


@dataclass(frozen=True)
class WindowCase:
    """Sequences of `starts` tokens before the new ones, whose latest `window` - 1 are in `rows` rows.

    The rotary rows have `before` columns more in front of those of the layer.
    """

    starts: tuple[int, ...]
    window: int
    rows: int
    tokens: int = 1
    kv_heads: int = 2
    group: int = 4
    size: int = 64
    rotary: int = 16
    before: int = 0
    norm: bool = False
    int8: bool = False

    @property
    def heads(self) -> int:
        """Of queries."""
        return self.kv_heads * self.group

    def places(self, start: int, count: int) -> np.ndarray:
        """The rows of positions from `start` on."""
        return np.arange(start, start + count) % self.rows

    def arrays(self, chain: bool = False) -> dict[str, np.ndarray]:
        """The arguments in float32; rows outside of a sequence's window are not numbers, or of int8 anything. New
        tokens are random trees, or a `chain`."""
        random = np.random.default_rng(self.tokens + sum(self.starts))
        batch, width = len(self.starts), (self.heads + 2 * self.kv_heads) * self.size
        angles = random.uniform(0, 6, (batch, self.tokens, self.rotary // 2))
        turns = np.concatenate((np.cos(angles), np.sin(angles)), axis=-1)
        others = random.standard_normal((batch, self.tokens, self.before))
        mask = np.zeros((batch, 1, self.tokens, max(self.starts) + self.tokens), bool)
        for b, start in enumerate(self.starts):
            chained = (None, *range(self.tokens - 1))
            parents = chained if chain else random_parents(self.tokens, seed=b + start, depth=12)
            mask[b, 0, :, start : start + self.tokens] = ancestors(parents)
        arrays = {
            "qkv": random.standard_normal((batch * self.tokens, width), np.float32),
            "cos_sin": np.concatenate((others, turns), axis=-1).astype(np.float32),
            "starts": np.array(self.starts, np.int32),
            "mask": mask,
        }
        for name in ("q_norm", "k_norm") if self.norm else ():
            arrays[name] = random.uniform(-0.5, 0.5, self.size).astype(np.float32)
        shape = (batch, self.kv_heads, self.rows, self.size)
        return arrays | ring_caches(random, shape, self.starts, self.window, self.int8)

    def bundles(self, arrays: dict) -> tuple[AttentionWeights, AttentionStep]:
        """The arguments of decode attention, of either kind of arrays."""
        norms, part = (arrays.get("q_norm"), arrays.get("k_norm")), (self.before, self.rotary)
        weights = AttentionWeights(*norms, EPSILON, 1.0, self.size**-0.5, True, part)
        mask = None if self.tokens == 1 else arrays["mask"]
        caches = arrays["k_cache"], arrays["v_cache"], False, arrays.get("k_scale"), arrays.get("v_scale")
        return weights, AttentionStep(arrays["cos_sin"], arrays["starts"], mask, *caches, self.window)

    def prefill(self, kernels, arrays: dict, qkv, queries, context, **tiling: int) -> None:
        """Both kernels of a prompt; qkv [B, T, W], queries and context [B, T, E]."""
        norms = HeadNorms(arrays["q_norm"], arrays["k_norm"], EPSILON, 1.0) if self.norm else None
        rows = KeyValueRows(arrays["k_cache"], arrays["v_cache"], arrays["starts"], self.window)
        scales = RowScales(arrays["k_scale"], arrays["v_scale"]) if self.int8 else None
        part = RotaryPart(self.before, self.rotary)
        kernels.prepare_heads(qkv, norms, arrays["cos_sin"], rows, scales, part, queries)()
        kernels.causal_attention(queries, rows, self.size**-0.5, context, scales, **tiling)()


#: Windows that are shorter than a tile, odd, a tile, and several; sequences that are shorter, and have gone round
#: often.
CASES = {
    "short": WindowCase((0, 1, 3, 200), 5, 64),
    "tile": WindowCase((63, 64, 127, 1000), 64, 192, rotary=64),
    "gemma_3_1b": WindowCase((511, 512, 3000), 512, 1280, 1, 1, 4, 256, 256, before=256, norm=True),
    "gemma_3_1b_chain": WindowCase((0, 700), 512, 1280, 9, 1, 4, 256, 256, before=256, norm=True),
    "mistral": WindowCase((4095, 30000), 4096, 4864, 1, 8, 4, 128, 128),
    "tree": WindowCase((130, 1279), 300, 640, 40, 2, 3, 80, 80),
    "tree_wider_than_the_window": WindowCase((40, 500), 7, 128, 64, 1, 2, 64, 32, norm=True),
    "several_tiles_a_span": WindowCase((5000,), 2500, 2816, 12, 16, 1, 64, 64),
    "tree_of_heads_of_256": WindowCase((40, 700), 512, 1280, 64, 1, 4, 256, 256, before=256, norm=True),
    "int8": WindowCase((60, 700), 100, 320, 6, int8=True),
    "int8_of_256": WindowCase((900,), 129, 256, 3, 1, 2, 256, 256, before=256, int8=True),
}
