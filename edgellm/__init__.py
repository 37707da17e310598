"""EdgeLLM: language models on one NVIDIA GPU of a device, or on NumPy where there is none.

Importing the package loads nothing; the names below are loaded when first used.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgellm.asynchronous import AsyncLLM
    from edgellm.drafting.config import DraftingConfig
    from edgellm.errors import (
        AdapterError,
        ContextError,
        EdgeLLMError,
        ImageError,
        QueueFullError,
        RequestError,
        SnapshotError,
    )
    from edgellm.generation import Generation
    from edgellm.llm import LLM
    from edgellm.requests import Chunk, Request, Response
    from edgellm.runtime import SpecDecodeRuntime
    from edgellm.sampling_params import SamplingParams
    from edgellm.sessions import Session

# Silent unless a program that uses the package configures logging.
logging.getLogger("edgellm").addHandler(logging.NullHandler())

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AdapterError",
    "AsyncLLM",
    "Chunk",
    "ContextError",
    "DraftingConfig",
    "EdgeLLMError",
    "Generation",
    "ImageError",
    "QueueFullError",
    "Request",
    "RequestError",
    "Response",
    "SamplingParams",
    "Session",
    "SnapshotError",
    "SpecDecodeRuntime",
]

_MODULES = {
    "LLM": "edgellm.llm",
    "Chunk": "edgellm.requests",
    "Response": "edgellm.requests",
    "SamplingParams": "edgellm.sampling_params",
    "DraftingConfig": "edgellm.drafting",
    "AsyncLLM": "edgellm.asynchronous",
    "Request": "edgellm.requests",
    "SpecDecodeRuntime": "edgellm.runtime",
    "Session": "edgellm.sessions",
    "Generation": "edgellm.generation",
    "QueueFullError": "edgellm.errors",
    "AdapterError": "edgellm.errors",
    "ContextError": "edgellm.errors",
    "ImageError": "edgellm.errors",
    "SnapshotError": "edgellm.errors",
    "EdgeLLMError": "edgellm.errors",
    "RequestError": "edgellm.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgellm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
