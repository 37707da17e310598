"""What many clients ask a server: each request with its answer, read whole and from a stream, by the server's APIs."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from http_server import MODEL, ServerProcess

from edgellm.opened_model import SHIPPED_MODEL

CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
#: The events that end a stream well, as their data says it.
_ENDS = ("[DONE]", '"message_stop"', '"response.completed"', '"response.incomplete"')

QUESTIONS = (
    "Where is the red cup?",
    "What is on the table?",
    "Please pick up the red cup.",
    "How full is your battery?",
)
#: What is drawn for an answer: few, so that each has been asked alone before.
SEEDS = (1, 2)
LIMIT = 6
SCENES = ("toys", "study", "workshop")
OBJECTS = ("green apple", "red cup", "white bowl")
MOVE: dict[str, Any] = {"name": "move", "description": "Move an object to a position on the table."}


class Refused(Exception):
    """An answer that is no 200, or an error in a stream."""

    def __init__(self, status: int, text: str, retry_after: float = 0.1) -> None:
        super().__init__(f"{status}: {text}")
        self.status, self.text, self.retry_after = status, text, retry_after


class Broken(Exception):
    """A connection that broke; `begun` is what had come of an answer."""

    def __init__(self, begun: str) -> None:
        super().__init__(f"broken off after {begun!r}")
        self.begun = begun


class Call(NamedTuple):
    """A call of a tool, its arguments parsed."""

    name: str
    arguments: Any


@dataclass
class Answer:
    """An answer in one form, whatever API it came by, and after how many seconds its first byte came."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    first_byte: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Asked:
    """A request: what it tries, its endpoint, and its body."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """What its answer depends on."""
        return f"{self.path} {json.dumps(self.body)}"


def chat(question: str, seed: int) -> dict[str, Any]:
    """A chat's body whose answer is drawn."""
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "temperature": 3.0, "seed": seed, "max_tokens": LIMIT}


def all_requests() -> list[Asked]:
    """Chats of several questions; then text, images, adapters, schemas and tools by each API, each with an answer of
    its own."""
    found = [Asked("chat", CHATS, chat(question, seed)) for question in QUESTIONS for seed in SEEDS]
    for number, path in enumerate((CHATS, RESPONSES, MESSAGES)):
        found += _by_each_kind(path, number)
    return found


def _by_each_kind(path: str, number: int) -> Iterator[Asked]:
    limit, messages = ("max_output_tokens", "input") if path == RESPONSES else ("max_tokens", "messages")

    def asked(kind: str, content: Any, tokens: int = LIMIT, **fields: Any) -> Asked:
        turns = [{"role": "user", "content": content}]
        return Asked(kind, path, {"model": MODEL, limit: tokens, messages: turns, **fields})

    if path != CHATS:
        yield asked(path.rpartition("/")[2], f"Tell me about the {OBJECTS[number]}.", 2 * LIMIT)
    data = base64.b64encode((SHIPPED_MODEL / "scenes" / f"{SCENES[number]}.png").read_bytes()).decode()
    url = f"data:image/png;base64,{data}"
    image: dict[str, Any] = {
        CHATS: {"type": "image_url", "image_url": {"url": url}},
        RESPONSES: {"type": "input_image", "image_url": url},
        MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
    }[path]
    text = {"type": "input_text" if path == RESPONSES else "text", "text": "What do you see?"}
    yield asked("image", [image, text])
    yield asked("adapter", QUESTIONS[number], model="pirate")
    schema = {
        "type": "object",
        "properties": {"object": {"enum": [OBJECTS[number]]}, "seen": {"type": "boolean"}},
        "required": ["object", "seen"],
        "additionalProperties": False,
    }
    form: dict[str, Any] = {
        CHATS: {"response_format": {"type": "json_schema", "json_schema": {"name": "seen", "schema": schema}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "seen", "schema": schema}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[path]
    yield asked("schema", QUESTIONS[1], 40, **form)
    tool: dict[str, Any] = {
        CHATS: {"type": "function", "function": MOVE | {"parameters": schema}},
        RESPONSES: {"type": "function", **MOVE, "parameters": schema},
        MESSAGES: MOVE | {"input_schema": schema},
    }[path]
    choice = {"type": "any"} if path == MESSAGES else "required"
    order = f"Please move the {OBJECTS[number]} to the back centre."
    yield asked("tools", order, 60, model="tools", tools=[tool], tool_choice=choice)


def ask(server: ServerProcess, asked: Asked, stream: bool, client: str = "192.0.2.1") -> Answer:
    """The answer to a request of a client behind a proxy, on a connection of its own. Raises Refused or Broken."""
    body = asked.body | ({"stream": True} if stream else {})
    headers = {"content-type": "application/json", "x-forwarded-for": client}
    connection = http.client.HTTPConnection(server.host, server.port, timeout=120)
    answer, is_whole = Answer(), False
    try:
        began = time.monotonic()
        connection.request("POST", asked.path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        first_byte = time.monotonic() - began
        if response.status != 200:
            after = float(response.getheader("retry-after") or 0.1)
            raise Refused(response.status, response.read().decode(), after)
        if not stream:
            answer, is_whole = _whole(json.loads(response.read())), True
        else:
            lines = (line[6:].decode().strip() for line in response if line.startswith(b"data: "))
            is_whole = _join(answer, lines)
    except (OSError, http.client.HTTPException) as error:
        raise Broken(answer.text) from error
    finally:
        connection.close()
    if not is_whole:
        raise Broken(answer.text)
    return replace(answer, first_byte=first_byte)


def _whole(found: dict[str, Any]) -> Answer:
    """The answer in the object of a whole one."""
    if "choices" in found:
        message = found["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        return Answer(message["content"] or "", [Call(each["name"], json.loads(each["arguments"])) for each in calls])
    parts = found["content"] if "content" in found else found["output"]
    parts = [part for each in parts for part in (each["content"] if each["type"] == "message" else [each])]
    calls = [Call(each["name"], each["input"]) for each in parts if each["type"] == "tool_use"]
    calls += [Call(each["name"], json.loads(each["arguments"])) for each in parts if each["type"] == "function_call"]
    return Answer("".join(each["text"] for each in parts if each["type"] in ("text", "output_text")), calls)


def _join(answer: Answer, lines: Iterable[str]) -> bool:
    """Add what comes of a stream to an answer; whether it came to its end. Raises Refused for an error in it."""
    begun: dict[int, list[str]] = {}
    is_whole = False
    for line in lines:
        is_whole = is_whole or any(end in line for end in _ENDS)
        if line == "[DONE]":
            break
        event = json.loads(line)
        if event.get("error") is not None or event.get("type") == "response.failed":
            raise Refused(500, line)
        for place, name, text in _pieces(event):
            if place is None:
                answer.text += text
            elif name:
                begun[place] = [name, text]
            else:
                begun[place][1] += text
    if is_whole:
        answer.calls += [Call(name, json.loads(text or "{}")) for name, text in begun.values()]
    return is_whole


def _pieces(event: dict[str, Any]) -> Iterator[tuple[int | None, str, str]]:
    """The parts of an answer in an event: of which call (None: the text), the call's name where it begins, text."""
    if "choices" in event:
        for delta in (each["delta"] for each in event["choices"]):
            yield None, "", delta.get("content") or ""
            for each in delta.get("tool_calls") or ():
                function = each["function"]
                yield each["index"], function.get("name") or "", function.get("arguments") or ""
    elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        yield event["index"], event["content_block"]["name"], ""
    elif event["type"] == "content_block_delta":
        delta = event["delta"]
        is_text = "text" in delta
        yield None if is_text else event["index"], "", delta["text"] if is_text else delta["partial_json"]
    elif event["type"] == "response.output_item.added" and event["item"]["type"] == "function_call":
        yield event["output_index"], event["item"]["name"], ""
    elif event["type"] == "response.output_text.delta":
        yield None, "", event["delta"]
    elif event["type"] == "response.function_call_arguments.delta":
        yield event["output_index"], "", event["delta"]
