"""The image kernels in NumPy: they define what `CudaImageKernels` computes, and run where there is no GPU."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.checks import check_host_arguments
from edgellm.kernels.image_interface import WEIGHT_BITS, check_patches, check_resampling
from edgellm.kernels.numpy_kernels import store_rounded


class NumpyImageKernels:
    """See `edgellm.kernels.image_interface.ImageKernels`; bfloat16 arrays hold its bits as uint16."""

    def resample(
        self, pixels: np.ndarray, starts: np.ndarray, weights: np.ndarray, resampled: np.ndarray, axis: int
    ) -> None:
        """Resample along one axis; see the interface."""
        sizes = check_host_arguments("resample", pixels, starts, weights, resampled)
        check_resampling(sizes, axis)
        resampled[...] = _resampled(pixels, starts, weights, axis)

    def resample_to_patches(
        self,
        pixels: np.ndarray,
        starts: np.ndarray,
        weights: np.ndarray,
        table: np.ndarray,
        patches: np.ndarray,
        axis: int,
        patch_size: int,
        merge_size: int,
    ) -> None:
        """Resample along one axis, normalize, cut into patches; see the interface."""
        sizes = check_host_arguments("resample_to_patches", pixels, starts, weights, table, patches)
        frames = check_patches(sizes, axis, patch_size, merge_size)
        rows = _resampled(pixels, starts, weights, axis)
        store_rounded(normalized_patches(rows, table, patch_size, merge_size, frames), patches)


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


def _resampled(pixels: np.ndarray, starts: np.ndarray, weights: np.ndarray, axis: int) -> np.ndarray:
    """`pixels` uint8 with K of them along `axis` made into each new one."""
    shape = [1, 1, 1]
    shape[axis] = len(starts)
    total = np.array(1 << (WEIGHT_BITS - 1), np.int32)
    for place in range(weights.shape[1]):
        chosen = pixels.take(starts + place, axis=axis, mode="clip")
        total = total + chosen.astype(np.int32) * weights[:, place].reshape(shape)
    return np.clip(total >> WEIGHT_BITS, 0, 255).astype(np.uint8)
