"""Linear layers in one kernel on the GPU: the bits of the kernels that compute them one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from decode_models import to_bits as rounded_bits

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import MOST_LAYERS, Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels

pytestmark = pytest.mark.gpu

#: Hidden, query and intermediate size, rows of the last layer: slices of 1 to 33 steps, with and without a part of a
#: slice, tiles of one piece to many, fewer units than blocks and many more.
SIZES = {
    "tiny": (64, 128, 192, 70),
    "half a billion": (896, 896, 4864, 1152),
    "one billion": (2048, 2048, 8192, 3072),
    "odd slices": (1472, 1088, 2624, 40_001),
    "wide": (320, 4096, 14336, 6144),
    "widest": (512, 512, 16896, 520),
}
NOISE = np.random.default_rng(5).standard_normal(1 << 20, np.float32)


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return values if dtype == "float32" else rounded_bits(values, dtype)


class Layers:
    """What follows an attention: its output projection, the MLP and the next layer's first projection; several times,
    the residual stream going through all."""

    def __init__(self, gpu: Any, dtype: str, batch: int) -> None:
        self.gpu, self.dtype, self.batch = gpu, dtype, batch
        self.kernels = CudaDecodeKernels(gpu.kernel_module, dtype, 64)
        self.inputs: list[DeviceArray] = []
        self.results: list[DeviceArray] = []
        self.launches: list[Any] = []
        self._weights: list[DeviceArray] = []  # launches hold addresses alone
        self._seed = 0

    def chains(self) -> list[Any]:
        """All launches, chained, and the counters that they use."""
        self.counters = self.gpu.zeros((MOST_LAYERS,), "uint32")
        chains = self.kernels.chained(self.launches, self.counters)
        for launch in chains:
            launch.overlap_previous()
        return chains

    def add(self, sizes: Sequence[int], bias: bool, before: DeviceArray | None = None) -> DeviceArray:
        """One time more, behind the residual stream `before`; returns the stream behind it."""
        hidden, query, inner, width = sizes
        kernels, x = self.kernels, self._array(self.batch, query)
        self.inputs.append(x)
        if before is None:
            before = self.gpu.empty((self.batch, hidden), "float32")
            self.inputs.append(before)
        after, gated, output = self._result(hidden), self._result(inner, self.dtype), self._result(hidden)
        kept, raw = self._result(2 * hidden, self.dtype), self._result(hidden, self.dtype)
        scores = self._result(width)
        normed = NormedInput(after, self._array(hidden), 1e-5, 1.0)
        last = NormedInput(output, self._array(hidden), 1e-5)
        gate_up, down = self._linear(2 * inner, hidden, bias), self._linear(hidden, inner, bias)
        self.launches += [
            kernels.linear_residual(x, self._linear(hidden, query, bias), before, after, 1.0, Kept(kept, 1)),
            kernels.norm_gate_up(normed, gate_up, "silu", gated),
            kernels.linear_residual(gated, down, after, output, 0.5),
            kernels.norm_linear([last], self._linear(width, hidden, bias), scores, 2.0, Kept(raw, 0, True)),
        ]
        return output

    def renew(self) -> None:
        """Other inputs."""
        for array in self.inputs:
            self._fill(array, 1.0)

    def run(self, launches: list[Any]) -> list[np.ndarray]:
        """What the launches leave of the inputs."""
        for array in self.results:
            self.gpu.upload(array, to_bits(np.full(array.shape, np.nan, np.float32), array.dtype))
        for launch in launches:
            launch()
        return [self.gpu.download(array) for array in self.results]

    def _fill(self, array: DeviceArray, scale: float) -> None:
        self._seed += 1
        values = np.resize(np.roll(NOISE, 4099 * self._seed) * np.float32(scale), array.shape)
        self.gpu.upload(array, to_bits(values, array.dtype))

    def _array(self, *shape: int, scale: float = 1.0) -> DeviceArray:
        array = self.gpu.empty(shape, self.dtype)
        self._weights.append(array)
        self._fill(array, scale)
        return array

    def _linear(self, rows: int, columns: int, bias: bool) -> LinearWeights:
        return LinearWeights(self._array(rows, columns, scale=columns**-0.5), self._array(rows) if bias else None)

    def _result(self, columns: int, dtype: str = "float32") -> DeviceArray:
        self.results.append(self.gpu.empty((self.batch, columns), dtype))
        return self.results[-1]


@pytest.fixture(autouse=True)
def chains_are_there(gpu) -> None:
    if not gpu.kernel_module.has_clusters:
        pytest.skip("chains are for GPUs of sm_90 and later")


@pytest.mark.parametrize(("batch", "dtype"), [(1, "float16"), (1, "bfloat16"), (2, "float16"), (8, "float16")])
@pytest.mark.parametrize("name", SIZES)
def test_a_chain_gives_the_bits_of_its_layers(gpu, name: str, batch: int, dtype: str) -> None:
    layers = Layers(gpu, dtype, batch)
    layers.add(SIZES[name], bias=batch > 1)
    chains = layers.chains()
    if len(chains) > 1:
        assert batch * SIZES[name][2] * 2 > 65_536, "there is no memory for so many rows"
        return
    for _ in range(3):
        layers.renew()
        for found, expected in zip(layers.run(chains), layers.run(layers.launches), strict=True):
            np.testing.assert_array_equal(found, expected)
        assert not gpu.download(layers.counters).any()


def test_chains_that_follow_each_other_do_not_mix(gpu) -> None:
    """Each starts while the one before still runs, and reads what that one writes."""
    layers, stream = Layers(gpu, "float16", 1), None
    for _ in range(8):
        stream = layers.add(SIZES["half a billion"], False, stream)
    layers.renew()
    chains, expected = layers.chains(), layers.run(layers.launches)
    assert len(chains) == 8
    for _ in range(20):
        for found, of_layers in zip(layers.run(chains), expected, strict=True):
            np.testing.assert_array_equal(found, of_layers)
