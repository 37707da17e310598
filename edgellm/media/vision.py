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
from edgellm.metrics import Metrics
from edgellm.multimodal.image_input import image_of_url, read_image
from edgellm.multimodal.image_processor import PreparedImage, open_image_processor
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
        token_ids: Callable[[Sequence[str]], Sequence[int]] = lambda texts: (),
    ) -> None:
        """`token_ids` gives the ids of the tokens by name that stand among those of images."""
        vision = vision_directory.vision
        assert vision is not None  # for which an encoder is opened
        largest = vision.config.patches_within(vision_directory.limits.image_rows[-1])
        self.processor = open_image_processor(vision.path, vision.config, largest)
        self.kind = directory.config.image_kind(vision.config.image_token_id)
        self._metrics, self._row_ends = metrics, token_ids(self.processor.row_ends)
        # Engines of another directory are found by a backend of its own; what it computes is done when it returns.
        self._own = None if vision_directory is directory else open_backend(backend.name, vision_directory)
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

    def prepare(self, reference: MediaReference) -> PreparedImage:
        """Read and prepare an image. Any thread may call it; ImageError names the image."""
        try:
            source = image_of_url(str(reference.source)) if reference.is_url else reference.source
            return self.processor.prepare(read_image(source, channels=reference.channels))
        except ImageError as error:
            raise ImageError(f"{reference.name}: {error}") from error

    def written(self, image: PreparedImage) -> list[int]:
        """The ids of an image in a prompt, with the tokens that its processor has among them."""
        token = self.kind.token_id
        if not image.runs:
            return [token] * image.tokens
        row_end, image_end = self._row_ends
        rows = chain.from_iterable([*[token] * columns, row_end] for columns in image.runs)
        return [*list(rows)[:-1], image_end]

    def encode(self, images: Sequence[PreparedImage]) -> list[MediaEmbeddings]:
        """The embeddings of images; those that are not known are encoded."""
        counts = self._runner.metrics
        hits, seconds = counts.cache_hits, counts.seconds
        embeddings = self._runner.encode(images)
        self._metrics.encoded(
            len(images), sum(image.tokens for image in images), counts.seconds - seconds, counts.cache_hits - hits
        )
        return embeddings

    def close(self) -> None:
        """Free all memory; requests that are being prepared meanwhile still find the processor."""
        runner, own = self._runner, self._own
        del self._runner, self._own
        runner.close()
        if own is not None:
            own.close()
