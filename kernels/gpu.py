"""The GPU that there is, and what kernels may count on there: asked of the driver without a CUDA context.

Nothing else asks the driver what the GPU is, so a tool can measure as on another device by standing in here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

#: CUdevice_attribute of cuda.h.
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_MEMORY_OF_A_BLOCK = 16, 75, 76, 97
#: From this compute capability on kernels have clusters, tensor maps and dependent launches.
_HOPPER = 9


@dataclass(frozen=True)
class GPU:
    """One device: `name`, `compute_capability` such as "sm_90", `driver_cuda` (major, minor) and memory in bytes.

    Kernels are compiled for `architecture`: the compute capability, or as "compute_80" PTX, which the driver
    translates. They may count on so many `multiprocessors` and bytes of shared memory a block (`shared_limit`), on
    dependent launches where the GPU `can_overlap`, and on clusters and tensor maps where it `has_clusters`.

    `measured_as` and `enter_partition` are a measuring tool's, empty otherwise: the device that the GPU stands for, and
    what makes a context of a part of the GPU current in the calling thread, in place of the one that is.
    """

    name: str
    compute_capability: str
    driver_cuda: tuple[int, int]
    total_memory: int
    architecture: str
    multiprocessors: int
    shared_limit: int
    can_overlap: bool
    has_clusters: bool
    measured_as: str = ""
    enter_partition: Callable[[], None] | None = field(default=None, compare=False)


_stand_in: GPU | None = None


def find_gpu() -> GPU | None:
    """The first visible GPU, or None where the driver is missing or shows no device."""
    return _stand_in or _first_gpu()


def stand_in(gpu: GPU | None) -> None:
    """Let `gpu` be what is found from now on, None: what there is. For tools that measure as on another device, which
    call it before anything is opened; nothing of the product does."""
    global _stand_in
    _stand_in = gpu


def current_compute_capability() -> str | None:
    """The compute capability of the first GPU ("sm_90"), or None without one."""
    gpu = find_gpu()
    return gpu.compute_capability if gpu else None


@lru_cache(maxsize=1)
def _first_gpu() -> GPU | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDriverGetVersion(ctypes.byref(version))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = f"sm_{attribute(_CAPABILITY_MAJOR)}{attribute(_CAPABILITY_MINOR)}"
    there = absent_gpu(capability, attribute(_MULTIPROCESSORS), attribute(_SHARED_MEMORY_OF_A_BLOCK))
    release = version.value // 1000, version.value % 1000 // 10
    return replace(there, name=name.value.decode(errors="replace"), driver_cuda=release, total_memory=total.value)


def absent_gpu(capability: str, multiprocessors: int, shared_limit: int) -> GPU:
    """A GPU as kernels know it which need not be there: of a compute capability ("sm_87"), with so many multiprocessors
    and bytes of shared memory a block."""
    newer = int(capability[3:-1]) >= _HOPPER
    name = f"a GPU of {capability} with {multiprocessors} multiprocessors"
    return GPU(name, capability, (0, 0), 0, capability, multiprocessors, shared_limit, newer, newer)
