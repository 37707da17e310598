"""What depends on an image's grid alone, against its definition written out patch by patch."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from golden_vision import golden_config

from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import vision_shape
from edgellm.multimodal.vision_layout import (
    fraction_bounds,
    interpolation_taps,
    patch_coordinates,
    rotary_rows,
    vision_layout,
    window_order,
    window_rows,
)

GRIDS = [(1, 2, 2), (1, 6, 10), (1, 14, 6), (1, 8, 8)]


def written_out(height: int, width: int, merge: int) -> list[tuple[int, int]]:
    """(row, column) of the patches: blocks in reading order, and the patches of each."""
    return [
        (top + row, left + column)
        for top in range(0, height, merge)
        for left in range(0, width, merge)
        for row in range(merge)
        for column in range(merge)
    ]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("merge", [1, 2])
def test_patches_come_in_merge_blocks(grid: tuple[int, int, int], merge: int) -> None:
    rows, columns = patch_coordinates(grid, merge)
    assert list(zip(rows.tolist(), columns.tolist(), strict=True)) == written_out(*grid[1:], merge)


@pytest.mark.parametrize("grid", GRIDS)
def test_rotary_rows(grid: tuple[int, int, int]) -> None:
    size, theta = 16, 10000.0
    found = rotary_rows(grid, 2, size, theta)
    assert found.dtype == np.float32
    for place, coordinates in enumerate(written_out(*grid[1:], 2)):
        angles = [one * theta ** (-4 * index / size) for one in coordinates for index in range(size // 4)]
        expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
        np.testing.assert_allclose(found[place], expected, atol=2e-6)


@pytest.mark.parametrize("side", [1, 2, 3, 8])
@pytest.mark.parametrize("grid", GRIDS)
def test_windows_hold_every_token_once(grid: tuple[int, int, int], side: int) -> None:
    order, sizes = window_order(grid, 2, side)
    height, width = grid[1] // 2, grid[2] // 2
    assert sorted(order) == list(range(height * width))
    assert window_rows(grid, 2, side) == len(sizes) * 4 * side**2
    start = 0
    for size in sizes:
        tokens = order[start : start + size]
        assert list(tokens) == sorted(tokens)
        assert len({(token // width // side, token % width // side) for token in tokens}) == 1
        start += size
    places = [(token // width // side, token % width // side) for token in order]
    assert places == sorted(places)


@pytest.mark.parametrize("grid", GRIDS)
def test_interpolation_takes_the_four_neighbours(grid: tuple[int, int, int]) -> None:
    side = 5
    taps, weights = interpolation_taps(grid, 2, side)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-6)
    table = np.arange(side * side, dtype=np.float64)  # linear in row and column, so interpolation is exact
    found = (table[taps] * weights).sum(axis=1)
    for place, (row, column) in enumerate(written_out(*grid[1:], 2)):
        exact = [index * (side - 1) / max(1, size - 1) for index, size in ((row, grid[1]), (column, grid[2]))]
        np.testing.assert_allclose(found[place], exact[0] * side + exact[1], atol=1e-5)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_patch_has_a_row_and_finds_its_way_back(grid: tuple[int, int, int]) -> None:
    config = golden_config("qwen2_5_vl")
    layout = vision_layout(config, grid)
    assert layout.rows % config.window_patches == 0
    mask, rows = layout.inputs["window_mask"], layout.inputs["input_rows"]
    assert sorted(rows[mask]) == list(range(grid[1] * grid[2]))
    unit = config.merge_patches
    # Merged row m holds patches unit * token ...: the output row of each token must be the one with its patches.
    for token, merged in enumerate(layout.inputs["output_rows"]):
        assert list(rows[merged * unit : (merged + 1) * unit]) == list(range(token * unit, (token + 1) * unit))


def test_padded_windows_see_a_row() -> None:
    config = golden_config("qwen2_5_vl")
    shape = vision_shape(256)
    padded = vision_layout(config, (1, 6, 10)).padded(config, shape)
    mask = padded["window_mask"]
    assert mask.shape == (256 // config.window_patches, 1, 1, config.window_patches)
    assert mask.any(axis=3).all()
    # Windows behind the image's own are shown one row, the image's none but its patches.
    own = vision_layout(config, (1, 6, 10)).inputs["window_mask"]
    np.testing.assert_array_equal(mask.reshape(-1)[: own.size], own)
    assert mask.sum() == own.sum() + (256 - own.size) // config.window_patches
    assert padded["attention_mask"].sum() == 60


@pytest.mark.parametrize(
    ("name", "grid", "message"),
    [
        ("qwen2_5_vl", (2, 4, 4), "2 frames"),
        ("qwen2_5_vl", (1, 5, 4), "5 x 4 patches"),
        ("qwen3_vl", (1, 4, 0), "4 x 0 patches"),
        ("llava_clip", (1, 4, 6), "the model takes 4 x 4"),
    ],
)
def test_an_impossible_grid_is_refused(name: str, grid: tuple[int, int, int], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        vision_layout(golden_config(name), grid, np.zeros((25, 32), np.float32))


def test_bounds_of_nearest_positions_are_those_of_torch() -> None:
    """The digest is that of `torch.arange(1 / side, 1.0, 1 / side)` for the sides 1 to 100, float32, on x86."""
    bounds = b"".join(fraction_bounds(side).tobytes() for side in range(1, 101))
    assert hashlib.sha256(bounds).hexdigest() == "1306654517efe2f22693198800029d9aa20226bd70081c02423c8a52dfe5a007"
