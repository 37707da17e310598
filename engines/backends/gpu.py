"""What the machine's NVIDIA driver says, asked without creating a CUDA context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

_COMPUTE_CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR of cuda.h
_COMPUTE_CAPABILITY_MINOR = 76


@dataclass(frozen=True)
class GPU:
    """One device: `name`, `compute_capability` such as "sm_90", `driver_cuda` (major, minor) and memory in bytes."""

    name: str
    compute_capability: str
    driver_cuda: tuple[int, int]
    total_memory: int


@lru_cache(maxsize=1)
def find_gpu() -> GPU | None:
    """The first visible GPU, or None where the driver is missing or shows no device."""
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
    return GPU(
        name.value.decode(errors="replace"),
        f"sm_{attribute(_COMPUTE_CAPABILITY_MAJOR)}{attribute(_COMPUTE_CAPABILITY_MINOR)}",
        (version.value // 1000, version.value % 1000 // 10),
        total.value,
    )


def current_compute_capability() -> str | None:
    """The compute capability of the first GPU ("sm_90"), or None without one."""
    gpu = find_gpu()
    return gpu.compute_capability if gpu else None
