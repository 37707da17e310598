"""The JSON bodies of requests: every field is taken, reported as one that changes nothing, or refused by its name."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from edgellm.engines.directories.strict_formats import parse_json
from edgellm.errors import RequestError, did_you_mean, shown
from edgellm.http.errors import HTTPError, http_error
from edgellm.multimodal.image_input import image_of_url, readable_formats
from edgellm.requests import Request, checked_priority
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.structure.description import structure_of_response_format
from edgellm.text.messages import IMAGE_PARTS, checked_variables

#: Fields of `SamplingParams` that requests name alike, those that only this server has among them.
SAMPLING = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words"),
)
#: Fields that change no answer here: they are taken, and named in the header `edgellm-ignored`.
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "prediction"),
)
#: Fields that go into a `Request` as they are.
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
#: What `reasoning_effort` may be; the first lets a model that can choose answer at once.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: The engine looks for each stop string after each token.
MOST_STOPS, LONGEST_STOP = 32, 1000


@dataclass(frozen=True)
class ServedModel:
    """The model as requests name it, and what it takes.

    `params` are those of requests that say nothing else, `system` the system prompt of conversations that have none
    (None: the model's own). `template_variables` are what its chat template reads. An image may have `image_pixels`.
    """

    name: str
    adapters: tuple[str, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    template_variables: frozenset[str] = frozenset()
    vocab_size: int = 2**31
    most_images: int = 16
    image_pixels: int = 16_000_000

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may have in its field `model`."""
        return (self.name, *(name for name in self.adapters if name != self.name))

    def adapter_of(self, name: Any) -> str | None:
        """The adapter that answers under a name, None for the model itself; HTTPError for one that there is none of."""
        if name is None:
            raise HTTPError(400, f"model is missing: expected one of {', '.join(self.names)}", param="model")
        if not isinstance(name, str) or name not in self.names:
            message = f"there is no model {shown(name)}{did_you_mean(str(name), self.names)}"
            raise HTTPError(404, message, param="model", code="model_not_found")
        return None if name == self.name else name


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it, and how its answer is to be sent."""

    request: Request
    model: str
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    #: What errors of the engine call fields, with the names that the client knows them by; "" is the prompt's.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: What the answer repeats of the request (`/v1/responses`).
    echoed: Mapping[str, Any] = field(default_factory=dict)


class Fields:
    """The fields of a body, of which each has to be taken. Null stands for a field that is not there."""

    def __init__(self, body: bytes) -> None:
        """Raises HTTPError for what is no JSON object."""
        try:
            value = parse_json(body, "the body", RequestError)
        except RequestError as error:
            raise HTTPError(400, str(error), code="invalid_json") from error
        if not isinstance(value, dict):
            raise HTTPError(400, f"the body is a {type(value).__name__}: expected a JSON object", code="invalid_json")
        self._left = {name: item for name, item in value.items() if item is not None}
        self._known: list[str] = []
        self.ignored: list[str] = []

    def take(self, name: str, kind: type | tuple[type, ...] = object, expected: str = "") -> Any:
        """A field's value; None where it is not there. HTTPError for one of another type than is expected."""
        self._known.append(name)
        value = self._left.pop(name, None)
        wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool and kind is not object)
        if value is not None and wrong:
            raise HTTPError(400, f"{name} is {shown(value)}: expected {expected}", param=name)
        return value

    def flag(self, name: str) -> bool:
        """A field that is true or false; false where it is not there."""
        return bool(self.take(name, bool, "true or false"))

    def only(self, name: str, *values: Any, why: str) -> None:
        """Refuse another value of a field than these; the message says why."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            given = " or ".join(map(repr, values)) or "nothing"
            raise HTTPError(400, f"{name} is {shown(value)}: {why} (expected {given})", param=name)

    def refuse(self, name: str, why: str) -> None:
        """Refuse a field, unless it is empty."""
        value = self.take(name)
        if value is not None and value != [] and value != {}:
            raise HTTPError(400, f"{name} is not served: {why}", param=name, code="unsupported_parameter")

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing, and report them."""
        self.ignored += [name for name in names if self.take(name) is not None]

    def end(self) -> None:
        """HTTPError for what was not taken."""
        for name in self._left:
            message = f"the field {shown(name)} is unknown{did_you_mean(name, self._known)}"
            raise HTTPError(400, message, param=name[:100], code="unknown_parameter")


def checked(name: str, check: Any, value: Any, said: str | None = None) -> Any:
    """What a check makes of a field's value; HTTPError for what it refuses. `said` is the name in its messages."""
    try:
        return check(value)
    except RequestError as error:
        raise http_error(error, {said or name: name, "": name}) from error


def sampling(fields: Fields, model: ServedModel, *limits: str) -> SamplingParams:
    """The parameters of a request on top of the model's; `limits` are the names of its limit of tokens."""
    given: dict[str, Any] = {}
    for name in SAMPLING:
        value = fields.take(name)
        if value is not None:
            given[name] = checked(name, lambda value, name=name: checked_value(name, value), value)
    named = [(name, value) for name in limits if (value := fields.take(name)) is not None]
    if len({repr(value) for _, value in named}) > 1:
        raise HTTPError(400, f"{' and '.join(limits)} differ: give one of them", param=limits[0])
    for name, value in named:
        given["max_tokens"] = checked(name, lambda value: checked_value("max_tokens", value), value, "max_tokens")
    stops = given.get("stop", ())
    if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
        expected = f"expected at most {MOST_STOPS}, each of at most {LONGEST_STOP} characters"
        raise HTTPError(400, f"stop has {len(stops)} texts: {expected}", param="stop")
    return replace(model.params, **given)


def common(fields: Fields, model: ServedModel) -> tuple[str, bool, dict[str, Any]]:
    """What all requests for an answer have: the model's name, whether to stream, and fields of a `Request`: the adapter
    of that name, deadline and priority."""
    adapter = model.adapter_of(name := fields.take("model"))
    stream = fields.flag("stream")
    deadline = fields.take("deadline", (int, float), "a number of seconds")
    priority = fields.take("priority")
    priority = 0 if priority is None else checked("priority", checked_priority, priority)
    fields.only("n", 1, why="one answer is given to a request")
    fields.ignore(*HARMLESS)
    return name, stream, {"adapter": adapter, "deadline": deadline, "priority": priority}


def stream_options(fields: Fields, stream: bool) -> bool:
    """Whether the last piece of a stream is to tell the usage."""
    options = fields.take("stream_options", dict, "an object")
    if options is None:
        return False
    if not stream:
        raise HTTPError(400, "stream_options are of use with stream alone: leave them out", param="stream_options")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation") or not isinstance(value, (bool, type(None))):
            message = f"stream_options has {shown(name)}: {shown(value)}; expected {{'include_usage': true}}"
            raise HTTPError(400, message, param="stream_options")
    if options.get("include_obfuscation"):
        fields.ignored.append("stream_options.include_obfuscation")
    return bool(options.get("include_usage"))


def structured(params: SamplingParams, name: str, response_format: Any) -> SamplingParams:
    """Parameters with the structure that a field in the form of `response_format` names."""
    structure = checked(name, structure_of_response_format, response_format, "response_format")
    return params if structure is None else checked(name, lambda it: replace(params, structure=it), structure)


def template_variables(fields: Fields) -> dict[str, Any]:
    """What a request sets for the chat template."""
    name = "chat_template_kwargs"
    return checked(name, checked_variables, fields.take(name), "template_variables")


def thinking(fields: Fields, model: ServedModel, effort: Any, name: str) -> dict[str, Any]:
    """The chat template's variables, with what a reasoning effort, the field `name`, means to it; what it does not read
    is reported."""
    variables = template_variables(fields)
    found: dict[str, Any] = {}
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise HTTPError(400, f"{name} is {shown(effort)}: expected one of {', '.join(EFFORTS)}", param=name)
        if "enable_thinking" in model.template_variables:
            found["enable_thinking"] = effort != "none"
        if "reasoning_effort" in model.template_variables and effort != "none":
            found["reasoning_effort"] = effort
        if not found:
            fields.ignored.append(name)
    unread = [each for each in variables if each not in model.template_variables]
    fields.ignored += [f"chat_template_kwargs.{each}" for each in unread]
    return found | variables


def with_images(fields: Fields, messages: Any, model: ServedModel, name: str = "messages") -> list[Any]:
    """Messages with the bytes of their images in place of data URLs, the system prompt of the server before them where
    they have none.

    Raises HTTPError for other sources than data URLs (no request reads a file of this machine, nothing is fetched), for
    too many images and for too large ones, before anything of them is decoded. What else is wrong with messages the
    engine says.
    """
    if not isinstance(messages, list):
        raise HTTPError(400, f"{name} is {shown(messages)}: expected a list of messages", param=name)
    count, found = 0, []
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            parts = list(content)
            for place, part in enumerate(content):
                if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
                    parts[place] = _image(fields, part, f"part {place + 1} of message {number}", model, name)
                    count += 1
            found.append(message | {"content": parts})
        else:
            found.append(message)
    if count > model.most_images:
        message = f"{name} has {count} images: at most {model.most_images} are taken (--max-images)"
        raise HTTPError(400, message, param=name, code="too_many_images")
    if model.system is not None and not any(
        isinstance(message, dict) and message.get("role") in ("system", "developer") for message in found
    ):
        found.insert(0, {"role": "system", "content": model.system})
    return found


def _image(fields: Fields, part: dict[str, Any], what: str, model: ServedModel, param: str) -> dict[str, Any]:
    source = part.get("image_url")
    described = source if isinstance(source, dict) else {"url": source, "detail": part.get("detail")}
    url = described.get("url")
    others = sorted(set(part) - {"type", "image_url", "detail"} | set(described) - {"url", "detail"})
    if others or not isinstance(url, str) or url[:5].lower() != "data:":
        found = f"has {', '.join(others)}" if others else f"shows {shown(url)[:80]}"
        raise HTTPError(
            400,
            f"{what} {found}: images are taken as data URLs alone, "
            '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
            param=param,
            code="invalid_image",
        )
    if described.get("detail") not in (None, "auto") and "image_url.detail" not in fields.ignored:
        fields.ignored.append("image_url.detail")
    data = checked_image(url, param)
    pixels = _pixels(data)
    if pixels > model.image_pixels:
        message = f"{what} has {pixels:,} pixels: at most {model.image_pixels:,} are taken (--max-image-pixels)"
        raise HTTPError(400, message, param=param, code="image_too_large")
    return {"type": "image", "image": data}


def checked_image(url: str, param: str) -> bytes:
    """The bytes of a data URL."""
    try:
        data = image_of_url(url)
    except Exception as error:
        raise http_error(error, {"": param}) from error
    assert isinstance(data, bytes)  # a data URL is never a path
    return data


def _pixels(data: bytes) -> int:
    """How many pixels a file says that it has; 0 where it is no image that can be read, which the engine explains."""
    try:
        with Image.open(io.BytesIO(data), formats=readable_formats()) as image:
            return image.width * image.height
    except Image.DecompressionBombError:
        return sys.maxsize
    except Exception:  # whatever hostile bytes make a decoder raise
        return 0


def chat(body: bytes, model: ServedModel) -> Asked:
    """A request to `/v1/chat/completions`. Raises HTTPError."""
    fields = Fields(body)
    name, stream, shared = common(fields, model)
    params = sampling(fields, model, "max_tokens", "max_completion_tokens")
    logprobs, top = fields.flag("logprobs"), fields.take("top_logprobs", int, "a whole number")
    if top is not None and not logprobs:
        raise HTTPError(400, "top_logprobs is given without logprobs: set logprobs to true", param="top_logprobs")
    if logprobs:
        check = replace(params, logprobs=0)
        params = checked("top_logprobs", lambda count: replace(check, logprobs=count), top or 0, "logprobs")
    params = structured(params, "response_format", fields.take("response_format", dict, "an object"))
    tools = {name: fields.take(name) for name in TOOLS}
    fields.only("modalities", ["text"], why="answers are text")
    for each in ("audio", "functions", "function_call", "web_search_options", "moderation", "verbosity"):
        fields.refuse(each, "there is nothing here that does it")
    variables = thinking(fields, model, fields.take("reasoning_effort"), "reasoning_effort")
    include_usage = stream_options(fields, stream)
    continued = fields.flag("continue_final_message")
    messages = fields.take("messages")
    fields.end()
    if messages is None:
        raise HTTPError(400, "messages is missing: expected a list of messages", param="messages")
    request = {
        "messages": with_images(fields, messages, model),
        "params": params,
        **shared,
        **tools,
    }
    request |= {"template_variables": variables, "continue_final_message": continued}
    return asked({"": "messages", "structure": "response_format"}, fields, name, request, stream, include_usage)


def asked(
    named: Mapping[str, str],
    fields: Fields,
    model: str,
    request: dict[str, Any],
    stream: bool = False,
    include_usage: bool = False,
) -> Asked:
    """What was asked, of the fields of a `Request`; `named` are fields that the body calls otherwise, and "" is the one
    that has the prompt. Raises HTTPError."""
    names = {name: name for name in (*SAMPLING, *TOOLS, "deadline", "continue_final_message")} | dict(named)
    try:
        found = Request(**request)
    except RequestError as error:
        raise http_error(error, names) from error
    return Asked(found, model, stream, include_usage, tuple(fields.ignored), names)


def completion(body: bytes, model: ServedModel) -> Asked:
    """A request to `/v1/completions`. Raises HTTPError."""
    fields = Fields(body)
    name, stream, shared = common(fields, model)
    params = sampling(fields, model, "max_tokens")
    logprobs = fields.take("logprobs", int, "a whole number")
    if logprobs is not None:
        params = checked("logprobs", lambda count: replace(params, logprobs=count), logprobs)
    params = structured(params, "response_format", fields.take("response_format", dict, "an object"))
    fields.only("best_of", 1, why="one answer is given to a request")
    fields.only("echo", False, why="the prompt is not repeated")
    fields.only("suffix", "", why="text is not filled in")
    include_usage = stream_options(fields, stream)
    prompt = single_prompt(fields.take("prompt"), model)
    fields.end()
    request = {"prompt": prompt, "params": params, **shared}
    return asked({"": "prompt"}, fields, name, request, stream, include_usage)


def single_prompt(prompt: Any, model: ServedModel) -> str | Sequence[int]:
    """The prompt of a request: text, token ids of the model, or a list of one of them. Raises HTTPError."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
        for each in prompt:
            if not 0 <= each < model.vocab_size:
                message = f"prompt has the token id {each}: this model's are 0 to {model.vocab_size - 1}"
                raise HTTPError(400, message, param="prompt")
        return prompt
    found = "missing" if prompt is None else shown(prompt)
    raise HTTPError(400, f"prompt is {found}: expected one text, or one list of token ids", param="prompt")


def tokens(body: bytes, model: ServedModel) -> Asked:
    """A request to `/tokenize`: a `prompt`, or `messages`, perhaps with `tools`. Raises HTTPError."""
    fields = Fields(body)
    adapter = model.adapter_of(fields.take("model") or model.name)
    prompt, messages = fields.take("prompt"), fields.take("messages")
    request = {"adapter": adapter, "tools": fields.take("tools"), "template_variables": template_variables(fields)}
    fields.end()
    if (prompt is None) == (messages is None):
        raise HTTPError(400, "give a prompt or messages, one of them", param="prompt")
    if messages is None:
        return asked({"": "prompt"}, fields, model.name, {"prompt": single_prompt(prompt, model), **request})
    return asked({"": "messages"}, fields, model.name, {"messages": with_images(fields, messages, model), **request})
