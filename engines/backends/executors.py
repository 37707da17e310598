"""What runs an engine's shape on a GPU: hand-written kernels (`steps/table.py`), or TensorRT and why, whole or with
kernels for its attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from edgellm.engines.backends.encoder_calls import encoder_refusal
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.backends.split_engine import between_engines
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.audio import AudioConfig
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.decoder import looks_ahead
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.segments import segment_shapes
from edgellm.kernels.gpu import find_gpu

#: What `DecoderConfig.layers_differ` says, in words.
_DIFFERENT_LAYERS = "layers that share rows, or have heads, embeddings or factors of their own"
#: The shared memory that a block may have, in bytes, by compute capability.
SHARED_MEMORY = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 << 10),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99 << 10),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227 << 10),
}


def kernel_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why no hand-written kernels run a shape, or the whole that a segment is of; None if they do, or run the
    segment."""
    if shape.phase == "encode":
        return encoder_refusal(model_program(config, shape), dtype, shared_limit)
    choice, reason = kernel_choice(config, replace(shape, segment=None), dtype, shared_limit)
    if choice is None and shape.segment is not None:
        choice, _ = kernel_choice(config, shape, dtype, shared_limit)
    return reason if choice is None else None


def refusal_on(config: ModelConfig, shape: EngineShape, dtype: str, capability: str) -> str | None:
    """The `kernel_refusal` on GPUs of a compute capability ("sm_90")."""
    limit = shared_limit_of(capability)
    return f"no kernels for {capability}" if limit is None else kernel_refusal(config, shape, dtype, limit)


def shared_limit_of(capability: str) -> int | None:
    """The shared memory that a block may have on GPUs of a compute capability, of the one that is there by its own
    word; None where no kernels are made for them."""
    limit, gpu = SHARED_MEMORY.get(capability), find_gpu()
    if limit is not None and gpu is not None and gpu.compute_capability == capability:
        return gpu.shared_limit
    return limit


def split_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int) -> str | None:
    """Why kernels do not compute the attention and recurrent layers of a shape between TensorRT's engines
    (`SplitEngine`); None if they do."""
    if shape.phase not in ("prefill", "accept"):
        return "attention between TensorRT's engines is that of tokens which see all before them"
    if dtype not in ("float16", "bfloat16"):
        return f"kernels compute in float16 and bfloat16, not {dtype}"
    if isinstance(config, DraftConfig) and config.block is not None:
        return "the rows of a draft of blocks are written by kernels alone"
    if isinstance(config, DecoderConfig) and config.layers_differ:
        return f"TensorRT has nothing for {_DIFFERENT_LAYERS}"
    program = model_program(config, shape)
    if program.mixtures:
        return f"TensorRT has nothing for {program.mixtures[0].title}"
    for step in (step for step in program.steps if step.cuts):
        refusal = between_engines(step).refusal(step, program, shared_limit)
        if refusal is not None:
            return f"kernels cannot run {step.title}: {refusal}"
    return None


def plan_refusal(config: ModelConfig, shape: EngineShape, dtype: str, shared_limit: int, packed: bool) -> str | None:
    """Why no TensorRT engine runs a shape that kernels do not run, whole or at its attention and recurrent layers, and
    what to do; None if one does. `packed`: the model has packed weights."""
    if isinstance(config, DecoderConfig) and config.mixture is not None:
        return (
            f"{shape.name} cannot run on this GPU: {kernel_refusal(config, shape, dtype, shared_limit)}, and TensorRT "
            "has nothing for mixtures of experts. Take --backend numpy"
        )
    if shape.kv_cache != "compute":
        kernels = kernel_refusal(config, shape, dtype, shared_limit)
        return (
            f"{shape.name} cannot run with --kv-cache {shape.kv_cache}: TensorRT has no such KV caches, and {kernels}. "
            'Take --kv-cache compute (kv_cache="compute"), or --backend numpy'
        )
    if shape.segment is not None or not (packed or _lacks_layers(config, shape)):
        return None
    kernels, split = (refusal(config, shape, dtype, shared_limit) for refusal in (kernel_refusal, split_refusal))
    if packed:
        return (
            f"{shape.name} cannot run with packed weights on this GPU: {kernels}; TensorRT takes them layer by layer, "
            f"but {split}. Take the unquantized model, or --backend numpy"
        )
    return (
        f"{shape.name} cannot run on this GPU: {kernels}; TensorRT has nothing for {_lacks_layers(config, shape)}, and "
        f"{split}. Take float16 or bfloat16, or --backend numpy"
    )


def _lacks_layers(config: ModelConfig, shape: EngineShape) -> str:
    """The layers of a shape for which TensorRT has no operation; nothing where it has all."""
    if isinstance(config, AudioConfig):
        return "convolutions of encoders of speech"
    if not isinstance(config, DecoderConfig):
        return "drafts of blocks" if isinstance(config, DraftConfig) and config.block is not None else ""
    lacking = {
        "mixtures of experts": config.mixture is not None,
        "recurrent layers": config.is_recurrent,
        _DIFFERENT_LAYERS: config.layers_differ,
        "attention within a window": config.window is not None and shape.window_rows > 0,
        "rotary embeddings of neighbours": config.rotates_neighbours,
        "attention of an image's tokens to those behind them": looks_ahead(config, shape),
    }
    return next((layers for layers, are_there in lacking.items() if are_there), "")


def splits_on(config: ModelConfig, shape: EngineShape, dtype: str, capability: str) -> bool:
    """Whether `SplitEngine` runs a shape that kernels refuse whole, on GPUs of a compute capability."""
    limit = shared_limit_of(capability)
    return limit is not None and split_refusal(config, shape, dtype, limit) is None


def runs_whole(shape: EngineShape) -> bool:
    """Whether the TensorRT that is there has the layers of a shape that it is to run whole, or nothing is known."""
    library = find_tensorrt()
    return library is None or not library.lacks or shape.segment is not None or shape.phase == "encode"


def planned_shapes(
    models: Mapping[str, ModelConfig],
    limits: EngineLimits,
    dtype: str,
    capability: str,
    needless: bool = False,
    packed: Collection[str] = (),
) -> list[EngineShape]:
    """What needs plans on GPUs of a compute capability: whole shapes, and segments of those whose attention kernels
    compute. `models` are those of `EngineShape.model`, of which `packed` have packed weights; `needless`: also of what
    kernels run, whole or as segments, as far as the TensorRT that is there has their layers."""
    found: dict[EngineShape, None] = {}
    for shape in limits.all_engine_shapes():
        config = models[shape.model]
        splits, refused = splits_on(config, shape, dtype, capability), refusal_on(config, shape, dtype, capability)
        if refused is None and not (needless and (splits or runs_whole(shape))):
            continue
        if not splits and (shape.kv_cache != "compute" or shape.model in packed or _lacks_layers(config, shape)):
            continue  # TensorRT has none of these
        found |= dict.fromkeys(segment_shapes(model_program(config, shape)) if splits else (shape,))
    return [
        shape
        for shape in found
        if (needless and runs_whole(shape))
        or shape.segment is None
        or refusal_on(models[shape.model], shape, dtype, capability) is not None
    ]
