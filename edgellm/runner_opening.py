"""Opens what an engine directory holds as a runner of the decoding loop: base model, draft model, LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.base import Backend
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.speculation.eagle_runner import EagleRunner
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.lora.slots import require_adapters
from edgellm.errors import RequestError
from edgellm.decoding.runner import PlainRunner, Runner


def open_runner(
    backend: Backend,
    directory: EngineDirectory,
    drafting: DraftingConfig | None,
    adapters: Mapping[str, LoraAdapter] | None,
    progress: Callable[[int, int], None] | None,
    beside: Mapping[str, int] | None = None,
) -> Runner:
    """A runner with the directory's draft model if there is `drafting`; RequestError where it has none.

    A vision encoder takes `beside` (bytes by name).
    """
    config, limits = directory.config, directory.limits
    if drafting is None:
        with closing(directory.checkpoint()) as checkpoint:
            base = BaseEngineRunner(backend, config, limits, checkpoint, progress, adapters=adapters, beside=beside)
            return PlainRunner(base)
    if directory.draft is None:
        raise RequestError(
            f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
            "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), or leave drafting out"
        )
    drafting.plan(directory.limits)  # refused before anything is loaded
    return EagleRunner.open(backend, directory, progress, adapters, beside=beside)


def read_adapters(
    directory: EngineDirectory, sources: Mapping[str, str | Path] | None
) -> dict[str, LoraAdapter] | None:
    """The directory's adapters and those of `sources`, or None where none is wanted, or the engines take none."""
    if sources is None or not (directory.limits.has_lora or sources):
        return None
    require_adapters(directory.limits)
    described = {name: adapter.path for name, adapter in directory.adapters.items()}
    return {name: LoraAdapter.read(path, directory.config) for name, path in (described | dict(sources)).items()}
