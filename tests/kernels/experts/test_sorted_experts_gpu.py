"""Experts of many rows on the GPU: sorting equals the twin's, and each pair of a row and an expert has the bits that
the kernels of few rows give it, and those that the expert's own dense layer gives the row among a prompt's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_bits import to_bits
from expert_cases import ACTIVATIONS, dense_values, on_gpu, random_ids, random_layer
from experts_twin import NumpyExperts
from gpu_device import device_copy
from packed_weights import GGUF_FORMATS

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.experts.contract import (
    TILES,
    Activation,
    ExpertWeights,
    SortedPairs,
    rows_of_tiles,
    sorted_pairs,
    sorted_words,
)
from edgellm.kernels.experts.launcher import CudaExperts
from edgellm.kernels.experts.prompt_launcher import CudaSortedExperts, expert_tilings
from edgellm.kernels.prefill.linear import CudaPromptLinear

pytestmark = pytest.mark.gpu

#: Formats, experts, how many a row goes through, the sizes H and I: whole tiles, blocks and slices, and others.
CASES = [
    ("dense", 6, 3, 512, 256, "float16"),
    ("dense", 6, 3, 200, 24, "bfloat16"),
    ("int4", 6, 3, 2048, 768, "float16"),
    ("int4", 9, 2, 640, 136, "bfloat16"),
    ("int4 with zeros", 6, 3, 2048, 512, "float16"),
    ("int8", 5, 3, 1024, 768, "float16"),
    ("mxfp4", 4, 4, 2880, 96, "bfloat16"),
    *((kind, 5, 2, 512, 288, "float16") for kind in GGUF_FORMATS),
]
#: Of these every tiling is run, of the others one by turns: each is compiled.
EVERY_TILING = 3


def skewed_ids(experts: int, chosen: int, rows: int, seed: int = 0) -> np.ndarray:
    """Most rows choose the first experts; the last one is nobody's."""
    random, places = np.random.default_rng(seed), np.arange(experts - 1) / 2
    noise = random.gumbel(size=(rows, experts - 1)) - places
    return np.sort(np.argsort(-noise, axis=1)[:, :chosen], axis=1).astype(np.int32)


def room(gpu: Any, pairs: int, experts: int, tile: int) -> SortedPairs:
    """Numbers that no kernel writes."""
    words = device_copy(gpu, np.full(sorted_words(pairs, experts, tile), -7, np.int32))
    return sorted_pairs(words, pairs, experts, tile)


def sorted_on(gpu: Any, kernels: CudaSortedExperts, ids: np.ndarray, experts: int, tile: int) -> SortedPairs:
    found, given = room(gpu, ids.size, experts, tile), device_copy(gpu, ids)  # of a launch, which has addresses alone
    kernels.sort(given, experts, found)()
    gpu.synchronize()  # before the ids go
    return found


def unwritten(gpu: Any, rows: int, width: int, dtype: str) -> DeviceArray:
    """Not a number."""
    values = np.full((rows, width), np.nan, np.float32)
    return device_copy(gpu, values if dtype == "float32" else to_bits(values, dtype))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("experts", "chosen", "rows"),
    [(6, 3, 1), (2, 1, 40), (32, 4, 300), (128, 8, 512), (128, 8, 4000), (256, 10, 2048), (512, 10, 700)],
)
def test_sorting_equals_the_twin(gpu, experts: int, chosen: int, rows: int, tile: int) -> None:
    """What lies behind the tiles is not written; ids that no expert has are left out."""
    kernels = CudaSortedExperts(gpu.kernel_module, "float16")
    every = [random_ids(experts, chosen, rows)]
    if chosen < experts - 1:
        every.append(skewed_ids(experts, chosen, rows))
    every.append(every[0].copy())
    every[-1][rows // 2, -1] = experts
    for ids in every:
        found = sorted_on(gpu, kernels, ids, experts, tile)
        expected = SortedPairs(*(np.full(each.shape, -7, np.int32) for each in found))
        NumpyExperts().sort(ids, experts, expected)()
        for name, one, other in zip(SortedPairs._fields, found, expected, strict=True):
            np.testing.assert_array_equal(gpu.download(one), other, err_msg=name)


def layers_of(
    gpu: Any, kind: str, experts: int, rows: int, columns: int, dtype: str
) -> tuple[ExpertWeights, np.ndarray, np.ndarray]:
    """A layer on the GPU, its values and biases."""
    weight = random_layer(experts, rows, columns, dtype, kind, rows)
    bias = np.random.default_rng(3).standard_normal((experts, rows), np.float32) / 8
    return on_gpu(gpu, weight, bias, experts, dtype), dense_values(weight, dtype), bias


def by_dense_prompts(
    gpu: Any, dtype: str, values: np.ndarray, bias: np.ndarray, x: np.ndarray, ids: np.ndarray, gated: bool
) -> np.ndarray:
    """What each expert as a dense layer gives of all rows of x [R, K], of those that chose it: [R, k, width]."""
    kernels, experts = CudaPromptLinear(gpu.kernel_module, dtype), len(bias)
    matrices, given = values.reshape(experts, -1, values.shape[1]), device_copy(gpu, to_bits(x, dtype))
    width = matrices.shape[1] // 2 if gated else matrices.shape[1]
    output = gpu.empty((len(x), width), dtype if gated else "float32")
    found: np.ndarray | None = None
    for expert in range(experts):
        weight, own = (
            device_copy(gpu, to_bits(np.ascontiguousarray(each[expert]), dtype)) for each in (matrices, bias)
        )
        if gated:
            kernels.gate_up(given, LinearWeights(weight, own), "silu", output)()
        else:
            kernels.linear(given, LinearWeights(weight, own), output)()
        results = gpu.download(output)
        found = np.empty((*ids.shape, width), results.dtype) if found is None else found
        row, place = np.nonzero(ids == expert)
        found[row, place] = results[row]
    assert found is not None
    return found


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("kind", "experts", "chosen", "hidden", "size", "dtype"), CASES)
def test_pairs_have_the_bits_of_few_rows_and_of_dense_prompts(
    gpu, kind: str, experts: int, chosen: int, hidden: int, size: int, dtype: str, skewed: bool
) -> None:
    """An expert that nobody chose, and one of many tiles."""
    rows, case = 150, CASES.index((kind, experts, chosen, hidden, size, dtype))
    few, many = CudaExperts(gpu.kernel_module, dtype), CudaSortedExperts(gpu.kernel_module, dtype)
    ids = (skewed_ids if skewed and chosen < experts - 1 else random_ids)(experts, chosen, rows)
    random, given = np.random.default_rng(4), device_copy(gpu, ids)
    x, y = random.standard_normal((rows, hidden), np.float32), random.standard_normal((rows, chosen * size), np.float32)
    x_there, y_there = (device_copy(gpu, to_bits(each, dtype)) for each in (x, y))
    first, second = (layers_of(gpu, kind, experts, *each, dtype) for each in ((2 * size, hidden), (hidden, size)))
    expected = {}
    for how in ACTIVATIONS:
        inner = unwritten(gpu, rows, chosen * 2 * size // how.sums, dtype)
        few.gate_up(x_there, given, first[0], how, inner)()
        expected[how] = gpu.download(inner)
    outputs = unwritten(gpu, rows, chosen * hidden, "float32")
    few.down(y_there, given, second[0], outputs)()
    downs = gpu.download(outputs)
    if not skewed:
        dense = by_dense_prompts(gpu, dtype, first[1], first[2], x, ids, gated=True)
        np.testing.assert_array_equal(dense.reshape(rows, -1), expected[Activation()])
    tilings = [own for tile in TILES for own in expert_tilings(tile, many.gpu, first[0].layout)]
    if case >= EVERY_TILING:
        tilings = [tilings[case % len(tilings)]]
    for own in tilings:
        many.tiling, pairs = own, sorted_on(gpu, many, ids, experts, own.rows)
        for how, wanted in expected.items():
            inner = unwritten(gpu, *wanted.shape, dtype)
            many.sorted_gate_up(x_there, pairs, first[0], how, inner)()
            np.testing.assert_array_equal(gpu.download(inner), wanted, err_msg=f"{own} {how}")
        outputs = unwritten(gpu, rows, chosen * hidden, "float32")
        many.sorted_down(y_there, pairs, second[0], outputs)()
        np.testing.assert_array_equal(gpu.download(outputs), downs, err_msg=str(own))


@pytest.mark.parametrize("kind", ["dense", "int4"])
def test_a_prompt_has_the_bits_of_its_parts(gpu, kind: str) -> None:
    """Of 2,000 rows with 128 experts, in the tiles that are chosen; and as dense layers give them, without biases."""
    rows, experts, chosen, hidden, size = 2000, 128, 8, 256, 128
    many, ids = CudaSortedExperts(gpu.kernel_module, "float16"), random_ids(experts, chosen, rows)
    weight = random_layer(experts, 2 * size, hidden, "float16", kind, 1)
    layer = on_gpu(gpu, weight, None, experts, "float16")
    x = np.random.default_rng(2).standard_normal((rows, hidden), np.float32)
    x_there = device_copy(gpu, to_bits(x, "float16"))

    def computed(own: slice) -> np.ndarray:
        count = len(ids[own])
        pairs = sorted_on(gpu, many, ids[own].copy(), experts, rows_of_tiles(count * chosen, experts))
        inner = unwritten(gpu, count, chosen * size, "float16")
        many.sorted_gate_up(x_there[own], pairs, layer, Activation(), inner)()
        return gpu.download(inner)

    whole = computed(slice(0, rows))
    for own in (slice(0, 1), slice(1, 100), slice(100, 700), slice(700, rows)):
        np.testing.assert_array_equal(computed(own), whole[own])
    zeros = np.zeros((experts, 2 * size), np.float32)
    values = dense_values(weight, "float16")
    dense = by_dense_prompts(gpu, "float16", values, zeros, x, ids, gated=True)
    np.testing.assert_array_equal(dense.reshape(rows, -1), whole)


def test_a_captured_prompt_serves_any_choice(gpu) -> None:
    rows, experts, chosen, hidden, size = 100, 6, 3, 256, 64
    many, tile = CudaSortedExperts(gpu.kernel_module, "float16"), 32
    layer = layers_of(gpu, "int4", experts, 2 * size, hidden, "float16")[0]
    x = device_copy(gpu, np.random.default_rng(7).standard_normal((rows, hidden)).astype(np.float16))
    given, inner = device_copy(gpu, random_ids(experts, chosen, rows)), unwritten(gpu, rows, chosen * size, "float16")
    pairs = room(gpu, rows * chosen, experts, tile)
    launches = many.sort(given, experts, pairs), many.sorted_gate_up(x, pairs, layer, Activation(), inner)
    for launch in launches:
        launch.overlap_previous()

    def both() -> None:
        for launch in launches:
            launch()

    both()
    graph = gpu.capture(both, "sorted experts")
    for ids in (random_ids(experts, chosen, rows, 1), skewed_ids(experts, chosen, rows, 2)):
        gpu.upload(given, ids)
        graph()
        found, again = gpu.download(inner), unwritten(gpu, rows, chosen * size, "float16")
        CudaExperts(gpu.kernel_module, "float16").gate_up(x, given, layer, Activation(), again)()
        np.testing.assert_array_equal(found, gpu.download(again))
