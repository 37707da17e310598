"""Linear layers of any number of rows on the GPU: each row has the bits that the decode kernels give it, in every
tiling, and as for GPUs without clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from device_bits import from_bits, relative, to_bits
from gpu_device import device_copy
from packed_weights import packed_copy, random_packed

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import Kept, LinearAdapters, LinearWeights, low_words, padded_columns
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.prefill.linear import TILINGS, CudaPromptLinear, prompt_kernel, prompt_tilings
from edgellm.kernels.quantization.device_layout import PackedMatrix

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
#: Outputs and columns: fewer than a tile; widths that fill no step, chunk or slice; slices of 1, 2, 10 and 16 steps.
SIZES = [(24, 72), (330, 520), (1000, 896), (200, 4864), (136, 8192)]


@pytest.fixture(scope="module")
def older_module(gpu):
    """Kernels as for sm_80 in the shared memory of an RTX PC, which the driver translates for this GPU."""
    limits = {"shared_limit": 101_376, "can_overlap": False, "has_clusters": False}
    module = KernelModule(replace(gpu.gpu, architecture="compute_80", **limits), gpu.stream)
    try:
        module.load(prompt_kernel("linear", "float16", TILINGS[-1], 2).source)
    except KernelError as error:
        if "UNSUPPORTED_PTX_VERSION" not in str(error):
            raise
        pytest.skip(f"the driver is older than NVRTC: {error}")
    yield module
    module.close()


class Bits(NamedTuple):
    """Random values as the device holds them in a dtype. All that was made is `held`: launches hold nothing."""

    gpu: Any
    dtype: str
    random: np.random.Generator
    held: list[DeviceArray]

    def values(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return to_bits(self.random.standard_normal(shape, np.float32) * np.float32(scale), self.dtype)

    def device(self, values: np.ndarray | None) -> DeviceArray | None:
        if values is None:
            return None
        if values.dtype.itemsize != 2:
            self.held.append(device_copy(self.gpu, values))
        else:
            self.held.append(self.gpu.empty(values.shape, self.dtype))
            self.gpu.upload(self.held[-1], values.view(np.float16 if self.dtype == "float16" else np.uint16))
        return self.held[-1]

    def array(self, *shape: int, scale: float = 1.0) -> DeviceArray:
        return self.device(self.values(*shape, scale=scale))

    def unwritten(self, *shape: int, floats: bool = True) -> DeviceArray:
        """Not a number wherever nothing is written."""
        kind = np.float32 if floats else np.uint16
        return self.device(np.full(shape, np.nan if floats else 0x7FFF, kind))


def bits(gpu, dtype: str) -> Bits:
    return Bits(gpu, dtype, np.random.default_rng(7), [])


def in_parts(gpu, launch: Callable[[slice], tuple[Any, DeviceArray]], rows: int, size: int) -> np.ndarray:
    """What a launch makes of so many rows at a time."""
    found = []
    for first in range(0, rows, size):
        step, output = launch(slice(first, min(first + size, rows)))
        step()
        found.append(gpu.download(output))
    return np.concatenate(found)


@DTYPES
@pytest.mark.parametrize("rows", [1, 17, 64, 65, 130, 300, 1000])
def test_rows_have_the_bits_of_decode_kernels(gpu, dtype: str, rows: int) -> None:
    """Rows 1, 17 and 64 at a time, in every tiling, with a bias and a scale, as they are or padded; near to float64."""
    few, tiled = CudaDecodeKernels(gpu.kernel_module, dtype, 64), CudaTiledKernels(gpu.kernel_module, dtype)
    kernels, given = CudaPromptLinear(gpu.kernel_module, dtype), bits(gpu, dtype)
    tilings = prompt_tilings(kernels.gpu)
    for width, columns in SIZES:
        x = given.values(rows, columns)
        weight, bias = given.values(width, columns, scale=columns**-0.5), given.values(width)
        linear = LinearWeights(given.device(weight), given.device(bias))
        padded = np.zeros((rows, padded_columns(columns)), x.dtype)
        padded[:, :columns] = x
        expected = None
        for kernels.tiling, values in product(tilings, map(given.device, (x, padded))):
            output = given.unwritten(rows, width)
            kernels.linear(values, linear, output, 0.75)()
            found = gpu.download(output)
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected, err_msg=f"{width} x {columns}, {kernels.tiling}")

        def part(own: slice, kernels: Any, name: str, x=x, linear=linear, width=width) -> tuple[Any, DeviceArray]:
            values, output = given.device(np.ascontiguousarray(x[own])), given.unwritten(own.stop - own.start, width)
            more = (output, 0.75) if name == "linear" else (None, output, 0.75)
            return getattr(kernels, name)(values, linear, *more), output

        for size in (17, 64):
            by_tiles = in_parts(gpu, partial(part, kernels=tiled, name="linear"), rows, size)
            np.testing.assert_array_equal(expected, by_tiles, err_msg=f"{width} x {columns}, {size} at a time")
        alone = in_parts(gpu, partial(part, kernels=few, name="linear_residual"), min(rows, 3), 1)
        np.testing.assert_array_equal(expected[:3], alone, err_msg=f"{width} x {columns}, rows alone")
        exact = from_bits(x, dtype).astype(float) @ from_bits(weight, dtype).astype(float).T + from_bits(bias, dtype)
        assert relative(expected, exact * 0.75) < 1e-4


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_and_ups_have_the_bits_of_decode_kernels(gpu, dtype: str, activation: str) -> None:
    tiled, given = CudaTiledKernels(gpu.kernel_module, dtype), bits(gpu, dtype)
    kernels = CudaPromptLinear(gpu.kernel_module, dtype)
    tilings = prompt_tilings(kernels.gpu)
    for rows, (width, columns) in ((65, (48, 72)), (300, (1030, 520)), (140, (2048, 2048))):
        x = given.values(rows, columns)
        weight, bias = given.array(width, columns, scale=columns**-0.5), given.array(width)
        for linear in (LinearWeights(weight, bias), LinearWeights(weight)):

            def part(own: slice, x=x, linear=linear, width=width) -> tuple[Any, DeviceArray]:
                values = given.device(np.ascontiguousarray(x[own]))
                output = given.unwritten(own.stop - own.start, width // 2, floats=False)
                return tiled.gate_up(values, linear, activation, output), output

            expected, values = in_parts(gpu, part, rows, 64), given.device(x)
            for kernels.tiling in tilings:
                output = given.unwritten(rows, width // 2, floats=False)
                kernels.gate_up(values, linear, activation, output)()
                np.testing.assert_array_equal(gpu.download(output), expected, err_msg=str(kernels.tiling))


@DTYPES
@pytest.mark.parametrize("floats", [True, False])
def test_residuals_have_the_bits_of_decode_kernels(gpu, dtype: str, floats: bool) -> None:
    """Of float32 and of the compute dtype, kept as the second of three parts; widths that are even, and odd."""
    tiled, given = CudaTiledKernels(gpu.kernel_module, dtype), bits(gpu, dtype)
    kernels = CudaPromptLinear(gpu.kernel_module, dtype)
    tilings = prompt_tilings(kernels.gpu)
    for rows, (width, columns) in ((65, (24, 72)), (300, (333, 520)), (130, (1000, 896))):
        x, residual = given.values(rows, columns), given.values(rows, width)
        if floats:
            residual = given.random.standard_normal((rows, width), np.float32)
        linear = LinearWeights(given.array(width, columns, scale=columns**-0.5), given.array(width))

        def part(own: slice, by: Any, x=x, residual=residual, linear=linear, width=width) -> tuple[Any, ...]:
            values, before = (given.device(np.ascontiguousarray(each[own])) for each in (x, residual))
            count = own.stop - own.start
            output, kept = given.unwritten(count, width), given.device(np.zeros((count, 3 * width), np.uint16))
            return by.linear_residual(values, linear, before, output, 2.0, Kept(kept, 1)), output, kept

        def of_kept(own: slice, part=part) -> tuple[Any, DeviceArray]:
            launch, _, kept = part(own, tiled)
            return launch, kept

        expected = in_parts(gpu, lambda own, part=part: part(own, tiled)[:2], rows, 64)
        expected_kept = in_parts(gpu, of_kept, rows, 64)
        for kernels.tiling in tilings:
            launch, output, kept = part(slice(0, rows), kernels)
            launch()
            np.testing.assert_array_equal(gpu.download(output), expected, err_msg=str(kernels.tiling))
            np.testing.assert_array_equal(gpu.download(kept), expected_kept, err_msg=str(kernels.tiling))


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 40), (5, 130), (70, 3)])
def test_selected_rows_have_the_bits_that_they_have_in_a_whole_layer(gpu, sequences: int, tokens: int) -> None:
    given, kernels = bits(gpu, "float16"), CudaPromptLinear(gpu.kernel_module, "float16")
    x, residual = given.array(sequences * tokens, 1032), given.array(sequences * tokens, 200)
    linear = LinearWeights(given.array(200, 1032, scale=0.03), given.array(200))
    chosen = given.random.integers(0, tokens, (sequences, 1)).astype(np.int32)
    whole, selected = given.unwritten(sequences * tokens, 200), device_copy(gpu, chosen)
    kernels.linear_residual(x, linear, residual, whole)()
    expected = gpu.download(whole).reshape(sequences, tokens, 200)[np.arange(sequences), chosen[:, 0]]
    for tiling in prompt_tilings(kernels.gpu):
        own, kernels.tiling = given.unwritten(sequences, 200), tiling
        kernels.linear_residual(x, linear, residual, own, selected=selected)()
        np.testing.assert_array_equal(gpu.download(own), expected, err_msg=str(tiling))


class Adapted:
    """A layer with LoRA adapters in places, dense or packed."""

    def __init__(
        self, given: Bits, modules: Sequence[int], columns: int, rank: int, places: int, rows: int, is_packed: bool
    ) -> None:
        self.given, self.modules = given, tuple(modules)
        outputs, low_rows = sum(modules), places * len(modules) * rank
        self.weight: DeviceArray | PackedMatrix = given.array(outputs, columns, scale=columns**-0.5)
        if is_packed:
            weight = random_packed(outputs, columns, 32, True, given.dtype, columns**-0.5 / 8)
            self.weight = packed_copy(given.gpu, weight)
        self.bias, self.a = given.array(outputs), given.array(low_rows, columns, scale=columns**-0.5)
        b = given.values(low_rows, outputs, scale=0.2)
        ends = np.cumsum(modules)
        of_row, of_column = (
            np.arange(low_rows) // rank % len(modules),
            np.searchsorted(ends, np.arange(outputs), "right"),
        )
        self.b = given.device(b * (of_row[:, None] == of_column).astype(b.dtype))
        words = low_words(max(rows, 64), places, len(modules), rank)
        self.areas = [given.gpu.zeros((words,), "uint32") for _ in range(2)]

    def weights(self, scales: np.ndarray | None) -> LinearWeights:
        """For the next launch, with scales [sequences, places] as bits."""
        if scales is None:
            return LinearWeights(self.weight, self.bias)
        self.areas.reverse()  # a launch finds cleared what the one before cleared
        adapters = LinearAdapters(self.a, self.b, self.given.device(scales), self.modules, *self.areas)
        return LinearWeights(self.weight, self.bias, adapters)

    def result(self, kernels: Any, name: str, x: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        """What kernels make of rows x."""
        linear, values = self.weights(scales), self.given.device(x)
        gated = name == "gate_up"
        width = sum(self.modules) // (1 + gated)
        output = self.given.unwritten(len(x), width, floats=not gated)
        if scales is not None and (linear.is_packed or isinstance(kernels, CudaPromptLinear)):
            kernels.low_products(values, linear)()
        more = {"linear": (output,), "gate_up": ("silu", output), "linear_residual": (None, output)}[name]
        getattr(kernels, name)(values, linear, *more)()
        return self.given.gpu.download(output)


#: Modules, columns and rank.
CASES = [((64, 16, 16), 520, 16), ((328,), 1032, 8), ((2048, 512, 512), 264, 24), ((72, 72), 520, 64)]
STEPS = [
    (name, case)
    for name in ("linear", "gate_up", "linear_residual")
    for case in CASES
    if len(case[0]) == 2 or name != "gate_up"
]


@DTYPES
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("name", "case"), STEPS, ids=str)
def test_adapters_add_the_bits_that_they_add_in_decode_kernels(
    gpu, dtype: str, name: str, case: tuple, is_packed: bool
) -> None:
    """Of sequences with an adapter, with none, and with shares of several; in turns with the tiled kernels, which find
    the memory cleared that these left, and the other way round."""
    given, places, sequences, tokens = bits(gpu, dtype), 4, 5, 30
    rows = sequences * tokens
    layer, tiled = Adapted(given, *case, places, rows, is_packed), CudaTiledKernels(gpu.kernel_module, dtype)
    kernels = CudaPromptLinear(gpu.kernel_module, dtype)
    tilings = prompt_tilings(kernels.gpu)
    if isinstance(layer.weight, PackedMatrix):
        tilings = prompt_tilings(kernels.gpu, layer.weight.layout.block_bytes)[::3]
    scales = np.zeros((sequences, places), np.float32)
    scales[0, 2], scales[2, 0], scales[3], scales[4, 3] = 1, 0.5, (0.5, 0, -2, 0.25), 1
    scales, x = to_bits(scales, dtype), given.values(rows, case[1])
    for kernels.tiling in tilings:
        found = layer.result(kernels, name, x, scales)
        for sequence in range(sequences):
            own = slice(sequence * tokens, (sequence + 1) * tokens)
            one = layer.result(tiled, name, np.ascontiguousarray(x[own]), scales[sequence : sequence + 1])
            np.testing.assert_array_equal(found[own], one, err_msg=f"sequence {sequence}, {kernels.tiling}")
        np.testing.assert_array_equal(layer.result(kernels, name, x, scales), found)
        without = layer.result(kernels, name, x, None)
        np.testing.assert_array_equal(layer.result(kernels, name, x, np.zeros_like(scales)), without)
        assert np.any(without != found)


@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_gpus_without_clusters_get_the_same_bits(gpu, older_module, rows: int) -> None:
    """Their kernels, compiled for an older architecture, in the shared memory of an RTX PC."""
    given, kernels = bits(gpu, "float16"), CudaPromptLinear(gpu.kernel_module, "float16")
    older = CudaPromptLinear(older_module, "float16")
    for width, columns in ((200, 520), (1030, 2048), (74, 8)):
        x, linear = given.array(rows, columns), LinearWeights(given.array(width, columns), given.array(width))
        residual, expected = given.array(rows, width), given.unwritten(rows, width)
        kernels.linear_residual(x, linear, residual, expected)()
        for tiling in prompt_tilings(older.gpu):
            output, older.tiling = given.unwritten(rows, width), tiling
            older.linear_residual(x, linear, residual, output)()
            np.testing.assert_array_equal(gpu.download(output), gpu.download(expected), err_msg=str(tiling))
        gated, older.tiling = [given.unwritten(rows, width // 2, floats=False) for _ in range(2)], None
        for each, output in zip((kernels, older), gated, strict=True):
            each.gate_up(x, linear, "silu", output)()
        np.testing.assert_array_equal(*map(gpu.download, gated))
        packed = LinearWeights(packed_copy(gpu, random_packed(width, columns, 128, True, "float16")), linear.bias)
        kernels.linear_residual(x, packed, residual, expected)()
        for tiling in prompt_tilings(older.gpu, packed.weight.layout.block_bytes)[::2]:
            output, older.tiling = given.unwritten(rows, width), tiling
            older.linear_residual(x, packed, residual, output)()
            np.testing.assert_array_equal(gpu.download(output), gpu.download(expected), err_msg=str(tiling))
