"""Anthropic's own client is answered as `LLM` answers in Python, whole and streamed."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from typing import Any

import pytest
from http_server import MODEL, ServerProcess, raw_request, read_to_end, running

from edgellm import LLM, SamplingParams
from edgellm.http.errors import HTTPError, later
from edgellm.http.fields import Fields, ServedModel
from edgellm.opened_model import SHIPPED_MODEL

if find_spec("anthropic") is None:
    pytest.skip("anthropic is not installed", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("private_files")

QUESTION: list[Any] = [{"role": "user", "content": "Where is the red cup?"}]
PLACES = ["front left", "back centre", "back right"]
SCHEMA = {
    "type": "object",
    "properties": {"object": {"type": "string"}, "position": {"enum": PLACES}},
    "required": ["object", "position"],
    "additionalProperties": False,
}
MOVE: dict[str, Any] = {"name": "move", "description": "Move an object to a position on the table."}
LOOK: dict[str, Any] = {"name": "look_at", "description": "Look at an object."}
LOOKS = SCHEMA | {"properties": {"object": {"enum": ["cup", "bowl"]}}, "required": ["object"]}
TOOLS: list[Any] = [MOVE | {"input_schema": SCHEMA}, LOOK | {"input_schema": LOOKS}]
FUNCTIONS = [MOVE | {"parameters": SCHEMA}, LOOK | {"parameters": LOOKS}]
ASK_TO_MOVE: list[Any] = [{"role": "user", "content": "Please move the green apple to the back centre."}]
CHOICES = [
    ({"type": "auto"}, {"tool_choice": "auto"}),
    ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
    ({"type": "tool", "name": "look_at"}, {"tool_choice": "look_at"}),
    ({"type": "none"}, {"tool_choice": "none"}),
]


@pytest.fixture(scope="module")
def reader(server: ServerProcess) -> Any:
    """Anthropic's client, which asks once."""
    return client_of(server)


def client_of(server: ServerProcess, **options: Any) -> Any:
    import anthropic  # which takes seconds: only where its tests run

    given = {"api_key": server.key, "max_retries": 0, "timeout": 60, "_strict_response_validation": True} | options
    return anthropic.Anthropic(base_url=f"http://{server.host}:{server.port}", **given)


def asked(reader: Any, **fields: Any) -> Any:
    return reader.messages.create(**{"model": MODEL, "max_tokens": 60, "messages": QUESTION} | fields)


def streamed(reader: Any, **fields: Any) -> tuple[Any, list[Any]]:
    """What the client joins of a stream, and the events that came."""
    given = {"model": MODEL, "max_tokens": 60, "messages": QUESTION} | fields
    with reader.messages.stream(**given) as stream:
        events = list(stream)
        return stream.get_final_message(), events


def prompt_tokens(usage: Any) -> int:
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def test_a_message_is_answered_as_in_python(reader: Any, llm: LLM) -> None:
    expected = llm.chat(QUESTION, SamplingParams(max_tokens=60))
    found = asked(reader)
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == (expected.text, "end_turn", None)
    assert (found.type, found.role, found.model, len(found.content)) == ("message", "assistant", MODEL, 1)
    assert prompt_tokens(found.usage) == expected.usage.prompt_tokens
    assert found.usage.output_tokens == expected.usage.completion_tokens
    assert asked(reader).usage.cache_read_input_tokens > 0.8 * prompt_tokens(found.usage)
    counted = reader.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens == expected.usage.prompt_tokens
    joined, events = streamed(reader)
    assert joined.content[0].text == expected.text and joined.usage.output_tokens == found.usage.output_tokens
    assert prompt_tokens(events[0].message.usage) == expected.usage.prompt_tokens  # said before there is text
    assert events[0].message.usage.output_tokens == 0 and joined.usage.cache_read_input_tokens > 0


def test_the_events_come_in_the_published_order(server: ServerProcess) -> None:
    with server.connect() as connection:
        body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION, "stream": True}
        connection.sendall(raw_request(body, "/v1/messages").replace(b"Host:", b"Connection: close\r\nHost:"))
        said = read_to_end(connection).decode()
    events = [line.removeprefix("event: ") for line in said.splitlines() if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith("data: ")]
    assert [each["type"] for each in data] == events and "[DONE]" not in said
    assert list(dict.fromkeys(events)) == [
        *("message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    delta = data[-2]["delta"]
    assert delta.pop("stop_reason") == "max_tokens" and list(delta.values()) == [None] * 3
    assert data[-2]["usage"]["output_tokens"] == 9 and data[0]["message"]["content"] == []


def test_sampling_is_that_of_the_request(reader: Any, llm: LLM) -> None:
    drawn = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "seed": 11}
    found = asked(reader, extra_body=drawn, extra_headers={"anthropic-version": "2023-06-01"})
    assert found.content[0].text == llm.chat(QUESTION, SamplingParams(**drawn, max_tokens=60)).text
    found = asked(reader, stop_sequences=["nowhere", " front"])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " front")
    text = llm.chat(QUESTION).text
    assert found.content[0].text == text.partition(" front")[0]
    begun = [*QUESTION, {"role": "assistant", "content": "The red"}]
    assert asked(reader, messages=begun).content[0].text == llm.chat(begun, continue_final_message=True).text
    form = {"type": "json_schema", "schema": SCHEMA | {"properties": {"at": {"enum": PLACES}}, "required": ["at"]}}
    assert json.loads(asked(reader, output_config={"format": form}).content[0].text)["at"] in PLACES
    assert (
        reader.messages.with_raw_response.create(
            model=MODEL,
            max_tokens=4,
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}
            ],
            system=[{"type": "text", "text": "You are Pip."}],
            thinking={"type": "enabled", "budget_tokens": 2000},
            metadata={"user_id": "me"},
        ).headers["edgellm-ignored"]
        == "metadata, thinking.budget_tokens, thinking, cache_control"
    )


@pytest.mark.parametrize(("choice", "options"), CHOICES, ids=lambda value: str(value)[:30])
def test_calls_are_those_of_python(reader: Any, llm: LLM, choice: dict[str, Any], options: dict[str, Any]) -> None:
    expected = llm.chat(ASK_TO_MOVE, SamplingParams(max_tokens=80), adapter="tools", tools=FUNCTIONS, **options)
    fields = {"model": "tools", "messages": ASK_TO_MOVE, "tools": TOOLS, "tool_choice": choice, "max_tokens": 80}
    found, (joined, events) = asked(reader, **fields), streamed(reader, **fields)
    for message in (found, joined):
        assert [(each.name, each.input) for each in message.content if each.type == "tool_use"] == [
            (call.name, call.parsed) for call in expected.tool_calls
        ]
        assert "".join(each.text for each in message.content if each.type == "text") == expected.text
        assert message.stop_reason == ("tool_use" if expected.tool_calls else "end_turn")
        assert len({each.id for each in message.content if each.type == "tool_use"}) == len(expected.tool_calls)
    assert bool(expected.tool_calls) == (choice["type"] != "none")
    if expected.tool_calls and pieces(events) == 1:  # what a busy machine has not read joins
        events = streamed(reader, **fields)[1]
    assert pieces(events) > 1 or not expected.tool_calls


def pieces(events: list[Any]) -> int:
    """Of the arguments of calls."""
    return sum(each.type == "input_json" for each in events)


def test_a_call_that_the_limit_cuts_is_not_to_be_run(reader: Any) -> None:
    fields = {"model": "tools", "messages": ASK_TO_MOVE, "tools": TOOLS, "max_tokens": 25}
    found = asked(reader, **fields)
    assert (found.content, found.stop_reason) == ([], "max_tokens") and found.model_extra["tool_call_error"]
    assert streamed(reader, **fields)[0].stop_reason == "max_tokens"


def test_an_agent_s_prompt_is_reused_from_call_to_call(reader: Any) -> None:
    """Of what stood before and what was answered, all but a few tokens: the results alone are new."""
    fields = {"model": "tools", "system": "You are Pip, a small tabletop robot. " * 30, "tools": TOOLS[1:]}
    fields["tool_choice"] = {"type": "tool", "name": "look_at"}
    messages: list[Any] = [{"role": "user", "content": "Look at the cup."}]
    reused, before = [], 0
    for number in range(6):
        answer = (
            streamed(reader, messages=messages, **fields)[0]
            if number % 2
            else asked(reader, messages=messages, **fields)
        )
        if before:
            reused.append(answer.usage.cache_read_input_tokens / before)
        before = prompt_tokens(answer.usage) + answer.usage.output_tokens
        (call,) = answer.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "ok"}]}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert len(reused) == 5 and min(reused) >= 0.95, reused
    assert answer.usage.cache_read_input_tokens > 0.94 * prompt_tokens(answer.usage)  # the last result among it


def test_its_tool_runner_runs_tools(reader: Any) -> None:
    """It asks for a conversation that the server keeps, is refused, and sends all of it from then on."""
    import anthropic

    looked = []

    @anthropic.beta_tool
    def look_at(object: str) -> str:
        """Look at an object.

        Args:
            object: What to look at.
        """
        looked.append(object)
        return "done"

    asked = [{"role": "user", "content": "Look at the red cup."}]
    runner = reader.beta.messages.tool_runner(model="tools", max_tokens=60, tools=[look_at], messages=asked)
    called, answered = runner
    assert looked == ["red cup"] and (called.stop_reason, answered.stop_reason) == ("tool_use", "end_turn")
    assert answered.content[0].text == "I am looking at the red cup."


def test_pictures_come_in_blocks(reader: Any, llm: LLM) -> None:
    path = SHIPPED_MODEL / "scenes" / "toys.png"
    data = base64.b64encode(path.read_bytes()).decode()
    text = {"type": "text", "text": "What do you see?"}
    expected = llm.chat([{"role": "user", "content": [text, {"type": "image", "image": str(path)}]}])
    for source in (
        {"type": "base64", "media_type": "image/png", "data": data},
        {"type": "url", "url": f"data:image/png;base64,{data}"},
    ):
        content = [text, {"type": "image", "source": source}]
        found = asked(reader, messages=[{"role": "user", "content": content}])
        assert found.content[0].text == expected.text
        assert prompt_tokens(found.usage) == expected.usage.prompt_tokens
        asking: list[Any] = [{"type": "tool_use", "id": "c1", "name": "look_at", "input": {"object": "cup"}}]
        result = [{"type": "tool_result", "tool_use_id": "c1", "content": content[1:]}]
        turns = [*QUESTION, {"role": "assistant", "content": asking}, {"role": "user", "content": result}]
        counted = reader.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS)
        turns[-1]["content"] = [result[0] | {"content": "none"}]
        assert (
            counted.input_tokens > reader.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS).input_tokens
        )


def test_the_bytes_of_pictures_are_no_text() -> None:
    """Neither may a field of their name carry anything else."""
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 3_000_000}
    shown = [{"type": "image", "source": source}]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": shown}]
    for content in (shown, result):
        Fields(json.dumps({"messages": [{"role": "user", "content": content}]}).encode(), ServedModel("m"))
    with pytest.raises(HTTPError, match="beside its images"):
        Fields(json.dumps({"messages": [], "metadata": source}).encode(), ServedModel("m"))


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look_at", "input": {}}]}
RESULT = {"type": "tool_result", "tool_use_id": "c2", "content": "ok"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"temprature": 1}, "did you mean temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"system": 7}, "system is 7"),
    ({"messages": []}, "messages is []"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is []"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "type is 'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "top": 1}]}]}, "unknown field 'top'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}]},
     "messages[0].content[0].source"),
    ({"messages": [*QUESTION, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
     "messages[1].content[0].type is 'redacted_thinking'"),
    ({"messages": [*QUESTION, CALL]}, "tool_result"),
    ({"messages": [*QUESTION, CALL, {"role": "user", "content": [RESULT]}]}, "content[0].tool_use_id is 'c2'"),
    ({"messages": [*QUESTION, CALL, {"role": "user", "content": [{"type": "text", "text": "x"}, RESULT]}]}, "before"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [MOVE]}, "tools[0].input_schema is missing"),
    ({"tools": [MOVE | {"input_schema": {"type": "array"}}]}, "tools[0].input_schema has the type 'array'"),
    ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "mov"}}, "did you mean move"),
    ({"tool_choice": {"type": "any"}}, "has no tools"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
    ({"messages": [{"role": "user", "content": "cup " * 2000}]}, "maximum context length is 1024"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(server: ServerProcess, fields: dict[str, Any], words: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": QUESTION} | fields
    status, found, _ = server.ask("POST", "/v1/messages", body)
    assert (status, found["type"], found["error"]["type"]) == (400, "error", "invalid_request_error"), found
    assert words in found["error"]["message"]


def test_errors_are_those_that_the_client_knows(reader: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        asked(reader, model="other")
    assert (missing.value.type, missing.value.status_code) == ("not_found_error", 404)
    with pytest.raises(anthropic.BadRequestError, match="expected 2023-06-01 or 2026-10-21"):
        asked(reader, extra_headers={"anthropic-version": "2023-01-01"})
    with pytest.raises(anthropic.BadRequestError, match="did you mean"):
        streamed(reader, extra_body={"temprature": 1})
    kinds = {(429, "full"): "rate_limit_error", (503, "busy"): "overloaded_error", (500, "broken"): "api_error"}
    assert all(later(*each, "x").body("/v1/messages")["error"]["type"] == kind for each, kind in kinds.items())
    assert HTTPError(413, "large").body("/v1/messages/count_tokens")["error"]["type"] == "request_too_large"


def test_models_are_listed(reader: Any) -> None:
    found = list(reader.models.list(limit=2))
    assert [each.id for each in found] == [MODEL, "json", "pirate", "tools"]
    assert reader.models.retrieve("pirate") == found[2] and found[2].max_input_tokens == 1024


def test_keys_come_in_either_header(locked: ServerProcess) -> None:
    import anthropic

    assert asked(client_of(locked)).content
    apart = client_of(locked, default_headers={"authorization": anthropic.Omit(), "x-api-key": locked.key})
    assert asked(apart).content
    assert locked.get("/v1/models", **{"x-api-key": locked.key})[0] == 200
    for headers in ({"x-api-key": "wrong"}, {"x-api-key": "wrong", "authorization": f"Bearer {locked.key}"}, {}):
        status, found, _ = locked.ask("POST", "/v1/messages", {"model": MODEL}, headers)
        assert (status, found["error"]["type"]) == (401, "authentication_error")
    with pytest.raises(anthropic.AuthenticationError):
        asked(client_of(locked, api_key="wrong"))


def test_a_stream_that_fails_ends_with_an_error() -> None:
    """As where the server ends before the answer has: the client raises it."""
    import anthropic

    with running("--shutdown-seconds", 0) as server:
        fields = {"model": MODEL, "max_tokens": 900, "messages": QUESTION, "extra_body": {"ignore_eos": True}}
        with client_of(server).messages.stream(**fields) as stream:
            next(event for event in stream if event.type == "text")
            server.terminate()
            with pytest.raises(anthropic.APIStatusError, match="has ended before the answer was complete") as raised:
                stream.until_done()
    assert raised.value.type == "overloaded_error"
