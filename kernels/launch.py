"""Kernels launched through `cuda.bindings`, prepared once and enqueued any number of times.

pycuda cannot ask for programmatic dependent launch, which lets a kernel load what its predecessor does not change while
that one finishes; these launches can.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.compiler import cached_kernels
from edgellm.kernels.errors import KernelError, MissingDependencyError


class KernelModule:
    """The compiled kernels in the current context, for launches on one stream, and what the GPU allows them."""

    def __init__(self, architecture: str, stream_handle: int, cubin: bytes | None = None) -> None:
        """Load the kernels for `architecture` ("sm_90"), or `cubin`. Raises MissingDependencyError or KernelError."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                f"cuda.bindings does not load ({error}). Install it with: pip install 'cuda-bindings>=12.9'"
            ) from error
        self.architecture = architecture
        self.driver = driver
        self.stream = driver.CUstream(stream_handle)
        status, self._module = driver.cuModuleLoadData(cubin or cached_kernels(architecture))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise refused_by_driver(architecture, status)
        self._functions: dict[str, Any] = {}
        self._shared_bytes: dict[str, int] = {}
        device = self._checked(driver.cuCtxGetDevice())
        names = driver.CUdevice_attribute

        def attribute(name: Any) -> int:
            return self._checked(driver.cuDeviceGetAttribute(name, device))

        self.multiprocessors = attribute(names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.shared_limit = attribute(names.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.can_overlap = attribute(names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 9
        self.has_clusters = self.can_overlap  # which came with them, and tensor maps too

    def close(self) -> None:
        """Unload the kernels when the stream is done with them: who else is in the context may stay there for long."""
        self.driver.cuStreamSynchronize(self.stream)
        self.driver.cuModuleUnload(self._module)

    def _checked(self, result: tuple) -> Any:
        status, *values = result
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"CUDA reported {status} while the kernels were made ready")
        return values[0] if values else None

    def function(self, name: str, shared_bytes: int) -> Any:
        """The kernel `name`, allowed to use `shared_bytes` of shared memory."""
        attributes = self.driver.CUfunction_attribute
        if name not in self._functions:
            function = self._checked(self.driver.cuModuleGetFunction(self._module, name.encode()))
            # One split of cache and shared memory for all: another split would keep kernels from running side by side.
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._checked(self.driver.cuFuncSetAttribute(function, carveout, 100))
            self._functions[name], self._shared_bytes[name] = function, 0
        if shared_bytes > self.shared_limit:
            raise KernelError(
                f"{name} needs {shared_bytes} bytes of shared memory for this batch and width, the GPU has "
                f"{self.shared_limit}: use a smaller batch or tree"
            )
        if shared_bytes > self._shared_bytes[name]:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self.driver.cuFuncSetAttribute(self._functions[name], limit, shared_bytes))
            self._shared_bytes[name] = shared_bytes
        return self._functions[name]


class Launch:
    """One kernel with its grid and arguments; calling it enqueues it on the stream."""

    def __init__(
        self,
        kernels: KernelModule,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Any],
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """`cluster`: of blocks that may read each other's shared memory (sm_90 and later); divides `grid`."""
        driver = kernels.driver
        self._driver = driver
        self._function = kernels.function(name, shared_bytes)
        self._arguments = arguments
        self._pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        self._address = ctypes.addressof(self._pointers)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = kernels.stream
        self._config = config
        self._can_overlap = kernels.can_overlap
        self._attributes: list[Any] = []
        self.name = name
        if cluster != (1, 1, 1):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = attribute.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = cluster
            self._add(attribute)

    def overlap_previous(self) -> None:
        """Let this kernel start before its predecessor has finished, where the GPU can; the kernel must wait itself."""
        if not self._can_overlap:
            return
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._add(attribute)

    def _add(self, attribute: Any) -> None:
        if all(other.id != attribute.id for other in self._attributes):
            self._attributes.append(attribute)
            self._config.attrs = self._attributes
            self._config.numAttrs = len(self._attributes)

    def __call__(self) -> None:
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, self._address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"launching {self.name} failed: {status}")


def refused_by_driver(architecture: str, reason: object) -> KernelError:
    """The error for kernels that were compiled for `architecture` and that the driver does not load."""
    return KernelError(
        f"The driver refused the kernels compiled for {architecture}: {reason}. Use a driver at least as new as "
        "nvidia-cuda-nvrtc, or install the nvidia-cuda-nvrtc of the driver's CUDA release."
    )


def pointer(array: DeviceArray | None) -> ctypes.c_void_p:
    """The argument that passes an array's address; null for None."""
    return ctypes.c_void_p(0 if array is None else array.pointer)
