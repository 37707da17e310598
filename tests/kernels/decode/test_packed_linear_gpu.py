"""Linear layers over weights of 4 bits on the GPU, bit for bit those over the dequantized weights, in every tiling."""

from __future__ import annotations

import numpy as np
import pytest
from decode_models import relative
from gpu_device import device_copy
from packed_weights import compute_bits, random_packed

from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.decode.numpy_twins import NumpyTiledKernels
from edgellm.kernels.decode.packed_linear import packed_tilings
from edgellm.kernels.decode.packed_tiles import PackedTiles, packed_tiles
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix, to_device_layout
from edgellm.kernels.quantization.packed_weight import PackedWeight

pytestmark = pytest.mark.gpu


def packed_copy(gpu, weight: PackedWeight) -> PackedMatrix:
    """A weight in the kernels' layout, in the memory of the GPU."""
    layout, data = to_device_layout(weight)
    return PackedMatrix(layout, device_copy(gpu, data))


def every_tiling(rows: int, layout: DeviceLayout, gpu: Capacity) -> list:
    """Of both kinds of kernels; of those of many rows also such as share a tile of weights, and such as no choice has."""
    if rows <= 8:
        return packed_tilings(rows, layout, gpu)
    others = [PackedTiles(2, 1, 2, 4, 2, 3), PackedTiles(4, 2, 1, 4, 3, 4, 2), PackedTiles(2, 1, 3, 1, 2, 3, 4)]
    return [*packed_tilings(rows, layout, gpu), *packed_tiles(rows, layout, gpu), *others]


def normal(gpu, dtype: str, *shape: int):
    """Random values of a compute dtype, on the host as float32 and on the GPU."""
    bits, values = compute_bits(np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32), dtype)
    return values, device_copy(gpu, bits)


@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 17, 32, 50, 64])
@pytest.mark.parametrize(
    ("width", "columns", "group", "zeros", "dtype", "size"),
    [
        (330, 520, 32, False, "float16", 0.01),
        (330, 2048, 128, False, "float16", 0.01),
        (72, 2048, 64, True, "float16", 3.0),
        (330, 2560, None, False, "float16", 1.0),
        (1030, 8192, 128, True, "float16", 0.01),
        (72, 1032, 64, False, "bfloat16", 0.01),
        (330, 2048, 128, True, "bfloat16", 0.01),
        (9000, 264, 32, True, "float16", 0.01),
    ],
)
def test_every_tiling_gives_the_bits_of_the_dequantized_weight(
    gpu, rows: int, width: int, columns: int, group: int | None, zeros: bool, dtype: str, size: float
) -> None:
    kernels = CudaTiledKernels(gpu.kernel_module, dtype)
    weight = random_packed(width, columns, group, zeros, dtype, size)
    packed, dense = packed_copy(gpu, weight), device_copy(gpu, compute_bits(weight.values(), dtype)[0])
    (x, own_x), (bias, own_bias) = normal(gpu, dtype, rows, columns), normal(gpu, dtype, width)
    output, twin = gpu.empty((rows, width), "float32"), np.empty((rows, width), np.float32)
    kernels.linear(own_x, LinearWeights(dense, own_bias), output)()
    expected = gpu.download(output)
    NumpyTiledKernels().linear(x, LinearWeights(weight, bias), twin)()
    assert relative(expected, twin) < 1e-5
    for tiling in every_tiling(rows, packed.layout, kernels.gpu):
        gpu.upload(output, np.full(output.shape, np.nan, np.float32))
        kernels.linear(own_x, LinearWeights(packed, own_bias), output, tiling=tiling)()
        np.testing.assert_array_equal(gpu.download(output), expected, err_msg=str(tiling))


@pytest.mark.parametrize("rows", [1, 16, 30, 64])
@pytest.mark.parametrize(("width", "columns"), [(336, 520), (4096, 2048)])
def test_gates_and_residuals_get_the_bits_of_the_dequantized_weight(
    gpu, rows: int, width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, weight = CudaTiledKernels(gpu.kernel_module, "float16"), random_packed(width, columns, 64, True, "float16")
    packed, dense = packed_copy(gpu, weight), device_copy(gpu, weight.values().astype(np.float16))
    _, x = normal(gpu, "float16", rows, columns)
    residual = device_copy(gpu, np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32))
    gates, sums = gpu.empty((rows, width // 2), "float16"), gpu.empty((rows, width), "float32")
    kernels.gate_up(x, LinearWeights(dense), "silu", gates)()
    kernels.linear_residual(x, LinearWeights(dense), residual, sums, 0.5)()
    expected = gpu.download(gates), gpu.download(sums)
    for tiling in every_tiling(rows, packed.layout, kernels.gpu):
        for choice in ("packed_tilings", "packed_tiles"):
            monkeypatch.setattr(tiled_linear, choice, lambda *_, tiling=tiling: [tiling])
        gpu.upload(gates, np.full(gates.shape, np.nan, np.float16))
        kernels.gate_up(x, LinearWeights(packed), "silu", gates)()
        kernels.linear_residual(x, LinearWeights(packed), residual, sums, 0.5)()
        np.testing.assert_array_equal(gpu.download(gates), expected[0], err_msg=str(tiling))
        np.testing.assert_array_equal(gpu.download(sums), expected[1], err_msg=str(tiling))


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 40), (5, 3), (20, 3)])
def test_selected_rows_get_the_bits_that_they_have_in_a_whole_layer(gpu, sequences: int, tokens: int) -> None:
    kernels, weight = CudaTiledKernels(gpu.kernel_module, "float16"), random_packed(200, 1032, 128, False, "float16")
    linear, rows = LinearWeights(packed_copy(gpu, weight)), sequences * tokens
    _, x = normal(gpu, "float16", rows, 1032)
    residual = device_copy(gpu, np.random.default_rng(1).standard_normal((rows, 200)).astype(np.float32))
    chosen = np.random.default_rng(2).integers(0, tokens, (sequences, 1)).astype(np.int32)
    whole, own = gpu.empty((rows, 200), "float32"), gpu.empty((sequences, 200), "float32")
    selected = device_copy(gpu, chosen)
    kernels.linear_residual(x, linear, residual, whole)()
    kernels.linear_residual(x, linear, residual, own, selected=selected)()
    expected = gpu.download(whole).reshape(sequences, tokens, 200)[np.arange(sequences), chosen[:, 0]]
    np.testing.assert_array_equal(gpu.download(own), expected)


def test_what_does_not_fit_is_refused(gpu) -> None:
    kernels, weight = CudaTiledKernels(gpu.kernel_module, "float16"), random_packed(24, 64, 32, False, "float16")
    packed, (_, x) = LinearWeights(packed_copy(gpu, weight)), normal(gpu, "float16", 2, 64)
    with pytest.raises(KernelError, match="in eights"):
        kernels.gate_up(x, packed, "silu", gpu.empty((2, 12), "float16"))
    with pytest.raises(KernelError, match="rounded in float16"):
        CudaTiledKernels(gpu.kernel_module, "bfloat16").linear(x, packed, gpu.empty((2, 24), "float32"))
