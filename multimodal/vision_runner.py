"""Runs the engines of a vision encoder: images in, embeddings out, on either backend; the latest are kept.

It is opened in two steps, since all engines share one scratch buffer and memory is checked once: it loads the
engines, the base runner is made and checks the memory of all, then `load` takes the weights.

On a GPU an image is one captured launch for each size of engines, captured by `load`, and nothing waits for it: a
prompt's work is enqueued behind it.

A frame of 640 x 480 pixels takes a CPU several milliseconds to resize and to reorder as float32; its bytes are a
fraction of its rows', and a GPU makes rows of them in microseconds: where that is faster, its pixels are brought there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np

from edgellm.engines.backends.base import Backend, Engine, uploaded
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError, ImageError
from edgellm.engines.families.vision_config import position_table
from edgellm.engines.families.vision_encoders import vision_weights
from edgellm.engines.formats.tensors import convert
from edgellm.engines.model.limits import EngineShape, vision_shape
from edgellm.engines.model.vision import VisionConfig, embedding_rows, vision_inputs, vision_outputs
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines
from edgellm.engines.runners.encoder_host import SPARE, EncoderHost
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.kernels.arrays import ITEM_SIZES, Array, leading
from edgellm.kernels.images.contract import PatchGrid, ResamplingTables
from edgellm.multimodal import image_layout
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.vision_layout import Grid, VisionLayout, vision_layout

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


#: Embeddings are kept of so many of the largest images, in so many bytes at most; of a video as long as the context in
#: so many, for each question about one that has grown asks for all of its rows.
_KEPT_IMAGES, _MOST_CACHE_BYTES, _MOST_VIDEO_BYTES = 64, 64 << 20, 256 << 20
#: How many grids' inputs are kept on the device: a camera has one.
_KEPT_GRIDS = 4


class VisionEngineRunner:
    """Owns engines, weights and buffers of a vision encoder, and embeddings of images seen lately. Not thread-safe.

    `memory` is what it takes in bytes, by name: for the memory plan.
    """

    def __init__(self, backend: Backend, directory: EngineDirectory) -> None:
        """Loads the engines of a directory; no weights yet. Raises EngineError where it has no vision encoder."""
        vision, image_rows = directory.vision, directory.limits.image_rows
        if vision is None:
            raise EngineError(
                f"{directory.path} has no vision encoder, so it takes no images: build it from a multimodal "
                "checkpoint, or with edgellm build CHECKPOINT ENGINE_DIR --vision VISION_DIR"
            )
        self.backend, self.config = backend, vision.config
        #: Images that were known, and that went through the engines.
        self.cache_hits, self.encoded, self.host = 0, 0, EncoderHost(backend)
        self._vision, self._image_rows = vision, image_rows
        self._shapes = [vision_shape(rows) for rows in image_rows]
        self._engines, self._steps = LoadedEngines(backend, self._shapes), CapturedSteps(backend)
        self._weights: dict[str, Array] = {}
        self._buffers: dict[str, Array] = {}
        self._grids: RecentlyUsed[Grid, tuple[VisionLayout, EngineShape, dict[str, Array]]] = RecentlyUsed(_KEPT_GRIDS)
        self._device_patches = DevicePatches(backend)
        self._position_table: np.ndarray | None = None
        #: The grid's inputs that engines find in their memory.
        self._present: dict[str, Array] = {}
        self.memory = vision_memory(vision.config, image_rows, backend.compute_dtype, directory.video_tokens)
        #: Embeddings by the digests of their content.
        self.cache: RecentlyUsed[str, MediaEmbeddings]
        self.cache = RecentlyUsed(self.memory["image embeddings"], attrgetter("nbytes"))
        #: Samples of images that were encoded: the digest of another is wanted behind its encoder, not in front of it.
        self.samples: RecentlyUsed[int, int] = RecentlyUsed(1024)

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights and allocate buffers, once memory was checked. `progress` gets bytes done and in all."""
        backend, config = self.backend, self.config
        with closing(self._vision.checkpoint()) as checkpoint:
            self._position_table = position_table(checkpoint, config, self._image_rows[-1])
            self._weights = backend.load_weights(checkpoint, vision_weights(config), progress)
        edge = self._edge(self._shapes[-1])
        self._buffers = {name: backend.zeros((math.prod(size),), kind) for name, (size, kind) in edge.items()}
        for shape in self._shapes if backend.fixed_shapes else ():  # before one waits for it
            least = config.image_side or config.spatial_merge_size
            layout = vision_layout(config, (1, least, least), self._position_table)
            for name, values in layout.padded(config, shape).items():
                backend.upload(leading(self._buffers[name], values.shape), values)
            self._steps.plan(shape, partial(dict, vision=self._engine(shape).enqueue))
            self._steps.capture_next()

    def encode(self, images: Sequence[PreparedImage]) -> list[MediaEmbeddings]:
        """The embeddings of each image, in order; those of an image whose digest is known are not computed again.

        Raises ImageError for an image that is too large for the engines or that was prepared for another model, and
        EngineError before `load` and after `close`.
        """
        if not self._weights:
            raise EngineError("the vision encoder has no weights: call load() first")
        self.host.count()  # the work of those before is done by now
        seen = [image.digest for image in images if image.sample in self.samples]
        known = {digest: self.cache.find(digest) for digest in seen}  # before others push them out
        embeddings: list[MediaEmbeddings] = []
        for image in images:
            found = known.get(image.digest) if image.sample in self.samples else None
            self.cache_hits += found is not None
            if found is None:
                with self.host.counted():
                    found = known[image.digest] = self._encode(image)
                self.samples.keep(image.sample, image.sample)
                self.cache.keep(image.digest, found)
            embeddings.append(found)
        return embeddings

    def close(self) -> None:
        """Let go of engines, weights, buffers and embeddings."""
        self.cache.clear()
        self._steps.clear()
        self._engines.clear()
        self._grids.clear()
        self._device_patches.close()
        self.host = EncoderHost(self.backend)
        self._weights, self._buffers, self._present = {}, {}, {}

    def _encode(self, image: PreparedImage) -> MediaEmbeddings:
        layout, shape, inputs = self._inputs_of(image.grid)
        if image.tokens != layout.tokens:
            raise ImageError(
                f"an image was prepared to be {image.tokens} tokens, the vision encoder makes {layout.tokens} of "
                f"{image.grid[1]} x {image.grid[2]} patches: prepare it with this model's processor"
            )
        # What stands behind the image's rows is finite, and masked.
        patches = (image.grid[1] * image.grid[2], self.config.patch_elements)
        self._device_patches.write(image, leading(self._buffers["patches"], patches))
        engine = self._engine(shape)
        if inputs is not self._present:
            for name, array in inputs.items():
                self.backend.copy(leading(self._buffers[name], array.shape), array)
            self._present = inputs
        self._steps.run(shape, {"vision": engine.enqueue})
        embeddings = self._embeddings(image, layout.tokens)
        self.encoded += 1
        return embeddings

    def _inputs_of(self, grid: Grid) -> tuple[VisionLayout, EngineShape, dict[str, Array]]:
        """Layout, engine shape and what the engine's inputs are that depend on the grid alone."""
        found = self._grids.find(grid)
        if found is None:
            layout = vision_layout(self.config, grid, self._position_table)
            shape = vision_shape(self._rows_for(layout.rows, grid))
            padded = layout.padded(self.config, shape)
            arrays = {name: uploaded(self.backend, values) for name, values in padded.items()}
            found = self._grids.keep(grid, (layout, shape, arrays))
        return found

    def _rows_for(self, rows: int, grid: Grid) -> int:
        size = next((size for size in self._image_rows if size >= rows), None)
        if size is None:
            raise ImageError(
                f"an image of {grid[1]} x {grid[2]} patches takes {rows} rows of the vision encoder (windows are "
                f"padded), the engines have {self._image_rows[-1]}: take a smaller image, or one less elongated, or "
                "build with a larger --max-image-patches"
            )
        return size if self.backend.fixed_shapes else rows

    def _engine(self, shape: EngineShape) -> Engine:
        """The engine for a shape, whose inputs and outputs are in memory that no grid changes."""

        def bindings() -> dict[str, Array]:
            edge = self._edge(shape).items()
            return self._weights | {name: leading(self._buffers[name], size) for name, (size, _) in edge}

        return self._engines.bound(shape, slice(0, 1), bindings, keep=False)

    def _edge(self, shape: EngineShape) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each input and output."""
        size = (1, embedding_rows(self.config, shape), self.config.out_hidden_size)
        return {**vision_inputs(self.config, shape), **dict.fromkeys(vision_outputs(self.config), (size, "compute"))}

    def _embeddings(self, image: PreparedImage, tokens: int) -> MediaEmbeddings:
        """The outputs' first rows in memory of their own, as the next image overwrites the buffers."""
        names, hidden = vision_outputs(self.config), self.config.out_hidden_size
        memory = self.host.empty((len(names), tokens, hidden))
        rows = [memory[place : place + 1].reshape(tokens, hidden) for place in range(len(names))]
        for name, own in zip(names, rows, strict=True):
            self.backend.copy(own, leading(self._buffers[name], (tokens, hidden)))
        return MediaEmbeddings(rows[0], tuple(rows[1:]), image.digest, image.grid, image.runs)


def vision_memory(
    config: VisionConfig, image_rows: tuple[int, ...], dtype: str, video_tokens: int = 0
) -> dict[str, int]:
    """Memory in bytes, by name: weights, buffers for the largest image, inputs of the grids kept, embeddings kept."""
    item, shape = ITEM_SIZES[dtype], vision_shape(image_rows[-1])
    weights = sum(math.prod(spec.shape) for spec in vision_weights(config)) * item
    outputs = len(vision_outputs(config)) * embedding_rows(config, shape) * config.out_hidden_size * item
    buffers = (1 + SPARE) * outputs + 2 * 3 * image_layout.MAXIMUM_PIXELS  # an image's, and those between two resizes
    for name, (dimensions, kind) in vision_inputs(config, shape).items():
        copies = 1 if name == "patches" else 1 + _KEPT_GRIDS
        buffers += copies * math.prod(dimensions) * (item if kind == "compute" else ITEM_SIZES[kind])
    video = video_tokens * config.out_hidden_size * len(vision_outputs(config)) * item
    kept = max(min(_KEPT_IMAGES * outputs, _MOST_CACHE_BYTES), min(video, _MOST_VIDEO_BYTES))
    return {"vision weights": weights, "vision buffers": buffers, "image embeddings": kept}
