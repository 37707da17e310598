"""`Request` and `Response`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property
from inspect import iscoroutinefunction
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from edgellm.drafting.report import DraftingStatistics
from edgellm.errors import RequestError, did_you_mean, is_switch, is_whole, require, require_kind, shown
from edgellm.sampling_params import LARGEST_SEED, SamplingParams, as_float, with_structure
from edgellm.structure.description import Structure
from edgellm.text.messages import checked_tools, checked_variables, show_media
from edgellm.text.output import FinishReason
from edgellm.tool_calls.calls import ToolCall, ToolCallDelta, ToolChoice, checked_choice
from edgellm.tool_calls.functions import described_tools

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: A conversation: dictionaries with "role" and "content".
Messages = Sequence[dict[str, Any]]
#: A tool: an object as OpenAI's API has it, or a Python function.
Tool = Mapping[str, Any] | Callable[..., Any]
#: Gets the text of an answer so far; true ends the answer there.
StopWhen = Callable[[str], bool]
#: What 32 bits hold, in which kernels take token ids.
_IDS = 2**31
#: The largest priority; the smallest is its negative.
_PRIORITIES = 1_000_000
#: Of one request; OpenAI's API gives as many.
MOST_ANSWERS = 128


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords. They stand in place of those of the `params` that are given; without
    any, the others are as in `SamplingParams()`. `response_format` is another way to say `structure` (see `Request`).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Collection[int]
    ignore_eos: bool
    logprobs: int | None
    structure: Any
    response_format: Any
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Collection[int] | None
    bad_words: Sequence[str | Sequence[int]]


class TurnOptions(SamplingOptions, total=False):
    """Keywords of one answer of a session, and of all its answers: they are described with `Request`."""

    tools: Sequence[Tool] | None
    tool_choice: Any
    parallel_tool_calls: bool | None
    template_variables: Mapping[str, Any] | None
    stop_when: StopWhen | None
    priority: int


class RequestOptions(TurnOptions, total=False):
    """Keywords of a request, all there are: they are described with `Request`."""

    deadline: float | None
    images: Sequence[Any]
    audio: Sequence[Any]
    video: Sequence[Any]
    continue_final_message: bool


@dataclass(frozen=True)
class Request:
    """A request to a model: a `prompt` (text, or token ids as they are) or a conversation (`messages`, rendered by
    the chat template), with its sampling and limits, and the LoRA adapter's name.

    `deadline` is in seconds from the call on: what the answer has by then is the answer, with the finish reason
    "deadline". One that has passed already (0 or less), or passes while the request waits in the queue, gives an empty
    answer; what is wrong with the request is an error all the same, and so is a full queue.

    `images` are those that a prompt shows, in the order of their places in it, `audio` what it lets hear (paths, bytes,
    or samples with their rate), `video` its videos: each a file, by path or bytes, or a list of frames with their
    times, pairs (seconds, image). A conversation has all of these in its messages.

    A conversation without a system message begins with the model's default system prompt
    (`LLM.default_system_prompt`); one whose content is "" leaves it out. `tools` are the functions that the model may
    call, Python's own (see `function_tool`) or in the form of OpenAI's API, or the object
    "function" of that alone: at most 128, whose arguments are enforced, but of those with "strict": False.
    `tool_choice` is "auto" (also None: the model calls or answers), "none" (its answer is text), "required", or a
    tool's name, which make it call; without `parallel_tool_calls` it calls once. `template_variables` are values for
    what else the chat template reads, such as {"enable_thinking": False}. Both are for conversations, with values as
    JSON has them.

    `continue_final_message` lets the model go on with the last message, an assistant's, instead of answering: the
    conversation is rendered up to the end of that message's text, and the answer is what follows it. RequestError where
    the template does not write that text out as it is.

    `stop_when` is called with the text of the answer so far, token by token as it is read, drafted or not, and ends the
    answer where it returns true: the finish reason is "stop", and text and tokens end with that token. The thread that
    reads calls it: of `LLM` the one that iterates or waits for the result, also that of `handle`, for all its requests
    by turns; of `AsyncLLM` the event loop's, so that it must be quick; of `SpecDecodeRuntime` the one that computes,
    between rounds. What the engine has computed meanwhile is dropped; an answer that nobody reads is never stopped.
    What it raises is raised by reading, and cancels the request.

    `priority` says who goes first where not all find a slot: the larger, and of one priority the first that came.
    Where all slots are taken and a request outranks one of those that run, the one of the lowest priority gives way,
    and goes on later: its answer is the one that it would have had, only later (`timings.preempted_seconds`).

    `structure` (see `SamplingParams`), or `response_format` in the form of OpenAI's API, becomes that of `params`. An
    answer that may call tools calls them, or has the structure.
    """

    prompt: str | Sequence[int] | None = None
    messages: Messages | None = None
    params: SamplingParams | None = None
    adapter: str | None = None
    deadline: float | None = None
    images: Sequence[Any] = ()
    tools: Sequence[Any] | None = None
    template_variables: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    stop_when: StopWhen | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    priority: int = 0
    audio: Sequence[Any] = ()
    video: Sequence[Any] = ()
    structure: InitVar[Any] = None
    response_format: InitVar[Any] = None

    def __post_init__(self, structure: Any, response_format: Any) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("a request has either a prompt or messages: give one of them")
        _check_prompt(self.prompt)
        check_choices(self.params, self.adapter)
        object.__setattr__(self, "params", with_structure(self.params, structure, response_format))
        for name, given in self.prompt_media.items():
            require_kind(isinstance(given, (list, tuple)), name, given, f"a list of {name}")
        object.__setattr__(self, "tools", checked_tools(described_tools(self.tools)))
        object.__setattr__(self, "template_variables", checked_variables(self.template_variables))
        if self.messages is None and (self.tools or self.template_variables):
            given = "tools" if self.tools else "template_variables"
            raise RequestError(f"{given} are for the chat template, which a prompt has none of: ask with messages")
        _ = self.choice  # refuses what is wrong
        if self.deadline is not None:
            seconds = as_float(self.deadline)
            require(math.isfinite(seconds), "deadline", self.deadline, "a finite number of seconds, or None")
            object.__setattr__(self, "deadline", seconds)
        object.__setattr__(self, "priority", checked_priority(self.priority))
        continues, stop_when = self.continue_final_message, self.stop_when
        require(is_switch(continues), "continue_final_message", continues, "true or false")
        if continues and self.messages is None:
            raise RequestError("continue_final_message is of use to messages: a prompt is continued without it")
        expected = "a callable that takes the text so far, which nobody awaits, or None"
        is_called = callable(stop_when) and not iscoroutinefunction(stop_when)
        require_kind(stop_when is None or is_called, "stop_when", stop_when, expected)

    @classmethod
    def of(
        cls,
        prompt: str | Sequence[int] | None = None,
        messages: Messages | str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request whose sampling is said in keywords, too: `Request.of("hello", temperature=0.7)`.

        `messages` may be a text, the user's only message. Raises TypeError for an unknown keyword, as any call does.
        """
        check_choices(params, adapter)
        given: dict[str, Any] = {**options}
        check_keywords(given, (*_SAMPLING, *cls.__dataclass_fields__))
        if sampling := {name: given.pop(name) for name in _SAMPLING if name in given}:
            params = SamplingParams(**sampling) if params is None else replace(params, **sampling)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return cls(prompt, messages, params, adapter, **given)

    def repeated(self, count: int) -> list[Request]:
        """This request `count` times, for as many answers: where tokens are drawn with a seed, each has the one after
        that of the request before it. Raises RequestError for a count that is not from 1 to 128."""
        require(is_whole(count, 1, MOST_ANSWERS), "n", count, f"a whole number from 1 to {MOST_ANSWERS}")
        params, count = self.params, int(count)
        if count == 1 or params is None or params.seed is None:
            return [self] * count
        seeds = ((params.seed + more) % (LARGEST_SEED + 1) for more in range(count))
        return [replace(self, params=replace(params, seed=seed)) for seed in seeds]

    @cached_property
    def choice(self) -> ToolChoice | None:
        """What is wanted of the tools; None without any. Raises RequestError."""
        return checked_choice(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def prompt_media(self) -> dict[str, Sequence[Any]]:
        """What a prompt shows beside its text, by the names of these fields."""
        return {"images": self.images, "audio": self.audio, "video": self.video}

    @property
    def shows_media(self) -> bool:
        """Whether there are media to be read, which takes milliseconds; messages need not be well-formed."""
        messages = self.messages if isinstance(self.messages, (list, tuple)) else ()
        return any(self.prompt_media.values()) or show_media(messages)


#: What `Request.of` takes for the fields of `SamplingParams`.
_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name not in Request.__dataclass_fields__)


def require_request(value: Any) -> None:
    """Raise RequestError for what is no Request."""
    require_kind(isinstance(value, Request), "a request", value, "Request(...)")


def request_list(requests: Any) -> list[Any]:
    """Several requests; RequestError for what is no list. Each is checked when its turn comes."""
    require_kind(
        is_list(requests) and not isinstance(requests, Mapping), "requests", requests, "a list of Request(...)"
    )
    return list(requests)


def is_list(value: Any) -> bool:
    """Whether values stand in it: text and numbers are no lists."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes)) and getattr(value, "ndim", 1) > 0


def check_choices(params: Any, adapter: Any) -> None:
    """Raise RequestError for what are no sampling parameters, or no name of an adapter."""
    require_kind(isinstance(params, (SamplingParams, type(None))), "params", params, "SamplingParams(...), or None")
    require_kind(isinstance(adapter, (str, type(None))), "adapter", adapter, "a LoRA adapter's name, or None")


def check_keywords(given: Iterable[str], known: tuple[str, ...]) -> None:
    """Raise TypeError for a keyword that is not known, as any call does."""
    for name in given:
        if name not in known:
            raise TypeError(f"unknown keyword argument {name!r}{did_you_mean(name, known)}")


def _check_prompt(prompt: Any) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if isinstance(prompt, (bytes, bytearray)):
        raise RequestError("the prompt is bytes: expected text (bytes.decode()), or a list of token ids")
    is_list = isinstance(prompt, Collection) and not isinstance(prompt, (Mapping, Set))
    require_kind(is_list and getattr(prompt, "ndim", 1) == 1, "the prompt", prompt, "text, or a list of token ids")
    for each in prompt:  # the engine knows its vocabulary
        if not isinstance(each, Integral) or isinstance(each, bool):
            raise RequestError(f"the prompt has {shown(each)} among its token ids: expected whole numbers, or text")
        if not 0 <= int(each) < _IDS:
            found = f"the prompt has the token id {shown(int(each))}"
            raise RequestError(f"{found}: expected 0 to {_IDS - 1}, use the model's own tokenizer")


def checked_priority(priority: Any) -> int:
    """A priority; RequestError for anything else."""
    expected = f"a whole number from {-_PRIORITIES} to {_PRIORITIES}, of which the larger goes first"
    require(is_whole(priority, -_PRIORITIES, _PRIORITIES), "priority", priority, expected)
    return int(priority)


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
    token each, or several where a draft was accepted. The request gave way to others of a higher priority
    `preemptions` times, and waited `preempted_seconds` for them, which the others contain.
    """

    prefill_seconds: float
    time_to_first_token: float
    decode_seconds: float
    total_seconds: float
    queue_seconds: float = 0.0
    step_gaps: tuple[float, ...] = ()
    preemptions: int = 0
    preempted_seconds: float = 0.0

    def tokens_per_second(self, completion_tokens: int) -> float:
        """Decoding speed for an answer of `completion_tokens` tokens."""
        return (completion_tokens - 1) / self.decode_seconds if completion_tokens > 1 and self.decode_seconds else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log-probability, and the likeliest tokens in its place with theirs, likeliest first.

    They are of the model's own distribution among the tokens that a structure, `allowed_token_ids` and `bad_words`
    allow, with `logit_bias`, drafted or not; temperature, penalties and filters are not in them. Where fewer tokens are
    allowed, `top` has fewer.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: whole characters only. `text` may be empty where a token ends no character.

    `tool_calls` are pieces of calls, which are no part of `text`.

    `from_draft` says of each token whether the draft had proposed it; it is empty where that is not known.
    `logprobs` are those of each token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True)
class Response:
    """A finished answer.

    `finish_reason` is "stop" (end of turn, a stop id, or the request's `stop_when`), "stop_string", "tool_calls" (end
    of turn, behind calls of tools), "length" (max_tokens), "context" (the KV capacity is used up), "cancelled", or
    "deadline" (its time was over, before it began perhaps: then it is empty). `text` excludes the stop string;
    `token_ids` are all that were generated and count towards usage, the ending one included; after `stop_when`, those
    that were shown. `drafting` says what drafting did, where something might be drafted; `logprobs` has those of each
    token, where they were asked for. `dropped_turns`, of `dropped_messages` in all, are the oldest ones of a session
    that left it before this answer, to make room for it. `structure` is what was asked for, and `structured_from`
    where it begins in `text`: behind the reasoning of a model that thinks, None where that did not end. `tool_calls`
    are the calls that the answer makes, which are no part of `text`; `tool_call_error` says why what began like one
    stayed text, or is not complete. `others` are the answers beside this one, where several were asked for (`n`).
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    stop_match: str | int | None = None
    drafting: DraftingStatistics | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    dropped_turns: int = 0
    dropped_messages: int = 0
    structure: Structure | None = field(default=None, repr=False)
    structured_from: int | None = field(default=None, repr=False)
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_error: str | None = None
    others: tuple[Response, ...] = field(default=(), repr=False)

    @property
    def choices(self) -> tuple[Response, ...]:
        """All `n` answers: this one, which is the first, and the others."""
        return (self, *self.others)

    @cached_property
    def structure_complete(self) -> bool | None:
        """Whether the answer has the whole structure that was asked for: False where a limit, a stop string or the
        caller cut it, None without a structure, and where the answer calls tools instead."""
        if self.structure is None or self.tool_calls:
            return None
        return self.structured_from is not None and self.structure.is_complete(self.text[self.structured_from :])

    @cached_property
    def parsed(self) -> Any:
        """What a complete answer says: of JSON the value, or an instance of the class that was asked for; of another
        structure its text. None where it is not complete, or no structure was asked for.

        What checks of that class's own raise is raised.
        """
        if self.structure is None or not self.structure_complete:
            return None
        return self.structure.parsed(self.text[self.structured_from :])

    def as_message(self) -> dict[str, Any]:
        """The answer as the conversation goes on with it: an assistant's message, with its complete calls."""
        calls = [call.as_message() for call in self.tool_calls if call.complete]
        message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, which a conversation goes on with: not where it was ended before its first
        word."""
        return bool(self.text or self.tool_calls) or self.finish_reason not in ("cancelled", "deadline")
