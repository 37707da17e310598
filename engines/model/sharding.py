"""A decoder's program shared among ranks: each computes its heads, rows and columns, and sums pass between all.

Tensor parallelism as Megatron-LM has it (Shoeybi et al. 2019): rows of q, k and v, of gate and up and of the head,
columns of what comes behind. What enters a layer is on every rank, and so are norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.layer_weights import TOKEN_INPUTS
from edgellm.engines.model.program import Program, kept_states
from edgellm.engines.model.recurrent_steps import GatedDelta, GatedNorm, SelectiveScan, ShortConvolution
from edgellm.engines.model.row_steps import SOUND_ROWS, TokenInputs
from edgellm.engines.model.steps import (
    Add,
    AddResidual,
    Assemble,
    Attention,
    Experts,
    Linear,
    LinearResidual,
    NormLinear,
    NormParts,
    Reduce,
    Scale,
    SquareSums,
    Step,
)

#: From the first to before the second.
Range = tuple[int, int]
#: Columns between two layers that stay together where nothing is packed: kernels read eight at a time.
UNIT = 8
#: A projected value, and which of its columns from such a one on a step takes.
_Taken = tuple[str, int, Iterable[Range]]


class Share(NamedTuple):
    """A rank, of how many, and columns between two layers that stay together, as groups of packed weights do."""

    rank: int
    of: int
    unit: int = UNIT


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank has: these `ranges` along an `axis`, one behind the other."""

    axis: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """How many elements along the axis."""
        return sum(end - begin for begin, end in self.ranges)

    def within(self, first: int, rows: int) -> Cut:
        """The cut of a tensor that is fused in this one, whose rows begin at `first`."""
        if self.axis:
            return self
        inside = ((max(begin, first) - first, min(end, first + rows) - first) for begin, end in self.ranges)
        return Cut(0, tuple((begin, end) for begin, end in inside if begin < end))


@dataclass(frozen=True)
class Shard:
    """What a rank runs, and what of the tensors by name it is bound to: of weights, adapters and states. Those without
    a cut it has whole."""

    program: Program
    cuts: Mapping[str, Cut]


def sharded(program: Program, rank: int, of: int, unit: int = UNIT) -> Shard:
    """The part of a decoder's program that a rank of so many computes; see `Share`.

    The query heads are divided equally, and what an MLP has between its layers as equally as whole units can be. A rank
    has the key-value heads of its query heads: where there are fewer than ranks, several have the same.
    `LinearResidual` becomes a partial product, whose bias rank 0 adds, and a `Reduce`, behind which an `AddResidual`
    norms and selects: of one rank these give the same bits. Of a mixture a rank has whole experts. What tokens' own
    embeddings let through (Gemma 4) is computed by all: it is less than a sum takes. Raises EngineError that names what
    cannot be shared.
    """
    return _Sharding(program, Share(rank, of, unit)).shard()


class _Sharding:
    """The parts of one rank; a method for a kind of step gives the steps in its place, or None where it is refused."""

    def __init__(self, program: Program, share: Share) -> None:
        self._program, (self._rank, self._of, self._unit) = program, share
        self._attentions = {step.value: step for step in reversed(program.attentions)}
        self._multiplied = {step.value for step in program.steps if isinstance(step, LinearResidual)}
        self._split: set[str] = set()  # values of which each rank has its columns
        self._inner: dict[str, Range] = {}  # of those between the layers of an MLP which these are
        self._cuts: dict[str, Cut] = {}
        recurrent = [step for step in reversed(program.steps) if isinstance(step, GatedDelta)]
        self._rules = {name: step for step in recurrent for name in (step.value, step.output)}
        self._projected = self._columns_of_recurrent()

    def shard(self) -> Shard:
        kinds: dict[type, Callable[[Any], Sequence[Step] | None]] = {
            **dict.fromkeys((Scale, Add, TokenInputs, AddResidual), self._whole),
            NormLinear: self._norm_linear,
            NormParts: self._norm_parts,
            Attention: self._attention,
            ShortConvolution: self._convolution,
            **dict.fromkeys((GatedDelta, SelectiveScan), self._rule),
            GatedNorm: self._gated_norm,
            LinearResidual: self._linear_residual,
            Experts: self._experts,
        }
        steps: list[Step] = []
        for step in self._program.steps:
            share = kinds.get(type(step))
            found = None if share is None or SOUND_ROWS in step.reads else share(step)
            if found is None:
                raise EngineError(f"{step.title} cannot be shared by {self._of} GPUs: take one GPU")
            steps += found
        outputs = self._program.outputs | kept_states(steps, self._program.shape)
        program = replace(self._program, steps=tuple(steps), outputs=outputs)
        for name, each in program.adapted.items():
            cut = self._cuts.get(f"{name}.weight")
            (a, _), (b, _) = each.edge(program.shape.lora_slots, program.shape.lora_rank)
            if cut is not None:  # of B the columns stand for the rows of the weight
                self._cuts[a if cut.axis == 1 else b] = replace(cut, axis=1)
        return Shard(program, self._cuts)

    def _whole(self, step: Step) -> Sequence[Step] | None:
        """A step that all ranks compute."""
        return None if self._split.intersection(step.reads) else (step,)

    def _norm_linear(self, step: NormLinear) -> Sequence[Step] | None:
        rows = step.linear.weight.shape[0]
        if step.through is not None or step.output == TOKEN_INPUTS:
            return self._whole(step)
        if step.output == "logits":
            own = self._rows(step.linear, (self._about(rows),))
            widths = tuple(rows * (rank + 1) // self._of - rows * rank // self._of for rank in range(self._of))
            return replace(step, output="own_logits", linear=own), Assemble(step.output, "own_logits", widths)
        attention = self._attentions.get(step.output)
        if attention is not None:
            (heads, kv_heads, size), wide = attention.heads, 2 if attention.gated else 1
            (first, last), (begin, end) = self._queries(attention), self._heads(attention)
            keys, values = wide * heads, wide * heads + kv_heads  # where they begin, in heads
            parts = (wide * first, wide * last), (keys + begin, keys + end), (values + begin, values + end)
            ranges = tuple((size * first, size * last) for first, last in parts[: 1 if step.into else 3])
        elif step.output in self._multiplied:
            inner = rows // (2 if step.gated else 1)
            begin, end = self._inner[step.output] = self._in_units(inner)
            ranges = tuple((start + begin, start + end) for start in range(0, rows, inner))
        elif step.output in self._projected:
            ranges = self._projected[step.output]
        else:
            return None
        self._split.add(step.output)
        return (replace(step, linear=self._rows(step.linear, ranges)),)

    def _norm_parts(self, step: NormParts) -> Sequence[Step] | None:
        """Norms of the queries and keys of all heads: ranks add the squares of their own."""
        attention = self._attentions.get(step.output)
        if attention is None:
            return self._whole(step)
        if step.value != step.output or any(norm.bias is not None for norm in step.norms):
            return None
        heads, size = (self._queries(attention), self._heads(attention)), attention.heads[2]
        cuts = [Cut(0, ((size * first, size * last),)) for first, last in heads]
        counted = True, self._rank % max(1, self._of // attention.heads[1]) == 0  # the first that has these keys
        pieces = [(norm, self._piece(norm.weight, cut)) for norm, cut in zip(step.norms, cuts, strict=True)]
        norms, wholes = (replace(norm, weight=own) for norm, own in pieces), (n.weight.shape[0] for n in step.norms)
        squares = f"{step.output}_squares"
        return (
            SquareSums(f"{squares}_part", step.value, tuple(cut.size for cut in cuts), counted),
            Reduce(squares, f"{squares}_part"),
            replace(step, norms=tuple(norms), squares=squares, wholes=tuple(wholes)),
        )

    def _attention(self, step: Attention) -> Sequence[Step]:
        (first, last), (begin, end) = self._queries(step), self._heads(step)
        self._cuts |= dict.fromkeys(step.state(self._program.shape).names, Cut(1, ((begin, end),)))
        self._split.add(step.output)
        sinks = None if step.sinks is None else self._piece(step.sinks, Cut(0, ((first, last),)))
        return (replace(step, heads=(last - first, end - begin, step.heads[2]), sinks=sinks),)

    def _columns_of_recurrent(self) -> dict[str, tuple[Range, ...]]:
        """Of each value that is projected for recurrent layers, the columns that this rank takes."""
        kinds: dict[type, Callable[[Any], _Taken]] = {
            ShortConvolution: self._convolved,
            GatedDelta: self._gates_of_rule,
            SelectiveScan: self._gates_of_rule,
            GatedNorm: self._gates_of_norm,
        }
        found: dict[str, set[Range]] = {}
        for step in self._program.steps:
            if (taken := kinds.get(type(step))) is not None:
                value, first, ranges = taken(step)
                for begin, end in ranges:
                    found.setdefault(value, set()).add((first + begin, first + end))
        return {value: tuple(sorted(ranges)) for value, ranges in found.items()}

    def _convolved(self, step: ShortConvolution) -> _Taken:
        starts = range(0, (3 if step.gated else 1) * step.channels, step.channels)
        own = self._channels(step)
        return step.value, step.first, [(start + begin, start + end) for start in starts for begin, end in own]

    def _gates_of_rule(self, step: GatedDelta) -> _Taken:
        return step.gates, step.first, self._value_heads(step, parts=step.gate_parts)

    def _gates_of_norm(self, step: GatedNorm) -> _Taken:
        rule = self._rules[step.value]
        return step.gate, step.first, self._value_heads(rule, rule.sizes[1])

    def _place(self, value: str, column: int) -> int:
        """Where a column of a projected value stands in what this rank has of it."""
        return sum(min(end, column) - begin for begin, end in self._projected[value] if begin < column)

    def _value_heads(self, rule: GatedDelta, width: int = 1, parts: int = 1) -> tuple[Range, ...]:
        """This rank's value heads, of so many columns, in each of so many parts of the columns of all."""
        heads = rule.heads[1]
        first, last = self._equal(f"the {heads} value heads of layer {rule.index}", heads)
        starts = range(0, parts * heads * width, heads * width)
        return tuple((start + first * width, start + last * width) for start in starts)

    def _channels(self, step: ShortConvolution) -> tuple[Range, ...]:
        """This rank's channels: queries, keys and values of its heads, or x, B and C."""
        rule = self._rules.get(step.output)
        if rule is None:
            return (self._about(step.channels),)
        (key_heads, heads), (key_size, size) = rule.heads, rule.sizes
        first, last = self._shared(f"the {key_heads} key heads of layer {rule.index}", key_heads)
        keys, (values,) = (first * key_size, last * key_size), self._value_heads(rule, size)
        parts = [(keys, key_heads * key_size)] * 2
        parts.insert(0 if rule.stores_first else 2, (values, heads * size))
        starts = accumulate((width for _, width in parts), initial=0)
        return tuple((start + begin, start + end) for start, ((begin, end), _) in zip(starts, parts, strict=False))

    def _convolution(self, step: ShortConvolution) -> Sequence[Step]:
        cut, state = Cut(0, self._channels(step)), step.state(self._program.shape)
        self._cuts |= dict.fromkeys(state.names, replace(cut, axis=1))
        kept = (*state.kept_names, step.output) if step.output in self._rules else state.kept_names
        self._cuts |= dict.fromkeys(kept, replace(cut, axis=2))
        self._split.add(step.output)
        weight, bias = self._piece(step.weight, cut), step.bias and self._piece(step.bias, cut)
        first = self._place(step.value, step.first)
        return (replace(step, channels=cut.size, weight=weight, bias=bias, first=first),)

    def _rule(self, step: GatedDelta) -> Sequence[Step]:
        state, ((first, last),), key_heads = step.state(self._program.shape), self._value_heads(step), step.heads[0]
        begin, end = self._shared(f"the {key_heads} key heads of layer {step.index}", key_heads)
        self._cuts |= dict.fromkeys(state.names, Cut(1, ((first, last),)))
        self._cuts[state.kept_names[-1]] = Cut(2, self._value_heads(step, parts=2))
        self._split.add(step.output)
        own = Cut(0, ((first, last),))
        numbers: dict[str, Any] = {name: self._piece(getattr(step, name), own) for name in step.numbers}
        heads = end - begin, last - first
        return (replace(step, heads=heads, first=self._place(step.gates, step.first), **numbers),)

    def _gated_norm(self, step: GatedNorm) -> Sequence[Step]:
        """Of a norm behind gates ranks have whole parts, or add the squares of their own of a part that they share."""
        rule, parts, squares = self._rules[step.value], step.heads, f"{step.output}_squares"
        self._split.add(step.output)
        own = replace(step, first=self._place(step.gate, step.first), heads=max(1, parts // self._of))
        if not step.gates_first:
            return (own,)
        whole, cut = step.norm.weight.shape[0], Cut(0, self._value_heads(rule, rule.sizes[1]))  # one of each column
        own = replace(own, norm=replace(step.norm, weight=self._piece(step.norm.weight, cut)))
        if parts % self._of == 0:
            return (own,)
        place = self._rank * parts // self._of
        widths = tuple(cut.size if each == place else 0 for each in range(parts))
        return (
            SquareSums(f"{squares}_part", step.value, widths, tuple(map(bool, widths)), step.gate, own.first),
            Reduce(squares, f"{squares}_part"),
            replace(own, squares=squares, shared=(place, whole // parts)),
        )

    def _linear_residual(self, step: LinearResidual) -> Sequence[Step] | None:
        if step.value not in self._split or step.residual is None:
            return self._whole(step)
        total = f"{step.output}_sum"
        own = self._columns(step.linear, self._inner.get(step.value) or self._about(step.linear.weight.shape[1]))
        part = LinearResidual(f"{total}_part", step.value, own, None, selects=step.selects)
        others = step.selects, step.norm, step.factor
        if not any(others):
            return part, Reduce(step.output, part.output, step.residual, step.scale, step.keep)
        summed = Reduce(total, part.output, scale=step.scale)
        return part, summed, AddResidual(step.output, total, step.residual, step.keep, *others)

    def _experts(self, step: Experts) -> Sequence[Step]:
        """Whole experts are shared, so that each is computed as by one rank; the one of all tokens is as an MLP is.
        Layers to and from a width of the experts' own are on every rank, each of which leads back its part of the sum.
        """
        count = step.mixture.experts
        if count < self._of:
            raise EngineError(f"the {count} experts of a mixture cannot be shared by {self._of} GPUs: take fewer GPUs")
        first, last = self._about(count)

        def own(linear: Linear) -> Linear:
            rows = linear.weight.shape[0] // count
            weight = self._piece(linear.weight, Cut(0, ((first * rows, last * rows),)))
            bias = linear.bias and self._piece(linear.bias, Cut(0, ((first, last),)))
            return replace(linear, weight=replace(weight, experts=last - first), bias=bias)

        shared = step.shared
        if shared:
            into, back, *gate = shared
            inner = back.weight.shape[1]
            begin, end = self._in_units(inner)
            starts = range(0, into.weight.shape[0], inner)  # of gate and up, or of one
            into = self._rows(into, tuple((start + begin, start + end) for start in starts))
            shared = into, self._columns(back, (begin, end)), *gate
        gate_up, down, output = own(step.gate_up), own(step.down), f"{step.output}_sum_part"
        part = replace(step, output=output, residual=None, keep=None, own=(first, last), shared=shared)
        return replace(part, gate_up=gate_up, down=down), Reduce(step.output, output, step.residual, keep=step.keep)

    def _about(self, count: int) -> Range:
        """This rank's of things that need not be shared equally."""
        return count * self._rank // self._of, count * (self._rank + 1) // self._of

    def _in_units(self, columns: int) -> Range:
        """This rank's of columns, in whole units where each rank gets one."""
        unit = 1 if columns % self._unit or columns < self._unit * self._of else self._unit
        begin, end = self._about(columns // unit)
        return unit * begin, unit * end

    def _equal(self, what: str, count: int, takes: str = "divides them") -> Range:
        """This rank's of things that are shared equally."""
        if count % self._of:
            raise EngineError(f"{what} cannot be shared equally by {self._of} GPUs: take a number that {takes}")
        return self._about(count)

    def _queries(self, step: Attention) -> Range:
        return self._equal(f"the {step.heads[0]} query heads of layer {step.index}", step.heads[0])

    def _heads(self, step: Attention) -> Range:
        """The key-value heads of this rank's query heads."""
        return self._shared(f"the {step.heads[1]} key-value heads of layer {step.index}", step.heads[1])

    def _shared(self, what: str, count: int) -> Range:
        """This rank's of heads that several heads share: where there are fewer than ranks, several have the same."""
        if self._of % count:
            return self._equal(what, count, "divides them, or is a multiple of them")
        first = self._rank * count // self._of
        return first, first + 1

    def _rows(self, linear: Linear, ranges: tuple[Range, ...]) -> Linear:
        cut, bias = Cut(0, ranges), linear.bias
        return replace(linear, weight=self._piece(linear.weight, cut), bias=bias and self._piece(bias, cut))

    def _columns(self, linear: Linear, own: Range) -> Linear:
        """What multiplies this rank's `own` columns; rank 0 adds the bias."""
        weight = self._piece(linear.weight, Cut(1, (own,)))
        return replace(linear, weight=weight, bias=None if self._rank else linear.bias)

    def _piece(self, spec: WeightSpec, cut: Cut) -> WeightSpec:
        """A weight as this rank has it; of each tensor that is fused in it, the rows and columns that stand in it."""
        self._cuts[spec.name] = cut
        parts, first = [], 0
        for name, shape in spec.parts:
            own = cut.within(first, shape[0])
            parts.append((name, (shape[0], own.size) if own.axis else (own.size, *shape[1:])))
            first += shape[0]
        shape = (*spec.shape[: cut.axis], cut.size, *spec.shape[cut.axis + 1 :])
        return replace(spec, shape=shape, parts=tuple(parts))
