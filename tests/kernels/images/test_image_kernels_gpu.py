"""The CUDA kernels of images equal their NumPy twins, bit for bit, and their speed. Needs a GPU and pycuda."""

from __future__ import annotations

import time

import numpy as np
import pytest
from gpu_device import assert_equals_twin, cuda_device, device_copy, load_kernels, on_device
from gpu_timing import microseconds
from synthetic_images import synthetic_image

from edgellm.kernels.images.contract import PatchGrid, ResamplingTables
from edgellm.kernels.images.twin import NumpyImages
from edgellm.multimodal.image_layout import ImageLayout, Normalization, resampling_weights
from edgellm.multimodal.prepared_image import image_digest

pytestmark = pytest.mark.gpu

TWIN = NumpyImages()
NORMALIZATION = Normalization(1 / 255, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    with cuda_device() as device:
        load_kernels(device)
        yield device


@pytest.fixture
def random_numbers():
    return np.random.default_rng(20)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("size", "resized", "patch", "merge"),
    [
        ((480, 640), (476, 644), 14, 2),
        ((1, 1), (56, 56), 14, 2),
        ((37, 613), (64, 32), 16, 1),
        ((700, 90), (140, 28), 14, 1),
    ],
)
def test_both_kernels_equal_their_twins(gpu, size, resized, patch, merge, dtype, first) -> None:
    pixels, table = synthetic_image(*size), NORMALIZATION.table
    second = 1 - first
    tables = {axis: ResamplingTables(*resampling_weights(size[axis], resized[axis], 3), axis) for axis in (0, 1)}
    grid = PatchGrid(patch, merge)
    between = np.zeros((resized[0], size[1], 3) if first == 0 else (size[0], resized[1], 3), np.uint8)
    patches = np.zeros((resized[0] * resized[1] // patch**2, 3 * 2 * patch**2), dtype)
    TWIN.resample(pixels, tables[first], between)
    TWIN.resample_to_patches(between, tables[second], table, grid, patches)
    device_between = device_copy(gpu, np.zeros_like(between))
    target = device_copy(gpu, np.zeros_like(patches))
    arrays = {axis: on_device(gpu, tables[axis]) for axis in (0, 1)}
    gpu.images.resample(device_copy(gpu, pixels), arrays[first], device_between)
    gpu.images.resample_to_patches(device_between, arrays[second], device_copy(gpu, table), grid, target)
    np.testing.assert_array_equal(gpu.read(device_between).wait(), between)
    np.testing.assert_array_equal(gpu.read(target).wait(), patches)


def test_the_second_frame_of_a_video_leaves_the_first(gpu) -> None:
    frames, table = [synthetic_image(56, 84), np.ascontiguousarray(synthetic_image(56, 84)[::-1])], NORMALIZATION.table
    tables = ResamplingTables(*resampling_weights(56, 56, 3), 0)
    expected = np.zeros((24, 3 * 2 * 14**2), np.float32)
    target, arrays = device_copy(gpu, expected), on_device(gpu, tables)
    for place, frame in enumerate(frames):
        grid = PatchGrid(14, 2, place)
        TWIN.resample_to_patches(frame, tables, table, grid, expected)
        gpu.images.resample_to_patches(device_copy(gpu, frame), arrays, device_copy(gpu, table), grid, target)
    np.testing.assert_array_equal(gpu.read(target).wait(), expected)


@pytest.mark.alone
def test_a_camera_frame_is_prepared_faster_than_on_the_host(gpu) -> None:
    pixels = synthetic_image(480, 640)
    layout = ImageLayout((476, 644), 3, NORMALIZATION, 14, 2, 2)
    tables = [resampling_weights(480, 476, 3), resampling_weights(640, 644, 3)]
    rows, columns = (on_device(gpu, ResamplingTables(*table, axis)) for axis, table in enumerate(tables))
    device_pixels, between = device_copy(gpu, pixels), device_copy(gpu, np.zeros((476, 640, 3), np.uint8))
    table, target = device_copy(gpu, NORMALIZATION.table), gpu.zeros((layout.patches, 1176), "float16")

    def kernels() -> None:
        gpu.images.resample(device_pixels, rows, between)
        gpu.images.resample_to_patches(between, columns, table, PatchGrid(14, 2), target)

    def milliseconds(work) -> float:
        times = []
        for _ in range(10):
            started = time.perf_counter()
            work()
            times.append((time.perf_counter() - started) * 1000)
        return min(times)

    def upload() -> None:
        gpu.upload(device_pixels, pixels)
        gpu.synchronize()

    kernel_time = microseconds(gpu, kernels, "image kernels") / 1000
    host, uploading = milliseconds(lambda: layout.apply(pixels)), milliseconds(upload)
    digest = milliseconds(lambda: image_digest(pixels, layout))
    print(f"640x480: host {host:.2f} ms; digest {digest:.2f}, upload {uploading:.2f}, kernels {kernel_time:.3f} ms")
    assert kernel_time + uploading < host


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "hidden", "rows"), [(1, 1, 1), (37, 7, 20), (300, 64, 300), (512, 2050, 90)])
def test_insert_image_rows(gpu, random_numbers, dtype, tokens, hidden, rows):
    """Rows before the first and after the last are nobody's, other tokens keep what they have, all are counted."""
    image_rows = random_numbers.integers(0, 30_000, (rows, hidden)).astype(dtype)
    target = random_numbers.integers(0, 30_000, (1, tokens, hidden)).astype(dtype)
    token_ids = np.where(random_numbers.random((1, tokens)) < 0.7, 5, 6).astype(np.int32)
    for first_row in (0, -3, rows // 2, rows - 1, rows, -tokens):
        inserted = np.array([40], np.int32)
        arguments = (image_rows, token_ids, target, inserted)
        assert_equals_twin(gpu, gpu.images, TWIN, "insert_image_rows", *arguments, 5, first_row)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16], ids=["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("tokens", "rotary"), [(1, 2), (37, 16), (512, 128), (3, 600)])
def test_mrope_rotary_rows(gpu, random_numbers, dtype, tokens, rotary):
    table = random_numbers.normal(size=(77, rotary)).astype(np.float32)
    axes = random_numbers.integers(0, 3, rotary).astype(np.int32)
    positions = random_numbers.integers(-2, 80, (3, tokens)).astype(np.int32)
    positions[:, 0] = -5, 2_000_000_000, 76
    assert_equals_twin(
        gpu, gpu.images, TWIN, "mrope_rotary_rows", positions, axes, table, np.zeros((1, tokens, rotary), dtype)
    )
