"""Which executor runs an engine's shape on a GPU: hand-written kernels of few or of many rows, or TensorRT and why."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.engines.backends.kernel_executors import Executor, FewRows, ManyRows, passes
from edgellm.engines.model.config import EngineLimits, EngineShape
from edgellm.engines.model.programs import ModelConfig, model_program
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.gpu import find_gpu

#: The shared memory that a block may have, in bytes, by compute capability.
SHARED_MEMORY = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 << 10),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99 << 10),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227 << 10),
}


def kernel_executor(
    config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int, capacity: Capacity | None = None
) -> tuple[Executor | None, str]:
    """The fastest executor by hand-written kernels for a shape where blocks may have `shared_limit` bytes of shared
    memory, and why no faster one; or None, and the first step of the program that none can run, with the reason.

    `capacity` says which is the fastest: by itself an H200 whose blocks have that limit.

    A verify step of more rows than one launch takes runs in passes, each of some of its sequences.
    """
    if dtype not in ("float16", "bfloat16"):
        return None, f"kernels compute in float16 and bfloat16, not {dtype}"
    if shape.model == "vision":
        return None, "vision encoders run on TensorRT"
    part = passes(shape)[-1][1]
    rows = part.batch * part.tokens
    if rows > ManyRows.most_rows:
        return None, f"kernels take up to {ManyRows.most_rows} rows, not {rows}"
    program = model_program(config, part)
    capacity = capacity or Capacity(shared_limit=shared_limit)
    few_first = rows <= FewRows.most_rows and FewRows.clocks(program, capacity) <= ManyRows.clocks(program, capacity)
    reasons: list[str] = []
    for executor in (FewRows, ManyRows) if few_first else (ManyRows, FewRows):
        reason = executor.refusal(program, shared_limit)
        if reason is None:
            return executor, reasons[0] if reasons else ""
        reasons.append(reason)
    return None, reasons[-1] if few_first else reasons[0]


def kernel_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why no executor by hand-written kernels runs a shape, None if one does."""
    executor, reason = kernel_executor(config, shape, dtype, shared_limit)
    return reason if executor is None else None


def refusal_on(config: ModelConfig, shape: EngineShape, dtype: str, capability: str) -> str | None:
    """As `kernel_refusal`, on GPUs of a compute capability ("sm_90")."""
    limit, gpu = SHARED_MEMORY.get(capability), find_gpu()
    if limit is not None and gpu is not None and gpu.compute_capability == capability:
        limit = gpu.shared_limit
    return f"no kernels for {capability}" if limit is None else kernel_refusal(config, shape, dtype, limit)


def planned_shapes(
    models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, capability: str
) -> list[EngineShape]:
    """The shapes that need plans on GPUs of a compute capability; `models` are those of `EngineShape.model`."""
    shapes = limits.all_engine_shapes()
    return [shape for shape in shapes if refusal_on(models[shape.model], shape, dtype, capability) is not None]
