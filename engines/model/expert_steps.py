"""Mixtures of experts in the steps that kernels run: `Experts` as these.

A router is a linear layer, whose norm it leaves for the experts; a row's experts are then chosen on the device, where
their ids stay; their layers are two products of all pairs of rows and experts; and what these give is added in the
order of ids. An expert that every row goes through is two linear layers more, like those of any MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import ClassVar

from edgellm.engines.model.config import Mixture, WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.program import Program
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import (
    READS,
    Add,
    Experts,
    Input,
    Keep,
    Linear,
    LinearResidual,
    Normed,
    NormLinear,
    SideBySide,
    Step,
    rows_like,
)
from edgellm.kernels.experts.contract import SUMS, Activation

#: Says of a step's field that it names what the step writes.
_WRITTEN = {"reads": False}


@dataclass(frozen=True)
class ChooseExperts(Step):
    """output = the ids of the experts that each row goes through by its `scores`; `shares` get its shares of them, and
    with a `gate` [1, H] `shared_shares` its share of the shared expert, by what is `given`. Shares are times the
    `scales` of experts, if these have such. Where ranks share the experts, ids count from the first of this rank's
    `own`, and others' are -1, with shares of 0."""

    shares: str = field(metadata=_WRITTEN)
    shared_shares: str = field(metadata=_WRITTEN)
    scores: str = field(metadata=READS)
    given: str = field(metadata=READS)
    mixture: Mixture
    correction: WeightSpec | None = None
    gate: Linear | None = None
    own: tuple[int, int] | None = None
    scales: WeightSpec | None = None
    called: ClassVar[str] = "the choice of experts for {0.output}"

    @property
    def writes(self) -> tuple[str, ...]:
        return self.output, self.shares, self.shared_shares

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        rows = kinds[self.scores][0][:-1]
        found: Edge = {self.output: ((*rows, self.mixture.chosen), "int32")}
        found[self.shares] = (*rows, self.mixture.chosen), "float32"
        return found if self.gate is None else found | {self.shared_shares: ((*rows, 1), "float32")}


@dataclass(frozen=True)
class _OfExperts(Step):
    """A layer of all experts, which the `ids` of a row choose."""

    value: str = field(metadata=READS)
    ids: str = field(metadata=READS)
    linear: Linear = field()
    mixture: Mixture
    called: ClassVar[str] = "the experts' layer {0.linear.name}"

    @property
    def multiplies(self) -> None:
        """No layer of all rows."""
        return None

    @property
    def how(self) -> Activation:
        """What is made of the products."""
        return self.mixture.activation

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the matrix of one expert."""
        rows, columns = self.linear.weight.shape
        return rows // self.mixture.experts, columns


@dataclass(frozen=True)
class GateUpExperts(_OfExperts):
    """output = what each of a row's experts makes of its gates and ups of the row, beside each other."""

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.ids, self.mixture.chosen * self.mixture.size), "compute")}


@dataclass(frozen=True)
class DownExperts(_OfExperts):
    """output = residual, if there is one, + scale * (the products of each of a row's experts and its own part of the
    `value`, times the row's `shares`, added in order, then what the `shared` one gives, times `shared_shares`, if it
    has a gate)."""

    shares: str = field(metadata=READS)
    residual: str | None = field(default=None, metadata=READS)
    shared: str | None = field(default=None, metadata=READS)
    shared_shares: str | None = field(default=None, metadata=READS)
    scale: float = 1.0
    keep: Keep | None = None

    @property
    def how(self) -> Activation:
        return SUMS

    @property
    def products(self) -> str:
        """Where the products come together, float32 [R, k N]."""
        return f"{self.output}_products"

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.ids, self.matrix[0]), residual)}


def for_kernels(program: Program) -> Program:
    """The same with each mixture of experts as the steps that kernels run."""
    if not program.mixtures:
        return program
    each = (_steps_of(step, program) if isinstance(step, Experts) else (step,) for step in program.steps)
    return replace(program, steps=tuple(chain.from_iterable(each)))


def _steps_of(step: Experts, program: Program) -> Iterator[Step]:
    """Values between them are named after the output, of which layers of all rows and of selected ones have others."""
    names = "scores", "input", "ids", "shares", "inner", "shared_inner", "shared", "shared_shares"
    scores, given, ids, shares, inner, *shared = (f"{step.output}_{name}" for name in names)
    mixture, (shared_inner, shared_output, shared_shares) = step.mixture, shared
    gate = step.shared[2] if len(step.shared) == 3 else None
    if step.scored is None:
        yield NormLinear(scores, (step.given,), step.router, keep=Keep(given))
    else:
        yield NormLinear(scores, (step.scored,), step.router, scale=step.router.weight.shape[1] ** -0.5)
        yield Normed(given, step.given.value, *step.given.norms)
    numbers = step.correction, gate, step.own, step.scales
    yield ChooseExperts(ids, shares, shared_shares, scores, given, mixture, *numbers)
    if step.own is not None:
        mixture = replace(mixture, experts=step.own[1] - step.own[0])
    if step.shared:
        activation = "silu" if mixture.gated else "relu_squared"
        yield NormLinear(shared_inner, (Input(given),), step.shared[0], activation, mixture.gated)
    if step.latent:
        yield from _latent_steps(replace(step, mixture=mixture), given, ids, shares, inner, shared_inner)
        return
    if step.shared:
        yield NormLinear(shared_output, (Input(shared_inner),), step.shared[1])
    yield GateUpExperts(inner, given, ids, step.gate_up, mixture)
    beside = shared_output if step.shared else None, None if gate is None else shared_shares, step.scale, step.keep
    yield DownExperts(step.output, inner, ids, step.down, mixture, shares, step.residual, *beside)


def _latent_steps(step: Experts, given: str, ids: str, shares: str, inner: str, shared_inner: str) -> Iterator[Step]:
    """What follows the choice where experts have a width of their own: their sum is added behind the layer that leads
    back from it; what the expert of all tokens gives was added before."""
    sums, into, total, back = (f"{step.output}_latent_{name}" for name in ("sums", "input", "total", "back"))
    yield NormLinear(sums, (Input(given),), step.latent[0])
    yield SideBySide(into, (sums,))  # in the compute dtype
    yield GateUpExperts(inner, into, ids, step.gate_up, step.mixture)
    yield DownExperts(total, inner, ids, step.down, step.mixture, shares)
    yield LinearResidual(step.output, shared_inner, step.shared[1], step.residual, step.scale, step.keep)
    yield NormLinear(back, (Input(total),), step.latent[1])
    yield Add(step.output, step.output, back)
