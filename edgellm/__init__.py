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
    from edgellm.asynchronous import AsyncGeneration as AsyncGeneration
    from edgellm.asynchronous import AsyncLLM as AsyncLLM
    from edgellm.asynchronous import AsyncSession as AsyncSession
    from edgellm.asynchronous import AsyncWatch as AsyncWatch
    from edgellm.drafting.config import DraftingConfig as DraftingConfig
    from edgellm.drafting.report import DraftingReport as DraftingReport
    from edgellm.drafting.report import DraftingStatistics as DraftingStatistics
    from edgellm.embedding import EmbeddingRequest as EmbeddingRequest
    from edgellm.errors import AdapterError as AdapterError
    from edgellm.errors import AudioError as AudioError
    from edgellm.errors import ConstraintError as ConstraintError
    from edgellm.errors import ContextError as ContextError
    from edgellm.errors import EdgeLLMError as EdgeLLMError
    from edgellm.errors import EngineDirectoryError as EngineDirectoryError
    from edgellm.errors import EngineError as EngineError
    from edgellm.errors import ImageError as ImageError
    from edgellm.errors import MediaError as MediaError
    from edgellm.errors import QueueFullError as QueueFullError
    from edgellm.errors import RequestError as RequestError
    from edgellm.errors import SnapshotError as SnapshotError
    from edgellm.errors import TemplateError as TemplateError
    from edgellm.generation import Generation as Generation
    from edgellm.llm import LLM as LLM
    from edgellm.media.camera import Camera as Camera
    from edgellm.media.camera import Frame as Frame
    from edgellm.opened_model import SHIPPED_MODEL as SHIPPED_MODEL
    from edgellm.prefilled import PrefilledStates as PrefilledStates
    from edgellm.requests import Chunk as Chunk
    from edgellm.requests import Messages as Messages
    from edgellm.requests import Request as Request
    from edgellm.requests import RequestOptions as RequestOptions
    from edgellm.requests import Response as Response
    from edgellm.requests import SamplingOptions as SamplingOptions
    from edgellm.requests import StopWhen as StopWhen
    from edgellm.requests import Timings as Timings
    from edgellm.requests import TokenLogprobs as TokenLogprobs
    from edgellm.requests import Tool as Tool
    from edgellm.requests import TurnOptions as TurnOptions
    from edgellm.requests import Usage as Usage
    from edgellm.runtime import SpecDecodeRuntime as SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams as SamplingParams
    from edgellm.sessions import Content as Content
    from edgellm.sessions import Session as Session
    from edgellm.snapshots.system_prompt import CachedPrompt as CachedPrompt
    from edgellm.speech_stream import SpeechStream as SpeechStream
    from edgellm.structure.description import Structure as Structure
    from edgellm.text.output import FinishReason as FinishReason
    from edgellm.tool_calls.calls import ToolCall as ToolCall
    from edgellm.tool_calls.calls import ToolCallDelta as ToolCallDelta
    from edgellm.tool_calls.functions import function_tool as function_tool
    from edgellm.transcription import Transcription as Transcription
    from edgellm.watching import Watch as Watch
    from edgellm.watching import WatchedAnswer as WatchedAnswer

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

_ERRORS = (
    "AdapterError AudioError ConstraintError ContextError EdgeLLMError EngineDirectoryError EngineError ImageError "
    "MediaError"
)
_REQUESTS = (
    "Chunk Messages Request RequestOptions Response SamplingOptions StopWhen Timings TokenLogprobs Tool TurnOptions"
)
_NAMES = {
    "asynchronous": "AsyncGeneration AsyncLLM AsyncSession AsyncWatch",
    "drafting.config": "DraftingConfig",
    "drafting.report": "DraftingReport DraftingStatistics",
    "embedding": "EmbeddingRequest",
    "errors": f"{_ERRORS} QueueFullError RequestError SnapshotError TemplateError",
    "generation": "Generation",
    "llm": "LLM",
    "media.camera": "Camera Frame",
    "opened_model": "SHIPPED_MODEL",
    "prefilled": "PrefilledStates",
    "requests": f"{_REQUESTS} Usage",
    "runtime": "SpecDecodeRuntime",
    "sampling_params": "SamplingParams",
    "sessions": "Content Session",
    "snapshots.system_prompt": "CachedPrompt",
    "speech_stream": "SpeechStream",
    "structure.description": "Structure",
    "text.output": "FinishReason",
    "transcription": "Transcription",
    "tool_calls.calls": "ToolCall ToolCallDelta",
    "tool_calls.functions": "function_tool",
    "watching": "Watch WatchedAnswer",
}
#: The module of each public name.
_MODULES = {name: f"edgellm.{module}" for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
