"""The contract of the recurrent kernels: `NumpyRecurrent` defines what they compute, `CudaRecurrent` computes it.

B sequences (slots), T tokens of a step. A short convolution has C channels and a width of W tokens, of which a state
keeps K = W - 1. The gated delta rule has G value heads, whose keys have D and whose values E elements, R = 2 (key
heads) D + G E columns of queries, keys and values, J = 2 G gates and O = G E outputs. The selective scan of Mamba-2 has
the same sizes: its keys are B, its queries C, its key heads the groups of both, its values x. V are the columns of a
value that a linear layer put out, which holds more than one kernel reads; N accepted tokens at most.

**Three kinds of step.** A step that keeps (`kept` is given) reads the state and changes nothing: its tokens are a
chain, or the nodes of a tree (`parents`), each of which sees the state as its ancestors' tokens leave it. A commit
takes the accepted ones of what was kept into the state. A chunk of a prompt (`state_tokens` [B] is given) commits
itself: of its T tokens the first state_tokens[b] count, the rest is padding.

**Parents**: node t's parent is an earlier one, -1 of the root and of padding, as in
`edgellm.kernels.tree.contract.TreeNodes`; what is no earlier node counts as -1. The root sees the state alone. So a
token's row has the bits that it has where its path is decoded token by token, in every batch and tree.

**Bits.** All is float32, each operation rounded by itself, exponentials and logarithms those of
`edgellm.kernels.portable_math`, sums in the order of `edgellm.kernels.recurrent.twin.ordered_sum`: the twin's bits are
the device's, but in `gated_delta` and `selective_scan`, where the device rounds a product and its sum at once. There,
too, a step, a chunk of any length and a commit give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.contracts import MAXIMUM_ROWS, limited
from edgellm.kernels.numpy_launch import Enqueued

#: The widest and the narrowest short convolution.
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8
#: The most nodes of a tree, elements of a key or a value, and elements that are normed together behind their gates.
MAX_NODES, MAX_DELTA_SIZE, MAX_GROUP_SIZE = 64, 256, 8192
#: Added to the squares of a query or key under the root of its norm.
NORM_EPSILON = 1e-6


class Convolution(NamedTuple):
    """A causal convolution of each channel by itself: weights, the latest token's last, and what is done around it.

    `gated` (LFM2): the value's columns are B, C and x, C columns each; B x is convolved and C times the result put out.
    Else its C columns from `first` on are convolved, and `silu`: SiLU is applied to the result.
    """

    weight: Annotated[OwnArray, "CW float32"]
    silu: bool
    gated: bool
    first: int = 0


class DeltaGates(NamedTuple):
    """Where a layer's gates stand in what was projected, b then a, [G] each from column `first` on; what makes them.

    The logarithm of the decay is -exp(a_log) softplus(a + dt_bias), the weight of the new value sigmoid(b).
    """

    a_log: Annotated[OwnArray, "G float32"]
    dt_bias: Annotated[OwnArray, "G float32"]
    first: int


class ScanGates(NamedTuple):
    """Where the step sizes of a selective scan stand in what was projected, [G] from column `first` on; what makes
    them, and by what the values that are put out beside are multiplied.

    A step size is softplus(dt + dt_bias), the logarithm of the decay -exp(a_log) times that.
    """

    a_log: Annotated[OwnArray, "G float32"]
    dt_bias: Annotated[OwnArray, "G float32"]
    skip: Annotated[OwnArray, "G float32"]
    first: int


class GroupNorm(NamedTuple):
    """An RMS norm of each of `groups` parts of a row, behind SiLU of the gates from column `first` on."""

    weight: Annotated[OwnArray, "O compute"]
    epsilon: float
    first: int
    groups: int


class PartNorm(NamedTuple):
    """An RMS norm of a rank's columns of a part that has `whole` columns on all ranks together."""

    weight: Annotated[OwnArray, "O compute"]
    epsilon: float
    whole: int


class GatedHeadNorm(NamedTuple):
    """An RMS norm of each head [E], then times SiLU of the gates from column `first` on."""

    weight: Annotated[OwnArray, "E compute"]
    epsilon: float
    first: int


class GatedHeads(NamedTuple):
    """Query heads with a gate behind each, then key heads, then value heads: [q_0 | g_0 | q_1 | g_1 | .. | k | v]."""

    heads: int
    kv_heads: int
    size: int


class AcceptedPath(NamedTuple):
    """The path of each slot, counts[b] of its nodes, the root first; a count of 0 is an idle slot, which stays."""

    indices: Annotated[OwnArray, "BN int32"]
    counts: Annotated[OwnArray, "B int32"]


class LayerColumns(NamedTuple):
    """The state of a layer's convolution, the latest input last, and the inputs that a step kept."""

    columns: Annotated[OwnArray, "BCK float32"]
    inputs: Annotated[OwnArray, "BTC float32"]


class LayerMatrices(NamedTuple):
    """The state of a layer's delta rule or scan, S turned, and what a step read of its rows and kept of its gates."""

    matrix: Annotated[OwnArray, "BGED float32"]
    rows: Annotated[OwnArray, "BTR float32"]
    gates: Annotated[OwnArray, "BTJ float32"]


def convolution_refusal(width: int) -> str | None:
    """Why no kernel convolves so many tokens, or None if one does."""
    if MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
        return None
    return f"short convolutions are {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH} tokens wide, not {width}"


def delta_refusal(heads: tuple[int, int], sizes: tuple[int, int], nodes: int = 1) -> str | None:
    """Why the GPU's kernels do not take key and value heads of such sizes, or trees of so many nodes; None: they do.

    The twin takes all.
    """
    if nodes > MAX_NODES:
        return f"recurrent matrices take trees of up to {MAX_NODES} nodes, not {nodes}"
    fits = all(0 < size <= MAX_DELTA_SIZE and size % 8 == 0 for size in sizes)
    if fits and heads[0] > 0 and heads[1] % heads[0] == 0:
        return None
    return (
        f"recurrent matrices take keys and values of up to {MAX_DELTA_SIZE} elements (multiples of 8) and value "
        f"heads that are a multiple of the key heads, not {heads[0]} key heads of {sizes[0]} and {heads[1]} value "
        f"heads of {sizes[1]}"
    )


def norm_refusal(size: int) -> str | None:
    """Why the GPU's kernels do not norm heads of a size with a gate; None if they do."""
    if 0 < size <= MAX_DELTA_SIZE and size % 8 == 0:
        return None
    return f"gated norms are of heads of up to {MAX_DELTA_SIZE} elements (multiples of 8), not of {size}"


def group_refusal(size: int) -> str | None:
    """Why the GPU's kernels do not norm so many elements behind their gates; None if they do."""
    if 0 < size <= MAX_GROUP_SIZE and size % 4 == 0:
        return None
    return f"norms behind gates are of up to {MAX_GROUP_SIZE} elements (multiples of 4), not of {size}"


def key_heads(sizes: dict[str, Any]) -> int:
    """How many key heads the rows of a delta rule have."""
    return (sizes["R"] - sizes["G"] * sizes["E"]) // (2 * sizes["D"])


def _check_step(sizes: dict[str, Any]) -> str | None:
    """A step either keeps its inputs or commits itself, and only one that keeps is a tree."""
    if ("kept" in sizes) == ("state_tokens" in sizes):
        return "a step either keeps its inputs (`kept`) or commits its tokens (`state_tokens`)"
    if "parents" in sizes and "kept" not in sizes:
        return "the nodes of a tree (`parents`) are not committed by the step: give `kept`"
    return None


def _check_convolution(sizes: dict[str, Any]) -> str | None:
    width, channels = sizes["W"], sizes["C"]
    if (refusal := convolution_refusal(width)) is not None:
        return refusal
    if sizes["K"] != width - 1:
        return f"columns keeps {sizes['K']} tokens; expected {width - 1} of a convolution that is {width} wide"
    gated = sizes["convolution.gated"]
    if gated and sizes["convolution.silu"]:
        return "a gated convolution has no activation"
    first = sizes["convolution.first"]
    if gated and first:
        return f"the first column is {first}; expected 0 of a gated convolution"
    needed = first + channels * (3 if gated else 1)
    if first < 0 or sizes["V"] < needed:
        return f"value has {sizes['V']} columns; expected at least {needed} of {channels} channels"
    return _check_step(sizes) or _check_rows(sizes)


def _check_rows(sizes: dict[str, Any]) -> str | None:
    if sizes["B"] > MAXIMUM_ROWS or sizes["T"] > MAXIMUM_ROWS:
        return f"{sizes['B']} sequences of {sizes['T']} tokens; expected at most {MAXIMUM_ROWS} of either"
    return None


def _check_delta_rows(sizes: dict[str, Any]) -> str | None:
    heads, (keys, values) = sizes["G"], (sizes["D"], sizes["E"])
    of_keys = sizes["R"] - heads * values
    if of_keys <= 0 or of_keys % (2 * keys) or heads % key_heads(sizes):
        return (
            f"rows of {sizes['R']} columns; expected queries and keys of {keys} for a divisor of {heads} heads, and "
            f"{heads * values} of values"
        )
    if sizes.get("J", 2 * heads) != 2 * heads:
        return f"gates of {sizes['J']} columns; expected {2 * heads}, two for each value head"
    if heads > MAXIMUM_ROWS:
        return f"{heads} value heads; expected at most {MAXIMUM_ROWS}"
    return _check_rows(sizes)


def _check_delta(sizes: dict[str, Any], gates: int = 2) -> str | None:
    heads, first = sizes["G"], sizes["gates.first"]
    if not 0 <= first <= sizes["V"] - gates * heads:
        return f"gates of {heads} heads from column {first} on of {sizes['V']}"
    if sizes["O"] != heads * sizes["E"]:
        return f"output has {sizes['O']} columns; expected {heads * sizes['E']}"
    return _check_step(sizes) or _check_delta_rows(sizes)


def _check_group_norm(sizes: dict[str, Any]) -> str | None:
    columns, groups = sizes["O"], sizes["norm.groups"]
    if groups < 1 or columns % groups:
        return f"value has {columns} columns; expected a multiple of {groups} groups"
    return _check_gates(sizes, sizes["norm.first"])


def _check_gates(sizes: dict[str, Any], first: int) -> str | None:
    if not 0 <= first <= sizes["V"] - sizes["O"]:
        return f"gates of {sizes['O']} columns from {first} on of {sizes['V']}"
    return _check_rows(sizes)


def _check_gated_part(sizes: dict[str, Any]) -> str | None:
    columns, place, whole = sizes["O"], sizes["place"], sizes.get("norm.whole")
    if not 0 <= place < sizes["S"]:
        return f"a sum of squares at {place} of {sizes['S']}"
    if ("output" in sizes) != (whole is not None) or (whole or columns) < columns:
        return f"a norm of {whole} columns; expected at least the {columns} of the value, and an output"
    return _check_gates(sizes, sizes["first"])


def _check_gated_norm(sizes: dict[str, Any]) -> str | None:
    if sizes["O"] % sizes["E"]:
        return f"value has {sizes['O']} columns; expected those of heads of {sizes['E']}"
    return _check_gates(sizes, sizes["norm.first"])


def _check_heads(sizes: dict[str, Any]) -> str | None:
    heads, kv_heads, size = (sizes[f"heads.{name}"] for name in ("heads", "kv_heads", "size"))
    if min(heads, kv_heads, size) < 1 or sizes["V"] != (2 * heads + 2 * kv_heads) * size:
        return f"value has {sizes['V']} columns; expected {heads} query heads, gates, and {kv_heads} of {size} twice"
    if sizes.get("Q", sizes["V"] - heads * size) != sizes["V"] - heads * size:
        return f"qkv has {sizes['Q']} columns; expected {sizes['V'] - heads * size}"
    if sizes.get("O", heads * size) != heads * size:
        return f"context has {sizes['O']} columns; expected {heads * size}"
    if sizes.get("qkv", sizes["value"]) != sizes["value"]:
        return f"qkv is {sizes['qkv']}; expected {sizes['value']}, the dtype of value"
    return _check_rows(sizes)


class RecurrentArrays(Protocol):
    """What each kernel takes; of a commit, what it takes of each layer."""

    @limited(_check_convolution)
    def short_convolution(
        self,
        value: Annotated[OwnArray, "BTV mixed"],
        convolution: Convolution,
        bias: Annotated[OwnArray, "C float32"] | None,
        columns: Annotated[OwnArray, "BCK float32"],
        output: Annotated[OwnArray, "BTC mixed"],
        parents: Annotated[OwnArray, "BT int32"] | None,
        kept: Annotated[OwnArray, "BTC float32"] | None,
        state_tokens: Annotated[OwnArray, "B int32"] | None,
    ) -> Enqueued:
        """`output`: for each token, the sum over its last W tokens, the earliest first, of weight times input, plus
        `bias`.

        `columns` holds the inputs before the step's first token. `kept` gets what is convolved; a chunk leaves
        `columns` as they are behind its tokens that count.
        """

    @limited(_check_delta)
    def gated_delta(
        self,
        rows: Annotated[OwnArray, "BTR float32"],
        projected: Annotated[OwnArray, "BTV mixed"],
        gates: DeltaGates,
        matrix: Annotated[OwnArray, "BGED float32"],
        output: Annotated[OwnArray, "BTO float32"],
        parents: Annotated[OwnArray, "BT int32"] | None,
        kept: Annotated[OwnArray, "BTJ float32"] | None,
        state_tokens: Annotated[OwnArray, "B int32"] | None,
    ) -> Enqueued:
        """The gated delta rule (Yang et al. 2024) of each value head, token by token.

        `rows` are queries and keys of all key heads, then values; value head h has key head h // (G / key heads).
        Queries and keys are divided by the root of the sum of their squares + `NORM_EPSILON`, queries by that of D.
        With a head's decay exp(g) and weight beta, a token's delta is beta (v - exp(g) S k), its output exp(g) S q + (k
        q) delta, and the next S is exp(g) S + delta k^T, S [E, D] as `matrix` holds it. `kept` gets g, then beta, of
        all heads; `rows` are kept by who wrote them. Rows of `output` are zeros of padding: nodes that are
        not below the first, tokens of a chunk that do not count.
        """

    @limited(lambda sizes: _check_delta(sizes, 1))
    def selective_scan(
        self,
        rows: Annotated[OwnArray, "BTR float32"],
        projected: Annotated[OwnArray, "BTV mixed"],
        gates: ScanGates,
        matrix: Annotated[OwnArray, "BGED float32"],
        output: Annotated[OwnArray, "BTO float32"],
        parents: Annotated[OwnArray, "BT int32"] | None,
        kept: Annotated[OwnArray, "BTJ float32"] | None,
        state_tokens: Annotated[OwnArray, "B int32"] | None,
    ) -> Enqueued:
        """The state space of Mamba-2 (Dao and Gu 2024) of each head, token by token.

        `rows` are the values x of all heads, then keys B, then queries C of all groups; head h has those of group h //
        (G / groups). With a head's decay exp(g) and step size, a token's delta is x times the step size, its output
        exp(g) S C + (B C) delta + skip x, and the next S exp(g) S + delta B^T. `kept` gets g, then step sizes, of all
        heads; all else is as in `gated_delta`.
        """

    @limited(_check_group_norm)
    def gated_group_norm(
        self,
        value: Annotated[OwnArray, "BTO float32"],
        gate: Annotated[OwnArray, "BTV mixed"],
        norm: GroupNorm,
        output: Annotated[OwnArray, "BTO compute"],
    ) -> Enqueued:
        """`output`: `value` times SiLU of its gate, each group divided by the root of the mean of its squares +
        epsilon, times weight."""

    @limited(_check_gated_part)
    def gated_part(
        self,
        value: Annotated[OwnArray, "BTO float32"],
        gate: Annotated[OwnArray, "BTV mixed"],
        first: int,
        place: int,
        norm: PartNorm | None,
        squares: Annotated[OwnArray, "BTS float32"],
        output: Annotated[OwnArray, "BTO compute"] | None,
    ) -> Enqueued:
        """Without a norm, `squares`: at a `place` the sum of the squares of `value` times SiLU of its gate (from column
        `first` on), 0 at others. With one, `output`: `value` times SiLU of its gate, divided by the root of the mean of
        the squares of a whole part, whose sum `squares` have at the place, + epsilon, times weight."""

    @limited(_check_gated_norm)
    def gated_norm(
        self,
        value: Annotated[OwnArray, "BTO float32"],
        gate: Annotated[OwnArray, "BTV mixed"],
        norm: GatedHeadNorm,
        output: Annotated[OwnArray, "BTO compute"],
    ) -> Enqueued:
        """`output`: each head of `value` divided by the root of the mean of its squares + epsilon, times weight, times
        SiLU of its gate."""

    @limited(_check_heads)
    def separate_gates(
        self, value: Annotated[OwnArray, "BTV mixed"], heads: GatedHeads, qkv: Annotated[OwnArray, "BTQ mixed"]
    ) -> Enqueued:
        """`qkv`, of the dtype of `value`: its query, key and value heads without the gates."""

    @limited(_check_heads)
    def sigmoid_gate(
        self, value: Annotated[OwnArray, "BTV mixed"], heads: GatedHeads, context: Annotated[OwnArray, "BTO compute"]
    ) -> Enqueued:
        """Multiply `context`, where it is, by the sigmoid of the gates in `value`."""

    @limited(_check_rows)
    def commit_columns(self, layer: LayerColumns, accepted: AcceptedPath) -> Enqueued:
        """The last K inputs of those before and the accepted ones become the columns."""

    @limited(_check_delta_rows)
    def commit_matrices(self, layer: LayerMatrices, accepted: AcceptedPath) -> Enqueued:
        """The matrix behind the accepted tokens: the bits that a chunk of these tokens leaves."""

    @limited(_check_delta_rows)
    def commit_scans(self, layer: LayerMatrices, accepted: AcceptedPath) -> Enqueued:
        """The same of selective scans."""


class RecurrentKernels(RecurrentArrays, Protocol):
    """One implementation of all. A call gives what enqueues it, so that a step is prepared once. Commits are as
    `RecurrentArrays` says, of all layers at once."""

    def commit_columns(self, layers: Sequence[LayerColumns], accepted: AcceptedPath) -> Enqueued: ...  # type: ignore[override]
    def commit_matrices(self, layers: Sequence[LayerMatrices], accepted: AcceptedPath) -> Enqueued: ...  # type: ignore[override]
    def commit_scans(self, layers: Sequence[LayerMatrices], accepted: AcceptedPath) -> Enqueued: ...  # type: ignore[override]
