"""Layers of few rows on few multiprocessors have the bits of the whole GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from expert_cases import on_gpu, random_ids, random_layer
from gpu_device import device_copy
from packed_weights import compute_bits, packed_copy, random_packed

from edgellm.kernels.decode.contract import Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.geometries import LINES
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.packed_rows import packed_rows
from edgellm.kernels.decode.tiled_linear import capacity_of
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.experts import launcher
from edgellm.kernels.experts.contract import Activation
from edgellm.kernels.experts.launcher import CudaExperts
from edgellm.kernels.launch import Launch

pytestmark = pytest.mark.gpu
#: Launches with their outputs.
Made = list[tuple[Launch, tuple[Any, ...]]]
EXPERTS, CHOSEN = 8, 2


def _random(gpu: Any, dtype: str, *shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return device_copy(gpu, values if dtype == "float32" else compute_bits(values, dtype)[0])


def _found(gpu: Any, made: Made) -> list[np.ndarray]:
    """What launches leave in their outputs."""
    found = []
    for launch, outputs in made:
        for output in outputs:
            gpu.upload(output, np.ones_like(gpu.download(output)))
        launch()
        found += [gpu.download(output).view(np.uint8) for output in outputs]
    return found


def _compare(gpu: Any, kernels: CudaDecodeKernels | CudaExperts, make: Callable[[], Made]) -> None:
    """Launches as they are, and those of the same GPU with few multiprocessors."""
    few = replace(capacity_of(gpu.kernel_module), multiprocessors=16)
    if LINES.ring_bytes(2) * 2.5 > few.shared_limit:
        pytest.skip("two blocks have too little shared memory")
    expected = _found(gpu, make())
    kernels.gpu = few
    made = make()
    assert all("decode::Lines" in launch.name or "packed::" in launch.name for launch, _ in made)
    for found, wanted in zip(_found(gpu, made), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("width", "columns"), [(2400, 2048), (132, 520), (300, 1536), (1028, 2560), (64, 8)])
def test_dense_layers_in_whole_lines(gpu, rows: int, width: int, columns: int) -> None:
    """Of steps that are even and odd, of columns and rows that end within a piece."""
    kernels, dtype = CudaDecodeKernels(gpu.kernel_module, "float16", 64), "float16"
    linear = LinearWeights(_random(gpu, dtype, width, columns), _random(gpu, dtype, width))
    x, hidden = _random(gpu, dtype, rows, columns), _random(gpu, "float32", rows, columns)
    normed = NormedInput(hidden, _random(gpu, dtype, columns), 1e-5, 1.0)
    residual, others = _random(gpu, "float32", rows, width), NormedInput(_random(gpu, "float32", rows, width), None)
    sums, kept = gpu.empty((rows, width), "float32"), gpu.empty((rows, columns), dtype)
    gates, gated = gpu.empty((rows, width // 2), dtype), gpu.empty((rows, width), dtype)

    def make() -> Made:
        as_it_is = NormedInput(x, None)
        made: Made = [
            (kernels.norm_linear([normed], linear, sums, 0.5, Kept(kept)), (sums, kept)),
            (kernels.norm_gate_up(normed, linear, "silu", gates), (gates,)),
            (kernels.norm_gate_up(as_it_is, linear, "gelu_tanh", gates), (gates,)),
            (kernels.linear_residual(x, linear, residual, sums, 2.0), (sums,)),
        ]
        if width % 8 == 0:  # as the kernels take what the sums multiply
            through = kernels.token_gate_linear(NormedInput(hidden, None), linear, "silu", others, gated)
            made.append((through, (gated,)))
        return made

    _compare(gpu, kernels, make)


@pytest.mark.parametrize("rows", [1, 3])
def test_dense_experts_in_whole_lines(gpu, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, ids = CudaExperts(gpu.kernel_module, "float16"), device_copy(gpu, random_ids(EXPERTS, CHOSEN, rows))
    layers = [
        on_gpu(gpu, random_layer(EXPERTS, *shape, "float16", "dense", 0), None, EXPERTS, "float16")
        for shape in ((1536, 2048), (2048, 768))
    ]
    x, y = _random(gpu, "float16", rows, 2048), _random(gpu, "float16", rows, CHOSEN * 768)
    inner, outer = gpu.empty((rows, CHOSEN * 768), "float16"), gpu.empty((rows, CHOSEN * 2048), "float32")

    def make() -> Made:
        gate_up = kernels.gate_up(x, ids, layers[0], Activation(), inner)
        return [(gate_up, (inner,)), (kernels.down(y, ids, layers[1], outer), (outer,))]

    def way(rows: int, active: int, matrix: tuple[int, int], gated: bool, layout: None, gpu: Capacity) -> tuple:
        return min(rows, 2), *launcher._dense_geometry(min(rows, 2), matrix[1], gated, gpu)

    monkeypatch.setattr(launcher, "expert_way", way)
    _compare(gpu, kernels, make)


@pytest.mark.parametrize(("width", "columns"), [(4096, 2048), (1024, 8192)])
def test_packed_layers_by_bulk_copies(gpu, width: int, columns: int) -> None:
    """Of several tiles a block, and of several blocks of weights a warp, more than the ring has."""
    kernels, dtype = CudaDecodeKernels(gpu.kernel_module, "float16", 64), "float16"
    packed = packed_copy(gpu, random_packed(width, columns, 128, False, dtype, codes="int4"), dtype)
    few = replace(capacity_of(gpu.kernel_module), multiprocessors=16)
    way = packed_rows(1, packed.layout, few, normed=True)
    if way is None or not way.bulk:
        pytest.skip("there is no tensor memory accelerator, or too little shared memory")
    linear = LinearWeights(packed, _random(gpu, dtype, width))
    x, residual = _random(gpu, dtype, 1, columns), _random(gpu, "float32", 1, width)
    normed = NormedInput(_random(gpu, "float32", 1, columns), _random(gpu, dtype, columns), 1e-5, 1.0)
    sums, gates = gpu.empty((1, width), "float32"), gpu.empty((1, width // 2), dtype)

    def make() -> Made:
        return [
            (kernels.norm_linear([normed], linear, sums), (sums,)),
            (kernels.norm_gate_up(normed, linear, "silu", gates), (gates,)),
            (kernels.linear_residual(x, linear, residual, sums), (sums,)),
        ]

    _compare(gpu, kernels, make)
