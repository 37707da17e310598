"""What engines take of a memory plan beside weights and states, as far as it is known without a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from edgellm.engines.backends.device_layouts import PackedLayouts
from edgellm.engines.backends.encoder_engine import EncoderEngine, EncoderStepKernels
from edgellm.engines.backends.executors import kernel_refusal, split_refusal
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.split_engine import SplitEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import segment_shapes
from edgellm.engines.model.steps import NormLinear
from edgellm.kernels.arrays import ITEM_SIZES
from edgellm.kernels.prefill.linear import CudaPromptLinear

#: Shared memory of a block on GPUs that have least of it: which kernels run a shape may depend on it, scratch hardly.
_SHARED_LIMIT = 99 << 10
#: What a memory plan has for the code of kernels and engines: of Llama-3.1-8B's shapes with a draft 58 MiB were taken
#: before any array (TensorRT-RTX 1.6.1 on an H200), and a few more when it first ran.
CODE = {"engines' code": 64 << 20}

#: Kernels of engines that are never run.
_NO_KERNELS, _ENCODER = StepKernels(None, None), EncoderStepKernels(cast(Any, None), CudaPromptLinear)


def planned_engines(
    models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, packed: PackedLayouts
) -> dict[str, int]:
    """The bytes of code, by the memory plan's names, and of the scratch that all engines share: what the longest chunk
    of a prompt needs, or an encoder. Of shapes that TensorRT runs whole it alone knows."""
    found = [0]
    for shape in limits.engine_shapes():
        if shape.phase == "encode" and kernel_refusal(models[shape.model], shape, dtype, _SHARED_LIMIT) is None:
            found.append(EncoderEngine(_ENCODER, models[shape.model], shape, dtype).scratch_bytes)
        if shape.phase != "prefill" or shape.tokens < limits.prefill_chunk:
            continue
        config, own = models[shape.model], {**packed.get("base", {}), **packed.get(shape.model, {})}
        choice, _ = kernel_choice(config, shape, dtype, _SHARED_LIMIT, packed=own)
        if choice is not None:
            engine: Any = KernelEngine(_NO_KERNELS, choice, config, shape, dtype, own)
        elif split_refusal(config, shape, dtype, _SHARED_LIMIT) is None:
            engine = _split_engine(config, shape, dtype, own)
        else:
            continue
        found.append(engine.scratch_bytes)
    return {"engine scratch": max(found), **CODE}


def _split_engine(config: ModelConfig, shape: EngineShape, dtype: str, packed: Mapping[str, Any]) -> SplitEngine:
    engines: dict[int, Any] = {}  # what they need: they are never run
    for part in segment_shapes(model_program(config, shape)):
        on_kernels = kernel_choice(config, part, dtype, _SHARED_LIMIT)[0] is not None
        needed = 0 if on_kernels else tensorrt_scratch(model_program(config, part), dtype)
        engines[part.segment or 0] = SimpleNamespace(takes_packed=on_kernels, scratch_bytes=needed)
    return SplitEngine(_NO_KERNELS, model_program(config, shape), engines, dtype, packed)


def tensorrt_scratch(program: Program, dtype: str) -> int:
    """What TensorRT needs for a segment besides its inputs and outputs, by what TensorRT-RTX 1.6.1 took: of the widest
    layer either what it puts out and what that is computed of, or the latter and its normed input, once in float32."""
    most = 0
    for step in program.steps:
        if isinstance(step, NormLinear):
            rows = math.prod(program.kinds[step.output][0][:-1])
            width, columns = step.linear.weight.shape
            kept = 0 if step.output in program.outputs else width // (1 + step.gated)
            most = max(most, rows * (width * step.gated + max(kept, 3 * columns)))
    return most * ITEM_SIZES[dtype]
