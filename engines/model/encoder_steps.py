"""The steps of encoders of images and speech alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from edgellm.engines.formats.strict_formats import ADDED_LATER
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import Edge
from edgellm.engines.model.steps import READS, Norm, Step, rows_like
from edgellm.kernels.encoder.contract import places

#: Inputs of an encoder that goes on where its last run ended: keys and values of all layers [1, layers, 2, n, C, D]
#: compute, those of a sound's row p at p % C, which a run changes where they are; and the number of its first row [1].
KEPT_ROWS, FIRST_ROW = "kept_rows", "first_row"


@dataclass(frozen=True)
class EncoderAttention(Step):
    """Attention of all rows of a window to each other; `windows` are how many, and of how many rows each.

    `value` [.., 3 n D] holds query, key and value heads. `mask` and `rotary` name inputs of the engine, where it has
    them; `qk_norms` are those of all queries and of all keys together, if they are normed. With a `past` each row of
    the one window sees itself and the `past` - 1 rows before it alone, of which those before the window are known by
    the keys and values of this `layer` among the engine's inputs (`KEPT_ROWS`, `FIRST_ROW`).
    """

    value: str = field(metadata=READS)
    heads: int
    head_size: int
    windows: tuple[int, int]
    mask: str | None = field(default=None, metadata=READS)
    rotary: str | None = field(default=None, metadata=READS)
    qk_norms: tuple[Norm, Norm] | None = field(default=None, metadata=ADDED_LATER)
    past: int = field(default=0, metadata=ADDED_LATER, repr=False)
    layer: int = field(default=0, metadata=ADDED_LATER, repr=False)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.heads * self.head_size), "compute")}


@dataclass(frozen=True)
class Gather(Step):
    """output = the rows of value that the engine's input `rows` [B, M] names."""

    value: str = field(metadata=READS)
    rows: str = field(metadata=READS)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: ((*kinds[self.rows][0], kinds[self.value][0][-1]), kinds[self.value][1])}


@dataclass(frozen=True)
class Prepend(Step):
    """output = a row that is a weight, then those of value."""

    value: str = field(metadata=READS)
    row: WeightSpec

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        batch, rows, width = kinds[self.value][0]
        return {self.output: ((batch, rows + 1, width), residual)}


@dataclass(frozen=True)
class DropFirst(Step):
    """output = the `rows` rows of value behind its first."""

    value: str = field(metadata=READS)
    rows: int

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: ((1, self.rows, kinds[self.value][0][-1]), kinds[self.value][1])}


@dataclass(frozen=True)
class ScaledResidual(Step):
    """output = residual + weight [K] times value, column by column (Touvron et al. 2021)."""

    value: str = field(metadata=READS)
    weight: WeightSpec
    residual: str = field(metadata=READS)
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True, repr=False)
class AveragePool(Step):
    """output = the means of value's rows [1, height * side, width], a picture in reading order, over squares of `size`
    by `size` of them, in reading order; summed in float32. The `height` is that of a square where it is 0.

    Rows in blocks of a token are the picture that is one block wide."""

    value: str = field(metadata=READS)
    width: int
    side: int
    size: int
    height: int = field(default=0, metadata=ADDED_LATER)

    @property
    def means(self) -> int:
        """How many rows come out."""
        return (self.height or self.side) * self.side // self.size**2

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: ((1, self.means, self.width), residual)}


@dataclass(frozen=True)
class Unfold(Step):
    """output = what each place of a convolution reads, side by side: its linear layer then makes the convolution.

    value [1, images * height * width, C] has the rows of each image of the `grid` (images, height, width), C its
    `channels`. A `kernel` (height, width) stands at every `stride`th place, with `padding` zeros above and left of the
    first row and column, and behind the last: output [1, its places, C * kernel], the channel the slowest, as weights
    are published.
    """

    value: str = field(metadata=READS)
    grid: tuple[int, int, int]
    channels: int
    kernel: tuple[int, int]
    stride: int = 1
    padding: tuple[int, int] = (0, 0)

    @property
    def places(self) -> int:
        """Rows of the output."""
        images, *sizes = self.grid
        given = zip(sizes, self.kernel, self.padding, strict=True)
        return images * math.prod(places(size, kernel, self.stride, zeros) for size, kernel, zeros in given)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: ((1, self.places, self.channels * math.prod(self.kernel)), "compute")}


@dataclass(frozen=True)
class Product(Step):
    """output = scale * value times a weight [K, N], rounded once."""

    value: str = field(metadata=READS)
    weight: WeightSpec
    scale: float

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.weight.shape[1]), "compute")}


@dataclass(frozen=True)
class Clip(Step):
    """output = several values side by side, the elements of each within its bounds: a weight of two, the least and the
    most (Gemma 4)."""

    parts: tuple[tuple[str, WeightSpec], ...] = field(metadata=READS)

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {
            self.output: (rows_like(kinds, self.reads[0], sum(kinds[value][0][-1] for value in self.reads)), residual)
        }


@dataclass(frozen=True)
class ClippedGate(Step):
    """output = activation(gate) times value, both of which are clipped before: `bounds` are those of the two."""

    gate: str = field(metadata=READS)
    value: str = field(metadata=READS)
    bounds: tuple[WeightSpec, WeightSpec]
    activation: str
    gives: ClassVar[str] = "compute"


@dataclass(frozen=True)
class NormedHeads(Step):
    """output = value [.., 3 n D] whose heads are normed each by itself: queries and keys by `norms`, values by none.

    Rows are to turn the second half of each query and key, columns the first (Gemma 4). The quarters of both stand as
    `EncoderAttention` turns them, which pairs the halves: the third, the first, the fourth, the second. Queries are
    multiplied by sqrt(D), which its scores are divided by.
    """

    value: str = field(metadata=READS)
    heads: int
    norms: tuple[Norm, Norm]
    gives: ClassVar[str] = "residual"

    @property
    def head_size(self) -> int:
        return self.norms[0].weight.shape[0]


@dataclass(frozen=True)
class StandardNorm(Step):
    """output = y / sqrt(mean of squares of y + epsilon), where y = (factor * value - bias) * scale by two weights [K],
    or factor * value without."""

    value: str = field(metadata=READS)
    factor: float
    epsilon: float
    standard: tuple[WeightSpec, WeightSpec] | None = None
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True)
class Activate(Step):
    """output = activation(value) of each element."""

    value: str = field(metadata=READS)
    activation: str
    gives: ClassVar[str] = "compute"


@dataclass(frozen=True)
class CenteredNorm(Step):
    """output = max(0, a layer norm of value without a bias); rows are multiplied by the input `mask` [1, rows, 1] where
    there is one: 0 behind a sound's end."""

    value: str = field(metadata=READS)
    weight: WeightSpec
    epsilon: float
    mask: str | None = field(default=None, metadata=READS)
    gives: ClassVar[str] = "compute"


@dataclass(frozen=True)
class NormedResidual(Step):
    """output = residual + share * norm(value)."""

    value: str = field(metadata=READS)
    norm: Norm
    residual: str = field(metadata=READS)
    share: float
    gives: ClassVar[str] = "residual"


@dataclass(frozen=True)
class GatedConvolution(Step):
    """output = silu(norm(c)), c[t] = sum of weight[:, k] x[t - W + 1 + k], column by column, zeros before the first
    row; x is the first half of value times the sigmoid of its second, the weight [C, W]. The middle of a conformer's
    convolutional part, which is causal here (Gulati et al. 2020)."""

    value: str = field(metadata=READS)
    weight: WeightSpec
    norm: Norm

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.weight.shape[0]), "compute")}


@dataclass(frozen=True)
class LocalAttention(Step):
    """Attention of each row to itself and the `past` - 1 rows before it, of which a row at distance d has the score
    cap tanh((q k + q r[d]) / cap), r being n D columns from `first` on of rows [1, >= past, ..] of the value
    `relative`.

    `value` [1, rows, 3 n D] holds query, key and value heads. Queries are multiplied by softplus of the weight `scale`
    [D] and by 1 / (sqrt(D) ln 2), keys by ln(1 + e) / ln 2 (Gemma 4).
    """

    value: str = field(metadata=READS)
    relative: str = field(metadata=READS)
    first: int
    heads: int
    past: int
    cap: float
    scale: WeightSpec

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.heads * self.scale.shape[0]), "compute")}
