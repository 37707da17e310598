"""The image kernels on the GPU."""

from __future__ import annotations

from functools import lru_cache

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.contracts import cuda_header
from edgellm.kernels.images.contract import WEIGHT_BITS, ImageKernels, ResamplingTables
from edgellm.kernels.launch import Kernel, KernelModule
from edgellm.kernels.launcher import CUDA_TYPES, Launcher

_THREADS = 256


@lru_cache
def images_source(dtype: str) -> ModuleSource:
    """What a model of `dtype` needs for images."""
    templates = (f"{name}<{CUDA_TYPES[dtype]}>" for name in ("resample_to_patches", "mrope_rotary_rows"))
    return ModuleSource(
        f"images_{dtype}",
        ("images/patches.cu", "images/rows.cu"),
        ("resample", f"insert_image_rows<{CUDA_TYPES[dtype]}>", *templates),
        (("WEIGHT_BITS", WEIGHT_BITS),),
        (("images/arguments.cuh", cuda_header(ImageKernels)),),
    )


class CudaImages(Launcher):
    """See `edgellm.kernels.images.contract.ImageKernels`; arrays are `DeviceArray`."""

    def __init__(self, module: KernelModule, dtype: str) -> None:
        """Prepares the kernels for a model of `dtype`."""
        super().__init__(module, ImageKernels)
        self._dtype = dtype

    def resample(self, pixels: DeviceArray, tables: ResamplingTables, resampled: DeviceArray) -> None:
        sizes, packed = self._packed("resample", pixels, tables, resampled)
        kernel = Kernel(images_source(self._dtype), "resample")
        self._launch(kernel, (-(-3 * sizes["X"] // _THREADS), sizes["Y"]), _THREADS, (packed,))

    def resample_to_patches(self, pixels, tables, table, grid, patches):
        sizes, packed = self._packed("resample_to_patches", pixels, tables, table, grid, patches)
        self._launch(_kernel("resample_to_patches", patches), (sizes["N"],), _THREADS, (packed,))

    def insert_image_rows(self, image_rows, token_ids, target, inserted, image_token_id, first_row):
        arguments = (image_rows, token_ids, target, inserted, image_token_id, first_row)
        sizes, packed = self._packed("insert_image_rows", *arguments)
        self._launch(_kernel("insert_image_rows", image_rows), (sizes["T"],), _THREADS, (packed,))

    def mrope_rotary_rows(self, positions, axes, rotary_table, rope_rotary_cos_sin):
        sizes, packed = self._packed("mrope_rotary_rows", positions, axes, rotary_table, rope_rotary_cos_sin)
        self._launch(_kernel("mrope_rotary_rows", rope_rotary_cos_sin), (sizes["T"],), _THREADS, (packed,))


def _kernel(name: str, array: DeviceArray) -> Kernel:
    return Kernel(images_source(array.dtype), f"{name}<{CUDA_TYPES[array.dtype]}>")
