"""Each parameter of linear layers on the GPU: against the twins, and few rows and many bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from decode_models import TOLERANCE
from decode_twins import NumpyDecodeKernels, NumpyTiledKernels
from device_bits import from_bits, relative, to_bits

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import SQUARE_SUMS, Kept, LinearWeights, NormedInput, padded_columns
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels

pytestmark = pytest.mark.gpu

EPSILON = 1e-5
FEW, MANY = NumpyDecodeKernels(), NumpyTiledKernels()
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
ROWS = pytest.mark.parametrize("rows", [1, 2, 5, 9, 16])


class Bench:
    """The kernels of a dtype, and arrays that both sides have."""

    def __init__(self, gpu, dtype: str) -> None:
        self.gpu, self.dtype = gpu, dtype
        self.few = CudaDecodeKernels(gpu.kernel_module, dtype, 64)
        self.many = CudaTiledKernels(gpu.kernel_module, dtype)
        self._random = np.random.default_rng(3)

    def both(self, *shape: int, dtype: str | None = None, scale: float = 1.0) -> tuple[DeviceArray, np.ndarray]:
        """Random values as the dtype holds them: on the device, and in float32."""
        values = (self._random.standard_normal(shape) * scale).astype(np.float32)
        bits = values if dtype == "float32" else to_bits(values, self.dtype)
        array = self.gpu.empty(shape, dtype or self.dtype)
        self.gpu.upload(array, bits)
        return array, values if dtype == "float32" else from_bits(bits, self.dtype)

    def linear(self, rows: int, columns: int, bias: bool = True) -> tuple[LinearWeights, LinearWeights]:
        weight, bias_values = self.both(rows, columns, scale=columns**-0.5), self.both(rows) if bias else (None, None)
        return tuple(LinearWeights(*each) for each in zip(weight, bias_values, strict=True))

    def normed(self, rows: int, columns: int, width: int, dtype: str, **more) -> tuple[NormedInput, NormedInput]:
        values, weight = self.both(rows, columns, dtype=dtype), self.both(width, scale=0.3)
        return tuple(NormedInput(*each, EPSILON, width=width, **more) for each in zip(values, weight, strict=True))

    def empty(self, *shape: int, dtype: str = "float32") -> DeviceArray:
        """Not a number everywhere."""
        array = self.gpu.empty(shape, dtype)
        self.gpu.upload(array, nans(shape) if dtype == "float32" else to_bits(nans(shape), dtype))
        return array

    def check(self, array: DeviceArray, expected: np.ndarray) -> np.ndarray:
        """What the device has, which is close to what is expected."""
        bits = self.gpu.download(array)
        found = bits if array.dtype == "float32" else from_bits(bits, self.dtype)
        assert relative(found.reshape(expected.shape), expected) < TOLERANCE[self.dtype]
        return bits


def nans(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


@pytest.fixture
def bench(gpu, dtype: str) -> Bench:
    return Bench(gpu, dtype)


@DTYPES
@ROWS
@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (1.0, 1.0), (0.0, 0.3), (1.0, 8.0)])
@pytest.mark.parametrize(("columns", "first", "width"), [(520, 0, 520), (1600, 8, 1096), (4096, 2048, 2048)])
@pytest.mark.parametrize("kind", ["float32", "compute"])
def test_norm_and_linear(bench: Bench, dtype, rows, offset, scale, columns, first, width, kind) -> None:
    kind = dtype if kind == "compute" else kind
    normed, twin = bench.normed(rows, columns, width, kind, first=first, offset=offset)
    linear, twin_linear = bench.linear(330, width)
    for raw in (False, True):
        output, kept = bench.empty(rows, 330), bench.empty(rows, 2 * width, dtype=dtype)
        bench.few.norm_linear([normed], linear, output, scale, Kept(kept, 1, raw))()
        expected, expected_kept = nans((rows, 330)), nans((rows, 2 * width))
        FEW.norm_linear([twin], twin_linear, expected, scale, Kept(expected_kept, 1, raw))()
        found = bench.check(output, expected)
        kept_bits = bench.gpu.download(kept).reshape(rows, 2, width)[:, 1]
        kept_values = from_bits(np.ascontiguousarray(kept_bits), dtype)
        assert relative(kept_values, expected_kept[:, width:]) < TOLERANCE[dtype]
        # The norm alone, then the layer of many rows.
        padded, many = bench.empty(rows, padded_columns(width), dtype=dtype), bench.empty(rows, 330)
        own = bench.empty(rows, width, dtype=dtype)
        bench.few.norm(normed, padded, kept=Kept(own, 0, raw))()
        bench.many.linear(padded, linear, many, scale)()
        np.testing.assert_array_equal(bench.gpu.download(many), found)
        np.testing.assert_array_equal(bench.gpu.download(own), kept_bits)


@DTYPES
@ROWS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("width", "outputs"), [(520, 165), (2048, 4100)])
def test_gate_and_up(bench: Bench, dtype, rows, activation, width, outputs) -> None:
    normed, twin = bench.normed(rows, width, width, "float32", offset=1.0)
    linear, twin_linear = bench.linear(2 * outputs, width)
    output, many, expected = (
        bench.empty(rows, outputs, dtype=dtype),
        bench.empty(rows, outputs, dtype=dtype),
        nans((rows, outputs)),
    )
    bench.few.norm_gate_up(normed, linear, activation, output)()
    FEW.norm_gate_up(twin, twin_linear, activation, expected)()
    found = bench.check(output, expected)
    padded = bench.empty(rows, padded_columns(width), dtype=dtype)
    bench.few.norm(normed, padded)()
    bench.many.gate_up(padded, linear, activation, many)()
    np.testing.assert_array_equal(bench.gpu.download(many), found)


@DTYPES
@ROWS
@pytest.mark.parametrize("kind", ["float32", "compute"])
@pytest.mark.parametrize("width", [520, 2056])
def test_an_input_without_a_norm_is_rounded(bench: Bench, dtype, rows, kind, width) -> None:
    """As the norm's kernel copies it for the layer of many rows, and as it is kept."""
    x, values = bench.both(rows, width, dtype="float32" if kind == "float32" else None)
    own, twin = NormedInput(x, None), NormedInput(values, None)
    linear, twin_linear = bench.linear(330, width)
    output, kept = bench.empty(rows, 330), bench.empty(rows, 2 * width, dtype=dtype)
    gated, many_gated = (bench.empty(rows, 165, dtype=dtype) for _ in range(2))
    expected, expected_gated = nans((rows, 330)), nans((rows, 165))
    bench.few.norm_linear([own], linear, output, 0.5, Kept(kept, 1, True), next_early=False)()
    FEW.norm_linear([twin], twin_linear, expected, 0.5)()
    bench.few.norm_gate_up(own, linear, "silu", gated)()
    FEW.norm_gate_up(twin, twin_linear, "silu", expected_gated)()
    found, found_gated = bench.check(output, expected), bench.check(gated, expected_gated)
    padded, many = bench.empty(rows, padded_columns(width), dtype=dtype), bench.empty(rows, 330)
    bench.few.norm(own, padded)()
    bench.many.linear(padded, linear, many, 0.5)()
    bench.many.gate_up(padded, linear, "silu", many_gated)()
    np.testing.assert_array_equal(bench.gpu.download(many), found)
    np.testing.assert_array_equal(bench.gpu.download(many_gated), found_gated)
    kept_bits = bench.gpu.download(kept).reshape(rows, 2, width)[:, 1]
    np.testing.assert_array_equal(kept_bits, bench.gpu.download(padded)[:, :width])


@DTYPES
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("widths", [(8,), (64, 32), (4096, 1024), (5120, 5120)], ids=str)
def test_parts_are_normed_where_they_are(bench: Bench, dtype, early, widths) -> None:
    """Other columns stay, and a row has the same bits by itself and among others."""
    rows, columns = 37, sum(widths) + 16
    _, values = bench.both(rows, columns, dtype="float32", scale=30.0)
    weights, first = [bench.both(width, scale=0.3) for width in widths], 0

    def normed(held: DeviceArray) -> np.ndarray:
        parts, first = [], 0
        for (weight, _), width in zip(weights, widths, strict=True):
            parts.append(NormedInput(held, weight, EPSILON, 1.0, first, width))
            first += width
        bench.few.norm_parts(parts, early)()
        return bench.gpu.download(held)

    def uploaded(given: np.ndarray) -> DeviceArray:
        held = bench.gpu.empty(given.shape, "float32")
        bench.gpu.upload(held, np.ascontiguousarray(given))
        return held

    found, expected, parts = normed(uploaded(values)), values.copy(), []
    for (_, weight), width in zip(weights, widths, strict=True):
        parts.append(NormedInput(expected, weight, EPSILON, 1.0, first, width))
        first += width
    FEW.norm_parts(parts)()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[:, -16:], values[:, -16:])
    for row in (0, 20, 36):
        np.testing.assert_array_equal(normed(uploaded(values[row : row + 1])), found[row : row + 1])
    # Of a rank that counts all: the sums of squares, by which the same are normed.
    held, sums = uploaded(values), bench.gpu.empty((rows, SQUARE_SUMS), "float32")
    own, first = [], 0
    for (weight, _), width in zip(weights, widths, strict=True):
        own.append(NormedInput(held, weight, EPSILON, 1.0, first, width))
        first += width
    squares = np.zeros((rows, SQUARE_SUMS), np.float32)
    FEW.square_sums([part._replace(values=values, weight=None) for part in parts], [True] * len(widths), squares)()
    for counted in (False, True):
        bench.few.square_sums([part._replace(weight=None) for part in own], [counted] * len(widths), sums, early)()
        np.testing.assert_allclose(bench.gpu.download(sums), squares * counted, rtol=1e-5)
    bench.few.norm_parts(own, early, sums, widths)()
    np.testing.assert_array_equal(bench.gpu.download(held), found)


@DTYPES
@pytest.mark.parametrize("rows", [1, 60, 512])
@pytest.mark.parametrize("size", [256, 512])
def test_columns_of_gemma4(bench: Bench, dtype, rows, size) -> None:
    """Heads of E2B: 8 of queries, one of keys and one of values; 35 layers' embeddings of 256, and a layer's factor."""
    x, before = bench.both(rows, 10 * size, dtype="float32", scale=20.0)
    queries, values = bench.both(rows, 8 * size, dtype="float32")
    bench.few.insert_columns(queries, x)()
    inserted = bench.gpu.download(x)
    np.testing.assert_array_equal(inserted[:, : 8 * size], values)
    np.testing.assert_array_equal(inserted[:, 8 * size :], before[:, 8 * size :])

    inputs, gate = (bench.both(rows, width, dtype="float32") for width in (8960, 256))
    own, norm, last_inputs = bench.both(rows, 8960), bench.both(256), bench.empty(1, 8960)
    bench.gpu.upload(last_inputs, inputs[1][rows - 1 :])
    bench.few.token_inputs(inputs[0], own[0], norm[0], EPSILON, 1.0, 16.0)()
    bench.few.token_inputs(last_inputs, own[0][rows - 1 :], norm[0], EPSILON, 1.0, 16.0)()
    FEW.token_inputs(inputs[1], own[1], norm[1], EPSILON, 1.0, 16.0)()
    through = bench.gpu.download(inputs[0])
    np.testing.assert_allclose(through, inputs[1], rtol=1e-5, atol=5e-5)
    np.testing.assert_array_equal(bench.gpu.download(last_inputs)[0], through[-1])
    output, twin = bench.empty(rows, 256, dtype=dtype), np.empty((rows, 256), np.float32)
    part = partial(NormedInput, weight=None, first=512, width=256)
    bench.few.token_gate(gate[0], "gelu_tanh", part(inputs[0]), output)()
    FEW.token_gate(gate[1], "gelu_tanh", part(inputs[1]), twin)()
    bits = bench.check(output, twin)
    alone = bench.empty(1, 256, dtype=dtype)
    bench.few.token_gate(gate[0][rows - 1 :], "gelu_tanh", part(last_inputs), alone)()
    np.testing.assert_array_equal(bench.gpu.download(alone)[0], bits[-1])

    normed, residual = bench.normed(rows, 1536, 1536, "float32"), bench.both(rows, 1536, dtype="float32")
    total, twin, factor = bench.empty(rows, 1536), np.empty((rows, 1536), np.float32), bench.both(1, dtype="float32")
    bench.few.norm_residual(normed[0], residual[0], total, factor=factor[0])()
    FEW.norm_residual(normed[1], residual[1], twin, factor=factor[1])()
    bench.check(total, twin)


@DTYPES
@ROWS
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("residual", [None, "float32", "compute"])
@pytest.mark.parametrize(("outputs", "width"), [(330, 520), (2048, 2056)])
def test_linear_and_residual(bench: Bench, dtype, rows, scale, residual, outputs, width) -> None:
    x, twin_x = bench.both(rows, width)
    before, twin_before = (
        (None, None)
        if residual is None
        else bench.both(rows, outputs, dtype="float32" if residual == "float32" else None)
    )
    linear, twin_linear = bench.linear(outputs, width)
    results = []
    for kernels in (bench.few, bench.many):
        output, kept = bench.empty(rows, outputs), bench.empty(rows, outputs, dtype=dtype)
        kernels.linear_residual(x, linear, before, output, scale, Kept(kept))()
        results.append((bench.gpu.download(output), bench.gpu.download(kept)))
    expected, expected_kept = nans((rows, outputs)), nans((rows, outputs))
    MANY.linear_residual(twin_x, twin_linear, twin_before, expected, scale, Kept(expected_kept))()
    bench.check(output, expected)
    np.testing.assert_array_equal(results[1][1], to_bits(expected_kept, dtype))
    for few, many in zip(*results, strict=True):
        np.testing.assert_array_equal(few, many)


@DTYPES
@pytest.mark.parametrize("rows", [17, 32, 50, 64])
def test_many_rows(bench: Bench, dtype, rows) -> None:
    x, twin_x = bench.both(rows, 1032)
    linear, twin_linear = bench.linear(700, 1032)
    output, expected = bench.empty(rows, 700), nans((rows, 700))
    bench.many.linear(x, linear, output, 0.3)()
    MANY.linear(twin_x, twin_linear, expected, 0.3)()
    bench.check(output, expected)
    bench.many.linear_residual(x, linear, None, output, 0.3)()
    bench.check(output, expected)
    gated, expected = bench.empty(rows, 350, dtype=dtype), nans((rows, 350))
    bench.many.gate_up(x, linear, "gelu_tanh", gated)()
    MANY.gate_up(twin_x, twin_linear, "gelu_tanh", expected)()
    bench.check(gated, expected)


@DTYPES
@pytest.mark.parametrize("rows", [1, 10, 64])
@pytest.mark.parametrize(("first", "second"), [(512, 512), (520, 72), (40, 2000), (100 * 8, 8)])
@pytest.mark.parametrize("copies", [False, True])
def test_parts_of_a_norm_stand_side_by_side(bench: Bench, dtype, rows, first, second, copies) -> None:
    """With zeros behind the last; a part without a weight is a copy, rounded where it was float32."""
    parts = [bench.normed(rows, first, first, dtype), bench.normed(rows, second, second, "float32", offset=1.0)]
    if copies:
        parts = [tuple(each._replace(weight=None) for each in part) for part in parts]
    width = padded_columns(first + second)
    output, expected = bench.empty(rows, width, dtype=dtype), nans((rows, width))
    kept, expected_kept = bench.empty(rows, second, dtype=dtype), nans((rows, second))
    for (own, twin), column in zip(parts, (0, first), strict=True):
        last = column > 0
        bench.few.norm(own, output, column, Kept(kept) if last else None)()
        FEW.norm(twin, expected, column, Kept(expected_kept) if last else None)()
    found = bench.check(output, expected)
    assert not found[:, first + second :].any()
    np.testing.assert_array_equal(bench.gpu.download(kept), found[:, first : first + second])
    if copies:
        np.testing.assert_array_equal(found, to_bits(expected, dtype))


@DTYPES
@ROWS
@pytest.mark.parametrize("kind", ["float32", "compute"])
@pytest.mark.parametrize("width", [72, 896, 1032, 2048])
def test_two_inputs_side_by_side(bench: Bench, dtype, rows, kind, width) -> None:
    parts = [
        bench.normed(rows, width, width, each, offset=1.0) for each in (dtype, dtype if kind == "compute" else kind)
    ]
    linear, twin_linear = bench.linear(330, 2 * width)
    output, kept = bench.empty(rows, 330), bench.empty(rows, width, dtype=dtype)
    expected, expected_kept = nans((rows, 330)), nans((rows, width))
    bench.few.norm_linear([own for own, _ in parts], linear, output, 0.5, Kept(kept), next_early=False)()
    FEW.norm_linear([twin for _, twin in parts], twin_linear, expected, 0.5, Kept(expected_kept))()
    found, kept_bits = bench.check(output, expected), bench.check(kept, expected_kept)
    # The norms alone, then the layer of many rows.
    padded, many = bench.empty(rows, padded_columns(2 * width), dtype=dtype), bench.empty(rows, 330)
    for part, (own, _) in enumerate(parts):
        bench.few.norm(own, padded, part * width, Kept(kept) if part else None)()
    bench.many.linear(padded, linear, many, 0.5)()
    np.testing.assert_array_equal(bench.gpu.download(kept), kept_bits)
    np.testing.assert_array_equal(bench.gpu.download(many), found)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (16, 2048), (3, 5, 4104)])
def test_rows_are_scaled_in_float32(bench: Bench, dtype, shape) -> None:
    x, values = bench.both(*shape)
    output = bench.empty(*shape)
    bench.few.scale_rows(x, 45.25483399593904, output)()
    np.testing.assert_array_equal(bench.gpu.download(output), values * np.float32(45.25483399593904))
