"""Which implementations there are of each kind of step, and the choice among them for a program on a GPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from edgellm.engines.backends.encoder_calls import MOST_ROWS, encoder_refusals
from edgellm.engines.backends.steps import experts
from edgellm.engines.backends.steps.attention import FewTokens, PromptTokens
from edgellm.engines.backends.steps.implementation import PROMPT_PHASES, Implementation, packed_layout, step_rows
from edgellm.engines.backends.steps.launching import JOINED_INPUTS, StepKernels
from edgellm.engines.backends.steps.linear import FewRows, ManyRows, PackedRows, PromptRows
from edgellm.engines.backends.steps.plans import ByPlan
from edgellm.engines.backends.steps.ranks import AddNormed, JoinColumns, SquaresOfParts, SumRanks
from edgellm.engines.backends.steps.recurrent import ConvolveColumns, NormGated, UpdateMatrices, UpdateSpaces
from edgellm.engines.backends.steps.rows import (
    AddRows,
    NormPartsInPlace,
    NormRows,
    RowsSideBySide,
    ScaleRows,
    TokenInputsInPlace,
)
from edgellm.engines.backends.steps.sorted_experts import DownSorted, GateUpSorted
from edgellm.engines.families.programs import ModelConfig, model_program
from edgellm.engines.model import expert_steps, steps
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.row_steps import TokenInputs
from edgellm.engines.model.segments import planned_runs
from edgellm.engines.model.sharding import Share
from edgellm.engines.model.states import Edge, without_layer
from edgellm.kernels.decode.contract import MAX_TILED_ROWS, low_words
from edgellm.kernels.decode.tilings import Capacity, fastest
from edgellm.kernels.quantization.row_runs import PackedLayout

_LINEAR: tuple[Implementation[Any], ...] = FewRows(), ManyRows(), PackedRows(), PromptRows()
#: Of each kind of step, what runs it; of those that do not refuse it the fastest by their clocks, or the first.
TABLE: dict[type[steps.Step], tuple[Implementation[Any], ...]] = {
    steps.Scale: (ScaleRows(),),
    steps.Add: (AddRows(),),
    steps.SideBySide: (RowsSideBySide(),),
    steps.Normed: (NormRows(),),
    steps.NormParts: (NormPartsInPlace(),),
    TokenInputs: (TokenInputsInPlace(),),
    steps.NormLinear: _LINEAR,
    steps.LinearResidual: _LINEAR,
    steps.Attention: (FewTokens(), PromptTokens()),
    ShortConvolution: (ConvolveColumns(),),
    GatedDelta: (UpdateMatrices(),),
    SelectiveScan: (UpdateSpaces(),),
    GatedNorm: (NormGated(),),
    expert_steps.ChooseExperts: (experts.ChooseByRow(),),
    expert_steps.GateUpExperts: (GateUpSorted(), experts.GateUpPairs()),
    expert_steps.DownExperts: (DownSorted(), experts.DownPairs()),
    steps.Reduce: (SumRanks(),),
    steps.SquareSums: (SquaresOfParts(),),
    steps.AddResidual: (AddNormed(),),
    steps.Assemble: (JoinColumns(),),
}


@dataclass(frozen=True)
class Choice:
    """What runs each step of an engine's programs, in order."""

    implementations: tuple[Implementation[Any], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The kernels that it has, by what they are called, each once."""
        return tuple(dict.fromkeys(each.name for each in self.implementations))

    @property
    def plans(self) -> tuple[ByPlan, ...]:
        """What runs steps by TensorRT, each once."""
        return tuple(dict.fromkeys(each for each in self.implementations if isinstance(each, ByPlan)))

    @cached_property
    def by_plan(self) -> frozenset[int]:
        """The steps that these run, by number."""
        return frozenset(number for plan in self.plans for number in range(*plan.run))

    def reads_mask(self, phase: str) -> bool:
        """Whether a step reads the engine's `attention_mask`."""
        return any(each.reads_decode_mask if phase == "decode" else each.reads_mask for each in self.implementations)

    def leading(self, program: Program) -> Iterator[tuple[Implementation[Any], steps.Step]]:
        """Each step of a program that is not run with one before it, and what runs it."""
        for number, (way, step) in enumerate(zip(self.implementations, program.steps, strict=True)):
            if way.lead(number) == number:
                yield way, step

    def scratch(self, program: Program) -> Edge:
        """Shape and dtype of every value of a program that is not at its edge, and of what kernels need beside."""
        edge = program.inputs.keys() | program.outputs.keys()
        each = (implementation.scratch(step, program) for implementation, step in self.leading(program))
        inside = ({name: kind for name, kind in own.items() if name not in edge} for own in each)
        return {JOINED_INPUTS: ((0,), "compute")} | _largest(inside)

    def counters(self, program: Program) -> Edge:
        """Shape and dtype of what is zero between steps."""
        return _largest(implementation.counters(step, program) for implementation, step in self.leading(program))

    def load_prompts(self, program: Program, kernels: StepKernels, step: int, are_packed: bool = False) -> None:
        """Compile and load what prompts of each number of tokens need, in steps of so many up to the program's: for the
        steps whose weights are packed, of which not all is known before they are loaded, or for the others."""
        own = [pair for pair in self.leading(program) if (packed_layout(pair[1], program) is not None) == are_packed]
        needed = {(implementation, implementation.loads(each, program)) for implementation, each in own}
        for tokens in {*range(step, program.shape.tokens, step), program.shape.tokens}:
            for implementation, what in needed:
                if what:
                    implementation.load(what, program, kernels, tokens)


def _largest(edges: Iterable[Edge]) -> Edge:
    """Of what has one name, but for the number of a layer, the largest."""
    found = dict[str, tuple[tuple[int, ...], str]]()
    for edge in edges:
        for name, (size, dtype) in edge.items():
            place = without_layer(name)
            if place not in found or math.prod(found[place][0]) < math.prod(size):
                found[place] = size, dtype
    return found


def kernel_choice(
    config: ModelConfig,
    shape: EngineShape,
    dtype: str,
    gpu: Capacity | int,
    packed: Mapping[str, PackedLayout] | None = None,
    only: Collection[type[Implementation[Any]]] = (),
    share: Share | None = None,
    planned: Collection[str] = (),
) -> tuple[Choice | None, str]:
    """The fastest implementation of each step of a shape on a `gpu`; or None, and the first step of the program that
    none can run, with the reason.

    A number as `gpu` is an H200 whose blocks have so many bytes of shared memory. `packed` are the weights that are
    read packed, by name. `only`: of linear layers these implementations alone, where one of them takes the step. A step
    of more rows than one launch takes runs in passes, each of some of its sequences. `share`: of one rank. `planned`
    are the titles of steps that TensorRT runs.
    """
    if (reason := whole_refusal(shape, dtype)) is not None:
        return None, reason
    program = step_program(config, shape, packed, share)
    return choose(program, Capacity(shared_limit=gpu) if isinstance(gpu, int) else gpu, only, planned)


def whole_refusal(shape: EngineShape, dtype: str) -> str | None:
    """Why kernels run no step of a shape; None if they may."""
    if dtype not in ("float16", "bfloat16"):
        return f"kernels compute in float16 and bfloat16, not {dtype}"
    part, most = passes(shape)[-1][1], MOST_ROWS if shape.phase == "encode" else MAX_TILED_ROWS
    if shape.phase not in PROMPT_PHASES and (rows := part.batch * part.tokens) > most:
        return f"kernels take up to {most} rows, not {rows}"
    return None


def step_program(
    config: ModelConfig,
    shape: EngineShape,
    packed: Mapping[str, PackedLayout] | None = None,
    share: Share | None = None,
) -> Program:
    """The program whose steps are chosen: of the last pass of a shape, for kernels."""
    program = replace(model_program(config, passes(shape)[-1][1], share), packed=packed or {})
    return expert_steps.for_kernels(program)


def choose(
    program: Program, gpu: Capacity, only: Collection[type[Implementation[Any]]] = (), planned: Collection[str] = ()
) -> tuple[Choice | None, str]:
    """See `kernel_choice`."""
    chosen: list[Implementation[Any]] = []
    plans = (
        ByPlan(*runs, bool(steps.stateful(program.steps[slice(*runs[0])])))
        for runs in planned_runs(program, planned).items()
    )
    by_step = {number: plan for plan in plans for number in range(*plan.run)}
    for number, step in enumerate(program.steps):
        possible, reason = ([by_step[number]], "") if number in by_step else _possible(step, program, gpu.shared_limit)
        if not possible:
            return None, f"kernels cannot run {step.title}: {reason}"
        preferred = [each for each in possible if type(each) in only] or possible
        chosen.append(_fastest(preferred, step, program, gpu))
    return Choice(tuple(chosen)), ""


def refused_steps(program: Program, limit: int) -> dict[str, str]:
    """The steps that no kernels run where blocks may have `limit` bytes of shared memory, by title, and why."""
    if program.shape.phase == "encode":
        return encoder_refusals(program, limit)
    tried = ((step.title, _possible(step, program, limit)) for step in program.steps)
    return {title: reason for title, (possible, reason) in tried if not possible}


def _fastest(
    possible: Sequence[Implementation[Any]], step: steps.Step, program: Program, gpu: Capacity
) -> Implementation[Any]:
    return fastest(possible, lambda each, gpu: each.clocks(step, program, gpu), gpu)


def _possible(step: steps.Step, program: Program, limit: int) -> tuple[list[Implementation[Any]], str]:
    """What runs a step, and why the last of those does not that refuse it."""
    possible, reason = [], "there is no kernel for it"
    for implementation in (each for each in TABLE.get(type(step), ()) if each.suits(step, program)):
        refusal = implementation.refusal(step, program, limit)
        if refusal is None:
            possible.append(implementation)
        else:
            reason = refusal
    return possible, reason


def most_rows(program: Program) -> int:
    """The most rows of its steps that multiply or attend."""
    multiplying = (step for step in program.steps if step.multiplies is not None)
    return max(step_rows(step, program) for step in (*multiplying, *program.attentions))


def adapter_words(program: Program) -> int:
    """The most words that a linear layer needs as `LinearAdapters.low`."""
    shape = program.shape
    fused = max((len(each.modules) for each in program.adapted.values()), default=0)
    return low_words(most_rows(program), shape.lora_slots, fused, shape.lora_rank)


def passes(shape: EngineShape) -> list[tuple[slice, EngineShape]]:
    """The slots of each pass, as even as they can be, and its shape: one pass but for large steps of several slots."""
    count = 1
    if shape.phase != "decode" and shape.tokens <= MAX_TILED_ROWS:
        count = -(-shape.batch // (MAX_TILED_ROWS // shape.tokens))
    ends = [shape.batch * number // count for number in range(count + 1)]
    return [(slice(start, end), replace(shape, batch=end - start)) for start, end in pairwise(ends)]
