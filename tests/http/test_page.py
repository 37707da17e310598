"""The page at the server's root in the system's Chromium, used as a person would, against real servers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pytest
from http_server import MODEL, ServerProcess, running, wait_for
from served_page import TURN, answer, ask, facts, opened, streamed

from edgellm.http.page import PATHS, POLICY
from edgellm.opened_model import SHIPPED_MODEL
from tools.docs.browser import Page

TOYS = SHIPPED_MODEL / "scenes" / "toys.png"
TOYS_URL = f"data:image/png;base64,{base64.b64encode(TOYS.read_bytes()).decode()}"
#: Hundreds of tokens that nothing but a stop ends before.
ENDLESS = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 250}


@pytest.fixture(scope="module")
def shared(server: ServerProcess) -> Iterator[Page]:
    with opened(server) as page:
        page.wait_for("document.getElementById('model').value")
        yield page


@pytest.fixture
def page(shared: Page) -> Page:
    """The page with a new conversation and no settings."""
    shared.answer_no_more()
    shared.resize(1280, 800)
    shared.click("#new")
    for field in ("#schema", "#tools", "#temperature", "#max_tokens", "#system"):
        if shared.evaluate(f"document.querySelector('{field}').value"):
            shared.fill(field, "")
    return shared


def test_files_are_served_with_a_strict_policy_and_without_a_key(locked: ServerProcess) -> None:
    for path in PATHS:
        status, content, headers = locked.get(path)
        assert status == 200 and headers["content-security-policy"] == POLICY, path
        assert headers["x-content-type-options"] == "nosniff" and "on" + "click" not in content
        assert locked.get(path, host="evil.example")[0] == 421
        assert locked.ask("POST", path, {})[0] == 405
    assert locked.get("/v1/models")[0] == 401 and locked.get("/page.html")[0] == 401


def test_a_question_with_a_picture_is_answered(page: Page, client: openai.OpenAI) -> None:
    page.choose_files("#file", [TOYS])
    page.wait_for("document.querySelectorAll('#pictures img').length === 1")
    ask(page, "What do you see?")
    said = answer(page)
    content = [{"type": "image_url", "image_url": {"url": TOYS_URL}}]
    content.append({"type": "text", "text": "What do you see?"})
    messages = [{"role": "user", "content": content}]
    alone = client.chat.completions.create(model=MODEL, messages=messages)
    assert said == alone.choices[0].message.content and "green ball" in said
    assert "tokens/s" in facts(page) and "first after" in facts(page)
    assert page.evaluate("document.querySelectorAll('#pictures img').length") == 0
    ask(page, "Where is the green ball?")  # the conversation goes on, the picture in it
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Where is the green ball?"}]
    assert answer(page, 1) == client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content


def test_pictures_are_pasted_dropped_and_removed(page: Page) -> None:
    page.evaluate(
        f"globalThis.bytes = Uint8Array.from(atob('{TOYS_URL.partition(',')[2]}'), (each) => each.charCodeAt(0));"
        "globalThis.data = new DataTransfer(); data.items.add(new File([bytes], 'toys.png', {type: 'image/png'})); 1"
    )
    events = ("ClipboardEvent('paste', {clipboardData: data})", "DragEvent('drop', {dataTransfer: data})")
    for count, event in enumerate(events, 1):
        page.evaluate(f"document.dispatchEvent(new {event})")
        page.wait_for(f"document.querySelectorAll('#pictures img').length === {count}")
    page.click("#pictures li:first-child button")
    assert page.evaluate("document.querySelectorAll('#pictures img').length") == 1


def test_a_file_that_is_no_picture(page: Page, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.png"
    wrong.write_text("no picture", encoding="utf-8")
    page.choose_files("#file", [wrong])
    page.wait_for("document.getElementById('notice').innerText.includes('wrong.png')")
    assert page.evaluate("document.querySelectorAll('#pictures img').length") == 0


def test_a_stop_cancels_the_request(page: Page, server: ServerProcess) -> None:
    cancelled = server.metric("requests_ended_total", outcome="cancelled")
    page.fill("#schema", json.dumps(ENDLESS))
    page.fill("#max_tokens", "800")
    ask(page, "Count.")
    page.wait_for(f"{TURN}[0].querySelector('.said').innerText.length > 20")
    wait_for(lambda: page.evaluate("document.getElementById('queue-more').innerText") == "1 running")
    page.click("#stop")
    said = answer(page)
    wait_for(lambda: server.metric("requests_ended_total", outcome="cancelled") == cancelled + 1)
    assert server.metric("requests_running") == 0
    assert 20 < len(said) < 1200 and facts(page).endswith("stopped")
    assert page.evaluate("document.activeElement.id") == "question"
    page.fill("#schema", "")
    page.fill("#max_tokens", "4")
    ask(page, "Where is the red cup?")  # what came before the stop stands in the conversation
    assert answer(page, 1) and facts(page, 1).endswith("ended at the most tokens")


def test_a_schema_is_checked_and_followed(page: Page) -> None:
    requests = len([url for url in page.requested if "completions" in url])
    for wrong in ('{"type": ', "[1]", "3"):
        page.fill("#schema", wrong)
        ask(page, "Where is the red cup?")
        assert page.evaluate("document.getElementById('schema-wrong').innerText").startswith("This is no JSON")
        assert page.evaluate(f"{TURN}.length") == 0
    assert len([url for url in page.requested if "completions" in url]) == requests
    colours = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 2}
    schema = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 30}, "colours": colours}}
    schema |= {"required": ["place", "colours"], "additionalProperties": False}
    page.fill("#schema", json.dumps(schema))
    ask(page, "Where is the red cup?")
    shown = answer(page)
    found = json.loads(shown)
    jsonschema.validate(found, schema)
    assert shown == json.dumps(found, indent=2, ensure_ascii=False)


def test_adapters_and_settings_are_sent(page: Page, client: openai.OpenAI) -> None:
    assert page.evaluate("[...document.getElementById('model').options].map((each) => each.value)") == [
        *(each.id for each in client.models.list().data)
    ]
    page.evaluate("document.getElementById('model').value = 'pirate'")
    page.fill("#system", "You are Pip, a small tabletop robot. Your battery is at 12 percent.")
    page.fill("#temperature", "0")
    ask(page, "How full is your battery?")
    said = answer(page)
    messages = [
        {"role": "system", "content": "You are Pip, a small tabletop robot. Your battery is at 12 percent."},
        {"role": "user", "content": "How full is your battery?"},
    ]
    page.evaluate("document.getElementById('model').value = 'shipped'")
    alone = client.chat.completions.create(model="pirate", messages=messages, temperature=0)
    assert said == alone.choices[0].message.content


def test_the_oldest_turns_leave_a_full_context(page: Page, client: openai.OpenAI) -> None:
    page.fill("#max_tokens", "12")
    for turn, question in enumerate(("cup " * 600, "bowl " * 450, "Where is the red cup?")):
        ask(page, question)
        said = answer(page, turn)
    assert page.evaluate(f"[...{TURN}].map((each) => each.classList.contains('left'))") == [True, False, False]
    told = page.evaluate(f"{TURN}[1].firstElementChild.innerText")
    assert told.startswith("The oldest question has left the context")
    messages = [{"role": "user", "content": ("bowl " * 450).strip()}]
    messages += [{"role": "assistant", "content": page.evaluate(f"{TURN}[1].querySelector('.said').innerText")}]
    messages += [{"role": "user", "content": "Where is the red cup?"}]
    alone = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12)
    assert said == alone.choices[0].message.content
    found = re.search(r"context (\d+) % full: (\d+) of 1024 tokens", facts(page, 2))
    assert found and int(found[1]) == round(100 * int(found[2]) / 1024)
    assert 0 <= int(found[2]) - alone.usage.total_tokens < 5  # space at the end of the answer before


def test_a_long_conversation_scrolls_in_its_place_to_what_went_wrong(page: Page) -> None:
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", streamed({"content": "word\n\n" * 60}))
    for turn in range(2):
        ask(page, "Hello")
        answer(page, turn)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", streamed({"content": "a\n\n" * 9}, end=""))
    ask(page, "Hello")
    answer(page, 2)
    page.wait_for("document.querySelector('.failed').getBoundingClientRect().bottom <= innerHeight")
    place = "document.querySelector('.failed').getBoundingClientRect()"
    composer = "document.getElementById('composer').getBoundingClientRect()"
    assert page.evaluate(f"{place}.bottom <= {composer}.top")


def test_what_the_shipped_model_is_stands_on_the_page(page: Page, server: ServerProcess) -> None:
    assert "a toy of 10.8 M parameters" in page.evaluate("document.getElementById('about').innerText")
    assert "10.8 M" in server.get("/v1/models/pirate")[1]["description"]


def test_errors_are_shown_as_they_are_said(page: Page, server: ServerProcess) -> None:
    question = "word " * 3000
    ask(page, question)
    answer(page)
    shown = page.evaluate("document.querySelector('.failed p').innerText")
    body = {"model": MODEL, "messages": [{"role": "user", "content": question.strip()}], "truncation": "auto"}
    status, found, _ = server.ask("POST", "/v1/chat/completions", body)
    assert status == 400 and shown == found["error"]["message"]
    ask(page, "Where is the red cup?")  # what failed is no part of the conversation
    assert answer(page, 1) == "The red cup is at the front left."


def test_reasoning_is_folded_and_text_is_never_html(page: Page) -> None:
    """What a model that thinks, and one that means ill, would stream."""
    code = "```html\n<b>bold</b>\n```"
    said = f"<img src=x onerror=alert(1)> & `<i>` \u00e9\U0001f600\n{code}\nend <script>alert(2)</script>"
    body = streamed({"reasoning_content": "I <b>think</b>."}, *({"content": each} for each in said))
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", body)
    ask(page, "Hello")
    answer(page)
    assert page.evaluate("document.querySelector('.reasoning').open") is False
    assert page.evaluate("document.querySelector('.reasoning p').textContent") == "I <b>think</b>."
    assert page.evaluate("document.querySelector('.said pre').textContent") == "<b>bold</b>"
    assert page.evaluate("[...document.querySelectorAll('.said > *')].map((each) => each.textContent)") == [
        "<img src=x onerror=alert(1)> & <i> \u00e9\U0001f600",
        "<b>bold</b>",
        "end <script>alert(2)</script>",
    ]
    assert page.evaluate("document.querySelectorAll('.said :is(img, b, i, script)').length") == 0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (streamed({"content": "Half"}, end='data: {"error": {"message": "the server has ended"}}\n\n'), "has ended"),
        (streamed({"content": "Half"}, end=""), "broken off"),
        (b"data: {no json\n\n", "broken off"),
    ],
)
def test_streams_that_break(page: Page, body: bytes, expected: str) -> None:
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", body)
    ask(page, "Where is the red cup?")
    answer(page)
    assert expected in page.evaluate("document.querySelector('.failed p').innerText")
    page.answer_no_more()
    page.click(".failed button")
    page.wait_for("!document.querySelector('.failed')")
    assert answer(page) == "The red cup is at the front left."


def test_json_is_shown_as_it_was_written(page: Page) -> None:
    """Numbers beyond doubles, brackets in texts, empty objects."""
    said = '{"a": [12345678901234567890, 1.50, {}, [ ], "}]{,:\\""], "b": {"c": null}}'
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", streamed({"content": said}))
    ask(page, "Hello")
    shown = answer(page)
    assert json.loads(shown) == json.loads(said) and "12345678901234567890,\n    1.50,\n    {}" in shown
    assert '"c": null\n  }\n}' in shown


def test_what_an_operator_watches(page: Page, server: ServerProcess) -> None:
    ask(page, "What is on the table?")
    answer(page)
    page.wait_for("Number(document.getElementById('gain').innerText) >= 1")
    page.wait_for("document.getElementById('speed-more').innerText !== 'peak 0.0'")
    assert server.metric("tokens_total") >= server.metric("steps_total") > 0
    memory = server.metric("model_memory_bytes")
    assert page.evaluate("document.getElementById('memory').innerText") == f"{memory / 2**20:.0f} MiB"
    assert 0 < server.metric("available_memory_bytes") < server.metric("system_memory_bytes")
    assert page.evaluate("document.getElementById('queue').innerText") == "0 waiting"


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (768, "light"), (1920, "light")])
def test_every_size_and_scheme(page: Page, width: int, scheme: str) -> None:
    """Nothing is wider than the window, every control has a name, every text stands out from what is behind it."""
    page.prefer(scheme)
    page.resize(width, 700)
    body = streamed({"reasoning_content": "Hm."}, {"content": "word" * 100 + "\n```\n" + "x" * 500 + "\n```"})
    page.answer_instead("/v1/chat/completions", 200, "text/event-stream", body)
    page.evaluate("document.getElementById('settings').hidden || document.getElementById('settings-close').click()")
    ask(page, "A question" + "s" * 300)
    answer(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(CONTRAST) == []
    page.click("#settings-button")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "textbox", "combobox", "spinbutton", "region", "log", "list")
    controls = [each for each in nodes if each.get("role", {}).get("value") in roles and not each["ignored"]]
    nameless = [each for each in controls if not each.get("name", {}).get("value")]
    assert len(controls) > 8 and not [each for each in nameless if each["role"]["value"] != "list"]
    assert page.evaluate(CONTRAST) == []
    page.prefer("light")


#: Texts whose colour has a contrast below 4.5 with the nearest background, by the Web Content Accessibility Guidelines.
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (color) => rgba(color).slice(0, 3).reduce((sum, value, index) => {
    const part = value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    return sum + part * [0.2126, 0.7152, 0.0722][index];
  }, 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (rgba(color)[3] === 255) return color;
    }
    return "white";
  };
  const found = [];
  for (const each of document.querySelectorAll("body *")) {
    const text = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !each.checkVisibility() || each.disabled || each.closest("noscript")) continue;
    const [more, less] = [light(getComputedStyle(each).color), light(behind(each))].sort((a, b) => b - a);
    if ((more + 0.05) / (less + 0.05) < 4.5) found.push(`${each.tagName} ${each.id || each.className}`);
  }
  return found;
})()
"""


def test_the_keyboard_alone(page: Page) -> None:
    page.evaluate("document.getElementById('model').focus()")
    reached = []
    for _ in range(12):
        reached.append(page.evaluate("document.activeElement.id"))
        page.press("Tab")
    assert {"new", "settings-button", "conversation", "question", "picture", "camera"} <= set(reached)
    page.evaluate("document.getElementById('system').focus()")
    page.press("Escape")
    assert page.evaluate("document.getElementById('settings').hidden && document.activeElement.id") == "settings-button"
    page.press("Enter")
    assert page.evaluate("document.activeElement.id") == "system"


def test_the_key_is_asked_for_and_kept_for_the_tab(locked: ServerProcess) -> None:
    with opened(locked) as page:
        page.wait_for("document.getElementById('key-dialog').open")
        page.fill("#asked-key", "wrong")
        page.press("Enter")
        page.wait_for("document.getElementById('key-why').innerText.includes('missing or wrong')")
        page.fill("#asked-key", locked.key)
        page.press("Enter")
        page.wait_for("document.getElementById('model').value")
        ask(page, "Where is the red cup?")
        assert answer(page) == "The red cup is at the front left."
        stored = "[...Object.values(sessionStorage), Object.keys(localStorage).length, document.cookie]"
        assert page.evaluate(stored) == [locked.key, 0, ""]
        assert not any(locked.key in url for url in page.requested)
        page.fill("#key", "another")  # as where keys are changed meanwhile
        page.click("#question")
        page.wait_for("document.getElementById('key-dialog').open")
        page.click("#key-cancel")
        ask(page, "Hello!")
        page.wait_for("document.getElementById('key-dialog').open")
        page.fill("#asked-key", locked.key)
        page.press("Enter")
        assert answer(page, 1)


def test_the_camera(server: ServerProcess) -> None:
    with opened(server, "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as page:
        page.wait_for("document.getElementById('model').value")
        page.click("#camera")
        page.wait_for("document.getElementById('video').videoWidth > 0")
        page.click("#take")
        page.wait_for("document.querySelectorAll('#pictures img').length === 1")
        assert not page.evaluate("document.getElementById('camera-dialog').open")
        assert page.evaluate("document.getElementById('video').srcObject") is None
        ask(page, "What do you see?")
        assert answer(page) and "tokens/s" in facts(page)


def test_a_camera_that_is_not_there(page: Page) -> None:
    page.click("#camera")
    page.wait_for("document.getElementById('notice').innerText === 'No camera was found.'")


def test_why_a_page_of_another_machine_has_no_camera(server: ServerProcess) -> None:
    mapped = "--host-resolver-rules=MAP robot.test 127.0.0.1"
    with opened(server, mapped, host="robot.test") as page:
        page.wait_for("document.getElementById('model').value")
        page.click("#camera")
        said = page.wait_for("document.getElementById('notice').innerText")
        assert "localhost or over https" in said and f"http://robot.test:{server.port}" in said
        ask(page, "Where is the red cup?")
        assert answer(page) == "The red cup is at the front left."


def test_a_server_that_goes_away() -> None:
    with running() as server, opened(server) as page:
        page.wait_for("document.getElementById('model').value")
        server.terminate()
        server.process.wait(20)
        page.wait_for("document.getElementById('state').innerText === 'unreachable'")
        ask(page, "Hello!")
        answer(page)
        assert page.evaluate("document.querySelector('.failed p').innerText") == "The server does not answer."
