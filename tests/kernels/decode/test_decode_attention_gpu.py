"""Attention of decode, verify and draft steps on the GPU: against its twin, and bit for bit against decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from decode_models import ancestors, random_parents
from decode_twins import NumpyDecodeKernels
from device_bits import from_bits, relative, to_bits, widened
from gpu_device import device_copy

from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import (
    AttentionGeometry,
    AttentionShape,
    attention_counters,
    attention_partials,
)
from edgellm.kernels.decode.contract import AttentionScratch, AttentionStep, AttentionWeights

pytestmark = pytest.mark.gpu

#: Queries, weights and results are rounded to the dtype once each, independently of each other: by half its spacing at
#: most, 2^-11 and 2^-8 of a value. Twice the bound of one of them.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
EPSILON = 1e-5
REPEATS = 20


@dataclass(frozen=True)
class Case:
    """Sequences of `starts` committed rows, and what their new tokens are."""

    starts: tuple[int, ...]
    tokens: int = 1
    kv_heads: int = 2
    group: int = 4
    size: int = 64
    rows: int = 1100
    rotary: int = 16
    norm: bool = False
    masks_all: bool = False
    rotates: bool = True
    scale: float | None = None
    offset: float = 0.0

    @property
    def shape(self) -> AttentionShape:
        heads = self.kv_heads * self.group
        return AttentionShape(len(self.starts), self.tokens, heads, self.kv_heads, self.size, self.rows)

    def bundles(self, arrays: dict, caches: tuple) -> tuple[AttentionWeights, AttentionStep]:
        """The arguments as the kernels and their twins take them."""
        norms = arrays.get("q_norm"), arrays.get("k_norm")
        scale = self.size**-0.5 if self.scale is None else self.scale
        weights = AttentionWeights(*norms, EPSILON, self.offset, scale, self.rotates)
        step = AttentionStep(arrays["cos_sin"], arrays["starts"], arrays.get("mask"), *caches, self.masks_all)
        return weights, step

    def arrays(self, dtype: str) -> dict[str, np.ndarray]:
        """The arguments, as the dtype holds them; rows behind the committed ones are not numbers."""
        random = np.random.default_rng(self.tokens + sum(self.starts))
        batch, heads = len(self.starts), self.kv_heads * self.group
        angles = random.uniform(0, 6, (batch, self.tokens, self.rotary // 2))
        cache = (batch, self.kv_heads, self.rows, self.size)
        arrays = {
            "qkv": random.standard_normal((batch * self.tokens, (heads + 2 * self.kv_heads) * self.size), np.float32),
            "cos_sin": to_bits(np.concatenate((np.cos(angles), np.sin(angles)), axis=-1).astype(np.float32), dtype),
            "starts": np.array(self.starts, np.int32),
        }
        for name in ("q_norm", "k_norm"):
            if self.norm:
                arrays[name] = to_bits(random.uniform(0.5, 1.5, self.size).astype(np.float32), dtype)
        for name in ("k_cache", "v_cache"):
            values = random.standard_normal(cache, np.float32)
            for b, start in enumerate(self.starts):
                values[b, :, start:] = np.nan
            arrays[name] = to_bits(values, dtype)
        if self.tokens > 1 or self.masks_all:
            arrays["mask"] = self._mask(random)
        return arrays

    def _mask(self, random: np.random.Generator) -> np.ndarray:
        """Ancestors in random trees; in a draft step anything, of a key range below the rows."""
        mask = np.zeros((len(self.starts), 1, self.tokens, self.rows - 3 * self.masks_all), bool)
        for b, start in enumerate(self.starts):
            new = np.arange(self.tokens)
            if self.masks_all:
                mask[b, 0, :, : start + self.tokens] = random.random((self.tokens, start + self.tokens)) < 0.6
                mask[b, 0, new, start + new] = True
            else:
                mask[b, 0, :, start : start + self.tokens] = ancestors(random_parents(self.tokens, seed=b + start))
        return mask


class Attention:
    """The kernel bound to device copies of arrays."""

    def __init__(
        self, gpu, case: Case, arrays: dict[str, np.ndarray], geometry: AttentionGeometry | None = None
    ) -> None:
        self.gpu, rows, heads, shape = gpu, len(arrays["qkv"]), case.kv_heads * case.group, case.shape
        partials = attention_partials(shape) if geometry is None else rows * heads * shape.spans * shape.state
        self.arrays = {name: device_copy(gpu, array) for name, array in arrays.items()}
        kind = self.arrays["k_cache"].dtype
        self.arrays["context"] = gpu.empty((rows, heads * case.size), kind)
        gpu.upload(self.arrays["context"], _as_held(np.full((rows, heads * case.size), 0xFFFF, np.uint16), kind))
        self.partial = gpu.zeros((partials,), "float32")
        self.counters = gpu.zeros((attention_counters(shape),), "uint32")
        weights, step = case.bundles(self.arrays, (self.arrays["k_cache"], self.arrays["v_cache"]))
        scratch = AttentionScratch(self.partial, self.counters)
        arguments = self.arrays["qkv"], weights, step, scratch, self.arrays["context"]
        self.launch = attention_launch(gpu.kernel_module, *arguments, geometry)
        self.launch()

    def bits(self, name: str) -> np.ndarray:
        """The array's 16-bit elements."""
        return self.gpu.download(self.arrays[name]).view(np.uint16)


CASES = {
    "no_rows": Case((0,)),
    "decode": Case((63, 64, 0, 1000), rotary=64),
    "chosen_rows_of_llama": Case((1000,), 10, 8, masks_all=True, rotary=64),
    "draft": Case((300, 5), 10, masks_all=True, norm=True),
    "pairs": Case((126,), 2, 1, 3, 24, norm=True),
    "narrow": Case((77,), 5, 1, 1, 40),
    "heads_of_80": Case((190,), 20, 1, 7, 80, rotary=80),
    "heads_of_128": Case((1020, 63), 9, 2, 3, 128, rotary=128, norm=True),
    "heads_of_256": Case((100,), 3, 1, 2, 256, 200, rotary=256),
    "many_heads_a_group": Case((700,), 33, 1, 16, 16),
    "tree": Case((1000,), 64, 8, rotary=64),
    "trees": Case((0, 60, 1023, 250), 16, 2),
    "long": Case((9_000,), 32, 8, rows=9_100),
    "long_decode": Case((31_000,), 1, 8, rows=31_100),
    "tree_of_heads_of_256": Case((100,), 64, 1, 4, 256, 300, rotary=256, norm=True),
    "long_tree_of_heads_of_256": Case((4_090,), 64, 1, 4, 256, 8_192, rotary=256, norm=True, offset=1.0),
    "long_chain_of_heads_of_256": Case((65_000,), 8, 2, 4, 256, 65_600, rotary=64, norm=True),
    "long_decode_of_heads_of_256": Case((30_000, 7), 1, 1, 4, 256, 32_784, rotary=256, norm=True),
    "draft_of_heads_of_256": Case((4_200, 5), 10, 1, 2, 256, 4_400, rotary=256, masks_all=True),
    "heads_of_200": Case((70, 200), 20, 1, 3, 200, 300, rotary=64),
    "gemma": Case((190, 3), 1, 1, 8, 256, 300, rotary=256, scale=0.05),
    "tree_of_gemma": Case((190,), 9, 1, 8, 256, 300, rotary=256, norm=True, offset=1.0),
    "heads_of_512": Case((100, 63), 1, 1, 8, 512, 200, rotary=512, norm=True),
    "tree_of_heads_of_512": Case((190,), 64, 2, 4, 512, 300, rotary=128, norm=True),
    "long_tree_of_heads_of_512": Case((4_090,), 64, 1, 8, 512, 4_200, rotary=512),
    "draft_of_heads_of_512": Case((300, 5), 10, 1, 8, 512, 400, rotary=512, masks_all=True),
    "no_rotation": Case((100, 7), 6, 2, 4, 64, rotary=64, norm=True, rotates=False),
    "two_ways_to_divide": Case((2045,), 32, 8, rows=2_200, rotary=64),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_equals_its_twin(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    arrays = case.arrays(dtype)
    attention = Attention(gpu, case, arrays)
    wide = widened(arrays, dtype)
    caches = [np.nan_to_num(wide[key]) for key in ("k_cache", "v_cache")]
    expected = np.empty(attention.arrays["context"].shape, np.float32)
    NumpyDecodeKernels().attention(wide["qkv"], *case.bundles(wide, tuple(caches)), None, expected)()
    first = attention.bits("context")
    assert relative(from_bits(_as_held(first, dtype), dtype), expected) < TOLERANCE[dtype]
    for key, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        found = attention.bits(key)
        for b, start in enumerate(case.starts):
            new = slice(start, start + case.tokens)
            rows = from_bits(_as_held(found[b, :, new], dtype), dtype)
            assert relative(rows, cache[b, :, new]) < TOLERANCE[dtype], key
            before = arrays[key].view(np.uint16)[b]
            np.testing.assert_array_equal(np.delete(found[b], new, axis=1), np.delete(before, new, axis=1))
    assert not gpu.download(attention.counters).any()
    attention.launch.overlap_previous()
    for _ in range(REPEATS):  # a race would show as a difference
        attention.launch()
    np.testing.assert_array_equal(attention.bits("context"), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_depends_on_how_blocks_share_the_work(gpu, name: str, dtype: str) -> None:
    case, has_clusters = CASES[name], gpu.kernel_module.has_clusters
    arrays = case.arrays(dtype)
    expected = Attention(gpu, case, arrays).bits("context")
    most_tiles, tried = -(-case.tokens // (16 // case.group)), set()
    shapes = {(min(tiles, most_tiles), stages) for tiles, stages in ((1, 1), (2, 3), (3, 1), (5, 2))}
    kinds = ((1, False), (4, False), (4, True))
    for splits, in_cluster in ((1, False), (2, True), (8, True), (4, False), (32, False), (64, False)):
        for slots, (row_tiles, stages), kind in product((1, 2, 4, 8), shapes, kinds):
            geometry = AttentionGeometry(splits, slots, row_tiles, stages, in_cluster, *kind)
            if geometry.fits(case.shape, gpu.kernel_module.shared_limit) and (has_clusters or not in_cluster):
                found = Attention(gpu, case, arrays, geometry).bits("context")
                np.testing.assert_array_equal(found, expected, err_msg=str(geometry))
                tried.add((kind, splits > 1))
    assert len(tried) >= 2
    assert case.size <= 128 or ((4, True), False) in tried, "rows in turn fit everywhere"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        *(Case((start,), 16, 8) for start in (0, 1, 31, 62, 63, 64, 250, 255, 1019)),
        Case((1000,), 64, 8, rotary=64),
        Case((2046,), 24, 8, rows=2_200),
        Case((4090,), 64, 8, rows=4_200),
        Case((61,), 20, 1, 7, 80, norm=True),
        Case((125,), 12, 2, 2, 128),
        Case((60,), 6, 1, 2, 256, 200),
        Case((4_090,), 64, 1, 4, 256, 8_192, norm=True),
        Case((30_010,), 9, 2, 4, 256, 30_100),
        Case((60,), 12, 1, 8, 256, 200, norm=True, offset=1.0, scale=0.1),
        Case((60,), 12, 1, 8, 512, 200, norm=True),
        Case((4_090,), 64, 2, 4, 512, 4_200),
        Case((60,), 12, 2, 4, 64, 200, rotates=False),
        Case((126,), 9, 1, 16, 24),
    ],
    ids=lambda case: f"{case.tokens} at {case.starts[0]}, {case.group} x {case.size}",
)
def test_a_token_of_a_tree_has_the_bits_of_decode_steps(gpu, case: Case, dtype: str) -> None:
    """Context and KV rows, against decode steps one after the other over the token's path."""
    arrays, start = case.arrays(dtype), case.starts[0]
    tree = Attention(gpu, case, arrays)
    one = replace(case, tokens=1)
    single = {name: array for name, array in arrays.items() if name != "mask"}
    for node in sorted({0, 1, case.tokens // 2, case.tokens - 2, case.tokens - 1}):
        path = np.flatnonzero(arrays["mask"][0, 0, node, start : start + case.tokens])
        for depth, ancestor in enumerate(path):
            single["qkv"] = arrays["qkv"][ancestor : ancestor + 1]
            single["cos_sin"] = np.ascontiguousarray(arrays["cos_sin"][:, ancestor : ancestor + 1])
            single["starts"] = np.array([start + depth], np.int32)
            step = Attention(gpu, one, single)
            single["k_cache"], single["v_cache"] = (gpu.download(step.arrays[f"{kind}_cache"]) for kind in "kv")
        np.testing.assert_array_equal(step.bits("context")[0], tree.bits("context")[node], err_msg=f"node {node}")
        for name in ("k_cache", "v_cache"):
            found, expected = step.bits(name)[0, :, start + len(path) - 1], tree.bits(name)[0, :, start + node]
            np.testing.assert_array_equal(found, expected, err_msg=f"{name} of node {node}")


def test_a_sequence_has_the_same_bits_in_every_batch(gpu) -> None:
    case = Case((3, 255, 64, 1031, 500, 31, 0, 100), 8, 8, rotary=64)
    arrays = case.arrays("float16")
    together = Attention(gpu, case, arrays).bits("context")
    for b, start in enumerate(case.starts):
        own = {name: array[b : b + 1] for name, array in arrays.items() if name != "qkv"}
        own = {name: np.ascontiguousarray(array) for name, array in own.items()}
        own["qkv"] = arrays["qkv"][b * 8 : b * 8 + 8]
        alone = Attention(gpu, replace(case, starts=(start,)), own).bits("context")
        np.testing.assert_array_equal(alone, together[b * 8 : b * 8 + 8])


def _as_held(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bits.view(np.float16) if dtype == "float16" else bits
