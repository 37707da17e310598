"""Which forms one row times layers of K types gets, where there are many multiprocessors and elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from absent_gpu import GPUS

from edgellm.kernels.decode.packed_rows import packed_rows
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.quantization.packed_weight import WeightFormat

Q4_K = WeightFormat("int4", 32, False, "float16", minima=True, scaling="levels")
Q6_K = WeightFormat("int6", 16, False, "float16", scaling="levels")
H200 = Capacity()


def form(format: WeightFormat, rows: int, columns: int, gpu: Capacity = H200, experts: int = 0, batch: int = 1):
    """Weight tiles, depth, blocks, how many find room, and whether the next kernel is late."""
    way = packed_rows(batch, DeviceLayout(format, rows, columns, multiplied="float32"), gpu, False, experts)
    assert way is not None
    return way.weight_tiles, way.depth, way.blocks, way.resident, way.late


@pytest.mark.parametrize("format", [Q4_K, Q6_K], ids=["q4_k", "q6_k"])
@pytest.mark.parametrize(
    ("rows", "columns"), [(12_288, 2048), (16_384, 768), (8192, 2048), (16_384, 512), (8192, 1792)]
)
def test_experts_weights_come_straight_into_registers(format: WeightFormat, rows: int, columns: int) -> None:
    """Those of Qwen3-30B-A3B, Qwen3.5-35B-A3B and LFM2-8B-A1B, of one row."""
    assert form(format, rows, columns, experts=1) == (1, 0, 2, 2, False)
    assert form(format, rows, columns, experts=4, batch=4) == (1, 2, 2, 2, False)


def test_a_matrix_with_a_tile_for_each_multiprocessor_has_long_rings_where_warps_have_two_blocks() -> None:
    long = (1, 8, 1, 2, True)
    assert form(Q4_K, 2048, 4096) == form(Q4_K, 1600, 4096) == form(Q4_K, 2112, 4096) == long
    assert long not in [form(Q4_K, *each) for each in ((1584, 4096), (2128, 4096), (2048, 8192), (2048, 2048))]
    assert form(replace(Q4_K, scaling="any"), 2048, 4096) != long


def test_few_multiprocessors_have_other_forms() -> None:
    """And what was measured is as it was found."""
    shapes = ((4608, 2048), (5120, 2048))
    assert [form(Q4_K, *each) for each in shapes] == [(1, 0, 1, 2, False), (2, 0, 1, 1, False)]
    thor = GPUS["Thor"]
    assert form(Q4_K, 2048, 4096, thor) != (1, 8, 1, 2, True) and form(Q4_K, 12_288, 2048, thor, 1)[1]
