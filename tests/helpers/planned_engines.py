"""Engines of TensorRT's for runs of steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from edgellm.engines.backends.platform import load_tensorrt
from edgellm.engines.backends.tensorrt_engine import TensorRTEngine
from edgellm.engines.backends.tensorrt_operations import build_plan
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.model.limits import EngineShape


def plan_engine(gpu: Any, config: ModelConfig, shape: EngineShape, dtype: str) -> TensorRTEngine:
    """That of a run, built for the GPU that is there; nothing that it compiles is kept."""
    library = load_tensorrt()
    plan = build_plan(config, shape, dtype, "composed", gpu.gpu.compute_capability)
    cache: Any = SimpleNamespace(attach=lambda configuration: None)
    return TensorRTEngine(library, library.module.Runtime(library.module.Logger()), plan, shape, cache)
