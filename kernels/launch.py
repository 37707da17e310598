"""Kernels launched through `cuda.bindings`, on streams of pycuda's.

Launches may have attributes: clusters, and programmatic dependent launch, which lets a kernel load what its predecessor
does not change while that one finishes. Kernels of models are prepared once as a `Launch`, which can have both; a
`Launcher` enqueues the others at once.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from edgellm.kernels.compilations import Compilations
from edgellm.kernels.compiler import CompiledModule, ModuleSource
from edgellm.kernels.errors import KernelError, MissingDependencyError
from edgellm.kernels.gpu import GPU, find_gpu
from edgellm.kernels.kept import KeptKernels
from edgellm.kernels.made import LOADED, Made
from edgellm.kernels.numpy_launch import Enqueued


class Kernel(NamedTuple):
    """One kernel of a module: the name expression of its instantiation, or the name of one that is extern "C"."""

    source: ModuleSource
    expression: str


class KernelModule:
    """Kernels in the current context, for launches on one stream, and what the GPU allows them: see `GPU`.

    A module of them is loaded, once, when it is first asked for: as it was kept, or compiled now.
    """

    def __init__(self, gpu: GPU, stream: Any, kept: KeptKernels | None = None, made: Made | None = None) -> None:
        """Loads kernels for `gpu`, on a stream of pycuda's; those that are `kept` need no compiler (None: those in the
        user's cache). What is compiled and loaded is counted in `made`. Raises MissingDependencyError without
        cuda.bindings, KernelError for manifests that cannot be read."""
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise MissingDependencyError(
                f"cuda.bindings does not load ({error}). Install it with: pip install 'cuda-bindings>=12.9'"
            ) from error
        kept = kept or KeptKernels(gpu)
        self.architecture, self.multiprocessors = gpu.architecture, kept.gpu.multiprocessors
        self.shared_limit, self.can_overlap, self.has_clusters = gpu.shared_limit, gpu.can_overlap, gpu.has_clusters
        self.driver = driver
        self.stream = driver.CUstream(stream.handle)
        self._made = made or Made()
        self._compilations = Compilations(gpu.architecture, kept, self._made)
        self._collects = False
        #: What is loaded when it was compiled.
        self._begun: dict[ModuleSource, None] = {}
        #: What is loaded then if it can be had.
        self._optional: dict[ModuleSource, None] = {}
        self._loaded: dict[ModuleSource, tuple[Any, dict[str, str]]] = {}
        self._functions: dict[Kernel, Any] = {}
        self._shared_bytes: dict[Kernel, int] = {}

    def close(self) -> None:
        """Unload the kernels when the stream is done with them: who else is in the context may stay there for long."""
        self._compilations.close()
        self.driver.cuStreamSynchronize(self.stream)
        for module, _ in self._loaded.values():
            self.driver.cuModuleUnload(module)
        self._loaded, self._functions, self._begun = {}, {}, {}

    @contextmanager
    def side_by_side(self, waits: bool = True) -> Iterator[None]:
        """Within, nothing waits for the compiler: modules that were kept nowhere are compiled side by side, and are
        loaded at the end, or with `waits` False at the end of the next that waits. What is launched within must have
        been kept: launches of other kernels may be prepared, but not run."""
        outer, self._collects = self._collects, True
        try:
            yield
        finally:
            self._collects = outer
        if waits and not outer:
            self._compilations.wait()
            for source in self._begun:
                self.load(source)
            for source in self._optional:
                with suppress(MissingDependencyError):  # which was logged
                    self.load(source)
            self._begun, self._optional = {}, {}

    def prepare(self, source: ModuleSource) -> None:
        """Have a module compiled, and loaded by the end of `side_by_side`. Where it was kept nowhere and there is no
        compiler, that is an error when it is first used."""
        self._compilations.begin(source, optional=True)
        self._optional[source] = None

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
        if self._collects and self._compilations.begin(source):  # and nobody waits for that now
            self._begun[source] = None
            return
        compiled = self._compilations.module(source)
        with self._made.counting(LOADED):
            status, module = self.driver.cuModuleLoadData(compiled.code)
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise refused_by_driver(self.architecture, compiled, status)
        self._loaded[source] = module, compiled.lowered_names

    def function(self, kernel: Kernel, shared_bytes: int) -> Any:
        """The kernel, allowed to use `shared_bytes` of shared memory; its module is loaded if it is not yet. None while
        that is compiled (`side_by_side`)."""
        attributes = self.driver.CUfunction_attribute
        if kernel not in self._functions:
            self.load(kernel.source)
            if kernel.source not in self._loaded:
                return self._check_shared(kernel, shared_bytes)
            module, lowered_names = self._loaded[kernel.source]
            name = lowered_names.get(kernel.expression, kernel.expression)
            function = self._checked(self.driver.cuModuleGetFunction(module, name.encode()))
            # One split of cache and shared memory for all: another split would keep kernels from running side by side.
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._checked(self.driver.cuFuncSetAttribute(function, carveout, 100))
            self._functions[kernel], self._shared_bytes[kernel] = function, 0
        self._check_shared(kernel, shared_bytes)
        if shared_bytes > self._shared_bytes[kernel]:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self.driver.cuFuncSetAttribute(self._functions[kernel], limit, shared_bytes))
            self._shared_bytes[kernel] = shared_bytes
        return self._functions[kernel]

    def _check_shared(self, kernel: Kernel, shared_bytes: int) -> None:
        if shared_bytes > self.shared_limit:
            raise KernelError(
                f"{kernel.expression} needs {shared_bytes} bytes of shared memory for this batch and width, the GPU "
                f"has {self.shared_limit}: use a smaller batch or tree"
            )


class Argument(ctypes.Structure):
    """The first argument of a kernel that says what runs beside it: by a member `next_early` whether what overlaps the
    kernel starts before it has waited for its predecessor, by `beside` whether the kernel itself waits in the end."""

    #: Whether the kernel has these, and is one that others may run beside.
    holds_next = waits_late = False


class Launch(Enqueued):
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
        first = arguments[0] if arguments else None
        self._argument: Any = first if isinstance(first, Argument) else Argument()
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
        if not self._can_overlap:
            return
        attribute = self._driver.CUlaunchAttribute()
        attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._add(attribute)

    def hold_next(self) -> bool:
        own = self._argument
        if can := own.holds_next and not (own.waits_late and own.beside):
            own.next_early = 0
        return can

    def run_beside(self, before: Enqueued) -> None:
        if self._argument.waits_late and before.hold_next():
            self._argument.beside = 1

    def _add(self, attribute: Any) -> None:
        if all(other.id != attribute.id for other in self._attributes):
            self._attributes.append(attribute)
            self._config.attrs = self._attributes
            self._config.numAttrs = len(self._attributes)

    def __call__(self) -> None:
        (status,) = self._driver.cuLaunchKernelEx(self._config, self._function, self._address, 0)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            early = "" if self._function else ": it was made while its module was compiled, make it again behind that"
            raise KernelError(f"launching {self.name} failed: {status}{early}")


def refused_by_driver(architecture: str, compiled: CompiledModule, reason: Any) -> KernelError:
    """The error for kernels that were compiled for `architecture` and that the driver does not load; `reason` is a
    `CUresult`. Another release is advised where it speaks of what was compiled alone."""
    gpu, release, said = find_gpu(), ".".join(map(str, compiled.release)), reason.name
    if re.search("image|binary|ptx|jit", said, re.IGNORECASE) is None:
        return KernelError(
            f"The kernels compiled for {architecture} could not be loaded: {said}. Not what was compiled is at fault: "
            "an earlier launch has failed, or the GPU's memory is short. The first error that was reported tells which"
        )
    takes = f" takes CUDA {'.'.join(map(str, gpu.driver_cuda))} and" if gpu else ""
    return KernelError(
        f"The driver{takes} refused the kernels compiled for {architecture} by NVRTC {release}: {said}. Use a driver "
        "at least as new as NVRTC, or install the nvidia-cuda-nvrtc of the driver's CUDA release; on JetPack 6: pip "
        "install '.[jetpack6]' in EdgeLLM's checkout"
    )
