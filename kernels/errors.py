"""The root of the project's errors. Every message says what was found, what was expected and what to do."""

#: Characters of an error's message; what a hostile file says is quoted in some of them.
LONGEST_MESSAGE = 2000
_KEPT_END = 300  # what to do about it stands there


class EdgeLLMError(Exception):
    """Base class of all errors that EdgeLLM raises on purpose.

    Of a message of more than `LONGEST_MESSAGE` characters beginning and end are kept, and the others counted.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(bounded_message(value) if isinstance(value, str) else value for value in arguments))


class KernelError(EdgeLLMError):
    """A kernel was called with arguments outside its contract, or could not be compiled or launched."""


class MissingDependencyError(EdgeLLMError):
    """An optional library, driver or device is missing; the message names it and how to get it."""


def bounded_message(text: str) -> str:
    """`text`, of which at most `LONGEST_MESSAGE` characters are kept: between beginning and end stands how many were
    left out."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    room = LONGEST_MESSAGE - len(_left_out(len(text))) - _KEPT_END
    return text[:room] + _left_out(len(text) - room - _KEPT_END) + text[-_KEPT_END:]


def _left_out(count: int) -> str:
    return f" ... ({count:,} characters left out) ... "
