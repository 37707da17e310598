"""Whatever JSON a body has, it is a request or refused; and states of the server that no process shows for long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from edgellm.asynchronous import AsyncLLM
from edgellm.errors import EdgeLLMError
from edgellm.http import completions, fields
from edgellm.http.app import Service
from edgellm.http.errors import HTTPError
from edgellm.http.fields import ParsedRequest, ServedModel
from edgellm.http.guard import Guard, host_name
from edgellm.http.kept_responses import KeptResponses
from edgellm.http.messages import counted_request, message_request
from edgellm.http.responses import response_request
from edgellm.opened_model import SHIPPED_MODEL

MODEL = ServedModel("m", ("a",), template_variables=frozenset({"enable_thinking"}))
READERS: dict[str, Callable[[bytes, ServedModel], ParsedRequest]] = {
    "chat": completions.chat,
    "completion": completions.completion,
    "responses": response_request,
    "messages": message_request,
    "counted": counted_request,
    "tokens": completions.tokens,
}
NAMES = sorted(
    {*fields.SAMPLING, *fields.HARMLESS, "model", "stream", "n", "deadline", "max_tokens", "max_completion_tokens"}
    | {
        "messages",
        "prompt",
        "input",
        "logprobs",
        "top_logprobs",
        "response_format",
        *fields.TOOLS,
        "stream_options",
        "text",
    }
    | {
        "reasoning",
        "reasoning_effort",
        "chat_template_kwargs",
        "include",
        "instructions",
        "max_output_tokens",
        "system",
        "thinking",
        "output_config",
        "stop_sequences",
        "unknown",
    }
)
KEYS = (
    "role",
    "content",
    "type",
    "text",
    "image_url",
    "url",
    "json_schema",
    "schema",
    "format",
    "effort",
    "output",
    "function",
    "name",
    "parameters",
    *("source", "data", "media_type", "input_schema", "id", "tool_use_id", "input", "thinking"),
    "1",
)
KINDS = (
    "user",
    "assistant",
    "message",
    "image_url",
    "input_image",
    "input_text",
    "reasoning",
    "function_call",
    "function",
    "required",
    *("text", "image", "base64", "thinking", "tool_use", "tool_result", "tool", "any", "enabled"),
    "m",
    "a",
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=5) | st.sampled_from(KINDS)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", READERS)
@hypothesis_settings(max_examples=20, deadline=None)
@given(body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), needed=st.booleans())
def test_any_object_is_a_request_or_refused_with_its_field(kind: str, body: dict[str, Any], needed: bool) -> None:
    if needed:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "prompt": "x",
            "input": "x",
            "max_tokens": 9,
        } | body
        others = {"responses": ("messages", "prompt", "max_tokens"), "completion": ("messages", "input")}
        others["tokens"] = ("messages", "input", "max_tokens")
        body = {name: value for name, value in body.items() if name not in others.get(kind, ("prompt", "input"))}
    try:
        found = READERS[kind](json.dumps(body).encode(), MODEL)
    except HTTPError as error:
        assert error.status in (400, 404) and error.message
        assert error.param is not None or error.code == "invalid_json", error.message
    else:
        assert found.request.adapter in (None, "a")


@pytest.mark.parametrize("kind", READERS)
@hypothesis_settings(max_examples=40, deadline=None)
@given(body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_refused(kind: str, body: bytes) -> None:
    with pytest.raises(HTTPError):
        READERS[kind](body, MODEL)


@given(host=st.text(max_size=40))
def test_any_host_is_a_name_or_none(host: str) -> None:
    name = host_name(host)
    assert name is None or (name and "@" not in host)
    guard = Guard("127.0.0.1")
    try:
        guard.check("/health", {"host": host})
    except HTTPError as error:
        assert error.status == 421
    else:
        assert name in ("localhost", "127.0.0.1", "::1")


def asked(service: Service, *paths: str) -> list[tuple[int, Any]]:
    """What a service answers now, without sockets."""

    async def ask() -> list[tuple[int, Any]]:
        transport = httpx.ASGITransport(service.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = [
                await (client.get(path) if path.startswith(("/h", "/m")) else client.post(path, json={}))
                for path in paths
            ]
        return [
            (each.status_code, each.json() if "json" in each.headers["content-type"] else each.text) for each in found
        ]

    return asyncio.run(ask())


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    async def open_service() -> Service:
        service = Service(AsyncLLM(tmp_path / "missing"), MODEL, Guard())
        assert service.state == "loading"
        with pytest.raises(EdgeLLMError, match="missing"):
            await service.open()
        return service

    service = asyncio.run(open_service())
    health, chat, message, metrics = asked(service, "/health", "/v1/chat/completions", "/v1/messages", "/metrics")
    assert health[0] == 503 and health[1]["status"] == "failed" and "missing" in health[1]["error"]
    assert chat[0] == 503 and chat[1]["error"]["code"] == "failed"
    assert message[0] == 503 and message[1]["error"]["type"] == "overloaded_error"
    assert metrics[0] == 200 and "edgellm_requests_total 0" in metrics[1]


def test_a_model_whose_thread_has_ended() -> None:
    """As where the engine has failed and cannot be cleared."""

    async def end() -> Service:
        llm = AsyncLLM(SHIPPED_MODEL, backend="numpy")
        service = Service(llm, MODEL, Guard())
        await service.open()
        assert service.state == "ready" and service.model.adapters == ("json", "pirate", "tools")
        watching = asyncio.ensure_future(service.wait_for_failure())
        await llm.close()
        await watching
        return service

    service = asyncio.run(end())
    assert service.state == "failed" and asked(service, "/health")[0][0] == 503


def test_what_is_expected_is_said_once() -> None:
    with pytest.raises(HTTPError) as refused:
        response_request(b'{"model": "m", "input": "hi", "qqqq": 1}', MODEL, KeptResponses(1))
    names = refused.value.message.partition("expected one of ")[2].split(", ")
    assert len(names) == len(set(names)) > 20


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, [{"type": "text", "text": "No."}]),
        ({"content": "Hm.", "refusal": "No."}, [{"type": "text", "text": "Hm."}, {"type": "text", "text": "No."}]),
    ],
)
def test_what_was_refused_was_said(said: dict[str, Any], text: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", **said}, {"role": "user", "content": "why?"}]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    for read in (completions.chat, completions.tokens):
        assert read(body, MODEL).request.messages[1] == {"role": "assistant", "content": text}
