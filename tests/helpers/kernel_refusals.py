"""Why hand-written kernels do not run a shape of a model."""

from __future__ import annotations

from edgellm.engines.backends.steps.table import refused_steps, step_program, whole_refusal
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.model.limits import EngineShape


def kernel_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why they do not run all steps of a shape where blocks have so many bytes of shared memory; None if they do."""
    if (refused := whole_refusal(shape, dtype)) is not None:
        return refused
    found = refused_steps(step_program(config, shape), shared_limit)
    return next((f"kernels cannot run {title}: {reason}" for title, reason in found.items()), None)
