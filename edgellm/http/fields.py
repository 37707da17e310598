"""The JSON bodies of requests: every field is taken, reported as one that changes nothing, or refused by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from edgellm.engines.formats.strict_formats import parse_json
from edgellm.errors import RequestError, did_you_mean, shown
from edgellm.http.bodies import TEXT_BYTES, check_body, check_images, file_of_part, image_of_part
from edgellm.http.errors import HTTPError, checked, http_error, refused, unserved, wrong
from edgellm.http.kept_responses import Items
from edgellm.requests import Request, checked_priority
from edgellm.sampling_params import SamplingParams, checked_value
from edgellm.structure.description import Structure, structure_of_response_format
from edgellm.text.messages import checked_variables, media_kind
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
#: The engine looks for each stop string after each token.
MOST_STOPS, LONGEST_STOP = 32, 1000
#: What errors say that a field of a type has to be; the one number that may be broken is the deadline.
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number of seconds"}
_EXPECTED |= {str: "text", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class ServedModel:
    """The model as requests name it, and what it takes.

    `params` are those of requests that say nothing else, `system` the system prompt of conversations that have none
    (None: the model's own). `template_variables` are what its chat template reads. An image may have `image_pixels`,
    and a body `text_bytes` beside its images. `family` is the model's.
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
    family: str = ""
    #: What it is, for who has not chosen it.
    description: str | None = None

    @property
    def request_pixels(self) -> int:
        return LARGEST_IMAGES * self.image_pixels

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may have in its field `model`."""
        return (self.name, *(name for name in self.adapters if name != self.name))

    def adapter_of(self, name: Any) -> str | None:
        """The adapter that answers under a name, None for the model itself; HTTPError for one that there is none of."""
        if name is None:
            raise wrong("model", name, f"one of {', '.join(self.names)}")
        if isinstance(name, str) and name not in self.names:
            name = name.removesuffix(":latest")  # as ollama's clients name what has no tag
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
    #: Those of the whole conversation, where the answer is to be kept, and whether reasoning is given to be handed back
    #: (`/v1/responses`).
    items: Items | None = None
    shows_reasoning: bool = False

    @property
    def request(self) -> Request:
        """The first one, which the others differ from in prompt and seed alone."""
        return self.requests[0]


class Fields:
    """The fields of a body, of which each has to be taken. Null stands for a field that is not there."""

    def __init__(self, body: bytes, model: ServedModel, streams: bool = False) -> None:
        """`streams` counts where the body has no `stream`. Raises HTTPError for what is no JSON object, or has too much
        in it."""
        check_body(body, model.text_bytes)
        try:
            value = parse_json(body, "the body", RequestError)
        except RequestError as error:
            raise HTTPError(400, str(error), code="invalid_json") from error
        if not isinstance(value, dict):
            raise HTTPError(400, f"the body is a {type(value).__name__}: expected a JSON object", code="invalid_json")
        check_images(body, value, model.text_bytes)
        self.model = model
        #: What `common` finds: the name of the model, and how the answer is to be streamed.
        self.name, self.stream, self.include_usage = model.name, streams, False
        self._left = {name: item for name, item in value.items() if item is not None}
        self._known: dict[str, None] = {}
        self.ignored: list[str] = []
        #: Fields of messages and their parts that change nothing.
        self._unread: dict[str, None] = {}
        #: The values of fields that change nothing.
        self.unused: dict[str, Any] = {}
        #: How many images there are, and their pixels.
        self.images = self.pixels = 0

    def take(self, name: str, kind: type = object) -> Any:
        """A field's value; None where it is not there. HTTPError for one of another type."""
        self._known[name] = None
        value = self._left.pop(name, None)
        if value is None or kind is object:
            return value
        if not isinstance(value, (int, float) if kind is float else kind) or (type(value) is bool and kind is not bool):
            raise wrong(name, value, _EXPECTED[kind])
        return value

    def put(self, name: str, value: Any, what: str) -> None:
        """Have a field that the body has elsewhere, as `what`. HTTPError where it has that field, too."""
        if name in self._left:
            raise refused(what, f"{what} and {name} are ways to say one thing: give one of them")
        self._left[name] = value

    def only(self, name: str, *values: Any, why: str) -> None:
        """Refuse another value of a field than these; the message says why."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            given = " or ".join(map(repr, values)) or "nothing"
            raise refused(name, f"{name} is {shown(value)}: {why} (expected {given})")

    def refuse(self, *names: str, why: str) -> None:
        """Refuse fields, unless they are null or an empty list: an empty object may ask for what there is, as it is."""
        for name in names:
            if self.take(name) not in (None, []):
                raise unserved(name, why)

    def ignore(self, *names: str) -> None:
        """Take fields that change nothing, and report them."""
        found = {name: value for name in names if (value := self.take(name)) is not None}
        self.unused |= found
        self.ignored += found

    def tell_unread(self, given: Any, read: Collection[str], name: str) -> None:
        """Report what an object, if it is one, has beside the fields that are `read`; `name` says where it stands."""
        has = given if isinstance(given, dict) else {}
        self._unread |= {f"{name}.{key}": None for key in has if key not in read and has[key] not in (None, [])}

    def end(self) -> None:
        """HTTPError for what was not taken."""
        for name in self._left:
            message = f"the field {shown(name)} is unknown{did_you_mean(name, [*self._known])}"
            raise refused(name[:100], message, "unknown_parameter")

    def common(self) -> dict[str, Any]:
        """What all requests for an answer have, as fields of a `Request`: the adapter of the model's name, deadline and
        priority. The name, and how to stream, are noted."""
        self.name = self.take("model")
        adapter = self.model.adapter_of(self.name)
        stream = self.take("stream", bool)
        self.stream = self.stream if stream is None else stream
        self.include_usage = self._include_usage()
        deadline, priority = self.take("deadline", float), self.take("priority")
        priority = 0 if priority is None else checked("priority", checked_priority, priority)
        self.ignore(*HARMLESS)
        return {"adapter": adapter, "deadline": deadline, "priority": priority}

    def _include_usage(self) -> bool:
        """Whether the last piece of a stream is to tell the usage."""
        options = self.take("stream_options", dict)
        if options is None:
            return False
        if not self.stream:
            raise refused("stream_options", "stream_options are of use with stream alone: leave them out")
        for name, value in options.items():
            if name not in ("include_usage", "include_obfuscation") or not isinstance(value, (bool, type(None))):
                message = f"stream_options has {shown(name)}: {shown(value)}; expected {{'include_usage': true}}"
                raise refused("stream_options", message)
        if options.get("include_obfuscation"):
            self.ignored.append("stream_options.include_obfuscation")
        return bool(options.get("include_usage"))

    def sampling(self, *limits: str, stop: str = "stop") -> SamplingParams:
        """The parameters of a request on top of the model's; `limits` are the names of its limit of tokens, `stop` that
        of its stop strings."""
        given: dict[str, Any] = {}
        for name in SAMPLING:
            called = stop if name == "stop" else name
            if (value := self.take(called)) is not None:
                given[name] = checked(called, partial(checked_value, name), value, name)
        named = {name: value for name in limits if (value := self.take(name)) is not None}
        if len(set(map(repr, named.values()))) > 1:
            raise refused(limits[0], f"{' and '.join(limits)} differ: give one of them")
        for name, value in named.items():
            given["max_tokens"] = checked(name, partial(checked_value, "max_tokens"), value, "max_tokens")
        stops = given.get("stop", ())
        if len(stops) > MOST_STOPS or any(len(stop) > LONGEST_STOP for stop in stops):
            expected = f"expected at most {MOST_STOPS}, each of at most {LONGEST_STOP} characters"
            raise refused(stop, f"{stop} has {len(stops)} texts: {expected}")
        return checked("min_tokens", lambda given: replace(self.model.params, **given), given)

    def structured(self, params: SamplingParams, response_format: Any, name: str) -> SamplingParams:
        """Parameters with the structure that `response_format`, the field `name`, or another server's field has."""
        structure = checked(name, structure_of_response_format, response_format, "response_format")
        given = [(each, {kind: value}) for each, kind in GUIDES.items() if (value := self.take(each)) is not None]
        described = self.take("structured_outputs", dict)
        if described is not None:
            given.append(("structured_outputs", described))
        if len(given) + (structure is not None) > 1:
            names = [each for each, _ in given] + [name] * (structure is not None)
            raise refused(names[0], f"{' and '.join(names)} are ways to say one thing: give one of them")
        for name, described in given:
            try:
                structure = _guide(name, described)
            except HTTPError as error:
                raise refused(name, f"{error.message}. OpenAI's field for this is {RESPONSE_FORMAT}") from error
        return params if structure is None else checked(name, lambda it: replace(params, structure=it), structure)

    def truncation(self) -> OngoingConversation | None:
        """What lets a conversation's oldest turns leave where it does not fit the context, if that is asked for."""
        chosen = self.take("truncation")
        if chosen not in (None, "auto", "disabled"):
            expected = "'auto', by which the oldest turns leave where they do not fit, or 'disabled'"
            raise wrong("truncation", chosen, expected)
        return OngoingConversation() if chosen == "auto" else None

    def template_variables(self) -> dict[str, Any]:
        """What a request sets for the chat template."""
        name = "chat_template_kwargs"
        return checked(name, checked_variables, self.take(name), "template_variables")

    def take_object(self, name: str, used: str) -> Any:
        """An object of which the field `used` alone changes an answer, None without it; what else it has is told."""
        given = self.take(name, dict)
        self.ignored += [f"{name}.{key}" for key, value in (given or {}).items() if key != used and value is not None]
        return given

    def thinking(self, effort: Any, name: str) -> dict[str, Any]:
        """The chat template's variables, and what an effort, the field `name`, means to it; unread ones are told."""
        variables, read = self.template_variables(), self.model.template_variables
        found: dict[str, Any] = {}
        if effort is not None:
            if effort not in EFFORTS:
                raise wrong(name, effort, f"one of {', '.join(EFFORTS)}")
            if "enable_thinking" in read:
                found["enable_thinking"] = effort != "none"
            if "reasoning_effort" in read and effort != "none":
                found["reasoning_effort"] = effort
            if not found:
                self.ignored.append(name)
        self.ignored += [f"chat_template_kwargs.{each}" for each in variables if each not in read]
        return found | variables

    def with_images(self, messages: Any, name: str = "messages") -> list[Any]:
        """Messages with the bytes of their images in place of data URLs, the system prompt of the server before them
        where they have none. Raises HTTPError for other sources than data URLs (no request reads a file of this
        machine, nothing is fetched), for too many images and for too large ones, before anything of them is decoded.
        What else is wrong with messages the engine says."""
        if not isinstance(messages, list):
            raise wrong(name, messages, "a list of messages")
        model, found = self.model, list(messages)
        for index, message in enumerate(messages):
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                what = f"of message {index + 1}"
                parts = [self._part(part, f"part {place} {what}", name) for place, part in enumerate(content, 1)]
                found[index] = message | {"content": parts}
        if self.images > model.most_images:
            message = f"{name} has {self.images} images: at most {model.most_images} are taken (--max-images)"
            raise refused(name, message, "too_many_images")
        if self.pixels > (most := model.request_pixels):
            taken = f"at most {most:,} are taken, {LARGEST_IMAGES} times those of one (--max-image-pixels)"
            raise refused(name, f"{name} has images of {self.pixels:,} pixels: {taken}", "images_too_large")
        roles = [message.get("role") for message in found if isinstance(message, dict)]
        if model.system is not None and "system" not in roles and "developer" not in roles:
            found.insert(0, {"role": "system", "content": model.system})
        return found

    def _part(self, part: Any, what: str, param: str) -> Any:
        """A part of a message as the engine takes it: text as it is, images, videos and sounds as bytes."""
        kind = media_kind(part)
        if kind is None:
            self.tell_unread(part, ("type", "text"), f"{param}.content")
            return part
        if kind in ("audio", "video"):
            data = file_of_part(part, kind, what, param)
            # They share the room that there is for images: a video counts as the largest one.
            self.images += kind == "video"
            self.pixels += self.model.image_pixels if kind == "video" else len(data) // 3
        else:
            data, pixels, has_detail = image_of_part(part, what, param, self.model.image_pixels)
            self.images, self.pixels = self.images + 1, self.pixels + pixels
            self._unread |= {"image_url.detail": None} if has_detail else {}
        return {"type": kind, kind: data}

    def parsed(self, named: Mapping[str, str], request: Mapping[str, Any], **more: Any) -> ParsedRequest:
        """What was asked, of the fields of a `Request` and what `more` is known of a `ParsedRequest`. `named` are
        fields that the body calls otherwise, and "" is the one that has the prompt. Raises HTTPError."""
        names = {name: name for name in (*SAMPLING, *TOOLS, "deadline", "continue_final_message")} | dict(named)
        try:
            found = Request(**request)
        except RequestError as error:
            raise http_error(error, names) from error
        about: dict[str, Any] = {"ignored": (*self.ignored, *self._unread), "fields": names, "pixels": self.pixels}
        return ParsedRequest((found,), self.name, self.stream, self.include_usage, **about, **more)


def with_logprobs(params: SamplingParams, name: str, count: int) -> SamplingParams:
    """Parameters with so many of the likeliest tokens in each place, as the field `name` asks."""
    return checked(name, lambda count: replace(params, logprobs=count), count, "logprobs")


def with_chat_logprobs(params: SamplingParams, fields: Fields) -> SamplingParams:
    """Parameters with what logprobs and top_logprobs ask: as OpenAI has it, the latter, even 0, needs the former."""
    logprobs, top = fields.take("logprobs", bool), fields.take("top_logprobs", int)
    if top is not None and not logprobs:
        raise refused("top_logprobs", "top_logprobs is given without logprobs: set logprobs to true")
    return with_logprobs(params, "top_logprobs", top or 0) if logprobs else params


def _guide(name: str, described: Mapping[str, Any]) -> Structure:
    """The structure of one kind that a field describes; a JSON schema may be text."""
    described = {kind: value for kind, value in described.items() if value is not None}
    kinds = (*GUIDES.values(), "json_object")
    if unknown := [kind for kind in described if kind not in kinds]:
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
