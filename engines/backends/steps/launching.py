"""What implementations of steps make their launches of: kernels, the arrays of an engine, and what brings the inputs of
a linear layer together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from edgellm.engines.model.adapted_projections import SCALES, AdaptedProjection
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import Input, Keep, Linear, LinearResidual, Norm, NormLinear, Step
from edgellm.kernels.arrays import Array
from edgellm.kernels.decode.contract import AddedTo, Kept, LinearAdapters, LinearWeights, NormedInput, padded_columns
from edgellm.kernels.decode.packed_rows import MAX_NORMED_ROWS
from edgellm.kernels.decode.tilings import Capacity
from edgellm.kernels.quantization.device_layout import InputPermutation

#: Where the inputs of a linear layer come together that does not norm them itself.
JOINED_INPUTS = "joined_inputs"
#: What ends the name of a residual stream's other place, where it is once a linear layer that takes it added to it.
ELSEWHERE = " with what was added"


class StepKernels(NamedTuple):
    """The kernels in a GPU's memory, or their NumPy twins: of few rows, and of many; the GPU; and what a program may
    need beside them: kernels of recurrent layers, of linear layers of any number of rows, of prompts' attention, of
    encoders, which have layer norms and activations of rows, of mixtures of experts, and of one of several ranks; and
    an engine's own of TensorRT's, by their shapes."""

    few: Any
    many: Any
    gpu: Capacity = Capacity()
    recurrent: Any = None
    any_rows: Any = None
    prefill: Any = None
    encoder: Any = None
    experts: Any = None
    rank: Any = None
    plans: Mapping[EngineShape, Any] = MappingProxyType({})


class Waiting(NamedTuple):
    """Rows that are to be normed and added to the residual stream `name`, then multiplied by a `factor`."""

    name: str
    normed: NormedInput
    factor: Array | None


def other_place(step: LinearResidual, program: Program) -> Edge:
    """The other place of the residual stream, where what a step gives may wait to be added until the stream is taken:
    of so few rows that each block of the layer which takes them adds them for itself, to a stream that no other engine
    reads."""
    rows, width = math.prod(program.kinds[step.output][0][:-1]), step.linear.weight.shape[0]
    inside = step.residual == step.output and step.output not in program.edge
    is_rms = step.norm is not None and step.norm.bias is None and not step.selects
    return (
        {step.output + ELSEWHERE: ((rows, width), "float32")} if inside and is_rms and rows <= MAX_NORMED_ROWS else {}
    )


class Launching:
    """The kernels and arrays of a program whose launches are made.

    What `waits` to be added to the residual stream is added by the linear layer that takes the stream, or by a launch
    before the next step (`added`).
    """

    def __init__(
        self, kernels: StepKernels, program: Program, array: Callable[[str], Array], lows: Iterator[tuple[Array, Array]]
    ) -> None:
        """`array` gives the array of a tensor at the engine's edge, or of a value; `lows` what each linear layer with
        adapters has of `LinearAdapters.low` and `next_low`."""
        self.kernels, self.program, self._array, self._lows = kernels, program, array, lows
        self.waits: Waiting | None = None
        self._elsewhere: set[str] = set()

    def array(self, name: str) -> Array:
        """A tensor at the engine's edge, or a value where it stands now."""
        return self._array(name + ELSEWHERE if name in self._elsewhere else name)

    def moved(self, name: str) -> Array:
        """The other place of a value, where it stands from now on."""
        self._elsewhere ^= {name}
        return self.array(name)

    def added(self) -> list[Any]:
        """The launch that adds what waits, if anything does."""
        if self.waits is None:
            return []
        (name, normed, factor), self.waits = self.waits, None
        return [self.kernels.few.norm_residual(normed, self.array(name), self.array(name), factor=factor)]

    def _taken(self, name: str) -> tuple[Array, AddedTo | None]:
        """A value, or the rows that wait to be added to it and where they are: the sum then stands in another place."""
        if self.waits is None or self.waits.name != name:
            return self.array(name), None
        (_, normed, factor), self.waits = self.waits, None
        residual = self.array(name)
        assert normed.weight is not None
        added = AddedTo(residual, self.moved(name), normed.weight, normed.epsilon, normed.offset, factor)
        return normed.values, added

    def found(self, what: str | WeightSpec | None) -> Array | None:
        """The array of a value or a weight, or None of None."""
        name = what.name if isinstance(what, WeightSpec) else what
        return None if name is None else self.array(name)

    def normed(self, values: Array, norm: Norm | None) -> tuple[NormedInput, list[Any]]:
        """Values that are added once they are normed, if so, and the launch that norms them before where that is one of
        its own."""
        if norm is None:
            return NormedInput(values, None), []
        if norm.bias is not None:
            return NormedInput(values, None), [self.norm_rows(values, norm, values)]
        return NormedInput(values, self.array(norm.weight.name), norm.epsilon, norm.offset), []

    def sequences(self, name: str) -> Array:
        """A value [B, T, width]."""
        shape = self.program.shape
        return self.array(name).reshape(shape.batch, shape.tokens, -1)

    def shared(self, name: str, rows: int, width: int) -> Array:
        """The first rows [rows, width] of memory that steps share."""
        return self.array(name)[: rows * width].reshape(rows, width)

    def weights(self, linear: Linear) -> LinearWeights:
        """The weights of a linear layer, with adapters where the engine has them."""
        return LinearWeights(self.array(linear.weight.name), self.found(linear.bias), self._adapters(linear))

    def _adapters(self, linear: Linear) -> LinearAdapters | None:
        adapted, shape = self.program.adapted.get(linear.name), self.program.shape
        if adapted is None:
            return None
        a, b = (self.array(name) for name, _ in adapted.edge(shape.lora_slots, shape.lora_rank))
        return LinearAdapters(a, b, self.array(SCALES), module_rows(adapted), *next(self._lows))

    def columns(self, value: str, first: int, output: Array) -> NormedInput:
        """As many columns of a value, from `first` on, as an output has."""
        return NormedInput(self.array(value), None, first=first, width=output.shape[-1])

    def parts(self, given: Input) -> list[NormedInput]:
        """An input, in the parts that are normed each by itself."""
        values, added = self._taken(given.value)
        if not given.norms:
            return [NormedInput(values, None, added=added)]
        parts, first = [], 0
        for norm in given.norms:
            width, weight = norm.weight.shape[0], self.array(norm.weight.name)
            parts.append(NormedInput(values, weight, norm.epsilon, norm.offset, first, width, added))
            first += width
        return parts

    def kept(self, keep: Keep | None) -> Kept | None:
        """Where a step keeps what it read."""
        return None if keep is None else Kept(self.array(keep.target), keep.place, keep.raw)

    def keeping(self, step: Step) -> list[Any]:
        """The launch that keeps what a step is to keep, where that is a launch of its own."""
        if step.keeps is None or step.kept_value is None:
            return []
        values = self.array(step.kept_value)
        any_place = self.shared(JOINED_INPUTS, values.size // values.shape[-1], values.shape[-1])
        return [self.kernels.few.norm(NormedInput(values, None), any_place, 0, self.kept(step.keeps))]

    def together(
        self,
        step: NormLinear,
        padded: bool,
        next_early: bool = True,
        arranged: InputPermutation | None = None,
        apart: bool = False,
    ) -> tuple[Array, list[Any]]:
        """The inputs of a linear layer side by side [R, K] (`padded`: zeros behind, as `padded_columns`), and the
        launches that bring them there, each normed, and `arranged`. `apart`: nobody else reads what is there."""
        given = step.inputs[0]
        as_it_is = len(step.inputs) == 1 and not given.norms and comes_rounded(given.value, self.program)
        # Where what follows must not start early, a launch has to hold it back: the layer's own does not.
        if as_it_is and step.keep is None and next_early and not apart:
            return self.array(given.value), []
        columns, values = step.linear.weight.shape[1], self.array(step.inputs[-1].value)
        width = padded_columns(columns) if padded else columns
        packed = self.shared(JOINED_INPUTS, values.size // values.shape[-1], width)
        if given.norms and given.norms[0].bias is not None:  # of the whole input, as `linear_refusal` has it
            return packed, self._layer_normed(step, packed, next_early, arranged)
        parts: list[tuple[NormedInput, Keep | None]] = []
        for given in step.inputs:
            parts += [(part, None) for part in self.parts(given)]
        if step.keep is not None:
            parts[-1] = (parts[-1][0], step.keep)
        launches, column, at_once = [], 0, arranged if len(parts) == 1 else None
        for number, (part, keep) in enumerate(parts):
            early = next_early or number > 0
            launches.append(self.kernels.few.norm(part, packed, column, self.kept(keep), early, at_once))
            column += part.width or part.values.shape[-1]
        whole = NormedInput(packed, None, width=columns)
        if arranged is not None and at_once is None:
            launches.append(self.kernels.few.norm(whole, packed, arranged=arranged))
        return packed, launches

    def _layer_normed(
        self, step: NormLinear, packed: Array, next_early: bool, arranged: InputPermutation | None
    ) -> list[Any]:
        """The launches of the same for the one input of a linear layer behind a layer norm."""
        (given,), columns, keep = step.inputs, step.linear.weight.shape[1], step.keep
        launches, values = list[Any](), self.array(given.value)
        if keep is not None and keep.raw:
            launches += self.keeping(step)
            keep = None
        launches.append(self.norm_rows(values, given.norms[0], packed, next_early))
        if keep is not None or arranged is not None:
            whole = NormedInput(packed, None, width=columns)
            launches.append(self.kernels.few.norm(whole, packed, 0, self.kept(keep), arranged=arranged))
        return launches

    def norm_rows(self, values: Array, norm: Norm, output: Array, next_early: bool = True) -> Any:
        """The launch that norms whole rows, by kernels that know layer norms; the output may be the values."""
        rows, weight = values.reshape(-1, values.shape[-1]), self.array(norm.weight.name)
        offsets = self.found(norm.bias), norm.epsilon, norm.offset
        return self.kernels.encoder.norm(rows, weight, *offsets, output, next_early)

    def arranged(self, x: Array, linear: LinearWeights) -> list[Any]:
        """What arranges inputs where they are: nothing else reads what a layer's predecessor leaves for it."""
        if linear.arranged is None:
            return []
        inputs = NormedInput(x, None, width=linear.weight.shape[1])
        return [self.kernels.few.norm(inputs, x, arranged=linear.arranged)]


def comes_rounded(value: str, program: Program) -> bool:
    """Whether a value is an input of the engine in the compute dtype; the residual stream between segments is not."""
    return value in program.inputs and program.inputs[value][1] == "compute"


def module_rows(adapted: AdaptedProjection) -> tuple[int, ...]:
    """The rows of each layer that is multiplied as one with others."""
    return tuple(rows for _, rows in adapted.modules)
