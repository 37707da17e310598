"""Kernels launched through `cuda.bindings`, prepared once and enqueued any number of times.

pycuda cannot ask for programmatic dependent launch, which lets a kernel load what its predecessor does not change while
that one finishes; these launches can.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from edgellm.kernels.compiler import ModuleSource, cached_module
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.gpu import GPU


class Kernel(NamedTuple):
    """One kernel of a module: the name expression of its instantiation, or the name of one that is extern "C"."""

    source: ModuleSource
    expression: str


class KernelModule:
    """Kernels in the current context, for launches on one stream, and what the GPU allows them: see `GPU`.

    A module of them is loaded, once, when it is first asked for.
    """

    def __init__(self, gpu: GPU, stream_handle: int) -> None:
        """Of kernels for `gpu`. Raises MissingDependencyError without cuda.bindings."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                f"cuda.bindings does not load ({error}). Install it with: pip install 'cuda-bindings>=12.9'"
            ) from error
        self.architecture, self.multiprocessors = gpu.architecture, gpu.multiprocessors
        self.shared_limit, self.can_overlap, self.has_clusters = gpu.shared_limit, gpu.can_overlap, gpu.has_clusters
        self.driver = driver
        self.stream = driver.CUstream(stream_handle)
        self._loaded: dict[ModuleSource, tuple[Any, dict[str, str]]] = {}
        self._functions: dict[Kernel, Any] = {}
        self._shared_bytes: dict[Kernel, int] = {}

    def close(self) -> None:
        """Unload the kernels when the stream is done with them: who else is in the context may stay there for long."""
        self.driver.cuStreamSynchronize(self.stream)
        for module, _ in self._loaded.values():
            self.driver.cuModuleUnload(module)
        self._loaded, self._functions = {}, {}

    def _checked(self, result: tuple) -> Any:
        status, *values = result
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"CUDA reported {status} while the kernels were made ready")
        return values[0] if values else None

    def load(self, source: ModuleSource) -> None:
        """Have a module of kernels compiled and loaded: not while the stream's work is captured.

        Raises MissingDependencyError or KernelError.
        """
        if source in self._loaded:
            return
        compiled = cached_module(source, self.architecture)
        status, module = self.driver.cuModuleLoadData(compiled.code)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise refused_by_driver(self.architecture, status)
        self._loaded[source] = module, compiled.lowered_names

    def function(self, kernel: Kernel, shared_bytes: int) -> Any:
        """The kernel, allowed to use `shared_bytes` of shared memory; its module is loaded if it is not yet."""
        attributes = self.driver.CUfunction_attribute
        if kernel not in self._functions:
            self.load(kernel.source)
            module, lowered_names = self._loaded[kernel.source]
            name = lowered_names.get(kernel.expression, kernel.expression)
            function = self._checked(self.driver.cuModuleGetFunction(module, name.encode()))
            # One split of cache and shared memory for all: another split would keep kernels from running side by side.
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._checked(self.driver.cuFuncSetAttribute(function, carveout, 100))
            self._functions[kernel], self._shared_bytes[kernel] = function, 0
        if shared_bytes > self.shared_limit:
            raise KernelError(
                f"{kernel.expression} needs {shared_bytes} bytes of shared memory for this batch and width, the GPU "
                f"has {self.shared_limit}: use a smaller batch or tree"
            )
        if shared_bytes > self._shared_bytes[kernel]:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self.driver.cuFuncSetAttribute(self._functions[kernel], limit, shared_bytes))
            self._shared_bytes[kernel] = shared_bytes
        return self._functions[kernel]


class Launch:
    """One kernel with its grid and arguments; calling it enqueues it on the stream."""

    def __init__(
        self,
        kernels: KernelModule,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Any],
        cluster: tuple[int, int, int] = (1, 1, 1),
    ) -> None:
        """`arguments` are ctypes values, structures among them: a kernel gets each by value.

        `cluster`: of blocks that may read each other's shared memory (sm_90 and later); divides `grid`.
        """
        driver = kernels.driver
        self._driver = driver
        self._function = kernels.function(kernel, shared_bytes)
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
        self.name = kernel.expression
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
