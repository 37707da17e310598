"""The steps of layers with a state of their own: short convolutions, gated delta rules, the selective scans of Mamba-2,
and the norms behind these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from edgellm.engines.formats.strict_formats import ADDED_LATER
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.states import ConvColumns, DeltaMatrix, Edge, SpaceMatrix
from edgellm.engines.model.steps import READS, Norm, Stateful, Step, rows_like


@dataclass(frozen=True)
class ShortConvolution(Stateful):
    """A causal convolution of each channel by itself over the last `width` tokens, in float32.

    y_t = sum over j < width of weight[:, width - 1 - j] u_{t-j}, plus the bias, through `activation` ("silu" or none);
    t - j counts along a node's path where tokens are a tree. u is `channels` columns of `value` from `first` on, and y
    the output, in float32. `gated` (LFM2's): `value` [.., 3 C] holds B, C and x side by side, u = B x, output = C y.
    """

    value: str = field(metadata=READS)
    index: int
    channels: int
    width: int
    weight: WeightSpec
    bias: WeightSpec | None = None
    activation: str | None = None
    gated: bool = False
    first: int = 0

    def state(self, shape: EngineShape) -> ConvColumns:
        return ConvColumns(self.index, self.channels, self.width)

    called: ClassVar[str] = "the short convolution of layer {0.index}"

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.channels), "compute" if self.gated else "float32")}


@dataclass(frozen=True)
class GatedDelta(Stateful):
    """The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), in float32, token by token.

    `value` [.., 2 Hk Dk + Hv Dv] holds queries, keys and values behind their convolution; `heads` are Hk and Hv,
    `sizes` Dk and Dv, and value head h has the query and key of head h // (Hv / Hk). In `gates` stand b and a, [Hv]
    each, from column `first` on. Queries and keys are divided by sqrt(sum of squares + 1e-6), queries by sqrt(Dk), too.
    A head's matrix S [Dk, Dv] becomes exp(g) S + k (beta (v - exp(g) S^T k))^T with g = -exp(a_log) softplus(a +
    dt_bias) and beta = sigmoid(b); its output [Dv] is then S^T q, in float32.
    """

    value: str = field(metadata=READS)
    gates: str = field(metadata=READS)
    index: int
    heads: tuple[int, int]
    sizes: tuple[int, int]
    first: int
    a_log: WeightSpec
    dt_bias: WeightSpec
    #: The fields that have a number for each value head, and the parts of so many columns that `gates` has of these.
    numbers: ClassVar[tuple[str, ...]] = ("a_log", "dt_bias")
    gate_parts: ClassVar[int] = 2
    #: Whether in `value` what heads store stands before, not behind, the keys and queries.
    stores_first: ClassVar[bool] = False

    def state(self, shape: EngineShape) -> DeltaMatrix:
        return DeltaMatrix(self.index, self.heads, self.sizes)

    called: ClassVar[str] = "the gated delta rule of layer {0.index}"

    def results(self, kinds: Edge, shape: EngineShape, residual: str) -> Edge:
        return {self.output: (rows_like(kinds, self.value, self.heads[1] * self.sizes[1]), "float32")}


@dataclass(frozen=True)
class SelectiveScan(GatedDelta):
    """The state space of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), in float32, token by token.

    `value` [.., H P + 2 G N] holds x, B and C behind their convolution; `heads` are G and H, `sizes` N and P, and head
    h has B and C of group h // (H / G). In `gates` stands dt [H] from column `first` on. With d = softplus(dt +
    dt_bias) a head's matrix S [N, P] becomes exp(-exp(a_log) d) S + B (d x)^T; its output [P] is then S^T C + skip x.
    """

    skip: WeightSpec
    numbers: ClassVar[tuple[str, ...]] = ("a_log", "dt_bias", "skip")
    gate_parts: ClassVar[int] = 1
    stores_first: ClassVar[bool] = True

    def state(self, shape: EngineShape) -> SpaceMatrix:
        return SpaceMatrix(self.index, self.heads, self.sizes)

    called: ClassVar[str] = "the selective scan of layer {0.index}"


@dataclass(frozen=True)
class GatedNorm(Step):
    """output = norm of each of the `heads` parts of value, times silu(the columns of `gate` from `first` on).

    With `gates_first` the norm is that of each part of value times silu(gate), and has a weight for each column of all.
    Where ranks share a part, `squares` are sums of all of it (see `SquareSums`), and `shared` says which of them is its
    own, and how wide the part is of all ranks together.
    """

    value: str = field(metadata=READS)
    gate: str = field(metadata=READS)
    first: int
    heads: int
    norm: Norm
    gates_first: bool = False
    squares: str | None = field(default=None, metadata=READS | ADDED_LATER)
    shared: tuple[int, int] = field(default=(0, 0), metadata=ADDED_LATER)
    gives: ClassVar[str] = "compute"
    cuts: ClassVar[bool] = True
