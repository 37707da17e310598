"""The root of the project's errors. Every message says what was found, what was expected and what to do."""

from typing import Any

#: How many characters of a value stand in an error.
_LONGEST_VALUE = 200


def shown(value: Any) -> str:
    """A value as an error shows it: its `repr`, cut where it is long, whatever the value is."""
    try:
        text = repr(value)
    except Exception as error:  # Python does not write out a whole number of more than 4,300 digits
        if isinstance(value, int):
            return f"a whole number of {value.bit_length()} bits"
        return f"a {type(value).__name__} whose repr fails with {type(error).__name__}"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"


class EdgeLLMError(Exception):
    """Base class of all errors that EdgeLLM raises on purpose."""


class KernelError(EdgeLLMError):
    """A kernel was called with arguments outside its contract, or could not be compiled or launched."""


class MissingDependencyError(EdgeLLMError):
    """An optional library, driver or device is missing; the message names it and how to get it."""
