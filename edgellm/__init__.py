"""EdgeLLM: language models on one NVIDIA GPU of a device, or on NumPy where there is none.

Importing the package loads nothing; the names below are loaded when first used.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.asynchronous import AsyncLLM
    from edgellm.drafting.acceptance import DraftingStatistics
    from edgellm.drafting.config import DraftingConfig
    from edgellm.drafting.controller import DraftingReport
    from edgellm.errors import (
        AdapterError,
        ConstraintError,
        ContextError,
        EdgeLLMError,
        EngineDirectoryError,
        EngineError,
        ImageError,
        QueueFullError,
        RequestError,
        SnapshotError,
        TemplateError,
    )
    from edgellm.generation import Generation
    from edgellm.llm import LLM
    from edgellm.requests import Chunk, Messages, Request, Response, StopWhen, Timings, TokenLogprobs, Usage
    from edgellm.runtime import SHIPPED_MODEL, SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams
    from edgellm.serving.async_generation import AsyncGeneration, AsyncSession
    from edgellm.sessions import Content, Session
    from edgellm.snapshots.system_prompt import CachedPrompt
    from edgellm.structure.description import Structure
    from edgellm.text.output import FinishReason
    from edgellm.tools.calls import ToolCall, ToolCallDelta

# Silent unless a program that uses the package configures logging.
logging.getLogger("edgellm").addHandler(logging.NullHandler())

__version__ = "0.1.0"


class _CheckoutFolders:
    """Finds the packages that stand beside this folder in a checkout, where an installation has them inside of it.

    Python started in a checkout takes this folder for the package, whatever is installed: so these come from it, too.
    """

    names = frozenset(f"{__name__}.{folder}" for folder in ("engines", "kernels", "multimodal", "configs"))
    root = Path(__file__).resolve().parents[1]

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The specification of one of these packages; None for any other module."""
        return PathFinder.find_spec(name, [str(cls.root)]) if name in cls.names else None


if not Path(__file__).with_name("engines").is_dir():
    sys.meta_path.insert(0, _CheckoutFolders)

__all__ = [
    "LLM",
    "SHIPPED_MODEL",
    "AdapterError",
    "AsyncGeneration",
    "AsyncLLM",
    "AsyncSession",
    "CachedPrompt",
    "Chunk",
    "ConstraintError",
    "Content",
    "ContextError",
    "DraftingConfig",
    "DraftingReport",
    "DraftingStatistics",
    "EdgeLLMError",
    "EngineDirectoryError",
    "EngineError",
    "FinishReason",
    "Generation",
    "ImageError",
    "Messages",
    "QueueFullError",
    "Request",
    "RequestError",
    "Response",
    "SamplingParams",
    "Session",
    "SnapshotError",
    "SpecDecodeRuntime",
    "StopWhen",
    "Structure",
    "TemplateError",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]

_MODULES = {
    "AsyncGeneration": "edgellm.serving.async_generation",
    "AsyncSession": "edgellm.serving.async_generation",
    "AsyncLLM": "edgellm.asynchronous",
    "DraftingConfig": "edgellm.drafting.config",
    "DraftingReport": "edgellm.drafting.controller",
    "DraftingStatistics": "edgellm.drafting.acceptance",
    "AdapterError": "edgellm.errors",
    "ConstraintError": "edgellm.errors",
    "ContextError": "edgellm.errors",
    "EdgeLLMError": "edgellm.errors",
    "EngineDirectoryError": "edgellm.errors",
    "EngineError": "edgellm.errors",
    "ImageError": "edgellm.errors",
    "QueueFullError": "edgellm.errors",
    "RequestError": "edgellm.errors",
    "SnapshotError": "edgellm.errors",
    "TemplateError": "edgellm.errors",
    "Generation": "edgellm.generation",
    "LLM": "edgellm.llm",
    "TokenLogprobs": "edgellm.requests",
    "Messages": "edgellm.requests",
    "Request": "edgellm.requests",
    "StopWhen": "edgellm.requests",
    "Chunk": "edgellm.requests",
    "Response": "edgellm.requests",
    "Timings": "edgellm.requests",
    "Usage": "edgellm.requests",
    "SHIPPED_MODEL": "edgellm.runtime",
    "SpecDecodeRuntime": "edgellm.runtime",
    "SamplingParams": "edgellm.sampling_params",
    "Content": "edgellm.sessions",
    "Session": "edgellm.sessions",
    "CachedPrompt": "edgellm.snapshots.system_prompt",
    "Structure": "edgellm.structure.description",
    "FinishReason": "edgellm.text.output",
    "ToolCall": "edgellm.tools.calls",
    "ToolCallDelta": "edgellm.tools.calls",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
