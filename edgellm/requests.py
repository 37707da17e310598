"""`Request`: what is asked of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from edgellm.errors import RequestError
from edgellm.sampling_params import SamplingParams
from edgellm.text.message_parts import is_image

#: A conversation: dictionaries with "role" and "content".
Messages = Sequence[dict[str, Any]]
#: What 32 bits hold, in which kernels take token ids.
_IDS = 2**31


@dataclass(frozen=True)
class Request:
    """What is asked of a model: a `prompt` (text, or token ids as they are) or a conversation (`messages`, rendered by
    the chat template), with its sampling and limits, the LoRA adapter's name, and a deadline in seconds from when it is
    asked on: what the answer has by then is the answer.

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
        _check_prompt(self.prompt)
        if not isinstance(self.params, (SamplingParams, type(None))):
            raise RequestError(f"params is a {type(self.params).__name__}: expected SamplingParams(...), or None")
        if not isinstance(self.adapter, (str, type(None))):
            raise RequestError(f"adapter is a {type(self.adapter).__name__}: expected a LoRA adapter's name, or None")
        if not isinstance(self.images, (list, tuple)):
            raise RequestError(f"images is a {type(self.images).__name__}: expected a list of images")
        seconds = self.deadline
        if seconds is not None:
            if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < float("inf"):
                raise RequestError(f"deadline is {seconds!r}: expected a number of seconds above 0, or None")
            object.__setattr__(self, "deadline", float(seconds))

    @property
    def shows_images(self) -> bool:
        """Whether there are images to be read, which takes milliseconds; messages need not be well-formed."""
        messages = self.messages if isinstance(self.messages, (list, tuple)) else ()
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        return bool(self.images) or any(isinstance(part, list) and any(map(is_image, part)) for part in contents)


def require_request(value: Any) -> None:
    """Raise RequestError for what is no Request."""
    if not isinstance(value, Request):
        raise RequestError(f"a request is a {type(value).__name__}: expected Request(...)")


def _check_prompt(prompt: Any) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if isinstance(prompt, (bytes, bytearray)):
        raise RequestError("the prompt is bytes: expected text (bytes.decode()), or a list of token ids")
    if not isinstance(prompt, Collection):
        raise RequestError(f"the prompt is a {type(prompt).__name__}: expected text, or a list of token ids")
    wrong = [each for each in prompt if not isinstance(each, Integral)]
    if wrong:
        raise RequestError(f"the prompt has {wrong[0]!r} among its token ids: expected whole numbers, or text")
    beyond = [each for each in prompt if not -_IDS <= each < _IDS]  # the engine knows its vocabulary
    if beyond:
        raise RequestError(f"the prompt has the token id {beyond[0]}: expected 32 bits, use the model's own tokenizer")
