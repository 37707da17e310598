"""Steps that take rows one by one: scaled, added, normed in parts, side by side, with columns of others, gated."""

from __future__ import annotations

from typing import Any

from edgellm.engines.backends.steps.implementation import Implementation
from edgellm.engines.backends.steps.launching import Launching
from edgellm.engines.model.program import Program
from edgellm.engines.model.row_steps import TokenInputs
from edgellm.engines.model.steps import Add, Input, Normed, NormParts, Scale, SideBySide
from edgellm.kernels.decode.contract import MAX_PARTS, NormedInput


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


class NormRows(Implementation[Normed]):
    """Norms whole rows."""

    keeps_dtype = True

    def launches(self, step: Normed, run: Launching, next_early: bool) -> list[Any]:
        normed, _ = run.normed(run.array(step.value), step.norm)
        return [run.kernels.few.norm(normed, run.array(step.output), next_early=next_early)]


class RowsSideBySide(Implementation[SideBySide]):
    """Copies the columns of values beside each other."""

    keeps_dtype = True

    def launches(self, step: SideBySide, run: Launching, next_early: bool) -> list[Any]:
        output = run.array(step.output)
        output, launches, column = output.reshape(-1, output.shape[-1]), [], 0
        for value in step.values:
            part = NormedInput(run.array(value), None)
            launches.append(run.kernels.few.norm(part, output, column))
            column += part.columns
        return launches


class TokenInputsInPlace(Implementation[TokenInputs]):
    """Adds tokens' own embeddings to what is projected for them, where that is."""

    def refusal(self, step: TokenInputs, program: Program, limit: int) -> str | None:
        (width,), has_bias = step.norm.weight.shape, step.norm.bias is not None
        if has_bias or step.value != step.output:
            return "tokens' own embeddings are added in place, behind norms without biases"
        return None if width % 8 == 0 else f"embeddings of a layer come in eights, not {width}"

    def launches(self, step: TokenInputs, run: Launching, next_early: bool) -> list[Any]:
        norm, own, values = step.norm, run.array(step.rows), run.array(step.value)
        kinds = norm.epsilon, norm.offset, step.scale
        return [run.kernels.few.token_inputs(values, own, run.array(norm.weight.name), *kinds)]


class NormPartsInPlace(Implementation[NormParts]):
    """Norms parts of rows where they are."""

    def refusal(self, step: NormParts, program: Program, limit: int) -> str | None:
        widths = [norm.weight.shape[0] for norm in step.norms]
        if step.value != step.output or not 1 <= len(widths) <= MAX_PARTS or any(width % 8 for width in widths):
            return f"up to {MAX_PARTS} parts of rows are normed where they are, of widths in eights, not {widths}"
        return "there is no kernel for layer norms" if any(norm.bias is not None for norm in step.norms) else None

    def launches(self, step: NormParts, run: Launching, next_early: bool) -> list[Any]:
        parts = run.parts(Input(step.value, step.norms))
        return [run.kernels.few.norm_parts(parts, next_early, run.found(step.squares), step.wholes)]
