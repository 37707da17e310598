"""The backend on the GPU: engines of CUDA kernels or of TensorRT, and memory, on one stream of the primary context."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

from edgellm.engines.backends.base import BoundEngine, Engine
from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.backends.device_layouts import PackedLayouts, packed_layouts, packed_memory
from edgellm.engines.backends.encoder_engine import EncoderEngine, EncoderStepKernels
from edgellm.engines.backends.executors import Executors, packed_of
from edgellm.engines.backends.kernel_engine import KernelEngine
from edgellm.engines.backends.packed_loading import PackedLoader
from edgellm.engines.backends.padded_weights import Padding
from edgellm.engines.backends.step_modules import step_modules
from edgellm.engines.backends.steps.launching import StepKernels
from edgellm.engines.backends.steps.table import kernel_choice
from edgellm.engines.backends.tensorrt_engine import TensorRTPlans
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import FiniteCheck, counted, iterate_weight_parts, part_places
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import DeviceMemoryError, EngineError
from edgellm.engines.families.programs import model_program
from edgellm.engines.model.config import DraftConfig, WeightSpec
from edgellm.engines.model.expert_steps import for_kernels
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.memory_plan import MEBIBYTE, MemoryPlan, most_logit_rows
from edgellm.engines.model.sharding import Share
from edgellm.kernels.acceptance.launcher import CudaAcceptance
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray
from edgellm.kernels.decode.linear import CudaDecodeKernels
from edgellm.kernels.decode.tiled_linear import CudaTiledKernels, capacity_of
from edgellm.kernels.encoder.launcher import CudaEncoder
from edgellm.kernels.experts.prompt_launcher import CudaSortedExperts
from edgellm.kernels.images.launcher import CudaImages
from edgellm.kernels.launch import KernelModule
from edgellm.kernels.prefill.launcher import CudaPrefill
from edgellm.kernels.prefill.linear import CudaPromptLinear
from edgellm.kernels.quantization.device_layout import PackedMatrix
from edgellm.kernels.quantization.row_runs import AnyPacked, PackedLayout, PackedRuns
from edgellm.kernels.ranks.launcher import CudaRank
from edgellm.kernels.recurrent.launcher import CudaRecurrent
from edgellm.kernels.sampling.launcher import CudaSampling
from edgellm.kernels.sampling.twin import first_not_finite
from edgellm.kernels.sounds.launcher import CudaSounds
from edgellm.kernels.tree.launcher import CudaTree

logger = logging.getLogger("edgellm.tensorrt")

#: Kernels of prompts take any number of tokens; an engine's launches are prepared for a multiple of so many.
PROMPT_STEP = 64
#: What a memory plan has for the code of kernels and engines: of Llama-3.1-8B's shapes with a draft 58 MiB were taken
#: before any array (TensorRT-RTX 1.6.1 on an H200), and a few more when it first ran.
CODE = {"engines' code": 64 << 20}


class CudaBackend(CudaDevice):
    """See `edgellm.engines.backends.base.Backend`: the device, with the engines and kernels that run on it.

    It is used from the thread that made it.
    """

    name = "tensorrt"
    steps_ahead = 1
    gpus = 1
    fixed_shapes = True
    computes_at_once = False
    #: Of one that shares the base's steps, what it gives the others.
    share: Share | None = None
    rank: CudaRank | None = None
    #: In how many GPUs' memory the base's table of embeddings is.
    table_pieces = 1
    _asked = "auto"

    def __init__(
        self,
        directory: EngineDirectory,
        packed: PackedLayouts | None = None,
        executor: str = "auto",
        gpu: int | None = None,
        share: Share | None = None,
    ) -> None:
        """`packed` are the `model_layouts` of a directory with packed weights, `executor` is one of
        `base.EXECUTORS`, `gpu` an index, `share` what a rank has of the base's steps (None: all)."""
        self.share = share
        self._directory, self._packed, self._asked = directory, packed or {}, executor
        self.compute_dtype = directory.dtype
        self._plans: TensorRTPlans | None = None  # loaded where a shape needs a plan
        self._opened: ExitStack | None = None
        with ExitStack() as opened:
            super().__init__(gpu)
            opened.callback(super().close)
            self._module = KernelModule(self.gpu, self.stream, directory.kept_kernels(self.gpu), self.made)
            opened.callback(self._module.close)
            self._load()
            self._opened = opened.pop_all()

    def _load(self) -> None:
        rows = most_logit_rows(self._directory.limits)
        workspace = self.zeros((CudaSampling.workspace_bytes(rows),), "uint8")
        with self._module.side_by_side(waits=False):
            self.kernels = CudaSampling(self._module, self.compute_dtype, workspace)
        self._make_launchers()
        self._scratch, self._is_checked = self.empty((0,), "uint8"), False
        #: The weights that were loaded, and how they are packed (None: dense). Where base and draft have one of the
        #: same name it is the draft's, which is loaded last.
        self._loaded: dict[str, PackedLayout | None] = {}

    def _make_launchers(self) -> None:
        """Those that all engines share; each loads a kernel when a launch first needs it."""
        self._engines: list[BoundEngine] = []
        self._few: dict[int, CudaDecodeKernels] = {}
        self._prefill = CudaPrefill(self._module)
        self._encoder = CudaEncoder(self._module)

    @property
    def kernel_module(self) -> KernelModule:
        """The kernels of its context and stream."""
        return self._module

    # What kernels do, made when it is first asked for: of a model in float32 TensorRT runs the steps.
    _many = cached_property(lambda self: CudaTiledKernels(self._module, self.compute_dtype))
    _any_rows = cached_property(lambda self: CudaPromptLinear(self._module, self.compute_dtype))
    _experts = cached_property(lambda self: CudaSortedExperts(self._module, self.compute_dtype))
    draft_tree = cached_property(lambda self: CudaTree(self._module, self.compute_dtype))
    recurrent = cached_property(lambda self: CudaRecurrent(self._module))
    acceptance = cached_property(lambda self: CudaAcceptance(self._module, self.kernels))
    image_kernels = cached_property(lambda self: CudaImages(self._module, self.compute_dtype))
    sound_kernels = cached_property(lambda self: CudaSounds(self._module))

    def empty(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Uninitialized device memory; "compute" stands for `compute_dtype`. Raises DeviceMemoryError."""
        return super().empty(shape, self._own(dtype))

    def zeros_side_by_side(self, edge: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, DeviceArray]:
        return super().zeros_side_by_side({name: (shape, self._own(dtype)) for name, (shape, dtype) in edge.items()})

    def _own(self, dtype: str) -> str:
        return self.compute_dtype if dtype == "compute" else dtype

    def load_weights(
        self, checkpoint: Checkpoint, specs: Sequence[WeightSpec], progress: Callable[[int, int], None] | None = None
    ) -> dict[str, DeviceArray | AnyPacked]:
        """The weights side by side, filled straight from the memory-mapped checkpoint; packed ones in the kernels'
        layout, and those of encoders with zeros behind that a loaded engine takes so (`EncoderEngine.paddings`).
        The kernels that engines need for them are loaded, too."""
        layouts = packed_layouts(checkpoint, specs, self.compute_dtype)
        dense = [spec for spec in specs if spec.name not in layouts]
        # How the weights of encoders stand in memory that loaded engines do not take as they are published.
        encoders = [engine for engine in self._engines if isinstance(engine, EncoderEngine)]
        paddings = {name: padding for engine in encoders for name, padding in engine.paddings.items()}
        memory = self.zeros_side_by_side(
            {
                spec.name: (layouts[spec.name].shape, "uint8")
                if spec.name in layouts
                else (paddings.get(spec.name, spec).shape, spec.dtype)
                for spec in specs
            }
        )
        weights = {spec.name: memory[spec.name] for spec in dense}
        zeros = sum(paddings[spec.name].zeros for spec in dense if spec.name in paddings)
        total = sum(array.nbytes for array in memory.values()) - zeros * ITEM_SIZES[self.compute_dtype]
        advance = counted(total, progress)
        found: dict[str, DeviceArray | AnyPacked] = {**weights}
        with self.large_uploads(total):
            for spec, offset, values in iterate_weight_parts(checkpoint, dense, self.compute_dtype):
                whole, padding = weights[spec.name].reshape(-1), paddings.get(spec.name)
                first = offset // values.itemsize
                for begin, piece in [(first, values)] if padding is None else padding.pieces(first, values):
                    self.upload(whole[begin : begin + piece.size], piece)
                advance(values.nbytes)
            self._check_finite(checkpoint, dense, weights, paddings)
            packed, started = [spec for spec in specs if spec.name in layouts], time.perf_counter()
            if packed:
                found |= PackedLoader(self, self._module, self.compute_dtype).load(checkpoint, packed, memory, advance)
                advance(total)  # layouts are planned for the most
                seconds = time.perf_counter() - started
                logger.info("%d packed weights were brought into the kernels' layout in %.2f s", len(packed), seconds)
        self.load_kernels(found)
        return found

    def _check_finite(
        self,
        checkpoint: Checkpoint,
        dense: Sequence[WeightSpec],
        weights: Mapping[str, DeviceArray],
        paddings: Mapping[str, Padding],
    ) -> None:
        """Raise CheckpointError for a value among loaded `weights` that is infinite or NaN, where it stands in its
        tensor. Weights that `paddings` are of have zeros between, and are looked at as a whole."""
        check = FiniteCheck(checkpoint, dense)
        parts = [part for part in part_places(dense) if check.is_due(part[1])]
        due, padded = dict[str, DeviceArray](), set[str]()
        for spec, name, place in parts:
            if spec.dtype == "compute" and spec.kernel == 1:
                whole, is_padded = weights[spec.name].reshape(-1), spec.name in paddings
                due[name] = whole if is_padded else whole[place]
                padded |= {name} if is_padded else set()
        # All are looked at before one of the results is read, which waits for the uploads, too.
        indices = self.zeros((max(1, len(due)),), "int64")
        for number, tensor in enumerate(due.values()):
            self.kernels.first_not_finite(tensor, indices[number : number + 1])
        found = dict(zip(due, self.download(indices)[: len(due)].tolist(), strict=True))
        # The kernel looks at weights of one dtype, in the order of their tensors.
        others = [name for _, name, _ in parts if name not in due or (name in padded and found[name] >= 0)]
        check.conclude(found | {name: first_not_finite(checkpoint.raw(name).reshape(-1)) for name in others})

    def load_kernels(self, weights: Mapping[str, DeviceArray | AnyPacked]) -> None:
        """Those of the engines whose weights are there, now that it is known how these are packed."""
        packed = {
            name: weight.layout for name, weight in weights.items() if isinstance(weight, PackedMatrix | PackedRuns)
        }
        self._loaded |= dict.fromkeys(weights) | packed
        with self._module.side_by_side():
            self.prepare_steps()
            for engine in self._engines:
                engine.load_kernels(self._loaded)

    def prepare_steps(self) -> None:
        """Have compiled and loaded what steps may ask for beside engines, as far as it is known which weights are
        packed."""
        models = self._directory.models
        for source in step_modules(models, self.compute_dtype, self._loaded, self.table_pieces):
            self._module.prepare(source)

    @property
    def known_memory(self) -> Mapping[str, int]:
        return {**packed_memory(self._directory.models, self._packed, self.compute_dtype), **CODE}

    @cached_property
    def executors(self) -> Executors:
        """What runs which shapes on this GPU."""
        directory, limit = self._directory, self._module.shared_limit
        models = directory.models
        return Executors(models, directory.limits, self.compute_dtype, limit, self._packed, self._asked)

    @property
    def executor(self) -> str:
        """See `Backend`: TensorRT where it runs a step of the base that kernels refuse, whose rows have its bits."""
        return "tensorrt" if self.share is None and self.executors.refused["base"] else self._asked

    def move_slots(self, arrays: Sequence[DeviceArray], *how: Any) -> None:
        self.acceptance.move_slots(arrays, *how)

    def takes_any_key_range(self, shape: EngineShape) -> bool:
        """True where hand-written kernels compute the attention."""
        planned = self.executors.planned(shape)
        if not planned:
            return planned is not None
        program = model_program(self._directory.model_config(shape.model), shape)
        return planned.isdisjoint(step.title for step in program.attentions)

    @cached_property
    def prompt_step(self) -> int | None:
        """See `Backend.prompt_step`: kernels take any number of tokens where they run all prompts of the models."""
        prompts = [each for each in self._directory.limits.all_engine_shapes() if each.phase == "prefill"]
        return PROMPT_STEP if all(self.executors.planned(each) == frozenset() for each in prompts) else None

    def load_engine(self, shape: EngineShape) -> Engine:
        """What runs a shape: kernels, with plans of the steps that TensorRT runs, or a plan of the whole. EngineError
        where nothing runs it. An engine that is loaded after `check_memory` has scratch of its own where it needs more
        than there is."""
        with self._module.side_by_side(waits=False):
            engine = self._engine(shape)
        self._engines.append(engine)
        if self._is_checked:
            small = engine.scratch_bytes > self._scratch.nbytes
            self._attach(engine, self.empty((engine.scratch_bytes,), "uint8") if small else self._scratch)
        return engine

    def _engine(self, shape: EngineShape) -> BoundEngine:
        if self.share is not None and shape.model == "base":
            return self._kernel_engine(shape, frozenset())
        if (problem := self.executors.problem(shape)) is not None:
            raise EngineError(problem)
        planned, reason = self.executors.planned(shape), self.executors.refusal(shape)
        if planned is None or planned:
            logger.info("%s runs on TensorRT%s: %s", shape.name, "" if planned is None else " and kernels", reason)
        if planned is None:
            return self._plan_engine(shape, reason)
        if shape.phase != "encode":
            return self._kernel_engine(shape, planned, reason)
        kernels = EncoderStepKernels(self._encoder, self._any_rows, planned, self._plan_engines(shape, reason))
        return EncoderEngine(kernels, self._directory.model_config(shape.model), shape, self.compute_dtype)

    def _kernel_engine(self, shape: EngineShape, planned: Collection[str], reason: str | None = None) -> KernelEngine:
        """`planned` are the steps that TensorRT runs, by title, the `reason` is that of one which kernels refuse."""
        config, share = self._directory.model_config(shape.model), self.share if shape.model == "base" else None
        program = model_program(config, shape, share)
        packed, gpu = packed_of(self._packed, shape.model, program), capacity_of(self._module)
        given: Any = {"share": share, "planned": planned}
        choice, refusal = kernel_choice(config, shape, self.compute_dtype, gpu, packed, **given)
        if choice is None:
            if share is None:
                raise EngineError(f"{shape.name} cannot run on this GPU: {refusal}. Take --backend numpy")
            raise EngineError(f"{shape.name} cannot be shared by {share[1]} GPUs: {refusal}. Take one GPU")
        kernels, prompt_step = self._step_kernels(config), 0
        if planned:
            kernels = kernels._replace(plans=self._plan_engines(shape, reason))
        elif shape.phase == "prefill" and shape.tokens == self._directory.limits.prefill_chunk:
            prompt_step = PROMPT_STEP
            choice.load_prompts(for_kernels(replace(program, packed=packed)), kernels, prompt_step)
        return KernelEngine(kernels, choice, config, shape, self.compute_dtype, packed, prompt_step, share)

    def _step_kernels(self, config: Any) -> StepKernels:
        """The kernels for a model's heads; those of a kind are the same for all engines."""
        decoder = config.decoder if isinstance(config, DraftConfig) else config
        few = self._few.get(decoder.head_dim)
        if few is None:
            few = self._few[decoder.head_dim] = CudaDecodeKernels(self._module, self.compute_dtype, decoder.head_dim)
        more = self.recurrent, self._any_rows, self._prefill, self._encoder, self._experts, self.rank
        return StepKernels(few, self._many, capacity_of(self._module), *more)

    def _plan_engines(self, shape: EngineShape, reason: str | None) -> dict[EngineShape, BoundEngine]:
        """The plans of those steps of a shape that TensorRT runs."""
        return {part: self._plan_engine(part, reason) for part in self.executors.plans(shape)}

    def _plan_engine(self, shape: EngineShape, reason: str | None) -> BoundEngine:
        """A plan, of a whole shape or of steps, with the reason why not all is run by kernels, if it is not asked for.
        Raises MissingDependencyError without TensorRT."""
        if self._plans is None:
            self._plans = TensorRTPlans(self._directory, self.gpu, self.made, reason)
        return self._plans.engine(shape)

    def scratch_bytes(self) -> int:
        """The largest need of a loaded engine: they run one after another."""
        return max((engine.scratch_bytes for engine in self._engines), default=0)

    def check_memory(self, plan: MemoryPlan) -> None:
        """Compare the plan with the free memory of the GPU, then allocate the engines' scratch."""
        if self._plans is not None:
            self._plans.save()  # by now every engine is loaded
        free, total = self.free_memory()
        if plan.total > free:
            raise DeviceMemoryError(
                f"The model needs {plan.total / MEBIBYTE:.0f} MiB; {free / MEBIBYTE:.0f} of {total / MEBIBYTE:.0f} MiB "
                f"of {self.gpu.name} are free:\n{plan.describe()}\nBuild the engine directory with a smaller "
                "--kv-capacity or --max-batch, close other programs, or take a smaller model."
            )
        self.attach_engines()

    def attach_engines(self) -> None:
        """Allocate the scratch of all engines."""
        self._scratch = self.empty((self.scratch_bytes(),), "uint8")
        self._is_checked = True
        for engine in self._engines:
            self._attach(engine, self._scratch)

    def _attach(self, engine: BoundEngine, scratch: DeviceArray) -> None:
        engine.attach(self, scratch)
        with self._module.side_by_side():
            engine.load_kernels(self._loaded)

    def close(self) -> None:
        """Free engines, scratch and kernels, then leave the context."""
        if self._opened is None:
            return
        self._engines.clear()
        self._plans = None
        self._scratch = None
        opened, self._opened = self._opened, None
        opened.close()
