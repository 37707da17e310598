"""TensorRT on this machine, from where a directory's first plan is asked for: what kernels run needs none of it."""

from __future__ import annotations

import logging
from typing import Any

from edgellm.engines.backends.plan_files import gpu_platform, load_or_build_plan
from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_engine import RuntimeCache, TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineShape
from edgellm.kernels.gpu import GPU

logger = logging.getLogger("edgellm.tensorrt")


class PlanEngines:
    """Loads the plans of a directory, and builds those that are missing.

    Raises MissingDependencyError where there is no TensorRT.
    """

    def __init__(self, directory: EngineDirectory, gpu: GPU) -> None:
        self._directory, self._library = directory, load_tensorrt()
        self._runtime = self._library.module.Runtime(_Logger.make(self._library.module))
        self._platform = gpu_platform(gpu, self._library)
        self._cache = RuntimeCache(f"{self._platform.folder} {directory.description_sha256}")

    def load(self, shape: EngineShape) -> TensorRTEngine:
        """The engine of the plan in the directory or the user's cache; the plan is built where there is none."""
        directory, capability = self._directory, self._platform.compute_capability

        def build() -> bytes:
            stage = f"Plans are built for {capability} with TensorRT {self._library.version}: none were there"
            logger.warning("%s: %s", stage, shape.name, extra={"stage": (stage, shape.name)})
            config = directory.model_config(shape.model)
            return build_plan(config, shape, directory.dtype, directory.attention, capability)

        plan, _ = load_or_build_plan(directory, shape, self._platform, build)
        return TensorRTEngine(self._library, self._runtime, plan, shape, self._cache)

    def keep(self) -> None:
        """Keep what TensorRT compiled for the plans that were loaded."""
        self._cache.save()


class _Logger:
    """Passes TensorRT's warnings and errors on to logging."""

    @staticmethod
    def make(trt: Any) -> Any:
        severity = trt.ILogger.Severity
        levels = {
            severity.INTERNAL_ERROR: logging.ERROR,
            severity.ERROR: logging.ERROR,
            severity.WARNING: logging.INFO,
            severity.INFO: logging.DEBUG,
            severity.VERBOSE: logging.DEBUG,
        }

        class Logger(trt.ILogger):
            def __init__(self) -> None:
                trt.ILogger.__init__(self)

            def log(self, level: Any, message: str) -> None:
                logger.log(levels[level], "%s", message)

        return Logger()
