"""A GPU for tests of single kernels, and copies of arrays in its memory."""

from __future__ import annotations

from collections.abc import Iterator
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
