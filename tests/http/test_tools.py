"""Calls of tools over HTTP: OpenAI's client gets those that `LLM` gives, whole and streamed, and sends results back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from call_templates import add_calls
from http_server import MODEL, ServerProcess, running
from pydantic import BaseModel, ConfigDict

from edgellm import LLM, RequestError, SamplingParams
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.http.errors import http_error
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.text.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("private_files")

OBJECTS = ["red cup", "green apple", "white bowl"]
PARAMETERS = {
    "type": "object",
    "properties": {"object": {"enum": OBJECTS}, "to": {"enum": ["left", "right"]}},
    "required": ["object", "to"],
    "additionalProperties": False,
}
MOVE: Any = {
    "type": "function",
    "function": {"name": "move", "description": "Move an object.", "parameters": PARAMETERS, "strict": True},
}
WAVE: Any = {"type": "function", "function": {"name": "wave"}}
TOOLS = [MOVE, WAVE]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
NAMED: Any = {"type": "function", "function": {"name": "move"}}
QUESTION = "Please put the green apple to the right."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
#: So that an answer would be anything, but for the grammar.
DRAWN = {"temperature": 1.5, "seed": 3}
LIMIT = 120
CHOICES: list[dict[str, Any]] = [
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": "required"},
    {"tool_choice": NAMED},
    {"tool_choice": "wave"},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
    {},
]


@pytest.fixture(scope="module")
def calling(tool_server: ServerProcess) -> openai.OpenAI:
    return tool_server.client()


@pytest.fixture(scope="module")
def taught(tool_template: Path) -> Iterator[LLM]:
    """The same model with the same template, asked in Python."""
    with LLM(SHIPPED_MODEL, backend="numpy") as llm:
        llm.tokenizer.chat_template = ChatTemplate({"default": tool_template.read_text()}, str(tool_template))
        yield llm


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def joined(stream: Any) -> tuple[str | None, list[dict[str, str]], list[Any]]:
    """Content and calls of a stream, put together as OpenAI's documentation tells clients to; and its chunks."""
    chunks, content, calls = list(stream), None, []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        if delta.content is not None:
            content = (content or "") + delta.content
        for piece in delta.tool_calls or []:
            if piece.index == len(calls):
                calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                assert piece.type == "function" and piece.id and piece.function.name
            else:
                assert piece.id is piece.function.name is None
            calls[piece.index]["arguments"] += piece.function.arguments
    return content, calls, chunks


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_calls_are_those_of_python(calling: openai.OpenAI, taught: LLM, choice: dict[str, Any]) -> None:
    expected = taught.chat(MESSAGES, SamplingParams(**DRAWN, max_tokens=LIMIT), tools=TOOLS, **choice)
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": LIMIT, **DRAWN, **choice}
    found = calling.chat.completions.create(**options)
    message, reason = found.choices[0].message, found.choices[0].finish_reason
    told = [(call.name, call.arguments) for call in expected.tool_calls]
    assert called(message) == told and bool(told) == (choice.get("tool_choice", "auto") not in ("auto", "none"))
    assert message.content == (expected.text or (None if told else ""))
    assert reason == expected.finish_reason and found.usage.completion_tokens == expected.usage.completion_tokens
    content, calls, chunks = joined(calling.chat.completions.create(**options, stream=True))
    assert [(call["name"], call["arguments"]) for call in calls] == told and (content or None) == (
        message.content or None
    )
    assert len({call["id"] for call in calls}) == len(told) and chunks[-1].choices[0].finish_reason == reason
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > len(told) or not told
    if choice == CHOICES[0]:
        assert reason == "tool_calls" and len(told) == 1 and content is None


@pytest.fixture(scope="module")
def engines(make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a token that begins calls, so that a bias makes it call."""
    folder = tmp_path_factory.mktemp("free")
    checkpoint = make_checkpoint(folder / "checkpoint", max_position_embeddings=2048)
    add_calls(checkpoint)
    build_engine_directory(checkpoint, folder / "robot", EngineLimits(2, 128, 1500), [])
    return folder / "robot"


def test_an_answer_that_is_free_calls_as_it_likes(engines: Path) -> None:
    with running(engines) as server, LLM(engines, backend="numpy") as llm:
        assert "description" not in server.get("/v1/models/robot")[1]  # which the shipped model alone has
        mark = llm.tokenizer.token_to_id("<tool_call>")
        counts = []
        for parallel in (True, False):
            params = SamplingParams(**DRAWN, max_tokens=300, logit_bias={mark: 100})
            expected = llm.chat(MESSAGES, params, tools=TOOLS, parallel_tool_calls=parallel)
            counts.append(len(expected.tool_calls))
            options: Any = {"model": "robot", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, **DRAWN}
            options |= {"logit_bias": {str(mark): 100}, "parallel_tool_calls": parallel, "logprobs": True}
            found = server.client().chat.completions.create(**options).choices[0]
            assert called(found.message) == [(call.name, call.arguments) for call in expected.tool_calls]
            assert (found.finish_reason, found.message.content) == (expected.finish_reason, expected.text or None)
            content, calls, chunks = joined(server.client().chat.completions.create(**options, stream=True))
            assert [(call["name"], call["arguments"]) for call in calls] == called(found.message)
            assert content == found.message.content
            logprobs = [each.choices[0].logprobs for each in chunks if each.choices[0].logprobs]
            assert [each.token for one in logprobs for each in one.content] == [
                each.token for each in found.logprobs.content
            ]
        assert counts[0] > counts[1] == 1


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "You are Pip."}]], ids=len)
def test_results_go_back_and_the_conversation_goes_on(calling: openai.OpenAI, taught: LLM, system: list[Any]) -> None:
    asked = [*system, *MESSAGES]
    first = calling.chat.completions.create(model=MODEL, messages=asked, tools=TOOLS, tool_choice=NAMED)
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages = [*asked, message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    options: Any = {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 12}
    found = calling.chat.completions.create(model=MODEL, **options)
    said = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    expected = taught.chat([*asked, said, messages[-1]], SamplingParams(max_tokens=12), tools=TOOLS, tool_choice="none")
    assert found.choices[0].message.content == expected.text
    assert found.usage.prompt_tokens == expected.usage.prompt_tokens
    assert found.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens  # rendered as it was written


def test_tokens_of_tools_are_counted(tool_server: ServerProcess, taught: LLM) -> None:
    _, found, _ = tool_server.ask("POST", "/tokenize", {"messages": MESSAGES, "tools": TOOLS})
    assert found["count"] == taught.chat(MESSAGES, SamplingParams(max_tokens=1), tools=TOOLS).usage.prompt_tokens


def test_arguments_that_a_limit_cuts(calling: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED}
    whole = calling.chat.completions.create(**options)
    (arguments,) = (call.function.arguments for call in whole.choices[0].message.tool_calls)
    assert json.loads(arguments)["object"] in OBJECTS
    limit = whole.usage.completion_tokens - 16  # of which most are the mark that ends a call
    cut = calling.chat.completions.create(**options, max_tokens=limit).choices[0]
    ((name, begun_arguments),) = called(cut.message)
    assert (cut.finish_reason, name) == ("length", "move") and arguments.startswith(begun_arguments)
    assert "" != begun_arguments != arguments and cut.model_extra["tool_call_error"]
    _, calls, chunks = joined(calling.chat.completions.create(**options, max_tokens=limit, stream=True))
    assert (calls[0]["arguments"], chunks[-1].choices[0].finish_reason) == (begun_arguments, "length")
    flat: Any = {"model": MODEL, "input": QUESTION, "tools": FLAT, "tool_choice": {"type": "function", "name": "move"}}
    found = calling.responses.create(**flat, max_output_tokens=limit)
    assert (found.status, found.output[0].status, found.output[0].arguments) == ("incomplete",) * 2 + (begun_arguments,)
    nothing = calling.chat.completions.create(**options, max_tokens=2).choices[0]
    assert (nothing.finish_reason, nothing.message.tool_calls) == ("length", None)


def test_the_client_s_own_stream_joins_calls(calling: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [MOVE], "tool_choice": "required", **DRAWN}
    options |= {"parallel_tool_calls": False}
    with calling.chat.completions.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    pieces = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert [each.arguments for each in done] == [call.function.arguments] == ["".join(pieces)] and len(pieces) > 1
    assert call.function.parsed_arguments == json.loads(call.function.arguments)
    assert (final.finish_reason, final.message.content) == ("tool_calls", None)
    plain = calling.chat.completions.create(**options).choices[0].message
    assert called(plain) == called(final.message)
    again = [*MESSAGES, final.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    more: Any = {**options, "messages": again, "tool_choice": "none", "max_tokens": 4}
    assert calling.chat.completions.create(**more).choices[0].message.content


def test_the_client_parses_arguments_into_a_class(calling: openai.OpenAI) -> None:
    class Move(BaseModel):
        model_config = ConfigDict(extra="forbid")
        thing: Literal["red cup", "green apple"]
        times: Literal[1, 2]

    tool = openai.pydantic_function_tool(Move, name="move")
    found = calling.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required")
    assert found.choices[0].message.tool_calls
    for call in found.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Move)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "move"}, "auto"], ids=str)
def test_responses_have_calls_as_items(calling: openai.OpenAI, taught: LLM, choice: Any) -> None:
    options: Any = {
        "model": MODEL,
        "input": QUESTION,
        "tools": FLAT,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    found = calling.responses.create(**options, temperature=1.5, extra_body={"seed": 3}, max_output_tokens=LIMIT)
    chosen = NAMED if isinstance(choice, dict) else choice
    params = SamplingParams(**DRAWN, max_tokens=LIMIT)
    expected = taught.chat(MESSAGES, params, tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False)
    calls = [item for item in found.output if item.type == "function_call"]
    assert [(item.name, item.arguments) for item in calls] == [
        (call.name, call.arguments) for call in expected.tool_calls
    ]
    assert len(calls) == (choice != "auto") and found.output_text == expected.text
    assert all(item.status == "completed" and item.call_id for item in calls) or choice == "auto"
    assert found.tools[0].name == "move" and not found.parallel_tool_calls
    assert (found.tool_choice if isinstance(choice, str) else found.tool_choice.model_dump()) == choice


def test_responses_stream_calls_and_take_their_outputs(calling: openai.OpenAI, taught: LLM) -> None:
    options: Any = {"model": MODEL, "tools": FLAT[:1], "tool_choice": "required", "parallel_tool_calls": False}
    with calling.responses.stream(input=QUESTION, **options) as stream:  # which checks the order
        events = list(stream)
        final = stream.get_final_response()
    assert list(dict.fromkeys(each.type for each in events)) == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ]
    (item,) = final.output
    added, done = (
        next(each for each in events if each.type == f"response.output_item.{kind}") for kind in ("added", "done")
    )
    assert (added.item.arguments, added.item.status, added.item.call_id) == ("", "in_progress", item.call_id)
    assert (done.item.arguments, done.item.status) == (item.arguments, "completed")
    pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item.arguments and len(pieces) > 1
    assert item.parsed_arguments == json.loads(item.arguments)
    items = [{"role": "user", "content": QUESTION}, item.model_dump(exclude={"parsed_arguments"}, exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "done"})
    found = calling.responses.create(**options | {"input": items, "tool_choice": "none", "max_output_tokens": 12})
    call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = [*MESSAGES, said, {"role": "tool", "tool_call_id": item.call_id, "content": "done"}]
    expected = taught.chat(asked, SamplingParams(max_tokens=12), tools=TOOLS[:1], tool_choice="none")
    assert (found.output_text, found.usage.input_tokens) == (expected.text, expected.usage.prompt_tokens)


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [MOVE, WAVE, MOVE]}, "tools[2].function.name", "as that of tools[0]"),
        ({"tools": "move"}, "tools", "expected a list"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type", "expected 'function'"),
        ({"tools": [WAVE, named("a", parameters={"type": "object", "properties": {"x": {"uniqueItems": True}}})]},
         "tools[1].function.parameters", "'uniqueItems'"),
        ({"tools": [named("a", strict=1)]}, "tools[0].function.strict", "true or false"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "expected 'auto'"),
        ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "expected 'auto'"),
        ({"tool_choice": "required"}, "tool_choice", "has no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
        ({"messages": [*MESSAGES, {"role": "tool", "tool_call_id": "1"}]}, "messages", "message 2 (tool)"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_bad_tools_are_named(tool_server: ServerProcess, fields: dict[str, Any], param: str, words: str) -> None:
    status, found, _ = tool_server.chat(**fields)
    assert (status, found["error"]["param"]) == (400, param), found
    assert words in found["error"]["message"] and found["error"]["message"].startswith((param, "message 2")), found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [FLAT[0], FLAT[0]]}, "tools[1].name"),
        ({"tools": [FLAT[0] | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_tools_of_responses_are_named(tool_server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    status, found, _ = tool_server.ask("POST", "/v1/responses", {"model": MODEL, "input": QUESTION, **fields})
    assert (status, found["error"]["param"]) == (400, param), found
    assert found["error"]["message"].startswith(param)


def test_the_field_of_tools_that_no_template_shows_is_named() -> None:
    error = RequestError("tools are given, but the chat template of x never reads them")
    assert http_error(error, {"tools": "tools", "": "messages"}).param == "tools"


@pytest.mark.parametrize("choice", ["auto", pytest.param(NAMED, marks=pytest.mark.slow)], ids=str)
def test_an_answer_beside_a_format_is_calls_or_has_it(calling: openai.OpenAI, taught: LLM, choice: Any) -> None:
    described = {
        "name": "seen",
        "schema": {"type": "object", "properties": {"at": {"enum": OBJECTS}}, "required": ["at"]},
    }
    described["schema"] |= {"additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": described}
    begin = taught.tokenizer.encode("<tool_call>", add_special_tokens=False)[0]
    kinds = []
    for bias in (-50, 50):
        params = SamplingParams(**DRAWN, max_tokens=200, logit_bias={begin: bias})
        expected = taught.chat(MESSAGES, params, tools=TOOLS, tool_choice=choice, response_format=form)
        told = [(call.name, call.arguments) for call in expected.tool_calls]
        kinds.append(bool(told))
        assert expected.structure_complete is (None if told else True) and bool(told) != bool(expected.text)
        assert told or expected.parsed["at"] in OBJECTS
        drawn: Any = {"model": MODEL, "temperature": 1.5, "extra_body": {"seed": 3, "logit_bias": {str(begin): bias}}}
        options: Any = {**drawn, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "response_format": form}
        found = calling.chat.completions.create(**options, max_tokens=200).choices[0]
        assert (called(found.message), found.message.content) == (told, expected.text or None)
        content, calls, _ = joined(calling.chat.completions.create(**options, max_tokens=200, stream=True))
        assert ([(call["name"], call["arguments"]) for call in calls], content) == (told, expected.text or None)
        flat = {"type": "function", "name": "move"} if choice == NAMED else choice
        options = {**drawn, "input": QUESTION, "tools": FLAT, "tool_choice": flat, "max_output_tokens": 200}
        answer = calling.responses.create(**options, text={"format": {"type": "json_schema", **described}})
        items = [(item.name, item.arguments) for item in answer.output if item.type == "function_call"]
        assert (items, answer.output_text) == (told, expected.text)
    assert kinds == {"auto": [False, True], "none": [False, False]}.get(str(choice), [True, True])
