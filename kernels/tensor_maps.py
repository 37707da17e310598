"""Tensor maps: what tells the tensor memory accelerator (sm_90 and later) of a matrix and of the tiles to copy."""

from __future__ import annotations

import ctypes
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.launch import KernelModule

#: Of a tile: with 16-bit elements a line of 128 bytes, whose 16 bytes each are swizzled by the row.
TILE_COLUMNS = 64

_Map = ctypes.c_uint64 * 16


def tensor_map(module: KernelModule, array: DeviceArray, columns: int, tile_rows: int) -> Any:
    """The map of the first `columns` of a matrix [rows, stride] of 16-bit elements, in tiles [tile_rows, 64].

    It is a kernel's argument; on a GPU without the accelerator it is empty. Outside the matrix, tiles hold zeros.
    Raises KernelError if the driver refuses it.
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
        [driver.cuuint32_t(TILE_COLUMNS), driver.cuuint32_t(tile_rows)],
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
