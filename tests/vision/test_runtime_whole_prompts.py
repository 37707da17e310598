"""PaliGemma through the whole runtime, on a tiny model with random weights: each token of a prompt sees all of it, so
that nothing of one is reused for another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic_images import synthetic_image
from tiny_families import keeping_near
from tiny_multimodal import IMAGE_TOKEN, MARKERS

from edgellm.commands.build import _compute_token
from edgellm.errors import RequestError
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PIXELS, OTHER = synthetic_image(24, 20), synthetic_image(15, 37)[:, ::-1]
IMAGE = MARKERS[1]
BEGIN = 256


@pytest.fixture(scope="module")
def engines(multimodal_engines: Callable[[str], Path]) -> Path:
    return multimodal_engines("paligemma")


def asked(prompt: str, *images: Any) -> Request:
    return Request(prompt, params=PARAMS, images=images)


def test_a_prompt_is_written_as_the_processor_does(engines: Path) -> None:
    """The images, the token of the beginning, the text, a line feed."""
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        text = runtime.tokenizer.encode("what is it", add_special_tokens=False)
        line_feed = runtime.tokenizer.encode("\n", add_special_tokens=False)
        for count in (1, 2):
            found = runtime.prepare(asked(IMAGE * count + "what is it", *[PIXELS] * count)).prompt_ids
            assert list(found) == [*[IMAGE_TOKEN] * 9 * count, BEGIN, *text, *line_feed]
        begin = runtime.tokenizer.id_to_token(BEGIN)
        found = runtime.prepare(asked(f"{IMAGE}{begin}what is it", PIXELS)).prompt_ids
        assert list(found) == [*[IMAGE_TOKEN] * 9, BEGIN, *text], "a text that has the beginning is left as it is"


def test_answers_are_the_same_drafted_or_not_and_whatever_was_asked_before(engines: Path) -> None:
    prompts = [asked(f"{IMAGE}what is it", PIXELS), asked(f"{IMAGE}what is it?", PIXELS), asked(f"{IMAGE}what", OTHER)]
    expected = []
    for prompt in prompts:
        with SpecDecodeRuntime(engines, backend="numpy", drafting=None) as fresh:
            expected.append(list(fresh.handle_request(prompt).token_ids))
    assert len(set(map(tuple, expected))) == 3
    for drafting in (None, "auto"):
        with SpecDecodeRuntime(engines, backend="numpy", drafting=drafting) as runtime:
            keeping_near(runtime)
            answers = [runtime.handle_request(prompt) for prompt in (*prompts, *prompts)]
            assert [list(answer.token_ids) for answer in answers] == [*expected, *expected]
            assert [answer.usage.reused_tokens for answer in answers] == [0] * 6


def test_what_such_a_model_does_not_answer_is_refused_by_name(engines: Path) -> None:
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        with pytest.raises(RequestError, match=r"shows no image, but .* is a model of prompts that begin with one"):
            runtime.prepare(asked("what is it"))
        with pytest.raises(RequestError, match=r"has 71 tokens, each of which sees all of it, and 64 are the most"):
            runtime.prepare(asked(IMAGE + 60 * "a", PIXELS))


def test_a_build_tries_it_with_an_image(engines: Path) -> None:
    _compute_token(engines)
