"""What the rows of a picture are meant to say to the language model: the list of objects that it knows from text.

A picture gives 81 rows of the language model's hidden size. Three stand at the head, six at the tail; each of the nine
cells of the table, in the order of a picture, owns eight between: `- red cup: front left`, a line break, a spare row.
`token_tables` has the token at each row, from which training starts; rows of empty cells begin as line breaks.
"""

from collections.abc import Callable

import numpy as np

from tools.demo_model.scene import World
from tools.demo_model.vision.kinds import COLOURS, KINDS
from tools.demo_model.vision.scenes import ROWS_COLUMNS
from tools.demo_model.words import GRID_COLUMNS, GRID_ROWS

ROWS = 81
HEAD, CELL, TAIL = 3, 8, 6
COLOUR_ROW, KIND_ROW = 1, 2
NOTHING = 255
UNNAMED = 254  # a colour for which there is no name
HEAD_TEXT = "Objects:\n"
TAIL_TEXT = "\n"


def first_row(cell: int) -> int:
    """The first row of a cell, 0 to 8 in the order of a picture."""
    return HEAD + CELL * cell


def cells_of(world: World) -> np.ndarray:
    """[2, 9] uint8: the number of the colour and of the kind at each cell, NOTHING where it is empty."""
    cells = np.full((2, 9), NOTHING, np.uint8)
    colours, kinds = list(COLOURS), list(KINDS)
    for thing in world.things:
        cell = ROWS_COLUMNS.index(thing.cell)
        cells[:, cell] = colours.index(thing.colour), kinds.index(thing.kind)
    return cells


def _fitted(ids: list[int], count: int, line_break: int) -> list[int]:
    if len(ids) > count:
        raise ValueError(f"{len(ids)} tokens do not fit {count} rows")
    return ids + [line_break] * (count - len(ids))


def place_words(cell: int) -> str:
    """` front left`, ` centre`."""
    row, column = ROWS_COLUMNS[cell]
    return " centre" if (row, column) == (1, 1) else f" {GRID_ROWS[row]} {GRID_COLUMNS[column]}"


def token_tables(encode: Callable[[str], list[int]]) -> dict[str, np.ndarray]:
    """Token ids: `empty` [81] of a picture of nothing, `filled` [81] with the words around an object, colour and kind
    rows as line breaks, `colours` [10] and `kinds` [33]."""
    line_break = encode("\n")[0]
    head, tail = _fitted(encode(HEAD_TEXT), HEAD, line_break), _fitted(encode(TAIL_TEXT), TAIL, line_break)
    filled = list(head)
    for cell in range(9):
        words = [*encode("-"), line_break, line_break, *encode(":"), *encode(place_words(cell))]
        filled += _fitted(words, CELL, line_break)
    single = {name: [encode(f" {word}") for word in table] for name, table in (("colours", COLOURS), ("kinds", KINDS))}
    if any(len(ids) != 1 for lists in single.values() for ids in lists):
        raise ValueError("every colour and kind must be one token of the vocabulary")
    return {
        "empty": np.array([*head, *[line_break] * (9 * CELL), *tail]),
        "filled": np.array([*filled, *tail]),
        **{name: np.array([ids[0] for ids in lists]) for name, lists in single.items()},
    }
