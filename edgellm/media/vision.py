"""`VisionEncoder`: the encoder of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.errors import ImageError
from edgellm.media.image_text import TextOfParts
from edgellm.metrics import Metrics
from edgellm.multimodal.image_input import read_image
from edgellm.multimodal.image_processor import open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage
from edgellm.multimodal.sources import source_of_url
from edgellm.multimodal.tiles import TiledImage
from edgellm.multimodal.vision_runner import VisionEngineRunner
from edgellm.text.messages import MediaReference


class VisionEncoder:
    """The vision encoder of a model: prepares images and encodes them.

    `directory` is the language model's, `vision_directory` the one with the vision engines (often the same). It is
    opened in two steps, since memory is checked once: then the base runner is made with `memory`, then `load`.
    """

    def __init__(
        self,
        backend: Backend,
        directory: EngineDirectory,
        vision_directory: EngineDirectory,
        metrics: Metrics,
        texts: TextOfParts | None = None,
    ) -> None:
        """`texts` are those around the parts of images, where these have several."""
        vision = vision_directory.vision
        assert vision is not None  # for which an encoder is opened
        largest = vision.config.patches_within(vision_directory.limits.image_rows[-1])
        self.kind = directory.config.image_kind(vision.config.image_token_id)
        if self.kind.varies:
            largest = min(largest, self.kind.tokens * vision.config.merge_patches)
        self.processor = open_image_processor(vision.path, vision.config, largest)
        self._metrics, self._texts = metrics, texts
        # Engines of another directory are found by a backend of its own; what it computes is done when it returns.
        self._own = None
        if vision_directory is not directory:
            self._own = open_backend(backend.name, vision_directory, gpu=backend.gpu_index)
        try:
            self._runner = VisionEngineRunner.open(self._own or backend, vision_directory)
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise

    @property
    def memory(self) -> Mapping[str, int]:
        """What it takes in bytes, by name."""
        return self._runner.memory

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights. Raises DeviceMemoryError where a backend of its own has no room for its engines."""
        if self._own is not None:  # nobody else gives its engines their scratch buffer
            self._own.check_memory(MemoryPlan({**self.memory, "engine scratch": self._own.scratch_bytes()}))
        self._runner.load(progress)

    def prepare(self, reference: MediaReference) -> PreparedImage | TiledImage:
        """Read and prepare an image. Any thread may call it; ImageError names the image."""
        try:
            source = source_of_url(str(reference.source), "image") if reference.is_url else reference.source
            return self.processor.prepare(read_image(source, channels=reference.channels))
        except ImageError as error:
            raise ImageError(f"{reference.name}: {error}") from error

    def written(self, image: PreparedImage | TiledImage, number: int) -> list[int]:
        """The ids of an image in a prompt, with what stands around its parts."""
        token = self.kind.token_id
        if self._texts is None:
            return [token] * image.tokens
        if isinstance(image, PreparedImage):
            counts, rows, columns = image.runs, len(image.runs), 1
        else:
            counts, (rows, columns) = tuple(tile.tokens for tile in image.tiles), image.grid
        *before, end = self._texts.around(rows, columns, len(counts) > rows * columns, number)
        parts = ([*text, *[token] * count] for text, count in zip(before, counts, strict=True))
        return [*chain.from_iterable(parts), *end]

    def encode(self, images: Sequence[PreparedImage | TiledImage]) -> list[MediaEmbeddings]:
        """The embeddings of each part of the images; those that are not known are encoded."""
        counts, tiles = self._runner.metrics, [tile for image in images for tile in image.tiles]
        hits, seconds = counts.cache_hits, counts.seconds
        embeddings = self._runner.encode(tiles)
        self._metrics.encoded(
            len(tiles), sum(tile.tokens for tile in tiles), counts.seconds - seconds, counts.cache_hits - hits
        )
        return embeddings

    def close(self) -> None:
        """Free all memory; requests that are being prepared meanwhile still find the processor."""
        runner, own = self._runner, self._own
        del self._runner, self._own
        runner.close()
        if own is not None:
            own.close()
