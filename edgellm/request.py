"""`Request`: what is asked of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from edgellm.errors import RequestError
from edgellm.sampling_params import SamplingParams
from edgellm.text.message_parts import is_image

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
        if isinstance(self.prompt, (bytes, bytearray)):
            raise RequestError("the prompt is bytes: expected text (bytes.decode()), or a list of token ids")
        if self.prompt is not None and not isinstance(self.prompt, str):
            wrong = [each for each in self.prompt if not isinstance(each, Integral)]
            if wrong:
                raise RequestError(f"the prompt has {wrong[0]!r} among its token ids: expected whole numbers, or text")

    @property
    def shows_images(self) -> bool:
        """Whether there are images to be read, which takes milliseconds; messages need not be well-formed."""
        messages = self.messages if isinstance(self.messages, (list, tuple)) else ()
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        return bool(self.images) or any(isinstance(part, list) and any(map(is_image, part)) for part in contents)
