"""Sample scenes as PNG files, drawn twice as large as the eyes see them.

Usage: python -m tools.demo_model.vision.samples --to edgellm/shipped/scenes
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

from tools.demo_model.vision.arrays import NumpyArrays
from tools.demo_model.vision.kinds import COLOURS, KINDS
from tools.demo_model.vision.layout import NOTHING
from tools.demo_model.vision.renderer import SIDE, render

# The cells in the order of a picture: the back row from left to right, the middle row, the front row.
SCENES: dict[str, tuple[int, tuple[str, ...]]] = {
    "breakfast": (
        3,
        ("blue cup", "", "yellow banana", "", "white bowl", "red apple", "red cup", "brown plate", "blue fork"),
    ),
    "workshop": (
        8,
        ("", "orange hammer", "green box", "black gear", "", "blue bucket", "grey key", "", "yellow pencil"),
    ),
    "toys": (21, ("red car", "", "green ball", "", "purple boat", "", "blue ball", "white pyramid", "yellow flag")),
    "study": (34, ("green lamp", "black clock", "", "brown book", "", "orange phone", "", "red envelope", "")),
}


def scene_cells(names: tuple[str, ...]) -> np.ndarray:
    """Cells [1, 2, 9] of nine names "colour kind" or "" for nothing."""
    cells = np.full((1, 2, 9), NOTHING, np.uint8)
    for cell, name in enumerate(names):
        if name:
            colour, kind = name.split()
            cells[0, :, cell] = list(COLOURS).index(colour), list(KINDS).index(kind)
    return cells


def picture(cells: np.ndarray, seed: int, side: int = 2 * SIDE, plain: bool = False) -> np.ndarray:
    """One scene [side, side, 3] uint8."""
    drawn = render(cells, NumpyArrays(seed), side, plain)[0]
    return np.ascontiguousarray(drawn.transpose(1, 2, 0).astype(np.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    for name, (seed, names) in SCENES.items():
        path = arguments.to / f"{name}.png"
        Image.fromarray(picture(scene_cells(names), seed, plain=True)).quantize(256, dither=Image.Dither.NONE).convert(
            "RGB"
        ).save(path, optimize=True)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
