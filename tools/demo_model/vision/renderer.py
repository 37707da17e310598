"""Draws tabletop scenes from what stands on each of the nine cells of the table.

One program for NumPy and PyTorch (arrays.py). Everything that is not told by the cells is random: where in its cell an
object stands, its size, turn and shade, the table, the light, shadows, crumbs and papers that mean nothing, a gripper
in the way, blur and noise. Nearer objects are drawn over farther ones, and may hide a part of them.
"""

import itertools
from typing import Any

import numpy as np

from tools.demo_model.vision.backgrounds import table
from tools.demo_model.vision.kinds import COLOURS, KINDS, PAINTS, STRANGERS
from tools.demo_model.vision.layout import NOTHING, UNNAMED
from tools.demo_model.vision.photograph import developed, gripper

SIDE = 144
CELL_ROWS = np.repeat(np.arange(3), 3)  # 0: the back row, the first of a picture
CELL_COLUMNS = np.tile(np.arange(3), 3)
ROW_Y = np.array([0.22, 0.50, 0.80], np.float32)  # centres of the rows and how far columns lie apart, of the side
COLUMN_STEP = np.array([0.27, 0.295, 0.32], np.float32)
HALF_SIZE = np.array([0.105, 0.118, 0.132], np.float32)  # of an object of size 1 in each row
TILE = 64 / SIDE
LOOKS = (*KINDS.values(), *STRANGERS.values())
TILTS = np.radians(np.array([look.tilt for look in LOOKS]))


class Objects:
    """The objects of a batch of pictures: numbers of picture, cell, colour and kind [N], and random looks [N] each."""

    def __init__(self, cells: np.ndarray, arrays: Any, paints: np.ndarray | None = None):
        picture, cell = np.nonzero(cells[:, 1] != NOTHING)
        kind = cells[picture, 1, cell].astype(np.int64)
        order = np.argsort(kind, kind="stable")
        self.picture, self.cell, self.kind = picture[order], cell[order], kind[order]
        self.colour = cells[self.picture, 0, self.cell].astype(np.int64)
        count = len(order)
        row, column = CELL_ROWS[self.cell], CELL_COLUMNS[self.cell]
        random = arrays.uniform(11, count)
        step = arrays.floats(COLUMN_STEP[row])
        self.size = arrays.floats(HALF_SIZE[row]) * (0.78 + 0.4 * random[0])
        self.x = 0.5 + arrays.floats(column - 1.0) * step + (random[1] - 0.5) * 0.32 * step
        self.y = arrays.floats(ROW_Y[row]) + (random[2] - 0.5) * 0.085
        tilt = arrays.floats(TILTS[self.kind])
        self.angle = (random[3] * 2 - 1) * tilt
        self.stretch = 1 + (random[4] - 0.5) * 0.24
        self.mirror = 1 - 2 * (random[5] < 0.5) * 1.0
        named = np.array(list(COLOURS.values()))[np.minimum(self.colour, len(COLOURS) - 1)]
        if paints is not None:
            named = np.where(self.colour[:, None] == UNNAMED, paints[self.picture, self.cell], named)
        base = arrays.floats(named)
        brighter = (random[6] - 0.5) * 0.16
        wobble = arrays.normal(count, 3) * 0.022
        self.rgb = arrays.xp.clip(base * (1 + brighter[:, None]) + wobble, 0.02, 0.98)
        self.relief = 0.1 + 0.3 * random[7]
        self.edge = 0.25 + 0.55 * random[8]
        self.softness = 0.7 + 0.7 * random[9]
        self.pen = 0.5 + 1.4 * random[10]  # width of the outline in pixels

    def groups(self) -> list[tuple[int, int, int]]:
        """(kind, first, stop) of the objects of each kind."""
        bounds = np.searchsorted(self.kind, np.arange(len(LOOKS) + 1))
        return [(k, int(a), int(b)) for k, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]

    def layers(self) -> list[np.ndarray]:
        """The objects of each cell, the back row first: those of one layer are in different pictures."""
        return [np.flatnonzero(self.cell == cell) for cell in range(9)]


def _toned(xp: Any, rgb: Any, tone: float | str, paints: dict[str, Any]) -> Any:
    if isinstance(tone, str):
        return paints[tone]
    return rgb * tone if tone <= 1 else rgb + (0.92 - rgb) * (tone - 1) * 0.55


def draw_objects(objects: Objects, light: Any, arrays: Any, tile: int, side: int) -> tuple[Any, Any]:
    """(colours with alpha [N, 4, tile, tile], origins [N, 2]): each object alone on a tile; origins are integers
    (row, column) of the tile in its picture. `light` [B] says from where the light comes, -1 left to 1 right."""
    xp = arrays.xp
    origin_y = xp.floor(objects.y * side - tile / 2)
    origin_x = xp.floor(objects.x * side - tile / 2)
    steps = arrays.floats(np.arange(tile) + 0.5)
    light = light[arrays.integers(objects.picture)]
    paints = {name: arrays.floats(np.array(rgb))[None, :, None, None] for name, rgb in PAINTS.items()}
    parts = []
    for kind, first, stop in objects.groups():
        own = slice(first, stop)
        pixel = (objects.size[own] * side)[:, None, None]
        dx = (steps[None, None, :] + (origin_x[own] - objects.x[own] * side)[:, None, None]) / pixel
        dy = (steps[None, :, None] + (origin_y[own] - objects.y[own] * side)[:, None, None]) / pixel
        cosine, sine = xp.cos(objects.angle[own])[:, None, None], xp.sin(objects.angle[own])[:, None, None]
        x = (dx * cosine + dy * sine) * objects.mirror[own][:, None, None] / objects.stretch[own][:, None, None]
        y = -dx * sine + dy * cosine
        rgb = objects.rgb[own][:, :, None, None]
        softness = objects.softness[own][:, None, None]
        outline, colour = None, None
        for shape, tone in LOOKS[kind].parts:
            distance = shape(xp, x, y) * pixel
            painted = _toned(xp, rgb, tone, paints)
            if colour is None:
                outline, colour = distance, painted + 0 * distance[:, None]
                continue
            alpha = xp.clip(0.5 - distance / softness, 0, 1)[:, None]
            colour = colour + (painted - colour) * alpha
            outline = xp.minimum(outline, distance)
        relief = objects.relief[own][:, None, None]
        shade = 1 + relief * (dx * light[own][:, None, None] * 0.7 - dy * 0.55)
        pen, darker = objects.pen[own][:, None, None], 0.55 * objects.edge[own][:, None, None]
        edge = xp.clip((pen + outline) / pen + 0.3, 0, 1) * darker
        colour = xp.clip(colour * (shade * (1 - edge))[:, None], 0, 1)
        alpha = xp.clip(0.5 - outline / softness, 0, 1)
        parts.append(xp.concatenate((colour, alpha[:, None]), 1))
    return xp.concatenate(parts, 0), xp.stack((origin_y, origin_x), 1)


def _window(origins: Any, pictures: Any, arrays: Any, height: int, tile: int, side: int) -> Any:
    """Flat places [n, height, tile] of tiles in a batch of pictures that have a margin of one tile on every side."""
    wide = side + 2 * tile
    rows = arrays.integers(np.arange(height))[None, :, None]
    columns = arrays.integers(np.arange(tile))[None, None, :]
    whole = origins + tile
    integral = whole.astype(np.int64) if isinstance(whole, np.ndarray) else whole.long()
    base = pictures * wide * wide + integral[:, 0] * wide + integral[:, 1]
    return base[:, None, None] + rows * wide + columns


def _paste(canvas: Any, objects: Objects, tiles: Any, origins: Any, light: Any, arrays: Any, side: int) -> None:
    """Draw shadows, then objects from the back to the front, on the canvas [3, B * (side + 2 tile)^2] in place."""
    xp, tile = arrays.xp, tiles.shape[-1]
    layers = [(arrays.integers(layer), arrays.integers(objects.picture[layer])) for layer in objects.layers()]
    steps = arrays.floats(np.arange(tile) + 0.5)
    for index, pictures in layers:
        if not len(index):
            continue
        place = _window(origins[index], pictures, arrays, tile, tile, side)
        pixel = (objects.size[index] * side)[:, None, None]
        u = (steps[None, None, :] + (origins[index, 1] - objects.x[index] * side)[:, None, None]) / pixel
        v = (steps[None, :, None] + (origins[index, 0] - objects.y[index] * side)[:, None, None]) / pixel
        u = u + 0.35 * light[pictures][:, None, None]
        reach = ((u / 0.95) ** 2 + ((v - 0.78) / 0.3) ** 2) ** 0.5
        dark = 1 - 0.42 * xp.clip(1.35 - reach, 0, 0.7)
        canvas[:, place] = canvas[:, place] * dark
    for index, pictures in layers:
        if not len(index):
            continue
        place = _window(origins[index], pictures, arrays, tile, tile, side)
        own = tiles[index]
        alpha, under = own[:, 3], canvas[:, place]
        colour = xp.stack((own[:, 0], own[:, 1], own[:, 2]), 0)
        canvas[:, place] = under + (colour - under) * alpha


def render(
    cells: np.ndarray,
    arrays: Any,
    side: int = SIDE,
    plain: bool = False,
    paints: np.ndarray | None = None,
    repeats: int = 1,
) -> Any:
    """Pictures [B, 3, side, side] of values 0 to 255 in whole steps, float32.

    `cells` [B, 2, 9] colour and kind, NOTHING where a cell is empty. `plain` leaves out gripper, blur and noise.
    `paints` [B, 9, 3] are the colours of objects whose colour is UNNAMED. Every table top serves `repeats` pictures.
    """
    xp, count, tile = arrays.xp, len(cells), int(np.ceil(TILE * side))
    light = arrays.uniform(count) * 2 - 1
    background = xp.concatenate([table(-(-count // repeats), arrays, side)] * repeats, 1)[:, :count]
    wide = side + 2 * tile
    canvas = xp.zeros((3, count, wide, wide), dtype=xp.float32, **({} if xp is np else {"device": background.device}))
    canvas[:, :, tile : tile + side, tile : tile + side] = background
    objects = Objects(cells, arrays, paints)
    if len(objects.kind):
        tiles, origins = draw_objects(objects, light, arrays, tile, side)
        flat = canvas.reshape(3, -1)
        _paste(flat, objects, tiles, origins, light, arrays, side)
        canvas = flat.reshape(3, count, wide, wide)
    pictures = canvas[:, :, tile : tile + side, tile : tile + side]
    if not plain:
        pictures = gripper(pictures, arrays, side)
    return developed(pictures, light, arrays, side, plain)
