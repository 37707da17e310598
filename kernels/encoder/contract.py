"""The contract of the kernels of encoders of images and speech: `NumpyEncoder` defines what they compute,
`CudaEncoder` computes it.

They are what stands between the linear layers of an encoder; decoders take layer norms and activations without a gate
from here, too. R rows come out, made of S or R rows of K columns; P are the columns of a result, at least K, with zeros
behind: linear layers take rows in eights, whatever a model's width is. Heads are G of D elements each. "mixed" is
float32 or the model's dtype.

**Elements.** The residual stream, and all that sums are taken of, is float32, as are the sums; what a linear layer or
attention multiplies is in the model's dtype, rounded once.

**Rows.** A row depends on its own inputs alone, and the order of its sums on its width alone: not on how many rows
there are, nor on the grid. Attention takes keys in tiles that begin at multiples of 64 rows of their window; a tile
without a visible key changes nothing. So an image has the same bits in an engine of more rows.

A call gives what enqueues it, so that an encoder's launches are prepared once.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited
from edgellm.kernels.numpy_launch import Enqueued

#: The largest head, and the widest rows of a norm: a block holds one of them.
MAX_HEAD_SIZE, MAX_NORM_WIDTH = 128, 12_000
#: The most rows that one sees in local attention: a lane has each.
MAX_PAST = 32
#: Linear layers take rows of a multiple of so many columns.
WIDTH_STEP = 8
#: The activations without a gate, and the numbers by which kernels know them; none has a number, too.
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu_squared": 4}
NO_ACTIVATION = 5
#: What plain_activations.cuh takes.
ACTIVATION_MACROS = (
    ("HOST_NO_ACTIVATION", NO_ACTIVATION),
    *((f"HOST_PLAIN_{name.upper()}", number) for name, number in ACTIVATIONS.items() if name != "silu"),
)

#: Rows as they come, in float32, with zeros behind, and those that others are made of; a number for each column, what
#: values are kept within, and query, key and value heads.
Rows: TypeAlias = Annotated[OwnArray, "RK mixed"]
FloatRows: TypeAlias = Annotated[OwnArray, "RK float32"]
PaddedRows: TypeAlias = Annotated[OwnArray, "RP mixed"]
GivenRows: TypeAlias = Annotated[OwnArray, "SK mixed"]
OfColumns: TypeAlias = Annotated[OwnArray, "K compute"]
Bounds: TypeAlias = Annotated[OwnArray, "B compute"]
Heads: TypeAlias = Annotated[OwnArray, "3GRD compute"]


def padded_width(columns: int) -> int:
    """Columns of rows that linear layers take, where a model has so many."""
    return -(-columns // WIDTH_STEP) * WIDTH_STEP


def heads_refusal(size: int) -> str | None:
    """Why attention does not take heads of so many elements, or None if it does."""
    if 0 < size <= MAX_HEAD_SIZE and size % 8 == 0:
        return None
    return f"encoder attention takes head sizes up to {MAX_HEAD_SIZE} (multiples of 8), not {size}"


def local_refusal(past: int, size: int) -> str | None:
    """Why local attention does not take heads of so many elements that see so many rows, or None if it does."""
    if 0 < past <= MAX_PAST and 0 < size <= MAX_HEAD_SIZE:
        return None
    return f"local attention takes up to {MAX_PAST} rows and heads of {MAX_HEAD_SIZE}, not {past} and {size}"


def _check_padded(sizes: dict[str, Any]) -> str | None:
    if sizes["P"] < sizes["K"]:
        return f"output has {sizes['P']} columns; expected at least {sizes['K']}"
    return None


def _check_norm(sizes: dict[str, Any]) -> str | None:
    if sizes["K"] > MAX_NORM_WIDTH:
        return f"rows of {sizes['K']} columns; expected up to {MAX_NORM_WIDTH}"
    return _check_padded({"P": sizes["K"], **sizes})


def _check_activation(sizes: dict[str, Any]) -> str | None:
    if not 0 <= sizes["activation"] < len(ACTIVATIONS):
        return f"activation is {sizes['activation']}; expected 0 to {len(ACTIVATIONS) - 1}"
    return _check_padded(sizes)


def _check_columns(sizes: dict[str, Any]) -> str | None:
    column, last = sizes["column"], sizes["column"] + sizes["K"]
    if column < 0 or last > sizes["P"]:
        return f"columns {column} to {last} of an output of {sizes['P']}"
    if "rows" not in sizes and sizes.get("S", sizes["R"]) < sizes["R"]:  # rows are copied as they come
        return f"{sizes['R']} rows of values of {sizes['S']}, without rows to choose"
    return None


def _check_squares(sizes: dict[str, Any]) -> str | None:
    side, size, rows = sizes["side"], sizes["size"], sizes["S"]
    if size < 1 or side < 1 or side % size or rows % (side * size) or sizes["M"] * size**2 != rows:
        return (
            f"means over squares of {size} x {size} of values of {rows}, {side} a line, output of {sizes['M']}; "
            "expected side, and how many lines there are, to be multiples of size, and a row a square"
        )
    return None


def _check_bounds(sizes: dict[str, Any]) -> str | None:
    if sizes["B"] != 2:
        return f"bounds of {sizes['B']} numbers; expected the least and the most"
    return _check_columns(sizes) if "column" in sizes else _check_activation(sizes | {"P": sizes["K"]})


def _check_normed_heads(sizes: dict[str, Any]) -> str | None:
    size, width = sizes["D"], sizes["W"]
    if size % 4 or width % (3 * max(1, size)):
        return f"qkv has {width} columns; expected those of 3 times as many heads of {size}, a multiple of 4"
    return heads_refusal(size)


class Convolution(NamedTuple):
    """What a convolution reads: of images of `height` by `width` rows in reading order, the first `channels` columns of
    the `down` by `across` rows at every `stride`th place, with `above` rows and `left` columns of zeros around."""

    channels: int
    height: int
    width: int
    down: int
    across: int
    stride: int
    above: int
    left: int


def places(size: int, kernel: int, stride: int, padding: int) -> int:
    """At how many places of a dimension of so many values a convolution's kernel stands, `padding` zeros at either
    end."""
    return (size + 2 * padding - kernel) // stride + 1


def _check_unfold(sizes: dict[str, Any]) -> str | None:
    own = Convolution(*(sizes[f"convolution.{name}"] for name in Convolution._fields))
    channels, height, width, down, across, stride, above, left = own
    if min(own[:6]) < 1 or min(above, left) < 0:
        return "sizes of images, kernels, strides and channels begin at 1, paddings at 0"
    found = places(height, down, stride, above) * places(width, across, stride, left)
    if sizes["S"] % (height * width) or sizes["S"] // (height * width) * found != sizes["R"]:
        return f"{sizes['S']} rows of images of {height} x {width} have {found} places each, not {sizes['R']} in all"
    if channels > sizes["K"] or channels * down * across > sizes["P"]:
        return f"{channels} channels of {sizes['K']} columns, by {down} x {across} places to {sizes['P']}"
    return None


def _check_heads(sizes: dict[str, Any]) -> str | None:
    heads, size = sizes["G"], sizes["D"]
    if sizes.get("W", 3 * heads * size) != 3 * heads * size:
        return f"qkv has {sizes['W']} columns; expected those of 3 x {heads} heads of {size}"
    return heads_refusal(size)


def _check_attention(sizes: dict[str, Any]) -> str | None:
    window, rows, width = sizes.get("window", sizes["R"]), sizes["R"], sizes["G"] * sizes["D"]
    past = sizes.get("past", 1)
    if past < 1 or sizes.get("C", rows) < rows + past - 1:
        return f"{rows} rows that see {past} rows, {sizes['C']} of which are kept; expected one at least, and room"
    if sizes["E"] != width:
        return f"context has {sizes['E']} columns; expected {width}"
    if window < 1 or rows % window or rows // window > MAXIMUM_ROWS:
        return f"{rows} rows in windows of {window}; expected up to {MAXIMUM_ROWS} whole ones"
    return _check_heads(sizes)


def _check_centered(sizes: dict[str, Any]) -> str | None:
    if not sizes["K"] <= min(sizes["S"], MAX_HEAD_SIZE):
        return f"a weight of {sizes['K']} for rows of {sizes['S']} columns; expected up to as many, and {MAX_HEAD_SIZE}"
    return None


def _check_convolution(sizes: dict[str, Any]) -> str | None:
    if sizes["S"] != 2 * sizes["K"]:
        return f"rows of {sizes['S']} columns; expected {sizes['K']}, and as many gates"
    return _check_norm(sizes)


def _check_local(sizes: dict[str, Any]) -> str | None:
    width, past, first = sizes["E"], sizes["past"], sizes["first"]
    if (refusal := local_refusal(past, sizes["D"])) is not None:
        return refusal
    if width % sizes["D"] or sizes["W"] != 3 * width or past > sizes["P"] or not 0 <= first <= sizes["S"] - width:
        return f"qkv of {sizes['W']}, context of {width}, relative rows of {sizes['S']} columns do not fit each other"
    return None


class EncoderKernels(Protocol):
    """One implementation of all."""

    @limited(_check_norm)
    def norm(
        self,
        values: Rows,
        weight: OfColumns,
        bias: OfColumns | None,
        epsilon: float,
        offset: float,
        output: PaddedRows,
        next_early: bool,
    ) -> Enqueued:
        """Each row normed: with a `bias` a layer norm (Ba et al. 2016), (x - mean) / sqrt(variance + epsilon) weight +
        bias; without, an RMS norm (Zhang and Sennrich 2019), x / sqrt(mean of squares + epsilon) (weight + offset).

        The output may be the values. `next_early` False: a kernel that overlaps this one starts only when the one
        before this one has finished."""

    @limited(_check_activation)
    def activate(self, values: FloatRows, activation: int, output: Annotated[OwnArray, "RP compute"]) -> Enqueued:
        """A function of each element, one of `ACTIVATIONS`: x sigmoid(x), x Phi(x), its approximation by tanh or that
        by x sigmoid(1.702 x) (Hendrycks and Gimpel 2016)."""

    @limited(_check_columns)
    def copy_rows(
        self, values: GivenRows, rows: Annotated[OwnArray, "R int32"] | None, output: PaddedRows, column: int
    ) -> Enqueued:
        """Columns from `column` on of row r of the output get row rows[r] of the values, clamped to 0..S-1 (None: row
        r, of R), all behind them zeros. Of parts side by side the first is launched first."""

    def add_rows(self, values: Rows, other: Rows, output: FloatRows) -> Enqueued:
        """The sum of two. The output may be the values."""

    def add_scaled_rows(self, values: FloatRows, other: FloatRows, scale: OfColumns, output: FloatRows) -> Enqueued:
        """values + other * scale, column by column, rounded once. The output may be the values."""

    @limited(_check_squares)
    def average_pool(
        self, values: GivenRows, side: int, size: int, output: Annotated[OwnArray, "MK float32"]
    ) -> Enqueued:
        """The means over squares of `size` by `size` of values that are a picture, `side` rows a line, both in reading
        order. The columns of a square are added up first, each from its uppermost row on, then the sums from the
        left."""

    @limited(_check_bounds)
    def clip_rows(self, values: Rows, bounds: Bounds, output: PaddedRows, column: int) -> Enqueued:
        """Columns from `column` on of the output get the values, no less than the first of the `bounds` and no more
        than the second, all behind them zeros. Of parts side by side the first is launched first."""

    @limited(_check_bounds)
    def clipped_gate(
        self,
        gate: FloatRows,
        values: FloatRows,
        gate_bounds: Bounds,
        bounds: Bounds,
        activation: int,
        output: Annotated[OwnArray, "RK compute"],
    ) -> Enqueued:
        """A function of each element of the gate, one of `ACTIVATIONS`, times the values, both within their bounds."""

    @limited(_check_normed_heads)
    def normed_heads(
        self,
        qkv: Annotated[OwnArray, "RW float32"],
        query_weight: Annotated[OwnArray, "D compute"],
        key_weight: Annotated[OwnArray, "D compute"],
        epsilon: float,
        output: Annotated[OwnArray, "RW float32"],
    ) -> Enqueued:
        """Each head by an RMS norm of its own, values without a weight; queries times sqrt(D). Of queries and keys the
        third quarter comes first, then the first, the fourth, the second."""

    @limited(_check_norm)
    def standard_norm(
        self,
        values: FloatRows,
        bias: OfColumns | None,
        scale: OfColumns | None,
        factor: float,
        epsilon: float,
        output: FloatRows,
    ) -> Enqueued:
        """An RMS norm without a weight of (factor * values - bias) * scale, or of factor * values."""

    @limited(_check_unfold)
    def unfold(self, values: GivenRows, convolution: Convolution, output: PaddedRows) -> Enqueued:
        """What each place of a convolution reads, side by side. The channel is the slowest of a result's columns, zeros
        stand behind."""

    @limited(_check_centered)
    def centered_norm(
        self,
        values: Annotated[OwnArray, "RS float32"],
        weight: OfColumns,
        mask: Annotated[OwnArray, "R1 float32"] | None,
        epsilon: float,
        output: Annotated[OwnArray, "RK compute"],
    ) -> Enqueued:
        """A layer norm without a bias of the first K columns of each row, times the mask; at least 0."""

    @limited(_check_norm)
    def add_normed(
        self, values: FloatRows, weight: OfColumns, epsilon: float, residual: FloatRows, share: float, output: FloatRows
    ) -> Enqueued:
        """residual + share * an RMS norm of the values. The output may be the residual."""

    @limited(_check_convolution)
    def gated_convolution(
        self,
        values: Annotated[OwnArray, "RS float32"],
        weight: Annotated[OwnArray, "KW compute"],
        norm: OfColumns,
        epsilon: float,
        output: Annotated[OwnArray, "RK compute"],
    ) -> Enqueued:
        """See `GatedConvolution` of the engines: x sigmoid(x) of an RMS norm of each column's causal convolution."""

    @limited(_check_local)
    def local_attention(
        self,
        qkv: Annotated[OwnArray, "RW float32"],
        relative: Annotated[OwnArray, "PS float32"],
        first: int,
        past: int,
        cap: float,
        scale: Annotated[OwnArray, "D compute"],
        context: Annotated[OwnArray, "RE compute"],
    ) -> Enqueued:
        """See `LocalAttention` of the engines, of up to `MAX_PAST` rows."""

    def product(
        self,
        values: Rows,
        weight: Annotated[OwnArray, "KC compute"],
        scale: float,
        output: Annotated[OwnArray, "RC mixed"],
    ) -> Enqueued:
        """scale * values times a weight that is published so, summed in float32 from column 0 on, rounded once."""

    @limited(_check_heads)
    def prepare_heads(
        self, qkv: Annotated[OwnArray, "RW mixed"], rotary: Annotated[OwnArray, "RD float32"] | None, heads: Heads
    ) -> Enqueued:
        """Query, key and value heads, each by itself; queries and keys are turned by the `rotary` rows, cosine half
        then sine half: element j is paired with element j + D/2."""

    @limited(_check_attention)
    def past_attention(
        self,
        heads: Heads,
        kept: Annotated[OwnArray, "2GCD compute"],
        first: Annotated[OwnArray, "1 int32"],
        past: int,
        scale: float,
        context: Annotated[OwnArray, "RE compute"],
    ) -> Enqueued:
        """Each query's softmax of scale * scores over its own row and the `past` - 1 rows before it, times values.

        Row 0 is a sound's row `first`. Keys and values of the sound's row p are `kept` at p % C: those of rows before
        these are read there, and these rows' written, over no row that one of them sees.
        """

    @limited(_check_attention)
    def attention(
        self,
        heads: Heads,
        window: int,
        visible: Annotated[OwnArray, "R bool"] | None,
        scale: float,
        context: Annotated[OwnArray, "RE compute"],
    ) -> Enqueued:
        """Each query's softmax of scale * scores over the `visible` rows (None: all) of its window, times values.

        Windows are `window` neighbouring rows each; one of no visible row gets zeros.
        """
