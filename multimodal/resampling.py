"""Which pixels make one when an image is resized, as Pillow has it: the tables of the image kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from PIL import Image

from edgellm.kernels.image_interface import WEIGHT_BITS


def _box(x: float) -> float:
    return 1.0 if -0.5 < x <= 0.5 else 0.0


def _triangle(x: float) -> float:
    return max(0.0, 1.0 - abs(x))


def _hamming(x: float) -> float:
    x = abs(x)
    if x == 0.0:
        return 1.0
    if x >= 1.0:
        return 0.0
    x *= math.pi
    return math.sin(x) / x * (0.54 + 0.46 * math.cos(x))


def _cubic(x: float) -> float:
    """Keys' kernel with a = -0.5 (1981)."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < 2.0 else 0.0


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3.0) if -3.0 <= x < 3.0 else 0.0


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


#: Pillow's filter -> how far it reaches in pixels of the smaller image, and its value there.
FILTERS: dict[int, tuple[float, Callable[[float], float]]] = {
    Image.Resampling.BOX: (0.5, _box),
    Image.Resampling.BILINEAR: (1.0, _triangle),
    Image.Resampling.HAMMING: (1.0, _hamming),
    Image.Resampling.BICUBIC: (2.0, _cubic),
    Image.Resampling.LANCZOS: (3.0, _lanczos),
}


@lru_cache(maxsize=32)
def resampling_weights(size: int, resized: int, resample: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `resized` pixels along an axis that had `size`: the first that makes it, [resized] int32, and the
    weights of K from there on, [resized, K] int32 in units of 2^-22.

    `resample` is one of `FILTERS`. The filter is widened where the image shrinks, cut off at its borders, and its
    weights sum to one, then rounded.
    """
    reach, filter_value = FILTERS[resample]
    scale = size / resized
    widening = max(scale, 1.0)
    reach *= widening
    starts = np.zeros(resized, np.int32)
    weights = np.zeros((resized, math.ceil(reach) * 2 + 1), np.int32)
    for place in range(resized):
        centre = (place + 0.5) * scale
        first = max(0, int(centre - reach + 0.5))
        stop = min(size, int(centre + reach + 0.5))
        values = [filter_value((pixel - centre + 0.5) / widening) for pixel in range(first, stop)]
        total = sum(values)
        starts[place] = first
        for index, value in enumerate(values):
            share = value / total if total else value
            weights[place, index] = int(share * (1 << WEIGHT_BITS) + math.copysign(0.5, share))
    for array in (starts, weights):
        array.setflags(write=False)
    return starts, weights


@lru_cache(maxsize=32)
def resampling_axes(size: tuple[int, int], resized: tuple[int, int], resample: int) -> tuple[int, int] | None:
    """In which order Pillow resizes the axes (0 height, 1 width) of an image; None if as neither order does.

    Releases of Pillow differ in it, and results in pixels where a hard edge overshoots, so it is asked with noise.
    """
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    expected = np.asarray(noise.resize(resized[::-1], resample))
    for first, between in ((1, (size[0], resized[1])), (0, (resized[0], size[1]))):
        found = noise.resize(between[::-1], resample).resize(resized[::-1], resample)
        if np.array_equal(np.asarray(found), expected):
            return first, 1 - first
    return None
