"""The root of the project's errors. Every message says what was found, what was expected and what to do."""


class EdgeLLMError(Exception):
    """Base class of all errors that EdgeLLM raises on purpose."""


class KernelError(EdgeLLMError):
    """A kernel was called with arguments outside its contract, or could not be compiled or launched."""


class MissingDependencyError(EdgeLLMError):
    """An optional library, driver or device is missing; the message names it and how to get it."""
