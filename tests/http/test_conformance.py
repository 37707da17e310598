"""llm-comply, and the schemas of OpenAI's and Anthropic's APIs that it brings, find the server's answers in order."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from http_server import ServerProcess

llm_comply = pytest.importorskip("llm_comply")
config, runner, schema, tests = (
    import_module(f"llm_comply.{name}") for name in ("config", "runner", "schema", "tests")
)
pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

ROOT = Path(__file__).parents[2]
SPECS = Path(llm_comply.__file__).parent / "specs"
#: The adapter ends its calls and answers, which the toy without one does not always.
MODEL = "tools"
#: What the checks have to say of answers that are in order.
WARNINGS = {
    "chat-reasoning-summary": ["reasoning_tokens is 0"],  # the shipped model does not think
    "anth-thinking-display": ["no thinking content block"],
    # Nothing here compacts a conversation, which is said with 404.
    "compact-response": ["response.output is missing", "object containing 'compact'", "type='compaction'"],
}
SUITES = {"openai-chat": ("openai_chat", 9), "open-responses": ("openresponses", 13), "anthropic": ("anthropic", 9)}
WEATHER = {"type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"]}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]


def test_clients_are_pinned_in_one_file() -> None:
    pinned = yaml.safe_load((ROOT / "tests/http/clients.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    for each in pinned["tests"]:
        name = each.partition("==")[0]
        assert re.findall(rf'"{name}\b[^"]*"', project) == [f'"{each}"']
    (*_, results) = sorted((ROOT / "tools/bench/results").glob("*-cpu-conformance.md"))
    for name, each in {**pinned["python"], **pinned["node"]}.items():
        version = re.split("==|@", each)[1]
        assert f"\n| {name} | {version}" in results.read_text(), "python tools/conformance/run.py is to be run again"


@pytest.mark.slow
def test_clients_that_people_run_get_what_they_ask_for(tmp_path: Path) -> None:
    """A quarter of an hour, most of it installations; `npm` is needed, too."""
    command = [sys.executable, "tools/conformance/run.py", "--environments", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SUITES)
def test_every_check_passes(server: ServerProcess, name: str) -> None:
    spec, count = SUITES[name]
    # Checks of reasoning are skipped by a model's name, and are not here.
    checks = [dataclasses.replace(check, skip_reason=None) for check in tests.get_tests(name)]
    asked = config.ComplianceConfig(f"http://{server.host}:{server.port}/v1", "none", MODEL)
    results = runner.TestRunner(asked, checks, schema.SpecLoader(str(SPECS / f"{spec}.json"))).run_all().results
    assert len(results) == count and {each.id: each.errors for each in results if each.errors} == {}
    for each in results:
        expected = WARNINGS.get(each.id, [])
        assert len(each.warnings) == len(expected)
        assert all(part in warning for part, warning in zip(expected, each.warnings, strict=True))


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[Any]:
    status, text, _ = server.ask("POST", path, body | {"model": MODEL, "stream": True, "max_tokens": 60})
    assert status == 200, text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def assert_valid(spec: Any, name: str, *values: Any) -> None:
    assert [error for each in values for error in spec.validate(each, name)] == []


def test_streams_and_errors_of_openai_by_their_schemas(server: ServerProcess) -> None:
    spec = schema.SpecLoader(str(SPECS / "openai_chat.json"))
    choice = spec.get_schema("CreateChatCompletionStreamResponse")["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"]["enum"].append(None)  # it may be null, as the schema says beside the list
    function = {"name": "weather", "parameters": WEATHER}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    usage = {"stream_options": {"include_usage": True}}
    for fields in ({"logprobs": True, "top_logprobs": 2}, tools, usage):
        chunks = events(server, "/v1/chat/completions", {"messages": QUESTION, **fields})
        # All usages but the last are null, which the schema says in a way that is not read.
        chunks = [{name: value for name, value in chunk.items() if value is not None} for chunk in chunks]
        assert len(chunks) > 3
        assert_valid(spec, "CreateChatCompletionStreamResponse", *chunks)
    fields = {"prompt": "The", "logprobs": 2, "max_tokens": 5, "model": MODEL}
    assert_valid(spec, "CreateCompletionResponse", server.ask("POST", "/v1/completions", fields)[1])
    assert_valid(spec, "ListModelsResponse", server.get("/v1/models")[1])
    for path, body in (("/v1/chat/completions", {"model": MODEL}), ("/v1/responses", {"model": "none", "input": "x"})):
        status, found, _ = server.ask("POST", path, body)
        assert status in (400, 404)
        assert_valid(spec, "ErrorResponse", found)


def test_streams_and_errors_of_anthropic_by_their_schemas(server: ServerProcess) -> None:
    spec = schema.SpecLoader(str(SPECS / "anthropic.json"))
    tools = {"tools": [{"name": "weather", "input_schema": WEATHER}], "tool_choice": {"type": "any"}}
    kinds: Counter[str] = Counter()
    for fields in ({}, tools):
        found = events(server, "/v1/messages", {"messages": QUESTION, **fields})
        kinds.update(each["type"] for each in found)
        assert_valid(spec, "MessageStreamEvent", *(each for each in found if each["type"] != "ping"))
    assert len(kinds) == 7 and kinds["content_block_delta"] > 4
    counted = server.ask("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": QUESTION})
    assert_valid(spec, "CountMessageTokensResponse", counted[1])
    for body in ({"model": MODEL}, {"model": "none", "messages": QUESTION, "max_tokens": 5}):
        status, refused, _ = server.ask("POST", "/v1/messages", body)
        assert status in (400, 404)
        assert_valid(spec, "ErrorResponse", refused)
