"""Linear layers by kernels of few rows, of many, of packed weights, and of prompts.

Kernels of few rows norm inside their linear layers: every block of a layer norms for itself, which is fastest for up to
a dozen rows where kernels overlap, but takes shared memory for whole rows. Kernels of many rows and of prompts have the
norms as launches of their own, for all blocks of the linear layer that follows. What no kernel of linear layers knows
is a launch of its own on any of these ways: layer norms, activations without a gate, gates and ups of several formats.
Of a layer that is packed in part the dense rows are launches of the dense kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from edgellm.engines.backends.steps import implementation, launching
from edgellm.engines.backends.steps.launching import JOINED_INPUTS, Launching, StepKernels, comes_rounded, module_rows
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import LinearResidual, NormLinear
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode.contract import ACTIVATIONS as GATE_ACTIVATIONS
from edgellm.kernels.decode.contract import (
    MAX_ROWS,
    MAX_TILED_ROWS,
    LinearWeights,
    NormedInput,
    adapters_refusal,
    padded_columns,
    padded_ranks,
)
from edgellm.kernels.decode.geometries import linear_residual_shared_bytes, norm_linear_shared_bytes, norm_shared_bytes
from edgellm.kernels.decode.packed_rows import MAX_NORMED_ROWS, packed_refusal
from edgellm.kernels.decode.tiled_linear import tiled_shared_bytes
from edgellm.kernels.decode.tilings import NORM_CLOCKS, Capacity, fastest_tiling, few_rows_clocks
from edgellm.kernels.encoder.contract import ACTIVATIONS, MAX_NORM_WIDTH
from edgellm.kernels.quantization.row_runs import DenseRows

#: What a linear layer gives before it is normed and added, or before its activation, where that is another launch.
UNNORMED, SUMS = "unnormed", "sums"
Layer = NormLinear | LinearResidual


class _AnyLinear(implementation.Implementation[Any]):
    """What all ways share: which layers no kernel takes, and what stands around a product.

    A way runs steps of both kinds: `NormLinear` by `_normed`, `LinearResidual` by `_added`.
    """

    most_rows = MAX_TILED_ROWS
    #: The most rows that the kernel which multiplies them norms, or rounds, too.
    prepared_rows = 0
    takes_packed = False
    #: Which of `StepKernels`, and whether products of adapters' A are a launch of their own.
    kernels = "many"
    multiplies_low_apart = False

    def suits(self, step: Layer, program: Program) -> bool:
        is_packed = implementation.packed_layout(step, program) is not None
        return implementation.step_rows(step, program) <= self.most_rows and is_packed == self.takes_packed

    def refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        return linear_refusal(step, program) or self._memory_refusal(step, program, limit)

    def _memory_refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        raise NotImplementedError

    def scratch(self, step: Layer, program: Program) -> Edge:
        found, (rows, width) = super().scratch(step, program), self._rows_of(step, program)
        if not step.prepares:
            found |= {} if _keeps_apart(step) else {JOINED_INPUTS: ((0,), "compute")}
            found |= {} if step.norm is None else {UNNORMED: ((rows * width,), "float32")}
            found |= launching.other_place(step, program)
        else:
            given = math.prod(program.kinds[step.kept_value][0][:-1])
            found[JOINED_INPUTS] = (given * padded_columns(step.linear.weight.shape[1]),), "compute"
            found[step.output] = (rows, width), "float32" if step.activation is None else "compute"
            inserts_apart = step.into is not None and step.linear.name in program.adapted
            if inserts_apart or (step.activation is not None and (not step.gated or _has_runs(step, program))):
                found[SUMS] = ((rows * step.linear.weight.shape[0],), "float32")
        return found

    def joins(self, step: Layer, run: Launching) -> bool:
        linear = LinearWeights(run.array(step.linear.weight.name))
        is_one = len(step.inputs) == len(linear.runs) == 1
        return is_one and self._is_inside(step, run, linear) and not self._ends_apart(step, run, linear)

    def _ends_apart(self, step: Layer, run: Launching, linear: LinearWeights) -> bool:
        """Whether a step's activation, or what puts its columns into wider rows, is a launch of its own."""
        if step.into is not None:  # adapters have as many columns as their layer
            return step.linear.name in run.program.adapted
        if step.activation is None or step.gated:
            return step.activation is not None and len(linear.runs) > 1
        return step.through is None or len(linear.runs) > 1 or not self._is_inside(step, run, linear)

    def _is_inside(self, step: Layer, run: Launching, linear: LinearWeights) -> bool:
        """Whether the kernel that multiplies inputs prepares them, too."""
        rows = implementation.step_rows(step, run.program)
        if rows > self.prepared_rows or not prepares_inside(step, run.program):
            return False
        if not self.takes_packed:
            return True
        alone = len(step.inputs) == 1 and linear.arranged is None and step.linear.name not in run.program.adapted
        return alone and run.kernels.few.takes(linear, rows, normed=bool(step.inputs[0].norms))

    def launches(self, step: Layer, run: Launching, next_early: bool) -> list[Any]:
        linear = run.weights(step.linear)
        if step.prepares:
            if step.cap:
                launches = self.launches(replace(step, cap=0.0), run, next_early)
                return [*launches, run.kernels.few.cap_rows(run.array(step.output), step.cap)]
            if self._ends_apart(step, run, linear):
                return self._ended_apart(step, run, linear, next_early)
            if step.into is not None:
                linear = linear._replace(place=(0, run.program.kinds[step.output][0][-1]))
            return self._by_runs(step, run, linear, next_early)
        selected = self._selected(step, run)
        x, launches = run.array(step.value), list[Any]()
        launches += [*self._low_products(run, x, linear, *selected), *run.arranged(x, linear)]
        if _keeps_apart(step):
            launches += run.keeping(step)
            step = replace(step, keep=None)
        return [*launches, *self._added(step, run, x, linear, *selected)]

    def _by_runs(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The launches of each format; what is kept is kept once."""
        found = list[Any]()
        for part in linear.runs:
            launches = self._normed(step, run, part, next_early)
            if found:
                launches[0].run_beside(found[-1])
            found += launches
            step = replace(step, keep=None)
        return found

    def _ended_apart(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The same with an activation behind it, one without a gate, or of gates and ups of different formats, or with
        what puts the columns of a layer with adapters into wider rows."""
        output, activation = run.array(step.output), step.activation
        apart = run.shared(SUMS, implementation.step_rows(step, run.program), linear.weight.shape[0])

        def array(name: str) -> Array:
            return apart if name == step.output else run.array(name)

        own = Launching(run.kernels, run.program, array, iter(()))
        alone = replace(step, gated=False, activation=None, through=None, into=None)
        launches = self._by_runs(alone, own, linear, next_early)
        if step.into is not None:
            return [*launches, run.kernels.few.insert_columns(apart, output)]
        if step.gated:
            return [*launches, run.kernels.few.gate_rows(apart, activation, output)]
        assert activation is not None
        if step.through is not None:
            through = run.columns(step.through, step.first, output)
            return [*launches, run.kernels.few.token_gate(apart, activation, through, output)]
        rows = output.reshape(-1, output.shape[-1])
        return [*launches, run.kernels.encoder.activate(apart, ACTIVATIONS[activation], rows)]

    def _normed(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The launches of a layer with what stands before it."""
        if step.selects:
            return self._normed_apart(step, run, linear, next_early)
        return self._tiled(step, run, linear, self._kernels(step, run, linear), next_early)

    def _added(
        self, step: LinearResidual, run: Launching, x: Array, linear: LinearWeights, *selected: Array
    ) -> list[Any]:
        """The launches that multiply inputs which are arranged, and add what that gives."""
        kernels = self._kernels(step, run, linear)
        residual, output = run.found(step.residual), run.array(step.output)
        if step.norm is None or residual is None:
            return [kernels.linear_residual(x, linear, residual, output, step.scale, run.kept(step.keep), *selected)]
        given = run.shared(UNNORMED, implementation.step_rows(step, run.program), linear.weight.shape[0])
        launches = [kernels.linear_residual(x, linear, None, given, step.scale, None, *selected)]
        normed, apart = run.normed(given, step.norm)
        launches, factor = [*launches, *apart], run.found(step.factor)
        if launching.other_place(step, run.program):
            run.waits = launching.Waiting(step.output, normed, factor)
            return launches
        return [*launches, run.kernels.few.norm_residual(normed, residual, output, *selected, factor=factor)]

    def _normed_apart(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        """The launches of a layer, of all rows or of those that are selected, behind those of its norms."""
        selected = self._selected(step, run)
        x, launches = self._together(step, run, linear, False, next_early, *selected)
        kernels, output = self._kernels(step, run, linear), run.array(step.output)
        if step.gated:
            return [*launches, kernels.norm_gate_up(NormedInput(x, None), linear, step.activation, output)]
        return [*launches, kernels.linear_residual(x, linear, None, output, step.scale, None, *selected)]

    def _tiled(
        self, step: NormLinear, run: Launching, linear: LinearWeights, kernels: Any, next_early: bool
    ) -> list[Any]:
        """The same of all rows by kernels that take the inputs padded."""
        x, launches = self._together(step, run, linear, True, next_early)
        output = run.array(step.output)
        if step.gated:
            return [*launches, kernels.gate_up(x, linear, step.activation, output)]
        return [*launches, kernels.linear(x, linear, output, step.scale)]

    def _together(
        self, step: NormLinear, run: Launching, linear: LinearWeights, padded: bool, next_early: bool, *selected: Array
    ) -> tuple[Array, list[Any]]:
        """The inputs of a layer as its weight takes them, and the launches that make them so."""
        as_given = linear.adapters is not None  # whose A multiplies inputs that are not arranged yet
        arranged = None if as_given else linear.arranged
        x, launches = run.together(step, padded, next_early, arranged, apart=linear.arranged is not None)
        if as_given:
            launches += [*self._low_products(run, x, linear, *selected), *run.arranged(x, linear)]
        return x, launches

    def _kernels(self, step: Layer, run: Launching, linear: LinearWeights) -> Any:
        """The kernels that multiply what is not normed by them."""
        return getattr(run.kernels, self.kernels)

    def _low_products(self, run: Launching, x: Array, linear: LinearWeights, *selected: Array) -> list[Any]:
        """What makes the products of adapters' A, where the layer's kernel does not make them itself."""
        apart = self.multiplies_low_apart and linear.adapters is not None
        return [getattr(run.kernels, self.kernels).low_products(x, linear, *selected)] if apart else []

    @staticmethod
    def _selected(step: Layer, run: Launching) -> tuple[Array, ...]:
        return (run.array("last_token_ids"),) if step.selects else ()


class FewRows(_AnyLinear):
    """Up to 16 rows of dense weights, normed inside where that can be."""

    name = "kernels of few rows"
    kernels = "few"
    most_rows = prepared_rows = MAX_ROWS

    def _memory_refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        rows = implementation.step_rows(step, program)
        ranks = padded_ranks(program.shape.lora_slots, program.shape.lora_rank)
        if step.gated or prepares_inside(step, program):
            count = len(step.inputs)
            widths = [step.linear.weight.shape[1] // count] * count
            return implementation.too_large(norm_linear_shared_bytes(rows, widths, limit, step.gated, ranks), limit)
        return implementation.too_large(linear_residual_shared_bytes(rows, limit, ranks), limit)

    def clocks(self, step: Layer, program: Program, gpu: Capacity) -> float:
        inside, (rows, columns) = prepares_inside(step, program), step.linear.weight.shape
        clocks = few_rows_clocks(implementation.step_rows(step, program), rows, columns, inside, gpu)
        return clocks if inside else clocks + _norm_count(step) * NORM_CLOCKS

    def _normed(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        way = _inside if self._is_inside(step, run, linear) else self._normed_apart
        return way(step, run, linear, next_early)


class ManyRows(_AnyLinear):
    """Up to 64 rows of dense weights, normed by launches of their own."""

    name = "kernels of many rows"

    def _memory_refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        return implementation.too_large(max(_norm_bytes(step), tiled_shared_bytes(limit)), limit)

    def clocks(self, step: Layer, program: Program, gpu: Capacity) -> float:
        adapted, (rows, columns) = step.linear.name in program.adapted, step.linear.weight.shape
        tiling = fastest_tiling(implementation.step_rows(step, program), rows, columns, gpu, step.gated, adapted)
        return tiling.clocks(rows, columns, gpu) + _norm_count(step) * NORM_CLOCKS


class PackedRows(_AnyLinear):
    """Up to 64 rows of weights that are packed, or in part: the fewest normed inside, few by kernels of their own."""

    name = "kernels of packed rows"
    prepared_rows = MAX_NORMED_ROWS
    takes_packed = multiplies_low_apart = True

    def _memory_refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        layout = implementation.packed_layout(step, program)
        assert layout is not None
        rows = implementation.step_rows(step, program)
        refusals = (
            implementation.too_large(tiled_shared_bytes(limit), limit)
            if isinstance(own, DenseRows)
            else packed_refusal(rows, own, limit)
            for own in layout.runs
        )
        return next((reason for reason in refusals if reason is not None), None)

    def _normed(self, step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
        if self._is_inside(step, run, linear):
            return _inside(step, run, linear, next_early)
        if step.selects or run.kernels.few.takes(linear, implementation.step_rows(step, run.program), normed=False):
            return self._normed_apart(step, run, linear, next_early)
        return self._tiled(step, run, linear, run.kernels.many, next_early)

    def _kernels(self, step: Layer, run: Launching, linear: LinearWeights) -> Any:
        takes = run.kernels.few.takes(linear, implementation.step_rows(step, run.program), normed=False)
        return run.kernels.few if takes else run.kernels.many


class PromptRows(_AnyLinear):
    """More rows, of dense weights or of packed ones."""

    name = "kernels of prompts"
    kernels = "any_rows"
    multiplies_low_apart = True

    def suits(self, step: Layer, program: Program) -> bool:
        is_prompt = program.shape.phase in implementation.PROMPT_PHASES
        return is_prompt and implementation.step_rows(step, program) > MAX_TILED_ROWS

    def _memory_refusal(self, step: Layer, program: Program, limit: int) -> str | None:
        return implementation.too_large(_norm_bytes(step), limit)

    def loads(self, step: Layer, program: Program) -> tuple[Any, ...]:
        name = "gate_up" if step.gated else "linear" if step.prepares else "linear_residual"
        adapted, shape = program.adapted.get(step.linear.name), program.shape
        low_rows = 0 if adapted is None else shape.lora_slots * len(adapted.modules) * shape.lora_rank
        return name, step.linear.weight.shape, low_rows, implementation.packed_layout(step, program)

    def load(self, what: tuple[Any, ...], program: Program, kernels: StepKernels, tokens: int) -> None:
        (name, weight, low_rows, packed), rows = what, tokens * program.shape.batch
        if rows <= MAX_TILED_ROWS:
            return
        if packed is not None and len(packed.runs) > 1:
            name = "linear"  # also of gates and ups
        for own in (None,) if packed is None else packed.runs:
            size = weight if own is None else (own.rows, own.columns)
            kernels.any_rows.load(name, rows, size, low_rows > 0, None if isinstance(own, DenseRows) else own)
        if low_rows:
            kernels.any_rows.load("low_products", rows, (low_rows, weight[1]))


def linear_refusal(step: Layer, program: Program) -> str | None:
    """What about a linear layer no kernel of decoders can do, whatever the GPU has; None if there is nothing."""
    shape = program.shape
    if step.activation is None and program.kinds[step.output][1] != "float32" and step.output in program.outputs:
        return f"kernels put {step.output} out in float32 alone"
    adapted = program.adapted.get(step.linear.name)
    if refused := adapted and adapters_refusal(shape.lora_slots, shape.lora_rank, module_rows(adapted)):
        return refused
    if (columns := step.linear.weight.shape[1]) % 8:
        return f"widths must be multiples of 8, not {columns}"
    layer_norms = [norm for norm in step.norms if norm.bias is not None]
    if layer_norms and (len(step.norms) > 1 or len(step.inputs) > 1):
        return "layer norms are of whole inputs, not of parts side by side"
    if any((width := norm.weight.shape[0]) > MAX_NORM_WIDTH for norm in layer_norms):
        return f"layer norms take up to {MAX_NORM_WIDTH} columns, not {width}"
    if step.activation is None:
        return None
    gates = step.through is not None
    if gates and step.norms:
        return "gates of other rows take inputs without norms"
    if step.activation not in (GATE_ACTIVATIONS if step.gated or gates else ACTIVATIONS):
        return f"the activation {step.activation} has no kernel{' with a gate' if step.gated or gates else ''}"
    return None if step.scale == 1.0 else "what an activation gives is not scaled"


def _keeps_apart(step: LinearResidual) -> bool:
    """Whether a launch of its own keeps the residual: features are those of all rows, and of what nothing is added
    to yet."""
    return step.selects or step.norm is not None


def prepares_inside(step: Layer, program: Program) -> bool:
    """Whether one kernel norms the inputs of a linear layer, or rounds one without norms, and multiplies them."""
    if not step.prepares:
        return False
    if step.selects or len(step.inputs) > 1 or step.inputs[0].norms:
        norms = [given.norms for given in step.inputs]
        return not step.selects and len(norms) <= 2 and all(len(own) == 1 and own[0].bias is None for own in norms)
    return step.gated or not comes_rounded(step.inputs[0].value, program)


def _inside(step: NormLinear, run: Launching, linear: LinearWeights, next_early: bool) -> list[Any]:
    """The launch that norms the inputs of a layer and multiplies them."""
    few, output = run.kernels.few, run.array(step.output)
    inputs = [part for given in step.inputs for part in run.parts(given)]
    if step.through is not None:
        through = run.columns(step.through, step.first, output)
        return [few.token_gate_linear(inputs[0], linear, step.activation, through, output)]
    if step.gated:
        return [few.norm_gate_up(inputs[0], linear, step.activation, output)]
    return [few.norm_linear(inputs, linear, output, step.scale, run.kept(step.keep), next_early)]


def _has_runs(step: Layer, program: Program) -> bool:
    """Whether a layer's rows are packed in several ways."""
    layout = implementation.packed_layout(step, program)
    return layout is not None and len(layout.runs) > 1


def _norm_bytes(step: Layer) -> int:
    """Shared memory of the launches that norm a layer's inputs."""
    return norm_shared_bytes(step.linear.weight.shape[1]) if step.prepares else 0


def _norm_count(step: Layer) -> int:
    """Launches that bring the inputs of a layer together, where it does not norm them itself."""
    return sum(max(1, len(given.norms)) for given in step.inputs) if step.prepares else 0
