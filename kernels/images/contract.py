"""The contract of the image kernels: `NumpyImageKernels` defines what they compute, `CudaImageKernels` computes it.

Resampling in two passes of whole numbers, as Pillow resizes images of 8 bits: bit for bit the same result. The second
pass also makes the rows of a vision encoder. In each, `starts` and `weights` say which pixels along an axis (0 height,
1 width) make one: K from starts[i] on, with weights in units of 2^-22; what lies beyond the last pixel counts as the
last one (its weight is 0 in tables made for images).
"""

from __future__ import annotations

from typing import Protocol

from edgellm.kernels.arrays import Array
from edgellm.kernels.checks import SIGNATURES
from edgellm.kernels.errors import KernelError

#: Weights are whole numbers: 1.0 is 2 to this power.
WEIGHT_BITS = 22

# S rows and W columns of the image, Y rows and X columns after resampling, A the resampled one of these, K pixels that
# make one, N patches of E elements.
SIGNATURES["resample"] = (
    ("pixels", "SW3", "uint8"),
    ("starts", "A", "int32"),
    ("weights", "AK", "int32"),
    ("resampled", "YX3", "uint8"),
)
SIGNATURES["resample_to_patches"] = (
    ("pixels", "SW3", "uint8"),
    ("starts", "A", "int32"),
    ("weights", "AK", "int32"),
    ("table", "3V", "float32"),
    ("patches", "NE", "compute"),
)


class ImageKernels(Protocol):
    """One implementation of both."""

    def resample(self, pixels: Array, starts: Array, weights: Array, resampled: Array, axis: int) -> None:
        """`resampled` uint8 from `pixels` [S, W, 3] uint8 with `starts` [A] and `weights` [A, K] int32.

        `resampled` is [A, W, 3] for axis 0, [S, A, 3] for axis 1.
        """

    def resample_to_patches(
        self,
        pixels: Array,
        starts: Array,
        weights: Array,
        table: Array,
        patches: Array,
        axis: int,
        patch_size: int,
        merge_size: int,
    ) -> None:
        """`patches` [N, E] compute from `pixels` [S, W, 3] uint8, resampled as by `resample` to Y rows and X columns.

        A value v of channel c becomes table[c, v] ([3, 256] float32). The image is cut into N = (Y / P) * (X / P)
        patches of P = `patch_size`; `merge_size` x `merge_size` neighbours stand one behind the other, then the next of
        the row. Each holds its channels, of these E / (3 P P) equal frames, of these P rows and columns.
        """


def resampled_size(name: str, sizes: dict[str, int], axis: int) -> tuple[int, int]:
    """Rows and columns after resampling along `axis`; KernelError for another axis than 0 and 1."""
    if axis not in (0, 1):
        raise KernelError(f"{name}: axis is {axis}; expected 0 (height) or 1 (width)")
    return (sizes["A"], sizes["W"]) if axis == 0 else (sizes["S"], sizes["A"])


def check_resampling(sizes: dict[str, int], axis: int) -> None:
    """Refuse a `resampled` of another size than `resample` makes."""
    rows, columns = resampled_size("resample", sizes, axis)
    if (sizes["Y"], sizes["X"]) != (rows, columns):
        raise KernelError(
            f"resample: resampled has shape [{sizes['Y']}, {sizes['X']}, 3]; expected [{rows}, {columns}, 3]"
        )


def check_patches(sizes: dict[str, int], axis: int, patch_size: int, merge_size: int) -> int:
    """How many equal frames a patch has; KernelError for sizes that do not belong together."""
    name = "resample_to_patches"
    rows, columns = resampled_size(name, sizes, axis)
    if patch_size < 1 or merge_size < 1:
        raise KernelError(f"{name}: patch_size is {patch_size}, merge_size {merge_size}; expected at least 1")
    block = patch_size * merge_size
    if rows % block or columns % block:
        raise KernelError(f"{name}: {rows} x {columns} pixels; expected multiples of patch_size x merge_size = {block}")
    if sizes["V"] != 256:
        raise KernelError(f"{name}: table has shape [3, {sizes['V']}]; expected [3, 256]")
    patches, values = rows * columns // patch_size**2, 3 * patch_size**2
    if sizes["N"] != patches or sizes["E"] % values:
        raise KernelError(
            f"{name}: patches has shape [{sizes['N']}, {sizes['E']}]; expected [{patches}, a multiple of {values}]"
        )
    return sizes["E"] // values
