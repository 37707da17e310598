"""The image kernels in NumPy against Pillow, bit for bit, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from synthetic_images import synthetic_image

from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.contracts import COMPUTE_DTYPES
from edgellm.kernels.errors import KernelError
from edgellm.kernels.images.contract import PatchGrid, ResamplingTables
from edgellm.kernels.images.twin import NumpyImages
from edgellm.multimodal.image_layout import FILTERS, resampling_axes, resampling_weights

KERNELS = NumpyImages()
IDENTITY = np.repeat(np.arange(256, dtype=np.float32)[None], 3, axis=0)


def resized(pixels: np.ndarray, size: tuple[int, int], resample: int) -> np.ndarray:
    """[*size, 3] uint8 by both kernels: patches of one pixel are the pixels in order."""
    first, second = resampling_axes(pixels.shape[:2], size, resample)
    between = np.empty((size[0], pixels.shape[1], 3) if first == 0 else (pixels.shape[0], size[1], 3), np.uint8)
    weights = resampling_weights(pixels.shape[first], size[first], resample)
    KERNELS.resample(pixels, ResamplingTables(*weights, first), between)
    patches = np.empty((size[0] * size[1], 3), np.float32)
    weights = resampling_weights(pixels.shape[second], size[second], resample)
    KERNELS.resample_to_patches(between, ResamplingTables(*weights, second), IDENTITY, PatchGrid(1, 1), patches)
    return patches.reshape(*size, 3).astype(np.uint8)


@settings(max_examples=60, deadline=None)
@given(*[st.integers(1, 90)] * 4, st.sampled_from(sorted(FILTERS)))
def test_resampling_equals_pillow(height: int, width: int, new_height: int, new_width: int, resample: int) -> None:
    pixels = synthetic_image(height, width)
    expected = np.asarray(Image.fromarray(pixels).resize((new_width, new_height), resample))
    np.testing.assert_array_equal(resized(pixels, (new_height, new_width), resample), expected)


@pytest.mark.parametrize("resample", sorted(FILTERS))
def test_a_camera_frame_and_extreme_values_equal_pillow(resample: int) -> None:
    frame = synthetic_image(480, 640)
    frame[100:300, 100:400] = 255
    frame[200:250, 50:500:2] = 0
    for height, width in ((476, 644), (120, 200), (480, 640), (700, 640)):
        expected = np.asarray(Image.fromarray(frame).resize((width, height), resample))
        np.testing.assert_array_equal(resized(frame, (height, width), resample), expected)


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES)
def test_patches_stand_in_blocks_with_their_frames(dtype: str) -> None:
    pixels = synthetic_image(8, 12)
    table = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    patches = np.zeros((24, 3 * 2 * 4), np.uint16 if dtype == "bfloat16" else dtype)
    tables = ResamplingTables(*resampling_weights(8, 8, 3), 0)
    KERNELS.resample_to_patches(pixels, tables, table, PatchGrid(2, 2), patches)
    number = 0
    for block_row in range(2):
        for block_column in range(3):
            for row in range(2):
                for column in range(2):
                    top, left = (2 * block_row + row) * 2, (2 * block_column + column) * 2
                    part = pixels[top : top + 2, left : left + 2]
                    values = [[table[c][part[..., c]]] * 2 for c in range(3)]
                    expected = np.array(values, np.float32).ravel()
                    expected = bfloat16_bits(expected) if dtype == "bfloat16" else expected.astype(dtype)
                    np.testing.assert_array_equal(patches[number], expected)
                    number += 1


def test_frames_of_a_video_are_written_one_after_the_other() -> None:
    table = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    tables, frames = ResamplingTables(*resampling_weights(8, 8, 3), 0), [synthetic_image(8, 12), synthetic_image(12, 8)]
    frames[1] = np.ascontiguousarray(frames[1].swapaxes(0, 1))
    together, alone = np.zeros((24, 24), np.float32), np.zeros((2, 24, 12), np.float32)
    for place, frame in enumerate(frames):
        KERNELS.resample_to_patches(frame, tables, table, PatchGrid(2, 2, place), together)
        KERNELS.resample_to_patches(frame, tables, table, PatchGrid(2, 2), alone[place])
    by_frame = together.reshape(24, 3, 2, 4)
    for place in (0, 1):
        np.testing.assert_array_equal(by_frame[:, :, place], alone[place].reshape(24, 3, 4))
    assert (alone[0] != alone[1]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_frame": -1}, r"first_frame is -1; expected at least 0"),
        ({"patches": np.zeros((5, 12), np.float32)}, r"patches has shape \[5, 12\]; expected \[6, a multiple of 12\]"),
        ({"patches": np.zeros((6, 13), np.float32)}, r"patches has shape \[6, 13\]"),
        ({"table": np.zeros((3, 255), np.float32)}, r"table has shape \[3, 255\]; expected \[3, 256\]"),
        ({"merge_size": 2}, r"4 x 6 pixels; expected multiples of patch_size x merge_size = 4"),
        ({"patch_size": 0}, r"patch_size is 0, merge_size 1; expected at least 1"),
        ({"axis": 2}, r"axis is 2; expected 0 .height. or 1"),
        ({"pixels": np.zeros((4, 6, 4), np.uint8)}, r"pixels has shape \[4, 6, 4\]"),
    ],
)
def test_sizes_that_do_not_belong_together_are_refused(change: dict, message: str) -> None:
    arguments = {
        "pixels": np.zeros((4, 6, 3), np.uint8),
        "starts": np.zeros(4, np.int32),
        "weights": np.zeros((4, 1), np.int32),
        "table": IDENTITY,
        "patches": np.zeros((6, 12), np.float32),
        "axis": 0,
        "patch_size": 2,
        "merge_size": 1,
        "first_frame": 0,
        **change,
    }
    tables = ResamplingTables(arguments["starts"], arguments["weights"], arguments["axis"])
    grid = PatchGrid(arguments["patch_size"], arguments["merge_size"], arguments["first_frame"])
    with pytest.raises(KernelError, match=message):
        KERNELS.resample_to_patches(arguments["pixels"], tables, arguments["table"], grid, arguments["patches"])


def test_a_target_of_another_size_is_refused() -> None:
    pixels, weights = np.zeros((4, 6, 3), np.uint8), resampling_weights(6, 5, 3)
    with pytest.raises(KernelError, match=r"resampled has shape \[4, 6, 3\]; expected \[4, 5, 3\]"):
        KERNELS.resample(pixels, ResamplingTables(*weights, 1), np.zeros((4, 6, 3), np.uint8))
