"""Answers that call tools: asked for in every way, drafted or not, cut by limits, and going on with the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from call_templates import add_calls, call_template

from edgellm import LLM, Chunk, DraftingConfig, Request, RequestError, Response, SamplingParams, ToolCall
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits
from edgellm.structure.description import Structure
from edgellm.text.template import ChatTemplate
from edgellm.tool_calls.calls import joined_deltas

pytestmark = pytest.mark.usefixtures("private_files")

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["cup", "table"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["at", "times"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = [LOOK, STOP]
LONG = SamplingParams(max_tokens=120)


@pytest.fixture(scope="module")
def engines(make_checkpoint: Callable[..., Path], tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a draft head, whose template shows Hermes's calls."""
    folder = tmp_path_factory.mktemp("answers")
    checkpoint = make_checkpoint(folder / "checkpoint", max_position_embeddings=2048)
    add_calls(checkpoint)
    limits = EngineLimits(2, 128, 1500, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(checkpoint, folder / "robot", limits, [], draft=tiny_draft)
    return folder / "robot"


@pytest.fixture(scope="module")
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy", drafting=None) as opened:
        yield opened


def is_right(call: ToolCall) -> bool:
    found = call.parsed
    if found is None:
        return False
    if call.name == "stop":
        return found == {}
    return set(found) == {"at", "times"} and found["at"] in ("cup", "table") and 1 <= found["times"] <= 9


def begun(llm: LLM, **more: Any) -> SamplingParams:
    """Parameters with which an answer begins a call wherever it may."""
    mark = llm.tokenizer.token_to_id("<tool_call>")
    assert mark is not None
    return SamplingParams(logit_bias={mark: 100}, max_tokens=120, **more)


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_is_always_one(llm: LLM, seed: int) -> None:
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=120)
    found = llm.chat(HELLO, params, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = found.tool_calls
    assert is_right(call) and (found.text, found.finish_reason, found.tool_call_error) == ("", "tool_calls", None)
    assert found.usage.completion_tokens == len(found.token_ids)
    named = llm.chat(HELLO, params, tools=TOOLS, tool_choice="look")
    assert [each.name for each in named.tool_calls] == ["look"] and all(map(is_right, named.tool_calls))
    choice = {"type": "function", "function": {"name": "stop"}}
    assert [each.name for each in llm.chat(HELLO, params, tools=TOOLS, tool_choice=choice).tool_calls] == ["stop"]


def joined(chunks: Sequence[Chunk]) -> tuple[Any, ...]:
    deltas = joined_deltas([delta for chunk in chunks for delta in chunk.tool_calls])
    return "".join(chunk.text for chunk in chunks), [(each.id, each.name, each.arguments) for each in deltas]


def told(response: Response) -> tuple[Any, ...]:
    return response.text, [(call.id, call.name, call.arguments) for call in response.tool_calls]


def test_calls_are_streamed_and_never_text(llm: LLM) -> None:
    with llm.stream_chat(HELLO, LONG, tools=TOOLS, tool_choice="look") as stream:
        chunks = list(stream)
        response = stream.result()
    assert joined(chunks) == told(response) and response.text == ""
    assert sum(bool(chunk.tool_calls) for chunk in chunks) > 1
    first = next(delta for chunk in chunks for delta in chunk.tool_calls)
    assert (first.index, first.name, first.id) == (0, "look", response.tool_calls[0].id)


def test_arguments_cut_by_a_limit_are_not_complete(llm: LLM) -> None:
    whole = llm.chat(HELLO, LONG, tools=TOOLS, tool_choice="look")
    count = whole.usage.completion_tokens
    kept = 0
    for limit in range(1, count, 7):
        found = llm.chat(HELLO, SamplingParams(max_tokens=limit), tools=TOOLS, tool_choice="look")
        assert found.finish_reason == "length" and found.token_ids == whole.token_ids[:limit]
        if found.tool_calls:
            (call,) = found.tool_calls
            kept += 1
            assert found.text == "" and whole.tool_calls[0].arguments.startswith(call.arguments)
            assert call.complete == (call.arguments == whole.tool_calls[0].arguments)
            assert call.complete or found.tool_call_error is not None
            assert ("tool_calls" in found.as_message()) == call.complete
    assert kept > 3


def test_auto_is_free_to_answer_and_held_to_the_schema_once_it_calls(llm: LLM) -> None:
    free = llm.chat(HELLO, SamplingParams(max_tokens=12), tools=TOOLS)
    assert (free.tool_calls, free.finish_reason) == ((), "length") and free.text
    assert free.token_ids == llm.chat(HELLO, SamplingParams(max_tokens=12), tools=TOOLS, tool_choice="none").token_ids
    for seed in range(4):
        params = begun(llm, temperature=1.5, seed=seed)
        found = llm.chat(HELLO, params, tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
        (call,) = found.tool_calls
        assert is_right(call) and (found.text, found.finish_reason) == ("", "tool_calls")
        raw = llm.chat(HELLO, replace(params, max_tokens=3), tools=TOOLS, tool_choice="none")
        assert raw.tool_calls == ()


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.2])
def test_drafted_answers_call_as_plain_ones_do(engines: Path, temperature: float) -> None:
    found: list[list[Any]] = []
    for drafting in (None, DraftingConfig(draft_top_k=4, draft_steps=3, verify_tree_size=12)):
        with LLM(engines, backend="numpy", drafting=drafting) as llm:
            requests = [
                Request(messages=HELLO, params=params, tools=TOOLS, tool_choice=choice, structure=structure)
                for structure in (None, PARAMETERS)
                for choice, params in (
                    ("required", SamplingParams(temperature=temperature, seed=1, max_tokens=90)),
                    ("auto", SamplingParams(temperature=temperature, seed=1, max_tokens=30)),
                    ("auto", begun(llm, temperature=temperature, seed=1)),
                    ("look", SamplingParams(temperature=temperature, seed=1, max_tokens=90)),
                )
            ]
            answers = llm.handle(requests)
            assert all(isinstance(each, Response) for each in answers)
            found.append(
                [
                    (each.token_ids, each.text, [(call.name, call.arguments) for call in each.tool_calls])
                    for each in answers
                    if isinstance(each, Response)
                ]
            )
    assert found[0] == found[1]
    assert sum(len(calls) for *_, calls in found[0]) >= 6


def test_none_leaves_all_as_text(llm: LLM) -> None:
    text = "<tool_call>"
    asked = [*HELLO, {"role": "assistant", "content": text}]
    found = llm.chat(asked, SamplingParams(max_tokens=8), tools=TOOLS, tool_choice="none", continue_final_message=True)
    assert found.tool_calls == () and found.finish_reason == "length"


def test_a_template_that_shows_no_calls(llm: LLM) -> None:
    own = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = ChatTemplate({"default": call_template("")}, "plain")
    try:
        for choice in ("required", "look"):
            with pytest.raises(RequestError, match="tool_choice requires a call, but the chat template of plain"):
                llm.chat(HELLO, LONG, tools=TOOLS, tool_choice=choice)
        found = llm.chat(HELLO, SamplingParams(max_tokens=4), tools=TOOLS)
        assert found.tool_calls == () and found.text
    finally:
        llm.tokenizer.chat_template = own


def test_a_tokenizer_that_grammars_cannot_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RequestError("cannot be used for structured answers")

    monkeypatch.setattr("edgellm.structure.answers.RuleMaker.vocabulary", refuse)
    assert llm.chat(HELLO, begun(llm), tools=TOOLS).tool_calls == ()  # free bytes behind the mark are no call
    assert "calls of tools are not enforced: cannot be used" in caplog.text
    with pytest.raises(RequestError, match="cannot be used"):
        llm.chat(HELLO, LONG, tools=TOOLS, tool_choice="required")


def test_a_session_goes_on_with_the_results(llm: LLM) -> None:
    session = llm.create_session("", LONG, tools=TOOLS, tool_choice="look")
    response = session.send("what is there?")
    (call,) = response.tool_calls
    session.tool_choice = "none"
    result = {"role": "tool", "tool_call_id": call.id, "content": "a cup"}
    answer = session.send([result], SamplingParams(max_tokens=4))
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert session.messages[2] == response.as_message() and session.messages[2]["tool_calls"] == [call.as_message()]
    prompt = llm.chat(session.messages[:4], SamplingParams(max_tokens=4), tools=TOOLS, tool_choice="none")
    assert answer.token_ids == prompt.token_ids
    assert answer.usage.reused_tokens > response.usage.prompt_tokens  # the call is rendered as it was written
    assert [message["role"] for message in session.undo()] == ["user", "assistant", "tool", "assistant"]


def test_stopped_by_the_reader_no_more_is_called_than_was_shown(llm: LLM) -> None:
    with llm.stream_chat(HELLO, LONG, tools=TOOLS, tool_choice="look", stop_when=lambda text: True) as stream:
        chunks = list(stream)
        response = stream.result()
    assert (response.finish_reason, len(chunks)) == ("stop", 1)
    assert joined(chunks) == told(response) and not any(call.complete for call in response.tool_calls)


def named(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"tools": [LOOK, STOP, LOOK]}, r"tools\[2\].function.name is 'look', as that of tools\[0\]"),
        ({"tools": [named("look at")]}, r"tools\[0\].function.name is 'look at': expected 1 to 64 letters"),
        ({"tools": [named("x" * 65)]}, r"tools\[0\].function.name is 'xxx"),
        ({"tools": [named(f"t{n}") for n in range(129)]}, "tools has 129 entries: expected at most 128"),
        ({"tools": TOOLS, "tool_choice": "lok"}, "names the tool 'lok', which the request has not: did you mean look"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice is 5: expected 'auto'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice is "),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}, "x": 1}},
            "tool_choice is ",
        ),
        ({"tools": TOOLS, "tool_choice": ["look"]}, "tool_choice is "),
        ({"tool_choice": "required"}, "tool_choice is 'required', but the request has no tools"),
        ({"tool_choice": "look", "tools": []}, "tool_choice is 'look', but the request has no tools"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls is 'no': expected true or false"),
        ({"tools": [named("a", strict="yes")]}, r"tools\[0\].function.strict is 'yes'"),
        (
            {"tools": [named("a", parameters={"type": "string"})]},
            r"tools\[0\].function.parameters has the type 'string'",
        ),
        (
            {"tools": [STOP, named("a", parameters={"type": "object", "properties": {"x": {"uniqueItems": True}}})]},
            r"tools\[1\].function.parameters: .*#/properties/x, has the keyword 'uniqueItems', .*strict to false",
        ),
    ],
)
def test_bad_input_is_refused_by_place(given: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        Request(messages=HELLO, **given)


def test_what_is_no_bad_input() -> None:
    loose = named("a", parameters={"type": "object", "properties": {"x": {"uniqueItems": True}}}, strict=False)
    for given in (
        {"tools": [loose]},
        {"tools": [{**loose, "function": {**loose["function"], "strict": True}}], "tool_choice": "none"},
        {"tools": [named(f"t{n}") for n in range(128)], "tool_choice": "required"},
        {"tools": None, "tool_choice": "auto"},
        {"tool_choice": "none"},
        {"tools": TOOLS, "structure": "json_object"},
    ):
        Request(messages=HELLO, **given)
    assert Request(messages=HELLO, tools=TOOLS, structure=None).choice is not None
    assert Structure(json=PARAMETERS).is_json
    with pytest.raises(RequestError, match="ask with messages"):
        Request("hello", tools=TOOLS)
    with pytest.raises(RequestError, match="tool_choice is 'required'"):
        Request("hello", tool_choice="required")
