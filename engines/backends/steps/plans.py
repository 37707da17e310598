"""Steps that TensorRT runs: a plan for each run of neighbours, between launches of kernels.

TensorRT multiplies dense weights alone: packed ones of a run are dequantized in front of it, into scratch that all
share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import ELSEWHERE, Launching
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.segments import NEXT, Run, Segment, segment_of, segment_shape
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Step
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode.contract import NormedInput
from edgellm.kernels.numpy_launch import Enqueued
from edgellm.kernels.quantization.row_runs import PackedRuns

#: Where dense weights of packed ones are, and what a run keeps; each begins at a multiple of so many elements.
_BESIDE, _ALIGNMENT = "beside plans", 256


class PlanLaunch(Enqueued):
    """Enqueues an engine that other runs may share on what it is bound to. TensorRT's kernels wait for what was
    enqueued before."""

    name = "TensorRT"

    def __init__(self, engine: Any, bindings: Mapping[str, Array]) -> None:
        self._engine, self._bindings = engine, bindings

    def __call__(self) -> None:
        self._engine.bind(self._bindings)
        self._engine.enqueue()


class ByPlan(Implementation[Step]):
    """Runs the steps of a run together, with the first of them."""

    name = "TensorRT"

    def __init__(self, run: Run, plan: Run, attends: bool) -> None:
        """`plan` is the first run that does the same, whose engine this one shares; `attends`: it has attention."""
        self.run, self._plan, self.reads_mask, self.reads_decode_mask = run, plan, attends, attends
        self._segments: dict[EngineShape, Segment] = {}

    def lead(self, number: int) -> int:
        return self.run[0]

    def plan_shape(self, program: Program) -> EngineShape:
        """The shape of the engine that runs it."""
        return segment_shape(program, self._plan)

    def _segment(self, program: Program) -> Segment:
        if program.shape not in self._segments:
            self._segments[program.shape] = segment_of(program, self.run)
        return self._segments[program.shape]

    def _beside(self, program: Program) -> dict[str, slice]:
        """The places of dense weights and of what is kept, by their names in the segment."""
        segment, places, end = self._segment(program), dict[str, slice](), 0
        edge = segment.program.edge
        packed = [name for name in segment.program.weights if segment.name_in_whole(name) in program.packed]
        for name in (*packed, *segment.kept):
            size = math.prod(edge[name][0])
            places[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return places

    def scratch(self, step: Step, program: Program) -> Edge:
        segment, found = self._segment(program), Edge()
        for name, (size, kind) in segment.program.outputs.items():
            if name not in segment.kept:
                whole, flat = segment.name_in_whole(name), (math.prod(size[:-1]), size[-1])
                found |= dict.fromkeys((whole, whole + ELSEWHERE) if name.startswith(NEXT) else (whole,), (flat, kind))
        end = max((place.stop for place in self._beside(program).values()), default=0)
        return found | {_BESIDE: ((end,), "compute")}

    def launches(self, step: Step, run: Launching, next_early: bool) -> list[Any]:
        program, segment = run.program, self._segment(run.program)
        beside = {name: run.array(_BESIDE)[place] for name, place in self._beside(program).items()}
        arrays, launches = dict(beside), list[Any]()
        for name in segment.program.edge.keys() - beside.keys() - segment.program.outputs.keys():
            arrays[name] = run.array(segment.name_in_whole(name))
        for name in segment.program.outputs.keys() - beside.keys():
            whole = segment.name_in_whole(name)
            arrays[name] = run.moved(whole) if name.startswith(NEXT) else run.array(whole)
        bindings = {name: arrays[name].reshape(*size) for name, (size, _) in segment.program.edge.items()}
        for name in (name for name in beside if name not in segment.kept):
            launches += self._dense(run, run.array(segment.name_in_whole(name)), bindings[name])
        launches.append(PlanLaunch(run.kernels.plans[self.plan_shape(program)], bindings))
        for name, keep in segment.kept.items():
            rows, target = bindings[name], run.array(keep.target)
            given = NormedInput(rows.reshape(-1, rows.shape[-1]), None)
            target = target.reshape(-1, target.shape[-1])
            launches.append(run.kernels.few.norm(given, target, keep.place * rows.shape[-1]))
        return launches

    @staticmethod
    def _dense(run: Launching, weight: Any, values: Array) -> list[Any]:
        """What makes a packed weight's dense values, [N, K]; dense rows are copied."""
        launches, first = list[Any](), 0
        for part in weight.runs if isinstance(weight, PackedRuns) else (weight,):
            own = values[first : first + part.shape[0]]
            launches.append(
                run.kernels.few.norm(NormedInput(part, None), own, 0)
                if isinstance(part, Array)
                else run.kernels.prefill.dequantize(part, own)
            )
            first += part.shape[0]
        return launches
