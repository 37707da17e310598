"""`Request`: what is asked of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import numpy as np

from edgellm.drafting.acceptance import DraftingStatistics
from edgellm.errors import RequestError
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import is_image
from edgellm.text.template_inputs import checked_tools, checked_variables

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

    A conversation without a system message begins with the model's default system prompt
    (`LLM.default_system_prompt`); one whose content is "" leaves it out. `tools` are the functions that the model may
    call, in the form of OpenAI's API or as functions' objects alone; `template_variables` are values for what else the
    chat template reads, such as {"enable_thinking": False}. Both are for conversations, with values as JSON has them.
    """

    prompt: str | Sequence[int] | None = None
    messages: Messages | None = None
    params: SamplingParams | None = None
    adapter: str | None = None
    deadline: float | None = None
    images: Sequence[Any] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    template_variables: Mapping[str, Any] | None = None

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
        object.__setattr__(self, "tools", checked_tools(self.tools))
        object.__setattr__(self, "template_variables", checked_variables(self.template_variables))
        if self.messages is None and (self.tools or self.template_variables):
            given = "tools" if self.tools else "template_variables"
            raise RequestError(f"{given} are for the chat template, which a prompt has none of: ask with messages")
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


@dataclass(frozen=True)
class Usage:
    """Token counts. `reused_tokens` of the prompt were already in the KV cache; `context_left` more than prompt and
    answer would fit the context."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    context_left: int = 0


@dataclass(frozen=True)
class Timings:
    """Seconds, as the caller saw them.

    `time_to_first_token` runs from the request's acceptance; `decode_seconds` from the first token to the last;
    `tokens_per_second` counts the tokens after the first over `decode_seconds` (0.0 where there are none).
    `queue_seconds` went by before a slot was free. `step_gaps` are the times between the steps that gave tokens, one
    token each, or several where a draft was accepted.
    """

    prefill_seconds: float
    time_to_first_token: float
    decode_seconds: float
    total_seconds: float
    queue_seconds: float = 0.0
    step_gaps: tuple[float, ...] = ()

    def tokens_per_second(self, completion_tokens: int) -> float:
        """Decoding speed for an answer of `completion_tokens` tokens."""
        return (completion_tokens - 1) / self.decode_seconds if completion_tokens > 1 and self.decode_seconds else 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: whole characters only. `text` may be empty where a token ends no character.

    `from_draft` says of each token whether the draft had proposed it; it is empty where that is not known.
    `logprobs` are those of each token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Response:
    """A finished answer.

    `finish_reason` is "stop" (end of turn or a stop id), "stop_string", "length" (max_tokens), "context" (the KV
    capacity is used up), "cancelled", or "deadline" (its time was over). `text` excludes the stop string; `token_ids`
    are all that were generated and count towards usage, the ending one included. `drafting` says what drafting did,
    where a draft model is loaded; `logprobs` has those of each token, where they were asked for. `dropped_turns`, of
    `dropped_messages` in all, are the oldest ones of a session that left it before this answer, to make room for it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    stop_match: str | int | None = field(default=None)
    drafting: DraftingStatistics | None = field(default=None)
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None)
    dropped_turns: int = field(default=0)
    dropped_messages: int = field(default=0)

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, which a conversation goes on with: not where it was ended before its first
        word."""
        return bool(self.text) or self.finish_reason not in ("cancelled", "deadline")


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log-probability, and the likeliest tokens in its place with theirs, likeliest first.

    They are of the model's own distribution: temperature, penalties and filters are not in them.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of each token, drawn from a row of `logits` [n, V] float32, and of the `top` likeliest (ties: the lower id)."""
    found = []
    for row, token in zip(logits.astype(np.float64), token_ids, strict=True):
        largest = row.max()
        values = row - (largest + np.log(np.exp(row - largest).sum()))
        likeliest: np.ndarray = np.empty(0, np.int64)
        if top:
            least = np.partition(values, -top)[-top] if top < len(values) else values.min()
            candidates = np.flatnonzero(values >= least)
            likeliest = candidates[np.argsort(-values[candidates], kind="stable")][:top]
        pairs = tuple((int(each), float(values[each])) for each in likeliest)
        found.append(TokenLogprobs(int(token), float(values[token]), pairs))
    return found
