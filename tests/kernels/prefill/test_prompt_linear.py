"""Linear layers of any number of rows, without a GPU: the twin, the tilings, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from absent_gpu import GPUS
from decode_twins import NumpyTiledKernels

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import compile_module
from edgellm.kernels.decode.contract import Kept, LinearAdapters, LinearWeights
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.prefill.linear import (
    JOINED,
    PACKED_TILINGS,
    TILINGS,
    CudaPromptLinear,
    PromptTiling,
    packed_prompt_kernel,
    prompt_kernel,
    prompt_tiling,
    prompt_tilings,
)
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix
from edgellm.kernels.quantization.packed_weight import WeightFormat
from tools.bench.prompt_rows import resources

#: Bytes of blocks of packed weights: codes of 4 and of 8 bits in groups of 128, and the most that there are.
BLOCKS = (528, 1040, 1536)
EVERY_TILING = [*TILINGS, *(tiling._replace(block_bytes=size) for size in BLOCKS for tiling in PACKED_TILINGS)]
#: Of the first two, and of Q6_K.
LAYOUTS = [
    DeviceLayout(WeightFormat("int4", 128, False, "float16"), 8, 128),
    DeviceLayout(WeightFormat("int8", 128, False, "float16"), 8, 128),
    DeviceLayout(WeightFormat("int6", 16, False, "float32", scaling="levels"), 8, 128, multiplied="float32"),
]
MATRICES = [(3072, 2048), (2048, 2048), (16_384, 2048), (2048, 8192), (128_256, 2048), (6, 40)]


def named(tiling: PromptTiling) -> str:
    return f"{tiling.rows}x{tiling.weight_rows}x{tiling.teams}x{tiling.block_bytes}"


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("tiling", EVERY_TILING, ids=named)
def test_tilings_fit_what_they_are_chosen_for(name: str, tiling: PromptTiling) -> None:
    gpu = GPUS[name]
    stages = tiling.stages(gpu)
    assert 2 <= stages <= 4
    every = prompt_tilings(gpu, tiling.block_bytes)
    assert (tiling in every) == (tiling.shared_bytes(stages) <= gpu.shared_limit)
    if tiling in every:
        resident = tiling.resident(stages, gpu)
        assert 1 <= resident <= tiling.blocks
        assert resident * (tiling.shared_bytes(stages) + 1024) <= gpu.shared_limit + 1024
        assert tiling.grid(1, 1, gpu) == (1, 1, 1)
        blocks = tiling.tiles(65_536, 65_536) if tiling.totals == JOINED else resident * gpu.multiprocessors
        assert tiling.grid(65_536, 65_536, gpu) == (blocks, 1, 1)
        sums = 4 * tiling.teams * tiling.rows * tiling.weight_rows  # that teams leave in the ring's memory
        assert tiling.teams == 1 or sums <= stages * tiling.stage_bytes


@pytest.mark.parametrize("name", GPUS)
def test_the_fastest_tiling_fits(name: str) -> None:
    gpu = GPUS[name]
    for rows in (1, 17, 65, 128, 512, 4000, 65_536):
        for weight_rows, columns in MATRICES:
            for layout in (None, *LAYOUTS):
                chosen = prompt_tiling(rows, weight_rows, columns, gpu, layout)
                assert chosen in prompt_tilings(gpu, layout.block_bytes if layout else 0)
                assert rows > 64 or chosen.rows <= 64 or gpu.multiprocessors <= 20


def test_few_rows_get_more_tiles_where_multiprocessors_would_be_idle() -> None:
    large, small = (prompt_tiling(rows, 2048, 2048, GPUS["H200"]) for rows in (4000, 128))
    assert large.rows * large.weight_rows > small.rows * small.weight_rows


def test_values_that_take_many_instructions_are_made_for_more_rows() -> None:
    """K types; otherwise as 8 bits: a warp makes them for 64 rows of activations, not for 32."""
    found = [prompt_tiling(128, 16_384, 2048, GPUS["H200"], layout) for layout in LAYOUTS[1:]]
    assert [tiling.row_tiles for tiling in found] == [2, 4]


def test_a_kernel_has_a_name_of_its_own() -> None:
    kernels = [
        prompt_kernel(name, dtype, tiling, stages, adapted)
        for name in ("linear", "gate_up", "linear_residual", "low_products")
        for dtype in ("float16", "bfloat16")
        for tiling in TILINGS
        for adapted in (False, True)
        for stages in (2, 3)
    ]
    packed = [(tiling, scales, mode) for tiling in PACKED_TILINGS for scales in (1, 4) for mode in (0, 1, 6)]
    kernels += [prompt_kernel("linear", "float16", tiling, 2, packed=tuple(its)) for tiling, *its in packed]
    assert len({kernel.source.name for kernel in kernels}) == len(kernels)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("architecture", ["sm_87", "sm_90"])
@pytest.mark.parametrize("name", ["linear", "gate_up"])
def test_large_tiles_stay_in_registers(name: str, architecture: str) -> None:
    try:
        compiled = compile_module(prompt_kernel(name, "bfloat16", TILINGS[0], 3).source, architecture)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    registers, stack = resources(compiled.code)
    assert 200 < registers < 256
    assert stack <= 64


LINEAR, GATE_UP = ("linear", "sm_87"), ("gate_up", "sm_90")


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("tiling", "name", "architecture"),
    [
        *((tiling, *asked) for tiling, asked in zip(PACKED_TILINGS, (LINEAR, GATE_UP, LINEAR), strict=False)),
        *(
            pytest.param(tiling, *asked, marks=pytest.mark.slow)
            for tiling, asked in zip(PACKED_TILINGS, (GATE_UP, LINEAR, GATE_UP), strict=False)
        ),
    ],
    ids=lambda value: named(value) if isinstance(value, PromptTiling) else None,
)
def test_large_tiles_of_packed_weights_stay_in_registers(tiling: PromptTiling, name: str, architecture: str) -> None:
    """But for some of what places of copies are found by, once in 128 columns."""
    layout = DeviceLayout(WeightFormat("int4", 128, False, "float16"), 4096, 4096, small=True)
    try:
        compiled = compile_module(packed_prompt_kernel(name, layout, tiling, 2).source, architecture)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    assert resources(compiled.code)[1] <= 88


@pytest.mark.parametrize("rows", [65, 300])
def test_the_twin_takes_any_number_of_rows(rows: int) -> None:
    """Beside sums in float64: with a bias, adapters, a scale and a residual that is kept."""
    random, twin = np.random.default_rng(rows), NumpyTiledKernels()

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    x, weight, bias, residual, scales = normal(rows, 40) / 8, normal(24, 40), normal(24), normal(rows, 24), normal(5, 2)
    a, b = normal(2 * 8, 40), normal(2 * 8, 24)
    adapters = LinearAdapters(a, b, scales, (24,), np.zeros(0), np.zeros(0))
    linear, output, kept = LinearWeights(weight, bias, adapters), np.empty((rows, 24), np.float32), np.zeros((rows, 48))
    low = (x.astype(float) @ a.T).reshape(5, -1, 2, 8) * scales[:, None, :, None]
    sums = x.astype(float) @ weight.T + low.reshape(rows, 16) @ b + bias
    twin.linear(x, linear, output, 0.5)()
    np.testing.assert_allclose(output, 0.5 * sums, rtol=1e-4, atol=1e-4)
    twin.linear_residual(x, linear, residual, output, 2.0, Kept(kept, 1))()
    np.testing.assert_allclose(output, residual + 2 * sums, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(kept[:, 24:], residual)
    gated = np.empty((rows, 12), np.float32)
    twin.gate_up(x, linear, "silu", gated)()
    np.testing.assert_allclose(gated, sums[:, :12] / (1 + np.exp(-sums[:, :12])) * sums[:, 12:], rtol=1e-3, atol=1e-3)


class Refusing(CudaPromptLinear):
    """Of a GPU that launches nothing."""

    def __init__(self) -> None:
        limits = {"shared_limit": 101_376, "has_clusters": False, "architecture": "sm_89"}
        super().__init__(SimpleNamespace(multiprocessors=128, **limits), "float16")


def array(*shape: int, dtype: str = "float16") -> DeviceArray:
    return DeviceArray(256, shape, dtype)


@pytest.mark.parametrize(
    ("rows", "stride", "columns"), [(65_537, 64, 64), (300, 60, 60), (300, 72, 64), (0, 64, 64)], ids=str
)
def test_rows_that_no_kernel_takes_are_refused(rows: int, stride: int, columns: int) -> None:
    with pytest.raises(KernelError, match="take 1 to 65536 rows of a width that is a multiple of 8, found"):
        Refusing().linear(array(rows, stride), LinearWeights(array(8, columns)), array(rows, 8, dtype="float32"))


def test_an_output_that_is_too_small_and_weights_of_others_are_refused() -> None:
    with pytest.raises(KernelError, match="expected at least 300 rows of 8 elements"):
        Refusing().linear(array(300, 64), LinearWeights(array(8, 64)), array(299, 8, dtype="float32"))
    layout = DeviceLayout(WeightFormat("int4", 32, False, "bfloat16"), 8, 64)
    packed = LinearWeights(PackedMatrix(layout, array(*layout.shape, dtype="uint8")))
    with pytest.raises(KernelError, match="rounded in bfloat16"):
        Refusing().linear(array(300, 64), packed, array(300, 8, dtype="float32"))
    with pytest.raises(KernelError, match="gates in eights"):
        Refusing().gate_up(array(300, 64), packed, "silu", array(300, 4))
    with pytest.raises(KernelError, match="decode kernels compute in"):
        CudaPromptLinear(SimpleNamespace(), "float32")
