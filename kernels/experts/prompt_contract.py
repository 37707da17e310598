"""How pairs of rows and experts are sorted by expert, for the kernels that multiply those of an expert together.

R rows go through k experts each: R k pairs, row r's at r k and behind. Tiles hold pairs of one expert alone.
"""

from __future__ import annotations

from typing import NamedTuple

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.errors import KernelError
from edgellm.kernels.experts.contract import MAX_EXPERTS

#: The rows that tiles may have, and how many pairs an expert has at most, on average, for the first ones to be faster
#: than the next.
TILES, _PAIRS = (16, 32, 64), (12, 48)
#: The most rows of all tiles.
MAX_SORTED_ROWS = 1 << 24


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
