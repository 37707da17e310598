"""Which executor runs an engine's shape on a GPU: the hand-written kernels, or TensorRT with the reason."""

from __future__ import annotations

from collections.abc import Mapping

from edgellm.engines.backends.cuda_draft_engine import CudaDraftEngine
from edgellm.engines.backends.cuda_kernel_engine import CudaKernelEngine
from edgellm.engines.backends.cuda_tiled_engine import decoder_engine_kind
from edgellm.engines.model.config import DecoderConfig, DraftConfig, EngineLimits, EngineShape
from edgellm.engines.model.descriptions import ModelConfig
from edgellm.kernels.decode_kernels import MAX_ROWS

#: The shared memory that a block may have, in bytes, by compute capability.
SHARED_MEMORY = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 << 10),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99 << 10),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227 << 10),
}


def kernel_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why the hand-written kernels do not run a shape on a GPU whose blocks have `shared_limit` bytes, None if they do.

    Where they do not, TensorRT runs it.
    """
    if not isinstance(config, DecoderConfig | DraftConfig):
        return "vision encoders run on TensorRT"
    if shape.phase == "prefill" and (shape.model == "draft" or shape.tokens > MAX_ROWS):
        return "long prefill runs on TensorRT"
    if isinstance(config, DraftConfig):
        return CudaDraftEngine.unsupported(config, shape, dtype, shared_limit)
    kind: type[CudaKernelEngine] = decoder_engine_kind(config, shape, dtype, shared_limit)
    return kind.unsupported(config, shape, dtype, shared_limit)


def refusal_on(config: ModelConfig, shape: EngineShape, dtype: str, capability: str) -> str | None:
    """As `kernel_refusal`, on GPUs of a compute capability ("sm_90")."""
    limit = SHARED_MEMORY.get(capability)
    return f"no kernels for {capability}" if limit is None else kernel_refusal(config, shape, dtype, limit)


def planned_shapes(
    models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, capability: str
) -> list[EngineShape]:
    """The shapes that need plans on GPUs of a compute capability; `models` are those of `EngineShape.model`."""
    shapes = limits.all_engine_shapes()
    return [shape for shape in shapes if refusal_on(models[shape.model], shape, dtype, capability) is not None]
