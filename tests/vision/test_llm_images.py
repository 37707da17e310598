"""`LLM` with images: sessions, streams, several threads' requests; and templates that want lists of parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rendered_chats import rendered_chat
from synthetic_images import synthetic_image
from tiny_multimodal import IMAGE_TOKEN

from edgellm.asynchronous import AsyncLLM
from edgellm.errors import MediaError, RequestError
from edgellm.llm import LLM
from edgellm.multimodal.image_input import read_image
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.requests import Request
from edgellm.sampling_params import SamplingParams
from edgellm.text.messages import media_of_messages
from edgellm.text.template import ChatTemplate

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PIXELS, OTHER = synthetic_image(24, 20), synthetic_image(15, 37)[:, ::-1]
#: As templates of LLaVA models are published: text is written for lists of parts alone.
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<|image_pad|>\n{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}\n"
    "{% endfor %}assistant:"
)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def engines(request: pytest.FixtureRequest, multimodal_engines: Callable[[str], Path]) -> Path:
    return multimodal_engines(request.param)


@pytest.fixture(scope="module")
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy") as opened:
        yield opened


def parts(image: object, text: str) -> list[dict]:
    """The content of a message."""
    return [{"type": "image", "image": image}, {"type": "text", "text": text}]


def test_a_session_remembers_images(llm: LLM) -> None:
    assert llm.has_vision_model
    params = replace(PARAMS, temperature=1.5, seed=3, max_tokens=24)  # so that small differences show
    session = llm.create_session("Look.", params)
    first = session.send(parts(PIXELS, "What is it?")).text
    second = "".join(chunk.text for chunk in session.stream("And now?"))
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": parts(PIXELS, "What is it?")},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert second == llm.chat(messages, params).text
    messages[1]["content"] = parts(OTHER, "What is it?")
    assert second != llm.chat(messages, params).text


def test_images_leave_a_session_with_their_turns(llm: LLM, engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr(
        "edgellm.media.vision.read_image", lambda *image, **more: read.append(image) or read_image(*image, **more)
    )
    session, dropped = llm.create_session(parts(OTHER, "Look."), PARAMS), 0
    with LLM(engines, backend="numpy", drafting=None) as cold:
        for number in range(12):
            shown = len(media_of_messages(session.messages)) + number % 2
            read.clear()
            response = session.send(parts(PIXELS[: 12 + number], str(number)) if number % 2 else str(number))
            assert len(read) == shown  # once each, also those that leave
            kept = session.messages[:-1]
            np.testing.assert_equal(kept[0]["content"], parts(OTHER, "Look."))
            cold.handle([Request([slot], params=SamplingParams(max_tokens=1)) for slot in (5, 6)])
            expected = cold.chat(kept, PARAMS)
            assert (response.token_ids, expected.usage.reused_tokens) == (expected.token_ids, 0)
            assert response.usage.prompt_tokens == expected.usage.prompt_tokens <= llm.context_length - 8
            dropped += response.dropped_turns
    assert dropped > 5


def test_requests_with_images_share_batches(llm: LLM) -> None:
    asked = [
        Request(messages=[{"role": "user", "content": parts(PIXELS, "What is it?")}], params=PARAMS),
        Request("no image", params=PARAMS),
        Request("<|image_pad|>", params=PARAMS, images=[PIXELS, OTHER]),
        Request("<|image_pad|> and <|image_pad|>", params=PARAMS, images=[PIXELS, OTHER]),
    ]
    first, second, refused, third = llm.handle(asked)
    assert isinstance(refused, MediaError)
    assert first.text == llm.chat(asked[0].messages, PARAMS).text
    assert second.text == llm.generate("no image", PARAMS).text
    assert third.text == llm.generate(asked[3].prompt, PARAMS, images=[PIXELS, OTHER]).text
    assert llm.metrics()["multimodal"]["images"] >= 6


def test_images_are_read_beside_the_event_loop(llm: LLM, engines: Path) -> None:
    messages = [{"role": "user", "content": parts(PIXELS, "What is it?")}]
    threads: list[str] = []

    async def ask() -> tuple[str, str]:
        async with AsyncLLM(engines, backend="numpy") as asked:
            prepare = asked.served.submit
            asked.served.submit = lambda request: (threads.append(threading.current_thread().name), prepare(request))[1]
            shown = await asked.chat(messages, PARAMS)
            with_image = await asked.generate("<|image_pad|>", PARAMS, images=[PIXELS])
            with pytest.raises(RequestError):
                await asked.chat(5)
            return shown.text, with_image.text

    shown, with_image = asyncio.run(ask())
    assert shown == llm.chat(messages, PARAMS).text
    assert with_image == llm.generate("<|image_pad|>", PARAMS, images=[PIXELS]).text
    assert [name == "MainThread" for name in threads] == [False, False, True]


def test_templates_that_want_parts_get_them(llm: LLM) -> None:
    published = llm.tokenizer.chat_template
    llm.tokenizer.chat_template = ChatTemplate({"default": PARTS_TEMPLATE}, "a test")
    try:
        assert llm.tokenizer.chat_template.trials().wants_parts and not published.trials().wants_parts
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": parts(PIXELS, "What is it?")},
        ]
        text = rendered_chat(llm.tokenizer, messages)
        assert text == "system: Be kind.user: <|image_pad|>\nWhat is it?assistant:"
        assert llm.tokenizer.encode_chat(messages).count(IMAGE_TOKEN) == 1
        assert llm.chat(messages, PARAMS).usage.prompt_tokens > len(llm.tokenizer.encode_chat(messages))
    finally:
        llm.tokenizer.chat_template = published


def test_a_question_is_rendered_once_for_all_frames(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the template tells the time."""
    rendered: list[str] = []
    render = ChatTemplate.render

    def noted(*given: Any, **more: Any) -> str:
        rendered.append(render(*given, **more))
        return rendered[-1]

    monkeypatch.setattr(ChatTemplate, "render", noted)

    def counts() -> list[int]:
        found = []
        for image, text in ((PIXELS, "What is it?"), (OTHER, "What is it?"), (OTHER, "Where?"), (PIXELS, "Where?")):
            before = len(rendered)
            answer = llm.chat([{"role": "user", "content": parts(image, text)}], replace(PARAMS, max_tokens=1))
            found.append(len(rendered) - before)
            assert len(answer.token_ids) == 1
        return found

    source = llm.tokenizer.chat_template.sources["default"]
    monkeypatch.setattr(llm.tokenizer, "chat_template", ChatTemplate({"default": source + "{# new #}"}, "a test"))
    assert counts() == [1, 0, 1, 0]
    timed = ChatTemplate({"default": source + "{{ strftime_now('%H') }}"}, "a test")
    monkeypatch.setattr(llm.tokenizer, "chat_template", timed)
    assert counts() == [1, 1, 1, 1]


def test_a_prompt_that_is_too_long_with_its_images_is_refused(llm: LLM) -> None:
    messages = [{"role": "user", "content": [*parts(PIXELS, "x" * 120), *parts(OTHER, "y" * 40)]}]
    assert len(llm.tokenizer.encode_chat(messages)) < llm.context_length
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens and the context 192"):
        llm.chat(messages, PARAMS)


def test_a_conversation_keeps_the_picture_that_it_was_shown() -> None:
    """A camera writes its next frame into the same buffer."""
    with LLM(backend="numpy") as llm:
        told = []
        for changes in (False, True):
            buffer = np.array(Image.open(SHIPPED_MODEL / "scenes" / "toys.png").convert("RGB"))
            said = [{"type": "image", "image": buffer}, {"type": "text", "text": "What is on the table?"}]
            session = llm.create_session(params=SamplingParams(max_tokens=24))
            session.send(said)
            if changes:
                buffer[:] = 0
                said.append({"type": "text", "text": "Or below it?"})
            told.append((session.send("How many objects are there?").token_ids, len(session.messages[0]["content"])))
            if changes:
                with pytest.raises(RequestError, match="has content of type int"):
                    session.system = 5
                assert session.system is None
        assert told[0] == told[1]
