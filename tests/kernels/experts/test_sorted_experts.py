"""Experts of many rows in NumPy: sorting against a loop, products against those of each pair; and the modules."""

from __future__ import annotations

import numpy as np
import pytest
from expert_cases import ACTIVATIONS, absent_experts, random_ids, random_layer
from experts_twin import NumpyExperts
from packed_weights import GGUF_FORMATS

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.kernels import nvrtc
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode.contract import LinearWeights
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.experts.contract import (
    TILES,
    Activation,
    ExpertWeights,
    SortedPairs,
    most_tiles,
    rows_of_tiles,
    sorted_pairs,
    sorted_words,
)
from edgellm.kernels.experts.prompt_launcher import CudaSortedExperts, expert_tilings
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat

#: Experts, how many a row goes through, rows: fewer rows than experts, and more; as published.
SIZES = [(5, 3, 1), (6, 3, 40), (128, 8, 12), (32, 4, 300), (256, 8, 70), (16, 1, 33)]


def room(pairs: int, experts: int, tile: int) -> SortedPairs:
    """Numbers that no kernel writes."""
    return sorted_pairs(np.full(sorted_words(pairs, experts, tile) + 3, -7, np.int32), pairs, experts, tile)


def chosen(experts: int, count: int, rows: int, skewed: bool) -> np.ndarray:
    """Ids [rows, count]; `skewed`: the first expert is everybody's."""
    ids = random_ids(experts, count, rows)
    if skewed:
        ids[:, 0] = 0
        ids[:, 1:] = np.maximum(ids[:, 1:], np.arange(1, count))
    return ids


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("experts", "count", "rows"), SIZES)
def test_pairs_are_sorted_as_by_a_loop(experts: int, count: int, rows: int, tile: int, skewed: bool) -> None:
    ids = chosen(experts, count, rows, skewed)
    found = room(ids.size, experts, tile)
    NumpyExperts().sort(ids, experts, found)()
    tiles: list[tuple[int, list[tuple[int, int]]]] = []
    for expert in range(experts):
        own = [(row, row * count + place) for row in range(rows) for place in range(count) if ids[row, place] == expert]
        own += [(-1, -1)] * (-len(own) % tile)
        tiles += [(expert, own[first : first + tile]) for first in range(0, len(own), tile)]
    assert found.tiles.tolist() == [len(tiles)] and len(tiles) <= most_tiles(ids.size, experts, tile)
    assert found.expert[: len(tiles)].tolist() == [expert for expert, _ in tiles]
    pairs = [pair for _, own in tiles for pair in own]
    assert list(zip(found.rows.tolist(), found.pairs.tolist(), strict=True))[: len(pairs)] == pairs
    assert (found.pairs[len(pairs) :] == -7).all() and (found.expert[len(tiles) :] == -7).all()


def test_there_is_room_for_every_choice() -> None:
    """The most tiles are those of experts that have one pair more than full tiles."""
    for tile, experts in ((16, 4), (32, 7)):
        counts = [tile + 1] * experts
        ids = np.repeat(np.arange(experts), counts)[:, None].astype(np.int32)
        found = room(ids.size, experts, tile)
        NumpyExperts().sort(ids, experts, found)()
        assert found.tiles[0] == 2 * experts == most_tiles(ids.size, experts, tile)


def test_ids_that_no_expert_has_are_in_no_tile() -> None:
    ids = np.array([[0, 9], [-1, 1]], np.int32)
    found = room(4, 2, 16)
    NumpyExperts().sort(ids, 2, found)()
    assert found.tiles[0] == 2 and found.pairs[[0, 16]].tolist() == [0, 3]
    assert (found.pairs[:32] >= 0).sum() == 2


@pytest.mark.parametrize("how", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["dense", "int4 with zeros"])
def test_products_are_those_of_each_pair(kind: str, how: Activation) -> None:
    experts, count, rows, hidden, size = 6, 3, 50, 32, 16
    random, ids = np.random.default_rng(1), random_ids(experts, count, rows)
    layers = []
    for out, inside in ((how.sums * size, hidden), (hidden, size)):
        weight = random_layer(experts, out, inside, "float16", kind, out)
        layers.append(ExpertWeights(LinearWeights(weight, random.standard_normal((experts, out), np.float32)), experts))
    x, few, many = random.standard_normal((rows, hidden), np.float32), NumpyExperts(), NumpyExperts()
    inner, outputs = np.zeros((2, rows, count * size), np.float32), np.zeros((2, rows, count * hidden), np.float32)
    few.gate_up(x, ids, layers[0], how, inner[0])()
    few.down(inner[0], ids, layers[1], outputs[0])()
    own = room(ids.size, experts, 16)
    many.sort(ids, experts, own)()
    many.sorted_gate_up(x, own, layers[0], how, inner[1])()
    many.sorted_down(inner[0], own, layers[1], outputs[1])()
    np.testing.assert_allclose(inner[1], inner[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_arrays_of_other_pairs_are_refused() -> None:
    kernels, ids = NumpyExperts(), np.zeros((40, 2), np.int32)
    with pytest.raises(KernelError, match=r"sorted pairs have .* expected \[96, 96, 6, 1\] of int32, for 80 pairs"):
        kernels.sort(ids, 2, room(96, 2, 16))
    with pytest.raises(KernelError, match="80 pairs with 513 experts in tiles of 16 rows; expected up to 512 experts"):
        kernels.sort(ids, 513, room(80, 513, 16))
    with pytest.raises(KernelError, match="in tiles of 8 rows"):
        kernels.sort(ids, 2, SortedPairs(*(np.zeros(size, np.int32) for size in (80, 80, 10, 1))))
    weights = ExpertWeights(LinearWeights(np.zeros((2 * 16, 8), np.float32)), 2)
    with pytest.raises(KernelError, match="for 40 pairs with 2 experts"):
        kernels.sorted_down(np.zeros((20, 16), np.float32), room(80, 2, 16), weights, np.zeros((20, 32), np.float32))


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    sizes = [rows_of_tiles(rows * 8, 128) for rows in (65, 256, 512, 1024, 4000)]
    assert sizes == [16, 32, 32, 64, 64]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("architecture", SHARED_MEMORY)
def test_every_device_has_tilings_of_every_size(architecture: str, tile: int) -> None:
    """The largest blocks of packed weights that there are, too."""
    gpu = Capacity(16, SHARED_MEMORY[architecture], architecture=architecture)
    layouts = [DeviceLayout(GGUF_FORMATS[kind], 64, 256, dtype="float16") for kind in GGUF_FORMATS]
    layouts.append(DeviceLayout(WeightFormat("int8", 16, True, "float32"), 64, 256, dtype="float16"))
    assert max(layout.block_bytes for layout in layouts) == 1536
    for layout in (None, *layouts):
        for tiling in (found := expert_tilings(tile, gpu, layout)):
            assert tiling.shared_bytes(tiling.stages(gpu)) <= gpu.shared_limit and tiling.rows == tile
        assert found


def asked(architecture: str, dtype: str, kinds: tuple[str, ...], rows: int) -> AbsentModule:
    """A GPU that noted what prompts of so many rows ask for, which also counts their shared memory."""
    module = AbsentModule(absent_gpu(architecture, 16, SHARED_MEMORY[architecture]))
    kernels = CudaSortedExperts(module, dtype)  # type: ignore[arg-type]

    def array(*shape: int, kind: str = dtype) -> DeviceArray:
        return DeviceArray(1 << 20, shape, kind)

    pairs = rows * 8
    tile = rows_of_tiles(pairs, 128)
    own = sorted_pairs(array(sorted_words(pairs, 128, tile), kind="int32"), pairs, 128, tile)
    kernels.sort(array(rows, 8, kind="int32"), 128, own)
    for kind in kinds:
        both = absent_experts(kind, dtype, 128)
        for how in ACTIVATIONS:
            kernels.sorted_gate_up(array(rows, 2048), own, both[0], how, array(rows, 8 * 1536 // how.sums))
        kernels.sorted_down(array(rows, 8 * 768), own, both[1], array(rows, 8 * 2048, kind="float32"))
    return module


@pytest.mark.parametrize(
    ("architecture", "dtype", "kinds", "rows"),
    [
        pytest.param("sm_87", "float16", ("int4",), 512, marks=pytest.mark.slow),
        ("compute_90", "bfloat16", ("dense",), 128),  # as far as PTX, in a third of the time
        *(
            pytest.param(name, "float16", ("dense", "int4", *GGUF_FORMATS), rows, marks=pytest.mark.slow)
            for name in ("sm_87", "sm_90", "sm_110", "sm_120")
            for rows in (128, 512, 4000)
        ),
    ],
)
def test_modules_compile_within_the_shared_memory_of_each_device(
    architecture: str, dtype: str, kinds: tuple[str, ...], rows: int
) -> None:
    try:
        nvrtc.find_nvrtc()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    sources = asked(architecture.replace("compute", "sm"), dtype, kinds, rows).sources
    assert len(sources) == 1 + 5 * len(kinds)
    for source in sources:
        assert compile_module(source, architecture).code.startswith((b"\x7fELF", b"//"))
