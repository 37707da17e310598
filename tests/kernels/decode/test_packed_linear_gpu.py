"""Linear layers over packed weights on the GPU, bit for bit those over the dequantized weights, in every tiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from decode_twins import NumpyTiledKernels
from device_bits import relative
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS, compute_bits, packed_copy, random_of, random_packed

from edgellm.kernels.decode import tiled_linear
from edgellm.kernels.decode.contract import LinearWeights, NormedInput
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.packed_linear import packed_tilings
from edgellm.kernels.decode.packed_tiles import LEAST_ROWS, PackedTiles, packed_tiles
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.quantization.device_layout import DeviceLayout, InputPermutation
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight
from edgellm.kernels.quantization.row_runs import PackedRuns

pytestmark = pytest.mark.gpu


def every_tiling(rows: int, layout: DeviceLayout, gpu: Capacity) -> list:
    """Those of few rows; of many some of both kinds of kernels, and one that no choice has."""
    if rows < LEAST_ROWS:
        return [*packed_tilings(rows, layout, gpu), *packed_tiles(rows, layout, gpu)]
    others = PackedTiles(2, 1, 2, 4, 2, 3), PackedTiles(4, 2, 1, 4, 3, 4, 2), PackedTiles(2, 1, 3, 1, 2, 3, 4)
    return [packed_tilings(rows, layout, gpu)[0], *packed_tiles(rows, layout, gpu)[:2], others[rows % 3]]


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


def formats() -> list:
    """Codes, group, zero points, the dtype that a weight is rounded in, that of its scales, and the compute dtype."""
    own: list[tuple[Codes, int | None, bool]] = [
        *(("int8", None, False), ("int8", None, True), ("int8", 64, False), ("int8", 16, True), ("fp8", None, False)),
        *(("fp8", 128, False), ("int4", 16, False), ("int4", 48, True)),
    ]
    found = [(*each, dtype, dtype, dtype) for dtype in ("float16", "bfloat16") for each in own]
    for dtype in ("float16", "bfloat16"):
        found += [("fp4", 16, False, "bfloat16", "float32", dtype), ("fp8", None, False, "float32", "float32", dtype)]
    found += [
        ("int4", 128, True, "float16", "float16", "bfloat16"),
        ("int8", 32, True, "bfloat16", "bfloat16", "float16"),
    ]
    return found


@pytest.mark.parametrize(("codes", "group", "zeros", "dtype", "scale_dtype", "compute"), formats())
def test_every_format_gives_the_bits_of_the_dequantized_weight(
    gpu, codes: Codes, group: int | None, zeros: bool, dtype: str, scale_dtype: str, compute: str
) -> None:
    kernels = CudaTiledKernels(gpu.kernel_module, compute)
    columns, width = (528, 72) if group == 48 else (2048, 72)
    for rows, size in ((1, 0.01), (12, 2.0), (12, 1e-6), (40, 0.01)):
        weight = random_packed(width, columns, group, zeros, scale_dtype, size, codes=codes)
        weight = replace(weight, format=replace(weight.format, dtype=dtype))
        assert_gives_the_bits_of_its_values(gpu, kernels, weight, rows, compute, f"{size}")


def assert_gives_the_bits_of_its_values(
    gpu: Any, kernels: CudaTiledKernels, weight: PackedWeight, rows: int, compute: str, case: str
) -> None:
    """Of the first tilings, beside a dense weight of its values."""
    packed, dense = packed_copy(gpu, weight, compute), device_copy(gpu, compute_bits(weight.values(), compute)[0])
    _, x = normal(gpu, compute, rows, weight.shape[1])
    output = gpu.empty((rows, weight.shape[0]), "float32")
    kernels.linear(x, LinearWeights(dense), output)()
    expected = gpu.download(output)
    assert np.isfinite(expected).all()
    for tiling in every_tiling(rows, packed.layout, kernels.gpu)[:3]:
        gpu.upload(output, np.full(output.shape, np.nan, np.float32))
        kernels.linear(x, LinearWeights(packed), output, tiling=tiling)()
        np.testing.assert_array_equal(gpu.download(output), expected, err_msg=f"{tiling}, {case}")


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_formats_of_gguf_files_give_the_bits_of_the_dequantized_weight(gpu, kind: str, compute: str) -> None:
    kernels = CudaTiledKernels(gpu.kernel_module, compute)
    for rows, columns, size in ((1, 2048, 0.01), (2, 544, 2.0), (8, 2048, 0.2), (16, 1056, 0.01), (64, 2048, 0.01)):
        weight = random_of(GGUF_FORMATS[kind], 72, columns, size)
        assert_gives_the_bits_of_its_values(gpu, kernels, weight, rows, compute, f"{columns}")


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("codes", ["int4", "int5", "int6", "int8", "iq4", "fp8", "fp4"])
def test_each_code_becomes_its_value(gpu, codes: Codes, compute: str) -> None:
    kernels, scale_dtype = CudaTiledKernels(gpu.kernel_module, compute), "float32" if codes == "fp4" else compute
    for zeros in (False, True)[: 1 + codes.startswith("int")]:
        weight = random_packed(256, 64, 16 if codes == "fp4" else 32, zeros, scale_dtype, 0.05, codes=codes)
        weight.codes[:] = (np.arange(256)[:, None] + 7 * np.arange(64)) % (1 << weight.format.bits)
        weight.codes[(codes == "fp8") & (weight.codes & 127 == 127)] = 0
        ones = device_copy(gpu, compute_bits(np.eye(64, dtype=np.float32), compute)[0])
        packed, output = packed_copy(gpu, weight, compute), gpu.empty((64, 256), "float32")
        kernels.linear(ones, LinearWeights(packed), output)()
        np.testing.assert_array_equal(gpu.download(output).T, compute_bits(weight.values(), compute)[1])


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 64, 100])
def test_runs_of_rows_give_the_bits_of_the_dequantized_weight(gpu, rows: int, compute: str) -> None:
    """Of four parts in three formats, and one of them dense, by kernels of few rows, of many and of prompts."""
    module, kinds, columns = gpu.kernel_module, {"q4_k": 136, "q6_k": 24, "dense": 72, "q8_0": 40}, 1056
    weights = [random_of(GGUF_FORMATS[kind], own, columns, seed=own) for kind, own in kinds.items() if kind != "dense"]
    runs: list[Any] = [packed_copy(gpu, weight, compute) for weight in weights]
    between, width = normal(gpu, compute, 72, columns), sum(kinds.values())
    runs.insert(2, between[1])
    values = np.concatenate([*(each.values() for each in weights[:2]), between[0], weights[2].values()])
    dense, (_, bias) = device_copy(gpu, compute_bits(values, compute)[0]), normal(gpu, compute, width)
    packed = LinearWeights(PackedRuns(tuple(runs)), bias)
    kernels: CudaTiledKernels = (CudaTiledKernels if rows <= 64 else CudaPromptLinear)(module, compute)
    _, x = normal(gpu, compute, rows, columns)
    output, few = gpu.empty((rows, width), "float32"), CudaDecodeKernels(module, compute, 64)

    def computed(linear: LinearWeights, kind: str) -> np.ndarray:
        gpu.upload(output, np.full(output.shape, np.nan, np.float32))
        for run in linear.runs:
            if kind == "linear":
                kernels.linear(x, run, output, 0.5)()
            elif kind == "normed":
                few.norm_linear([NormedInput(hidden, None)], run, output, 0.5)()
            else:
                (few if kind == "few" else kernels).linear_residual(x, run, None, output, 0.5)()
        return gpu.download(output)

    hidden = device_copy(gpu, np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32))
    for kind in ("linear", "added", *(("few",) if rows <= 8 else ()), *(("normed",) if rows <= 2 else ())):
        expected = computed(LinearWeights(dense, bias), kind)
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(computed(packed, kind), expected, err_msg=kind)
    with pytest.raises(KernelError, match="takes no residual"):
        kernels.linear_residual(x, packed.runs[1], output, output)


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 16, 100])
@pytest.mark.parametrize("ups", ["q5_1", "dense"])
def test_gates_and_ups_in_two_formats_have_the_bits_of_the_dequantized_weight(
    gpu, ups: str, rows: int, activation: str, compute: str
) -> None:
    module, columns, width = gpu.kernel_module, 544, 4104
    weights = [
        random_of(GGUF_FORMATS[kind], width, columns, seed=number) for number, kind in enumerate(("q4_0", "q5_1"))
    ]
    dense = device_copy(gpu, compute_bits(np.concatenate([weight.values() for weight in weights]), compute)[0])
    last = dense[width:] if ups == "dense" else packed_copy(gpu, weights[1], compute)
    packed = LinearWeights(PackedRuns((packed_copy(gpu, weights[0], compute), last)))
    kernels: CudaTiledKernels = (CudaTiledKernels if rows <= 64 else CudaPromptLinear)(module, compute)
    (_, x), output = normal(gpu, compute, rows, columns), gpu.zeros((rows, width), compute)
    kernels.gate_up(x, LinearWeights(dense), activation, output)()
    expected, apart = gpu.download(output), gpu.empty((rows, 2 * width), "float32")
    gpu.upload(output, np.zeros_like(expected))
    for run in packed.runs:
        kernels.linear(x, run, apart)()
    few = CudaDecodeKernels(module, compute, 64)
    few.gate_rows(apart, activation, output)()
    np.testing.assert_array_equal(gpu.download(output), expected)
    with pytest.raises(KernelError, match="half as many columns"):
        few.gate_rows(output, activation, apart)


@pytest.mark.parametrize("rows", [1, 8, 16, 30, 64])
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
        monkeypatch.setattr(tiled_linear, "packed_tiling", lambda *_, tiling=tiling: tiling)
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns", "padded"), [(1, 520, 1024), (3, 2048, 2048), (20, 9728, 10240)])
def test_a_norm_arranges_its_rows(gpu, rows: int, columns: int, padded: int, dtype: str) -> None:
    kernels, random = CudaDecodeKernels(gpu.kernel_module, dtype, 64), np.random.default_rng(3)
    order, scales = random.permutation(columns).astype(np.int32), random.uniform(0.5, 2, columns).astype(np.float32)
    (x, own_x), (_, weight) = normal(gpu, dtype, rows, columns), normal(gpu, dtype, columns)
    own_order, own_scales = device_copy(gpu, order), device_copy(gpu, scales)
    plain, output = gpu.empty((rows, padded), dtype), gpu.empty((rows, padded), dtype)
    kernels.norm(NormedInput(own_x, weight, 1e-5), plain)()
    normed = compute_values(gpu.download(plain), dtype)
    for arranged in (
        InputPermutation(own_order, None),
        InputPermutation(None, own_scales),
        InputPermutation(own_order, own_scales),
    ):
        kernels.norm(NormedInput(own_x, weight, 1e-5), output, arranged=arranged)()
        expected = normed.copy()
        expected[:, :columns] = compute_bits(rearranged(normed[:, :columns], arranged, order, scales), dtype)[1]
        np.testing.assert_array_equal(compute_values(gpu.download(output), dtype), expected)
    both = InputPermutation(own_order, own_scales)
    kernels.norm(NormedInput(own_x, None), own_x, arranged=both)()  # where they are
    expected = compute_bits(rearranged(x, both, order, scales), dtype)[1]
    np.testing.assert_array_equal(compute_values(gpu.download(own_x), dtype), expected)


def rearranged(x: np.ndarray, arranged: InputPermutation, order: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """x [R, K] float32 in that order, times these scales, as far as there are such."""
    x = x if arranged.order is None else x[:, order]
    return x if arranged.scales is None else x * scales


def compute_values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """What arrays of the device hold, as float32."""
    return bits.astype(np.float32) if dtype == "float16" else (bits.astype(np.uint32) << 16).view(np.float32)


def test_what_does_not_fit_is_refused(gpu) -> None:
    kernels, weight = CudaTiledKernels(gpu.kernel_module, "float16"), random_packed(24, 64, 32, False, "float16")
    packed, (_, x) = LinearWeights(packed_copy(gpu, weight)), normal(gpu, "float16", 2, 64)
    with pytest.raises(KernelError, match="in eights"):
        kernels.gate_up(x, packed, "silu", gpu.empty((2, 12), "float16"))
    with pytest.raises(KernelError, match="rounded in float16"):
        CudaTiledKernels(gpu.kernel_module, "bfloat16").linear(x, packed, gpu.empty((2, 24), "float32"))
