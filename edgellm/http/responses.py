"""`/v1/responses`: text, media and functions that the request has itself, and answers that are kept to go on from."""

from __future__ import annotations

import base64
import binascii
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgellm.errors import shown
from edgellm.http.answers import Piece, Writer, event, is_cut, logprob_objects
from edgellm.http.errors import HTTPError, refused, wrong
from edgellm.http.fields import TOOLS, Fields, ParsedRequest, ServedModel, with_logprobs
from edgellm.http.kept_responses import Items, KeptResponses
from edgellm.requests import Response
from edgellm.text.messages import media_kind
from edgellm.tool_calls.calls import ToolCallDelta
from edgellm.tool_calls.values import is_object

_LOGPROBS, _REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
#: Of a server that keeps no answers.
_NONE = KeptResponses()
_ROLES = ("user", "assistant", "system", "developer")
#: Types of tools that a server would run itself.
_SEARCHES = ("web_search", "web_search_preview")
#: What is read of items of an input, and what clients hand back of an output's.
_READ = (
    *("type", "id", "status", "role", "content", "encrypted_content"),
    *("call_id", "name", "namespace", "arguments", "output"),
)
#: Fields of a response that are null, or are not yet known.
_NEVER_OR_LATER = ("completed_at", "error", "incomplete_details", "max_tool_calls", "usage")
#: What a function of a request's has where it does not say it.
_FUNCTION = {"description": None, "parameters": None, "strict": True}
#: Items of the output by type: what their ids begin with, what they begin as, the part that has their text, and what
#: the events of that text are called.
_ITEMS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "reasoning": ("rs", {"summary": [], "content": []}, {"type": "reasoning_text", "text": ""}, "reasoning_text"),
    "message": (
        "msg",
        {"role": "assistant", "content": []},
        {"type": "output_text", "text": "", "annotations": []},
        "output_text",
    ),
    "function_call": ("fc", {"arguments": ""}, None, "function_call_arguments"),
}


def response_request(body: bytes, model: ServedModel, kept: KeptResponses = _NONE) -> ParsedRequest:
    """A request to `/v1/responses`, which may go on from an answer that was `kept`. Raises HTTPError."""
    fields = Fields(body, model)
    is_kept = bool(kept.most) and fields.take("store", bool) is not False
    metadata = fields.take("metadata", dict)
    request = fields.common()
    fields.only("n", 1, why="one answer is given to a conversation")
    params = fields.sampling("max_output_tokens")
    include, top = fields.take("include", list) or [], fields.take("top_logprobs", int)
    fields.ignored += [f"include.{each}" for each in map(str, include) if each not in (_LOGPROBS, _REASONING)]
    if _LOGPROBS in include or top:
        params = with_logprobs(params, "top_logprobs", top or 0)
    text = fields.take("text", dict) or {}
    request["params"] = _with_text_format(fields, params, text)
    tools = {name: fields.take(name) for name in TOOLS}
    request |= {**tools, "tools": _tools(fields, tools["tools"]), "tool_choice": _tool_choice(tools["tool_choice"])}
    previous = fields.take("previous_response_id", str)
    earlier = kept.conversation(previous)
    why = "there is nothing here that keeps it: send all of the conversation as input, or previous_response_id"
    fields.refuse("conversation", "prompt", why=why)
    fields.ignore("client_metadata", "context_management")
    fields.only("background", False, why="answers are given to who asks for them")
    conversation = fields.truncation()
    fields.refuse("max_tool_calls", why="it counts calls of a server's own tools, and there are none here")
    reasoning = fields.take_object("reasoning", "effort") or {}
    request["template_variables"] = fields.thinking(reasoning.get("effort"), "reasoning.effort")
    instructions = fields.take("instructions", str)
    given = fields.take("input")
    for item in given if isinstance(given, list) else ():
        fields.tell_unread(item, _READ, "input")
    request["messages"] = fields.with_images(input_messages(given, instructions, earlier.items), "input")
    fields.end()
    echoed = {"instructions": instructions, "metadata": metadata or {}, "text": text or {"format": {"type": "text"}}}
    echoed |= {"previous_response_id": previous, "store": is_kept}
    echoed |= {each: tools[each] for each in tools if tools[each] is not None}
    echoed |= {each: fields.unused.get(each) for each in ("user", "safety_identifier", "prompt_cache_key")}
    echoed["reasoning"] = {"effort": None, "summary": None, **reasoning}
    named = {"": "input", "structure": "text.format", ".function": ""}  # functions of tools are flat
    added = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = Items((*earlier.items, *added), earlier.size + len(body)) if is_kept else None
    about: dict[str, Any] = {"conversation": conversation, "items": items, "shows_reasoning": _REASONING in include}
    return fields.parsed(named, request, echoed=echoed, **about)


def _tools(fields: Fields, given: Any) -> Any:
    """Tools with a namespace's functions in its place, without searches of the web, which agents always offer."""
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for tool in given:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in _SEARCHES:
            fields.ignored.append(f"tools.{kind}")
        elif kind == "namespace" and isinstance(tool.get("tools"), list) and isinstance(tool.get("name"), str):
            fields.ignored += ["tools.namespace.description"] if tool.get("description") else []
            found += [_flat(each, tool["name"]) for each in tool["tools"]]
        else:
            found.append(tool)
    return found or given


def _flat(function: Any, namespace: Any) -> Any:
    """A function, or a call of one, of a namespace under the name that the model knows it by."""
    if not isinstance(function, dict) or not isinstance(namespace, str) or not isinstance(function.get("name"), str):
        return function
    return function | {"name": f"{namespace.removesuffix('__')}__{function['name']}"}


def _namespaces(given: Any) -> dict[str, dict[str, str]]:
    """The functions of namespaces, as answers name them, by the names that the model knows."""
    spaces = [each for each in given or () if isinstance(each, dict) and each.get("type") == "namespace"]
    return {
        _flat(each, space["name"])["name"]: {"name": each["name"], "namespace": space["name"]}
        for space in spaces
        for each in space["tools"]
    }


def _tool_choice(given: Any) -> Any:
    """A choice as requests to the engine have it: of a function's name beside its type."""
    if isinstance(given, dict) and set(given) == {"type", "name"}:
        return {"type": given["type"], "function": {"name": given["name"]}}
    return given


def _with_text_format(fields: Fields, params: Any, text: Mapping[str, Any]) -> Any:
    """Parameters with the structure of `text.format`, which has a schema's name and text beside its type."""
    for name in text:
        if name not in ("format", "verbosity"):
            raise refused(f"text.{name}", f"text has the unknown field {shown(name)}")
    if text.get("verbosity") is not None:
        fields.ignored.append("text.verbosity")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
    return fields.structured(params, form, "text.format")


def input_messages(given: Any, instructions: str | None, earlier: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """The messages of an `input`: text, or items: messages, reasoning, calls of functions and what these returned.
    Items of an `earlier` input, and of its answer, stand before them. Raises HTTPError for what is none of them."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", given, "text, or a list of items")
    reasoning = ""
    for number, item in enumerate((*earlier, *given), -len(earlier)):
        what = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            message = _message(item, what)
            if message["role"] == "assistant" and reasoning:
                message, reasoning = message | {"reasoning_content": reasoning}, ""
            messages.append(message)
        elif kind == "reasoning":
            reasoning = _texts(item.get("content") or [], what) or _unwrapped(item.get("encrypted_content"), what)
        elif kind == "function_call":
            call = {"name": _flat(item, item.get("namespace")).get("name"), "arguments": item.get("arguments")}
            entry = {"id": item.get("call_id"), "type": "function", "function": call}
            if not all(isinstance(each, str) for each in (*call.values(), entry["id"])):
                raise refused("input", f"{what} has no call_id, name or arguments: expected texts")
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                thought, reasoning = {"reasoning_content": reasoning} if reasoning else {}, ""
                messages.append({"role": "assistant", "content": None, **thought})
            messages[-1].setdefault("tool_calls", []).append(entry)
        elif kind == "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise refused("input", f"{what} has no call_id: expected that of the call")
            parts = _parts(item.get("output"), what)
            shows_image = isinstance(parts, list) and any(part["type"] != "text" for part in parts)
            output = parts if shows_image else _texts(item.get("output"), what)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            found = f"{what} is {shown(kind or item)}"
            raise refused("input", f"{found}: expected a message, or a function's call or its output")
    return messages


def _unwrapped(given: Any, what: str) -> str:
    try:
        return base64.b64decode(given or "", validate=True).decode()
    except (TypeError, ValueError, binascii.Error) as error:
        message = f"{what} has an encrypted_content that is not from this server: leave it out, or send content"
        raise refused("input", message) from error


def _message(item: Mapping[str, Any], what: str) -> dict[str, Any]:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES or not isinstance(content, (str, list)):
        raise refused("input", f"{what} has no role ({', '.join(_ROLES)}) and content")
    return {"role": role, "content": _texts(content, what) if role == "assistant" else _parts(content, what)}


def _parts(content: Any, what: str) -> Any:
    """Text, or a list of parts, images, sounds and videos among them, as messages have it."""
    if not isinstance(content, list):
        return _texts(content, what)
    return [part if media_kind(part) else {"text": _text(part, what), **part, "type": "text"} for part in content]


def _texts(parts: Any, what: str) -> str:
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise refused("input", f"{what} has {shown(parts)}: expected text, or a list of parts")
    return "".join(_text(part, what) for part in parts)


def _text(part: Any, what: str) -> str:
    kinds = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
    if isinstance(part, dict) and part.get("type") in kinds:
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if isinstance(text, str):
            return text
    raise refused("input", f"{what} has a part that is no text, image, sound or video: {shown(part)[:80]}")


class ResponseWriter(Writer):
    """Writes answers of `/v1/responses`."""

    def __init__(self, *arguments: Any, kept: KeptResponses = _NONE) -> None:
        super().__init__(*arguments)
        self._kept, self._namespaces = kept, _namespaces(self._asked.echoed.get("tools"))
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._untold: list[dict[str, Any]] = []  # of tokens that have shown no text yet

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any]:
        for _ in (*self.piece(0, *pieces), *self._close(*responses)):
            pass
        return self._finished(*responses)

    def begin(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._object("in_progress"))

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        goes_on = bool(piece.calls) and piece.calls[0].name is None  # with a call: what else there is, is behind that
        yield from self._called(piece.calls[:goes_on])
        if piece.reasoning:
            yield from self._opened("reasoning")
            yield from self._added(piece.reasoning)
        self._untold += logprob_objects(self._tokenizer, piece.logprobs)
        if piece.content:
            yield from self._opened("message")
            yield from self._said(piece.content)
        yield from self._called(piece.calls[goes_on:])

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        yield from self._close(response)
        finished = self._finished(response)
        yield self._event(f"response.{finished['status']}", response=finished)

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.message}}
        yield self._event("response.failed", response=failed)

    def _called(self, deltas: Sequence[ToolCallDelta]) -> Iterator[bytes]:
        for call in deltas:
            if call.name is not None:
                named = self._namespaces.get(call.name, {"name": call.name})
                yield from self._opened("function_call", call_id=call.id, **named)
            if call.arguments:
                yield from self._added(call.arguments)

    def _opened(self, kind: str, **call: Any) -> Iterator[bytes]:
        """Begin an item of the output, where it is not under way; a `call` is always one of its own."""
        if self._open is not None and self._open["type"] == kind and not call:
            return
        yield from self._close()
        prefix, own, part, _ = _ITEMS[kind]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **own, **call}
        yield self._event("response.output_item.added", output_index=len(self._output), item=item)
        if part is not None:
            yield self._event("response.content_part.added", **self._place(item), part=part)
            item = item | {"content": [dict(part)]}
        self._open = item

    def _added(self, text: str, **more: Any) -> Iterator[bytes]:
        item = self._open
        assert item is not None
        if "content" in item:
            item["content"][0]["text"] += text
        else:
            item["arguments"] += text
        yield self._event(f"response.{_ITEMS[item['type']][3]}.delta", **self._place(item), delta=text, **more)

    def _said(self, text: str) -> Iterator[bytes]:
        """Add to a message, with the log-probabilities of all tokens since."""
        told, self._untold = self._untold, []
        self._logprobs += told
        yield from self._added(text, logprobs=told)

    def _close(self, response: Response | None = None) -> Iterator[bytes]:
        """End the item that is under way; where a `response` ends it, it may be cut."""
        if self._open is None:
            return
        if self._untold and self._open["type"] == "message":
            yield from self._said("")
        item, place, self._open = self._open, self._place(self._open), None
        done = f"response.{_ITEMS[item['type']][3]}.done"
        is_incomplete = response is not None and is_cut(response)
        if "content" in item:
            (part,) = item["content"]
            more = {}
            if item["type"] == "message":
                more, self._logprobs = {"logprobs": self._logprobs}, []
                part |= {name: each for name, each in more.items() if each}
            yield self._event(done, **place, text=part["text"], **more)
            yield self._event("response.content_part.done", **place, part=part)
            if item["type"] == "reasoning" and self._asked.shows_reasoning:
                # Text that clients hand back unread. It is no secret: it stands in `content`, too.
                item["encrypted_content"] = base64.b64encode(part["text"].encode()).decode("ascii")
        else:
            is_incomplete = not is_object(item["arguments"])
            yield self._event(done, **place, arguments=item["arguments"])
        item["status"] = "incomplete" if is_incomplete else "completed"
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)

    def _place(self, item: Mapping[str, Any]) -> dict[str, Any]:
        place = {"item_id": item["id"], "output_index": len(self._output)}
        return place | {"content_index": 0} if "content" in item else place

    def _event(self, name: str, **values: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **values}, name)

    def _finished(self, response: Response) -> dict[str, Any]:
        """The answer, which is kept where that was asked for."""
        usage, is_incomplete = response.usage, is_cut(response)
        finished = self._object("incomplete" if is_incomplete else "completed") | {
            "completed_at": None if is_incomplete else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._readers[0].reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
        if self._asked.items is not None:
            self._kept.keep(self._asked.items, finished)
        return finished

    def _object(self, status: str) -> dict[str, Any]:
        params = self._asked.request.params
        assert params is not None
        sampled = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            **dict.fromkeys(_NEVER_OR_LATER),
            "background": False,
            "model": self._asked.model,
            "output": list(self._output),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            **{name: getattr(params, name) for name in sampled},
            "top_logprobs": params.logprobs or 0,
            "max_output_tokens": params.max_tokens,
            "service_tier": "default",
            "truncation": "disabled" if self._asked.conversation is None else "auto",
            **self._asked.echoed,
            "tools": [
                _FUNCTION | tool if tool.get("type") == "function" else tool
                for tool in self._asked.echoed.get("tools", ())
            ],
        }
