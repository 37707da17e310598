"""Videos by a formula, which goldens are made of and tests show: no file of them is stored."""

from __future__ import annotations

import numpy as np

#: Frames, height, width and frames a second: an odd number of them, and a video whose time goes on for longer.
VIDEOS = ((5, 16, 16, 2.0), (4, 16, 24, 1.0))
#: One that has to be resized.
RESIZED = (3, 23, 37, 2.0)
#: Frames of files and their rates, of which some are taken; counts, heights and widths that are resized.
FILES = ((100, 24.0), (121, 29.97), (7, 30.0), (3, 25.0), (1700, 1.0), (48, 12.5))
SIZES = ((2, 16, 16), (5, 480, 640), (4, 37, 23), (7, 100, 9), (3, 5, 90), (90, 40, 30), (1, 20, 20), (9, 8, 8))
_VIDEO, _IMAGE = ("<|vision_start|><|" + kind + "_pad|><|vision_end|>" for kind in ("video", "image"))
QUESTION = "What moves?"
#: Two videos, and an image between them.
PROMPT = f"<|im_start|>user\n{_VIDEO}{_IMAGE}{_VIDEO}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
#: Of patches every so many-th is stored.
SPARSE = 31


def video(count: int, height: int, width: int) -> np.ndarray:
    """[count, H, W, 3] uint8: waves that travel, in another direction in each channel."""
    frame, row, column = np.meshgrid(*map(np.arange, (count, height, width)), indexing="ij")
    channels = [np.sin(0.9 * row * a + 0.7 * column * b + 1.1 * frame) for a, b in ((1, 0.2), (0.3, 1), (-0.5, 0.8))]
    return np.rint(127.5 + 127.5 * np.stack(channels, axis=-1)).astype(np.uint8)


def image() -> np.ndarray:
    """[H, W, 3] uint8: the image between the videos."""
    return 255 - video(3, 24, 16)[2]


def timed(count: int, height: int, width: int, rate: float) -> list[tuple[float, np.ndarray]]:
    """The frames of a video with their times in seconds."""
    return [(place / rate, frame) for place, frame in enumerate(video(count, height, width))]
