"""The image kernels on the GPU: compiled by NVRTC, launched through `cuda.bindings`."""

from __future__ import annotations

import ctypes

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.checks import MAXIMUM_ROWS, check_device_arguments
from edgellm.kernels.cuda_kernels import OTHER_KERNELS
from edgellm.kernels.errors import KernelError
from edgellm.kernels.image_interface import check_patches, check_resampling, resampled_size
from edgellm.kernels.launch import Kernel, KernelModule, Launch, pointer

_THREADS = 256


class CudaImageKernels:
    """See `edgellm.kernels.image_interface.ImageKernels`; arrays are `DeviceArray`, on the stream of `module`."""

    def __init__(self, module: KernelModule) -> None:
        self._module = module

    def resample(
        self, pixels: DeviceArray, starts: DeviceArray, weights: DeviceArray, resampled: DeviceArray, axis: int
    ) -> None:
        """Resample along one axis; see the interface."""
        arrays = (pixels, starts, weights, resampled)
        sizes = check_device_arguments("resample", *arrays)
        check_resampling(sizes, axis)
        if sizes["Y"] > MAXIMUM_ROWS:
            raise KernelError(
                f"resample: {sizes['Y']} rows of pixels; expected at most {MAXIMUM_ROWS}: scale the image"
            )
        numbers = (*(sizes[letter] for letter in "SWXK"), axis)
        grid = (-(-3 * sizes["X"] // _THREADS), sizes["Y"], 1)
        Launch(
            self._module,
            Kernel(OTHER_KERNELS, "resample"),
            grid,
            _THREADS,
            0,
            (*map(pointer, arrays), *map(ctypes.c_uint, numbers)),
        )()

    def resample_to_patches(
        self,
        pixels: DeviceArray,
        starts: DeviceArray,
        weights: DeviceArray,
        table: DeviceArray,
        patches: DeviceArray,
        axis: int,
        patch_size: int,
        merge_size: int,
    ) -> None:
        """Resample along one axis, normalize, cut into patches; see the interface."""
        arrays = (pixels, starts, weights, table, patches)
        sizes = check_device_arguments("resample_to_patches", *arrays)
        frames = check_patches(sizes, axis, patch_size, merge_size)
        _, columns = resampled_size("resample_to_patches", sizes, axis)
        numbers = (sizes["S"], sizes["W"], columns, sizes["K"], axis, patch_size, merge_size, frames)
        arguments = (*map(pointer, arrays), *map(ctypes.c_uint, numbers))
        name = f"resample_to_patches_{patches.dtype}"
        Launch(self._module, Kernel(OTHER_KERNELS, name), (sizes["N"], 1, 1), _THREADS, 0, arguments)()
