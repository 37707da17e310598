"""Errors of checkpoints, engine directories, plans and devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgellm.kernels.errors import DeviceLostError as DeviceLostError
from edgellm.kernels.errors import EdgeLLMError as EdgeLLMError
from edgellm.kernels.errors import KernelError as KernelError
from edgellm.kernels.errors import MissingDependencyError as MissingDependencyError


class CheckpointError(EdgeLLMError):
    """A checkpoint is missing, damaged, or does not hold the tensors that its configuration asks for."""


class AdapterError(EdgeLLMError):
    """A LoRA adapter is damaged, does not fit the model or asks for what is not implemented."""


class UnsupportedModelError(EdgeLLMError):
    """The configuration names a model family or a feature of it that is not implemented."""


class EngineDirectoryError(EdgeLLMError):
    """An engine directory is incomplete, damaged or of another format version."""


class PlanError(EdgeLLMError):
    """A TensorRT plan is missing, damaged, or was built for another device, release or network."""


class BuildError(EdgeLLMError):
    """Building an engine directory failed; nothing was left behind."""


class EngineError(EdgeLLMError):
    """An engine was run outside its limits or reported a failure."""


class ConstraintError(EdgeLLMError):
    """The rules on a request's tokens leave it no way on, or cannot be computed: an error of that request alone."""


class DeviceMemoryError(EdgeLLMError):
    """The memory plan does not fit into what is free."""


class MediaError(EdgeLLMError):
    """Media of a request do not match its prompt's markers; of those of one kind also `AudioError` and `ImageError`."""


class AudioError(MediaError):
    """A sound cannot be read, exceeds a limit, or its model does not take it."""


class ImageError(MediaError):
    """An image cannot be read, exceeds a limit, or does not suit the model."""


@contextmanager
def explained(
    what: str, error_class: Callable[[str], Exception], advice: str = "", names_file: bool = False
) -> Iterator[None]:
    """Raise an error where the system fails: `what` cannot be done, why (with `names_file` also which file it is), and
    what to do."""
    try:
        yield
    except OSError as error:
        file = f" ({error.filename})" if names_file and error.filename else ""
        raise error_class(f"{what}: {error.strerror or error}{file}{advice}") from error


@contextmanager
def at_place(place: str, caught: type[EdgeLLMError], raised: type[EdgeLLMError] | None = None) -> Iterator[None]:
    """Put the place in front of what an error of the class `caught` says, and raise it as `raised` (None: as that)."""
    try:
        yield
    except caught as error:
        raise (raised or caught)(f"{place}: {error}") from error
