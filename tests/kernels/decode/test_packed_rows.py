"""Which forms packed layers of one row get where a multiprocessor has not the room that an H200's part hides."""

from __future__ import annotations

import pytest
from absent_gpu import GPUS

from edgellm.kernels.decode.geometries import block_share
from edgellm.kernels.decode.packed_rows import packed_rows_ways
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

MATRICES = [(5120, 2048), (2048, 4096), (1536, 2048), (2048, 768), (2048, 8192), (28_672, 4096), (4096, 14_336)]


@pytest.mark.parametrize(("codes", "group"), [("int4", 128), ("int4", 32), ("int8", 16)])
@pytest.mark.parametrize("name", GPUS)
def test_a_multiprocessor_has_room_for_all_its_blocks_at_once(name: str, codes: Codes, group: int) -> None:
    gpu = GPUS[name]
    for rows, columns in MATRICES:
        layout = DeviceLayout(WeightFormat(codes, group, False, "float16"), rows, columns)
        for way in packed_rows_ways(1, layout, gpu, normed=True):
            needed = way.shared_bytes(layout.block_bytes, columns, 1, True)
            beside = -(-way.grid(rows, gpu)[0] // gpu.multiprocessors)
            assert needed <= block_share(gpu.shared_limit, beside), (layout, way)


def test_few_multiprocessors_that_overlap_fill_their_shared_memory() -> None:
    for rows, columns in MATRICES:
        layout = DeviceLayout(WeightFormat("int4", 128, False, "float16"), rows, columns)
        way = packed_rows_ways(1, layout, GPUS["Thor"], normed=False)[0]
        assert (way.blocks, way.weight_tiles) == (2, 2) and way.depth == (3 if columns <= 4096 else 2)
