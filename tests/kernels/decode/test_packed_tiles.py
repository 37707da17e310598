"""Which tiles layers over packed weights get where there are many rows of activations."""

from __future__ import annotations

import pytest
from absent_gpu import GPUS

from edgellm.kernels.decode.contract import SLICES, slice_steps
from edgellm.kernels.decode.packed_tiles import PackedTiles, packed_tiles
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

MATRICES = [(3072, 2048), (16_384, 2048), (2048, 8192), (28_672, 4096), (4096, 14_336), (1152, 896), (24, 40)]


def layout(rows: int, columns: int, group: int = 128, zeros: bool = False, codes: Codes = "int4") -> DeviceLayout:
    return DeviceLayout(WeightFormat(codes, group, zeros, "float16"), rows, columns, not zeros and codes == "int4")


@pytest.mark.parametrize("batch", [9, 16, 17, 24, 32, 33, 40, 60, 64])
@pytest.mark.parametrize(("codes", "group", "zeros"), [("int4", 128, False), ("int4", 32, True), ("int8", 16, True)])
@pytest.mark.parametrize("name", GPUS)
def test_tiles_fit_every_gpu(name: str, codes: Codes, group: int, zeros: bool, batch: int) -> None:
    gpu = GPUS[name]
    for rows, columns in MATRICES:
        packed = layout(rows, columns, group, zeros, codes)
        found = packed_tiles(batch, packed, gpu)
        clocks = [tiling.clocks(batch, rows, columns, gpu) for tiling in found]
        assert clocks == sorted(clocks)
        for tiling in found:
            assert tiling.blocks * tiling.shared_bytes(packed.block_bytes, columns) <= gpu.shared_limit
            across, parts, _ = tiling.grid(batch, rows, gpu)
            assert across * parts <= max(parts, tiling.blocks * gpu.multiprocessors)
            assert across * tiling.weight_rows < rows + tiling.weight_rows
            assert (parts - 1) * 8 * tiling.token_tiles < batch <= parts * 8 * tiling.token_tiles
            assert 32 * tiling.warps <= 1024
            assert tiling.stages == 0 or (tiling.depth - 1) * 4 // tiling.chunk >= tiling.stages - 2 >= 1
            assert tiling.k_warps in (1, 4) or (tiling.k_warps == SLICES and slice_steps(columns) % 4 == 0)


def test_rows_that_fill_no_tile_get_a_smaller_one() -> None:
    gpu = GPUS["H200"]
    for batch in (9, 17, 20, 33, 45, 49):
        for tiling in packed_tiles(batch, layout(2048, 2048), gpu):
            assert tiling.grid(batch, 2048, gpu)[1] * 8 * tiling.token_tiles < batch + 16


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(KernelError, match="4096 bytes"):
        packed_tiles(64, layout(2048, 2048), Capacity(132, 4096, True, "sm_90"))


def test_more_rows_than_a_tile_has_are_other_blocks() -> None:
    tiling = PackedTiles(4, 1, 8, 1, 4, 4, 4, 2)
    assert tiling.grid(60, 16_384, GPUS["H200"]) == (128, 2, 1)
    assert tiling.grid(30, 16_384, GPUS["Orin"]) == (32, 1, 1)
