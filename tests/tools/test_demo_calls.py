"""The generator of dialogues with tools: calls that fit the tools which are offered, held-out items, the template."""

import json
import random
from collections import Counter

import jsonschema
import pytest

from edgellm.text.template import ChatTemplate
from edgellm.tool_calls.calls import checked_choice
from edgellm.tool_calls.formats import tool_format
from edgellm.tool_calls.reader import ToolReader
from tools.demo_model.calls import requests_text
from tools.demo_model.calls.dialogues import GROUPS, ToolTalk, beginning, tool_dialogue, tool_items
from tools.demo_model.calls.toolbox import DIRECTIONS, EXCLUSIVE, KINDS, MEANINGS, RELATIONS, SPELLINGS
from tools.demo_model.grammar import phrasings
from tools.demo_model.vocabulary import CHAT_TEMPLATE, render


@pytest.fixture(scope="module")
def talks() -> list[ToolTalk]:
    return [tool_dialogue(random.Random(f"talk {number}"), "train", 1 + number % 6) for number in range(300)]


@pytest.fixture(scope="module")
def items() -> list[dict]:
    return tool_items(5, 8)


def calls_of(text: str, signatures: list[dict]) -> tuple[str, list[tuple[str, dict]]]:
    """What an answer says and calls, as EdgeLLM reads it."""
    choice = checked_choice(signatures, "auto")
    assert choice is not None
    reader = ToolReader(tool_format("hermes"), choice.schemas)
    said = reader.push(0, text) + reader.finish()
    assert all(call.complete for call in reader.calls)
    return said, [(call.name, json.loads(call.arguments)) for call in reader.calls]


def test_the_same_seed_gives_the_same(items):
    assert tool_items(5, 8) == items != tool_items(6, 8)
    first, again = (tool_dialogue(random.Random("x"), "train", 5) for _ in range(2))
    assert (first.messages, first.signatures) == (again.messages, again.signatures)


def test_every_call_is_of_an_offered_tool_and_fits_its_schema(talks, items):
    count = Counter()
    for talk in talks:
        schemas = {tool.name: tool.signature["function"].get("parameters", {}) for tool in talk.tools}
        assert 1 <= len(schemas) == len(talk.tools) <= 4
        for message in talk.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                schema = schemas[function["name"]] | {"additionalProperties": False}
                arguments = json.loads(function["arguments"])
                jsonschema.validate(arguments, schema)
                assert list(arguments) == [name for name in schema.get("properties", {}) if name in arguments]
                assert function["arguments"] == json.dumps(arguments, ensure_ascii=False)
                count[len(message["tool_calls"])] += 1
    assert count[1] > 200 and count[2] > 50
    for item in items:
        for text in item["accepted"]:
            said, calls = calls_of(text, item["tools"])
            assert bool(said) != bool(calls)


def test_values_are_of_the_scene_or_of_the_user(talks):
    """What a call says of an object, a number or a text stands in the system prompt or in what the user said."""
    seen = 0
    for talk in talks:
        told = ""
        for message in talk.messages:
            if message["role"] in ("system", "user"):
                told += message["content"].lower()
            for call in message.get("tool_calls", ()):
                for value in json.loads(call["function"]["arguments"]).values():
                    if isinstance(value, bool) or value in (*RELATIONS, *DIRECTIONS, "slow", "fast"):
                        continue  # said in other words
                    assert all(word in told for word in str(value).lower().split())
                    seen += 1
    assert seen > 100


def test_items_are_of_every_group_and_held_out(talks, items):
    assert Counter(item["skill"] for item in items) == dict.fromkeys(GROUPS, 8)
    prompts = [render(item["messages"], True, item["tools"]) for item in items]
    assert len(set(prompts)) == len(prompts)
    trained = {beginning(talk.messages, talk.signatures) for talk in talks}
    assert not trained & {beginning(item["messages"], item["tools"]) for item in items}
    for item in items:
        last = item["messages"][-1]["role"]
        assert last == ("tool" if item["skill"] == "results" else "user") and item["accepted"]
        _, calls = calls_of(item["accepted"][0], item["tools"])
        expected = {"twice": 2}.get(item["skill"], 1)
        if item["skill"] in ("lacking", "which", "refused", "cannot", "words", "results"):
            expected = 0
        assert len(calls) == expected


def test_phrasings_are_split():
    blocks = [kind.descriptions for kind in KINDS.values()] + list(MEANINGS.values())
    for name, found in vars(requests_text).items():
        if name.isupper() and name not in ("ASKING", "SLOWLY", "QUICKLY", "PAIRS"):
            blocks += [found] if isinstance(found, str) else list(found.values())
    for block in blocks:
        train = {text for group in phrasings(block, "train") for text in group}
        assert train and not train & {text for group in phrasings(block, "eval") for text in group}
    assert {meaning for kind in KINDS.values() for meaning in kind.parameters} | {"slow", "speed"} == set(SPELLINGS)
    assert set(SPELLINGS) == set(MEANINGS) and all(group <= set(KINDS) for group in EXCLUSIVE)


def test_the_chat_template_gives_the_text_of_training(talks):
    template = ChatTemplate({"default": CHAT_TEMPLATE}, "the demo model")
    for talk in talks[:60]:
        for tools in (talk.signatures, None):
            for flag in (False, True):
                values = {"messages": template.fitted(talk.messages, bool(tools)), "tools": tools}
                assert template.render(values, add_generation_prompt=flag) == render(talk.messages, flag, tools)


def test_without_tools_the_chat_template_tells_of_none():
    parts = [{"type": "image"}, {"type": "text", "text": "What"}, {"type": "text", "text": " is it?"}]
    messages = [{"role": "system", "content": "You are Pip."}, {"role": "user", "content": parts}]
    template = ChatTemplate({"default": CHAT_TEMPLATE}, "the demo model")
    expected = (
        "<|im_start|>system\nYou are Pip.<|im_end|>\n<|im_start|>system\n<|image|><|im_end|>\n"
        "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    for tools in (None, []):
        assert template.render({"messages": messages, "tools": tools}) == expected
