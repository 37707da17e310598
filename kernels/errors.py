"""The root of the project's errors. Every message says what was found, what was expected and what to do."""

from __future__ import annotations

from typing import Any

#: How many characters of a value stand in an error.
_LONGEST_VALUE = 200
#: Characters of an error's message; what a hostile file says is quoted in some of them.
LONGEST_MESSAGE = 2000
_KEPT_END = 300  # what to do about it stands there


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
    """Base class of all errors that EdgeLLM raises on purpose.

    Of a message of more than `LONGEST_MESSAGE` characters beginning and end are kept, and the others counted.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(bounded_message(value) if isinstance(value, str) else value for value in arguments))


class KernelError(EdgeLLMError):
    """A kernel was called with arguments outside its contract, or could not be compiled or launched; or a GPU was asked
    for that is not there."""


#: Errors of CUDA after which a process can compute nothing more on the GPU, by their codes (`CUresult`): every later
#: call gives the same one. Those for which CUDA's documentation says that the process must be terminated, or its
#: context is of no use any more, and uncorrectable errors of memory and links (214, 220), which it leaves open. All
#: others end no more than the call that gave them.
STICKY_ERRORS = {
    214: "CUDA_ERROR_ECC_UNCORRECTABLE",
    220: "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    226: "CUDA_ERROR_CONTAINED",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    702: "CUDA_ERROR_LAUNCH_TIMEOUT",
    709: "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    710: "CUDA_ERROR_ASSERT",
    714: "CUDA_ERROR_HARDWARE_STACK_ERROR",
    715: "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    716: "CUDA_ERROR_MISALIGNED_ADDRESS",
    717: "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    718: "CUDA_ERROR_INVALID_PC",
    719: "CUDA_ERROR_LAUNCH_FAILED",
    721: "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    810: "CUDA_ERROR_MPS_CLIENT_TERMINATED",
    911: "CUDA_ERROR_EXTERNAL_DEVICE",
}


class DeviceLostError(EdgeLLMError):
    """The GPU has failed, or one of those that share a model, and nothing more can be computed on it."""

    @classmethod
    def of(cls, code: int) -> DeviceLostError | None:
        """The error for a code of CUDA's; None where the GPU can still be used."""
        if code not in STICKY_ERRORS:
            return None
        return cls(
            f"the GPU has failed ({STICKY_ERRORS[code]}), and this process can compute nothing more on it: start it "
            "anew. The system's log (dmesg) may say why"
        )


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
