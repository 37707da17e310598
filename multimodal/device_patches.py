"""Brings an image into a vision engine's memory: its pixels, and the rest there, where that is faster.

A frame of 640 x 480 pixels takes a CPU several milliseconds to resize and to reorder as float32; its bytes are a
fraction of its rows', and a GPU makes rows of them in microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from edgellm.engines.backends.base import Backend, uploaded
from edgellm.engines.errors import ImageError
from edgellm.engines.formats.tensors import convert
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.encoder_host import EncoderHost
from edgellm.kernels.arrays import Array, leading
from edgellm.kernels.images.contract import PatchGrid, ResamplingTables
from edgellm.multimodal import image_layout
from edgellm.multimodal.prepared_image import PreparedImage

#: So many image sizes keep their tables on the device: a camera has one.
_KEPT_TABLES = 4

_Key = tuple[image_layout.Size, image_layout.ImageLayout]


@dataclass(frozen=True)
class _Tables:
    """What both passes over images of one size need, and the values."""

    first: ResamplingTables
    second: ResamplingTables
    values: Array
    between: image_layout.Size


class DevicePatches:
    """Writes the rows of images into memory of one backend. Not thread-safe.

    The first image of a size is made on the host: finding out how Pillow resizes that size takes longer than doing it,
    and pays only for a camera's frames.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._host = backend, EncoderHost(backend)
        self._tables: RecentlyUsed[_Key, _Tables | None] = RecentlyUsed(_KEPT_TABLES)
        self._latest: deque[_Key] = deque(maxlen=_KEPT_TABLES)
        self._buffers: dict[str, Array] = {}

    def write(self, image: PreparedImage, target: Array) -> None:
        """Set `target` [N, E] compute to the image's rows, in order with the backend's other work.

        Raises ImageError for an image that has others.
        """
        tables = None if self._backend.computes_at_once else self._tables_of(image.size, image.layout)
        found = image.patches.shape if tables is None else (image.layout.patches, image.layout.patch_elements)
        if found != target.shape:
            raise ImageError(
                f"an image was prepared as {list(found)}, the vision encoder takes {list(target.shape)}: prepare it "
                "with this model's processor"
            )
        if tables is None:
            rows, _ = convert(np.ascontiguousarray(image.patches, np.float32), "float32", self._backend.compute_dtype)
            self._backend.upload(target, rows)
            return
        kernels, layout = self._backend.image_kernels, image.layout
        assert image.pixels is not None  # which images of this size keep
        pixels = self._room("pixels", (*image.size, 3))
        between = self._room("between", (*tables.between, 3))
        for place, frame in enumerate(image.pixels.reshape(-1, *pixels.shape)):
            self._host.upload("pixels", pixels, frame)
            kernels.resample(pixels, tables.first, between)
            grid = PatchGrid(layout.patch_size, layout.merge_size, place)
            kernels.resample_to_patches(between, tables.second, tables.values, grid, target)

    def close(self) -> None:
        """Let go of all memory."""
        self._tables.clear()
        self._buffers.clear()
        self._host = EncoderHost(self._backend)

    def _room(self, name: str, shape: tuple[int, ...]) -> Array:
        """The memory of a name, uint8, which grows with the images."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < size:
            self._buffers[name] = self._backend.empty((size,), "uint8")
        return leading(self._buffers[name], shape)

    def _tables_of(self, size: image_layout.Size, layout: image_layout.ImageLayout) -> _Tables | None:
        """The tables for images of a size; None for its first image, and for what kernels do not do as Pillow does."""
        key = size, layout
        if key in self._tables:
            return self._tables.find(key)
        if key not in self._latest:
            self._latest.append(key)
            return None
        return self._tables.keep(key, self._new_tables(size, layout))

    def _new_tables(self, size: image_layout.Size, layout: image_layout.ImageLayout) -> _Tables | None:
        used = layout.used_part()
        if math.prod(size) > image_layout.MAXIMUM_PIXELS or used is None or layout.resample not in image_layout.FILTERS:
            return None
        axes = image_layout.resampling_axes(size, layout.resized, layout.resample)
        if axes is None:
            return None
        passes = []
        for axis in axes:
            starts, shares = image_layout.resampling_weights(size[axis], layout.resized[axis], layout.resample)
            first, weights = (uploaded(self._backend, table[used[axis]]) for table in (starts, shares))
            passes.append(ResamplingTables(first, weights, axis))
        between = list(size)
        between[axes[0]] = passes[0].starts.shape[0]
        values = uploaded(self._backend, layout.normalization.table)
        return _Tables(passes[0], passes[1], values, (between[0], between[1]))
