"""A GPU for tests of single kernels, and copies of arrays in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgellm.kernels.arrays import DeviceArray


@contextmanager
def cuda_device() -> Iterator[Any]:
    """A CUDA context with a stream. What a test hangs on the device as attributes goes before the context does."""
    from edgellm.engines.backends.cuda_device import CudaDevice

    device = CudaDevice()
    own = set(vars(device))
    try:
        yield device
    finally:
        for name in set(vars(device)) - own:
            delattr(device, name)
        device.close()


def device_copy(gpu: Any, values: np.ndarray) -> DeviceArray:
    """The values in device memory; uint16 stands for bfloat16."""
    array = gpu.empty(values.shape, "bfloat16" if values.dtype == np.uint16 else values.dtype.name)
    gpu.upload(array, values)
    return array


def load_kernels(gpu: Any, dtype: str = "float16", rows: int = 8) -> None:
    """Hang the kernels on a device: those of plain steps for up to `rows` rows, of trees, acceptance and images."""
    from edgellm.kernels.acceptance.launcher import ADVANCE, WALK, CudaAcceptance
    from edgellm.kernels.images.launcher import CudaImages
    from edgellm.kernels.launch import KernelModule
    from edgellm.kernels.sampling.launcher import CONSTRAINING, DRAWING, CudaSampling
    from edgellm.kernels.tree.launcher import CudaTree

    module = KernelModule(gpu.gpu, gpu.stream)
    gpu.kernels = CudaSampling(module, dtype, gpu.zeros((CudaSampling.workspace_bytes(rows),), "uint8"))
    for source in (CONSTRAINING, DRAWING, WALK, ADVANCE):  # which tests capture at once
        module.load(source)
    gpu.acceptance = CudaAcceptance(module, gpu.kernels)
    gpu.draft_tree, gpu.images = CudaTree(module, dtype), CudaImages(module, dtype)


def on_device(gpu: Any, value: Any) -> Any:
    """Arrays, also those in bundles, tuples and lists, in device memory; other values as they are."""
    return _of_arrays(value, lambda array: device_copy(gpu, array))


def copied(value: Any) -> Any:
    """The same with copies of arrays on the host."""
    return _of_arrays(value, lambda array: array.copy())


def _of_arrays(value: Any, make: Callable[[np.ndarray], Any]) -> Any:
    """A value with what is made of each array instead."""
    if isinstance(value, np.ndarray):
        return make(value)
    if not isinstance(value, (list, tuple)):
        return value
    items = (_of_arrays(item, make) for item in value)
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def assert_same(gpu: Any, device: Any, host: Any, message: str) -> None:
    """Arrays on the device, in bundles and lists too, have the bits of those on the host."""
    if isinstance(host, (list, tuple)):
        names = getattr(host, "_fields", range(len(host)))
        for name, one, other in zip(names, device, host, strict=True):
            assert_same(gpu, one, other, f"{message}, {name}")
    elif isinstance(host, np.ndarray):
        np.testing.assert_array_equal(gpu.download(device), host, err_msg=message)


def assert_equals_twin(gpu: Any, kernels: Any, twin: Any, kernel: str, *arguments: Any, repeats: int = 2) -> None:
    """Run both on copies of the arguments and compare every array afterwards, those only read included.

    The second run shows that a kernel leaves its workspace as it found it.
    """
    for _ in range(repeats):
        device, host = on_device(gpu, list(arguments)), copied(list(arguments))
        getattr(kernels, kernel)(*device)
        getattr(twin, kernel)(*host)
        assert_same(gpu, device, host, kernel)
