"""Images by formula, the same with every release of NumPy: smooth areas, edges and noise in every channel."""

from __future__ import annotations

import numpy as np


def synthetic_image(height: int, width: int) -> np.ndarray:
    """[height, width, 3] uint8."""
    rows, columns, channels = np.indices((height, width, 3), dtype=np.int64)
    smooth = 2 * rows + 3 * columns * (channels + 1)
    squares = 90 * ((rows // 11 + columns // 7 + channels) % 2)
    noise = (rows * 7919 + columns * 104729 + channels * 1299709) * 2654435761 % 4294967296 >> 27
    return ((smooth + squares + noise) % 256).astype(np.uint8)
