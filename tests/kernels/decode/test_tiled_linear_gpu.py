"""The kernels of many rows on the GPU, bit for bit: in every tiling, and as for GPUs without clusters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_bits import relative
from gpu_device import device_copy

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.decode.contract import MAX_ROWS, LinearWeights
from edgellm.kernels.decode.geometries import linear_residual_shared_bytes
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, tiled_kernel
from edgellm.kernels.decode.tilings import Capacity, direct_tilings, tilings
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule

pytestmark = pytest.mark.gpu

OLDER = Capacity(16, 101_376, False, "compute_80")


@pytest.fixture(scope="module")
def older_module(gpu):
    """The tiled kernels as for sm_80, which the driver translates for this GPU."""
    limits = {"shared_limit": 101_376, "can_overlap": False, "has_clusters": False}
    module = KernelModule(replace(gpu.gpu, architecture="compute_80", **limits), gpu.stream)
    try:
        module.load(tiled_kernel("linear", "float16", tilings(1, OLDER)[0], OLDER).source)
    except KernelError as error:
        if "UNSUPPORTED_PTX_VERSION" not in str(error):
            raise
        pytest.skip(f"the driver is older than NVRTC: {error}")
    yield module
    module.close()


def normal(gpu, *shape: int, dtype: str = "float16") -> DeviceArray:
    """Random values in device memory."""
    return device_copy(gpu, np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype))


@pytest.mark.parametrize("rows", [1, 8, 17, 32, 50, 64])
@pytest.mark.parametrize(("width", "columns"), [(330, 520), (330, 4096), (40_000, 264)])
def test_every_tiling_gives_the_same_bits(gpu, rows: int, width: int, columns: int) -> None:
    """Of less than a tile a block, and of several."""
    kernels, output = CudaTiledKernels(gpu.kernel_module, "float16"), gpu.empty((rows, width), "float32")
    x, weight, bias = normal(gpu, rows, columns), normal(gpu, width, columns), normal(gpu, width)
    expected = None
    for tiling in (*tilings(rows, kernels.gpu), *direct_tilings(rows, kernels.gpu)):
        gpu.upload(output, np.full(output.shape, np.nan, np.float32))
        kernels.linear(x, LinearWeights(weight, bias), output, tiling=tiling)()
        found = gpu.download(output)
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected, err_msg=str(tiling))
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("rows", [1, 16, 30])
@pytest.mark.parametrize(("width", "columns"), [(330, 520), (20_000, 264)])
def test_gates_and_ups_get_the_same_bits_in_every_tiling(
    gpu, rows: int, width: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, output = CudaTiledKernels(gpu.kernel_module, "float16"), gpu.empty((rows, width // 2), "float16")
    x, weight, bias = normal(gpu, rows, columns), normal(gpu, width, columns), normal(gpu, width)
    expected = None
    for tiling in (*tilings(rows, kernels.gpu, True)[:1], *direct_tilings(rows, kernels.gpu, True)):
        monkeypatch.setattr(tiled_linear, "fastest_tiling", lambda *_, tiling=tiling: tiling)
        gpu.upload(output, np.full(output.shape, np.nan, np.float16))
        kernels.gate_up(x, LinearWeights(weight, bias), "silu", output)()
        found = gpu.download(output)
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected, err_msg=str(tiling))
    assert np.isfinite(expected).all()


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 40), (5, 3), (16, 4), (20, 3), (64, 1)])
def test_selected_rows_get_the_bits_that_they_have_in_a_whole_layer(
    gpu, sequences: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = CudaDecodeKernels(gpu.kernel_module, "float16", 64), CudaTiledKernels(gpu.kernel_module, "float16")
    x, residual = normal(gpu, sequences * tokens, 1032), normal(gpu, sequences * tokens, 200, dtype="float32")
    weight, bias = normal(gpu, 200, 1032), normal(gpu, 200)
    linear = LinearWeights(weight, bias)
    chosen = np.random.default_rng(1).integers(0, tokens, (sequences, 1)).astype(np.int32)
    selected = device_copy(gpu, chosen)
    whole, own = gpu.empty((sequences * tokens, 200), "float32"), gpu.empty((sequences, 200), "float32")
    many.linear_residual(x, linear, residual, whole)()
    expected = gpu.download(whole).reshape(sequences, tokens, 200)[np.arange(sequences), chosen[:, 0]]
    limit = gpu.kernel_module.shared_limit
    takes_few = sequences <= MAX_ROWS and linear_residual_shared_bytes(sequences, limit) <= limit
    for kernels in (few, many) if takes_few else (many,):
        kernels.linear_residual(x, linear, residual, own, selected=selected)()
        np.testing.assert_array_equal(gpu.download(own), expected)
    for tiling in direct_tilings(sequences, many.gpu):
        monkeypatch.setattr(tiled_linear, "fastest_tiling", lambda *_, tiling=tiling: tiling)
        gpu.upload(own, np.full(own.shape, np.nan, np.float32))
        many.linear_residual(x, linear, residual, own, selected=selected)()
        np.testing.assert_array_equal(gpu.download(own), expected, err_msg=str(tiling))


@pytest.mark.parametrize("rows", [1, 16, 20, 40, 64])
@pytest.mark.parametrize(("width", "columns"), [(330, 520), (200, 2312), (9000, 2048)])
def test_every_direct_tiling_gives_the_same_bits(gpu, older_module, rows: int, width: int, columns: int) -> None:
    """As kernels of few rows, of less than a tile a block, and of several; of slices that end every step, or fourth."""
    few, many = CudaDecodeKernels(gpu.kernel_module, "float16", 64), CudaTiledKernels(older_module, "float16")
    x, weight, bias = normal(gpu, rows, columns), normal(gpu, width, columns), normal(gpu, width)
    linear, expected = LinearWeights(weight, bias), []
    for part in np.array_split(gpu.download(x), -(-rows // 8)):  # for which every GPU has the shared memory
        own, sums = device_copy(gpu, part), gpu.empty((len(part), width), "float32")
        few.linear_residual(own, linear, None, sums)()
        expected.append(gpu.download(sums))
    output = gpu.empty((rows, width), "float32")
    for tiling in direct_tilings(rows, replace(many.gpu, multiprocessors=16)):
        gpu.upload(output, np.full(output.shape, np.nan, np.float32))
        many.linear(x, linear, output, tiling=tiling)()
        np.testing.assert_array_equal(gpu.download(output), np.concatenate(expected), err_msg=str(tiling))


@pytest.mark.parametrize("rows", [1, 8, 17, 32, 45, 64])
def test_gpus_without_clusters_get_the_same_bits(gpu, older_module, rows: int) -> None:
    """Their kernels, compiled for an older architecture, in the shared memory of an RTX PC."""
    for width, columns in ((200, 520), (1030, 2048), (74, 8)):
        x, weight, bias = (normal(gpu, *shape) for shape in ((rows, columns), (width, columns), (width,)))
        residual = normal(gpu, rows, width, dtype="float32")
        results = []
        for module in (gpu.kernel_module, older_module):
            kernels, sums = CudaTiledKernels(module, "float16"), gpu.empty((rows, width), "float32")
            added, gated = gpu.empty((rows, width), "float32"), gpu.empty((rows, width // 2), "float16")
            kernels.linear(x, LinearWeights(weight, bias), sums)()
            kernels.linear_residual(x, LinearWeights(weight), residual, added)()
            kernels.gate_up(x, LinearWeights(weight, bias), "silu", gated)()
            results.append([gpu.download(array) for array in (sums, added, gated)])
        for found, expected in zip(*results, strict=True):
            np.testing.assert_array_equal(found, expected)
        product = gpu.download(x).astype(np.float32) @ gpu.download(weight).astype(np.float32).T
        assert relative(results[0][1], product + gpu.download(residual)) < 1e-4
