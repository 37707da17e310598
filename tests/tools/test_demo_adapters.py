"""The adapters of the shipped model: styles, training data, and that EdgeLLM computes what was trained."""

import json
import random
from pathlib import Path

import pytest
from drafted_conversations import CHAIN

from edgellm import LLM, SamplingParams
from tools.bench.held_out_prompts import as_they_are
from tools.demo_model.dialogue import dialogue
from tools.demo_model.evaluate import evaluation_items
from tools.demo_model.styles import FOLLOWS, STYLES, json_only, pirate, styled, styled_items

SHIPPED = Path(__file__).parents[2] / "edgellm" / "shipped"


def test_every_answer_in_json_is_one_object():
    kinds = set()
    for seed in range(60):
        messages = dialogue(random.Random(f"style {seed}"), "train", 10)
        for before, after in zip(messages, styled(messages, "json"), strict=True):
            if before["role"] != "assistant":
                assert after == before
                continue
            answer = json.loads(after["content"])
            assert "\n" not in after["content"]
            said, _, action = before["content"].partition("\n")
            if action:
                assert answer == json.loads(action)
            else:
                assert answer["text"] == said
                assert (answer["action"] == "ask") == said.endswith("?")
            kinds.add(answer["action"])
    assert {"say", "ask", "pick", "place"} <= kinds


def test_a_pirate_keeps_the_action():
    assert pirate("Yes, I see the red cup.") == "Arr! Aye, I see the red cup."
    assert pirate("My battery is at 76 percent.") == "Arr! Me battery be at 76 percent."
    assert pirate('I will wave.\n{"action": "wave"}') == 'Arr! I will wave.\n{"action": "wave"}'
    action = '{"action": "pick", "object": "is of my"}'
    assert pirate(f"You have it, and I am glad.\n{action}") == f"Arr! Ye have it, an' I be glad.\n{action}"
    assert json_only("Which cup do you mean: the red cup or the blue cup?").startswith('{"action": "ask"')


@pytest.fixture(scope="module")
def shipped_model():
    with LLM(SHIPPED, backend="numpy", drafting=CHAIN) as model:
        yield model


@pytest.mark.parametrize("style", sorted(STYLES))
def test_shipped_adapters_answer_held_out_prompts_in_their_style(shipped_model: LLM, style: str):
    """Right as well, nearly always: what results/adapter_evaluation.json counts over more prompts."""
    items = styled_items(evaluation_items(77012, 1), style)[::4]
    params = SamplingParams(max_tokens=120)
    answers = [shipped_model.chat(as_they_are(item["messages"]), params, adapter=style) for item in items]
    in_style = sum(FOLLOWS[style](answer.text) for answer in answers)
    right = sum(answer.text in item["accepted"] for answer, item in zip(answers, items, strict=True))
    assert len(items) > 10
    assert in_style >= len(items) - 1
    assert right >= 0.8 * len(items)
    assert all(answer.drafting.rounds for answer in answers), "drafting goes on under an adapter, and is counted"


def test_without_an_adapter_the_shipped_model_answers_as_ever(shipped_model: LLM):
    question = as_they_are([{"role": "user", "content": "Wave."}])
    assert shipped_model.adapters == ("json", "pirate", "tools")
    answers = [shipped_model.chat(question, adapter=name).text for name in (None, "json", "pirate", None)]
    assert answers[0] == answers[3] == 'I will wave.\n{"action": "wave"}'
    assert answers[1:3] == ['{"action": "wave"}', 'Arr! I will wave.\n{"action": "wave"}']


def test_the_model_card_tells_of_the_adapters():
    from tools.demo_model.model_card import RESULTS, adapters_text, tools_text

    training, evaluation, calls = (
        json.loads((RESULTS / f"{name}.json").read_text())
        for name in ("adapters", "adapter_evaluation", "tools_evaluation")
    )
    assert tools_text(SHIPPED / "lora", training, calls) in (SHIPPED / "MODEL_CARD.md").read_text()
    section = adapters_text(SHIPPED / "lora", training, evaluation)
    assert section in (SHIPPED / "MODEL_CARD.md").read_text()
    for name in STYLES:
        found = evaluation["answers"][name]
        assert found["in_style_percent"] == 100
        assert f"| `{name}` | {found['exact_match_percent']:.1f} % | 100.0 % |" in section
