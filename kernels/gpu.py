"""The GPUs that there are, and what kernels may count on there: asked of the driver without a CUDA context.

Nothing else asks the driver what the GPU is, so a tool can measure as on another device by standing in here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

from edgellm.kernels.errors import KernelError

#: CUdevice_attribute of cuda.h.
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_MEMORY_OF_A_BLOCK = 16, 75, 76, 97
#: From this compute capability on kernels have clusters, tensor maps and dependent launches.
_HOPPER = 9


@dataclass(frozen=True)
class GPU:
    """One device: `name`, `compute_capability` such as "sm_90", `driver_cuda` (major, minor) and memory in bytes.
    `index` is its number among those that the driver shows, which `CUDA_VISIBLE_DEVICES` chooses and orders.

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
    index: int = 0


_chosen: int | None = None
_stand_in: GPU | None = None


def find_gpu(index: int | None = None) -> GPU | None:
    """The GPU of an index; None: the one that this process has chosen, else the first, or None where there is none (no
    driver, or it shows no device). Raises KernelError for an index that is not there, with those that are."""
    gpus, wanted = visible_gpus(), _chosen if index is None else index
    if wanted is None:
        return _stand_in or next(iter(gpus), None)
    found = next((gpu for gpu in gpus if gpu.index == wanted), None)
    if found is None:
        shown = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in gpus) or "none (no driver, or it shows no device)"
        raise KernelError(f"there is no GPU {wanted}. The driver shows {shown}: name one that is there, or none")
    return found


def choose_gpu(index: int | None) -> None:
    """Let the GPU of an index be the one that this process means where nothing says which, None: the first. For
    commands, which open one. Raises KernelError as `find_gpu` does."""
    global _chosen
    find_gpu(index)
    _chosen = index


def visible_gpus() -> tuple[GPU, ...]:
    """All that the driver shows, in its order; a GPU that another stands in for is that one."""
    found = {gpu.index: gpu for gpu in _present_gpus()}
    if _stand_in is not None:
        found[_stand_in.index] = _stand_in
    return tuple(found.values())


def stand_in(gpu: GPU | None) -> None:
    """Let `gpu` be what is found of its index from now on, and where no index is named; None: what there is. For tools
    that measure as on another device, which call it before anything is opened; nothing of the product does."""
    global _stand_in
    _stand_in = gpu


def current_compute_capability(index: int | None = None) -> str | None:
    """The compute capability ("sm_90") of what `find_gpu` finds, or None without a GPU."""
    gpu = find_gpu(index)
    return gpu.compute_capability if gpu else None


def reaches(one: int, other: int) -> bool:
    """Whether kernels on a visible GPU can use the memory of another one; both are indices. False without a driver."""
    can, devices = ctypes.c_int(), (ctypes.c_int * 2)()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    for place, index in enumerate((one, other)):
        driver.cuDeviceGet(ctypes.byref(devices, place * ctypes.sizeof(ctypes.c_int)), index)
    return not driver.cuDeviceCanAccessPeer(ctypes.byref(can), *devices) and bool(can)


@lru_cache(maxsize=1)
def _present_gpus() -> tuple[GPU, ...]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count, version = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    driver.cuDriverGetVersion(ctypes.byref(version))
    release = version.value // 1000, version.value % 1000 // 10
    return tuple(replace(_present_gpu(driver, index), driver_cuda=release) for index in range(count.value))


def _present_gpu(driver: ctypes.CDLL, index: int) -> GPU:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), index)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = f"sm_{attribute(_CAPABILITY_MAJOR)}{attribute(_CAPABILITY_MINOR)}"
    there = absent_gpu(capability, attribute(_MULTIPROCESSORS), attribute(_SHARED_MEMORY_OF_A_BLOCK))
    return replace(there, name=name.value.decode(errors="replace"), total_memory=total.value, index=index)


def absent_gpu(capability: str, multiprocessors: int, shared_limit: int) -> GPU:
    """A GPU as kernels know it which need not be there: of a compute capability ("sm_87"), with so many multiprocessors
    and bytes of shared memory a block."""
    newer = int(capability[3:-1]) >= _HOPPER
    name = f"a GPU of {capability} with {multiprocessors} multiprocessors"
    return GPU(name, capability, (0, 0), 0, capability, multiprocessors, shared_limit, newer, newer)
