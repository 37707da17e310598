"""The vision encoder of a model: opened with it, or, where nothing is made ready before, with the first image."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.errors import EngineDirectoryError, closed_error
from edgellm.serving.metrics import Metrics
from edgellm.text.messages import ImageReference

if TYPE_CHECKING:
    from edgellm.engines.runners.prompt_images import PromptImages
    from edgellm.multimodal.image_processor import PreparedImage
    from edgellm.vision.encoder import Eyes


class LateEyes:
    """See `Eyes`, which `open_eyes` makes and loads nothing of; any thread may be the first to need them.

    For a backend that makes nothing ready before it computes. What is wrong with the vision model's files, or that
    they find no memory, is the error of the first request with an image, and of each one after it.
    """

    #: Counted when they open.
    memory: Mapping[str, int] = MappingProxyType({})

    def __init__(self, open_eyes: Callable[[], Eyes], backend: Backend, image_token_id: int) -> None:
        self._open_eyes, self._backend, self._image_token_id = open_eyes, backend, image_token_id
        self._eyes: Eyes | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Nothing yet."""

    def prepare(self, references: Sequence[ImageReference]) -> Sequence[PreparedImage]:
        """See `Eyes.prepare`."""
        return self._opened().prepare(references) if references else ()

    def expand(self, prompt_ids: Sequence[int], images: Sequence[PreparedImage]) -> list[int]:
        """See `Eyes.expand`."""
        if not images and self._image_token_id not in prompt_ids:
            return list(prompt_ids)
        return self._opened().expand(prompt_ids, images)

    def look(self, prompt_ids: Sequence[int], images: Sequence[PreparedImage]) -> PromptImages:
        """See `Eyes.look`."""
        return self._opened().look(prompt_ids, images)

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            self._is_closed = True
            if self._eyes is not None:
                self._eyes.close()
                self._eyes = None

    def _opened(self) -> Eyes:
        with self._lock:
            if self._is_closed:  # as a request may find that was being prepared meanwhile
                raise closed_error()
            if self._eyes is None:
                eyes = self._open_eyes()
                try:
                    self._backend.check_memory(MemoryPlan({**eyes.memory}))
                    eyes.load()
                except BaseException:
                    eyes.close()
                    raise
                self._eyes = eyes
            return self._eyes


def open_eyes(
    backend: Backend, directory: EngineDirectory, seen_with: EngineDirectory, metrics: Metrics
) -> Eyes | LateEyes | None:
    """The eyes of a model, with the vision engines of `seen_with`; on a GPU they open at once, since its memory is
    planned as a whole."""
    vision = seen_with.vision
    if vision is None:
        return None

    def opened() -> Eyes:
        from edgellm.vision.encoder import Eyes

        return Eyes(backend, directory, seen_with, metrics)

    return LateEyes(opened, backend, vision.config.image_token_id) if backend.computes_at_once else opened()


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
