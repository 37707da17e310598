"""Requests of clients of ollama's API, to `/api/chat`, `/api/generate`, `/api/show` and `/api/pull`: options are in an
object of their own, images beside the text, and arguments of calls are objects; and answers to them, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from edgellm.engines.formats.strict_formats import parsed_json
from edgellm.errors import shown
from edgellm.http.answers import Piece, Writer, is_cut, logprob_objects
from edgellm.http.errors import HTTPError, refused, unserved, wrong
from edgellm.http.fields import Fields, ParsedRequest, ServedModel, with_chat_logprobs
from edgellm.requests import Response
from edgellm.sampling_params import SamplingParams
from edgellm.text.turns import OngoingConversation
from edgellm.tool_calls.calls import ToolCallDelta, joined_deltas
from edgellm.tool_calls.values import is_object

#: Options by what they are called elsewhere in this server.
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
OPTIONS |= {name: name for name in _SAME}
#: What loading a model would be done by, which was loaded already: options that change no answer.
LOADING = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap"),
    *("use_mlock", "vocab_only", "logits_all", "embedding_only"),
)
#: Values by which an option asks for nothing; -1 tokens are as many as the context has room for, and so are -2.
_NEUTRAL: dict[str, tuple[Any, ...]] = {"num_predict": (-1, -2), "seed": (-1,), "repeat_last_n": (-1,)}
_NEUTRAL |= {"mirostat": (0,), "typical_p": (1,), "tfs_z": (1,), "penalize_newline": (True,), "num_keep": (0,)}
#: Options that nothing here does, with the reason. Those of penalties change nothing where no token is penalized, and
#: those of mirostat nothing without it.
_DRAWN = "tokens are drawn by temperature, top_k, top_p and min_p"
_UNSERVED = {"mirostat": _DRAWN, "typical_p": _DRAWN, "tfs_z": _DRAWN}
_UNSERVED |= {"num_keep": "an answer ends where the context is full, nothing of its prompt is dropped"}
_OF_PENALTIES = dict.fromkeys(("repeat_last_n", "penalize_newline"), "a penalty is on all tokens of prompt and answer")
_OF_MIROSTAT = ("mirostat_tau", "mirostat_eta")


def chat(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/api/chat`; without messages it asks for the model to be loaded. Raises HTTPError."""
    fields, request = _begun(body, model)
    messages = fields.take("messages")
    tools = fields.take("tools", list) or None
    drops = fields.take("truncate", bool) is not False
    fields.only("shift", False, why="an answer ends where the context is full")
    request["template_variables"] = _thinking(fields)
    if messages is None or messages == []:
        return _nothing(fields)
    found = chat_messages(messages)
    last = found[-1]
    request["continue_final_message"] = last.get("role") == "assistant" and not last.get("tool_calls")
    request |= {"tools": tools, "messages": fields.with_images(found)}
    fields.end()
    return fields.parsed(_named("messages"), request, conversation=OngoingConversation() if drops else None)


def generate(body: bytes, model: ServedModel) -> ParsedRequest:
    """A request to `/api/generate`: a question or, `raw`, text that is continued; without it, as `chat` without
    messages. Raises HTTPError."""
    fields, request = _begun(body, model)
    prompt, is_raw = fields.take("prompt", str) or "", bool(fields.take("raw", bool))
    fields.only("suffix", "", why="text is not filled in")
    fields.only("template", "", why="the chat template is the model's own, or that of --chat-template")
    fields.refuse("context", why="send the conversation as messages, to /api/chat")
    if is_raw:
        fields.refuse("system", "images", "think", why="a raw prompt is all that the model gets")
        request |= {"prompt": prompt} if prompt else {}
    else:
        request["template_variables"] = _thinking(fields)
        system, images = fields.take("system", str), fields.take("images", list)
        asked = [{"role": "system", "content": system}] if system else []
        asked.append({"role": "user", "content": prompt, "images": images})
        if prompt or images:
            request["messages"] = fields.with_images(chat_messages(asked), "images")
    fields.end()
    return fields.parsed(_named("prompt"), request) if {"prompt", "messages"} & request.keys() else _nothing(fields)


def _begun(body: bytes, model: ServedModel) -> tuple[Fields, dict[str, Any]]:
    """What both have: a stream where nothing else is said, options, a format, log-probabilities."""
    fields = Fields(body, model, streams=True)
    request = fields.common()
    params = with_chat_logprobs(_sampling(fields), fields)
    given = fields.take("format")
    if given not in (None, "", "json") and not isinstance(given, dict):
        raise wrong("format", given, "'json', or a JSON schema")
    form: dict[str, Any] | None = {"type": "json_object"} if given == "json" else None
    if isinstance(given, dict):
        form = {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}
    request["params"] = fields.structured(params, form, "format")
    return fields, request


def _sampling(fields: Fields) -> SamplingParams:
    """The parameters that `options` ask for. HTTPError for one that would not be kept."""
    options = fields.take("options", dict) or {}
    asked = {name: value for name, value in options.items() if value not in (None, *_NEUTRAL.get(name, ()))}
    for name, value in asked.items():
        what = f"options.{name}"[:100]
        if name in OPTIONS:
            fields.put(OPTIONS[name], value, what)
        elif name in LOADING or name in _OF_MIROSTAT:
            fields.ignored.append(what)
        elif name not in _OF_PENALTIES:
            raise unserved(what, _UNSERVED.get(name, f"expected one of {', '.join([*OPTIONS, *LOADING])}"))
    try:
        params = fields.sampling("max_tokens")
        if options.get("num_predict") in _NEUTRAL["num_predict"]:
            params = replace(params, max_tokens=None)
    except HTTPError as error:
        name = next((name for name, called in OPTIONS.items() if called == error.param), None)
        if name is None:
            raise
        raise refused(f"options.{name}", f"options.{name}{error.message.removeprefix(error.param or '')}") from error
    is_penalized = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    for name in _OF_PENALTIES.keys() & asked.keys() if is_penalized else ():
        raise unserved(f"options.{name}", _OF_PENALTIES[name])
    return params


def _thinking(fields: Fields) -> dict[str, Any]:
    """What `think` means to the chat template: true, false, or an effort."""
    think = fields.take("think")
    efforts = {True: "medium", False: "none"}
    return fields.thinking(efforts[think] if isinstance(think, bool) else think, "think")


def _nothing(fields: Fields) -> ParsedRequest:
    fields.end()
    return ParsedRequest((), fields.name, ignored=tuple(fields.ignored))


def _named(prompt: str) -> dict[str, str]:
    return {"": prompt, "structure": "format"} | {called: f"options.{name}" for name, called in OPTIONS.items()}


def chat_messages(given: Any) -> list[dict[str, Any]]:
    """Messages as the rest of the server reads them: images as data URLs before the text, arguments of calls as text,
    and results of tools by the ids of their calls: of those of the tool's name, if they have it, the next one. Raises
    HTTPError for what cannot be read so; what else is wrong with messages the engine says."""
    if not isinstance(given, list):
        raise wrong("messages", given, "a list of messages")
    found: list[dict[str, Any]] = []
    open_calls: list[dict[str, Any]] = []
    for number, each in enumerate(given):
        what = f"messages[{number}]"
        if not isinstance(each, dict):
            raise refused("messages", f"{what} is {shown(each)[:80]}: expected an object")
        message = {key: value for key, value in each.items() if value is not None}
        images, tool_name = message.pop("images", []), message.pop("tool_name", None)
        message.setdefault("content", "")
        if images:
            if not isinstance(images, list) or not all(isinstance(each, str) for each in images):
                raise refused("messages", f"{what}.images is not a list of texts in base64")
            parts = [{"type": "image_url", "image_url": f"data:image/png;base64,{each}"} for each in images]
            said = message["content"]
            message["content"] = [*parts, {"type": "text", "text": said}] if said else parts
        if message.get("tool_calls"):
            message["tool_calls"] = open_calls = _calls(message["tool_calls"], what, number)
        elif message.get("role") == "tool" and "tool_call_id" not in message:
            named = [call for call in open_calls if tool_name in (None, call["function"]["name"])]
            if not named:
                raise refused("messages", f"{what} is what a tool returned, and no call of it is before it")
            open_calls = [call for call in open_calls if call is not named[0]]
            message["tool_call_id"] = named[0]["id"]
        found.append(message)
    return found


def _calls(given: Any, what: str, number: int) -> list[dict[str, Any]]:
    calls = []
    for place, call in enumerate(given if isinstance(given, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments", {}), dict):
            expected = 'expected {"function": {"name": ..., "arguments": {...}}}'
            raise refused("messages", f"{what}.tool_calls[{place}] is {shown(call)[:80]}: {expected}")
        arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        call_id = call.get("id") or f"call_{number}_{place}"
        named = {"name": function.get("name"), "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": named})
    return calls


def named_model(body: bytes, model: ServedModel, *unused: str) -> str:
    """The name of the model that a request asks about; `unused` are fields that change nothing. Raises HTTPError."""
    fields = Fields(body, model)
    name, older_name = fields.take("model"), fields.take("name")
    fields.only("verbose", False, why="vocabularies are not told")
    for each in unused:
        fields.take(each, bool)
    fields.end()
    return model.adapter_of(name or older_name) or model.name


_BILLION = 10**9


class GenerateWriter(Writer):
    """Writes answers of `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._deltas: list[ToolCallDelta] = []

    def whole(self, pieces: Sequence[Piece], responses: Sequence[Response]) -> dict[str, Any]:
        if not responses:
            return self._object(Piece()) | {"done": True, "done_reason": "load"}
        return self._object(pieces[0]) | self._ending(responses[0])

    def piece(self, index: int, piece: Piece) -> Iterator[bytes]:
        self._deltas += piece.calls  # which are told as a whole
        if piece.reasoning or piece.content or piece.logprobs:
            yield _line(self._object(Piece(piece.reasoning, piece.content, piece.logprobs)) | {"done": False})

    def ended(self, index: int, response: Response) -> Iterator[bytes]:
        if self._deltas:
            yield _line(self._object(Piece(calls=joined_deltas(self._deltas))) | {"done": False})
        yield _line(self._object(Piece()) | self._ending(response))

    def failure(self, error: HTTPError) -> Iterator[bytes]:
        yield _line({"error": error.message})

    def _object(self, piece: Piece) -> dict[str, Any]:
        found = {"model": self._asked.model, "created_at": written_time(), **self._said(piece)}
        if piece.logprobs:
            found["logprobs"] = logprob_objects(self._tokenizer, piece.logprobs)
        return found

    def _said(self, piece: Piece) -> dict[str, Any]:
        return {"response": piece.content} | ({"thinking": piece.reasoning} if piece.reasoning else {})

    def _ending(self, response: Response) -> dict[str, Any]:
        """Why an answer ended, and what it took, in nanoseconds."""
        usage, timings = response.usage, response.timings
        error = response.tool_call_error
        return {
            "done": True,
            "done_reason": "length" if is_cut(response) else "stop",
            "total_duration": round(timings.total_seconds * _BILLION),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": round(timings.prefill_seconds * _BILLION),
            "eval_count": usage.completion_tokens,
            "eval_duration": round(timings.decode_seconds * _BILLION),
            **({} if error is None else {"tool_call_error": error}),
        }


class ChatLineWriter(GenerateWriter):
    """Writes answers of `/api/chat`. A call that was cut is not told."""

    def _said(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.content}
        if piece.reasoning:
            message["thinking"] = piece.reasoning
        if calls := [call for call in piece.calls if is_object(call.arguments)]:
            message["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": parsed_json(call.arguments)}}
                for call in calls
            ]
        return {"message": message}


def _line(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode()


def written_time(moment: datetime | None = None) -> str:
    """A moment of UTC, else this one, as clients read it."""
    moment = moment or datetime.now(timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
