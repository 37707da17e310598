"""What becomes of an image's pixels: resized with Pillow's weights, cropped, normalized, cut into patches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from PIL import Image

from edgellm.kernels.images.contract import WEIGHT_BITS
from edgellm.kernels.images.twin import normalized_patches

#: Larger images are resized on the host: cameras deliver less, and buffers stay small.
MAXIMUM_PIXELS = 4 << 20

Size = tuple[int, int]  # height, width in pixels
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Normalization:
    """(x * `rescale_factor` - mean) / standard deviation of each channel, or less where `None` says so."""

    rescale_factor: float | None
    mean: tuple[float, float, float] | None
    standard_deviation: tuple[float, float, float] | None

    @cached_property
    def table(self) -> np.ndarray:
        """What each value of each channel becomes: [3, 256] float32, read-only.

        In the order and the precision of the published processors: scaled in float64, then float32.
        """
        values = np.arange(256, dtype=np.float64)
        if self.rescale_factor is not None:
            values = values * self.rescale_factor
        table = np.repeat(values.astype(np.float32)[None], 3, axis=0)
        if self.mean is not None and self.standard_deviation is not None:
            mean, deviation = (np.array(each, np.float32)[:, None] for each in (self.mean, self.standard_deviation))
            table = (table - mean) / deviation
        table.setflags(write=False)
        return table


@dataclass(frozen=True)
class ImageLayout:
    """How the pixels of an image of one size become the rows that its vision encoder takes.

    In this order: padded to a square with `square_colour` around it (None: not), resized to `resized` with Pillow's
    filter `resample`, the middle of `crop` taken (None: all; black where that is larger), normalized, and cut into
    `patch_size` x `patch_size` patches, whose remainder on the right and below is left out. `merge_size` x `merge_size`
    neighbours stand one behind the other; every patch holds its channels, of these `temporal_patch_size` frames (an
    image's are equal), of these rows and columns.
    """

    resized: Size
    resample: int
    normalization: Normalization
    patch_size: int
    merge_size: int = 1
    temporal_patch_size: int = 1
    crop: Size | None = None
    square_colour: Colour | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        height, width = self.crop or self.resized
        return 1, height // self.patch_size, width // self.patch_size

    @property
    def patches(self) -> int:
        """N: how many rows."""
        return math.prod(self.grid)

    @property
    def patch_elements(self) -> int:
        """E: elements of a row."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def used_part(self) -> tuple[slice, slice] | None:
        """Which rows and columns of the resized image become patches; None where something is added around it."""
        if self.square_colour is not None:
            return None
        _, *patches = self.grid
        parts = []
        for edge, cropped, count in zip(self.resized, self.crop or self.resized, patches, strict=True):
            if cropped > edge:
                return None
            first = (edge - cropped) // 2
            parts.append(slice(first, first + count * self.patch_size))
        return parts[0], parts[1]

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """The rows [N, E] float32 of an image [H, W, 3] uint8, or of a video's frames [F, H, W, 3], by Pillow and
        NumPy."""
        if pixels.ndim == 4:
            alone = replace(self, temporal_patch_size=1)
            frames = [alone.apply(frame).reshape(self.patches, 3, -1) for frame in pixels]
            return np.stack(frames, axis=2).reshape(self.patches, -1)
        image = Image.fromarray(pixels)
        if self.square_colour is not None:
            image = _padded_to_square(image, self.square_colour)
        height, width = self.resized
        resized = np.asarray(image.resize((width, height), self.resample))
        if self.crop is not None:
            resized = _centre(resized, self.crop)
        return self.rows_of(resized)

    def rows_of(self, resized: np.ndarray) -> np.ndarray:
        """The rows [N, E] float32 of an image that was resized, and cropped."""
        _, rows, columns = self.grid
        used = resized[: rows * self.patch_size, : columns * self.patch_size]
        table = self.normalization.table
        return normalized_patches(used, table, self.patch_size, self.merge_size, self.temporal_patch_size)


def _padded_to_square(image: Image.Image, colour: Colour) -> Image.Image:
    side = max(image.size)
    if image.size == (side, side):
        return image
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _centre(pixels: np.ndarray, size: Size) -> np.ndarray:
    """The middle `size` of `pixels` [H, W, 3], black where there is nothing; an odd remainder as published: more is
    left out below and on the right, more is black above and on the left."""
    for axis, wanted in enumerate(size):
        surplus = pixels.shape[axis] - wanted
        if surplus >= 0:
            middle = slice(surplus // 2, surplus // 2 + wanted)
            pixels = pixels[middle] if axis == 0 else pixels[:, middle]
        else:
            padding = [(0, 0)] * 3
            before = (1 - surplus) // 2
            padding[axis] = (before, -surplus - before)
            pixels = np.pad(pixels, padding)
    return pixels


def _cubic(x: float) -> float:
    """Keys' kernel with a = -0.5 (1981)."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < 2.0 else 0.0


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


#: The filters that models are published with: how far each reaches in pixels of the smaller image, and its value
#: there. With others of Pillow's images are resized on the host.
FILTERS: dict[int, tuple[float, Callable[[float], float]]] = {
    Image.Resampling.BILINEAR: (1.0, lambda x: max(0.0, 1.0 - abs(x))),
    Image.Resampling.BICUBIC: (2.0, _cubic),
    Image.Resampling.LANCZOS: (3.0, lambda x: _sinc(x) * _sinc(x / 3.0) if -3.0 <= x < 3.0 else 0.0),
}


@lru_cache(maxsize=32)
def resampling_weights(size: int, resized: int, resample: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights of each of `resized` pixels along an axis that had `size`: the first that makes it, [resized] int32,
    and the weights of K from there on, [resized, K] int32 in units of 2^-22.

    `resample` is one of `FILTERS`. The filter is widened where the image shrinks, cut off at its borders, and its
    weights sum to one, then rounded.
    """
    starts, shares = filter_shares(size, resized, resample)
    weights = np.trunc(shares * (1 << WEIGHT_BITS) + np.copysign(0.5, shares)).astype(np.int32)
    for array in (starts, weights):
        array.setflags(write=False)
    return starts, weights


def filter_shares(size: int, resized: int, resample: int) -> tuple[np.ndarray, np.ndarray]:
    """As `resampling_weights`, the weights float64 and not rounded."""
    reach, filter_value = FILTERS[resample]
    scale = size / resized
    widening = max(scale, 1.0)
    reach *= widening
    starts = np.zeros(resized, np.int32)
    shares = np.zeros((resized, math.ceil(reach) * 2 + 1))
    for place in range(resized):
        centre = (place + 0.5) * scale
        first = max(0, int(centre - reach + 0.5))
        stop = min(size, int(centre + reach + 0.5))
        values = [filter_value((pixel - centre + 0.5) / widening) for pixel in range(first, stop)]
        total = sum(values)
        starts[place] = first
        shares[place, : len(values)] = [value / total if total else value for value in values]
    return starts, shares


@lru_cache(maxsize=32)
def resampling_axes(size: tuple[int, int], resized: tuple[int, int], resample: int) -> tuple[int, int] | None:
    """The order in which Pillow resizes the axes (0 height, 1 width) of an image; None if as neither order does.

    Releases of Pillow differ in it, and results in pixels where a hard edge overshoots, so it is asked with noise.
    """
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    expected = np.asarray(noise.resize(resized[::-1], resample))
    for first, between in ((1, (size[0], resized[1])), (0, (resized[0], size[1]))):
        found = noise.resize(between[::-1], resample).resize(resized[::-1], resample)
        if np.array_equal(np.asarray(found), expected):
            return first, 1 - first
    return None
