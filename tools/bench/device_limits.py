"""What the GPU, or the part of it that is measured, can read and multiply: what shares of it are shares of.

Two kernels, compiled as the project's are: one reads a gigabyte, which no cache holds, the other multiplies matrices in
registers by `mma.sync` (16 x 8 x 16, fp16 with sums in fp32). They take milliseconds.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from gpu_timer import gpu_milliseconds

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.launch import Kernel, KernelModule, Launch

#: Bytes that are read, and mma.sync of each warp: 4096 multiplications and additions each.
_BYTES, _TURNS, _CHAINS, _OPERATIONS = 1 << 30, 2048, 8, 4096
#: Loads of 16 bytes that each thread has under way: the fastest counts.
_LOADS = (4, 8)
#: And blocks of a multiprocessor.
_THREADS, _BLOCKS = 256, (4, 8)
_CODE = r"""
template <int LOADS>
__global__ void __launch_bounds__(256) read_all(const uint4* from, long long count, unsigned* out) {
    const long long step = (long long)gridDim.x * blockDim.x;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (; at + (LOADS - 1) * step < count; at += LOADS * step) {
        uint4 part[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) part[i] = __ldcs(from + at + i * step);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            sum.x ^= part[i].x, sum.y ^= part[i].y, sum.z ^= part[i].z, sum.w ^= part[i].w;
        }
    }
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u) *out = 1;  // never: the memory is zero
}

extern "C" __global__ void __launch_bounds__(256) multiply(unsigned* out) {
    unsigned a[4] = {threadIdx.x, threadIdx.x ^ 1, 3, 4}, b[2] = {threadIdx.x, 7};
    float c[CHAINS][4] = {};
    for (int turn = 0; turn < TURNS; ++turn) {
#pragma unroll
        for (int i = 0; i < CHAINS; ++i)
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
    float sum = 0;
    for (int i = 0; i < CHAINS; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    if (sum == 12345.0f) *out = 1;  // never: what is multiplied is next to zero
}
"""
_SOURCE = ModuleSource(
    "device_limits",
    ("device_limits.cu",),
    tuple(f"read_all<{loads}>" for loads in _LOADS),
    macros=(("TURNS", _TURNS), ("CHAINS", _CHAINS)),
    headers=(("device_limits.cu", _CODE),),
)


class DeviceLimits(NamedTuple):
    """Read bandwidth in GB/s and arithmetic of `mma.sync` in TFLOP/s, of so many multiprocessors."""

    read_gb_per_s: float
    mma_tflop_per_s: float
    multiprocessors: int

    def read_share(self, nbytes: float, milliseconds: float) -> float:
        """What reading so many bytes in this time is of the bandwidth."""
        return nbytes / (milliseconds * 1e6) / self.read_gb_per_s

    def mma_share(self, operations: float, milliseconds: float) -> float:
        """What so many multiplications and additions in this time are of the arithmetic."""
        return operations / (milliseconds * 1e9) / self.mma_tflop_per_s


@cache
def device_limits() -> DeviceLimits:
    """Measured once, in a context like that of every backend."""
    device = CudaDevice()
    try:
        module = KernelModule(device.gpu, device.stream)
        found = _measure(device, module)
        module.close()
    finally:
        device.close()
    return found


def _measure(device: CudaDevice, module: KernelModule) -> DeviceLimits:
    memory, out = device.zeros((_BYTES,), "uint8"), device.zeros((1,), "int32")
    pointer, target = ctypes.c_void_p(memory.pointer), ctypes.c_void_p(out.pointer)

    def milliseconds(kernel: str, blocks: int, *arguments: Any) -> float:
        """The best of three medians."""
        launch = Launch(module, Kernel(_SOURCE, kernel), (blocks, 1, 1), _THREADS, 0, arguments)
        return min(gpu_milliseconds(device.stream, launch, 3, before=launch) for _ in range(3))

    def read_speed(loads: int, blocks: int) -> float:
        step = loads * blocks * _THREADS * 16  # what is left behind the last whole one is not read
        count = ctypes.c_longlong(_BYTES // 16)
        return _BYTES // step * step / milliseconds(f"read_all<{loads}>", blocks, pointer, count, target) / 1e6

    def multiply_speed(blocks: int) -> float:
        operations = blocks * (_THREADS // 32) * _TURNS * _CHAINS * _OPERATIONS
        return operations / milliseconds("multiply", blocks, target) / 1e9

    counts = [blocks * device.gpu.multiprocessors for blocks in _BLOCKS]
    reading = max(read_speed(*each) for each in product(_LOADS, counts))
    return DeviceLimits(reading, max(map(multiply_speed, counts)), device.gpu.multiprocessors)
