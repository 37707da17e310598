"""Mistral 3 with images through the whole runtime, on a tiny model with random weights: a token stands behind each row
of an image's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from rendered_chats import rendered_chat
from synthetic_images import synthetic_image
from tiny_families import keeping_near
from tiny_multimodal import MARKERS_OF

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EngineDirectoryError
from edgellm.media.image_text import TextOfParts
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.text.tokenizer import Tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
#: 3 rows of 3 tokens, and 2 of 4.
PIXELS, OTHER = synthetic_image(24, 20), synthetic_image(15, 37)[:, ::-1]
BREAK, IMAGE, END = MARKERS_OF["mistral3"]
WRITTEN = [IMAGE * 3 + BREAK + IMAGE * 3 + BREAK + IMAGE * 3 + END, IMAGE * 4 + BREAK + IMAGE * 4 + END]


@pytest.fixture(scope="module")
def engines(multimodal_engines: Callable[[str], Path]) -> Path:
    return multimodal_engines("mistral3")


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


def test_a_prompt_has_the_tokens_that_the_processor_writes(engines: Path) -> None:
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        shown = message("See ", PIXELS, " and", OTHER)
        text = rendered_chat(runtime.tokenizer, [shown])
        before, between, behind = text.split(IMAGE)
        expected = runtime.tokenizer.encode(
            f"{before}{WRITTEN[0]}{between}{WRITTEN[1]}{behind}", add_special_tokens=False
        )
        assert list(runtime.prepare(Request(messages=[shown], params=PARAMS)).prompt_ids) == expected
        asked = Request(text, params=PARAMS, images=[PIXELS, OTHER])
        assert list(runtime.prepare(asked).prompt_ids) == expected


def test_answers_are_the_same_drafted_or_not_reused_or_not(engines: Path) -> None:
    conversation = [
        message(PIXELS, "What is it?"),
        message("A cup.", role="assistant"),
        message("And what are these?", OTHER, "and", PIXELS),
    ]
    whole = Request(messages=conversation, params=PARAMS)
    with SpecDecodeRuntime(engines, backend="numpy") as fresh:
        expected = list(fresh.handle_request(whole).token_ids)
        others = Request(messages=[*conversation[:2], message("And what are these?", PIXELS)], params=PARAMS)
        assert list(fresh.handle_request(others).token_ids) != expected
    for drafting in (None, "auto"):
        with SpecDecodeRuntime(engines, backend="numpy", drafting=drafting) as runtime:
            keeping_near(runtime)
            first = runtime.handle_request(Request(messages=conversation[:1], params=PARAMS))
            again = runtime.handle_request(whole)
            assert list(again.token_ids) == expected
            assert again.usage.reused_tokens > first.usage.prompt_tokens // 2


def test_a_tokenizer_without_the_tokens_between_is_refused(engines: Path) -> None:
    directory = EngineDirectory.open(engines)
    tokenizer = Tokenizer.from_directory(engines)
    texts = TextOfParts(directory.vision.config, tokenizer)
    assert texts.around(3, 1, False) == ((), (258,), (258,), (260,))
    changed = json.loads((engines / "tokenizer.json").read_text().replace(BREAK, "[OTHER]"))
    other = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(changed)))
    with pytest.raises(
        EngineDirectoryError, match=r"the tokenizer has not the tokens \[IMG_BREAK\], number 259, which"
    ):
        TextOfParts(directory.vision.config, other)
