"""Puts the tensor-core attention in the place of the other in all engines: `python -m pytest -p` takes this, too."""

from __future__ import annotations

from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode_attention import attention_launch
from edgellm.kernels.decode_kernels import CudaDecodeKernels
from edgellm.kernels.launch import Launch
from edgellm.kernels.tiled_decode_kernels import CudaTiledKernels

_counters: list[Any] = []


def install() -> None:
    def few(self: CudaDecodeKernels, *given: Any, masks_all: bool = False, any_splits: bool = False) -> Launch:
        return attention_launch(self, *given[:12], *(given[12:13] or (masks_all,)))

    def many(self: CudaTiledKernels, *given: Any) -> Launch:
        import pycuda.driver as cuda

        memory = cuda.mem_alloc(4096)
        cuda.memset_d8(memory, 0, 4096)
        _counters.append(memory)
        counters = DeviceArray(int(memory), (1024,), "uint32", memory)
        return attention_launch(self._module, *given[:10], counters, given[10])

    CudaDecodeKernels.attention = few
    CudaTiledKernels.attention = many


def pytest_configure() -> None:
    install()
