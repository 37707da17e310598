"""Runs the engines of a vision encoder: images in, embeddings out, on either backend; the latest are kept.

It is opened in two steps, since all engines share one scratch buffer and memory is checked once: it loads the
engines, the base runner is made and checks the memory of all, then `load` takes the weights.

On a GPU an image is one captured launch for each size of engines, captured by `load`, and nothing waits for it: a
prompt's work is enqueued behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from operator import attrgetter

import numpy as np

from edgellm.engines.backends.base import Backend, Engine, uploaded
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import EngineError, ImageError
from edgellm.engines.families.vision_config import position_table
from edgellm.engines.families.vision_encoders import vision_weights
from edgellm.engines.model.limits import EngineShape, vision_shape
from edgellm.engines.model.vision import VisionConfig, embedding_rows, vision_inputs, vision_outputs
from edgellm.engines.recently_used import RecentlyUsed
from edgellm.engines.runners.captured_steps import CapturedSteps, LoadedEngines
from edgellm.engines.runners.encoder_host import SPARE, EncoderHost
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.kernels.arrays import ITEM_SIZES, Array, leading
from edgellm.multimodal.device_patches import DevicePatches
from edgellm.multimodal.image_layout import MAXIMUM_PIXELS
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.vision_layout import Grid, VisionLayout, vision_layout

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
    buffers = (1 + SPARE) * outputs + 2 * 3 * MAXIMUM_PIXELS  # an image's pixels, and those between two resizes
    for name, (dimensions, kind) in vision_inputs(config, shape).items():
        copies = 1 if name == "patches" else 1 + _KEPT_GRIDS
        buffers += copies * math.prod(dimensions) * (item if kind == "compute" else ITEM_SIZES[kind])
    video = video_tokens * config.out_hidden_size * len(vision_outputs(config)) * item
    kept = max(min(_KEPT_IMAGES * outputs, _MOST_CACHE_BYTES), min(video, _MOST_VIDEO_BYTES))
    return {"vision weights": weights, "vision buffers": buffers, "image embeddings": kept}
