"""The contract of the image kernels: `NumpyImages` defines what they compute, `CudaImages` computes it.

Resampling in two passes of whole numbers, as Pillow resizes images of 8 bits: bit for bit the same result. The second
pass also makes the rows of a vision encoder. S rows and W columns of the image, Y rows and X columns after resampling,
A the resampled one of these, K pixels that make one, N patches of E elements. Then the rows of images in prompts: M of
them, T tokens, H hidden size, P positions of the rotary table, R rotary size.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited

#: Weights are whole numbers: 1.0 is 2 to this power.
WEIGHT_BITS = 22


class ResamplingTables(NamedTuple):
    """Which pixels along `axis` (0 height, 1 width) make one: K from starts[i] on, with weights in units of 2^-22.

    What lies beyond the last pixel counts as the last one (its weight is 0 in tables made for images).
    """

    starts: Annotated[OwnArray, "A int32"]
    weights: Annotated[OwnArray, "AK int32"]
    axis: int


class PatchGrid(NamedTuple):
    """How rows of a vision encoder are cut from an image of Y rows and X columns.

    N = (Y / P) * (X / P) patches of P = `patch_size`; `merge_size` x `merge_size` neighbours stand one behind the
    other, then the next of the row. Each holds its channels, of these E / (3 P P) frames, of these P rows and columns.
    The frames from `first_frame` on become the image, those before it stay.
    """

    patch_size: int
    merge_size: int
    first_frame: int = 0


def resampled_size(sizes: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns after resampling."""
    return (sizes["A"], sizes["W"]) if sizes["tables.axis"] == 0 else (sizes["S"], sizes["A"])


def _check_resampling(sizes: dict[str, Any]) -> str | None:
    if sizes["tables.axis"] not in (0, 1):
        return f"axis is {sizes['tables.axis']}; expected 0 (height) or 1 (width)"
    rows, columns = resampled_size(sizes)
    if "Y" in sizes and (sizes["Y"], sizes["X"]) != (rows, columns):
        return f"resampled has shape [{sizes['Y']}, {sizes['X']}, 3]; expected [{rows}, {columns}, 3]"
    if "Y" in sizes and rows > MAXIMUM_ROWS:
        return f"{rows} rows of pixels; expected at most {MAXIMUM_ROWS}: scale the image"
    return None


def _check_patches(sizes: dict[str, Any]) -> str | None:
    if (wrong := _check_resampling(sizes)) is not None:
        return wrong
    rows, columns = resampled_size(sizes)
    patch_size, merge_size = sizes["grid.patch_size"], sizes["grid.merge_size"]
    if sizes["grid.first_frame"] < 0:
        return f"first_frame is {sizes['grid.first_frame']}; expected at least 0"
    if patch_size < 1 or merge_size < 1:
        return f"patch_size is {patch_size}, merge_size {merge_size}; expected at least 1"
    block = patch_size * merge_size
    if rows % block or columns % block:
        return f"{rows} x {columns} pixels; expected multiples of patch_size x merge_size = {block}"
    if sizes["V"] != 256:
        return f"table has shape [3, {sizes['V']}]; expected [3, 256]"
    patches, values = rows * columns // patch_size**2, 3 * patch_size**2
    if sizes["N"] != patches or sizes["E"] % values:
        return f"patches has shape [{sizes['N']}, {sizes['E']}]; expected [{patches}, a multiple of {values}]"
    return None


class ImageKernels(Protocol):
    """One implementation of all."""

    @limited(_check_resampling)
    def resample(
        self,
        pixels: Annotated[OwnArray, "SW3 uint8"],
        tables: ResamplingTables,
        resampled: Annotated[OwnArray, "YX3 uint8"],
    ) -> None:
        """`resampled` from `pixels`: [A, W, 3] along axis 0, [S, A, 3] along axis 1."""

    @limited(_check_patches)
    def resample_to_patches(
        self,
        pixels: Annotated[OwnArray, "SW3 uint8"],
        tables: ResamplingTables,
        table: Annotated[OwnArray, "3V float32"],
        grid: PatchGrid,
        patches: Annotated[OwnArray, "NE compute"],
    ) -> None:
        """`patches` from `pixels`, resampled as by `resample` and cut as `grid` says.

        A value v of channel c becomes table[c, v] ([3, 256]).
        """

    def insert_image_rows(
        self,
        image_rows: Annotated[OwnArray, "MH compute"],
        token_ids: Annotated[OwnArray, "1T int32"],
        target: Annotated[OwnArray, "1TH compute"],
        inserted: Annotated[OwnArray, "1 int32"],
        image_token_id: int,
        first_row: int,
    ) -> None:
        """Put rows of `image_rows` where `token_ids` are `image_token_id`, in `target`.

        The n-th image token (n from 0) takes row first_row + n, where that is one of 0..M-1; all other rows of `target`
        stay. `inserted` grows by how many were taken, so that the caller can compare it with what it knows.
        """

    def mrope_rotary_rows(
        self,
        positions: Annotated[OwnArray, "3T int32"],
        axes: Annotated[OwnArray, "R int32"],
        rotary_table: Annotated[OwnArray, "PR float32"],
        rope_rotary_cos_sin: Annotated[OwnArray, "1TR compute"],
    ) -> None:
        """Rotary rows of tokens with three positions (M-RoPE, Wang et al. 2024).

        Column i of token t is that of the row positions[axes[i], t] of `rotary_table`, clamped to 0..P-1; `axes` are 0,
        1 or 2.
        """
