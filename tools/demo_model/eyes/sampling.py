"""Random scenes for the eyes alone: what stands on the cells, many at once, without any word about them."""

import numpy as np

from tools.demo_model.eyes.kinds import COLOURS, KINDS
from tools.demo_model.eyes.layout import NOTHING
from tools.demo_model.eyes.scenes import held_out_pair


def held_out_table() -> np.ndarray:
    """[10, 33] bool: the pairs of colour and kind that training never shows."""
    return np.array([[held_out_pair(colour, kind) for kind in KINDS] for colour in COLOURS])


def sample_cells(
    random: np.random.Generator, count: int, held_out: np.ndarray, only_held_out: bool = False
) -> np.ndarray:
    """Cells [count, 2, 9] without held-out pairs (or with nothing but them); up to nine objects, no pair twice."""
    shape = (count, 9)
    colours, kinds = random.integers(len(COLOURS), size=shape), random.integers(len(KINDS), size=shape)
    for numbers, size in ((colours, len(COLOURS)), (kinds, len(KINDS))):
        favourite = random.integers(size, size=(count, 1))
        repeat = random.choice((0.0, 0.0, 0.3, 0.6), size=(count, 1))
        numbers[:] = np.where(random.random(shape) < repeat, favourite, numbers)
    for _ in range(8):
        wrong = held_out[colours, kinds] != only_held_out
        colours[wrong] = random.integers(len(COLOURS), size=np.count_nonzero(wrong))
    full = random.random(shape).argsort(1) < random.integers(0, 10, size=(count, 1))
    full &= held_out[colours, kinds] == only_held_out
    pairs = np.where(full, colours * len(KINDS) + kinds, -1 - np.arange(9))
    for cell in range(1, 9):
        full[:, cell] &= ~(pairs[:, :cell] == pairs[:, cell : cell + 1]).any(1)
    cells = np.stack((colours, kinds), 1).astype(np.uint8)
    cells[~np.broadcast_to(full[:, None], cells.shape)] = NOTHING
    return cells
