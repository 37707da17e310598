"""The image kernels in NumPy: they define what `CudaImages` computes, and run where there is no GPU."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.bfloat16 import store_rounded
from edgellm.kernels.contracts import Contracts
from edgellm.kernels.images.contract import WEIGHT_BITS, ImageKernels, ResamplingTables

_check = Contracts(ImageKernels, np.ndarray)


class NumpyImages:
    """See `edgellm.kernels.images.contract.ImageKernels`; bfloat16 arrays hold its bits as uint16."""

    def resample(self, pixels: np.ndarray, tables: ResamplingTables, resampled: np.ndarray) -> None:
        _check("resample", pixels, tables, resampled)
        resampled[...] = _resampled(pixels, tables)

    def resample_to_patches(self, pixels, tables, table, grid, patches):
        sizes = _check("resample_to_patches", pixels, tables, table, grid, patches)
        area = grid.patch_size**2
        frames, by_frame = sizes["E"] // (3 * area), (sizes["N"], 3, -1, area)
        rows = normalized_patches(_resampled(pixels, tables), table, grid.patch_size, grid.merge_size, frames)
        first = slice(grid.first_frame, None)
        store_rounded(rows.reshape(by_frame)[:, :, first], patches.reshape(by_frame)[:, :, first])

    def insert_image_rows(self, image_rows, token_ids, target, inserted, image_token_id, first_row):
        sizes = _check("insert_image_rows", image_rows, token_ids, target, inserted, image_token_id, first_row)
        places = np.flatnonzero(token_ids[0] == image_token_id)
        rows = first_row + np.arange(len(places))
        known = (rows >= 0) & (rows < sizes["M"])
        target[0, places[known]] = image_rows[rows[known]]
        inserted += known.sum(dtype=np.int32)

    def mrope_rotary_rows(self, positions, axes, rotary_table, rope_rotary_cos_sin):
        sizes = _check("mrope_rotary_rows", positions, axes, rotary_table, rope_rotary_cos_sin)
        rows = positions[axes.clip(0, 2)].clip(0, sizes["P"] - 1)
        store_rounded(rotary_table[rows.T, np.arange(sizes["R"])][None], rope_rotary_cos_sin)


def normalized_patches(
    pixels: np.ndarray, table: np.ndarray, patch_size: int, merge_size: int, frames: int
) -> np.ndarray:
    """The rows [N, E] float32 of an image [Y, X, 3] uint8 of the right size; see `resample_to_patches`."""
    rows, columns = pixels.shape[0] // patch_size, pixels.shape[1] // patch_size
    blocks = pixels.reshape(
        rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size, 3
    )
    # Reordered while they are bytes, a quarter of the memory traffic.
    ordered = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3, patch_size**2)
    result = np.empty((rows * columns, 3, frames, patch_size**2), np.float32)
    for channel in range(3):
        np.take(table[channel], ordered[:, channel], out=result[:, channel, 0], mode="clip")
    result[:, :, 1:] = result[:, :, :1]
    return result.reshape(rows * columns, -1)


def _resampled(pixels: np.ndarray, tables: ResamplingTables) -> np.ndarray:
    """`pixels` uint8 with K of them along the axis made into each new one."""
    starts, weights, axis = tables
    shape = [1, 1, 1]
    shape[axis] = len(starts)
    total = np.array(1 << (WEIGHT_BITS - 1), np.int32)
    for place in range(weights.shape[1]):
        chosen = pixels.take(starts + place, axis=axis, mode="clip")
        total = total + chosen.astype(np.int32) * weights[:, place].reshape(shape)
    return np.clip(total >> WEIGHT_BITS, 0, 255).astype(np.uint8)
