"""Packed linear layers of few rows on the GPU, bit for bit those over the dequantized weights, in every way."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS, compute_bits, packed_copy, random_of, random_packed

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode import linear as launches
from edgellm.kernels.decode.contract import AddedTo, Kept, LinearWeights, NormedInput
from edgellm.kernels.decode.geometries import norm_linear_shared_bytes
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.packed_rows import PackedRows, packed_rows_ways
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, capacity_of
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.launch import Launch
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight

pytestmark = pytest.mark.gpu


def _layer(gpu, weight: PackedWeight, dtype: str):
    """A packed layer with a bias, and the same dequantized."""
    bias, dense = _random(gpu, dtype, len(weight.codes)), device_copy(gpu, compute_bits(weight.values(), dtype)[0])
    return LinearWeights(packed_copy(gpu, weight, dtype), bias), LinearWeights(dense, bias)


def _random(gpu, dtype: str, *shape: int):
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)
    return device_copy(gpu, values if dtype == "float32" else compute_bits(values, dtype)[0])


def _every_way(rows: int, layout: DeviceLayout, capacity: Capacity, normed: bool) -> list[PackedRows]:
    """Those of this GPU, and of a part of it, where these kernels take more rows."""
    gpus = capacity, replace(capacity, multiprocessors=16)
    return [*dict.fromkeys(way for each in gpus for way in packed_rows_ways(rows, layout, each, normed))]


@pytest.mark.parametrize(
    ("rows", "width", "columns", "group", "zeros", "dtype", "codes"),
    [
        (1, 2400, 2048, 128, False, "float16", "int4"),
        (3, 2400, 2048, 128, False, "float16", "int4"),
        (8, 336, 520, 32, True, "float16", "int4"),
        (1, 336, 1024, 64, False, "bfloat16", "int4"),
        (2, 336, 2560, None, False, "float16", "int4"),
        (1, 336, 3072, 128, True, "bfloat16", "int4"),
        (8, 336, 4096, 128, False, "float16", "int4"),
        (1, 80, 2048, 32, True, "float16", "int8"),
        (2, 80, 1032, None, False, "float16", "fp8"),
        (1, 80, 4096, 16, False, "bfloat16", "fp4"),
        *((1, 80, 2048, None, False, dtype, kind) for kind in GGUF_FORMATS for dtype in ("float16", "bfloat16")),
        *((rows, 80, 1056, None, False, "float16", kind) for kind in GGUF_FORMATS for rows in (2, 8)),
    ],
)
def test_packed_layers_have_the_bits_of_the_dequantized_weight(
    gpu,
    rows: int,
    width: int,
    columns: int,
    group: int | None,
    zeros: bool,
    dtype: str,
    codes: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, tiled = CudaDecodeKernels(gpu.kernel_module, dtype, 64), CudaTiledKernels(gpu.kernel_module, dtype)
    if codes in GGUF_FORMATS:
        weight = random_of(GGUF_FORMATS[codes], width, columns)
    else:
        weight = random_packed(width, columns, group, zeros, dtype, codes=cast(Codes, codes))
    packed, dense = _layer(gpu, weight, dtype)
    x, hidden = _random(gpu, dtype, rows, columns), _random(gpu, "float32", rows, columns)
    residual, norm_weight = _random(gpu, "float32", rows, width), _random(gpu, dtype, columns)
    normed, rounded = NormedInput(hidden, norm_weight, 1e-5, 1.0), NormedInput(hidden, None)
    sums, gates = gpu.empty((rows, width), "float32"), gpu.empty((rows, width // 2), dtype)
    kept, before = gpu.empty((rows, columns), dtype), gpu.empty((rows, width), dtype)

    def as_it_is(linear: LinearWeights) -> Launch:
        if linear is dense:
            return tiled.gate_up(x, linear, "silu", gates)
        return kernels.norm_gate_up(NormedInput(x, None), linear, "silu", gates)

    def computed(linear: LinearWeights) -> list[np.ndarray]:
        found = []
        for launch, outputs in (
            (kernels.norm_linear([normed], linear, sums, 0.5, Kept(kept)), (sums, kept)),
            (kernels.norm_gate_up(normed, linear, "silu", gates), (gates,)),
            (as_it_is(linear), (gates,)),
            (kernels.norm_linear([rounded], linear, sums, 0.5, Kept(kept, raw=True)), (sums, kept)),
            (kernels.norm_gate_up(rounded, linear, "silu", gates), (gates,)),
            (kernels.linear_residual(x, linear, residual, sums, 2.0, Kept(before)), (sums, before)),
        ):
            for output in outputs:
                gpu.upload(output, np.ones_like(gpu.download(output)))
            launch()
            found += [gpu.download(output).view(np.uint8) for output in outputs]
        return found

    capacity, layout = capacity_of(gpu.kernel_module), packed.weight.layout
    ways = _every_way(rows, layout, capacity, normed=True)
    if not ways or norm_linear_shared_bytes(rows, [columns], capacity.shared_limit, True) > capacity.shared_limit:
        pytest.skip("blocks have too little shared memory")
    expected = computed(dense)
    for way in ways if rows == 1 and codes == "int4" else ways[:1]:
        monkeypatch.setattr(launches, "packed_rows", lambda *_, way=way: way)
        for found, wanted in zip(computed(packed), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=str(way))


@pytest.mark.parametrize(
    ("rows", "width", "columns", "group", "dtype"),
    [
        (1, 2560, 1536, 128, "float16"),
        (2, 256, 1536, 128, "bfloat16"),
        (1, 336, 520, 32, "float16"),
        (2, 336, 4096, 128, "float16"),
        (1, 3072, 2560, 32, "bfloat16"),
    ],
)
@pytest.mark.parametrize("is_normed", [True, False], ids=["normed", "rounded"])
@pytest.mark.parametrize("has_factor", [True, False], ids=["factor", "sum"])
def test_what_a_layer_adds_first_has_the_bits_of_a_launch_before_it(
    gpu, rows: int, width: int, columns: int, group: int, dtype: str, is_normed: bool, has_factor: bool, monkeypatch
) -> None:
    """The sum, its product and what is kept of it, gates, and gates of other rows, which have those of `token_gate`;
    packed in every way, and dense."""
    kernels = CudaDecodeKernels(gpu.kernel_module, dtype, 64)
    layers = _layer(gpu, random_packed(width, columns, group, False, dtype, codes="int4"), dtype)
    given, before = (_random(gpu, "float32", size, columns)[size - rows :] for size in (rows, rows + 1))
    weight, norm_weight = _random(gpu, dtype, columns), _random(gpu, dtype, columns) if is_normed else None
    factor = _random(gpu, "float32", 1) if has_factor else None
    apart, stream = gpu.empty((rows, columns), "float32"), gpu.empty((rows, columns), "float32")
    sums, gates = gpu.empty((rows, width), "float32"), gpu.empty((rows, width // 2), dtype)
    kept, others = gpu.empty((rows, columns), dtype), _random(gpu, "float32", rows, 2 * width)
    gated, through = gpu.empty((rows, width), dtype), NormedInput(others, None, first=width, width=width)
    kernels.norm_residual(NormedInput(given, weight, 1e-6, 1.0), before, apart, factor=factor)()
    added = AddedTo(before, stream, weight, 1e-6, 1.0, factor)

    def computed(linear: LinearWeights, normed: NormedInput, sum_of: DeviceArray) -> list[np.ndarray]:
        found = []
        for launch, outputs in (
            (kernels.norm_linear([normed], linear, sums, 0.5, Kept(kept, raw=True)), (sums, kept, sum_of)),
            (kernels.norm_gate_up(normed, linear, "gelu_tanh", gates), (gates, sum_of)),
        ):
            for output in outputs if sum_of is stream else outputs[:-1]:
                gpu.upload(output, np.ones_like(gpu.download(output)))
            launch()
            found += [gpu.download(output).view(np.uint8) for output in outputs]
        if is_normed:
            return found
        if sum_of is apart:
            kernels.norm_linear([normed], linear, sums)()
            kernels.token_gate(sums, "gelu_tanh", through, gated)()
        else:
            kernels.token_gate_linear(normed, linear, "gelu_tanh", through, gated)()
            inside = gpu.download(gated).view(np.uint8)
            kernels.token_gate_linear(NormedInput(apart, None), linear, "gelu_tanh", through, gated)()
            np.testing.assert_array_equal(inside, gpu.download(gated).view(np.uint8))
        return [*found, gpu.download(gated).view(np.uint8)]

    capacity, layout = capacity_of(gpu.kernel_module), layers[0].weight.layout
    for linear in layers:
        ways = [None] if linear is layers[1] else _every_way(rows, layout, capacity, is_normed)
        for way in ways:
            if way is not None:
                monkeypatch.setattr(launches, "packed_rows", lambda *_, way=way: way)
            expected = computed(linear, NormedInput(apart, norm_weight, 1e-5), apart)
            found = computed(linear, NormedInput(given, norm_weight, 1e-5, added=added), stream)
            for own, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(own, wanted, err_msg=str(way))
