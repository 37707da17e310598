"""A loaded TensorRT plan, its bindings checked and its scratch buffer shared, and the cache of what it compiled."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgellm.engines.backends.base import BoundEngine
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.plan_files import gpu_platform, load_or_build_plan
from edgellm.engines.backends.platform import INSTEAD, TensorRTLibrary, load_tensorrt
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError, PlanError
from edgellm.engines.model.limits import EngineShape
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.atomic_write import write_atomically
from edgellm.kernels.gpu import GPU
from edgellm.kernels.made import BUILT, Made
from edgellm.kernels.user_paths import user_cache_directory

logger = logging.getLogger("edgellm.tensorrt")

_DTYPE_NAMES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "BOOL": "bool"}


class TensorRTEngine(BoundEngine):
    """One engine with one execution context."""

    def __init__(
        self, library: TensorRTLibrary, runtime: Any, plan: bytes, shape: EngineShape, cache: RuntimeCache
    ) -> None:
        self._engine = runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise PlanError(
                f"TensorRT {library.version} refused the plan {shape.name}. "
                "Rebuild it with edgellm build --refresh-plans ENGINE_DIR."
            )
        self._context = self._engine.create_execution_context(self._settings(library.module, cache))
        if self._context is None:
            raise EngineError(
                f"TensorRT {library.version} made no execution context for {shape.name}; its log line says why, most "
                "often that memory is short: close other programs on the GPU or build with smaller limits."
            )
        self.scratch_bytes = int(self._engine.device_memory_size_v2)
        edge = {}
        for index in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(index)
            dtype = _DTYPE_NAMES[self._engine.get_tensor_dtype(name).name]
            edge[name] = tuple(self._engine.get_tensor_shape(name)), dtype
        super().__init__(shape, "", edge)
        #: Tensors whose addresses TensorRT does not know yet.
        self._unknown = set(edge)
        self._has_kernels = True  # the plan's

    def _settings(self, trt: Any, cache: RuntimeCache) -> Any:
        """What a context is made with: memory of ours, and kernels that are kept where the release keeps any."""
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not hasattr(self._engine, "create_runtime_config"):  # as in 10.3
            return strategy
        configuration = self._engine.create_runtime_config()
        configuration.set_execution_context_allocation_strategy(strategy)
        cache.attach(configuration)
        return configuration

    def attach(self, device: CudaDevice, scratch: DeviceArray) -> None:
        super().attach(device, scratch)
        self._context.set_device_memory(scratch.pointer, scratch.nbytes)

    def _rebind(self, fresh: Collection[str]) -> None:
        self._unknown.update(fresh)

    def enqueue(self) -> None:
        if self._unknown:
            self._check_bound()
        while self._unknown:
            name = self._unknown.pop()
            if not self._context.set_tensor_address(name, self._bound[name].pointer):
                raise EngineError(f"{self.shape.name}: TensorRT refused the address of {name}")
        if not self._context.execute_async_v3(self._device.stream.handle):
            raise EngineError(f"{self.shape.name}: TensorRT could not enqueue the engine")


class TensorRTPlans:
    """TensorRT, on the primary context of a GPU: makes engines of the plans of a directory."""

    def __init__(self, directory: EngineDirectory, gpu: GPU, made: Made, reason: str | None = None) -> None:
        """Plans that are built are counted in `made`. Raises MissingDependencyError without TensorRT, with the `reason`
        why it is needed, if it is not asked for."""
        instead = f"TensorRT is to run that, as {reason}: --backend numpy needs no GPU." if reason else INSTEAD
        self._directory, self._library, self._made = directory, load_tensorrt(instead), made
        trt = self._library.module
        levels = {trt.ILogger.Severity.WARNING: logging.INFO, trt.ILogger.Severity.INFO: logging.DEBUG}
        levels[trt.ILogger.Severity.VERBOSE] = logging.DEBUG
        self._runtime = trt.Runtime(
            self._library.logger(lambda severity, line: logger.log(levels.get(severity, logging.ERROR), "%s", line))
        )
        self._platform = gpu_platform(gpu, self._library)
        self._cache = RuntimeCache(f"{self._platform.folder} {directory.description_sha256}")

    def engine(self, shape: EngineShape) -> TensorRTEngine:
        """Load the plan from the engine directory or the cache; build it where there is none."""

        def build() -> bytes:
            capability, directory = self._platform.compute_capability, self._directory
            stage = f"Plans are built for {capability} with TensorRT {self._library.version}: none were there"
            logger.warning("%s: %s", stage, shape.name, extra={"stage": (stage, shape.name)})
            config = directory.model_config(shape.model)
            with self._made.counting(BUILT):
                return build_plan(config, shape, directory.dtype, directory.attention, capability)

        plan, _ = load_or_build_plan(self._directory, shape, self._platform, build)
        return TensorRTEngine(self._library, self._runtime, plan, shape, self._cache)

    def save(self) -> None:
        """Keep what TensorRT compiled when it loaded plans."""
        self._cache.save()


class RuntimeCache:
    """Keeps what TensorRT-RTX compiles when it loads plans: one cache in the user's cache directory for all engines of
    a model on one platform.

    `key` names model and platform. A file that does not match its digest, or that TensorRT refuses, is ignored and
    replaced; a directory that cannot be written costs time at each start, nothing else.
    """

    def __init__(self, key: str) -> None:
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._path: Path = user_cache_directory() / "runtime" / f"{name}.cache"
        self._cache: Any = None
        self._stored = b""

    def attach(self, configuration: Any) -> None:
        """Let contexts made with an `IRuntimeConfig` use the cache; does nothing where TensorRT has none."""
        if not hasattr(configuration, "create_runtime_cache"):
            return
        if self._cache is None:
            self._cache = configuration.create_runtime_cache()
            self._load()
        configuration.set_runtime_cache(self._cache)

    def save(self) -> None:
        """Keep what was compiled since the file was read."""
        if self._cache is None:
            return
        content = bytes(self._cache.serialize())
        if content == self._stored:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, hashlib.sha256(content).digest() + content)
        except OSError as error:
            logger.info("the runtime cache %s cannot be kept (%s)", self._path, error)
        else:
            self._stored = content

    def _load(self) -> None:
        with suppress(OSError):
            stored = self._path.read_bytes()
            digest, content = stored[:32], stored[32:]
            if hashlib.sha256(content).digest() == digest and self._cache.deserialize(content):
                self._stored = content
