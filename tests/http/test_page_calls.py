"""Calls of tools on the page: real ones of a server, and streams as other models have them. Nothing runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_server import ServerProcess
from served_page import TURN, answer, ask, facts, opened, streamed

from tools.docs.browser import Page

MOVE = {
    "name": "move",
    "description": "Move an object.",
    "parameters": {
        "type": "object",
        "properties": {"object": {"enum": ["red cup", "green apple"]}, "to": {"enum": ["left", "right"]}},
        "required": ["object", "to"],
        "additionalProperties": False,
    },
}
#: Requires a call, which the page leaves to the model, and keeps what was asked.
REQUIRED = """
globalThis.asked = [];
globalThis.plainly = fetch;
fetch = (path, options) => {
  if (!options?.body) return plainly(path, options);
  asked.push(JSON.parse(options.body));
  const body = { ...asked.at(-1), tool_choice: globalThis.choice, parallel_tool_calls: false };
  return plainly(path, { ...options, body: JSON.stringify(choice ? body : asked.at(-1)) });
};
globalThis.choice = "required";
1
"""


@pytest.fixture
def page(tool_server: ServerProcess) -> Iterator[Page]:
    with opened(tool_server) as page:
        page.wait_for("document.getElementById('model').value")
        yield page


def calls(page: Page, turn: int = 0) -> list[list[str]]:
    """The calls of a turn as they are shown: what is called, and the arguments."""
    parts = f"[...{TURN}[{turn}].querySelectorAll('.call')]"
    return page.evaluate(
        f"{parts}.map((each) => [each.querySelector('p').innerText, each.querySelector('pre').innerText])"
    )


def asked(page: Page) -> list[dict[str, Any]]:
    return page.evaluate("asked")


def test_a_call_is_shown_and_stands_in_the_conversation(page: Page) -> None:
    page.evaluate(REQUIRED)
    page.fill("#tools", json.dumps([MOVE]))
    assert page.evaluate("document.getElementById('hint').innerText") == "The model may call tools"
    ask(page, "Please put the green apple to the right.")
    assert answer(page) == "" and facts(page).endswith("a call, which nothing here runs")
    ((name, shown),) = calls(page)
    found = json.loads(shown)
    assert name == "Calls move" and shown == json.dumps(found, indent=2)
    assert set(found) == {"object", "to"} and found["to"] in ("left", "right")
    assert asked(page)[0]["tools"] == [{"type": "function", "function": MOVE}]
    page.evaluate("choice = 'none'; 1")
    ask(page, "And now?")
    answer(page, 1)
    assert calls(page, 1) == [] and not page.evaluate("document.querySelector('.failed')")
    sent = asked(page)[1]["messages"][1]
    assert (sent["role"], sent["content"]) == ("assistant", None)
    (call,) = sent["tool_calls"]
    assert call["function"]["name"] == "move" and json.loads(call["function"]["arguments"]) == found
    assert call["id"].isalnum() and call["type"] == "function"


def test_a_call_that_a_limit_cuts_is_shown_as_far_as_it_came(page: Page) -> None:
    page.evaluate(REQUIRED)
    page.fill("#tools", json.dumps([{"type": "function", "function": MOVE}]))
    page.fill("#max_tokens", "14")
    ask(page, "Please put the green apple to the right.")
    answer(page)
    ((name, shown),) = calls(page)
    assert name == "Calls move" and facts(page).endswith("ended at the most tokens")
    with pytest.raises(ValueError, match=r"."):
        json.loads(shown)
    page.evaluate("choice = null; 1")
    page.fill("#tools", "")
    ask(page, "Where is the red cup?")
    answer(page, 1)
    assert [each["role"] for each in asked(page)[1]["messages"]] == ["user"] and "tools" not in asked(page)[1]


def test_what_is_no_list_of_tools(page: Page, tool_server: ServerProcess) -> None:
    for wrong, said in (("[", "This is no JSON"), ("{}", "This is no JSON list."), ("3", "This is no JSON list.")):
        page.fill("#tools", wrong)
        ask(page, "Hello!")
        assert page.evaluate("document.getElementById('tools-wrong').innerText").startswith(said)
        assert page.evaluate("document.activeElement.id") == "tools" and page.evaluate(f"{TURN}.length") == 0
    page.fill("#tools", '[{"name": "a b"}]')
    ask(page, "Hello!")
    answer(page)
    body = {"model": "shipped", "messages": [{"role": "user", "content": "Hello!"}]}
    tools = [{"type": "function", "function": {"name": "a b"}}]
    status, found, _ = tool_server.ask("POST", "/v1/chat/completions", body | {"tools": tools})
    shown = page.evaluate("document.querySelector('.failed p').innerText")
    assert status == 400 and shown == found["error"]["message"] and "tools[0]" in shown


def test_several_calls_behind_text_are_only_ever_text(page: Page) -> None:
    """As a model that means ill would stream them."""
    ill = "<img src=x onerror=alert(1)>"
    pieces = [
        {"reasoning_content": "Hm."},
        {"content": "I look."},
        {
            "tool_calls": [
                {"index": 0, "id": "a", "type": "function", "function": {"name": ill, "arguments": '{"at": '}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": json.dumps(ill) + "}"}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "stop", "arguments": "{}"}}]},
    ]
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", streamed(*pieces))
    ask(page, "Hello")
    assert answer(page) == "I look."
    assert calls(page) == [[f"Calls {ill}", json.dumps({"at": ill}, indent=2)], ["Calls stop", "{}"]]
    assert page.evaluate("document.querySelectorAll('.call img').length") == 0
    for width in (360, 1280):
        page.resize(width, 700)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
