"""`VisionEncoder`, the encoder of images, and `VideoEncoder`, which encodes the parts of videos with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType

import numpy as np

from edgellm.engines.backends.base import Backend
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import at_place
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.errors import ImageError
from edgellm.media.encoders import MediaEncoder
from edgellm.media.image_text import TextOfParts
from edgellm.metrics import Metrics
from edgellm.multimodal.image_input import read_image
from edgellm.multimodal.image_processor import open_image_processor
from edgellm.multimodal.prepared_image import PreparedImage, TiledImage
from edgellm.multimodal.sources import source_of_url
from edgellm.multimodal.video import PreparedVideo, VideoProcessor
from edgellm.multimodal.vision_runner import VisionEngineRunner
from edgellm.text.messages import MediaReference
from edgellm.text.tokenizer import Tokenizer


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
        self._backend, self._metrics, self._texts = backend, metrics, texts
        # Engines of another directory are found by a backend of its own; what it computes is done when it returns.
        self._own = None
        if vision_directory is not directory:
            self._own = open_backend(backend.name, vision_directory, gpu=backend.gpu_index)
        try:
            self._runner = VisionEngineRunner(self._own or backend, vision_directory)
            self._samples = self._runner.samples
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
        if isinstance(reference.source, PreparedImage | TiledImage):
            return reference.source
        with at_place(reference.name, ImageError):
            source = source_of_url(str(reference.source), "image") if reference.is_url else reference.source
            image = self.processor.prepare(read_image(source, channels=reference.channels))
        if any(tile.sample in self._samples for tile in image.tiles):
            _ = image.digest  # perhaps it is known: then the engine's thread is not to compute it
        return image

    def written(self, image: PreparedImage | TiledImage, number: int) -> list[int]:
        """The ids of an image in a prompt, with what stands around its parts."""
        token = self.kind.token_id
        if self._texts is None:
            return [token] * image.tokens
        rows, columns, counts = image.parts
        *before, end = self._texts.around(rows, columns, len(counts) > rows * columns, number)
        parts = ([*text, *[token] * count] for text, count in zip(before, counts, strict=True))
        return [*chain.from_iterable(parts), *end]

    def encode(self, images: Sequence[PreparedImage | TiledImage]) -> list[MediaEmbeddings]:
        """The embeddings of each part of the images; those that are not known are encoded."""
        counts, tiles = self._runner, [tile for image in images for tile in image.tiles]
        hits, seconds = counts.cache_hits, counts.host.seconds
        if self._own is not None:  # memory that it writes anew may still be read
            self._backend.synchronize()
        embeddings = self._runner.encode(tiles)
        if self._own is not None:
            self._own.synchronize()
        found = {"images": len(tiles), "image_tokens": sum(tile.tokens for tile in tiles)}
        took = {"seconds": counts.host.seconds - seconds, "reused_images": counts.cache_hits - hits}
        self._metrics.staged("multimodal", **found, **took)
        return embeddings

    def close(self) -> None:
        """Free all memory; requests that are being prepared meanwhile still find the processor."""
        runner, own = self._runner, self._own
        del self._runner, self._own, self._backend
        runner.close()
        if own is not None:
            own.close()


class VideoEncoder:
    """Prepares videos, and encodes them with the encoder of `images`, which keeps the rows of each part by its frames:
    of a video that has grown, the frames that are new alone are encoded.

    Qwen2.5-VL's tokens of a video follow one another, at positions in time that seconds give; elsewhere the text
    "<0.5 seconds>" and the token of an image's beginning stand before each part, the token of its end behind it.
    """

    #: All that it takes is the other encoder's.
    memory: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, images: MediaEncoder, directory: EngineDirectory, vision_engines: EngineDirectory, tokenizer: Tokenizer
    ) -> None:
        vision = vision_engines.vision
        assert vision is not None  # for which an encoder is opened
        self.kind = directory.config.media["video"]
        self._images, self._vision, self._tokenizer = images, vision.config, tokenizer
        self._path, self._rows = vision.path, vision_engines.limits.image_rows[-1]
        self._most_tokens = directory.video_tokens

    @cached_property
    def processor(self) -> VideoProcessor:
        """How the model wants its videos. A file of another kind is the error of each request with a video: texts and
        images need it not."""
        return VideoProcessor.open(self._path, self._vision, self._vision.patches_within(self._rows))

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """There is nothing to load beside the encoder of images."""

    def prepare(self, reference: MediaReference) -> PreparedVideo:
        with at_place(reference.name, ImageError):
            source = source_of_url(str(reference.source), "video") if reference.is_url else reference.source
            return self.processor.prepare(source, reference.channels, self._most_tokens)

    def written(self, video: PreparedVideo, number: int) -> list[int]:
        """The ids of a video in a prompt, as the published processors write it in place of its token."""
        token, begin, end = self.kind.token_id, self._vision.vision_start_token_id, self._vision.vision_end_token_id
        if self._vision.tokens_per_second or begin is None or end is None:
            return [token] * video.tokens
        ids: list[int] = []
        for part, seconds in zip(video.tiles, video.seconds, strict=True):
            time = self._tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            ids += [*time, begin, *[token] * part.tokens, end]
        return ids

    def encode(self, videos: Sequence[PreparedVideo]) -> list[MediaEmbeddings]:
        """The embeddings of each part of the videos; those that are not known are encoded."""
        parts = iter(self._images.encode(videos))
        return [self._placed(next(parts), place, video) for video in videos for place in range(len(video.tiles))]

    def close(self) -> None:
        """Nothing is held."""

    def _placed(self, part: MediaEmbeddings, place: int, video: PreparedVideo) -> MediaEmbeddings:
        """The `place`-th part of a video; where its positions follow from its time, with that, which its KV rows depend
        on. In float32, as published."""
        if not self._vision.tokens_per_second or not place:
            return part
        positions = np.float32(self._vision.tokens_per_second) * np.float32(video.interval)
        moment = int(np.float32(place) * positions)
        return replace(part, moment=moment, digest=hash_bytes(f"{part.digest} {moment}".encode()))
