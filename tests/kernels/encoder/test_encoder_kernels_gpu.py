"""The kernels of vision encoders on the GPU: against their twins, and the same bits however many rows there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_bits import from_bits, relative, to_bits
from encoder_cases import CASES, EXACT, Case, Compute, attention, first_of_each, nothing
from encoder_twin import NumpyEncoder
from gpu_device import device_copy

from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.encoder.contract import ACTIVATIONS, NO_ACTIVATION
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.errors import KernelError
from edgellm.kernels.prefill.linear import TILINGS, CudaPromptLinear

pytestmark = pytest.mark.gpu

#: Results are rounded to the dtype once: by half its spacing at most, 2^-11 and 2^-8 of a value. Weights of attention
#: are rounded, too. Twice the bound of one of them.
TOLERANCE = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_equals_its_twin(gpu, name: str, dtype: str) -> None:
    case = CASES[name]
    found, bits = case.run(gpu, CudaEncoder(gpu.kernel_module), dtype)
    expected = case.run_twin(NumpyEncoder(), dtype)
    is_wide = not isinstance(case.arguments[case.output], Compute)
    if name in EXACT:
        np.testing.assert_array_equal(found, expected if is_wide else from_bits(to_bits(expected, dtype), dtype))
        return
    if not expected.any():
        assert not found.any()
        return
    largest = 4.0 if name == "large_scores" else 1.0
    assert relative(found, expected) < (2e-6 if is_wide else largest * TOLERANCE[dtype])
    # Every element, too: a wrong one of many thousands is not seen in a norm of all.
    spread = np.abs(expected).max()
    assert np.abs(found - expected).max() < (2e-5 if is_wide else largest * 4 * TOLERANCE[dtype]) * spread
    assert bits.shape == expected.shape


def few_rows(case: Case, rows: int) -> Case:
    """The same of the first rows alone."""

    def cut(value):
        if isinstance(value, Compute):
            return Compute(cut(value.values))
        return value[:rows].copy() if isinstance(value, np.ndarray) and value.ndim > 1 else value

    kept = {"norm": (0, 5), "activate": (0, 2), "add_rows": (0, 1, 2), "product": (0, 3)}[case.kernel]
    return replace(case, arguments=tuple(cut(each) if n in kept else each for n, each in enumerate(case.arguments)))


@DTYPES
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kernel in ("norm", "product")])
def test_a_row_has_the_same_bits_among_fewer(gpu, name: str, dtype: str) -> None:
    kernels = CudaEncoder(gpu.kernel_module)
    _, bits = CASES[name].run(gpu, kernels, dtype)
    _, of_few = few_rows(CASES[name], 2).run(gpu, kernels, dtype)
    np.testing.assert_array_equal(bits[:2], of_few)


@DTYPES
@pytest.mark.parametrize("size", [64, 72, 80])
def test_every_tiling_gives_the_same_bits(gpu, size: int, dtype: str) -> None:
    kernels = CudaEncoder(gpu.kernel_module)
    for case in (attention(577, 577, 3, size), attention(320, 64, 2, size, first_of_each(320, 64))):
        (_, one), (_, two) = (case.run(gpu, kernels, dtype, tiles=tiles) for tiles in (1, 2))
        np.testing.assert_array_equal(one, two)


@DTYPES
@pytest.mark.parametrize("more", [1, 64, 300])
@pytest.mark.parametrize("size", [64, 72, 128])
def test_hidden_rows_behind_an_image_change_no_bit(gpu, size: int, more: int, dtype: str) -> None:
    rows, kernels = 200, CudaEncoder(gpu.kernel_module)
    padded = attention(rows + more, rows + more, 2, size, np.arange(rows + more) < rows)
    given = padded.arguments[0].values[:, :, :rows].copy()
    context = Compute(nothing(rows, 2 * size))
    _, with_mask = Case("attention", (Compute(given), rows, np.ones(rows, bool), size**-0.5, context)).run(
        gpu, kernels, dtype
    )
    _, alone = Case("attention", (Compute(given), rows, None, size**-0.5, context)).run(gpu, kernels, dtype)
    _, found = padded.run(gpu, kernels, dtype)
    np.testing.assert_array_equal(found[:rows], alone)
    np.testing.assert_array_equal(with_mask, alone)


@DTYPES
def test_a_window_has_the_same_bits_among_others(gpu, dtype: str) -> None:
    rows, window, kernels = 64 * 5, 64, CudaEncoder(gpu.kernel_module)
    visible = first_of_each(rows, window)
    case = attention(rows, window, 3, 80, visible)
    _, bits = case.run(gpu, kernels, dtype)
    for number in range(rows // window):
        own = slice(number * window, (number + 1) * window)
        heads = Compute(case.arguments[0].values[:, :, own].copy())
        alone = Case("attention", (heads, window, visible[own], 80**-0.5, Compute(nothing(window, 240))))
        np.testing.assert_array_equal(bits[own], alone.run(gpu, kernels, dtype)[1])


@DTYPES
@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 48, 72), (65, 1000, 592), (300, 4304, 1152)])
@pytest.mark.parametrize("kind", [*ACTIVATIONS, None])
def test_linear_layers_apply_activations_to_their_own_sums(
    gpu, kind: str | None, rows: int, width: int, columns: int, dtype: str
) -> None:
    random, kernels, linear = np.random.default_rng(rows), CudaEncoder(gpu.kernel_module), CudaPromptLinear
    of_rows, bias = linear(gpu.kernel_module, dtype), random.standard_normal(width, np.float32)
    of_rows.tiling = TILINGS[-1] if kind != "gelu" else None  # the smallest is compiled in the least time
    x = device_copy(gpu, to_bits(random.standard_normal((rows, columns), np.float32), dtype))
    matrix = random.standard_normal((width, columns), np.float32) * np.float32(3 * columns**-0.5)
    weights = LinearWeights(*(device_copy(gpu, to_bits(each, dtype)) for each in (matrix, bias)))
    sums, expected, found = gpu.empty((rows, width), "float32"), *(gpu.empty((rows, width), dtype) for _ in range(2))
    of_rows.linear(x, weights, sums)()
    if kind is None:
        kernels.copy_rows(sums, None, expected, 0)()
    else:
        kernels.activate(sums, ACTIVATIONS[kind], expected)()
    of_rows.activated(x, weights, NO_ACTIVATION if kind is None else ACTIVATIONS[kind], found)()
    np.testing.assert_array_equal(*(gpu.download(each).view(np.uint16) for each in (found, expected)))


def test_parts_side_by_side_and_sums_in_place(gpu) -> None:
    kernels = CudaEncoder(gpu.kernel_module)
    random = np.random.default_rng(0)
    parts = [random.standard_normal((6, width), np.float32) for width in (40, 24)]
    output = gpu.empty((6, 72), "float16")
    column = 0
    for part in parts:
        array = gpu.empty(part.shape, "float32")
        gpu.upload(array, part)
        kernels.copy_rows(array, None, output, column)()
        column += part.shape[1]
    expected = np.concatenate((*parts, np.zeros((6, 8), np.float32)), axis=1).astype(np.float16)
    np.testing.assert_array_equal(gpu.download(output), expected)
    values, others = gpu.empty((6, 40), "float32"), gpu.empty((6, 40), "float32")
    for array in (values, others):
        gpu.upload(array, parts[0])
    kernels.add_rows(values, others, values)()
    np.testing.assert_array_equal(gpu.download(values), 2 * parts[0])


def test_arrays_that_are_not_aligned_are_refused(gpu) -> None:
    memory = gpu.empty((100,), "float16")
    kernels, odd = CudaEncoder(gpu.kernel_module), memory[1:65].reshape(1, 64)
    with pytest.raises(KernelError, match="expected a multiple of 8 bytes"):
        kernels.activate(gpu.empty((1, 64), "float32"), ACTIVATIONS["gelu"], odd)
