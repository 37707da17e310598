"""`Request`: what is asked of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.errors import RequestError
from edgellm.sampling_params import SamplingParams

#: A conversation: dictionaries with "role" and "content".
Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """What is asked of a model: a `prompt` (text, or token ids as they are) or a conversation (`messages`, rendered by
    the chat template), with its sampling and limits, the LoRA adapter's name, and a deadline in seconds.

    `images` are those that a prompt shows, in the order of their places in it; a conversation has them in its messages.
    """

    prompt: str | Sequence[int] | None = None
    messages: Messages | None = None
    params: SamplingParams | None = None
    adapter: str | None = None
    deadline: float | None = None
    images: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("a request has either a prompt or messages: give one of them")
