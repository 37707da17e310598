"""The CUDA kernels of recurrent layers against their twins, and their bits: the same in chains, trees, chunks, commits
and batches. Needs a GPU and pycuda."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_device import assert_equals_twin, cuda_device, on_device
from recurrent_cases import (
    CONVOLUTIONS,
    DELTA_SHAPES,
    ConvolutionCase,
    DeltaCase,
    device_run,
    downloaded,
    noise,
    trees,
    twin_run,
)

from edgellm.kernels.launch import KernelModule
from edgellm.kernels.recurrent.contract import (
    AcceptedPath,
    GatedHeadNorm,
    GatedHeads,
    GroupNorm,
    LayerColumns,
    LayerMatrices,
    PartNorm,
)
from edgellm.kernels.recurrent.launcher import CudaRecurrent
from edgellm.kernels.recurrent.twin import NumpyRecurrent

pytestmark = pytest.mark.gpu

TWIN = NumpyRecurrent()
HALVES = ["float16", "bfloat16"]


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels for it."""
    with cuda_device() as device:
        device.recurrent = CudaRecurrent(KernelModule(device.gpu, device.stream))
        yield device


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(19)


class Called:
    """The kernels as functions that compute at once."""

    def __init__(self, kernels) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str):
        return lambda *arguments: getattr(self._kernels, name)(*arguments)()


def assert_twins_bits(gpu, kernel: str, *arguments) -> None:
    assert_equals_twin(gpu, Called(gpu.recurrent), Called(TWIN), kernel, *arguments)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("tokens", [1, 37, 64])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_have_their_twins_bits(gpu, rng, kind, tokens, dtype) -> None:
    channels, width, gated, silu, bias = kind
    case = ConvolutionCase(channels, width, tokens, gated, silu, bias, 3, dtype)
    assert_twins_bits(gpu, "short_convolution", *case.arguments())
    assert_twins_bits(gpu, "short_convolution", *case.arguments(trees(rng, 3, tokens, "random")))
    for counts in ([tokens] * 3, [tokens, 0, tokens // 2], [1, 2, 0]):
        assert_twins_bits(gpu, "short_convolution", *case.arguments(counts=np.minimum(counts, tokens)))
    case.check(device_run(gpu, gpu.recurrent), rng)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_columns_are_committed_as_by_the_twin(gpu, rng, width) -> None:
    layers = [LayerColumns(noise(rng, 3, 150, width - 1), noise(rng, 3, 9, 150)) for _ in range(130)]  # two launches
    layers.append(LayerColumns(noise(rng, 3, 64, width - 1), noise(rng, 3, 9, 64)))  # and one of another size
    indices = np.array([[0, 2, 5, 8, -1], [0, 3, -1, -1, -1], [-1] * 5], np.int32)
    assert_twins_bits(gpu, "commit_columns", layers, AcceptedPath(indices, np.array([4, 2, 0], np.int32)))


@pytest.mark.parametrize("scans", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize(("heads", "sizes"), DELTA_SHAPES)
def test_matrices_are_their_twins_and_have_the_same_bits_everywhere(
    gpu, rng, heads, sizes, tokens, dtype, scans
) -> None:
    case, run = DeltaCase(heads, sizes, tokens, dtype=dtype, scans=scans), device_run(gpu, gpu.recurrent)
    parents = [trees(rng, 2, tokens, kind) for kind in ("random", "binary")]
    for arguments in (case.arguments(), *map(case.arguments, parents), case.arguments(counts=[tokens, tokens // 2])):
        for found, expected in zip(run(case.kernel, *arguments), twin_run(case.kernel, *arguments), strict=True):
            if isinstance(found, np.ndarray) and found.dtype == np.float32:
                assert abs(found - expected).max() <= 3e-6 * max(1, abs(expected).max())
        kept = arguments[6]
        if kept is not None:  # is computed alike
            found = run(case.kernel, *arguments)[6]
            np.testing.assert_array_equal(found, twin_run(case.kernel, *arguments)[6])
    case.check(run, rng)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize(("columns", "groups"), [(96, 1), (96, 3), (7680, 8), (8192, 1)])
def test_norms_behind_gates_have_their_twins_bits(gpu, rng, columns, groups, dtype) -> None:
    compute = "float16" if dtype == "float32" else dtype
    value, gate = noise(rng, 2, 3, columns), noise(rng, 2, 3, columns + 9, dtype=dtype)
    norm = GroupNorm(noise(rng, columns, dtype=compute), 1e-5, 5, groups)
    assert_twins_bits(gpu, "gated_group_norm", value, gate, norm, noise(rng, 2, 3, columns, dtype=compute))
    part, squares = (5, groups - 1), abs(noise(rng, 2, 3, 8)) * columns  # the same of a part that ranks share
    assert_twins_bits(gpu, "gated_part", value, gate, *part, None, noise(rng, 2, 3, 8), None)
    of_part = PartNorm(norm.weight, 1e-5, 2 * columns)
    assert_twins_bits(gpu, "gated_part", value, gate, *part, of_part, squares, noise(rng, 2, 3, columns, dtype=compute))


def test_long_chunks_and_many_layers_equal_their_twins(gpu, rng) -> None:
    case, run = DeltaCase((2, 4), (128, 128), 700, 1, "float16"), device_run(gpu, gpu.recurrent)
    whole, twin = (each("gated_delta", *case.arguments(counts=[690])) for each in (run, twin_run))
    for place in (3, 4):
        assert abs(whole[place] - twin[place]).max() <= 1e-5 * abs(twin[place]).max()
    kept = run("gated_delta", *case.arguments())
    np.testing.assert_array_equal(kept[4][:, :690], whole[4][:, :690])
    path = AcceptedPath(np.arange(690, dtype=np.int32)[None], np.array([690], np.int32))
    layers = [LayerMatrices(case.matrix, case.rows, kept[6])] * 1
    ((layer,), _) = run("commit_matrices", layers, path)
    np.testing.assert_array_equal(layer.matrix, whole[3])
    small = DeltaCase((1, 2), (16, 8), 3, 2)
    kept = run("gated_delta", *small.arguments())[6]
    many = [LayerMatrices(noise(rng, 2, 2, 8, 16), small.rows, kept) for _ in range(131)]
    path = AcceptedPath(np.array([[0, 2], [0, -1]], np.int32), np.array([2, 1], np.int32))
    for found, expected in zip(
        run("commit_matrices", many, path)[0], twin_run("commit_matrices", many, path)[0], strict=True
    ):
        np.testing.assert_allclose(found.matrix, expected.matrix, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 5])
def test_a_sequence_has_the_same_bits_in_every_batch(gpu, slots) -> None:
    run, case = device_run(gpu, gpu.recurrent), DeltaCase((2, 4), (128, 64), 9, 8)
    whole = run("gated_delta", *case.arguments())
    part = [
        array[:slots].copy() if place != 2 and array is not None else array
        for place, array in enumerate(case.arguments())
    ]
    for place in (4, 6):
        np.testing.assert_array_equal(run("gated_delta", *part)[place], whole[place][:slots])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_gates_and_norms_have_their_twins_bits(gpu, rng, dtype, is_mixed) -> None:
    other = "float32" if is_mixed else dtype
    for size, heads in ((8, 1), (24, 5), (128, 16), (256, 3)):
        value, gate = noise(rng, 2, 3, heads * size), noise(rng, 2, 3, heads * size + 9, dtype=other)
        weight, output = noise(rng, size, dtype=dtype), noise(rng, 2, 3, heads * size, dtype=dtype)
        assert_twins_bits(gpu, "gated_norm", value, gate, GatedHeadNorm(weight, 1e-6, 5), output)
    heads, value = GatedHeads(3, 2, 24), noise(rng, 2, 3, 10 * 24, dtype=other)
    assert_twins_bits(gpu, "separate_gates", value, heads, noise(rng, 2, 3, 7 * 24, dtype=other))
    assert_twins_bits(gpu, "sigmoid_gate", value, heads, noise(rng, 2, 3, 3 * 24, dtype=dtype))


def test_kernels_that_overlap_give_what_they_give_one_after_the_other(gpu, rng) -> None:
    """A layer in a captured step, many times over: convolution, delta rule, norm, both commits."""
    tokens, slots, heads, size = 4, 2, 4, 128
    convolution = ConvolutionCase(3 * heads * size, 4, tokens, silu=True, slots=slots)
    delta = DeltaCase((heads, heads), (size, size), tokens, slots)
    norm = GatedHeadNorm(noise(rng, size, dtype="float16"), 1e-6, 0)
    gate, normed = noise(rng, slots, tokens, heads * size), noise(rng, slots, tokens, heads * size, dtype="float16")
    path = AcceptedPath(np.array([[0, 1], [0, 3]], np.int32), np.array([2, 2], np.int32))

    def launches(kernels, convolved, walked, normed, path):
        walked = [convolved[4], *walked[1:]]
        return [
            kernels.short_convolution(*convolved),
            kernels.gated_delta(*walked),
            kernels.gated_norm(walked[4], *normed),
            kernels.commit_columns([LayerColumns(convolved[3], convolved[6])], path),
            kernels.commit_matrices([LayerMatrices(walked[3], walked[0], walked[6])], path),
        ]

    given = [convolution.arguments(), delta.arguments(), [gate, norm, normed], path]
    results = []
    for overlaps in (False, True):
        device = on_device(gpu, given)
        prepared = launches(gpu.recurrent, *device)
        for launch in prepared if overlaps else ():
            launch.overlap_previous()
        for _ in range(20):
            for launch in prepared:
                launch()
        results.append(downloaded(gpu, device, given))
    one, other = results
    for place, arrays in enumerate(((3, 4, 6), (3, 4, 6), (2,))):
        for array in arrays:
            assert np.isfinite(one[place][array].astype(np.float32)).all()
            np.testing.assert_array_equal(one[place][array], other[place][array])
