"""A decoder's program shared among ranks: each computes its heads, rows and columns, and sums pass between all.

Tensor parallelism as Megatron-LM has it (Shoeybi et al. 2019): rows of q, k and v, of gate and up and of the head,
columns of what comes behind. What enters a layer is on every rank, and so are norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.program import Program
from edgellm.engines.model.steps import (
    Add,
    AddResidual,
    Assemble,
    Attention,
    Experts,
    Linear,
    LinearResidual,
    NormLinear,
    Reduce,
    Scale,
    Step,
)

#: From the first to before the second.
Range = tuple[int, int]
#: A rank, and of how many.
Share = tuple[int, int]


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


def sharded(program: Program, rank: int, of: int) -> Shard:
    """The part of a decoder's program that a rank of so many computes.

    The query heads are divided equally. A rank has the key-value heads of its query heads: where there are fewer than
    ranks, several have the same. `LinearResidual` becomes a partial product, whose bias rank 0 adds, a `Reduce`, and
    an `AddResidual`: of one rank these give the same bits. Of a mixture a rank has whole experts. Raises EngineError
    that names what cannot be shared: recurrent layers, norms of all heads together, and Gemma 4's own steps.
    """
    return _Sharding(program, rank, of).shard()


class _Sharding:
    """The parts of one rank; a method for a kind of step gives the steps in its place, or None where it is refused."""

    def __init__(self, program: Program, rank: int, of: int) -> None:
        self._program, self._rank, self._of = program, rank, of
        self._attentions = {step.value: step for step in reversed(program.attentions)}
        self._multiplied = {step.value for step in program.steps if isinstance(step, LinearResidual)}
        self._split: set[str] = set()  # values of which each rank has its columns
        self._cuts: dict[str, Cut] = {}

    def shard(self) -> Shard:
        kinds: dict[type, Callable[[Any], Sequence[Step] | None]] = {
            Scale: self._whole,
            Add: self._whole,
            NormLinear: self._norm_linear,
            Attention: self._attention,
            LinearResidual: self._linear_residual,
            Experts: self._experts,
        }
        steps: list[Step] = []
        for step in self._program.steps:
            share = kinds.get(type(step))
            found = None if share is None else share(step)
            if found is None:
                raise EngineError(f"{step.title} cannot be shared by {self._of} GPUs: take one GPU")
            steps += found
        program = replace(self._program, steps=tuple(steps))
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
        if step.into is not None:
            return None
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
            ranges = tuple((size * first, size * last) for first, last in parts)
        elif step.output in self._multiplied:
            inner = rows // (2 if step.gated else 1)
            begin, end = self._about(inner)
            ranges = tuple((start + begin, start + end) for start in range(0, rows, inner))
        else:
            return None
        self._split.add(step.output)
        return (replace(step, linear=self._rows(step.linear, ranges)),)

    def _attention(self, step: Attention) -> Sequence[Step] | None:
        if step.norms_values:  # of Gemma 4 alone, whose other steps are not shared
            return None
        (first, last), (begin, end) = self._queries(step), self._heads(step)
        self._cuts |= dict.fromkeys(step.state(self._program.shape).names, Cut(1, ((begin, end),)))
        self._split.add(step.output)
        sinks = None if step.sinks is None else self._piece(step.sinks, Cut(0, ((first, last),)))
        return (replace(step, heads=(last - first, end - begin, step.heads[2]), sinks=sinks),)

    def _linear_residual(self, step: LinearResidual) -> Sequence[Step] | None:
        if step.value not in self._split or step.residual is None:
            return self._whole(step)
        total = f"{step.output}_sum"
        others = step.scale, step.keep, step.selects, step.norm, step.factor
        return (
            LinearResidual(f"{total}_part", step.value, self._columns(step.linear), None, selects=step.selects),
            Reduce(total, f"{total}_part"),
            AddResidual(step.output, total, step.residual, *others),
        )

    def _experts(self, step: Experts) -> Sequence[Step]:
        """Whole experts are shared, so that each is computed as by one rank; the one of all tokens is as an MLP is."""
        if step.latent:
            raise EngineError(f"{step.title}, whose experts have a width of their own, is not shared: take one GPU")
        count = step.mixture.experts
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
            begin, end = self._about(inner)
            starts = range(0, into.weight.shape[0], inner)  # of gate and up, or of one
            into = self._rows(into, tuple((start + begin, start + end) for start in starts))
            shared = into, self._columns(back), *gate
        part, gate_up, down = f"{step.output}_part", own(step.gate_up), own(step.down)
        adds = self._rank == 0
        partial = replace(step, output=part, own=(first, last), adds=adds, gate_up=gate_up, down=down, shared=shared)
        return partial, Reduce(step.output, part)

    def _about(self, count: int) -> Range:
        """This rank's of things that need not be shared equally."""
        return count * self._rank // self._of, count * (self._rank + 1) // self._of

    def _equal(self, what: str, count: int) -> Range:
        """This rank's of things that are shared equally."""
        if count % self._of:
            raise EngineError(f"{what} cannot be shared equally by {self._of} GPUs: take a number that divides them")
        return self._about(count)

    def _queries(self, step: Attention) -> Range:
        return self._equal(f"the {step.heads[0]} query heads of layer {step.index}", step.heads[0])

    def _heads(self, step: Attention) -> Range:
        """The key-value heads of this rank's query heads."""
        kv_heads = step.heads[1]
        if self._of % kv_heads == 0:
            first = self._rank * kv_heads // self._of
            return first, first + 1
        return self._equal(f"the {kv_heads} key-value heads of layer {step.index}", kv_heads)

    def _rows(self, linear: Linear, ranges: tuple[Range, ...]) -> Linear:
        cut, bias = Cut(0, ranges), linear.bias
        return replace(linear, weight=self._piece(linear.weight, cut), bias=bias and self._piece(bias, cut))

    def _columns(self, linear: Linear) -> Linear:
        """Behind what `_about` shares, or heads; rank 0 adds the bias."""
        weight = self._piece(linear.weight, Cut(1, (self._about(linear.weight.shape[1]),)))
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
