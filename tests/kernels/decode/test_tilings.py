"""Which tiles the linear layers of large verify steps get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from absent_gpu import GPUS

from edgellm.kernels.decode.tilings import (
    WARPS,
    Capacity,
    DirectTiling,
    GroupTiling,
    Tiling,
    direct_tilings,
    fastest_tiling,
    slices_end_every,
    tilings,
)

MATRICES = [(3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (6, 40)]


@pytest.mark.parametrize("count", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", GPUS)
def test_a_tiling_fits_every_gpu(name: str, adapted: bool, gated: bool, count: int) -> None:
    gpu = GPUS[name]
    for rows, columns in MATRICES:
        tiling = min(tilings(count, gpu, gated, adapted), key=lambda tiling: tiling.clocks(rows, columns, gpu))
        assert tiling.rows == (16 if count <= 16 else 32 if count <= 32 else 64)
        stages = tiling.stages(gpu, adapted)
        assert stages >= 3
        assert tiling.shared_bytes(stages, adapted) <= gpu.shared_limit
        assert tiling.splits == 1 or gpu.has_clusters
        assert tiling.row_tiles * 16 * tiling.row_warps == tiling.rows
        assert tiling.column_tiles * 8 * (WARPS // tiling.row_warps) == tiling.weight_rows
        assert not (gated and tiling.column_tiles % 2)
        blocks, splits, _ = tiling.grid(rows, gpu)
        assert splits == tiling.splits
        assert blocks <= gpu.multiprocessors if splits == 1 else blocks * tiling.weight_rows >= rows


@pytest.mark.parametrize("count", [1, 16, 17, 40, 64])
@pytest.mark.parametrize("shared_limit", [166_912, 101_376])
@pytest.mark.parametrize("gated", [False, True])
def test_direct_tilings_fit(shared_limit: int, count: int, gated: bool) -> None:
    gpu = Capacity(16, shared_limit, False, "sm_87")
    found = direct_tilings(count, gpu, gated)
    for tiling in found:
        assert count <= tiling.rows < count + 16
        assert tiling.depth >= 3
        assert not (gated and tiling.weight_tiles % 2)
        for rows, columns in MATRICES:
            stages = tiling.stages(columns, gpu)
            assert tiling.shared_bytes(stages) <= gpu.shared_limit
            assert tiling.grid(rows, gpu)[0] <= gpu.multiprocessors
            if isinstance(tiling, DirectTiling):
                stay = stages == -(-columns // (32 * tiling.chunk_steps))
                assert stay or (3 <= stages <= 4 and tiling.depth <= (stages - 2) * tiling.chunk_steps)
    assert sum(isinstance(tiling, DirectTiling) for tiling in found) >= 2
    many = direct_tilings(count, GPUS["RTX 4090"], gated)
    assert many
    assert all(isinstance(tiling, GroupTiling) for tiling in many)
    assert not direct_tilings(count, GPUS["Thor"], gated)
    overlapping = direct_tilings(count, GPUS["H200"], gated)
    assert bool(overlapping) == (count <= 32)
    for tiling in overlapping:
        assert isinstance(tiling, GroupTiling)
        assert tiling.blocks * tiling.shared_bytes(tiling.depth) <= GPUS["H200"].shared_limit
        assert not (gated and tiling.weight_tiles % 2)


@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_an_h200_takes_the_tiles_that_were_found_fastest(count: int) -> None:
    """Weight tiles and depth for shapes of Llama-1B, its draft and Llama-8B; None where clusters were faster."""
    found = {(3072, 2048): (3, 8), (16_384, 2048): (8, 4), (3072, 4096): (3, 16), (2048, 6144): (2, 16)}
    found |= {(6144, 4096): (3, 16), (128_256, 2048): None, (28_672, 4096): None}
    if count == 32:
        found = {(3072, 2048): (3, 6), (2048, 2048): (2, 6), (16_384, 2048): (8, 3), (2048, 8192): None}
    if count == 64:
        found = dict.fromkeys(MATRICES)
    for matrix, expected in found.items():
        tiling = fastest_tiling(count, *matrix, GPUS["H200"], matrix[0] in (16_384, 28_672))
        assert (None if isinstance(tiling, Tiling) else (tiling.weight_tiles, tiling.depth)) == expected, matrix


@pytest.mark.parametrize("count", [8, 16, 32, 64])
def test_many_multiprocessors_without_clusters_share_k_among_warps_where_tiles_are_few(count: int) -> None:
    gpu = GPUS["RTX 4090"]
    for matrix in ((3072, 2048), (2048, 2048), (2048, 8192)):
        assert isinstance(fastest_tiling(count, *matrix, gpu), GroupTiling)
    assert isinstance(fastest_tiling(count, 16_384, 2048, gpu, gated=True), Tiling)
    assert isinstance(fastest_tiling(count, 128_256, 2048, gpu), Tiling)


def test_slices_end_where_they_are_said_to() -> None:
    for columns, every in ((2048, 4), (1536, 1), (3072, 2), (14_336, 4), (8, 1)):
        assert slices_end_every(columns) == every


def test_a_second_block_finds_room_where_kernels_overlap() -> None:
    for tiling in tilings(32, GPUS["H200"]):
        shared = tiling.shared_bytes(tiling.stages(GPUS["H200"]))
        assert shared * tiling.resident(GPUS["H200"]) <= 228 * 1024 - 2048
        assert tiling.resident(GPUS["Orin"]) == 1


def test_few_multiprocessors_take_tiles_that_come_out_even_and_share_none() -> None:
    for matrix in MATRICES[:4]:
        tiling = fastest_tiling(16, *matrix, GPUS["Orin"], adapted=True)
        assert tiling.splits == 1
        assert tiling.tiles(matrix[0]) % 16 == 0


@pytest.mark.parametrize("count", [16, 32, 64])
def test_few_multiprocessors_take_the_direct_tiles_that_were_found_fastest(count: int) -> None:
    """In 16 multiprocessors of an H200: weight rows and warps, for Llama-1B's shapes."""
    narrow = (128, 4 if count == 16 else 8)
    for matrix, found in zip(MATRICES[:5], ((192, 8), narrow, (256, 8), narrow, (256, 8)), strict=True):
        tiling = fastest_tiling(count, *matrix, GPUS["Orin"], matrix[0] == 16_384)
        assert isinstance(tiling, DirectTiling)
        assert (tiling.weight_rows, tiling.warps) == found


def test_many_multiprocessors_share_a_small_matrix() -> None:
    assert fastest_tiling(64, 2048, 8192, GPUS["H200"]).splits == 4
    assert fastest_tiling(64, 128_256, 2048, GPUS["H200"]).splits == 1


def test_an_unknown_gpu_is_taken_for_the_one_before_it() -> None:
    assert Capacity(16, 166_912, False, "compute_88").speeds == GPUS["Orin"].speeds
    assert Capacity(16, 166_912, True, "sm_130").speeds == Capacity(48, 101_376, True, "sm_121").speeds


def test_where_nothing_fits_the_smallest_is_left() -> None:
    """Whose launch then says what is missing."""
    gpu = Capacity(16, 24_576, True, "sm_90")
    (tiling,) = tilings(64, gpu)
    assert tiling.shared_bytes(tiling.stages(gpu)) > gpu.shared_limit


def test_pages_that_fitted_constants_name_are_there(repository: Path) -> None:
    text = (repository / "kernels" / "fitted.json").read_text("utf-8")
    pages = set(re.findall(r"tools/[\w/-]+\.md(?:\.xz)?(?! up to commit)", text))
    assert len(pages) > 5 and not [page for page in pages if not (repository / page).is_file()]
