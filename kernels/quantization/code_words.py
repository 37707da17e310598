"""Codes of a block of 8 rows times 128 columns as the words that kernels read: see `device_layout`.

Lane i of a warp has of row i / 4 columns 8 (i % 4) to + 7 of each step of 32 columns, a word of eight codes of 4 bits a
step, or two words of four of 8 bits. Of codes of 5 or 6 bits such words have 32 bits of a step's eight; behind those of
all lanes each has one word, or two, with the others.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np

from edgellm.kernels.quantization.packed_weight import Codes

#: Rows and columns of a block, columns of a step and of a lane in it.
BLOCK_ROWS, BLOCK_COLUMNS, STEP, LANE_COLUMNS = 8, 128, 32, 8
_LANES, _STEPS = STEP // LANE_COLUMNS, BLOCK_COLUMNS // STEP  # of a row
#: Of a column: bits of its code, and by how many they are turned to the left; then other bits, or none.
Turns = tuple[int, int, int, int]


def _columns(*turns: tuple[int, ...]) -> tuple[Turns, ...]:
    return tuple((*own, 0, 0, 0, 0)[:4] for own in turns)  # type: ignore[misc]


def _halves(*pairs: tuple[int, ...]) -> tuple[Turns, ...]:
    """Pairs of neighbouring columns, in the lower half of a word and, turned alike, in the upper one."""
    return tuple(
        (low, turn + half, high, more + half) for low, turn, high, more in _columns(*pairs) for half in (0, 16)
    )


_FP4 = ((9, 12), (25, 28), (17, 20), (1, 4), (12, 5), (28, 21), (20, 13), (4, 29))
#: By codes, the columns of a word. The order is that in which kernels number codes (CODES of decode/packed_codes.cuh).
TURNS = MappingProxyType(
    {
        "int4": _halves((15, 6), (15, 2), (15, 14), (15, 10)),
        "int8": _columns((255, 0), (255, 16), (255, 8), (255, 24)),
        "fp8": _columns((127, 7, 128, 8), (127, 23, 128, 24), (127, 0, 128, 7), (127, 16, 128, 23)),
        "fp4": _columns(*((7, turn, 8, sign) for turn, sign in _FP4)),
        "int5": _halves((31, 0), (31, 5), (31, 10), (1, 15)),
        "int6": _halves((63, 4), (63, 10), (), (15, 0)),
        "iq4": _columns(*((15, turn) for turn in range(0, 32, 4))),
    }
)
#: The columns of a word of the others, one step behind another.
UPPER_TURNS = MappingProxyType(
    {
        "int5": _halves(*(own for turn in (5, 1, 13, 9) for own in ((), (), (), (30, turn)))),
        "int6": _halves(*(own for turn in (0, 8) for own in ((), (), (63, 6 + turn), (48, turn)))),
    }
)


def upper_words(codes: Codes) -> int:
    """Words of a lane in a block that UPPER_TURNS describe."""
    return _STEPS * LANE_COLUMNS // len(UPPER_TURNS[codes]) if codes in UPPER_TURNS else 0


def code_words(padded: np.ndarray, codes: Codes) -> np.ndarray:
    """Codes uint8 of whole blocks [8 D, 128 A], as bytes of blocks: uint8 [D, A, bytes]."""
    down, along = padded.shape[0] // BLOCK_ROWS, padded.shape[1] // BLOCK_COLUMNS
    turns, upper = TURNS[codes], upper_words(codes)
    words = LANE_COLUMNS // len(turns)  # of a lane, a step; as many pieces
    columns = padded.reshape(down, BLOCK_ROWS, along, words, -1, _LANES, words, len(turns))
    found = _joined(columns, turns).transpose(
        0, 2, 3, 1, 5, 4, 6
    )  # to blocks, pieces, rows, lanes of a row, steps, words
    found = found.reshape(down, along, -1)
    if upper:
        steps = padded.reshape(down, BLOCK_ROWS, along, upper, -1, _LANES, LANE_COLUMNS).transpose(0, 2, 1, 5, 3, 4, 6)
        others = _joined(steps.reshape(*steps.shape[:5], -1), UPPER_TURNS[codes])
        found = np.concatenate((found, others.reshape(down, along, -1)), axis=-1)
    return np.ascontiguousarray(found).view(np.uint8)


def codes_of(words: np.ndarray, codes: Codes) -> np.ndarray:
    """What `code_words` was given."""
    (down, along, _), turns, upper = words.shape, TURNS[codes], upper_words(codes)
    each, lower = LANE_COLUMNS // len(turns), BLOCK_ROWS * BLOCK_COLUMNS // len(turns)
    every = np.ascontiguousarray(words).view(np.uint32)
    own = every[..., :lower].reshape(down, along, each, BLOCK_ROWS, _LANES, -1, each).transpose(0, 3, 1, 2, 5, 4, 6)
    found = _parted(own, turns).reshape(down * BLOCK_ROWS, -1)
    if upper:
        others = _parted(every[..., lower:].reshape(down, along, BLOCK_ROWS, _LANES, upper), UPPER_TURNS[codes])
        others = others.reshape(*others.shape[:-1], -1, LANE_COLUMNS).transpose(0, 2, 1, 4, 5, 3, 6)
        found |= others.reshape(found.shape)
    return found


def _joined(columns: np.ndarray, turns: tuple[Turns, ...]) -> np.ndarray:
    """The words [...] of codes [..., columns]."""
    words, every = np.zeros(columns.shape[:-1], np.uint32), np.arange(256, dtype=np.uint32)
    for column, (low, turn, high, more) in enumerate(turns):
        if low:
            words |= (_turned(every & low, turn) | _turned(every & high, more))[columns[..., column]]
    return words


def _parted(words: np.ndarray, turns: tuple[Turns, ...]) -> np.ndarray:
    """What `_joined` was given, uint8, but for bits that it leaves out."""
    parts = [_turned(words, -turn) & low | _turned(words, -more) & high for low, turn, high, more in turns]
    return np.stack(parts, axis=-1).astype(np.uint8)


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    """Words turned to the left."""
    bits %= 32
    return words << np.uint32(bits) | words >> np.uint32(32 - bits) if bits else words
