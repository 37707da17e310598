"""The shipped model's adapter `tools`: asked with "auto" it calls, asks back, or answers in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from edgellm import LLM, Response, SamplingParams
from edgellm.opened_model import SHIPPED_MODEL

OBJECTS = ["red cup", "blue cup", "white bowl", "yellow banana", "green apple", "wooden spoon"]
PLACES = [f"{row} {column}" for row in ("front", "middle", "back") for column in ("left", "centre", "right")]
PLACES[4] = "centre"


def tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


PICK = tool("pick_up", "Pick up an object from the table.", {"object": {"type": "string"}})
LOOK = tool("look_at", "Look at an object.", {"object": {"type": "string", "enum": OBJECTS}})
TO = {"type": "string", "enum": PLACES}
MOVE = tool("move", "Move an object to a position on the table.", {"object": {"type": "string"}, "position": TO})
WAIT = tool("wait", "Wait for some seconds.", {"seconds": {"type": "integer"}})
LIGHT = tool("set_light", "Switch the light on or off.", {"on": {"type": "boolean"}})
WAVE = {"type": "function", "function": {"name": "wave", "description": "Wave with the hand."}}
GREEDY = SamplingParams(max_tokens=120)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(SHIPPED_MODEL, backend="numpy") as opened:
        yield opened


def asked(llm: LLM, question: str, tools: list[dict[str, Any]], **more: Any) -> Response:
    messages = [{"role": "user", "content": question}]
    return llm.chat(messages, GREEDY, adapter="tools", tools=tools, tool_choice="auto", **more)


def called(response: Response) -> list[tuple[str, Any]]:
    return [(call.name, call.parsed) for call in response.tool_calls]


@pytest.mark.parametrize(
    ("question", "tools", "calls"),
    [
        ("Please pick up the red cup.", [PICK, WAVE], [("pick_up", {"object": "red cup"})]),
        ("Look at the banana.", [LOOK, PICK, WAIT], [("look_at", {"object": "yellow banana"})]),
        (
            "Move the green apple to the back centre.",
            [WAVE, MOVE, LOOK],
            [("move", {"object": "green apple", "position": "back centre"})],
        ),
        ("Wait 12 seconds.", [WAIT, LIGHT], [("wait", {"seconds": 12})]),
        ("Switch the light on.", [LIGHT, WAVE], [("set_light", {"on": True})]),
        ("Turn off the light.", [WAIT, LIGHT], [("set_light", {"on": False})]),
        ("Wave.", [PICK, WAVE], [("wave", {})]),
        (
            "Look at the white bowl and the wooden spoon.",
            [LOOK, WAVE],
            [("look_at", {"object": "white bowl"}), ("look_at", {"object": "wooden spoon"})],
        ),
    ],
)
def test_auto_calls_the_tool_that_was_asked_for(
    llm: LLM, question: str, tools: list[dict[str, Any]], calls: list[tuple[str, Any]]
) -> None:
    found = asked(llm, question, tools)
    assert called(found) == calls
    assert (found.text, found.finish_reason, found.tool_call_error) == ("", "tool_calls", None)


@pytest.mark.parametrize(
    ("question", "tools", "words"),
    [
        ("Where is the red cup?", [PICK, MOVE], "The red cup is at the front left."),
        ("What is your battery level?", [WAIT], "My battery is at 76 percent."),
        ("Pick up the cup.", [PICK], "Which cup do you mean: the red cup or the blue cup?"),
        ("Pick up the purple hammer.", [PICK], "I do not see a purple hammer."),
        ("Wait a moment.", [WAIT, WAVE], "How many seconds shall I wait?"),
        ("Fly to the moon.", [PICK, WAVE], "I cannot do that. I am a small robot on a table."),
    ],
)
def test_auto_answers_in_words_where_no_call_is_due(
    llm: LLM, question: str, tools: list[dict[str, Any]], words: str
) -> None:
    found = asked(llm, question, tools)
    assert (found.text, found.tool_calls, found.finish_reason) == (words, (), "stop")


def test_a_conversation_with_a_question_back_and_results(llm: LLM) -> None:
    session = llm.create_session(None, GREEDY, "tools", tools=[PICK, WAIT])
    assert session.send("Pick up the cup.").text.startswith("Which cup")
    call = session.send("The blue one.").tool_calls[0]
    assert (call.name, call.parsed) == ("pick_up", {"object": "blue cup"})
    said = session.send([{"role": "tool", "tool_call_id": call.id, "content": json.dumps({"status": "ok"})}])
    assert (said.text, said.tool_calls) == ("I have picked up the blue cup.", ())
    call = session.send("Wait 5 seconds, please.").tool_calls[0]
    failed = session.send([{"role": "tool", "tool_call_id": call.id, "content": "error: the motor is too hot"}])
    assert failed.text == "That did not work: the motor is too hot."


def test_the_rules_keep_what_the_adapter_would_write_otherwise(llm: LLM) -> None:
    """The arguments of a call that "auto" begins obey the schema, whatever was asked for."""
    only_bowl = tool("pick_up", "Pick up an object from the table.", {"object": {"enum": ["white bowl"]}})
    assert called(asked(llm, "Please pick up the red cup.", [only_bowl])) == [("pick_up", {"object": "white bowl"})]
    assert called(asked(llm, "Please pick up the red cup.", [PICK])) == [("pick_up", {"object": "red cup"})]


@pytest.mark.parametrize(
    ("of_each_kind", "every", "least"),
    [(1, 2, 7), *(pytest.param(each, 1, 14 * each, marks=pytest.mark.slow) for each in (1, 2))],
)
def test_held_out_items_are_answered_right(llm: LLM, of_each_kind: int, every: int, least: int) -> None:
    """A sample of what `tools/demo_model/results/tools_evaluation.json` counts."""
    from tools.bench.held_out_prompts import as_they_are
    from tools.demo_model.calls.dialogues import tool_items
    from tools.demo_model.vocabulary import written_answer

    items, right = tool_items(77015, of_each_kind)[::every], 0
    for item in items:
        found = llm.chat(as_they_are(item["messages"]), GREEDY, adapter="tools", tools=item["tools"])
        calls = [call.as_message() for call in found.tool_calls]
        right += written_answer({"content": found.text, "tool_calls": calls}) in item["accepted"]
    assert len(items) == 16 * of_each_kind // every and right >= least
