"""Eyes that open when the first image comes: what they need takes a tenth of the way to a first word without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from edgellm.engines.backends.base import Backend
from edgellm.engines.model.memory_plan import MemoryPlan
from edgellm.errors import closed_error
from edgellm.text.message_parts import ImageReference

if TYPE_CHECKING:
    from edgellm.engines.runners.prompt_images import PromptImages
    from edgellm.vision.encoder import Eyes
    from edgellm.multimodal.image_processor import PreparedImage


class LateEyes:
    """See `edgellm.vision.encoder.Eyes`, which `open_eyes` makes and loads nothing of; any thread may be the first to need them.

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
