"""What a vision engine takes that depends on an image's grid alone, computed on the host.

The patches of an image come in merge blocks: the patches of one language token side by side, blocks in reading order
(with `spatial_merge_size` 1: plain reading order).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineShape
from edgellm.engines.model.vision import BLOCKS_BEHIND, VisionConfig, vision_inputs
from edgellm.multimodal.image_layout import filter_shares

Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class VisionLayout:
    """The inputs of an engine for one grid, before they are padded to the engine's rows.

    `rows` is how many rows the engine must have, `tokens` how many of its outputs are the image's. `inputs` are arrays
    by the name of the engine's input, without the axes of size 1 that it begins with.
    """

    rows: int
    tokens: int
    inputs: dict[str, np.ndarray]

    def padded(self, config: VisionConfig, shape: EngineShape) -> dict[str, np.ndarray]:
        """The inputs of an engine of `shape`; every row, padding included, sees a row."""
        padded = {}
        for name, (dimensions, _) in vision_inputs(config, shape).items():
            if name in self.inputs:
                values = self.inputs[name]
                whole = np.zeros(dimensions, values.dtype)
                whole.reshape(-1)[: values.size] = values.reshape(-1)
                padded[name] = whole
        if "window_mask" in padded:
            mask = padded["window_mask"]
            mask[~mask.any(axis=3), 0] = True
        return padded


def vision_layout(config: VisionConfig, grid: Grid, position_table: np.ndarray | None = None) -> VisionLayout:
    """The layout of an image of (frames, height, width) in patches; `position_table` is that of the
    encoder's weights, if it has one (`position_table` of `engines/families/vision_config.py`).

    Raises EngineError for a grid that the model cannot have.
    """
    _check(config, grid)
    count = grid[1] * grid[2]
    if config.image_side:
        rows, columns = patch_coordinates(grid, config.spatial_merge_size)
        blocks = {"block_rows": (rows * grid[2] + columns).astype(np.int32)} if config.family in BLOCKS_BEHIND else {}
        return VisionLayout(count, config.token_count(grid), blocks)
    inputs = {"attention_mask": np.ones(count, np.bool_)}
    if config.family == "minicpmv4_6":
        inputs["merged_mask"] = np.ones(count // 4, np.bool_)
    elif config.family != "lfm2_vl":
        how = config.spatial_merge_size, config.head_dim, config.rope_theta, config.family == "mistral3"
        inputs["rotary_cos_sin"] = rotary_rows(grid, *how)
    if config.family == "qwen2_5_vl":
        return _windowed(config, grid, inputs["rotary_cos_sin"])
    if position_table is not None:
        inputs["position_embeddings"] = _positions(config, grid, position_table)
    return VisionLayout(count, config.token_count(grid), inputs)


def _positions(config: VisionConfig, grid: Grid, table: np.ndarray) -> np.ndarray:
    """What of the table of positions is added to the patches, [N, H] float32."""
    merge = config.spatial_merge_size
    if config.family == "lfm2_vl":
        return resized_positions(table, grid, merge)
    if config.family == "minicpmv4_6":
        return nearest_positions(table, grid, merge)
    if config.family == "gemma4":
        rows, columns = patch_coordinates(grid, merge)
        return np.asarray(table[0][columns] + table[1][rows])
    taps, weights = interpolation_taps(grid, merge, config.position_side)
    return np.einsum("nt,nth->nh", weights, table[taps]).astype(np.float32)


def patch_coordinates(grid: Grid, merge: int, nested: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of every patch, [N] each, in the order in which the patches come; `nested`: those of a block in
    squares of four."""
    _, height, width = grid
    index = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    order = index.transpose(0, 2, 1, 3).reshape(-1)
    order = in_squares(order) if nested else order
    return order // width, order % width


def in_squares(rows: np.ndarray) -> np.ndarray:
    """The rows [N, ..] of blocks of 4 x 4 with each of their quarters together (MiniCPM-V, which merges twice)."""
    return rows.reshape(-1, 2, 2, 2, 2, *rows.shape[1:]).swapaxes(2, 3).reshape(rows.shape)


def nearest_positions(table: np.ndarray, grid: Grid, merge: int) -> np.ndarray:
    """The rows [N, H] of a square table [positions, H] at the nearest place below each patch's, both as fractions of a
    side, in float32 as published; patches of a block in squares of four."""
    side = round(len(table) ** 0.5)
    bounds, places = fraction_bounds(side), []
    for index, count in zip(patch_coordinates(grid, merge, nested=True), grid[1:], strict=True):
        places.append(np.searchsorted(bounds, index.astype(np.float32) / np.float32(count), side="right"))
    return table[places[0] * side + places[1]]


def fraction_bounds(side: int) -> np.ndarray:
    """1 / side, 2 / side, .. below 1 in float32, rounded as PyTorch's `arange` rounds them on x86: it takes pairs of
    eight at once, of which each eight begins at a float32. Patches lie on these bounds, so that a bit decides."""
    step = 1 / side
    index = np.arange(len(np.arange(step, 1.0, step)))
    at_once = index < len(index) // 16 * 16
    first = np.where(at_once, index // 8 * 8, index)
    start = step + step * first
    start = np.where(at_once, start.astype(np.float32), start)
    return (start + (index - first) * step).astype(np.float32)


def rotary_rows(grid: Grid, merge: int, head_dim: int, theta: float, alternates: bool = False) -> np.ndarray:
    """[N, D] float32: the cosines, then the sines, of row and column of every patch.

    D / 4 frequencies theta^(-4j / D) turn by the row, as many by the column, in float32 as published. Where they
    `alternate` (Pixtral), those of columns are theta^(-(4j + 2) / D), between those of rows.
    """
    half, angles = head_dim // 2, []
    for first, places in zip((0, int(alternates)), patch_coordinates(grid, merge), strict=True):
        exponents = np.arange(first, half, 2, dtype=np.float32) / np.float32(half)
        frequencies = np.float32(1) / np.float32(theta) ** exponents
        angles.append(places.astype(np.float32)[:, None] * frequencies)
    turned = np.concatenate(angles, axis=1)
    return np.concatenate((np.cos(turned), np.sin(turned)), axis=1)


def window_order(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The merged tokens window by window [M], and how many each window has [windows].

    Windows are `side` by `side` tokens, smaller at the right and lower edge; they come in reading order, and so do the
    tokens of each.
    """
    height, width = grid[1] // merge, grid[2] // merge
    tokens = np.arange(height * width).reshape(height, width)
    windows = [
        tokens[top : top + side, left : left + side].reshape(-1)
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]
    return np.concatenate(windows), np.array([window.size for window in windows])


def window_rows(grid: Grid, merge: int, side: int) -> int:
    """Rows of patches of all windows of an image, each padded to a full one."""
    height, width = grid[1] // merge, grid[2] // merge
    return -(-height // side) * -(-width // side) * (side * merge) ** 2


def interpolation_taps(grid: Grid, merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four entries for every patch of a `side` by `side` table around its place, and their weights, [N, 4] each.

    Bilinear; the corners of image and table coincide (`align_corners`). float32, as published.
    """
    rows, columns = patch_coordinates(grid, merge)
    row_taps, row_weights = _axis_taps(rows, grid[1], side)
    column_taps, column_weights = _axis_taps(columns, grid[2], side)
    taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(-1, 4)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)
    return taps, weights


def resized_positions(table: np.ndarray, grid: Grid, merge: int) -> np.ndarray:
    """The rows [N, H] float32 of a square table [positions, H] resized to the patches of an image as pictures are:
    bilinear, the filter widened where it shrinks. It is Siglip2's (Tschannen et al. 2025), for images of any shape."""
    side, width = round(len(table) ** 0.5), table.shape[1]
    resized = table.reshape(side, side, width)
    for axis, count in enumerate(grid[1:]):
        starts, shares = filter_shares(side, count, Image.Resampling.BILINEAR)
        matrix = np.zeros((count, side + shares.shape[1]))
        matrix[np.arange(count)[:, None], starts[:, None] + np.arange(shares.shape[1])] = shares
        resized = np.moveaxis(np.tensordot(matrix[:, :side], resized, (1, axis)), 0, axis)
    rows, columns = patch_coordinates(grid, merge)
    return resized[rows, columns].astype(np.float32)


def _axis_taps(index: np.ndarray, size: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(1, size - 1))
    lower = np.floor(place)
    fraction = place - lower
    first = lower.astype(np.int64)
    taps = np.stack((first, np.minimum(first + 1, side - 1)), axis=1)
    return taps, np.stack((np.float32(1) - fraction, fraction), axis=1)


def _windowed(config: VisionConfig, grid: Grid, rotary: np.ndarray) -> VisionLayout:
    """Every window is padded to the size of a full one, behind its own patches."""
    merge, side, unit = config.spatial_merge_size, config.window_merged_side, config.merge_patches
    order, sizes = window_order(grid, merge, side)
    starts = np.arange(sizes.size) * side**2 - np.concatenate(([0], np.cumsum(sizes)[:-1]))
    places = np.arange(order.size) + np.repeat(starts, sizes)  # the merged row of the token that comes n-th
    merged_rows = np.empty(order.size, np.int64)
    merged_rows[order] = places
    patch_rows = (merged_rows[:, None] * unit + np.arange(unit)).reshape(-1)
    rows = window_rows(grid, merge, side)
    placed = np.zeros((rows, config.head_dim), np.float32)
    placed[patch_rows] = rotary
    mask = np.zeros(rows, np.bool_)
    mask[patch_rows] = True
    input_rows = np.zeros(rows, np.int32)
    input_rows[patch_rows] = np.arange(patch_rows.size)
    inputs = {
        "input_rows": input_rows,
        "rotary_cos_sin": placed,
        "attention_mask": mask,
        "window_mask": mask,
        "output_rows": merged_rows.astype(np.int32),
    }
    return VisionLayout(rows, order.size, inputs)


def _check(config: VisionConfig, grid: Grid) -> None:
    frames, height, width = grid
    if frames != 1:
        raise EngineError(f"an image of {frames} frames was given: expected one; videos are not supported")
    merge, side = config.spatial_merge_size, config.image_side
    if side and (height, width) != (side, side):
        raise EngineError(f"an image of {height} x {width} patches was given, the model takes {side} x {side}")
    if height < merge or width < merge or height % merge or width % merge:
        raise EngineError(f"an image of {height} x {width} patches was given: expected multiples of {merge}")
