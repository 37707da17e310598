"""The kernels of many rows on the GPU, as trees have that are verified, prepared once for every step.

Each method has the arguments of its NumPy twin and returns a `Launch` that enqueues it; norms and
attention are those of `CudaDecodeKernels`. A row gets the bits that `CudaDecodeKernels` computes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from edgellm.kernels.arrays import DeviceArray, members
from edgellm.kernels.decode.arguments import (
    CUDA_TYPES,
    KeptArgument,
    LinearArgument,
    addresses,
    check_room,
    check_rounded,
    cuda_type,
    decode_kernel,
    kept_argument,
    linear_argument,
    own_rows,
    rows_of,
)
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, STEP, LinearWeights, activation_number, padded_columns
from edgellm.kernels.decode.packed_linear import PackedTiling, packed_kernel
from edgellm.kernels.decode.packed_tiles import PackedTiles, packed_tiling, tiles_kernel
from edgellm.kernels.decode.tilings import (
    BARRIER_BYTES,
    MOST_STAGES,
    ROW_BYTES,
    WARPS,
    AnyTiling,
    Capacity,
    DirectTiling,
    GroupTiling,
    Tiling,
    fastest_tiling,
    slices_end_every,
    tilings,
)
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import Kernel, KernelModule, Launch
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix

#: Columns of a tensor map's tile: with 16-bit elements a line of 128 bytes, of which each 16 are swizzled by the row.
_TILE_COLUMNS = ROW_BYTES // 2

#: Bytes of sixteen rows of activations, a step of columns, in shared memory.
_FRAGMENT_BYTES = 16 * STEP * 2

_Map = ctypes.c_uint64 * 16


class TiledLinear(ctypes.Structure):
    """`TiledLinear` of tiled_linear.cu."""

    _fields_ = [
        ("linear", LinearArgument),
        ("kept", KeptArgument),
        *members("void* input residual output selected", "int stride stages residual_float activation tokens"),
    ]


def tiled_kernel(name: str, dtype: str, tiling: Tiling, gpu: Capacity, adapted: bool = False) -> Kernel:
    """A kernel of tiled_linear.cu; blocks of a cluster share the same. `adapted`: with LoRA adapters."""
    macros = (
        ("HOST_TILED_WARPS", WARPS),
        ("HOST_MOST_STAGES", MOST_STAGES),
        ("HOST_ROW_BYTES", ROW_BYTES),
        ("HOST_BARRIER_BYTES", BARRIER_BYTES),
        ("HOST_SMALL_BYTES", Tiling(16, 128, 1).shared_bytes(3)),
        ("HOST_LARGE_BYTES", Tiling(64, 192, 1).shared_bytes(2, adapted=True)),
        ("HOST_TILED_LINEAR_BYTES", ctypes.sizeof(TiledLinear)),
    )
    sizes = f"{tiling.row_tiles}, {tiling.column_tiles}, {tiling.row_warps}, {tiling.resident(gpu)}"
    sizes += ", true" if adapted else ""
    return decode_kernel("tiled_linear.cu", f"decode::tiled::{name}<{CUDA_TYPES[dtype]}, {sizes}>", macros)


def direct_kernel(name: str, dtype: str, tiling: DirectTiling | GroupTiling, columns: int) -> Kernel:
    """A kernel of direct_linear.cu or group_linear.cu for matrices of so many columns, or of others whose slices end as
    often."""
    macros = (("HOST_FRAGMENT_BYTES", _FRAGMENT_BYTES), ("HOST_TILED_LINEAR_BYTES", ctypes.sizeof(TiledLinear)))
    every, chosen = slices_end_every(columns), f"{CUDA_TYPES[dtype]}, {tiling.rows // 16}, {tiling.weight_tiles}"
    if isinstance(tiling, GroupTiling):
        expression = f"decode::direct::group_{name}<{chosen}, {tiling.depth}, {every}>"
        return decode_kernel("group_linear.cu", expression, macros)
    chosen += f", {tiling.warps}, {tiling.depth}, {tiling.chunk_steps}"
    return decode_kernel("direct_linear.cu", f"decode::direct::{name}<{chosen}, {every}>", macros)


def capacity_of(module: KernelModule) -> Capacity:
    """What decides of the GPU of a module's kernels."""
    return Capacity(module.multiprocessors, module.shared_limit, module.has_clusters, module.architecture)


class CudaTiledKernels:
    """See `NumpyTiledKernels`: for one GPU, stream and dtype; each is loaded when a launch first needs it."""

    most_rows = MAX_TILED_ROWS

    def __init__(self, module: KernelModule, dtype: str) -> None:
        cuda_type(dtype)  # refuses others
        self.module, self.dtype = module, dtype
        self.gpu = capacity_of(module)

    def linear(self, x, linear, output, scale=1.0, tiling=None):
        """See `NumpyTiledKernels.linear`. `tiling`: other than the fastest."""
        arguments = self._arguments(x, linear, output, linear.weight.shape[0], scale)
        return self._launch("linear", x, linear, arguments, tiling)

    def gate_up(self, x: DeviceArray, linear: LinearWeights, activation: str, output: DeviceArray) -> Launch:
        arguments = self._arguments(x, linear, output, linear.weight.shape[0] // 2, 1.0)
        arguments.activation = activation_number(activation)
        return self._launch("gate_up", x, linear, arguments)

    def linear_residual(self, x, linear, residual, output, scale=1.0, kept=None, selected=None):
        rows = linear.weight.shape[0]
        arguments = self._arguments(x, linear, output, rows, scale, selected)
        own_rows(output, linear, residual, kept)
        arguments.kept = kept_argument(kept, rows)
        arguments.residual, arguments.selected = addresses(residual, selected)
        arguments.residual_float = residual is not None and residual.dtype == "float32"
        return self._launch("linear_residual" if selected is None else "selected_residual", x, linear, arguments)

    def low_products(self, x: DeviceArray, linear: LinearWeights, selected: DeviceArray | None = None) -> Launch:
        """See `NumpyTiledKernels.low_products`: tiles of A alone, of a layer without rows of its own."""
        arguments = self._arguments(x, linear, x, 0, 1.0, selected)
        (arguments.selected,) = addresses(selected)
        columns = linear.weight.shape[1]
        tiling = fastest_tiling(arguments.linear.batch, linear.low_rows, columns, self.gpu, adapted=True)
        assert isinstance(tiling, Tiling)
        return self._tiled_launch("linear" if selected is None else "selected_residual", x, linear, arguments, tiling)

    def _arguments(
        self,
        x: DeviceArray,
        linear: LinearWeights,
        output: DeviceArray,
        rows: int,
        scale: float,
        selected: DeviceArray | None = None,
    ) -> TiledLinear:
        columns, stride = linear.weight.shape[1], x.shape[-1]
        batch = rows_of(x) if selected is None else selected.size
        if not 1 <= batch <= self.most_rows or columns % 8 or stride not in (columns, padded_columns(columns)):
            raise KernelError(
                f"tiled decode kernels take 1 to {self.most_rows} rows of a width that is a multiple of 8, found "
                f"{x.shape} times {linear.weight.shape}"
            )
        check_room("output", output, batch, linear.width if rows == linear.weight.shape[0] else rows)
        return TiledLinear(
            linear=linear_argument(linear, batch, rows, scale),
            input=x.pointer,
            output=own_rows(output, linear) if rows else output.pointer,
            stride=stride,
            tokens=rows_of(x) // batch,
        )

    def _launch(
        self,
        name: str,
        x: DeviceArray,
        linear: LinearWeights,
        arguments: TiledLinear,
        tiling: AnyTiling | PackedTiling | PackedTiles | None = None,
    ) -> Launch:
        if isinstance(linear.weight, PackedMatrix):
            assert tiling is None or isinstance(tiling, (PackedTiling, PackedTiles))
            return self._packed_launch(name.replace("selected", "linear"), linear, arguments, tiling)
        assert not isinstance(tiling, (PackedTiling, PackedTiles))
        batch, (every_row, columns) = arguments.linear.batch, linear.weight.shape
        gated, adapted = arguments.linear.rows != every_row, linear.adapters is not None
        tiling = tiling or fastest_tiling(batch, every_row, columns, self.gpu, gated, adapted)
        if batch > tiling.rows:
            raise KernelError(f"a tiling for {tiling.rows} rows was given {batch}: take one of tilings({batch}, gpu)")
        if not isinstance(tiling, Tiling):
            arguments.stages = tiling.stages(columns, self.gpu)
            kernel = direct_kernel(name.replace("selected", "linear"), self.dtype, tiling, columns)
            grid, shared = tiling.grid(every_row, self.gpu), tiling.shared_bytes(arguments.stages)
            return Launch(self.module, kernel, grid, 32 * tiling.warps, shared, (arguments,))
        return self._tiled_launch(name, x, linear, arguments, tiling)

    def _tiled_launch(
        self, name: str, x: DeviceArray, linear: LinearWeights, arguments: TiledLinear, tiling: Tiling
    ) -> Launch:
        """The launch of a layer with rows of its own, or without: of adapters' A alone."""
        adapters, (every_row, columns) = linear.adapters, linear.weight.shape
        rows, adapted = every_row if arguments.linear.rows else 0, adapters is not None
        arguments.stages = tiling.stages(self.gpu, adapted)
        tile_rows = tiling.weight_rows // (1 + (arguments.linear.rows != rows))
        low_map = _Map() if adapters is None else tensor_map(self.module, adapters.a, columns, tile_rows)
        weight_map = tensor_map(self.module, linear.weight, columns, tile_rows) if rows else low_map
        maps = weight_map, tensor_map(self.module, x, columns, tiling.rows), low_map
        kernel = tiled_kernel(name, self.dtype, tiling, self.gpu, adapted)
        grid = tiling.grid(rows, self.gpu, linear.low_rows)
        shared = tiling.shared_bytes(arguments.stages, adapted)
        return Launch(self.module, kernel, grid, 32 * WARPS, shared, (*maps, arguments), (1, tiling.splits, 1))

    def _check_packed(self, name: str, layout: DeviceLayout) -> None:
        """KernelError for a packed weight that the kernel `name` does not take."""
        if name == "gate_up" and layout.rows % 16:
            raise KernelError(f"packed layers take gates in eights, found {layout.rows} rows")
        check_rounded(layout, self.dtype)

    def _packed_launch(
        self, name: str, linear: LinearWeights, arguments: TiledLinear, tiling: PackedTiling | PackedTiles | None
    ) -> Launch:
        batch, layout, bytes_given = arguments.linear.batch, linear.weight.layout, ctypes.sizeof(TiledLinear)
        adapted = linear.adapters is not None
        self._check_packed(name, layout)
        tiling = tiling or packed_tiling(batch, layout, self.gpu, adapted)
        if isinstance(tiling, PackedTiles):
            kernel = tiles_kernel(name, self.dtype, tiling, layout, bytes_given)
            grid = tiling.grid(batch, layout.rows, self.gpu)
            shared = tiling.shared_bytes(layout.block_bytes, layout.columns)
        else:
            kernel = packed_kernel(name, self.dtype, tiling, layout, bytes_given, adapted)
            grid = tiling.grid(layout.rows, self.gpu)
            shared = tiling.shared_bytes(layout.block_bytes, layout.columns, batch, adapted)
        return Launch(self.module, kernel, grid, 32 * tiling.warps, shared, (arguments,))


@cache
def tiled_shared_bytes(shared_limit: int) -> int:
    """The least shared memory with which a block computes a linear layer of many rows, where a GPU has a limit."""
    gpu = Capacity(1, shared_limit, has_clusters=False)
    return min(tiling.shared_bytes(2, adapted=True) for tiling in tilings(MAX_TILED_ROWS, gpu))


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
