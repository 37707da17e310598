"""What ranks that share a program give each other, by kernels: sums, to which the residual is added at once where
nothing stands between, and the logits' columns."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import Launching
from edgellm.engines.model.program import Program
from edgellm.engines.model.steps import AddResidual, Assemble, Reduce, SquareSums
from edgellm.kernels.decode.contract import MAX_PARTS, NormedInput
from edgellm.kernels.recurrent.contract import group_refusal


class SumRanks(Implementation[Reduce]):
    """Adds in one launch."""

    name = "kernels of ranks"

    def refusal(self, step: Reduce, program: Program, limit: int) -> str | None:
        width = program.kinds[step.output][0][-1]
        return None if width % 8 == 0 else f"ranks add rows in eights, not of {width}"

    def launches(self, step: Reduce, run: Launching, next_early: bool) -> list[Any]:
        value, output = run.array(step.value), run.array(step.output)
        return [*run.keeping(step), run.kernels.rank.sum(value, output, run.found(step.residual), step.scale)]


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

    def launches(self, step: AddResidual, run: Launching, next_early: bool) -> list[Any]:
        launches, (normed, apart) = run.keeping(step), run.normed(run.array(step.value), step.norm)
        selected = (run.array("last_token_ids"),) if step.selects else ()
        given = normed, run.array(step.residual), run.array(step.output), *selected
        return [*launches, *apart, run.kernels.few.norm_residual(*given, factor=run.found(step.factor))]


class JoinColumns(Implementation[Assemble]):
    """Brings the logits of all ranks together on the first."""

    name = "kernels of ranks"

    def launches(self, step: Assemble, run: Launching, next_early: bool) -> list[Any]:
        return [run.kernels.rank.columns(run.array(step.value), step.widths, run.array(step.output))]
