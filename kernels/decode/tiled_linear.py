"""The kernels of many rows on the GPU, as trees have that are verified, prepared once for every step.

Each method has the arguments of its NumPy twin in `numpy_twins` and returns a `Launch` that enqueues it; norms and
attention are those of `CudaDecodeKernels`. A row gets the bits that `CudaDecodeKernels` computes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    MACROS,
    KeptArgument,
    LinearArgument,
    addresses,
    check_room,
    kept_argument,
    linear_argument,
    rows_of,
)
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, Kept, LinearWeights, activation_number, padded_columns
from edgellm.kernels.decode.tilings import MOST_STAGES, STEP_BYTES, TiledGpu, Tiling, fastest_tiling, tilings
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch

_THREADS = 256
#: Columns of a tensor map's tile: with 16-bit elements a line of 128 bytes, of which each 16 are swizzled by the row.
_TILE_COLUMNS = 64

_Map = ctypes.c_uint64 * 16


class _TiledLinear(ctypes.Structure):
    """`TiledLinear` of tiled_linear.cu."""

    _fields_ = [
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *((name, ctypes.c_void_p) for name in ("input", "residual", "output")),
        *((name, ctypes.c_int) for name in ("stride", "stages", "residual_float", "activation")),
    ]


@cache
def tiled_source(dtype: str, rows: int) -> ModuleSource:
    """The linear layers of up to 32 or of up to 64 rows."""
    with_clusters, alone = (TiledGpu(1, 1 << 20, has_clusters) for has_clusters in (True, False))
    small, large = Tiling(32, 64, 1), Tiling(64, 128, 1)
    macros = (
        ("HOST_TILED_THREADS", _THREADS),
        ("HOST_MOST_STAGES", MOST_STAGES),
        ("HOST_STEP_BYTES", STEP_BYTES),
        ("HOST_SMALL_BYTES", small.shared_bytes(3, with_clusters)),
        ("HOST_SMALL_BYTES_ALONE", small.shared_bytes(3, alone)),
        ("HOST_LARGE_BYTES", large.shared_bytes(2, with_clusters)),
        ("HOST_LARGE_BYTES_ALONE", large.shared_bytes(2, alone)),
        ("HOST_TILED_LINEAR_BYTES", ctypes.sizeof(_TiledLinear)),
    )
    every = [Tiling(rows, weight_rows, 1) for weight_rows in (64, 128)]
    names = tuple(_expression(name, dtype, each) for name in ("linear", "gate_up", "linear_residual") for each in every)
    return ModuleSource(f"decode-tiled-{dtype}-{rows}", ("decode/tiled_linear.cu",), names, (*MACROS, *macros))


def _expression(name: str, dtype: str, tiling: Tiling) -> str:
    sizes = f"{tiling.rows}, {tiling.weight_rows}, {tiling.teams}, {tiling.resident}"
    return f"decode::tiled::{name}<{CUDA_TYPES[dtype]}, {sizes}>"


class CudaTiledKernels:
    """The kernels for one GPU, stream and dtype; those of up to 32 and of up to 64 rows are loaded on demand."""

    def __init__(self, module: KernelModule, dtype: str) -> None:
        if dtype not in CUDA_TYPES:
            raise KernelError(f"decode kernels compute in {' and '.join(CUDA_TYPES)}, not in {dtype}")
        self.module, self.dtype = module, dtype
        self.gpu = TiledGpu(module.multiprocessors, module.shared_limit, module.has_clusters)

    def linear(
        self,
        x: DeviceArray,
        linear: LinearWeights,
        output: DeviceArray,
        scale: float = 1.0,
        tiling: Tiling | None = None,
    ) -> Launch:
        """See `NumpyTiledKernels.linear`. `tiling`: other than the fastest."""
        arguments = self._arguments(x, linear, output, linear.weight.shape[0], scale)
        return self._launch("linear", x, linear, arguments, tiling)

    def gate_up(self, x: DeviceArray, linear: LinearWeights, activation: str, output: DeviceArray) -> Launch:
        """See `NumpyTiledKernels.gate_up`."""
        arguments = self._arguments(x, linear, output, linear.weight.shape[0] // 2, 1.0)
        arguments.activation = activation_number(activation)
        return self._launch("gate_up", x, linear, arguments)

    def linear_residual(
        self,
        x: DeviceArray,
        linear: LinearWeights,
        residual: DeviceArray | None,
        output: DeviceArray,
        scale: float = 1.0,
        kept: Kept | None = None,
    ) -> Launch:
        """See `NumpyTiledKernels.linear_residual`."""
        rows = linear.weight.shape[0]
        arguments = self._arguments(x, linear, output, rows, scale)
        arguments.kept = kept_argument(kept, rows)
        (arguments.residual,) = addresses(residual)
        arguments.residual_float = residual is not None and residual.dtype == "float32"
        return self._launch("linear_residual", x, linear, arguments)

    def _arguments(
        self, x: DeviceArray, linear: LinearWeights, output: DeviceArray, rows: int, scale: float
    ) -> _TiledLinear:
        batch, columns, stride = rows_of(x), linear.weight.shape[1], x.shape[-1]
        if not 1 <= batch <= MAX_TILED_ROWS or columns % 8 or stride not in (columns, padded_columns(columns)):
            raise KernelError(
                f"tiled decode kernels take 1 to {MAX_TILED_ROWS} rows of a width that is a multiple of 8, found "
                f"{x.shape} times {linear.weight.shape}"
            )
        check_room("output", output, batch, rows)
        return _TiledLinear(
            linear=linear_argument(linear, batch, rows, scale), input=x.pointer, output=output.pointer, stride=stride
        )

    def _launch(
        self, name: str, x: DeviceArray, linear: LinearWeights, arguments: _TiledLinear, tiling: Tiling | None = None
    ) -> Launch:
        batch, (every_row, columns) = rows_of(x), linear.weight.shape
        tiling = tiling or fastest_tiling(batch, every_row, columns, self.gpu)
        if batch > tiling.rows:
            raise KernelError(f"a tiling for {tiling.rows} rows was given {batch}: take one of tilings({batch}, gpu)")
        arguments.stages = tiling.stages(self.gpu)
        maps = (
            tensor_map(self.module, linear.weight, columns, tiling.weight_rows * arguments.linear.rows // every_row),
            tensor_map(self.module, x, columns, tiling.rows),
        )
        kernel = Kernel(tiled_source(self.dtype, tiling.rows), _expression(name, self.dtype, tiling))
        grid, cluster = (tiling.blocks(every_row) // tiling.splits, tiling.splits, 1), (1, tiling.splits, 1)
        shared = tiling.shared_bytes(arguments.stages, self.gpu)
        return Launch(self.module, kernel, grid, _THREADS, shared, (*maps, arguments), cluster)


def tiled_shared_bytes(shared_limit: int) -> int:
    """The least shared memory with which a block computes a linear layer of many rows, where a GPU has a limit."""
    gpu = TiledGpu(1, shared_limit, has_clusters=True)  # which needs more than one without
    return min(tiling.shared_bytes(2, gpu) for tiling in tilings(MAX_TILED_ROWS, gpu))


def tensor_map(module: KernelModule, array: DeviceArray, columns: int, tile_rows: int) -> Any:
    """What tells the tensor memory accelerator (sm_90 and later) of the first `columns` of a matrix [rows, stride].

    It has 16-bit elements, in tiles [tile_rows, 64]; outside the matrix, they hold zeros. The map is a kernel's
    argument; on a GPU without the accelerator it is empty. Raises KernelError if the driver refuses it.
    """
    if not module.has_clusters:
        return _Map()
    driver, stride = module.driver, array.shape[-1]
    rows = array.size // stride
    status, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,  # or any other of as many bits
        2,
        array.pointer,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(2 * stride)],
        [driver.cuuint32_t(_TILE_COLUMNS), driver.cuuint32_t(tile_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(
            f"CUDA reported {status} for a tensor map of {rows} rows of {columns} elements, {stride} apart, at "
            f"{array.pointer:#x}: expected an address and rows that are multiples of 16 bytes"
        )
    return _Map(*map(int, found.opaque))
