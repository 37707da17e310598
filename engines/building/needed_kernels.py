"""Which modules of kernels an engine directory can ask for on a GPU that need not be there, and what scratch its
engines take: they are loaded as on that GPU, and prepare their launches on memory that nobody has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from edgellm.engines.backends.base import BoundEngine
from edgellm.engines.backends.cuda_backend import CODE, CudaBackend
from edgellm.engines.backends.device_layouts import PackedLayouts, packed_layouts
from edgellm.engines.backends.executors import SHARED_MEMORY, engine_shapes
from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.families.programs import ModelConfig, model_program, model_weights
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.steps import NormLinear
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.compiler import ModuleSource
from edgellm.kernels.decode.arguments import CUDA_TYPES
from edgellm.kernels.errors import KernelError
from edgellm.kernels.gpu import GPU, absent_gpu
from edgellm.kernels.launch import Kernel
from edgellm.kernels.quantization.row_runs import PackedLayout

#: Where memory begins that nobody has, and where the scratch of all engines is, behind everything else.
_FIRST, _SCRATCH, _ALIGNMENT = 1 << 20, 1 << 50, 1 << 10


class AbsentModule:
    """What a `KernelModule` tells launchers, of a GPU that is not there; it notes the `sources` of the kernels that
    they ask for."""

    def __init__(self, gpu: GPU) -> None:
        self.architecture, self.multiprocessors = gpu.architecture, gpu.multiprocessors
        self.shared_limit, self.can_overlap, self.has_clusters = gpu.shared_limit, gpu.can_overlap, gpu.has_clusters
        self.driver, self.stream = _AbsentDriver(), None
        self.sources: dict[ModuleSource, None] = {}

    def side_by_side(self, waits: bool = True) -> AbstractContextManager[None]:
        """Nothing is compiled."""
        return nullcontext()

    def load(self, source: ModuleSource) -> None:
        """Note a module that is loaded as a whole."""
        self.sources[source] = None

    prepare = load

    def function(self, kernel: Kernel, shared_bytes: int) -> None:
        """Note the module of a kernel. Raises KernelError where the GPU refuses it."""
        if shared_bytes > self.shared_limit:
            raise KernelError(f"{kernel.expression} needs {shared_bytes} bytes of {self.shared_limit} of shared memory")
        self.sources[kernel.source] = None


class _Anything:
    """Whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return _Anything()

    def __call__(self, *arguments: Any) -> Any:
        return _Anything()


class _AbsentDriver(_Anything):
    """CUDA's driver where there is none: launches do nothing, tensor maps are empty."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def cuLaunchKernelEx(self, *arguments: Any) -> tuple[int]:
        return (0,)

    cuLaunchKernel = cuLaunchKernelEx

    def cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[int, Any]:
        return 0, SimpleNamespace(opaque=())


class AbsentBackend(CudaBackend):
    """The backend of a GPU that is not there: it chooses engines and kernels as on that GPU, and computes nothing."""

    def __init__(
        self, models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, packed: PackedLayouts, gpu: GPU
    ) -> None:
        """`models` are those of `EngineShape.model`, of which `packed` have packed weights."""
        self._directory: Any = SimpleNamespace(models=models, limits=limits, dtype=dtype, model_config=models.get)
        self._packed, self.compute_dtype, self.gpu = packed, dtype, gpu
        self.module = AbsentModule(gpu)
        self._module: Any = self.module
        self._make_launchers()
        self._scratch, self._is_checked = DeviceArray(_SCRATCH, (_SCRATCH,), "uint8"), False
        self._next = _FIRST
        self._loaded: dict[str, PackedLayout | None] = {}
        self._opened = None

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Memory that nobody has, each array behind the one before."""
        array = DeviceArray(self._next, tuple(shape), self._own(dtype))
        self._next += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return array

    zeros = empty

    def part(self, memory: DeviceArray, offset: int, shape: Sequence[int], dtype: str) -> DeviceArray:
        return DeviceArray(memory.pointer + offset, tuple(shape), dtype)

    def upload(self, array: DeviceArray, values: Any) -> None:
        """Copies nothing."""

    def upload_parts(self, array: DeviceArray, parts: Any) -> None:
        """Nor here."""

    def synchronize(self) -> None:
        """Waits for nothing."""

    def load_all(self, weights: Iterable[Mapping[str, PackedLayout | None]]) -> None:
        """Load what every step may need, with the weights of one model after another, packed so (None: dense)."""
        for shape in engine_shapes(self._directory.limits):
            if self.executors.problem(shape) is None:
                self.load_engine(shape)
        engines: list[Any] = list(self._engines)  # none of TensorRT's
        for engine in engines:
            engine.attach(self, self._scratch)
        for loaded in weights:
            self._loaded |= loaded
            self.prepare_steps()
            for engine in engines:
                engine.load_kernels(self._loaded)

    def _plan_engine(self, shape: EngineShape, reason: str | None) -> Any:
        engine = _PlannedEngine(shape, self.compute_dtype, {})
        if shape.segment:
            program = model_program(self._directory.models[shape.model], shape)
            engine.scratch_bytes = tensorrt_scratch(program, self.compute_dtype)
        return engine


class _PlannedEngine(BoundEngine):
    """An engine of TensorRT's, which asks for no kernels."""

    def enqueue(self) -> None:
        """Nothing runs."""


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


class WeightLayouts:
    """How the weights of models are packed, once their scales were read, and what brings them into the layout: which
    depends on no GPU but for what it is compiled for."""

    def __init__(
        self, models: Mapping[str, ModelConfig], checkpoints: Mapping[str, Callable[[], Checkpoint]], dtype: str
    ) -> None:
        """Reads the scales of all packed weights. Raises CheckpointError, and EngineError for weights that kernels do
        not take."""
        self.planned: dict[str, Mapping[str, PackedLayout]] = {}
        #: By model.
        self.loaded: dict[str, dict[str, PackedLayout | None]] = {}
        self.sources: dict[ModuleSource, None] = {}
        for model, config in models.items():
            specs = model_weights(config)
            with checkpoints[model]() as checkpoint:
                planned = packed_layouts(checkpoint, specs, dtype)
                if planned and model in ("vision", "audio"):
                    raise EngineError(f"{checkpoint.path}: packed weights of the {model} encoder run on NumPy alone")
                self.loaded[model] = dict.fromkeys(spec.name for spec in specs)
                if planned:
                    self.planned[model] = planned
                    self._load(models, checkpoint, model, dtype)

    @classmethod
    def dense(cls, models: Mapping[str, ModelConfig]) -> WeightLayouts:
        """Those of models whose weights are not packed."""
        found = cls({}, {}, "float16")
        found.loaded = {name: dict.fromkeys(spec.name for spec in model_weights(models[name])) for name in models}
        return found

    def _load(self, models: Mapping[str, ModelConfig], checkpoint: Checkpoint, model: str, dtype: str) -> None:
        planned = self.planned[model]
        backend = AbsentBackend(models, EngineLimits(), dtype, {}, absent_gpu("sm_90", 1, 1 << 20))
        memory = {name: backend.empty(layout.shape, "uint8") for name, layout in planned.items()}
        loader = PackedLoader(backend, backend.module, dtype)  # type: ignore[arg-type]
        packed = [spec for spec in model_weights(models[model]) if spec.name in planned]
        weights = loader.load(checkpoint, packed, memory, lambda count: None)
        self.loaded[model] |= {name: weight.layout for name, weight in weights.items()}
        self.sources |= backend.module.sources


def needed_modules(
    models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, weights: WeightLayouts, gpu: GPU
) -> list[ModuleSource]:
    """The modules that an engine directory's models can ask for on a GPU within its limits, whatever is asked of them:
    sampling, rules, drafting, given candidates, adapters, logits of texts."""
    backend = AbsentBackend(models, limits, dtype, weights.planned, gpu)
    backend.load_all(weights.loaded.values())
    return [*backend.module.sources, *weights.sources]


def planned_engines(
    models: Mapping[str, ModelConfig], limits: EngineLimits, dtype: str, packed: PackedLayouts
) -> dict[str, int]:
    """What engines take of a memory plan beside weights and states, as far as it is known without a GPU: the bytes of
    code, by the memory plan's names, and of the scratch that all engines share: what the longest chunk of a prompt
    needs, or an encoder. Of shapes that TensorRT runs whole it alone knows."""
    if dtype not in CUDA_TYPES:
        return {"engine scratch": 0, **CODE}
    # Which kernels run a shape may depend on a block's shared memory, here the least of any GPU's; scratch hardly.
    backend = AbsentBackend(models, limits, dtype, packed, absent_gpu("sm_90", 1, min(SHARED_MEMORY.values())))
    for shape in limits.engine_shapes():
        is_largest = shape.phase == "encode" or (shape.phase == "prefill" and shape.tokens >= limits.prefill_chunk)
        if is_largest and backend.executors.problem(shape) is None:
            backend.load_engine(shape)
    return {"engine scratch": backend.scratch_bytes(), **CODE}
