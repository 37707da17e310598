"""Which tiles the linear layers of large verify steps get."""

from __future__ import annotations

import pytest

from edgellm.kernels.linear_tilings import fastest_tiling, tilings

#: Bytes of shared memory of a block, multiprocessors, and whether there are clusters: H200, Thor, Orin, RTX PCs.
GPUS = {
    "H200": (232_448, 132, True),
    "Thor": (232_448, 20, True),
    "Orin": (166_912, 16, False),
    "RTX 4090": (101_376, 128, False),
    "RTX 5090": (101_376, 170, True),
}
MATRICES = [(3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (5, 40)]


@pytest.mark.parametrize("count", [17, 32, 33, 64])
@pytest.mark.parametrize("gpu", GPUS)
def test_a_tiling_fits_every_gpu(gpu: str, count: int) -> None:
    limit, multiprocessors, has_clusters = GPUS[gpu]
    for matrix in MATRICES:
        tiling = fastest_tiling(count, *matrix, multiprocessors, limit, has_clusters)
        assert tiling.rows == (32 if count <= 32 else 64)
        assert tiling.shared_bytes(tiling.stages_within(limit)) <= limit
        assert tiling.splits == 1 or has_clusters
        assert tiling.blocks(matrix[0]) * tiling.weight_rows >= matrix[0] * tiling.splits


def test_a_large_gpu_is_filled_in_whole_waves() -> None:
    """Of Llama-3.2-1B on an H200: blocks for most of its multiprocessors, and not a few more than all."""
    for rows, columns in MATRICES[:4]:
        blocks = fastest_tiling(64, rows, columns, 132, 232_448, has_clusters=True).blocks(rows)
        assert 96 <= blocks <= 132, (rows, columns)


def test_few_multiprocessors_need_no_clusters() -> None:
    assert fastest_tiling(64, 2048, 8192, 16, 232_448, has_clusters=True).splits == 1


def test_where_nothing_fits_the_smallest_is_left() -> None:
    """Whose launch then says what is missing."""
    (tiling,) = tilings(64, 49_152, has_clusters=True)
    assert tiling.shared_bytes(2) > 49_152
