"""Codes of a block of 8 rows times 128 columns as the words that kernels read: see `device_layout`.

Lane i of a warp has of row i / 4 columns 8 (i % 4) to + 7 of each step of 32 columns, a word of eight codes of 4 bits a
step, or two words of four of 8 bits. Of codes of 5 or 6 bits such words have 32 bits of a step's eight; behind those of
all lanes each has one word, or two, with the others.
"""

from __future__ import annotations

from types import MappingProxyType

#: Rows and columns of a block, columns of a step and of a lane in it.
BLOCK_ROWS, BLOCK_COLUMNS, STEP, LANE_COLUMNS = 8, 128, 32, 8
#: Of a column: bits of its code, and by how many they are turned to the left; then other bits, or none.
Turns = tuple[int, int, int, int]


def _halves(*pairs: tuple[int, int]) -> tuple[Turns, ...]:
    """Pairs of neighbouring columns, in the lower half of a word and, turned alike, in the upper one."""
    return tuple((bits, turn + half, 0, 0) for bits, turn in pairs for half in (0, 16))


_FP8, _NONE = ((7, 8), (23, 24), (0, 7), (16, 23)), (0, 0)
_FP4 = ((9, 12), (25, 28), (17, 20), (1, 4), (12, 5), (28, 21), (20, 13), (4, 29))
#: By codes, the columns of a word. The order is that in which kernels number codes (CODES of decode/packed_codes.cuh).
TURNS = MappingProxyType(
    {
        "int4": _halves((15, 6), (15, 2), (15, 14), (15, 10)),
        "int8": tuple((255, turn, 0, 0) for turn in (0, 16, 8, 24)),
        "fp8": tuple((127, turn, 128, sign) for turn, sign in _FP8),
        "fp4": tuple((7, turn, 8, sign) for turn, sign in _FP4),
        "int5": _halves((31, 0), (31, 5), (31, 10), (1, 15)),
        "int6": _halves((63, 4), (63, 10), _NONE, (15, 0)),
        "iq4": tuple((15, turn, 0, 0) for turn in range(0, 32, 4)),
    }
)
#: The columns of a word of the others, one step behind another.
UPPER_TURNS = MappingProxyType(
    {
        "int5": _halves(*(own for turn in (5, 1, 13, 9) for own in (_NONE, _NONE, _NONE, (30, turn)))),
        "int6": _halves(*(own for turn in (0, 8) for own in (_NONE, _NONE, (63, 6 + turn), (48, turn)))),
    }
)
