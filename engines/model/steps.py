"""The steps that programs are made of: what each reads, writes and computes. Here are those that decoders share with
encoders or with each other; those of recurrent layers and of encoders alone are in files of their own.

Values are rows: of B sequences by T tokens, of so many elements. What a step is stands here, what it computes in
`graph.py` by operations, and how kernels do it in `backends/steps`.

Axis letters: B sequences, T tokens of each, H hidden size, n heads, D head size, N rows and K columns of a weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from edgellm.engines.formats.strict_formats import ADDED_LATER
from edgellm.engines.model.config import Mixture, WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import Edge, KVRows, LayerState, WindowRows

#: The input that names for each token the last row that it sees, [B, T] int32; only tokens of images see behind their
#: own. Of the same step, and never before that of the token before.
LAST_SEEN = "last_seen"


#: Says of a step's field that it names what the step reads: values, inputs of the engine, or parts that name them.
READS = {"reads": True}
#: Says of a flag that where it is set the step reads this input of the engine.
READS_SELECTED, READS_LAST_SEEN = {"reads": "last_token_ids"}, {"reads": LAST_SEEN}


@dataclass(frozen=True)
class Norm:
    """An RMS norm (Zhang and Sennrich 2019) by weight + offset, or with a bias a layer norm (Ba et al. 2016)."""

    weight: WeightSpec
    epsilon: float
    bias: WeightSpec | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Linear:
    """x [.., K] times the transpose of a weight [N, K], plus a bias [N]; its weights are named after it."""

    name: str
    weight: WeightSpec
    bias: WeightSpec | None = None


@dataclass(frozen=True)
class Input:
    """A value that a linear layer takes, normed part after part where it has norms; several stand side by side."""

    value: str
    norms: tuple[Norm, ...] = ()


@dataclass(frozen=True)
class Keep:
    """A step's (last) input also becomes columns `place` * width .. of the value or output `target`.

    `raw`: as it was before its norm.
    """

    target: str
    place: int = 0
    raw: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a program; `output` is the value that it writes.

    What it reads is declared on its fields; `results` says what its values are like. So values, segments and the places
    of what is under way follow from the steps alone.
    """

    output: str
    #: What messages call it, by its own fields.
    called: ClassVar[str] = "the step {0.__class__.__name__} to {0.output}"
    #: The dtype of its output, "residual" that of the residual stream, where it is as wide as what it reads first.
    gives: ClassVar[str | None] = None
    #: Whether kernels run it between TensorRT's engines, at which it cuts a program.
    cuts: ClassVar[bool] = False
    #: Whether of several ranks the first alone has what it gives.
    gathers: ClassVar[bool] = False

    @property
    def weights(self) -> Iterator[WeightSpec]:
        """Its weights, in order of use."""
        return _weights(vars(self).values())

    @property
    def reads(self) -> tuple[str, ...]:
        """The values and inputs that it reads, states, masks and rotary rows apart."""
        declared = ((getattr(self, each.name), each.metadata.get("reads")) for each in fields(self))
        return tuple(name for value, what in declared if what for name in _names(value, what))

    @property
    def writes(self) -> tuple[str, ...]:
        """The values that it writes: its output, and what it keeps."""
        return (self.output,) if self.keeps is None else (self.output, self.keeps.target)

    @property
    def keeps(self) -> Keep | None:
        """What it leaves of `kept_value`, if anything."""
        return getattr(self, "keep", None)

    @property
    def kept_value(self) -> str | None:
        """What it may keep: its residual, or the last input of a linear layer without one."""
        return self.adds_to

    @property
    def multiplies(self) -> Linear | None:
        """The linear layer whose weight it multiplies, if it has one."""
        return getattr(self, "linear", None)

    @property
    def adds_to(self) -> str | None:
        """The residual that its output is a sum with, if it is one."""
        return getattr(self, "residual", None)

    @property
    def title(self) -> str:
        """The step in a few words, for messages."""
        return self.called.format(self)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        """Shape and dtype of what it writes, by name, but for what it keeps, where `kinds` are those of what it reads
        and `residual` is the dtype of the residual stream: by default like the first value that it reads."""
        if self.gives is None:
            return {}
        return {self.output: (kinds[self.reads[0]][0], residual if self.gives == "residual" else self.gives)}

    def __repr__(self) -> str:
        """Prints as dataclasses do, but for fields that came later where they have their defaults: a plan is built anew
        where the text of its program is another."""
        shown = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if not each.metadata.get("added_later") or getattr(self, each.name) != each.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class Stateful(Step, ABC):
    """A step of layer `index` that has a state, KV rows or another."""

    index: int
    cuts: ClassVar[bool] = True

    @abstractmethod
    def state(self, shape: EngineShape) -> LayerState:
        """The layer's state of this step in an engine of a shape, which need not know what of it is saved."""


def _names(part: object, declared: object) -> Iterator[str]:
    """What a field names that is declared to be read."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Input):
        yield part.value
    elif isinstance(part, tuple):
        for one in part:
            yield from _names(one, declared)
    elif part is True:
        assert isinstance(declared, str)
        yield declared


def _weights(parts: Iterable[object]) -> Iterator[WeightSpec]:
    """Those among the parts of a step, and in parts of these."""
    for part in parts:
        if isinstance(part, WeightSpec):
            yield part
        elif isinstance(part, (Input, Linear, Norm)):
            yield from _weights(vars(part).values())
        elif isinstance(part, tuple):
            yield from _weights(part)


def rows_like(kinds: Edge, value: str, width: int) -> tuple[int, ...]:
    """Rows like those of a value, of another width."""
    return (*kinds[value][0][:-1], width)


def _selected(selects: bool, rows: tuple[int, ...], width: int, shape: EngineShape) -> tuple[int, ...]:
    """The rows that a linear layer gives, of its input's."""
    return (rows[0], shape.selected if selects else rows[1], width)


@dataclass(frozen=True)
class Scale(Step):
    """output = factor * value, in the dtype of the residual stream."""

    value: str = field(metadata=READS)
    factor: float
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True)
class Add(Step):
    """output = value + an input of the engine, or a weight whose rows are those of one sequence."""

    value: str = field(metadata=READS)
    other: str | WeightSpec = field(metadata=READS)
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True)
class Normed(Step):
    """output = norm(value)."""

    value: str = field(metadata=READS)
    norm: Norm

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (kinds[self.value][0], residual if shape.phase == "encode" else "compute")}


@dataclass(frozen=True)
class SquareSums(Step):
    """output [.., at least `SQUARE_SUMS`] = the sum of the squares of each part of the value's columns, as wide as
    `widths` say and part after part from the first on; 0 of those that are not `counted`, and behind the last. Where
    there is a `gate`, the value is multiplied by silu(its columns from `first` on) before."""

    value: str = field(metadata=READS)
    widths: tuple[int, ...]
    counted: tuple[bool, ...]
    gate: str | None = field(default=None, metadata=READS)
    first: int = 0

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        from edgellm.kernels.decode.contract import SQUARE_SUMS  # NumPy, which the command line does without

        return {self.output: (rows_like(kinds, self.value, max(SQUARE_SUMS, len(self.widths))), residual)}


@dataclass(frozen=True, repr=False)
class NormParts(Step):
    """output = value with its first columns normed: part after part, each as wide as the norm of `norms` that it gets;
    the columns behind the last part stay as they are. Where ranks share the parts, `squares` are the sums of all of
    them (see `SquareSums`), and `wholes` how wide each part is of all ranks together."""

    value: str = field(metadata=READS)
    norms: tuple[Norm, ...]
    squares: str | None = field(default=None, metadata=READS | ADDED_LATER)
    wholes: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: kinds[self.value]}


@dataclass(frozen=True, repr=False)
class NormLinear(Step):
    """output = scale * linear(inputs, each normed or as it is, side by side), in compute dtype (logits: float32).

    `activation` is one of each element or, `gated`, of the first half, which multiplies the second. `selects`: of the
    rows only those that `last_token_ids` names. With a `cap` above 0 logits become cap tanh(logit / cap). What an
    activation without a gate gives is multiplied by the columns of `through` from `first` on, where that is a value.
    With `into` the output is that value with these columns in the place of its first ones.
    """

    inputs: tuple[Input, ...] = field(metadata=READS)
    linear: Linear
    activation: str | None = None
    gated: bool = False
    scale: float = 1.0
    keep: Keep | None = None
    selects: bool = field(default=False, metadata=READS_SELECTED)
    cap: float = field(default=0.0, metadata=ADDED_LATER)
    through: str | None = field(default=None, metadata=ADDED_LATER | READS)
    first: int = field(default=0, metadata=ADDED_LATER)
    into: str | None = field(default=None, metadata=ADDED_LATER | READS)

    called: ClassVar[str] = "the linear layer {0.linear.name}"
    #: Whether inputs may have to be normed, rounded or put side by side before they are multiplied.
    prepares: ClassVar[Literal[True]] = True

    @property
    def kept_value(self) -> str:
        return self.inputs[-1].value

    @property
    def norms(self) -> tuple[Norm, ...]:
        """Those of its inputs."""
        return tuple(norm for given in self.inputs for norm in given.norms)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        if self.into is not None:
            return {self.output: kinds[self.into]}
        width = self.linear.weight.shape[0] // (2 if self.gated else 1)
        rows, dtype = kinds[self.kept_value][0], "float32" if self.activation is None else "compute"
        return {self.output: (_selected(self.selects, rows, width, shape), dtype)}


@dataclass(frozen=True, repr=False)
class LinearResidual(Step):
    """output = residual + scale * linear(value), or with a `norm` residual + norm(scale * linear(value)), and with a
    `factor` [1] all of it times that. `keep` gets the residual; `selects` as in `NormLinear`. Without a residual the
    output is linear(value), a part of a sum of all ranks."""

    value: str = field(metadata=READS)
    linear: Linear
    residual: str | None = field(metadata=READS)
    scale: float = 1.0
    keep: Keep | None = None
    selects: bool = field(default=False, metadata=READS_SELECTED)
    norm: Norm | None = field(default=None, metadata=ADDED_LATER)
    factor: WeightSpec | None = field(default=None, metadata=ADDED_LATER)
    gated: ClassVar[bool] = False
    activation: ClassVar[None] = None
    through: ClassVar[None] = None
    into: ClassVar[None] = None
    prepares: ClassVar[Literal[False]] = False

    called: ClassVar[str] = "the linear layer {0.linear.name}"

    @property
    def inputs(self) -> tuple[Input, ...]:
        """Its value, as it is."""
        return (Input(self.value),)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """That of what it gives, if there is one."""
        return () if self.norm is None else (self.norm,)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        rows = _selected(self.selects, kinds[self.value][0], self.linear.weight.shape[0], shape)
        return {self.output: (rows, residual)}


@dataclass(frozen=True, repr=False)
class Reduce(Step):
    """output = residual, if there is one, + scale * the sum of what all ranks have in `value`, added in the order of
    ranks; `keep` gets the residual. See `sharding`."""

    value: str = field(metadata=READS)
    residual: str | None = field(default=None, metadata=READS | ADDED_LATER)
    scale: float = field(default=1.0, metadata=ADDED_LATER)
    keep: Keep | None = field(default=None, metadata=ADDED_LATER)
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True)
class Assemble(Step):
    """output = the columns of what all ranks have in `value`, as many as `widths` say, one rank's behind the other's;
    where ranks have memory of their own, it is the first one's alone."""

    value: str = field(metadata=READS)
    widths: tuple[int, ...]
    gathers: ClassVar[bool] = True


@dataclass(frozen=True)
class AddResidual(Step):
    """What `LinearResidual` does with what its linear layer gives, which is the `value` here, already scaled."""

    value: str = field(metadata=READS)
    residual: str = field(metadata=READS)
    keep: Keep | None = None
    selects: bool = field(default=False, metadata=READS_SELECTED)
    norm: Norm | None = None
    factor: WeightSpec | None = None
    linear: ClassVar[None] = None
    scale: ClassVar[float] = 1.0
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True, repr=False)
class Experts(Step):
    """output = residual + scale * the sum of what each token's experts give, times their shares (see `Mixture`).

    The `router` [E, H] scores the `given` rows. The rows of expert e in `gate_up` [E 2 I, H] and `down` [E H, I] begin
    at e 2 I and e H, and it gives down(silu(gate) up), or what `Mixture` says; biases are [E, 2 I] and [E, H].
    Experts are added in float32 in the order of their ids, so that a row's sum follows from what its own give,
    whichever rows are beside it. `correction` [E] is for the choice alone. `shared` are the layers of an expert that
    every token goes through: gate and up, down, and its own gate [1, H], if it has one. `keep` gets the residual. With
    the two layers `latent`, [L, H] and [H, L], experts take rows of the first's, and the second takes their sum.
    Where `scored` is given the router takes that, and what it gives is divided by the root of H; `scales` [E] are what
    the shares are multiplied by.

    Where ranks share the experts, `own` are the first of this one's and the one behind its last: the matrices are of
    these alone, and so is the output, a part of a sum of all ranks without a residual.
    """

    given: Input = field(metadata=READS)
    residual: str | None = field(metadata=READS)
    mixture: Mixture
    router: Linear
    gate_up: Linear
    down: Linear
    correction: WeightSpec | None = None
    scale: float = 1.0
    shared: tuple[Linear, ...] = ()
    keep: Keep | None = field(default=None, metadata=ADDED_LATER)
    latent: tuple[Linear, ...] = field(default=(), metadata=ADDED_LATER)
    own: tuple[int, int] | None = field(default=None, metadata=ADDED_LATER)
    scored: Input | None = field(default=None, metadata=READS | ADDED_LATER)
    scales: WeightSpec | None = field(default=None, metadata=ADDED_LATER)

    called: ClassVar[str] = "the mixture of experts {0.router.name}"
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True, repr=False)
class Attention(Stateful):
    """Grouped-query attention over the KV rows of layer `index`: q/k norm, rotary embedding, row write, softmax of
    scores.

    `value` [.., (n + 2 n_kv) D] holds query, key and value heads, `heads` are n, n_kv and D. `rotary` is the size that
    is rotated (0: none).
    `masks_all`: the mask decides about the rows before the new ones too (trees of a draft). `gated`: in `value`
    [.., (2 n + 2 n_kv) D] a gate stands behind each query head, and what the head attends to is multiplied by its
    sigmoid. With a `window` each token sees the latest so many of the rows that it would see, its own included, and the
    layer's rows are a ring; the rotary embedding has the columns of the rotary rows from `rotary_first` on. With
    `looks_ahead` a token sees the rows up to the one that the input `last_seen` [B, T] names, its own or a later one of
    the step, and with a window those of them that its own position reaches back to. `sinks` [n] are scores of each
    head that take part in its softmax beside those of keys, and have no value. Queries take columns of the rotary rows
    that are `query_columns` further on than those of keys. Element j of the rotated part is paired with that half of
    the part further on, or of `neighbours` each of an even number with the next: these are then kept apart, as if they
    were halves. With `norms_behind` the norms stand behind the rotation. Without query heads (n is 0) rows are written,
    and nothing is put out. With a `cap` above 0 scores become cap tanh(score / cap) before the mask.
    With `norms_values` value heads are normed as keys are, but without a weight.
    """

    value: str = field(metadata=READS)
    index: int
    heads: tuple[int, int, int]
    scale: float
    rotary: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    masks_all: bool = False
    gated: bool = field(default=False, metadata=ADDED_LATER)
    window: int | None = field(default=None, metadata=ADDED_LATER)
    rotary_first: int = field(default=0, metadata=ADDED_LATER)
    looks_ahead: bool = field(default=False, metadata=ADDED_LATER | READS_LAST_SEEN)
    sinks: WeightSpec | None = field(default=None, metadata=ADDED_LATER)
    query_columns: int = field(default=0, metadata=ADDED_LATER)
    neighbours: bool = field(default=False, metadata=ADDED_LATER)
    norms_behind: bool = field(default=False, metadata=ADDED_LATER)
    cap: float = field(default=0.0, metadata=ADDED_LATER)
    norms_values: bool = field(default=False, metadata=ADDED_LATER)

    def state(self, shape: EngineShape) -> KVRows:
        rows = KVRows(self.index, *self.heads[1:], shape.kv_cache)
        if self.window is None:
            return rows
        return WindowRows(rows.index, rows.heads, rows.size, rows.dtype, self.window, shape.window_rows)

    called: ClassVar[str] = "the attention of layer {0.index}"

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.heads[0] * self.heads[2]), "compute")}


def stateful(steps: Iterable[Step]) -> tuple[Stateful, ...]:
    """Those of some steps that have a state, KV rows or another."""
    return tuple(step for step in steps if isinstance(step, Stateful))


@dataclass(frozen=True)
class Reshape(Step):
    """output = the elements of value in another `shape`: neighbouring rows side by side as one."""

    value: str = field(metadata=READS)
    shape: tuple[int, ...]

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (self.shape, kinds[self.value][1])}


@dataclass(frozen=True)
class SideBySide(Step):
    """output = the columns of several values, one behind the other."""

    values: tuple[str, ...] = field(metadata=READS)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        rows = [kinds[value][0] for value in self.values if value in kinds]
        return {self.output: ((*rows[0][:-1], sum(each[-1] for each in rows)), "compute")} if rows else {}
