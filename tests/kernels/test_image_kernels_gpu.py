"""The CUDA kernels of images equal their NumPy twins, bit for bit, and their speed. Needs a GPU and pycuda."""

from __future__ import annotations

import time

import numpy as np
import pytest
from gpu_device import cuda_device, device_copy
from gpu_timing import microseconds
from synthetic_images import synthetic_image

from edgellm.kernels.numpy_image_kernels import NumpyImageKernels
from edgellm.multimodal.image_layout import ImageLayout, Normalization, resampling_weights
from edgellm.multimodal.image_processor import image_digest

pytestmark = pytest.mark.gpu

TWIN = NumpyImageKernels()
NORMALIZATION = Normalization(1 / 255, (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))


@pytest.fixture(scope="module")
def gpu():
    """A CUDA context with a stream, and the kernels loaded into it."""
    from edgellm.kernels.cuda_image_kernels import CudaImageKernels
    from edgellm.kernels.launch import KernelModule

    with cuda_device() as device:
        device.images = CudaImageKernels(KernelModule(device.compute_capability, device.stream.handle))
        yield device


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
    pixels, table = synthetic_image(*size), NORMALIZATION.table()
    second = 1 - first
    tables = {axis: resampling_weights(size[axis], resized[axis], 3) for axis in (0, 1)}
    between = np.zeros((resized[0], size[1], 3) if first == 0 else (size[0], resized[1], 3), np.uint8)
    patches = np.zeros((resized[0] * resized[1] // patch**2, 3 * 2 * patch**2), dtype)
    TWIN.resample(pixels, *tables[first], between, first)
    TWIN.resample_to_patches(between, *tables[second], table, patches, second, patch, merge)
    on_device = device_copy(gpu, np.zeros_like(between))
    target = device_copy(gpu, np.zeros_like(patches))
    arrays = {axis: [device_copy(gpu, values) for values in tables[axis]] for axis in (0, 1)}
    gpu.images.resample(device_copy(gpu, pixels), *arrays[first], on_device, first)
    gpu.images.resample_to_patches(on_device, *arrays[second], device_copy(gpu, table), target, second, patch, merge)
    np.testing.assert_array_equal(gpu.read(on_device).wait(), between)
    np.testing.assert_array_equal(gpu.read(target).wait(), patches)


def test_a_camera_frame_is_prepared_faster_than_on_the_host(gpu) -> None:
    pixels = synthetic_image(480, 640)
    layout = ImageLayout((476, 644), 3, NORMALIZATION, 14, 2, 2)
    tables = [resampling_weights(480, 476, 3), resampling_weights(640, 644, 3)]
    rows, columns = [[device_copy(gpu, values) for values in table] for table in tables]
    device_pixels, between = device_copy(gpu, pixels), device_copy(gpu, np.zeros((476, 640, 3), np.uint8))
    table, target = device_copy(gpu, NORMALIZATION.table()), gpu.zeros((layout.patches, 1176), "float16")

    def kernels() -> None:
        gpu.images.resample(device_pixels, *rows, between, 0)
        gpu.images.resample_to_patches(between, *columns, table, target, 1, 14, 2)

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

    on_device = microseconds(gpu, kernels, "image kernels") / 1000
    host, uploading = milliseconds(lambda: layout.apply(pixels)), milliseconds(upload)
    digest = milliseconds(lambda: image_digest(pixels, layout))
    print(f"640x480: host {host:.2f} ms; digest {digest:.2f}, upload {uploading:.2f}, kernels {on_device:.3f} ms")
    assert on_device + uploading < host
