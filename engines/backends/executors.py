"""Which executor runs an engine's shape on a GPU: the hand-written kernels, or TensorRT with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    """The shapes that TensorRT runs on GPUs of a compute capability: those that need plans there.

    `models` has the configuration by `EngineShape.model`.
    """
    shapes = limits.all_engine_shapes()
    return [shape for shape in shapes if refusal_on(models[shape.model], shape, dtype, capability) is not None]


@dataclass(frozen=True)
class Executor:
    """What runs some `shapes` of a model: the kernels, or TensorRT for a `reason`."""

    shapes: str
    reason: str | None

    @property
    def name(self) -> str:
        """In words."""
        return "kernels" if self.reason is None else "TensorRT"


def executors(models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, capability: str) -> list[Executor]:
    """What runs all shapes on GPUs of a compute capability: first the kernels, then TensorRT, a reason at a time.

    Of the steps of one phase that TensorRT runs the reason is that of the first.
    """
    steps: dict[tuple[str, str], dict[str | None, list[EngineShape]]] = {}
    for shape in limits.all_engine_shapes():
        reason = refusal_on(models[shape.model], shape, dtype, capability)
        found = steps.setdefault((shape.model, shape.phase + (" with adapters" if shape.lora_slots else "")), {})
        if reason is not None:
            reason = next((known for known in found if known is not None), reason)
        found.setdefault(reason, []).append(shape)
    names: dict[str | None, list[str]] = {None: []}
    for (model, phase), by_reason in steps.items():
        every = {(shape.tokens, shape.batch) for shapes in by_reason.values() for shape in shapes}
        for reason, shapes in by_reason.items():
            names.setdefault(reason, []).append(f"{model} {phase} {_sizes(shapes, every)}")
    return [Executor("; ".join(found), reason) for reason, found in names.items() if found]


def _sizes(shapes: Sequence[EngineShape], every: Collection[tuple[int, int]]) -> str:
    """The tokens of shapes, with their batch sizes where others of `every` (tokens, batch) run otherwise."""
    batches: dict[int, list[int]] = {}
    for tokens, batch in sorted({(shape.tokens, shape.batch) for shape in shapes}):
        batches.setdefault(tokens, []).append(batch)
    return ", ".join(
        f"{tokens}"
        if len(found) == sum(other == tokens for other, _ in every)
        else f"{tokens} (batch {', '.join(map(str, found))})"
        for tokens, found in batches.items()
    )
