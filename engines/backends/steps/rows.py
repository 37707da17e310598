"""Steps that take rows one by one: scaled, added, normed in parts, side by side, with columns of others, gated."""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import Launching
from edgellm.engines.model.program import Program
from edgellm.engines.model.row_steps import InsertColumns, TokenGate, UnitNorm
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Add, Input, NormParts, Scale, SideBySide
from edgellm.kernels.decode.contract import ACTIVATIONS, MAX_PARTS, NormedInput


class ScaleRows(Implementation[Scale]):
    """Multiplies rows by a number."""

    def launches(self, step: Scale, run: Launching, next_early: bool) -> list[Any]:
        return [run.kernels.few.scale_rows(run.array(step.value), step.factor, run.array(step.output))]


class AddRows(Implementation[Add]):
    """Adds rows that come from outside."""

    def refusal(self, step: Add, program: Program, limit: int) -> str | None:
        return None if isinstance(step.other, str) else "kernels of decoders add no weights to rows"

    def launches(self, step: Add, run: Launching, next_early: bool) -> list[Any]:
        added = NormedInput(run.array(str(step.other)), None)
        return [run.kernels.few.norm_residual(added, run.array(step.value), run.array(step.output))]


class RowsSideBySide(Implementation[SideBySide]):
    """Copies the columns of values beside each other."""

    def scratch(self, step: SideBySide, program: Program) -> Edge:
        return {step.output: program.kinds[step.output]}

    def launches(self, step: SideBySide, run: Launching, next_early: bool) -> list[Any]:
        output = run.array(step.output)
        output, launches, column = output.reshape(-1, output.shape[-1]), [], 0
        for value in step.values:
            part = NormedInput(run.array(value), None)
            launches.append(run.kernels.few.norm(part, output, column))
            column += part.columns
        return launches


class UnitNormInPlace(Implementation[UnitNorm]):
    """Divides parts of rows where they are by their root mean square."""

    def refusal(self, step: UnitNorm, program: Program, limit: int) -> str | None:
        in_eights = step.first % 8 == step.size % 8 == 0 and step.value == step.output
        return None if in_eights else f"parts of rows begin and are wide in eights, not {step.first} and {step.size}"

    def launches(self, step: UnitNorm, run: Launching, next_early: bool) -> list[Any]:
        values = run.array(step.value)
        return [run.kernels.few.unit_norm(values, step.first, step.size, step.epsilon, next_early)]


class InsertInPlace(Implementation[InsertColumns]):
    """Copies columns to the place of the first ones of rows."""

    def launches(self, step: InsertColumns, run: Launching, next_early: bool) -> list[Any]:
        return [run.kernels.few.insert_columns(run.array(step.value), run.array(step.output))]


class GateByTokens(Implementation[TokenGate]):
    """Multiplies rows by what tokens' own embeddings let through."""

    def scratch(self, step: TokenGate, program: Program) -> Edge:
        return {step.output: (self._rows_of(step, program), "compute")}

    def refusal(self, step: TokenGate, program: Program, limit: int) -> str | None:
        (width,) = step.norm.weight.shape
        if step.activation not in ACTIVATIONS or step.norm.bias is not None:
            return f"tokens' own embeddings are gated by {' or '.join(ACTIVATIONS)}, behind norms without biases"
        return None if width % 8 == 0 else f"embeddings of a layer come in eights, not {width}"

    def launches(self, step: TokenGate, run: Launching, next_early: bool) -> list[Any]:
        norm, array = step.norm, run.array
        (width,) = norm.weight.shape
        of_norm = array(norm.weight.name), norm.epsilon, norm.offset, step.first, width
        projected, own = NormedInput(array(step.projected), *of_norm), array(step.rows)
        gate, output = array(step.value), array(step.output)
        return [run.kernels.few.token_gate(gate, step.activation, projected, own, step.scale, output)]


class NormPartsInPlace(Implementation[NormParts]):
    """Norms parts of rows where they are."""

    def refusal(self, step: NormParts, program: Program, limit: int) -> str | None:
        widths = [norm.weight.shape[0] for norm in step.norms]
        if step.value != step.output or not 1 <= len(widths) <= MAX_PARTS or any(width % 8 for width in widths):
            return f"up to {MAX_PARTS} parts of rows are normed where they are, of widths in eights, not {widths}"
        return "there is no kernel for layer norms" if any(norm.bias is not None for norm in step.norms) else None

    def launches(self, step: NormParts, run: Launching, next_early: bool) -> list[Any]:
        squares = None if step.squares is None else run.array(step.squares)
        parts = run.parts(Input(step.value, step.norms))
        return [run.kernels.few.norm_parts(parts, next_early, squares, step.wholes)]
