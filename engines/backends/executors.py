"""What runs the steps of an engine's shape on a GPU: hand-written kernels (`steps/table.py`), or TensorRT and why, step
by step or the whole shape.

A step that kernels refuse in one shape is run by TensorRT in all shapes of its model: its bits do not depend on the
shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from edgellm.engines.backends.base import EXECUTORS
from edgellm.engines.backends.device_layouts import PackedLayouts
from edgellm.engines.backends.platform import find_tensorrt
from edgellm.engines.backends.steps.implementation import PROMPT_PHASES, step_rows
from edgellm.engines.backends.steps.table import passes, refused_steps, step_program, whole_refusal
from edgellm.engines.families.programs import ModelConfig
from edgellm.engines.model import steps
from edgellm.engines.model.config import DecoderConfig, DraftConfig
from edgellm.engines.model.encoder_steps import GatedConvolution, LocalAttention, Unfold
from edgellm.engines.model.expert_steps import ChooseExperts, DownExperts, GateUpExperts
from edgellm.engines.model.limits import GIVEN_TREES, EngineLimits, EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.segments import planned_runs, segment_shape
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, MAX_TOKENS
from edgellm.kernels.gpu import find_gpu
from edgellm.kernels.quantization.row_runs import PackedLayout

#: Of each kind of step what of it has no operation in TensorRT, attention apart.
_LACKING: dict[type[steps.Step], str] = {
    **dict.fromkeys((steps.Experts, ChooseExperts, GateUpExperts, DownExperts), "mixtures of experts"),
    **dict.fromkeys((ShortConvolution, GatedDelta, SelectiveScan, GatedNorm), "recurrent layers"),
    **dict.fromkeys((Unfold, GatedConvolution, LocalAttention), "convolutions of encoders of speech"),
}
#: What else TensorRT has not: of a model that it is to run whole, and of attention; and what to do then.
_PACKED, _INT8 = "packed weights", "KV caches of 8 bits"
_ADVICE = {_PACKED: "the unquantized model, or ", _INT8: '--kv-cache compute (kv_cache="compute"), or '}
#: The shared memory that a block may have, in bytes, by compute capability.
SHARED_MEMORY = {
    **dict.fromkeys(("sm_80", "sm_87"), 163 << 10),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120", "sm_121"), 99 << 10),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_110"), 227 << 10),
}


def shared_limit_of(capability: str) -> int | None:
    """The shared memory that a block may have on GPUs of a compute capability, of the one that is there by its own
    word; None where no kernels are made for them."""
    limit, gpu = SHARED_MEMORY.get(capability), find_gpu()
    if limit is not None and gpu is not None and gpu.compute_capability == capability:
        return gpu.shared_limit
    return limit


class Executors:
    """What runs the shapes of a directory's models on GPUs whose blocks may have so much shared memory, fixed by what
    the directory has."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        limits: EngineLimits,
        dtype: str,
        shared_limit: int | None,
        packed: PackedLayouts = MappingProxyType({}),
        executor: str = EXECUTORS[0],
    ) -> None:
        """`models` are those of `EngineShape.model`; `shared_limit` is in bytes, None where there are no kernels;
        `packed` has the layouts of packed weights by model; `executor` is one of `base.EXECUTORS`."""
        self._models, self._limits, self._dtype, self._shared_limit = models, limits, dtype, shared_limit
        self._packed, self.executor = packed, executor
        self._latest: Program | None = None

    @cached_property
    def refused(self) -> Mapping[str, Mapping[str, str]]:
        """The steps that kernels refuse in a shape of a model, by model and title, and why."""
        found: dict[str, dict[str, str]] = {model: {} for model in self._models}
        for shape in engine_shapes(self._limits):
            if self._shared_limit is not None and whole_refusal(shape, self._dtype) is None:
                program = self._program(shape)
                found[shape.model] = refused_steps(program, self._shared_limit) | found[shape.model]
        return found

    def refusal(self, shape: EngineShape) -> str | None:
        """Why kernels do not run all steps of a shape; None if they do."""
        if self._shared_limit is None:
            return "no kernels for this GPU"
        if self._is_one(shape):
            return whole_refusal(shape, self._dtype)
        refused = self.refused[shape.model]
        steps_of = self._program(shape).steps if refused else ()
        found = (
            f"kernels cannot run {step.title}: {refused[step.title]}" for step in steps_of if step.title in refused
        )
        return next(found, None)

    def planned(self, shape: EngineShape) -> frozenset[str] | None:
        """The steps of a shape that TensorRT runs, by title; None where it runs the shape whole."""
        if self._is_one(shape):
            return None
        refused, asked = self.refused[shape.model], self.executor == "tensorrt"
        if not refused and not asked:
            return frozenset()
        program = self._program(shape)
        found = frozenset(step.title for step in program.steps if step.title in refused)
        if asked and shape.phase in PROMPT_PHASES and self._splits(shape, program):
            own = (step for step in program.steps if not step.cuts and step_rows(step, program) > MAX_TILED_ROWS)
            return found.union(step.title for step in own)
        return None if asked and self._whole_runs(shape) else found

    def problem(self, shape: EngineShape) -> str | None:
        """Why nothing runs a shape on the GPU, and what to do; None if something does."""
        titles = self.planned(shape)
        if titles is None:
            lacking = self._whole_lacking(shape)
        else:
            steps_of = (step for step in self._program(shape).steps if step.title in titles) if titles else ()
            lacking = next(filter(None, (self._lacking(shape, step) for step in steps_of)), "")
        if not lacking:
            return None
        advice = _ADVICE.get(lacking) or ("float16 or bfloat16, or " if titles is None else "")
        what = f"{self.refusal(shape)}, and TensorRT has nothing for {lacking}"
        return f"{shape.name} cannot run on this GPU: {what}. Take {advice}--backend numpy"

    def plans(self, shape: EngineShape) -> list[EngineShape]:
        """The shapes of TensorRT's engines that run a shape, or steps of it."""
        titles = self.planned(shape)
        if titles is None:
            return [shape]
        found = dict[EngineShape, None]()
        for _, part in passes(shape) if titles else ():
            program = self._program(part)
            found |= {segment_shape(program, run): None for run in planned_runs(program, titles).values()}
        return list(found)

    def _is_one(self, shape: EngineShape) -> bool:
        """Whether TensorRT runs all steps of a shape, as no kernels are made for it."""
        return self._shared_limit is None or whole_refusal(shape, self._dtype) is not None

    def _splits(self, shape: EngineShape, program: Program) -> bool:
        """Whether TensorRT may run what stands between attention and recurrent layers, and kernels run these."""
        refused = self.refused[shape.model]
        return not self._unusual(shape) and not any(
            step.title in refused if step.cuts else self._lacking(shape, step) for step in program.steps
        )

    def _program(self, shape: EngineShape) -> Program:
        if self._latest is None or self._latest.shape != shape:
            program = step_program(self._models[shape.model], shape)
            packed = packed_of(self._packed, shape.model, program) if self._packed else {}
            self._latest = replace(program, packed=packed)
        return self._latest

    def _whole_runs(self, shape: EngineShape) -> bool:
        """Whether the TensorRT that is there has the layers of a shape that it is to run whole, or nothing is known."""
        library = find_tensorrt()
        has_layers = library is None or not library.lacks or shape.phase == "encode"
        return has_layers and not self._whole_lacking(shape)

    def _whole_lacking(self, shape: EngineShape) -> str:
        """What of a shape has no operation in TensorRT; nothing where it has all."""
        if shape.model in self._packed:
            return _PACKED
        return next(filter(None, (self._lacking(shape, step) for step in self._program(shape).steps)), "")

    def _lacking(self, shape: EngineShape, step: steps.Step) -> str:
        """What of a step has no operation in TensorRT; nothing where it has all."""
        if type(step) is not steps.Attention:
            return _LACKING.get(type(step), "attention to rows that were kept" if getattr(step, "past", 0) else "")
        lacking = {
            self._unusual(shape): True,
            _INT8: shape.kv_cache != "compute",
            "attention within a window": step.window is not None,
            "rotary embeddings of neighbours": step.neighbours,
            "attention of an image's tokens to those behind them": step.looks_ahead,
            "attention with sinks, or a cap of scores": step.sinks is not None or step.cap > 0,
        }
        return next((what for what, is_there in lacking.items() if what and is_there), "")

    def _unusual(self, shape: EngineShape) -> str:
        """What about the layers of a shape's model TensorRT has nothing for, if there is anything."""
        config = self._models[shape.model]
        if isinstance(config, DraftConfig):
            return "drafts of blocks" if config.block is not None else ""
        differ = isinstance(config, DecoderConfig) and config.layers_differ
        return "layers that share rows, or have heads, embeddings or factors of their own" if differ else ""


def packed_of(packed: PackedLayouts, model: str, program: Program) -> dict[str, PackedLayout]:
    """A program's packed weights by name; those that no checkpoint of a draft fills are the base's."""
    found = {}
    for spec in program.weights.values():
        layouts = packed.get(model if spec.parts else "base", {})
        if spec.name in layouts:
            found[spec.name] = layouts[spec.name]
    return found


def planned_shapes(
    models: Mapping[str, ModelConfig],
    limits: EngineLimits,
    dtype: str,
    capability: str,
    needless: bool = False,
    packed: PackedLayouts = MappingProxyType({}),
) -> list[EngineShape]:
    """What needs plans on GPUs of a compute capability; see `Executors`. `needless`: also what TensorRT runs where it
    is asked for."""
    found: dict[EngineShape, None] = {}
    ways = Executors(models, limits, dtype, shared_limit_of(capability), packed)
    for ways.executor in EXECUTORS if needless else EXECUTORS[:1]:
        for shape in limits.all_engine_shapes():
            found |= dict.fromkeys(ways.plans(shape) if ways.problem(shape) is None else ())
    return list(found)


def engine_shapes(limits: EngineLimits) -> list[EngineShape]:
    """Every engine that may be loaded, of each kind with the most keys alone: those of the directory, those that verify
    given candidates, and those that compute a text's logits."""
    shapes = [*limits.engine_shapes()]
    keys = limits.tree_key_ranges[-1]
    given = {*GIVEN_TREES, *limits.verify_sizes}
    shapes += [limits.base_shape("verify", batch, size, keys, size) for batch in limits.batches for size in given]
    shapes += [
        limits.base_shape("verify", 1, size, limits.key_ranges[-1], size)
        for size in (MAX_TOKENS, limits.prefill_chunks[0])
    ]
    adapted = [limits.with_adapters(shape) for shape in shapes if shape.model == "base" and limits.has_lora]
    widest: dict[EngineShape, EngineShape] = {}
    for shape in (*shapes, *adapted):
        kind = replace(shape, key_range=0)
        if kind not in widest or shape.key_range > widest[kind].key_range:
            widest[kind] = shape
    return list(widest.values())
