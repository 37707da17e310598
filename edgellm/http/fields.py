"""The JSON bodies of requests: every field is taken, reported as one that changes nothing, or refused by its name."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image

from edgellm.engines.formats.strict_formats import parse_json
from edgellm.errors import RequestError, did_you_mean, shown
from edgellm.http.bodies import TEXT_BYTES, check_body, check_images
from edgellm.http.errors import HTTPError, http_error
from edgellm.multimodal.image_input import image_of_url, readable_formats
from edgellm.requests import Request, checked_priority
from edgellm.sampling_params import LARGEST_SEED, SamplingParams, checked_value
from edgellm.structure.description import Structure, structure_of_response_format
from edgellm.text.messages import IMAGE_PARTS, checked_variables
from edgellm.text.turns import OngoingConversation

#: Fields of `SamplingParams` that requests name alike, those that only this server has among them.
SAMPLING = (
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "logit_bias"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "allowed_token_ids", "bad_words"),
    "min_tokens",
)
#: Fields that change no answer here: they are taken, and named in the header `edgellm-ignored`.
HARMLESS = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prompt_cache_options", "prediction", "cache_prompt", "keep_alive"),
)
#: Fields of other servers that say what `response_format` says, by the kind of structure that they have.
GUIDES = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
GUIDES |= {"grammar": "grammar"}
RESPONSE_FORMAT = "response_format: {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': ...}}"
#: Fields that go into a `Request` as they are.
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
#: What `reasoning_effort` may be; the first lets a model that can choose answer at once.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
#: All images of a request have together at most so many times the pixels that one may have.
LARGEST_IMAGES = 4
#: Completions end after so many tokens where nothing says how many; a request has at most so many answers.
COMPLETION_TOKENS, MOST_ANSWERS = 16, 64
#: The engine looks for each stop string after each token.
MOST_STOPS, LONGEST_STOP = 32, 1000


@dataclass(frozen=True)
class ServedModel:
    """The model as requests name it, and what it takes.

    `params` are those of requests that say nothing else, `system` the system prompt of conversations that have none
    (None: the model's own). `template_variables` are what its chat template reads. An image may have `image_pixels`,
    and a body `text_bytes` beside its images.
    """

    name: str
    adapters: tuple[str, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    template_variables: frozenset[str] = frozenset()
    vocab_size: int = 2**31
    most_images: int = 16
    image_pixels: int = 16_000_000
    text_bytes: int = TEXT_BYTES
    #: What it is, for who has not chosen it.
    description: str | None = None

    @property
    def request_pixels(self) -> int:
        """The pixels of all images of a request."""
        return LARGEST_IMAGES * self.image_pixels

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
class ParsedRequest:
    """What the engine is asked, and how the answers are to be sent."""

    #: One for each answer; those to one prompt, `answers_each`, stand together.
    requests: tuple[Request, ...]
    model: str
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    #: What errors of the engine call fields, with the names that the client knows them by; "" is the prompt's.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: What the answer repeats of the request (`/v1/responses`).
    echoed: Mapping[str, Any] = field(default_factory=dict)
    #: Of all its images.
    pixels: int = 0
    answers_each: int = 1
    #: Whether answers begin with their prompts.
    echo: bool = False
    #: What drops its oldest turns where it does not fit.
    conversation: OngoingConversation | None = None

    @property
    def request(self) -> Request:
        """The first one, which the others differ from in prompt and seed alone."""
        return self.requests[0]


class Fields:
    """The fields of a body, of which each has to be taken. Null stands for a field that is not there."""

    def __init__(self, body: bytes, model: ServedModel) -> None:
        """Raises HTTPError for what is no JSON object, or has too much in it."""
        check_body(body, model.text_bytes)
        try:
            value = parse_json(body, "the body", RequestError)
        except RequestError as error:
            raise HTTPError(400, str(error), code="invalid_json") from error
        if not isinstance(value, dict):
            raise HTTPError(400, f"the body is a {type(value).__name__}: expected a JSON object", code="invalid_json")
        check_images(body, value, model.text_bytes)
        self._left = {name: item for name, item in value.items() if item is not None}
        self._known: list[str] = []
        self.ignored: list[str] = []
        #: The values of fields that change nothing.
        self.unused: dict[str, Any] = {}
        #: Pixels of the images.
        self.pixels = 0

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
        found = {name: value for name in names if (value := self.take(name)) is not None}
        self.unused |= found
        self.ignored += found

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
    return checked("min_tokens", lambda given: replace(model.params, **given), given)


def common(fields: Fields, model: ServedModel) -> tuple[str, bool, dict[str, Any]]:
    """What all requests for an answer have: the model's name, whether to stream, and fields of a `Request`: the adapter
    of that name, deadline and priority."""
    adapter = model.adapter_of(name := fields.take("model"))
    stream = fields.flag("stream")
    deadline = fields.take("deadline", (int, float), "a number of seconds")
    priority = fields.take("priority")
    priority = 0 if priority is None else checked("priority", checked_priority, priority)
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


def structured(fields: Fields, params: SamplingParams, name: str, response_format: Any) -> SamplingParams:
    """Parameters with the structure that the field `name`, in the form of `response_format`, describes, or one of the
    fields that other servers have for that."""
    structure = checked(name, structure_of_response_format, response_format, "response_format")
    given = [(each, {kind: value}) for each, kind in GUIDES.items() if (value := fields.take(each)) is not None]
    described = fields.take("structured_outputs", dict, "an object")
    if described is not None:
        given.append(("structured_outputs", {kind: value for kind, value in described.items() if value is not None}))
    if len(given) + (structure is not None) > 1:
        names = [each for each, _ in given] + [name] * (structure is not None)
        raise HTTPError(400, f"{' and '.join(names)} are ways to say one thing: give one of them", param=names[0])
    for name, described in given:
        try:
            structure = _guide(name, described)
        except HTTPError as error:
            message = f"{error.message}. OpenAI's field for this is {RESPONSE_FORMAT}"
            raise HTTPError(400, message, param=name) from error
    return params if structure is None else checked(name, lambda it: replace(params, structure=it), structure)


def _guide(name: str, described: Mapping[str, Any]) -> Structure:
    """The structure of one kind that a field describes; a JSON schema may be text."""
    kinds = (*GUIDES.values(), "json_object")
    unknown = [kind for kind in described if kind not in kinds]
    if unknown:
        raise HTTPError(400, f"{name} has {shown(unknown[0])}: expected one of {', '.join(dict.fromkeys(kinds))}")
    schema = described.get("json")
    if isinstance(schema, str):
        schema = checked(name, lambda text: parse_json(text.encode(), name, RequestError), schema)
        described = {**described, "json": schema}
    if "::=" in str(described.get("grammar")):
        raise HTTPError(400, f"{name} has '::=', as llama.cpp's grammars do: expected one in Lark's form")
    try:
        return Structure(**described)
    except RequestError as error:
        raise http_error(error, dict.fromkeys(kinds, name)) from error


def truncation(fields: Fields) -> OngoingConversation | None:
    """What lets a conversation's oldest turns leave where it does not fit the context, if that is asked for."""
    chosen = fields.take("truncation")
    if chosen not in (None, "auto", "disabled"):
        expected = "'auto', by which the oldest turns leave where they do not fit, or 'disabled'"
        raise HTTPError(400, f"truncation is {shown(chosen)}: expected {expected}", param="truncation")
    return OngoingConversation() if chosen == "auto" else None


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
    if fields.pixels > model.request_pixels:
        most = f"at most {model.request_pixels:,} are taken, {LARGEST_IMAGES} times those of one (--max-image-pixels)"
        message = f"{name} has images of {fields.pixels:,} pixels: {most}"
        raise HTTPError(400, message, param=name, code="images_too_large")
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
    fields.pixels += pixels
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


def chat(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/v1/chat/completions`. Raises HTTPError."""
    fields = Fields(body, model)
    name, stream, shared = common(fields, model)
    fields.only("n", 1, why="one answer is given to a conversation")
    params = sampling(fields, model, "max_tokens", "max_completion_tokens")
    logprobs, top = fields.flag("logprobs"), fields.take("top_logprobs", int, "a whole number")
    if top is not None and not logprobs:
        raise HTTPError(400, "top_logprobs is given without logprobs: set logprobs to true", param="top_logprobs")
    if logprobs:
        check = replace(params, logprobs=0)
        params = checked("top_logprobs", lambda count: replace(check, logprobs=count), top or 0, "logprobs")
    params = structured(fields, params, "response_format", fields.take("response_format", dict, "an object"))
    tools = {name: fields.take(name) for name in TOOLS}
    fields.only("modalities", ["text"], why="answers are text")
    for each in ("audio", "functions", "function_call", "web_search_options", "moderation", "verbosity"):
        fields.refuse(each, "there is nothing here that does it")
    variables = thinking(fields, model, fields.take("reasoning_effort"), "reasoning_effort")
    include_usage = stream_options(fields, stream)
    continued = fields.flag("continue_final_message")
    messages, conversation = fields.take("messages"), truncation(fields)
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
    named = {"": "messages", "structure": "response_format"}
    found = asked(named, fields, name, request, stream, include_usage)
    return replace(found, conversation=conversation)


def asked(
    named: Mapping[str, str],
    fields: Fields,
    model: str,
    request: dict[str, Any],
    stream: bool = False,
    include_usage: bool = False,
) -> ParsedRequest:
    """What was asked, of the fields of a `Request`; `named` are fields that the body calls otherwise, and "" is the one
    that has the prompt. Raises HTTPError."""
    names = {name: name for name in (*SAMPLING, *TOOLS, "deadline", "continue_final_message")} | dict(named)
    try:
        found = Request(**request)
    except RequestError as error:
        raise http_error(error, names) from error
    return ParsedRequest((found,), model, stream, include_usage, tuple(fields.ignored), names, pixels=fields.pixels)


def completion(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/v1/completions`, for `n` answers to each of its prompts. Raises HTTPError."""
    fields = Fields(body, model)
    name, stream, shared = common(fields, model)
    params = sampling(fields, model, "max_tokens")
    if params.max_tokens is None:
        params = replace(params, max_tokens=max(COMPLETION_TOKENS, params.min_tokens))
    logprobs = fields.take("logprobs", int, "a whole number")
    if logprobs is not None:
        params = checked("logprobs", lambda count: replace(params, logprobs=count), logprobs)
    params = structured(fields, params, "response_format", fields.take("response_format", dict, "an object"))
    count, echo = fields.take("n", int, "a whole number"), fields.flag("echo")
    count = 1 if count is None else count
    fields.only("best_of", count, why="all answers are given, none is chosen")
    fields.only("suffix", "", why="text is not filled in")
    if echo and logprobs is not None:
        why = "log-probabilities of prompts are not computed, which echo would show: leave one of them out"
        raise HTTPError(400, f"logprobs are not served with echo: {why}", param="echo")
    include_usage = stream_options(fields, stream)
    prompts = prompt_list(fields.take("prompt"), model)
    fields.end()
    if not 1 <= count * len(prompts) <= MOST_ANSWERS:
        message = f"n is {shown(count)} and there are {len(prompts)} prompts: expected 1 to {MOST_ANSWERS} answers"
        raise HTTPError(400, message, param="prompt" if count == 1 else "n")
    first = asked({"": "prompt"}, fields, name, {"prompt": prompts[0], "params": params, **shared}, stream)
    seeds = [None if params.seed is None else (params.seed + more) % (LARGEST_SEED + 1) for more in range(count)]
    drawn = [replace(params, seed=seed) for seed in seeds]
    requests = tuple(replace(first.request, prompt=prompt, params=each) for prompt in prompts for each in drawn)
    return replace(first, requests=requests, include_usage=include_usage, answers_each=count, echo=echo)


def prompt_list(prompts: Any, model: ServedModel) -> list[str | Sequence[int]]:
    """The prompts of a request: one, or a list of them, each text or token ids of the model. Raises HTTPError."""
    if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], (str, list))):
        prompts = [prompts]
    return [_prompt(each, model) for each in prompts]


def _prompt(prompt: Any, model: ServedModel) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt):
        for each in prompt:
            if not 0 <= each < model.vocab_size:
                message = f"prompt has the token id {each}: this model's are 0 to {model.vocab_size - 1}"
                raise HTTPError(400, message, param="prompt")
        return prompt
    found = "missing" if prompt is None else shown(prompt)
    raise HTTPError(400, f"prompt is {found}: expected text, token ids, or a list of these", param="prompt")


def tokens(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/tokenize`: a `prompt`, or `messages`, perhaps with `tools`. Raises HTTPError."""
    fields = Fields(body, model)
    adapter = model.adapter_of(fields.take("model") or model.name)
    prompt, messages = fields.take("prompt"), fields.take("messages")
    request = {"adapter": adapter, "tools": fields.take("tools"), "template_variables": template_variables(fields)}
    fields.end()
    if (prompt is None) == (messages is None):
        raise HTTPError(400, "give a prompt or messages, one of them", param="prompt")
    if messages is None:
        prompt, *others = prompt_list(prompt, model)
        if others:
            raise HTTPError(400, f"prompt is a list of {len(others) + 1}: expected one", param="prompt")
        return asked({"": "prompt"}, fields, model.name, {"prompt": prompt, **request})
    return asked({"": "messages"}, fields, model.name, {"messages": with_images(fields, messages, model), **request})
