"""Every error that EdgeLLM raises on purpose, in one place to import from."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from edgellm.engines.errors import AdapterError as AdapterError
from edgellm.engines.errors import AudioError as AudioError
from edgellm.engines.errors import BuildError as BuildError
from edgellm.engines.errors import CheckpointError as CheckpointError
from edgellm.engines.errors import ConstraintError as ConstraintError
from edgellm.engines.errors import DeviceLostError as DeviceLostError
from edgellm.engines.errors import DeviceMemoryError as DeviceMemoryError
from edgellm.engines.errors import EdgeLLMError as EdgeLLMError
from edgellm.engines.errors import EngineDirectoryError as EngineDirectoryError
from edgellm.engines.errors import EngineError as EngineError
from edgellm.engines.errors import ImageError as ImageError
from edgellm.engines.errors import KernelError as KernelError
from edgellm.engines.errors import MediaError as MediaError
from edgellm.engines.errors import MissingDependencyError as MissingDependencyError
from edgellm.engines.errors import PlanError as PlanError
from edgellm.engines.errors import UnsupportedModelError as UnsupportedModelError
from edgellm.kernels.errors import shown


class RequestError(EdgeLLMError):
    """A request asks for something impossible: a number out of range, an empty prompt, a malformed message."""


def require(condition: bool, name: str, value: Any, expected: str) -> None:
    """Raise RequestError where the `condition` on the `value` of an argument does not hold."""
    if not condition:
        raise RequestError(f"{name} is {shown(value)}: expected {expected}")


def require_kind(condition: bool, name: str, value: Any, expected: str) -> None:
    """Raises as `require` does, where the type is wrong and the value says less."""
    if not condition:
        raise RequestError(f"{name} is a {type(value).__name__}: expected {expected}")


def is_whole(value: Any, low: int, high: float = float("inf")) -> bool:
    """Whether a value is a whole number from `low` to `high`, NumPy's included."""
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def number_of(count: int, noun: str) -> str:
    """A count with what is counted, whose plural ends in s: "1 answer", "1,200 answers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def is_switch(value: Any) -> bool:
    """Whether a value is true or false, NumPy's included."""
    return isinstance(value, bool) or (str(getattr(value, "dtype", "")) == "bool" and value.ndim == 0)


class ContextError(RequestError):
    """A prompt does not fit the context: with one token of an answer it has `needed` tokens, of which `limit` fit."""

    def __init__(self, message: str, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed, self.limit = needed, limit

    @classmethod
    def of_prompt(cls, count: int, capacity: int, is_least: bool = False) -> ContextError:
        """The error for a prompt of `count` tokens, or at least so many, in a context of `capacity`."""
        return cls(
            f"the prompt has {'at least ' if is_least else ''}{count} tokens and the context {capacity}, of which at "
            "least one is for the answer: shorten the prompt or the history, or build with a larger --kv-capacity",
            count + 1,
            capacity,
        )

    def __reduce__(self) -> tuple[type[ContextError], tuple[str, int, int]]:
        """Errors cross processes as other errors do."""
        return type(self), (str(self), self.needed, self.limit)


def closed_error() -> RequestError:
    """The error for the use of a model after it was closed."""
    return RequestError("the model is closed: open it anew")


class QueueFullError(RequestError):
    """So many requests wait already that another is refused: ask again later, or open with a longer queue."""


class SnapshotError(EdgeLLMError):
    """A snapshot of a KV cache cannot be made, read or used; `reason` names why in a few words ("other weights")."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[SnapshotError], tuple[str, str]]:
        return type(self), (str(self), self.reason)


class HubError(EdgeLLMError):
    """A model that is named ORG/NAME cannot be found on the hub, chosen there, downloaded, or is not what was said."""


class TemplateError(EdgeLLMError):
    """A chat template is missing, malformed, reaches for what it may not have, or exceeds its limits."""


class SettingsError(EdgeLLMError):
    """A settings file cannot be read, or holds an unknown key or a wrong value."""


#: Names are compared up to so many characters: what is longer is no slip of a known one.
_LONGEST_NAME = 100


def did_you_mean(name: str, known: tuple[str, ...] | list[str], unlisted: Iterable[str] = ()) -> str:
    """ ": did you mean ...?" where a known name is close, or one of `unlisted`, else the list of known names."""
    import difflib  # errors alone need it

    close = difflib.get_close_matches(name[:_LONGEST_NAME], [*known, *unlisted], n=1)
    return f": did you mean {close[0]}?" if close else f": expected one of {', '.join(known)}"
