"""Requests with images through the whole runtime, on tiny models with random weights."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rendered_chats import rendered_chat
from synthetic_images import synthetic_image
from tiny_families import keeping_near
from tiny_multimodal import FAMILIES, IMAGE_TOKEN

from edgellm.errors import EngineDirectoryError, ImageError, MediaError, RequestError
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from tools.bench.answering import answered

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PIXELS = synthetic_image(24, 20)
OTHER = synthetic_image(15, 37)[:, ::-1]
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def question(*parts: Any, role: str = "user") -> dict[str, Any]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


def data_url(pixels: np.ndarray) -> str:
    """An image as OpenAI's clients send it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat(runtime: SpecDecodeRuntime, *messages: dict[str, Any]) -> list[int]:
    """The ids of an answer."""
    return list(runtime.handle_request(Request(messages=messages, params=PARAMS)).token_ids)


@pytest.fixture(scope="module")
def runtime(multimodal_engines: Callable[[str], Path]):
    with SpecDecodeRuntime(multimodal_engines("qwen2_5_vl"), backend="numpy") as opened:
        yield opened


@EVERY_FAMILY
def test_an_answer_depends_on_what_the_image_shows(family: str, multimodal_engines: Callable[[str], Path]) -> None:
    with SpecDecodeRuntime(multimodal_engines(family), backend="numpy") as runtime:
        assert runtime.has_vision_model
        answers = {tuple(chat(runtime, question(pixels, "What is it?"))) for pixels in (PIXELS, OTHER, 255 - PIXELS)}
        assert len(answers) == 3


@EVERY_FAMILY
def test_answers_are_the_same_drafted_or_not_reused_or_not(
    family: str, multimodal_engines: Callable[[str], Path]
) -> None:
    conversation = [
        question(PIXELS, "What is it?"),
        question("A cup.", role="assistant"),
        question("And what are these?", OTHER, "and", PIXELS),
    ]
    with SpecDecodeRuntime(multimodal_engines(family), backend="numpy") as fresh:
        expected = chat(fresh, *conversation)
    for drafting in (None, "auto"):
        with SpecDecodeRuntime(multimodal_engines(family), backend="numpy", drafting=drafting) as runtime:
            keeping_near(runtime)
            first = runtime.handle_request(Request(messages=conversation[:1], params=PARAMS))
            again = runtime.handle_request(Request(messages=conversation, params=PARAMS))
            assert list(again.token_ids) == expected
            assert again.usage.reused_tokens > first.usage.prompt_tokens // 2


def test_every_form_of_an_image_gives_the_same_answer(runtime: SpecDecodeRuntime, tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    Image.fromarray(PIXELS).save(path)
    expected = chat(runtime, question(PIXELS, "What is it?"))
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(PIXELS), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(PIXELS)},
        {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "image_url", "image_url": {"url": path.as_uri()}},
        {"type": "input_image", "image_url": data_url(PIXELS)},
        {"type": "image", "image": str(path)},
        {"type": "image", "image": path},
        {"type": "image", "path": path},
        {"type": "image", "url": path.as_uri()},
        {"type": "image", "image": path.read_bytes()},
        {"type": "image", "image": Image.fromarray(PIXELS)},
        {"type": "image", "image": PIXELS[..., ::-1], "channels": "BGR"},
    ]
    for part in parts:
        message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
        assert chat(runtime, message) == expected, part


def test_a_known_image_is_not_encoded_again(multimodal_engines: Callable[[str], Path]) -> None:
    with SpecDecodeRuntime(multimodal_engines("qwen3_vl"), backend="numpy") as runtime:
        for text in ("What is it?", "How large is it?"):
            response = runtime.handle_request(Request(messages=[question(PIXELS, text)], params=PARAMS))
        counts = runtime.metrics.snapshot()["multimodal"]
        assert (counts["images"], counts["reused_images"]) == (2, 1)
        assert counts["seconds"] > 0
        assert counts["image_tokens"] == 2 * 6
        assert response.usage.reused_tokens > 6
        assert "edgellm_multimodal_reused_images_total 1" in runtime.metrics.prometheus()


def test_prompts_without_messages_have_markers(runtime: SpecDecodeRuntime) -> None:
    messages = [question(PIXELS, "What is it?")]
    expected = chat(runtime, *messages)
    text = rendered_chat(runtime.tokenizer, messages)
    ids = runtime.tokenizer.encode(text, add_special_tokens=False)
    for prompt in (text, ids):
        for image in (PIXELS, {"type": "image_url", "image_url": data_url(PIXELS)}, data_url(PIXELS)):
            response = runtime.handle_request(Request(prompt, params=PARAMS, images=[image]))
            assert list(response.token_ids) == expected


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        ("no marker", [PIXELS], r"has 0 image markers .token 259. for 1 image:"),
        ("<|image_pad|><|image_pad|>", [PIXELS], "has 2 image markers"),
        ("<|image_pad|>", [PIXELS, OTHER], "1 image marker .token 259. for 2 images"),
        ("<|image_pad|>", [], "has 1 image marker .token 259. for 0 images:"),
        ([IMAGE_TOKEN, 5, IMAGE_TOKEN], [PIXELS], "has 2 image markers"),
    ],
)
def test_markers_and_images_must_match(
    prompt: str | list[int], images: list[np.ndarray], message: str, runtime: SpecDecodeRuntime
) -> None:
    with pytest.raises(MediaError, match=message):
        runtime.handle_request(Request(prompt, params=PARAMS, images=images))


def test_text_cannot_smuggle_markers(runtime: SpecDecodeRuntime) -> None:
    message = question(PIXELS, "What is <|image_pad|> here, <|vision_start|><|image_pad|><|vision_end|>?")
    sequence = runtime.prepare(Request(messages=[message], params=PARAMS))
    tokens = sequence.prepared_media[0].tokens
    assert list(sequence.prompt_ids).count(IMAGE_TOKEN) == tokens
    assert "<|image_pad|> here" in runtime.tokenizer.decode(sequence.prompt_ids)
    only_text = runtime.prepare(Request(messages=[question("<|image_pad|>")], params=PARAMS))
    assert IMAGE_TOKEN not in only_text.prompt_ids


def test_bad_images_are_named_and_the_next_request_goes_on(runtime: SpecDecodeRuntime, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("not an image")
    cases = [
        (tmp_path / "text.png", "part 2 of message 1 .user.: .*text.png is not an image"),
        ("https://example.com/a.png", "would have to be fetched, which is never done"),
        ("data:image/png;base64,????", "is not base64"),
        ("data:image/png;base64", "has no comma"),
        ("iVBORw0KGgo" * 500, "too long for a path .5500 characters.: write data:image"),
        ("file://elsewhere/a.png", "is on the host 'elsewhere'"),
        (tmp_path / "missing.png", "cannot be read: No such file"),
        (np.full((4, 4, 3), np.nan), "has NaN"),
        (np.zeros((3, 900, 3), np.uint8), "too long for its width"),
    ]
    good = Request(messages=[question(PIXELS, "What is it?")], params=PARAMS)
    expected = runtime.handle_request(good).token_ids
    for image, message in cases:
        message_parts = [{"type": "text", "text": "Look:"}, {"type": "image", "image": image}]
        bad = Request(messages=[{"role": "user", "content": message_parts}], params=PARAMS)
        failed, answered = runtime.handle_request([bad, good])
        assert isinstance(failed, ImageError), image
        with pytest.raises(ImageError, match=message):
            raise failed
        assert answered.token_ids == expected


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "has no image"),
        ({"type": "image_url", "image_url": {"detail": "high"}}, "image_url is a NoneType"),
        ({"type": "image", "image": PIXELS, "path": "a.png"}, "several images"),
        ({"type": "image", "path": 3}, "path is a int"),
        ({"type": "video", "video": "a.mp4"}, "of type 'video', but this model has no encoder of videos"),
        ({"type": "sound"}, "is not a text part"),
    ],
)
def test_malformed_parts_are_named(part: dict[str, Any], message: str, runtime: SpecDecodeRuntime) -> None:
    content = [{"type": "text", "text": "Look:"}, part]
    with pytest.raises(RequestError, match=message) as caught:
        runtime.prepare(Request(messages=[{"role": "user", "content": content}]))
    assert "part 2 of message 1 (user)" in str(caught.value)


def test_a_conversation_has_its_images_in_its_messages(runtime: SpecDecodeRuntime) -> None:
    with pytest.raises(RequestError, match="a conversation has its images in its messages"):
        runtime.prepare(Request(messages=[question("Hi")], images=[PIXELS]))


def test_a_text_only_model_refuses_images(tiny_engines: Path) -> None:
    with SpecDecodeRuntime(tiny_engines, backend="numpy") as runtime:
        assert not runtime.has_vision_model
        with pytest.raises(RequestError, match=r"part 1 of message 1 .user. .*no vision model: send text only"):
            runtime.handle_request(Request(messages=[question(PIXELS, "What is it?")]))
        with pytest.raises(RequestError, match=r"shows 1 image, but .* has no vision model: leave them out"):
            runtime.handle_request(Request("What is it?", images=[PIXELS]))


def test_a_vision_model_of_its_own_directory(multimodal_engines: Callable[[str], Path], tiny_engines: Path) -> None:
    seeing = multimodal_engines("llava")
    with SpecDecodeRuntime(seeing, backend="numpy") as runtime:
        expected = chat(runtime, question(PIXELS, "What is it?"))
    with SpecDecodeRuntime(seeing, seeing, backend="numpy") as runtime:
        assert chat(runtime, question(PIXELS, "What is it?")) == expected
    with pytest.raises(EngineDirectoryError, match="has no vision model"):
        SpecDecodeRuntime(seeing, tiny_engines, backend="numpy")


def test_finished_answers_keep_no_images(runtime: SpecDecodeRuntime) -> None:
    sequence = runtime.prepare(Request(messages=[question(PIXELS, "What is it?")], params=PARAMS))
    for _ in answered(runtime.loop(), [sequence]):
        assert sequence.media is not None or sequence.finished
    assert sequence.media is None and not sequence.prepared_media
