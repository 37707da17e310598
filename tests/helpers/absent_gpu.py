"""A GPU that is not there: engines prepare their launches for it, and it notes which kernels they ask for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

from edgellm.engines.backends.executors import SHARED_MEMORY
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice, passes, step_program
from edgellm.engines.building.needed_kernels import AbsentModule
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.sharding import Share
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.experts.prompt_launcher import CudaSortedExperts
from edgellm.kernels.gpu import absent_gpu
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.quantization.device_layout import DeviceLayout
from edgellm.kernels.ranks.launcher import CudaRank, RanksArgument
from edgellm.kernels.recurrent.launcher import CudaRecurrent

TARGET = "sm_86"
#: What tilings are chosen by.
GPUS = {
    "H200": Capacity(132, 232_448, True, "sm_90"),
    "Thor": Capacity(20, 232_448, True, "sm_110"),
    "Orin": Capacity(16, 166_912, False, "sm_87"),
    "RTX 4090": Capacity(128, 101_376, False, "sm_89"),
    "RTX 5090": Capacity(170, 101_376, True, "sm_120"),
}
DEVICE: Any = SimpleNamespace(
    zeros=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype),
    empty=lambda shape, dtype: DeviceArray(1 << 20, shape, dtype),
    upload=lambda array, values: None,
    part=lambda memory, offset, shape, dtype: DeviceArray(memory.pointer + offset, shape, dtype),
)


class Module(AbsentModule):
    """What launchers know of a GPU of 16 multiprocessors."""

    def __init__(self) -> None:
        super().__init__(absent_gpu(TARGET, 16, SHARED_MEMORY[TARGET]))


def prepare(
    module: Any,
    config: Any,
    shape: EngineShape,
    dtype: str = "float16",
    packed: Mapping[str, DeviceLayout] = MappingProxyType({}),
    share: Share | None = None,
    planned: Collection[str] = (),
) -> None:
    """Let the engine of a shape, or of a rank's share, prepare its launches, on weights that are `packed` or dense;
    `planned` are the titles of steps that TensorRT runs."""
    few, many = CudaDecodeKernels(module, dtype, config.head_dim), CudaTiledKernels(module, dtype)
    prompts: dict[str, Any] = {"any_rows": CudaPromptLinear(module, dtype), "prefill": CudaPrefill(module)}
    prompts["experts"] = CudaSortedExperts(module, dtype)
    if share is not None:
        prompts["rank"] = CudaRank(module, dtype, RanksArgument(own=share[0], count=share[1], blocks=64))
    kernels = StepKernels(few, many, recurrent=CudaRecurrent(module), encoder=CudaEncoder(module), **prompts)
    choice, reason = kernel_choice(config, shape, dtype, module.shared_limit, packed, share=share, planned=planned)
    assert choice is not None, reason
    parts = [step_program(config, part, packed, share) for _, part in passes(shape)]
    shapes = [plan.plan_shape(part) for plan in choice.plans for part in parts]
    plan = SimpleNamespace(scratch_bytes=0, attach=lambda *arguments: None)
    kernels = kernels._replace(plans=dict.fromkeys(shapes, plan))
    engine = KernelEngine(kernels, choice, config, shape, dtype, packed, share=share)
    engine.attach(DEVICE, DeviceArray(1 << 20, (engine.scratch_bytes,), "uint8"))
    engine.load_kernels(dict.fromkeys(engine.tensors) | packed)
