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
    from edgellm.requests import (
        Chunk,
        Messages,
        Request,
        RequestOptions,
        Response,
        SamplingOptions,
        StopWhen,
        Timings,
        TokenLogprobs,
        Tool,
        TurnOptions,
        Usage,
    )
    from edgellm.runtime import SHIPPED_MODEL, SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams
    from edgellm.serving.async_generation import AsyncGeneration, AsyncSession
    from edgellm.sessions import Content, Session
    from edgellm.snapshots.system_prompt import CachedPrompt
    from edgellm.structure.description import Structure
    from edgellm.text.output import FinishReason
    from edgellm.tool_calls.calls import ToolCall, ToolCallDelta
    from edgellm.tool_calls.functions import function_tool

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
    "RequestOptions",
    "Response",
    "SamplingOptions",
    "SamplingParams",
    "Session",
    "SnapshotError",
    "SpecDecodeRuntime",
    "StopWhen",
    "Structure",
    "TemplateError",
    "Timings",
    "TokenLogprobs",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "TurnOptions",
    "Usage",
    "function_tool",
]

_ERRORS = "AdapterError ConstraintError ContextError EdgeLLMError EngineDirectoryError EngineError ImageError"
_REQUESTS = (
    "Chunk Messages Request RequestOptions Response SamplingOptions StopWhen Timings TokenLogprobs Tool TurnOptions"
)
_NAMES = {
    "asynchronous": "AsyncLLM",
    "drafting.acceptance": "DraftingStatistics",
    "drafting.config": "DraftingConfig",
    "drafting.controller": "DraftingReport",
    "errors": f"{_ERRORS} QueueFullError RequestError SnapshotError TemplateError",
    "generation": "Generation",
    "llm": "LLM",
    "requests": f"{_REQUESTS} TurnOptions Usage",
    "runtime": "SHIPPED_MODEL SpecDecodeRuntime",
    "sampling_params": "SamplingParams",
    "serving.async_generation": "AsyncGeneration AsyncSession",
    "sessions": "Content Session",
    "snapshots.system_prompt": "CachedPrompt",
    "structure.description": "Structure",
    "text.output": "FinishReason",
    "tool_calls.calls": "ToolCall ToolCallDelta",
    "tool_calls.functions": "function_tool",
}
#: The module of each public name.
_MODULES = {name: f"edgellm.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
