"""Coding agents that nobody here wrote: what they sent while they worked is answered, and their prompts are reused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDENS
from http_server import ServerProcess, running
from safetensors.numpy import load_file, save_file

from edgellm.engines.building.builder import build_engine_directory
from edgellm.http.responses import input_messages
from edgellm.opened_model import SHIPPED_MODEL
from tools.bench.replay_agents import Turn, read_recording, renamed, replay, turns_of

#: What is reused at least of the prompt that the turn before had.
LEAST = 0.95
RECORDED = {file.name.partition(".")[0]: read_recording(file) for file in sorted((GOLDENS / "agents").glob("*.xz"))}
PARAMETERS = {"type": "object", "properties": {"object": {"type": "string"}}, "required": ["object"]}
LOOK = {"type": "function", "name": "look_at", "description": "Look at an object.", "parameters": PARAMETERS}
ROBOT = {"type": "namespace", "name": "robot", "description": "What it does.", "tools": [LOOK]}


def conversation(agent: str, task: str | None = None) -> list[dict[str, Any]]:
    """The requests of an agent's conversation, or of one about another task."""
    found = RECORDED[agent]
    turns = turns_of(found)
    return turns if task is None else [renamed(each, found["task"], task) for each in turns]


def replayed(server: ServerProcess, *conversations: Sequence[dict[str, Any]]) -> list[tuple[int, Turn]]:
    return list(replay(f"http://{server.host}:{server.port}", conversations))


def build(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """An engine directory of two slots, each with room for the longest recorded prompt."""
    limits = {"max_batch": 2, "kv_capacity": 17_408}
    build_engine_directory(checkpoint, folder, limits, [], beyond_trained_context=True, adapters={"tools": adapter})
    return folder


def first_layer(folder: Path) -> tuple[Path, Path]:
    """The checkpoint of the shipped model's first layer, and that of its adapter which calls tools."""
    (folder / "tools").mkdir()
    for place in ("", "lora/tools/"):
        own = folder / place.removeprefix("lora/")
        for file in (SHIPPED_MODEL / place).glob("*.json"):
            shutil.copy(file, own)
        (weights,) = (SHIPPED_MODEL / place).glob("*.safetensors")
        kept = {name: each for name, each in load_file(weights).items() if not re.search(r"layers\.[1-9]", name)}
        save_file(kept, own / weights.name, {"format": "pt"})
    (folder / "edgellm.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, folder / "tools"


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """What is reused of a prompt is a matter of its tokens: one layer of the shipped model computes them eight times as
    fast."""
    folder = tmp_path_factory.mktemp("agents")
    with running(build(*first_layer(folder), folder / "engines")) as server:
        yield server


@pytest.mark.parametrize(("agent", "tokens"), [pytest.param("codex", 14_000, marks=pytest.mark.slow), ("pi", 3_000)])
def test_an_agent_s_prompt_is_reused_from_turn_to_turn(agents: ServerProcess, agent: str, tokens: int) -> None:
    turns = [turn for _, turn in replayed(agents, conversation(agent))]
    assert len(turns) == 6 and turns[0].prompt > tokens
    assert all(turn.share >= LEAST for turn in turns[1:]), turns
    assert all(turn.cached < turn.prompt for turn in turns)
    ignored = {name for turn in turns for name in turn.ignored.split(", ")}
    known = {"cache_control", "eager_input_streaming", "store", "prompt_cache_key", "client_metadata"}
    assert ignored <= known | {"reasoning.summary", "tools.web_search", "tools.namespace.description"}


@pytest.mark.slow
@pytest.mark.parametrize("agent", RECORDED)
def test_of_the_whole_shipped_model(tmp_path: Path, agent: str) -> None:
    with running(build(SHIPPED_MODEL, SHIPPED_MODEL / "lora" / "tools", tmp_path / "engines")) as server:
        assert all(turn.share >= LEAST for _, turn in replayed(server, conversation(agent))[1:])


def test_agents_that_take_turns_keep_a_slot_each(agents: ServerProcess) -> None:
    """They differ in their task alone, behind thousands of tokens; of more than there are slots that much is reused."""
    tasks = ["Write a README.", "Which class has no test?", "Rename the module."]
    talks = [conversation("pi", task) for task in tasks]
    first, *_ = replayed(agents, talks[0][:1])
    two = replayed(agents, *(talk[:3] for talk in talks[:2]))
    assert all(turn.share >= LEAST for _, turn in two if turn.before), two
    three = [turn for _, turn in replayed(agents, *(talk[:3] for talk in talks)) if turn.before]
    shared = min(turn.cached for turn in three)
    assert first[1].prompt - 50 < shared and all(turn.cached < turn.before for turn in three[3:])


def test_functions_of_a_namespace_are_called_and_shown_again(server: ServerProcess) -> None:
    asked = {"role": "user", "content": "Look at the white bowl."}
    client = server.client()
    answer = client.responses.create(model="tools", input=[asked], tools=[ROBOT])  # type: ignore[list-item]
    (call,) = answer.to_dict()["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "look_at", "robot")
    assert answer.to_dict()["tools"] == [ROBOT]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    flat = {**LOOK, "name": "robot__look_at"}
    of_space, plain = (
        client.responses.create(model="tools", input=[asked, each, result], tools=[tool])  # type: ignore[list-item]
        for each, tool in ((call, ROBOT), ({**call, "name": "robot__look_at", "namespace": None}, flat))
    )
    assert of_space.usage.input_tokens == plain.usage.input_tokens
    assert of_space.usage.input_tokens_details.cached_tokens >= answer.usage.input_tokens  # the call is as it was made
    with pytest.raises(Exception, match=r"tools\[0\]"):
        client.responses.create(model="tools", input=[asked], tools=[{**ROBOT, "tools": [7]}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("/v1/responses", {"input": "hi", "client_metadata": {"a": "b"}}, "client_metadata"),
        ("/v1/responses", {"input": "hi", "tools": [LOOK, {"type": "web_search"}]}, "tools.web_search"),
        ("/v1/responses", {"input": "hi", "context_management": [{"type": "compaction"}]}, "context_management"),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi", "id": "msg_1", "phase": "x"}]}, "input.phase"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi", "mark": 1}]}]},
         "input.content.mark"),
        ("/v1/chat/completions",
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "mark": 1}]}]},
         "messages.content.mark"),
        ("/v1/messages?beta=true", {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
         "context_management"),
    ],
)  # fmt: skip
def test_what_changes_no_answer_is_reported(
    server: ServerProcess, path: str, fields: dict[str, Any], ignored: str
) -> None:
    own = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} if "messages" in path else {}
    status, found, headers = server.ask("POST", path, {"model": "tools", **own, **fields})
    assert (status, headers.get("edgellm-ignored")) == (200, ignored), found


def test_what_a_tool_gives_may_show_an_image() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    parts = [{"type": "input_text", "text": "It is "}, {"type": "input_text", "text": "red."}]
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    texts, shown = (
        input_messages([call, {"type": "function_call_output", "call_id": "c", "output": output}], None)[-1]["content"]
        for output in (parts, [*parts, image])
    )
    assert texts == "It is red."
    assert [part["type"] for part in shown] == ["text", "text", "input_image"]
    assert shown[-1]["image_url"] == image["image_url"]


def test_recordings_say_what_they_are_and_hold_nothing_of_a_machine() -> None:
    assert set(RECORDED) == {"codex", "pi"}
    for found in RECORDED.values():
        assert found["licence"] in ("MIT", "Apache-2.0") and found["version"]
        written = json.dumps(found)
        homes = set(re.findall(r"/(?:home|Users|root|work|tmp)/[A-Za-z0-9_.-]+", written))
        assert homes == {"/home/user"}
        assert "api_key" not in written and all("authorization" not in each["headers"] for each in found["requests"])
