"""Linear layers of any number of rows over packed weights on the GPU: each row has the bits that decode gives it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS, compute_bits, packed_copy, random_of, random_packed, rescaled, with_factors

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import Kept, LinearWeights
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.linear import PACKED_TILINGS, CudaPromptLinear, PromptTiling, prompt_tilings
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.packed_weight import Codes, PackedWeight

pytestmark = pytest.mark.gpu

#: Rows of a step, and of prompts.
STEP_ROWS, ROWS = 50, (65, 300, 100)
#: Codes, group, zero points, the dtype that a weight is rounded in, that of its scales.
FORMATS: tuple[tuple[Codes, int | None, bool, str, str], ...] = (
    *(("int4", group, zeros, "float16", "float16") for group in (16, 64, 128, None) for zeros in (False, True)),
    *(("int4", group, True, "bfloat16", "bfloat16") for group in (32, 48)),
    ("int4", 128, False, "bfloat16", "bfloat16"),
    ("int4", 16, True, "float16", "float32"),
    *(("int8", group, zeros, "float16", "float16") for group in (64, None) for zeros in (False, True)),
    ("int8", 128, True, "bfloat16", "bfloat16"),
    ("int8", 16, True, "bfloat16", "float32"),
    *(("fp8", group, False, dtype, dtype) for group in (128, None) for dtype in ("float16", "bfloat16")),
    ("fp8", None, False, "float32", "float32"),
    ("fp4", 16, False, "bfloat16", "float32"),
)


class Layer:
    """A packed layer with a bias, rows of activations, and the kernels of steps and of prompts."""

    def __init__(self, gpu, weight: PackedWeight, dtype: str, rows: int) -> None:
        self.gpu, self.dtype, self.rows, (self.width, columns) = gpu, dtype, rows, weight.shape
        self._random = np.random.default_rng(rows)
        self.x = self.bits(rows, columns)
        self.packed, self.bias = packed_copy(gpu, weight, dtype), device_copy(gpu, self.bits(self.width))
        self.prompts, self.steps = (
            CudaPromptLinear(gpu.kernel_module, dtype),
            CudaTiledKernels(gpu.kernel_module, dtype),
        )

    def bits(self, *shape: int) -> np.ndarray:
        """Random values as the device has them."""
        return compute_bits(self._random.standard_normal(shape).astype(np.float32), self.dtype)[0]

    def tilings(self) -> list[PromptTiling]:
        """All that fit."""
        return prompt_tilings(self.prompts.gpu, self.packed.layout.block_bytes)

    def linear(
        self, kernels: CudaTiledKernels, own: slice, weight: PackedMatrix | DeviceArray | None = None
    ) -> np.ndarray:
        """What kernels make of some rows."""
        x = device_copy(self.gpu, self.x[own])
        output = device_copy(self.gpu, np.full((len(self.x[own]), self.width), np.nan, np.float32))
        kernels.linear(x, LinearWeights(self.packed if weight is None else weight, self.bias), output, 0.75)()
        return self.gpu.download(output)

    def by_steps(self) -> np.ndarray:
        """What the kernels of a step make of all rows, some at a time."""
        firsts = range(0, self.rows, STEP_ROWS)
        return np.concatenate([self.linear(self.steps, slice(first, first + STEP_ROWS)) for first in firsts])

    def assert_rows_have_the_bits_of_steps(self, tilings: list[PromptTiling]) -> None:
        expected = self.by_steps()
        assert np.isfinite(expected).all()
        for self.prompts.tiling in tilings:
            found = self.linear(self.prompts, slice(None))
            np.testing.assert_array_equal(found, expected, err_msg=str(self.prompts.tiling))


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS, ids=lambda each: "-".join(map(str, each)))
def test_rows_of_every_format_have_the_bits_of_decode_kernels(gpu, format: tuple, compute: str) -> None:
    """In tilings by turns, beside the dense kernels over the dequantized weight."""
    codes, group, zeros, dtype, scale_dtype = format
    width, columns = (136, 528) if group == 48 else (136, 1032)
    weight = random_packed(width, columns, group, zeros, scale_dtype, 0.02, codes=codes)
    if scale_dtype == "float32" and codes != "fp4":
        weight = rescaled(weight, "float32")
    weight = replace(weight, format=replace(weight.format, dtype=dtype))
    for number, rows in enumerate(ROWS, FORMATS.index(format) + (compute == "bfloat16")):
        layer = Layer(gpu, weight, compute, rows)
        tilings = layer.tilings()
        layer.assert_rows_have_the_bits_of_steps([tilings[number % len(tilings)]])
    dense, layer.prompts.tiling = device_copy(gpu, compute_bits(weight.values(), compute)[0]), None
    np.testing.assert_array_equal(layer.linear(layer.prompts, slice(None), dense), layer.by_steps())


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", GGUF_FORMATS)
def test_rows_of_gguf_files_have_the_bits_of_decode_kernels(gpu, kind: str, compute: str) -> None:
    weight = random_of(GGUF_FORMATS[kind], 136, 1056, 0.02)
    for number, rows in enumerate((100, 300)):
        layer = Layer(gpu, weight, compute, rows)
        tilings = layer.tilings()
        layer.assert_rows_have_the_bits_of_steps([tilings[(number + list(GGUF_FORMATS).index(kind)) % len(tilings)]])
    dense, layer.prompts.tiling = device_copy(gpu, compute_bits(weight.values(), compute)[0]), None
    np.testing.assert_array_equal(layer.linear(layer.prompts, slice(None), dense), layer.by_steps())


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_rows_have_the_bits_of_decode_kernels_with_scales_of_8_bits(gpu, compute: str) -> None:
    for numbers, divides in (((0.01,), False), ((90.0, 130.0), True)):
        weight = with_factors(random_packed(24, 520, 16, False, "float32", codes="fp4"), numbers, divides)
        layer = Layer(gpu, weight, compute, 65)
        assert layer.packed.layout.has_factors
        layer.assert_rows_have_the_bits_of_steps(layer.tilings()[-2:])


@pytest.mark.parametrize(("codes", "zeros"), [("int4", False), ("int4", True), ("int8", False)])
@pytest.mark.parametrize(
    ("rows", "width", "columns"), [(65, 24, 72), (300, 330, 520), (1000, 1000, 896), (130, 136, 8192)]
)
def test_every_tiling_gives_the_bits_of_decode_kernels(
    gpu, rows: int, width: int, columns: int, codes: Codes, zeros: bool
) -> None:
    """Fewer outputs and columns than a tile; widths that fill no step, block or slice; slices of 1, 2 and 16 steps."""
    layer = Layer(gpu, random_packed(width, columns, 128, zeros, "float16", 0.02, codes=codes), "float16", rows)
    assert len(layer.tilings()) >= 4
    layer.assert_rows_have_the_bits_of_steps(layer.tilings())


@pytest.mark.parametrize("tiling", PACKED_TILINGS, ids=lambda each: f"{each.rows}x{each.weight_rows}x{each.teams}")
def test_gates_and_residuals_have_the_bits_of_decode_kernels(gpu, tiling: PromptTiling) -> None:
    """Residuals of all rows, kept, and of rows that are selected."""
    rows, weight = 130, random_packed(336, 520, 64, True, "float16", 0.02)
    layer = Layer(gpu, weight, "float16", rows)
    tiling = tiling._replace(block_bytes=layer.packed.layout.block_bytes)
    if tiling not in layer.tilings():
        pytest.skip("a block of this GPU has not the memory")
    linear, residual, layer.prompts.tiling = LinearWeights(layer.packed, layer.bias), layer.bits(rows, 336), tiling

    def gates(kernels: CudaTiledKernels, own: slice) -> np.ndarray:
        x, output = device_copy(gpu, layer.x[own]), gpu.empty((len(layer.x[own]), 168), "float16")
        gpu.upload(output, np.full(output.shape, np.nan, np.float16))
        kernels.gate_up(x, linear, "silu", output)()
        return gpu.download(output)

    def added(kernels: CudaTiledKernels, own: slice) -> np.ndarray:
        x, before = device_copy(gpu, layer.x[own]), device_copy(gpu, residual[own])
        count = len(residual[own])
        output, kept = gpu.zeros((count, 336), "float32"), gpu.zeros((count, 672), "float16")
        kernels.linear_residual(x, linear, before, output, 2.0, Kept(kept, 1))()
        np.testing.assert_array_equal(gpu.download(kept)[:, 336:], residual[own])
        return gpu.download(output)

    for result in (gates, added):
        parts = [result(layer.steps, slice(first, first + STEP_ROWS)) for first in range(0, rows, STEP_ROWS)]
        np.testing.assert_array_equal(result(layer.prompts, slice(None)), np.concatenate(parts))
    chosen, x, before = np.array([[3], [64]], np.int32), device_copy(gpu, layer.x), device_copy(gpu, residual)
    output, selected = gpu.zeros((2, 336), "float32"), device_copy(gpu, chosen)
    layer.prompts.linear_residual(x, linear, before, output, 2.0, selected=selected)()
    expected = added(layer.prompts, slice(None)).reshape(2, 65, 336)[np.arange(2), chosen[:, 0]]
    np.testing.assert_array_equal(gpu.download(output), expected)


def test_weights_that_the_kernels_do_not_take_are_refused(gpu) -> None:
    layer = Layer(gpu, random_packed(24, 64, 32, False, "float16"), "float16", 65)
    x, linear = device_copy(gpu, layer.x), LinearWeights(layer.packed)
    with pytest.raises(KernelError, match="in eights"):
        layer.prompts.gate_up(x, linear, "silu", gpu.empty((65, 12), "float16"))
    with pytest.raises(KernelError, match="rounded in float16"):
        CudaPromptLinear(gpu.kernel_module, "bfloat16").linear(x, linear, gpu.empty((65, 24), "float32"))
