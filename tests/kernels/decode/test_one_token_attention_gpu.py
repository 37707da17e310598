"""Attention of one token a sequence on the GPU: the kernel of plain steps has the bits of the one that takes masks, and
no bit of either depends on how blocks share the work."""

from __future__ import annotations

from itertools import product
from typing import Any

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

#: Splits, slots, row tiles, stages, and whether splits are a cluster; with warps of a tile, and rows in turn.
SHARES = (
    *((1, 1, 1, 1, False), (1, 4, 1, 3, False), (2, 2, 1, 2, True), (8, 2, 1, 1, True), (8, 2, 1, 2, True)),
    *((8, 1, 1, 3, True), (4, 2, 1, 1, False), (64, 1, 1, 1, False)),
)
GEOMETRIES = [AttentionGeometry(*each, *kind) for each in SHARES for kind in ((1, False), (4, False), (4, True))]
#: Committed rows: around the borders of tiles, and where spans have one, two and four tiles.
STARTS = {1: (0, 1, 15, 16, 62, 63, 64, 127, 1000, 2047, 4095, 4096, 8999), 3: ((0, 130, 8999), (63, 64, 4096))}
#: Elements of a head, KV heads, query heads of each, whether rows are int8, the window; norms, sinks, and more.
CASES: dict[str, tuple[tuple[int, int, int, bool, int], bool, bool, dict[str, Any]]] = {
    "qwen3_30b": ((128, 4, 8, False, 0), True, False, {}),
    "llama_1b": ((64, 8, 4, False, 0), False, False, {}),
    "int8_of_64": ((64, 2, 3, True, 0), True, False, {"neighbours": True}),
    "int8_of_128": ((128, 2, 16, True, 0), False, True, {}),
    "gpt_oss": ((64, 2, 8, False, 128), False, True, {}),
    "int8_in_a_window": ((128, 2, 4, True, 300), True, False, {"norms_behind": True}),
    "cap": ((128, 2, 9, False, 0), False, False, {"cap": 30.0}),
    "cap_of_64": ((64, 2, 4, True, 64), False, False, {"cap": 5.0}),
    "heads_of_80": ((80, 2, 5, False, 0), True, False, {}),
    "gemma": ((256, 1, 4, False, 512), True, False, {"values_normed": True}),
    "int8_of_256": ((256, 1, 8, True, 0), True, False, {}),
    "heads_of_512": ((512, 1, 8, False, 0), True, False, {"values_normed": True}),
    "int8_of_512": ((512, 1, 8, True, 0), True, False, {}),
}


class Layer:
    """Its arrays on the device, and launches of kernels and geometries on them; `general` takes a mask."""

    def __init__(self, gpu, name: str, batch: int, dtype: str) -> None:
        (size, kv_heads, group, int8, window), norms, sinks, ways = CASES[name]
        self.gpu, random, heads, rows = gpu, np.random.default_rng(batch), kv_heads * group, 640 if window else 9_100
        self.shape = AttentionShape(batch, 1, heads, kv_heads, size, rows, int8, window)

        def normal(*sizes: int) -> np.ndarray:
            return random.standard_normal(sizes, np.float32)

        def copy(values: np.ndarray):
            return device_copy(gpu, to_bits(values, dtype))

        self.before = []
        for _ in "kv":
            values = normal(batch, kv_heads, rows, size)
            self.before += quantize_rows(values) if int8 else [to_bits(values, dtype)]
        self.caches = [device_copy(gpu, each) for each in self.before]
        self.starts = device_copy(gpu, np.zeros(batch, np.int32))
        self.mask = device_copy(gpu, np.zeros((batch, 1, 1, rows), bool))
        self.qkv = device_copy(gpu, normal(batch, (heads + 2 * kv_heads) * size))
        self.nothing = to_bits(np.full((batch, heads * size), np.nan, np.float32), dtype)
        self.context, self.turns = device_copy(gpu, self.nothing), copy(np.sin(normal(batch, 1, size)))
        own = [copy(1 + normal(size) / 4) if norms else None for _ in "qk"]
        weights = AttentionWeights(*own, 1e-6, 0.0, size**-0.5, sinks=copy(normal(heads)) if sinks else None)
        self.weights = weights._replace(**ways)
        partial = gpu.zeros((batch * heads * self.shape.spans * self.shape.state,), "float32")
        self.scratch = AttentionScratch(partial, gpu.zeros((attention_counters(self.shape),), "uint32"))

    def launch(self, general: bool, geometry: AttentionGeometry | None) -> Launch:
        caches = self.caches[::2] + self.caches[1::2] if self.shape.int8 else [*self.caches, None, None]
        rows = *caches[:2], False, *caches[2:], self.shape.window or None
        step = AttentionStep(self.turns, self.starts, self.mask if general else None, *rows)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_one_token_has_the_same_bits_in_every_kernel_and_geometry(gpu, name: str, dtype: str) -> None:
    module = gpu.kernel_module
    for batch, all_starts in STARTS.items():
        layer = Layer(gpu, name, batch, dtype)
        fitting = [each for each in GEOMETRIES if each.fits(layer.shape, module.shared_limit)]
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
        assert tiles >= ({4} if layer.shape.parts > 1 else {1, 4})
