"""gpt-oss's published chat template writes what transformers makes of it, conversation by conversation."""

from __future__ import annotations

import hashlib
import json
import time

import pytest
from golden_files import golden_folder

from edgellm.text.messages import checked_messages
from edgellm.text.template import ChatTemplate

GOLDEN = json.loads((golden_folder("published") / "harmony.json").read_text(encoding="utf-8"))
TEMPLATE = ChatTemplate({"default": GOLDEN["template"]}, "chat_template.jinja")


@pytest.mark.parametrize("number", range(len(GOLDEN["conversations"])))
def test_renderings_are_those_of_transformers(number: int) -> None:
    conversation = GOLDEN["conversations"][number]
    variables = dict(conversation["variables"])
    goes_on = variables.pop("add_generation_prompt", True)
    messages = TEMPLATE.fitted(checked_messages(conversation["messages"]), "tools" in variables)
    text = TEMPLATE.render({"messages": messages, **variables}, {}, add_generation_prompt=goes_on)
    text = text.replace(time.strftime("%Y-%m-%d"), "DATE")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == conversation["sha256"], text


def test_conversations_have_reasoning_tools_and_results() -> None:
    found = GOLDEN["conversations"]
    assert len(found) > 30
    kinds = [{key for message in each["messages"] for key in message} for each in found]
    assert sum("tool_calls" in each for each in kinds) > 10 and sum("thinking" in each for each in kinds) > 10
    assert sum("tools" in each["variables"] for each in found) > 10
