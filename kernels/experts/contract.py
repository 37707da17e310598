"""What the kernels of mixtures of experts take, and which mixtures they refuse.

`Array` is a NumPy array (float32 where the device has the compute dtype) for the twins, which define what is computed,
and a `DeviceArray` for the launchers. R rows stand for the tokens of a step or of a prompt, E for the experts of a
layer, k for how many of them a row goes through. "compute" is float16 or bfloat16.

Of many rows the pairs of rows and experts, row r's at r k and behind, are sorted by expert, in tiles that hold pairs of
one expert alone, for the kernels that multiply those of an expert together.

All that a row gives follows from the row alone: products have the sums of dense layers, and experts are added in
float32 in the order of their ids, whichever kernel multiplies and whatever rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.decode.contract import LinearWeights, activation_number
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.code_words import BLOCK_ROWS
from edgellm.kernels.quantization.device_layout import DeviceLayout, PackedMatrix

#: The most experts of a layer, each lane of a warp has so many 32nds of them, and the most that a row goes through.
MAX_EXPERTS, MAX_CHOSEN = 512, 32
#: The most pairs of a row and an expert of one launch: the second axis of its grid.
MAX_PAIRS = 65_535
#: The rows that tiles may have, and how many pairs an expert has at most, on average, for the first ones to be faster
#: than the next.
TILES, _PAIRS = (16, 32, 64), (12, 48)
#: The most rows of all tiles.
MAX_SORTED_ROWS = 1 << 24


@dataclass(frozen=True)
class Routing:
    """How a row's experts are chosen of `experts`, and what their shares are.

    Scores are the softmax over all that the router gives or, where `sigmoid`, the sigmoid of each. The `chosen` are
    those of the largest scores, of equal ones those of the lower ids; a correction is added for the choice alone.
    Shares are the scores, `normalized`: divided by their sum + `epsilon`; times `scale`.
    """

    experts: int
    chosen: int
    sigmoid: bool = False
    normalized: bool = True
    epsilon: float = 0.0
    scale: float = 1.0


class Activation(NamedTuple):
    """What experts make of the sums of their first layer: "gated" activation(gate) up of gates, then ups, where `gate`
    is one of the gated activations of decode/contract.py; "alternating" (gpt-oss) gates and ups in turn, gates at most
    the `limit`, ups within it both ways, and (up + 1) gate sigmoid(1.702 gate); "squared" (Nemotron 3) relu(up)^2,
    without gates; "sums" these."""

    kind: str = "gated"
    limit: float = 0.0
    gate: str = "silu"

    @property
    def sums(self) -> int:
        """How many sums make an element."""
        return 1 if self.kind in ("squared", "sums") else 2

    @property
    def number(self) -> int:
        """That of the activation of gates, as kernels know it."""
        return activation_number(self.gate)


#: Of the second layer.
SUMS = Activation("sums")


class Choice(NamedTuple):
    """A choice of experts by the `scores` float32 [R, E] of a router, and how. `correction` float32 [E]. `shared`: rows
    [R, H] and the gate [1, H] of the expert that every row goes through, compute: sigmoid of their product is its
    share. With the first of a rank's `own` experts and the one behind its last, ids count from the first, and those of
    others are -1 with a weight of 0. Shares are multiplied by the `scales` float32 [E] of their experts."""

    routing: Routing
    scores: OwnArray
    correction: OwnArray | None = None
    shared: tuple[OwnArray, OwnArray] | None = None
    own: tuple[int, int] | None = None
    scales: OwnArray | None = None


class Routed(NamedTuple):
    """`expert_ids` int32 [R, k], rising in each row, and `expert_weights` float32 [R, k]. `shared_weights` float32 [R]
    is the share of the expert that every row goes through, None where that is 1 or there is no such expert. A row with
    NaN among its scores has weights of NaN. Of an id -1, which no expert has, nothing is multiplied, and where a weight
    is 0 nothing is added, whatever stands there."""

    expert_ids: OwnArray
    expert_weights: OwnArray
    shared_weights: OwnArray | None = None


class Addition(NamedTuple):
    """`output` [R, N] float32 = residual [R, N] (None: 0) + scale (sum over k in order of weight times what each of a
    row's experts gives, then the shared weight, if there is one, times `shared` [R, N] float32)."""

    routed: Routed
    residual: OwnArray | None
    output: OwnArray
    scale: float = 1.0
    shared: OwnArray | None = None


class ExpertWeights(NamedTuple):
    """One layer of all `experts` of a mixture: the weight [E N, K] dense (compute) or packed as one matrix, of which
    expert e has the rows from e N on, and the bias [E, N] (compute)."""

    linear: LinearWeights
    experts: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K: the weight of one expert."""
        rows, columns = self.linear.weight.shape
        return rows // self.experts, columns

    @property
    def layout(self) -> DeviceLayout | None:
        """How the weights of all are packed, if they are."""
        weight = self.linear.weight
        return weight.layout if isinstance(weight, PackedMatrix) else None


def experts_refusal(experts: int, chosen: int) -> str | None:
    """Why kernels do not choose so many of so many experts, or None if they do."""
    if chosen <= min(experts, MAX_CHOSEN) and experts <= MAX_EXPERTS:
        return None
    return f"kernels choose up to {MAX_CHOSEN} of up to {MAX_EXPERTS} experts, not {chosen} of {experts}"


def matrix_refusal(rows: int, columns: int, gated: bool, layout: DeviceLayout | None) -> str | None:
    """Why kernels do not multiply matrices [rows, columns] of experts, `gated`: gates, then ups; `layout` is that of
    the packed weights of all. None if they do."""
    if columns % 8 or rows % 2:
        return f"experts have widths in multiples of 8 and even numbers of rows, not [{rows}, {columns}]"
    if layout is None:
        return None
    if layout.format.permuted or layout.format.scaled:
        return f"the inputs of experts are not permuted or scaled, as those of {layout.format} are"
    if (rows // 2 if gated else rows) % BLOCK_ROWS:
        return f"gates, ups and downs of packed experts have rows in eights, not {rows // 2 if gated else rows}"
    return None


def check_pairs(rows: int, chosen: int) -> int:
    """The pairs of rows and experts. Raises KernelError where they are more than one launch takes."""
    pairs = rows * chosen
    if not 1 <= pairs <= MAX_PAIRS:
        raise KernelError(f"{rows} rows that chose {chosen} experts are {pairs} products; expected 1 to {MAX_PAIRS}")
    return pairs


class SortedPairs(NamedTuple):
    """Pairs in the order of their experts, those of one in the order of rows, in tiles [T] of P / T rows, of which the
    first `tiles` [1] have pairs. `rows` and `pairs` [P]: each one's row and its number, -1 behind an expert's last;
    `expert` [T]. All int32; what lies behind the first tiles is as it was."""

    rows: OwnArray
    pairs: OwnArray
    expert: OwnArray
    tiles: OwnArray


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Tiles of so many rows that have room for pairs however they chose: each expert's last may hold a single one."""
    return (pairs + min(experts, pairs) * (tile - 1)) // tile


def sorted_words(pairs: int, experts: int, tile: int) -> int:
    """Numbers of `SortedPairs`, all together."""
    tiles = most_tiles(pairs, experts, tile)
    return 2 * tiles * tile + tiles + 1


def sorted_pairs(words: OwnArray, pairs: int, experts: int, tile: int) -> SortedPairs:
    """`SortedPairs` in an array of `sorted_words` or more int32."""
    tiles = most_tiles(pairs, experts, tile)
    ends = [tiles * tile, 2 * tiles * tile, 2 * tiles * tile + tiles, 2 * tiles * tile + tiles + 1]
    return SortedPairs(*(words[begin:end] for begin, end in zip([0, *ends], ends, strict=False)))


def rows_of_tiles(pairs: int, experts: int) -> int:
    """How many rows tiles should have, where experts are chosen alike often: with fewer an expert's weights would be
    taken from memory and made values by more tiles, with more there would be more rows of nothing."""
    return TILES[sum(pairs > most * experts for most in _PAIRS)]


def check_sorted(given: SortedPairs, pairs: int, experts: int) -> int:
    """The rows of a tile. Raises KernelError where the arrays are of other pairs."""
    tile, tiles = given.pairs.size // max(given.expert.size, 1), most_tiles(pairs, experts, 1)
    if tile in TILES:
        tiles = most_tiles(pairs, experts, tile)
    sizes = [each.size for each in given]
    if not 1 <= experts <= MAX_EXPERTS or pairs < 1 or tile not in TILES or tiles * tile > MAX_SORTED_ROWS:
        raise KernelError(
            f"{pairs} pairs with {experts} experts in tiles of {tile} rows; expected up to {MAX_EXPERTS} experts, "
            f"{MAX_SORTED_ROWS} rows, and tiles of {', '.join(map(str, TILES))}"
        )
    if sizes != [tiles * tile, tiles * tile, tiles, 1] or any(str(each.dtype) != "int32" for each in given):
        raise KernelError(
            f"sorted pairs have {sizes} numbers; expected {[tiles * tile, tiles * tile, tiles, 1]} of int32, for "
            f"{pairs} pairs with {experts} experts in tiles of {tile} rows"
        )
    return tile
