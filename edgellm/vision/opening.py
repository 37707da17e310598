"""The vision encoder of a model: opened with it, or, where nothing is made ready before, with the first image."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edgellm.defaults import ModelDefaults
from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.errors import EngineDirectoryError, closed_error
from edgellm.metrics import Metrics
from edgellm.text.messages import ImageReference
from edgellm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgellm.engines.runners.media import PromptMedia
    from edgellm.multimodal.image_processor import PreparedImage
    from edgellm.vision.encoder import VisionEncoder


class LazyVisionEncoder:
    """See `VisionEncoder`, which `open_vision_encoder` makes and loads nothing of; any thread may need it first.

    For a backend that makes nothing ready before it computes. What is wrong with the vision model's files, or that
    they find no memory, is the error of the first request with an image, and of each one after it.
    """

    #: Counted when they open.
    memory: Mapping[str, int] = MappingProxyType({})

    def __init__(self, open_vision_encoder: Callable[[], VisionEncoder], backend: Backend, image_token_id: int) -> None:
        self._image_token_id = image_token_id
        #: What opens it, and where; None when it is closed: whoever holds it then holds no backend.
        self._opening: tuple[Callable[[], VisionEncoder], Backend] | None = (open_vision_encoder, backend)
        self._vision: VisionEncoder | None = None
        self._lock = threading.Lock()

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing yet."""

    def prepare(self, references: Sequence[ImageReference]) -> Sequence[PreparedImage]:
        return self._opened().prepare(references) if references else ()

    def expand(self, prompt_ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
        if not images and self._image_token_id not in prompt_ids:
            return list(prompt_ids)
        return self._opened().expand(prompt_ids, images)

    def encode(self, prompt_ids: Sequence[int], images: Sequence[PreparedImage]) -> PromptMedia:
        return self._opened().encode(prompt_ids, images)

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            self._opening = None
            if self._vision is not None:
                self._vision.close()
                self._vision = None

    def _opened(self) -> VisionEncoder:
        with self._lock:
            if self._opening is None:  # as a request may find that was being prepared meanwhile
                raise closed_error()
            if self._vision is None:
                open_vision_encoder, backend = self._opening
                vision = open_vision_encoder()
                try:
                    backend.check_memory(MemoryPlan({**vision.memory}))
                    vision.load()
                except BaseException:
                    vision.close()
                    raise
                self._vision = vision
            return self._vision


def open_vision_encoder(
    backend: Backend, directory: EngineDirectory, vision_engines: EngineDirectory, metrics: Metrics
) -> VisionEncoder | LazyVisionEncoder | None:
    """The vision encoder of a model, with the engines of the directory `vision_engines`, None where that has none.

    On a GPU it opens at once, since memory is planned as a whole there.
    """
    vision = vision_engines.vision
    if vision is None:
        return None

    def opened() -> VisionEncoder:
        from edgellm.vision.encoder import VisionEncoder

        return VisionEncoder(backend, directory, vision_engines, metrics)

    return LazyVisionEncoder(opened, backend, vision.config.image_token_id) if backend.computes_at_once else opened()


def image_writer(directory: EngineDirectory, tokenizer: Tokenizer) -> Callable[[str], str]:
    """What makes of a text, a rendered chat template or a raw prompt, one that has an image's token for each image.

    Templates of Gemma 3 write the token before an image alone, for which the published processor writes two line feeds,
    that token, those of the image, the one behind it, and two line feeds: they become tokens together with the text
    around them. One that is followed by the image's token is left as it is. Raises EngineDirectoryError where the
    tokenizer lacks these tokens.
    """
    vision = directory.vision
    if vision is None or vision.config.family != "gemma3":
        return str
    ids = (vision.config.vision_start_token_id, vision.config.image_token_id, vision.config.vision_end_token_id)
    before, image, behind = (None if each is None else tokenizer.id_to_token(each) for each in ids)
    if before is None or image is None or behind is None:
        raise EngineDirectoryError(
            f"{directory.path}: the tokenizer has not the tokens {', '.join(map(str, ids))}, which stand for the "
            "beginning of an image, for a part of it and for its end: take tokenizer.json as it was published"
        )
    marker = re.compile(f"{re.escape(before)}(?!{re.escape(image)})")
    written = f"\n\n{before}{image}{behind}\n\n"
    return lambda text: marker.sub(lambda match: written, text)


def open_texts(directory: EngineDirectory, vision_engines: EngineDirectory | None) -> tuple[Tokenizer, ModelDefaults]:
    """The tokenizer of a directory, which writes images where there are `vision_engines`, and the model's defaults;
    EngineDirectoryError for files that are wrong."""
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    if vision_engines is not None:
        tokenizer.takes_images, tokenizer.write_images = True, image_writer(vision_engines, tokenizer)
    return tokenizer, ModelDefaults(directory.path)


def vision_directory(directory: EngineDirectory, path: str | Path | None) -> EngineDirectory | None:
    """The directory with the vision engines, None without; EngineDirectoryError where `path` has none."""
    found = directory if path is None else EngineDirectory.open(Path(path))
    if found.vision is not None and found.limits.image_rows:
        rows, hidden = found.vision.config.out_hidden_size, directory.config.hidden_size
        if rows != hidden:
            raise EngineDirectoryError(
                f"the vision model of {found.path} makes embeddings of {rows}, the language model of {directory.path} "
                f"has a hidden size of {hidden}: take its own"
            )
        return found
    if path is not None:
        raise EngineDirectoryError(f"{path} has no vision model: leave multimodal_engine_directory out, or build one")
    return None
