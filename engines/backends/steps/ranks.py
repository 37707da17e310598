"""What ranks that share a program give each other, by kernels: sums, to which the residual is added at once where
nothing stands between, and the logits' columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import JOINED_INPUTS, Launching
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import READS, AddResidual, Assemble, Keep, Reduce, SquareSums, Step
from edgellm.kernels.decode.contract import MAX_PARTS, NormedInput
from edgellm.kernels.recurrent.contract import group_refusal


@dataclass(frozen=True)
class SumRanks(Step):
    """output = residual, if there is one, + scale * the sum of what all ranks have in `value`; `keep` gets the
    residual."""

    value: str = field(metadata=READS)
    residual: str | None = field(default=None, metadata=READS)
    scale: float = 1.0
    keep: Keep | None = None

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        rows = kinds[self.value][0]
        kept: Edge = {} if self.keep is None else {self.keep.target: (rows, "compute")}
        return kept | {self.output: (rows, residual)}


def with_sums(program: Program) -> Program:
    """The same with each `Reduce` as `SumRanks`, which does the scaling behind it, too, and adds the residual of all
    rows where it is not normed."""
    steps = list[Step]()
    for before, step in pairwise((None, *program.steps)):
        assert step is not None
        if isinstance(step, Reduce):
            steps.append(SumRanks(step.output, step.value))
        elif isinstance(step, AddResidual) and isinstance(before, Reduce) and before.output == step.value:
            apart = step.selects or step.norm is not None or step.factor is not None
            total = SumRanks(before.output, before.value, scale=step.scale)
            if apart:
                steps[-1:] = [total, replace(step, scale=1.0)]
            else:
                steps[-1] = replace(total, output=step.output, residual=step.residual, keep=step.keep)
        else:
            steps.append(step)
    return replace(program, steps=tuple(steps))


class SumOfRanks(Implementation[SumRanks]):
    """Adds in one launch."""

    name = "kernels of ranks"

    def refusal(self, step: SumRanks, program: Program, limit: int) -> str | None:
        width = program.kinds[step.output][0][-1]
        return None if width % 8 == 0 else f"ranks add rows in eights, not of {width}"

    def scratch(self, step: SumRanks, program: Program) -> Edge:
        return super().scratch(step, program) | _kept_scratch(step.keep, self._rows_of(step, program))

    def launches(self, step: SumRanks, run: Launching, next_early: bool) -> list[Any]:
        residual = None if step.residual is None else run.array(step.residual)
        kept = [] if step.keep is None or residual is None else [run.copy_kept(step.keep, residual)]
        return [*kept, run.kernels.rank.sum(run.array(step.value), run.array(step.output), residual, step.scale)]


class SquaresOfParts(Implementation[SquareSums]):
    """Adds the squares of parts of rows, or of one behind its gate."""

    def refusal(self, step: SquareSums, program: Program, limit: int) -> str | None:
        if step.gate is not None:
            return group_refusal(sum(step.widths))
        eights = len(step.widths) <= MAX_PARTS and not any(width % 8 for width in step.widths)
        return None if eights else f"up to {MAX_PARTS} parts have squares, of widths in eights, not {step.widths}"

    def launches(self, step: SquareSums, run: Launching, next_early: bool) -> list[Any]:
        if step.gate is not None:
            value, gate, squares = map(run.sequences, (step.value, step.gate, step.output))
            place = step.counted.index(True)
            return [run.kernels.recurrent.gated_part(value, gate, step.first, place, None, squares, None)]
        values, ends = run.array(step.value), accumulate(step.widths)
        parts = [
            NormedInput(values, None, first=end - width, width=width)
            for end, width in zip(ends, step.widths, strict=True)
        ]
        return [run.kernels.few.square_sums(parts, step.counted, run.array(step.output), next_early)]


class AddNormed(Implementation[AddResidual]):
    """Adds a sum to selected rows, or behind a norm."""

    def refusal(self, step: AddResidual, program: Program, limit: int) -> str | None:
        return None if step.scale == 1.0 else "a sum is scaled by the step that makes it"

    def scratch(self, step: AddResidual, program: Program) -> Edge:
        *rows, width = program.kinds[step.residual][0]
        return super().scratch(step, program) | _kept_scratch(step.keep, (math.prod(rows), width))

    def launches(self, step: AddResidual, run: Launching, next_early: bool) -> list[Any]:
        values, residual, norm = run.array(step.value), run.array(step.residual), step.norm
        launches = [] if step.keep is None else [run.copy_kept(step.keep, residual)]
        normed = NormedInput(values, None)
        if norm is not None and norm.bias is None:
            normed = NormedInput(values, run.array(norm.weight.name), norm.epsilon, norm.offset)
        elif norm is not None:
            launches.append(run.norm_rows(values, norm, values))
        selected = (run.array("last_token_ids"),) if step.selects else ()
        factor = None if step.factor is None else run.array(step.factor.name)
        added = run.kernels.few.norm_residual(normed, residual, run.array(step.output), *selected, factor=factor)
        return [*launches, added]


class JoinColumns(Implementation[Assemble]):
    """Brings the logits of all ranks together on the first."""

    name = "kernels of ranks"

    def launches(self, step: Assemble, run: Launching, next_early: bool) -> list[Any]:
        return [run.kernels.rank.columns(run.array(step.value), step.widths, run.array(step.output))]


def _kept_scratch(keep: Keep | None, rows: tuple[int, int]) -> Edge:
    """What a launch needs that keeps rows."""
    if keep is None:
        return {}
    return {keep.target: (rows, "compute"), JOINED_INPUTS: ((rows[0] * rows[1],), "compute")}
