"""The server whose answers are a script: what the field's clients make of its streams, and what is kept of requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tools.bench.record_agent import AGENTS, DONE, PROJECT, Script
from tools.bench.replay_agents import turns_of

anthropic = pytest.importorskip("anthropic")
CALLS: list[tuple[str, dict[str, Any]]] = [("look", {"at": "cup"}), ("move", {"to": "left"})]


@pytest.fixture
def script() -> Iterator[Script]:
    server = Script(CALLS)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_client_of_messages_makes_the_calls_one_by_one(script: Script) -> None:
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{script.server_port}", api_key="secret")
    messages: list[Any] = [{"role": "user", "content": "go"}]
    asked: dict[str, Any] = {"model": "tools", "max_tokens": 9}
    tools = [{"name": name, "input_schema": {"type": "object"}} for name, _ in CALLS]
    for name, given in CALLS:
        with client.messages.stream(messages=messages, tools=tools, **asked) as stream:
            found = stream.get_final_message()
        (call,) = found.content
        assert (call.type, call.name, call.input, found.stop_reason) == ("tool_use", name, given, "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "ok"}
        messages += [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
    with client.messages.stream(messages=messages, tools=tools, **asked) as stream:
        assert stream.get_final_text() == DONE
    with client.messages.stream(messages=messages[:1], **asked) as stream:
        assert stream.get_final_text() != DONE  # a title
    assert [len(each["body"]["messages"]) for each in turns_of({"requests": script.requests})] == [1, 3, 5]
    assert len(script.requests) == 4 and "secret" not in str(script.requests)
    assert "anthropic-version" in script.requests[0]["headers"]


def test_a_client_of_responses_makes_the_calls_one_by_one(script: Script) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{script.server_port}/v1", api_key="secret")
    items: list[Any] = [{"role": "user", "content": "go"}]
    tools: Any = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name, _ in CALLS]
    for name, _ in [*CALLS, ("", {})]:
        with client.responses.stream(model="tools", input=items, tools=tools) as stream:
            (item,) = stream.get_final_response().to_dict()["output"]
        if name:
            assert (item["type"], item["name"]) == ("function_call", name)
            items += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
    assert item["content"][0]["text"] == DONE and "secret" not in str(script.requests)


def test_each_agent_is_told_five_calls_of_which_one_mends_the_project() -> None:
    for agent in AGENTS.values():
        assert len(agent.calls) == 5 and "found = self._numbers" in str(agent.calls)
        assert agent.licence in ("MIT", "Apache-2.0")
    assert "get(name, 0) - number" in PROJECT["stock.py"]
