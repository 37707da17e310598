"""How the engines of a directory are opened as the decoding loop needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from edgellm.drafting.config import DraftingConfig
from edgellm.engines.backends.base import Backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.lora.adapter import LoraAdapter
from edgellm.engines.runners.adapter_slots import require_adapters
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.engines.speculation.tree_verification import GIVEN_SIZES, given_tree_bytes
from edgellm.errors import DeviceMemoryError, RequestError


def open_runner(
    backend: Backend,
    directory: EngineDirectory,
    drafting: DraftingConfig | None,
    adapters: Mapping[str, LoraAdapter] | None,
    progress: Callable[[int, int], None] | None,
    vision_memory: Mapping[str, int] | None = None,
) -> DecodingRunner:
    """A runner with the directory's draft model if the `drafting` needs one; RequestError where it has none.

    `vision_memory` is what a vision encoder takes (bytes by name). Trees of given candidates are planned for where no
    draft model has larger ones, and they are asked for, as drafts of what was said before are, or captured ahead, as
    those of tokens that rules force; smaller ones where memory is short.
    """
    opened = partial(DecodingRunner.open, backend, directory, progress, adapters)
    if directory.config.is_embedding or (drafting is None and not backend.fixed_shapes):
        return opened(vision_memory, drafts=False)
    if drafting is not None and drafting.needs_draft_model:
        if directory.draft is None:
            raise RequestError(
                f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
                "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), or leave drafting out"
            )
        drafting.plan(directory.limits)  # refused before anything is loaded
        return opened(vision_memory)
    for nodes in GIVEN_SIZES:
        trees = given_tree_bytes(directory.config, directory.limits, nodes, backend.compute_dtype)
        try:
            runner = opened({**(vision_memory or {}), f"trees of {nodes} candidates": trees}, drafts=False)
        except DeviceMemoryError:
            if nodes == GIVEN_SIZES[-1] and drafting is not None:
                raise
            continue
        if drafting is not None or runner.verification.takes(1, given(nodes - 1, 1)):
            runner.verification.reserve(nodes)
        return runner
    return opened(vision_memory, drafts=False)


def read_adapters(
    directory: EngineDirectory, sources: Mapping[str, str | Path] | None
) -> dict[str, LoraAdapter] | None:
    """The directory's adapters and those of `sources`, or None where none is wanted, or the engines take none."""
    if sources is None or not (directory.limits.has_lora or sources):
        return None
    require_adapters(directory.limits)
    described = {name: adapter.path for name, adapter in directory.adapters.items()}
    return {name: LoraAdapter.read(path, directory.config) for name, path in (described | dict(sources)).items()}
