"""`VideoEncoder`: videos by the vision encoder of the model's images, which encodes their parts as it does images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.formats.digests import hash_bytes
from edgellm.engines.runners.media import MediaEmbeddings
from edgellm.errors import ImageError
from edgellm.media.encoders import MediaEncoder
from edgellm.multimodal.sources import source_of_url
from edgellm.multimodal.video import PreparedVideo, VideoProcessor
from edgellm.text.messages import MediaReference
from edgellm.text.tokenizer import Tokenizer


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
        largest = vision.config.patches_within(vision_engines.limits.image_rows[-1])
        self._open_processor = partial(VideoProcessor.open, vision.path, vision.config, largest)
        self._images, self._vision, self._tokenizer = images, vision.config, tokenizer
        self._most_tokens = directory.video_tokens

    @cached_property
    def processor(self) -> VideoProcessor:
        """How the model wants its videos. A file of another kind is the error of each request with a video: texts and
        images need it not."""
        return self._open_processor()

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """There is nothing to load beside the encoder of images."""

    def prepare(self, reference: MediaReference) -> PreparedVideo:
        """Read and prepare a video. Any thread may call it; ImageError names it."""
        try:
            source = source_of_url(str(reference.source), "video") if reference.is_url else reference.source
            return self.processor.prepare(source, reference.channels, self._most_tokens)
        except ImageError as error:
            raise ImageError(f"{reference.name}: {error}") from error

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
