"""`/v1/messages` in the form of Anthropic's API, as far as text, images and tools that the request has itself."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from edgellm.errors import shown
from edgellm.http.answers import Piece, Writer, event
from edgellm.http.errors import MESSAGES, HTTPError, checked, refused, wrong
from edgellm.http.fields import Fields, ParsedRequest, ServedModel
from edgellm.requests import Response, Usage
from edgellm.tool_calls.calls import ToolCall, ToolCallDelta
from edgellm.tool_calls.values import json_text

#: Versions of the API, in the header `anthropic-version`, whose answers are alike: those before stream otherwise.
VERSIONS = ("2023-06-01", "2026-10-21")
#: Fields of blocks and tools that change no answer. Whether a tool failed is for its text to say: no template is told.
_HARMLESS = ("cache_control", "is_error", "eager_input_streaming")
#: Fields of blocks that come back as they were answered, with nothing in them that matters.
_RETURNED = ("signature", "caller")
_ROLES = ("user", "assistant", "system")
#: Types of blocks, with the fields of each.
_BLOCKS: dict[str, tuple[str, ...]] = {"text": ("text",), "image": ("source",), "thinking": ("thinking",)}
_BLOCKS |= {"tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id", "content")}
#: Fields of tools, as OpenAI's API has them, in the order in which models were taught to read them.
_TOOL = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
#: Kinds of `tool_choice`, as requests to the engine have them.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: What finish reasons are called.
_STOP_REASONS = {"stop_string": "stop_sequence", "tool_calls": "tool_use", "length": "max_tokens"}
_STOP_REASONS |= {"deadline": "max_tokens", "context": "model_context_window_exceeded"}
#: What blocks of an answer have beside their text or input, and what of a message is null until it ends, or for ever.
_BESIDE: dict[str, dict[str, Any]] = {"text": {"citations": None}, "thinking": {"signature": ""}}
_BESIDE |= {"tool_use": {"caller": {"type": "direct"}}}
_ENDING = dict.fromkeys(("stop_reason", "stop_sequence", "stop_details", "container"))
#: Errors of the engine begin with the first; the bodies of this endpoint have the second.
_NAMED = {"": "messages", "stop": "stop_sequences", "structure": "output_config.format"}
_NAMED |= {".function": "", ".parameters": ".input_schema"}
_NAMED |= {"parallel_tool_calls": "tool_choice.disable_parallel_tool_use"}


def message_request(body: bytes, model: ServedModel, is_answered: bool = True) -> ParsedRequest:
    """A request to `/v1/messages`, or one whose prompt is only counted. Raises HTTPError."""
    fields = Fields(body, model)
    request = fields.common()
    limit = fields.take("max_tokens", int)
    if limit is None and is_answered:
        raise wrong("max_tokens", limit, "a whole number, the most tokens of the answer")
    params = fields.sampling(stop="stop_sequences")
    params = checked("max_tokens", lambda most: replace(params, max_tokens=most), limit)
    config = fields.take("output_config", dict) or {}
    _check_known(config, "output_config", "effort", "format")
    form = config.get("format")
    if form is not None:  # as OpenAI's API has it
        if not isinstance(form, dict) or form.get("type") != "json_schema" or set(form) != {"type", "schema"}:
            raise wrong("output_config.format", form, "{'type': 'json_schema', 'schema': ...}")
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
    request["params"] = fields.structured(params, form, "output_config.format")
    request["template_variables"] = _thinking(fields, config.get("effort"))
    request |= _tool_choice(fields.take("tool_choice", dict))
    request["tools"] = _tools(fields, fields.take("tools", list))
    fields.refuse("container", "mcp_servers", why="there is nothing here that does it")
    if fields.take("thread") is not None:  # by this code its tool runner sends whole conversations from then on
        message = "thread is not served: nothing is stored, send all of the conversation as messages"
        raise refused("thread", message, "thread_unsupported_request")
    fields.only("speed", "standard", why="there is one speed")
    fields.ignore("cache_control", "inference_geo", "context_management")
    conversation, given = fields.truncation(), fields.take("messages")
    messages = _conversation(fields, given, fields.take("system"))
    fields.end()
    request["continue_final_message"] = messages[-1]["role"] == "assistant"
    request["messages"] = fields.with_images(messages)
    return fields.parsed(_NAMED, request, conversation=conversation)


#: A request to `/v1/messages/count_tokens`.
counted_request = partial(message_request, is_answered=False)


def check_version(headers: Mapping[str, str]) -> None:
    """Raise HTTPError for a version of the API that is none of those here, if a request names one."""
    version = headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise HTTPError(400, f"anthropic-version is {shown(version)[:100]}: expected {' or '.join(VERSIONS)}")


def _thinking(fields: Fields, effort: Any) -> dict[str, Any]:
    """The chat template's variables, by `thinking` and the effort of an `output_config`."""
    given = fields.take_object("thinking", "type")
    name = "thinking" if effort is None else "output_config.effort"
    if given is not None:
        kind = given.get("type")
        if kind not in ("enabled", "adaptive", "disabled"):
            raise wrong("thinking.type", kind, "enabled, adaptive or disabled")
        if kind == "disabled":
            effort, name = "none", "thinking"
        elif kind == "enabled" and effort is None:
            effort = "medium"
    return fields.thinking(effort, name)


def _tools(fields: Fields, given: Any) -> list[dict[str, Any]] | None:
    """Tools as OpenAI's API has them."""
    if given is None:
        return None
    tools = []
    for place, each in enumerate(given):
        what = f"tools[{place}]"
        kind = each.get("type") if isinstance(each, dict) else None
        if kind not in (None, "custom"):
            raise wrong(f"{what}.type", kind, "custom: the server has no tools of its own")
        tool = _fields_of(fields, each, what, "type", *_TOOL)
        if not isinstance(tool.get("input_schema"), dict):
            raise wrong(f"{what}.input_schema", tool.get("input_schema"), "an object, a JSON schema")
        function = {other: tool[name] for name, other in _TOOL.items() if name in tool}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a choice says, as fields of a `Request`."""
    if given is None:
        return {}
    _check_known(given, "tool_choice", "type", "name", "disable_parallel_tool_use")
    kind, name, alone = given.get("type"), given.get("name"), given.get("disable_parallel_tool_use")
    if not isinstance(alone, (bool, type(None))):
        raise wrong("tool_choice.disable_parallel_tool_use", alone, "true or false")
    parallel = None if alone is None else not alone
    if kind == "tool" and isinstance(name, str):
        choice: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES and name is None:
        choice = _CHOICES[kind]
    else:
        raise wrong("tool_choice", given, "the type auto, any, none, or tool with a name")
    return {"tool_choice": choice, "parallel_tool_calls": parallel}


def _conversation(fields: Fields, given: Any, system: Any) -> list[dict[str, Any]]:
    """The messages of a request as OpenAI's API has them. Raises HTTPError."""
    if not isinstance(given, list) or not given:
        raise wrong("messages", given, "a list of messages")
    found: list[dict[str, Any]] = []
    if system is not None:
        found.append({"role": "system", "content": _text(_blocks(fields, system, "system"))})
    called: set[str] = set()
    for number, each in enumerate(given):
        what = f"messages[{number}]"
        message = _fields_of(fields, each, what, "role", "content")
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise wrong(f"{what}.role", role, f"one of {', '.join(_ROLES)}")
        blocks = _blocks(fields, content, f"{what}.content")
        if role == "assistant":
            found.append(_assistant_message(blocks))
            called |= {call["id"] for call in found[-1].get("tool_calls", ())}
        elif role == "system":
            found.append({"role": role, "content": _text(blocks)})
        else:
            if not blocks:
                raise wrong(f"{what}.content", content, "something for the model to answer")
            found += _user_messages(fields, blocks, called)
            if isinstance(content, str):
                found[-1]["content"] = content
    if "tool_calls" in found[-1]:
        raise wrong("messages", given[-1], "a tool_result behind a tool_use")
    return found


#: A block and the place that errors name.
_Block = tuple[str, dict[str, Any]]


def _blocks(fields: Fields, content: Any, what: str) -> list[_Block]:
    if isinstance(content, str):
        return [(what, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise wrong(what, content, "text, or a list of blocks")
    return [_block(fields, each, f"{what}[{place}]") for place, each in enumerate(content)]


def _block(fields: Fields, value: Any, what: str) -> _Block:
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(kind, str) or kind not in _BLOCKS:
        raise wrong(f"{what}.type", kind, f"one of {', '.join(_BLOCKS)}")
    return what, _fields_of(fields, value, what, "type", *_BLOCKS[kind])


def _user_messages(fields: Fields, blocks: Sequence[_Block], called: set[str]) -> list[dict[str, Any]]:
    """What tools gave, each in a message of its own, and then what the user says."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for what, block in blocks:
        if block["type"] != "tool_result":
            parts.append(_part(what, block))
            continue
        if parts:
            raise refused(what, f"{what} is a tool_result behind other blocks: expected it before them")
        call = block.get("tool_use_id")
        if not isinstance(call, str) or call not in called:
            raise wrong(f"{what}.tool_use_id", call, "the id of a tool_use in a message before it")
        inner = _blocks(fields, block.get("content", ""), f"{what}.content")
        shows_image = any(each["type"] == "image" for _, each in inner)
        content = [_part(*each) for each in inner] if shows_image else _text(inner)
        results.append({"role": "tool", "tool_call_id": call, "content": content})
    return [*results, {"role": "user", "content": parts}] if parts else results


def _assistant_message(blocks: Sequence[_Block]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for what, block in blocks:
        kind = block["type"]
        if kind == "tool_use":
            call, name, given = block.get("id"), block.get("name"), block.get("input")
            if not isinstance(call, str) or not isinstance(name, str) or not isinstance(given, dict):
                raise refused(what, f"{what} has no id, name or input: expected two texts and an object")
            calls.append(ToolCall(call, name, json_text(given)).as_message())
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        else:
            texts.append(_text([(what, block)]))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or (None if calls else "")}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def _part(what: str, block: dict[str, Any]) -> dict[str, Any]:
    """A block as a part of a message: text, or an image whose bytes become a data URL."""
    if block["type"] != "image":
        return {"type": "text", "text": _text([(what, block)])}
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data), **more} if not more:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "url", "url": str(url), **more} if not more and url[:5].lower() == "data:":
            return {"type": "image_url", "image_url": {"url": url}}
    expected = '{"type": "base64", "media_type": "image/png", "data": "..."}'
    raise refused(f"{what}.source", f"{what}.source is no image of the request: expected {expected}")


def _text(blocks: Sequence[_Block]) -> str:
    for what, block in blocks:
        if block["type"] != "text" or not isinstance(block.get("text"), str):
            raise refused(what, f"{what} is of the type {block['type']}, which is not taken here, or has no text")
    return "".join(block["text"] for _, block in blocks)


def _fields_of(fields: Fields, value: Any, what: str, *known: str) -> dict[str, Any]:
    """The fields of an object that say something; what changes no answer is reported, what is unknown refused."""
    if not isinstance(value, dict):
        raise wrong(what, value, "an object")
    given = {name: item for name, item in value.items() if item is not None and name not in _RETURNED}
    fields.ignored += [each for each in _HARMLESS if given.get(each) and each not in fields.ignored]
    given = {name: item for name, item in given.items() if name not in _HARMLESS and (name, item) != ("citations", [])}
    _check_known(given, what, *known)
    return given


def _check_known(given: Mapping[str, Any], what: str, *known: str) -> None:
    for name in given:
        if name not in known:
            raise refused(what, f"{what} has the unknown field {shown(name)[:80]}: expected one of {', '.join(known)}")


class MessageWriter(Writer):
    """Writes answers of `/v1/messages`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._block, self._open = 0, ""  # the number of the next one or of the one under way, and its type

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any]:
        (piece,), (response,) = pieces, responses
        content: list[dict[str, Any]] = []
        if piece.reasoning:
            content.append(_content("thinking", thinking=piece.reasoning))
        if piece.content:
            content.append(_content("text", text=piece.content))
        calls = [call for call in response.tool_calls if call.complete]  # a cut one has no input to run
        content += [_content("tool_use", id=call.id, name=call.name, input=call.parsed) for call in calls]
        return self._message(content, self._usage(response.usage)) | _ending(response)

    def begin(self) -> Iterator[bytes]:
        (sequence,) = self._sequences
        usage = self._usage(Usage(len(sequence.prompt_ids), sequence.reused_tokens, 0))
        yield _event("message_start", message=self._message([], usage))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        goes_on = bool(piece.calls) and piece.calls[0].name is None  # with a call: what else there is, is behind that
        yield from self._called(piece.calls[:goes_on])
        if piece.reasoning:
            yield from self._opened("thinking", thinking="")
            yield self._added("thinking_delta", thinking=piece.reasoning)
        if piece.content:
            yield from self._opened("text", text="")
            yield self._added("text_delta", text=piece.content)
        yield from self._called(piece.calls[goes_on:])

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        yield from self._close()
        yield _event("message_delta", delta=_ending(response), usage=self._usage(response.usage))
        yield _event("message_stop")

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        yield event(error.body(MESSAGES), "error")

    def _called(self, deltas: Sequence[ToolCallDelta]) -> Iterator[bytes]:
        for call in deltas:
            if call.name is not None:
                yield from self._close()
                yield from self._opened("tool_use", id=call.id, name=call.name, input={})
            if call.arguments:
                yield self._added("input_json_delta", partial_json=call.arguments)

    def _opened(self, kind: str, **block: Any) -> Iterator[bytes]:
        """Begin a block, where one of its type is not under way."""
        if self._open == kind:
            return
        yield from self._close()
        yield _event("content_block_start", index=self._block, content_block=_content(kind, **block))
        if self._block == 0:
            yield _event("ping")
        self._open = kind

    def _added(self, kind: str, **text: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta={"type": kind, **text})

    def _close(self) -> Iterator[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._block)
            self._block, self._open = self._block + 1, ""

    def _message(self, content: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        about = {"id": self._id, "type": "message", "role": "assistant", "model": self._asked.model}
        return {**about, "content": content, **_ENDING, "usage": usage}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            **dict.fromkeys(("cache_creation", "inference_geo", "server_tool_use")),
            "service_tier": "standard",
            "input_tokens": usage.prompt_tokens - usage.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.reused_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._readers[0].reasoning_tokens},
        }


def _ending(response: Response) -> dict[str, Any]:
    reason = _STOP_REASONS.get(response.finish_reason, "end_turn")
    match = response.stop_match if reason == "stop_sequence" else None
    error = {} if response.tool_call_error is None else {"tool_call_error": response.tool_call_error}
    return {**_ENDING, "stop_reason": reason, "stop_sequence": match, **error}


def _content(kind: str, **values: Any) -> dict[str, Any]:
    return {"type": kind, **values, **_BESIDE[kind]}


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)
