"""A client of OpenAI's API with a transport, a parser of events and types of its own: that of huggingface_hub."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from call_templates import WRITTEN, call_template
from http_server import MODEL, ServerProcess, running
from huggingface_hub import InferenceClient

from edgellm import LLM, SamplingParams
from edgellm.opened_model import SHIPPED_MODEL

MESSAGES = [{"role": "user", "content": "Please put the green apple to the right."}]
SCHEMA = {
    "type": "object",
    "properties": {"object": {"enum": ["red cup", "green apple"]}, "to": {"enum": ["left", "right"]}},
    "required": ["object", "to"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "move", "description": "Move it.", "parameters": SCHEMA}}]
DRAWN: Any = {"temperature": 1.2, "seed": 5, "max_tokens": 40}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that asks for a key, with a template that shows tools."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(call_template(WRITTEN["hermes"]))
    with running("--chat-template", path, "--api-key", "key", key="key") as server:
        yield server


@pytest.fixture(scope="module")
def second(other: ServerProcess) -> InferenceClient:
    return InferenceClient(base_url=f"http://{other.host}:{other.port}/v1", api_key="key", timeout=60)


def test_chats_and_streams_are_those_of_python(server: ServerProcess, llm: LLM) -> None:
    client = InferenceClient(base_url=f"http://{server.host}:{server.port}/v1", api_key="none")
    expected = llm.chat(MESSAGES, SamplingParams(**DRAWN, logprobs=2))
    found = client.chat.completions.create(MESSAGES, model=MODEL, logprobs=True, top_logprobs=2, **DRAWN)
    choice = found.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert found.usage.completion_tokens == expected.usage.completion_tokens
    assert "".join(each.token for each in choice.logprobs.content) == expected.text
    options = {"include_usage": True}
    chunks = list(client.chat_completion(MESSAGES, model=MODEL, stream=True, stream_options=options, **DRAWN))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == expected.text
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == choice.finish_reason
    toys = base64.b64encode(Path(SHIPPED_MODEL / "scenes" / "toys.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{toys}"}}
    seen = [{"role": "user", "content": [{"type": "text", "text": "What do you see?"}, image]}]
    assert "ball" in client.chat_completion(seen, model=MODEL, max_tokens=60).choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}], ids=str)
def test_calls_whole_streamed_and_answered(second: InferenceClient, choice: Any) -> None:
    options: Any = {"model": MODEL, "tools": TOOLS, "extra_body": {"parallel_tool_calls": False}}
    found = second.chat_completion(MESSAGES, tool_choice=choice, **options)
    message = found.choices[0].message
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert (found.choices[0].finish_reason, call.function.name, message.content) == ("tool_calls", "move", None)
    deltas = [
        each
        for chunk in second.chat_completion(MESSAGES, tool_choice=choice, stream=True, **options)
        for each in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].function.name == "move" and {each.index for each in deltas} == {0} and len(deltas) > 1
    assert "".join(each.function.arguments for each in deltas) == call.function.arguments
    said = {"role": "assistant", "content": None, "tool_calls": [json.loads(json.dumps(call))]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    found = second.chat_completion([*MESSAGES, said, result], tool_choice="none", max_tokens=4, **options)
    assert found.choices[0].message.content and not found.choices[0].message.tool_calls
