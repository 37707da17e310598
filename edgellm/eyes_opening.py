"""Whether a model sees, and with which engines; its eyes, opened at once or with the first image."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineDirectoryError
from edgellm.late_eyes import LateEyes
from edgellm.serving.metrics import Metrics

if TYPE_CHECKING:
    from edgellm.vision.encoder import Eyes


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
