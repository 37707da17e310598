"""Random scenes for the eyes alone: what stands on the cells, many at once, without any word about them."""

import numpy as np

from tools.demo_model.vision.kinds import COLOURS, KINDS, STRANGERS
from tools.demo_model.vision.layout import NOTHING, UNNAMED
from tools.demo_model.vision.scenes import held_out_pair


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


FAR_FROM_HELD_OUT = 0.28  # distance in RGB that unnamed colours keep from the held-out colours of a kind
_COLOURS = np.array(list(COLOURS.values()), np.float32)


def with_strangers(
    random: np.random.Generator, cells: np.ndarray, held_out: np.ndarray, unnamed: float, strange: float
) -> np.ndarray:
    """Give shares of the objects, in place, a colour without a name or a kind without one; their colours [M, 9, 3].

    The colours are RGB from 0 to 1, and matter where a colour is UNNAMED. None is near a colour that is held out for
    its kind, so that no picture shows a held-out pair.
    """
    full = cells[:, 1] != NOTHING
    drawn = random.random(full.shape)
    strangers = full & (drawn < strange)
    cells[:, 1][strangers] = len(KINDS) + random.integers(len(STRANGERS), size=np.count_nonzero(strangers))
    places = np.argwhere(full & ~strangers & (drawn < strange + unnamed))
    count, tries = len(places), 5
    rgb = random.random((tries, count, 3), dtype=np.float32) ** 1.2
    mixed = random.random((tries, count, 1)) < 0.4
    first, second = _COLOURS[random.integers(len(COLOURS), size=(2, tries, count))]
    share = random.random((tries, count, 1), dtype=np.float32)
    rgb = np.where(mixed, first * share + second * (1 - share), rgb)
    near = np.linalg.norm(rgb[:, :, None] - _COLOURS, axis=3) < FAR_FROM_HELD_OUT
    kinds = cells[places[:, 0], 1, places[:, 1]]
    allowed = ~(near & held_out.T[kinds][None]).any(2)
    chosen = allowed.argmax(0)
    paints = np.zeros((*full.shape, 3), np.float32)
    kept = places[allowed.any(0)]
    paints[kept[:, 0], kept[:, 1]] = rgb[chosen, np.arange(count)][allowed.any(0)]
    cells[kept[:, 0], 0, kept[:, 1]] = UNNAMED
    return paints
