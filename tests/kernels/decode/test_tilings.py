"""Which tiles the linear layers of large verify steps get."""

from __future__ import annotations

import pytest

from edgellm.kernels.decode.tilings import TiledGpu, fastest_tiling, tilings

GPUS = {
    "H200": TiledGpu(132, 232_448, has_clusters=True),
    "Thor": TiledGpu(20, 232_448, has_clusters=True),
    "Orin": TiledGpu(16, 166_912, has_clusters=False),
    "RTX 4090": TiledGpu(128, 101_376, has_clusters=False),
    "RTX 5090": TiledGpu(170, 101_376, has_clusters=True),
}
MATRICES = [(3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (5, 40)]


@pytest.mark.parametrize("count", [17, 32, 33, 64])
@pytest.mark.parametrize("name", GPUS)
def test_a_tiling_fits_every_gpu(name: str, count: int) -> None:
    gpu = GPUS[name]
    for rows, columns in MATRICES:
        tiling = fastest_tiling(count, rows, columns, gpu)
        assert tiling.rows == (32 if count <= 32 else 64)
        assert tiling.shared_bytes(tiling.stages(gpu), gpu) <= gpu.shared_limit
        assert tiling.splits == 1 or gpu.has_clusters
        assert tiling.blocks(rows) * tiling.weight_rows >= rows * tiling.splits


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (32, [(64, 4), (64, 4), (128, 1), (64, 4), (128, 1)]),
        (64, [(128, 4), (128, 4), (128, 1), (128, 4), (128, 1)]),
    ],
)
def test_the_choice_is_what_was_fastest(count: int, expected: list[tuple[int, int]]) -> None:
    """Weight rows and splits of Llama-3.2-1B's matrices on an H200, where all were measured."""
    chosen = [fastest_tiling(count, *matrix, GPUS["H200"]) for matrix in MATRICES[:5]]
    assert [(tiling.weight_rows, tiling.splits) for tiling in chosen] == expected


def test_few_multiprocessors_need_no_clusters() -> None:
    assert fastest_tiling(64, 2048, 8192, GPUS["Thor"]).splits == 1


def test_where_nothing_fits_the_smallest_is_left() -> None:
    """Whose launch then says what is missing."""
    gpu = TiledGpu(16, 49_152, has_clusters=True)
    (tiling,) = tilings(64, gpu)
    assert tiling.shared_bytes(2, gpu) > gpu.shared_limit
