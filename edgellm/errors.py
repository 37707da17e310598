"""Every error that EdgeLLM raises on purpose, in one place to import from."""

from edgellm.engines.errors import (
    BuildError,
    CheckpointError,
    DeviceMemoryError,
    EdgeLLMError,
    EngineDirectoryError,
    EngineError,
    KernelError,
    MissingDependencyError,
    PlanError,
    UnsupportedModelError,
)

__all__ = [
    "BuildError",
    "CheckpointError",
    "DeviceMemoryError",
    "EdgeLLMError",
    "EngineDirectoryError",
    "EngineError",
    "KernelError",
    "MissingDependencyError",
    "PlanError",
    "RequestError",
    "SettingsError",
    "TemplateError",
    "UnsupportedModelError",
]


class RequestError(EdgeLLMError):
    """A request asks for something impossible: a number out of range, an empty prompt, a malformed message."""


class TemplateError(EdgeLLMError):
    """A chat template is missing, malformed, reaches for what it may not have, or exceeds its limits."""


class SettingsError(EdgeLLMError):
    """A settings file cannot be read, or holds an unknown key or a wrong value."""
