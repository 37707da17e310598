"""Attention of one token a sequence on the GPU: the kernel of plain steps has the bits of the one that takes masks, and
no bit of either depends on how blocks share the work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from device_bits import to_bits
from gpu_device import device_copy

from edgellm.kernels.decode.attention import attention_launch
from edgellm.kernels.decode.attention_geometries import AttentionGeometry, AttentionShape, attention_counters
from edgellm.kernels.decode.contract import AttentionScratch, AttentionStep, AttentionWeights
from edgellm.kernels.launch import Launch
from edgellm.kernels.quantization.rows import quantize_rows

pytestmark = pytest.mark.gpu

#: Splits, slots, stages, and whether splits are a cluster.
SHARES = (
    *((1, 1, 1, False), (1, 4, 3, False), (2, 2, 2, True), (8, 2, 1, True), (8, 2, 2, True), (8, 1, 3, True)),
    *((4, 2, 1, False), (64, 1, 1, False)),
)
#: Committed rows: around the borders of tiles, and where spans have one, two and four tiles.
STARTS = {1: (0, 1, 15, 16, 62, 63, 64, 127, 1000, 2047, 4095, 4096, 8999), 3: ((0, 130, 8999), (63, 64, 4096))}


@dataclass(frozen=True)
class Case:
    """A layer, of which each sequence has one new token."""

    size: int
    kv_heads: int = 2
    group: int = 4
    int8: bool = False
    window: int = 0
    norm: bool = False
    sinks: bool = False
    neighbours: bool = False
    behind: bool = False
    values: bool = False
    cap: float = 0.0

    def shape(self, batch: int) -> AttentionShape:
        rows = 640 if self.window else 9_100
        sizes = self.kv_heads * self.group, self.kv_heads, self.size, rows
        return AttentionShape(batch, 1, *sizes, self.int8, self.window)


class Layer:
    """Its arrays on the device, and launches of kernels and geometries on them; `general` takes a mask."""

    def __init__(self, gpu, case: Case, batch: int, dtype: str) -> None:
        self.gpu, self.shape, random = gpu, case.shape(batch), np.random.default_rng(case.size + batch)
        shape, heads = self.shape, self.shape.heads

        def normal(*sizes: int) -> np.ndarray:
            return random.standard_normal(sizes, np.float32)

        def copy(values: np.ndarray):
            return device_copy(gpu, to_bits(values, dtype))

        self.before = []
        for _ in "kv":
            rows = normal(batch, shape.kv_heads, shape.kv_rows, case.size)
            self.before += quantize_rows(rows) if case.int8 else [to_bits(rows, dtype)]
        self.caches = [device_copy(gpu, each) for each in self.before]
        self.starts = device_copy(gpu, np.zeros(batch, np.int32))
        self.mask = device_copy(gpu, np.zeros((batch, 1, 1, shape.kv_rows), bool))
        self.qkv = device_copy(gpu, normal(batch, (heads + 2 * shape.kv_heads) * case.size))
        self.nothing = to_bits(np.full((batch, heads * case.size), np.nan, np.float32), dtype)
        self.context = device_copy(gpu, self.nothing)
        angles = random.uniform(0, 6, (batch, 1, case.size // 2)).astype(np.float32)
        self.turns = copy(np.concatenate((np.cos(angles), np.sin(angles)), axis=-1))
        norms = [copy(1 + normal(case.size) / 4) if case.norm else None for _ in "qk"]
        sinks = copy(normal(heads)) if case.sinks else None
        ways = 0, case.neighbours, case.behind, case.cap, case.values
        self.weights = AttentionWeights(*norms, 1e-6, 0.0, case.size**-0.5, True, None, sinks, *ways)
        partials = gpu.zeros((batch * heads * shape.spans * shape.state,), "float32")
        self.scratch = AttentionScratch(partials, gpu.zeros((attention_counters(shape),), "uint32"))

    def launch(self, general: bool, geometry: AttentionGeometry | None) -> Launch:
        caches = self.caches[::2] + self.caches[1::2] if self.shape.int8 else [*self.caches, None, None]
        mask, scales = self.mask if general else None, (*caches[2:], self.shape.window or None)
        step = AttentionStep(self.turns, self.starts, mask, *caches[:2], False, *scales)
        given = self.qkv, self.weights, step, self.scratch, self.context
        return attention_launch(self.gpu.kernel_module, *given, geometry)

    def found(self, launch: Launch, starts: int | tuple[int, ...], with_rows: bool) -> list[np.ndarray]:
        """The context as bits, behind so many committed rows; and all rows and scales, from what they were on."""
        for array, values in zip(self.caches, self.before, strict=True):
            if with_rows:
                self.gpu.upload(array, values)
        self.gpu.upload(self.starts, np.array(starts, np.int32).reshape(-1))
        self.gpu.upload(self.context, self.nothing)
        launch()
        arrays = self.context, *(self.caches if with_rows else ())
        return [self.gpu.download(array).view(np.uint8) for array in arrays]


CASES = {
    "qwen3_30b": Case(128, 4, 8, norm=True),
    "llama_1b": Case(64, 8, 4),
    "int8_of_64": Case(64, 2, 3, int8=True, norm=True),
    "int8_of_128": Case(128, 2, 16, int8=True),
    "gpt_oss": Case(64, 2, 8, window=128, sinks=True),
    "sinks": Case(128, 1, 1, sinks=True, int8=True),
    "int8_in_a_window": Case(128, 2, 4, int8=True, window=300),
    "window": Case(128, window=64, norm=True, behind=True),
    "cap": Case(128, 2, 9, cap=30.0),
    "cap_of_64": Case(64, cap=5.0, int8=True, neighbours=True),
    "heads_of_80": Case(80, 2, 5, norm=True),
    "heads_of_24": Case(24, 1, 12),
    "gemma": Case(256, 1, 4, norm=True, window=512, values=True),
    "int8_of_256": Case(256, 1, 8, int8=True, norm=True),
    "heads_of_512": Case(512, 1, 8, norm=True, values=True),
    "int8_of_512": Case(512, 1, 8, int8=True, norm=True),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_one_token_has_the_same_bits_in_every_kernel_and_geometry(gpu, name: str, dtype: str) -> None:
    case, module = CASES[name], gpu.kernel_module
    kinds = ((1, False), (4, False), (4, True))
    every = [AttentionGeometry(*share[:2], 1, *share[2:], *kind) for share, kind in product(SHARES, kinds)]
    for batch, all_starts in STARTS.items():
        layer = Layer(gpu, case, batch, dtype)
        fitting = [each for each in every if each.fits(layer.shape, module.shared_limit)]
        geometries = [None, *(each for each in fitting if module.has_clusters or not each.in_cluster)]
        labels = list(product((True, False), geometries))
        with module.side_by_side():  # then all are made again, of kernels that are loaded
            for label in labels:
                layer.launch(*label)
        launches = {label: layer.launch(*label) for label in labels}
        for starts in all_starts:
            expected: list[np.ndarray] = []
            for label, launch in launches.items():
                found = layer.found(launch, starts, starts == 1000)
                expected = expected or found
                assert (found[0].view(np.uint16) != layer.nothing.view(np.uint16)).all(), label
                for one, other in zip(found, expected, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg=f"{label} behind {starts}")
        tiles = {geometry.tile_warps for geometry in geometries if geometry is not None}
        assert tiles >= ({4} if case.size > 256 else {1, 4})
