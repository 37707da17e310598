"""Which forms layers of few rows get where a multiprocessor has not the room that an H200's part hides."""

from __future__ import annotations

from itertools import product

import pytest
from absent_gpu import GPUS

from edgellm.kernels.decode.geometries import block_share, norm_geometry
from edgellm.kernels.decode.packed_rows import packed_rows_ways
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import Codes, WeightFormat

MATRICES = [(5120, 2048), (2048, 4096), (1536, 2048), (2048, 768), (2048, 8192), (28_672, 4096), (4096, 14_336)]


@pytest.mark.parametrize(("codes", "group"), [("int4", 128), ("int4", 32), ("int8", 16)])
@pytest.mark.parametrize("name", GPUS)
def test_a_multiprocessor_has_room_for_all_its_blocks_at_once(name: str, codes: Codes, group: int) -> None:
    gpu = GPUS[name]
    for (rows, columns), batch in product(MATRICES, (1, 2, 8) if gpu.multiprocessors <= 64 else (1,)):
        layout = DeviceLayout(WeightFormat(codes, group, False, "float16"), rows, columns)
        for way in packed_rows_ways(batch, layout, gpu, normed=batch < 8):
            needed = way.shared_bytes(layout.block_bytes, columns, batch, batch < 8)
            beside = -(-way.grid(rows, gpu)[0] // gpu.multiprocessors)
            assert needed <= block_share(gpu.shared_limit, beside), (layout, way)


def test_few_multiprocessors_fill_their_shared_memory() -> None:
    for rows, columns in MATRICES:
        layout = DeviceLayout(WeightFormat("int4", 128, False, "float16"), rows, columns)
        thor, orin = (packed_rows_ways(1, layout, GPUS[name], normed=False)[0] for name in ("Thor", "Orin"))
        assert (thor.blocks, thor.weight_tiles, thor.bulk) == (2, 2, True)
        assert thor.depth == (3 if columns <= 4096 else 2)
        assert (orin.blocks, orin.weight_tiles, orin.bulk) == (1, 2, False)
        assert orin.depth == (4 if columns <= 4096 else 3)


def test_few_multiprocessors_read_dense_weights_in_lines_where_two_blocks_have_room() -> None:
    found = {name: norm_geometry(1, [2048], gpu, False, 0).name for name, gpu in GPUS.items()}
    assert found == {"H200": "Narrow", "Thor": "Lines", "Orin": "Lines", "RTX 4090": "Narrow", "RTX 5090": "Narrow"}
    thor = GPUS["Thor"]
    assert [norm_geometry(rows, [4096], thor, True, 0).name for rows in (1, 2, 3)] == ["Lines", "Lines", "Wide"]
    assert norm_geometry(1, [4096], thor, False, 16).name == "Narrow", "with adapters"
    assert norm_geometry(1, [4096], GPUS["Orin"], False, 0).name == "Narrow"
