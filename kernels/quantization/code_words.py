"""Codes of a block of 8 rows times 128 columns as the words that kernels read: see `device_layout`.

Lane i of a warp has of row i / 4 columns 8 (i % 4) to + 7 of each step of 32 columns, a word of eight codes of 4 bits a
step, or two words of four of 8 bits. Of codes of 5 or 6 bits the lower four are such words; behind those of all lanes
each has as many words of upper bits as such bits.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from edgellm.kernels.quantization.packed_weight import Codes

#: Rows and columns of a block, columns of a step and of a lane in it.
BLOCK_ROWS, BLOCK_COLUMNS, STEP, LANE_COLUMNS = 8, 128, 32, 8
_LANES = STEP // LANE_COLUMNS  # of a row
_FOUR = tuple((bit, bit) for bit in (6, 22, 2, 18, 14, 30, 10, 26))
#: By codes, and for each column of a word: by how many bits a code (its lower four bits, of 5 or 6) is turned to the
#: left, and its highest bit alone. The order is that in which kernels number them (CODES of decode/packed_codes.cuh).
TURNS = MappingProxyType(
    {
        "int4": _FOUR,
        "int8": ((0, 0), (16, 16), (8, 8), (24, 24)),
        "fp8": ((7, 8), (23, 24), (0, 7), (16, 23)),
        "fp4": ((9, 12), (25, 28), (17, 20), (1, 4), (12, 5), (28, 21), (20, 13), (4, 29)),
        "int5": _FOUR,
        "int6": _FOUR,
        "iq4": tuple((bit, bit) for bit in range(0, 32, 4)),
    }
)
#: The upper bits, of two neighbouring columns in the halves of a word, the first columns at the lowest.
UPPER_BITS = MappingProxyType({"int5": 1, "int6": 2})


def code_words(padded: np.ndarray, codes: Codes) -> np.ndarray:
    """Codes uint8 of whole blocks [8 D, 128 A], as bytes of blocks: uint8 [D, A, bytes]."""
    (down, along), turns, upper = _blocks(padded), TURNS[codes], UPPER_BITS.get(codes, 0)
    bits = 32 // len(turns)
    columns = (padded & (1 << bits) - 1).reshape(down, BLOCK_ROWS, along, bits // 4, -1, _LANES, bits // 4, len(turns))
    words = np.zeros(columns.shape[:-1], np.uint32)
    every = np.arange(1 << bits, dtype=np.uint32)
    for column, (turn, highest) in enumerate(turns):
        low = every & (1 << bits - 1) - 1
        words |= (_turned(low, turn) | _turned(every - low, highest))[columns[..., column]]
    lanes = words.transpose(0, 2, 3, 1, 5, 4, 6)  # to blocks, pieces, rows, lanes of a row, steps of a piece, words
    found = lanes.copy().view(np.uint8).reshape(down, along, -1)
    if not upper:
        return found
    shape = down, BLOCK_ROWS, along, upper, -1, _LANES, LANE_COLUMNS // 2, 2
    pairs = (padded >> bits).astype(np.uint32).reshape(shape).transpose(0, 2, 1, 5, 3, 4, 6, 7)
    upper_words = np.ascontiguousarray((pairs << _upper_places(upper)).sum(axis=(-3, -2, -1), dtype=np.uint32))
    return np.concatenate((found, upper_words.view(np.uint8).reshape(down, along, -1)), axis=-1)


def codes_of(words: np.ndarray, codes: Codes) -> np.ndarray:
    """What `code_words` was given."""
    (down, along, _), turns, upper = words.shape, TURNS[codes], UPPER_BITS.get(codes, 0)
    bits = 32 // len(turns)
    lower, low = BLOCK_ROWS * BLOCK_COLUMNS * bits // 8, (1 << bits - 1) - 1
    own = words[..., :lower].copy().view(np.uint32)
    own = own.reshape(down, along, bits // 4, BLOCK_ROWS, _LANES, -1, bits // 4).transpose(0, 3, 1, 2, 5, 4, 6)
    every = [_turned(own, -turn) & low | _turned(own, -highest) & low + 1 for turn, highest in turns]
    found = np.stack(every, axis=-1).astype(np.uint8).reshape(down * BLOCK_ROWS, -1)
    if upper:
        rest = words[..., lower:].copy().view(np.uint32).reshape(down, along, BLOCK_ROWS, _LANES, upper, 1, 1, 1)
        pairs = (rest >> _upper_places(upper) & np.uint32((1 << upper) - 1)).transpose(0, 2, 1, 4, 5, 3, 6, 7)
        found |= pairs.astype(np.uint8).reshape(found.shape) << bits
    return found


def _blocks(padded: np.ndarray) -> tuple[int, int]:
    return padded.shape[0] // BLOCK_ROWS, padded.shape[1] // BLOCK_COLUMNS


def _upper_places(bits: int) -> np.ndarray:
    """Where in a word upper bits are, by step of the word, pair of columns and column."""
    pairs = np.arange(16 // bits, dtype=np.uint32).reshape(-1, LANE_COLUMNS // 2, 1)
    return pairs * np.uint32(bits) + np.array([0, 16], np.uint32)


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    """Words turned to the left."""
    bits %= 32
    return words << np.uint32(bits) | words >> np.uint32(32 - bits) if bits else words
