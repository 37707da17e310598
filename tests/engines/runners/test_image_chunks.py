"""Prompts are cut around images whose tokens see all of them, and limits hold such an image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from published_families import GEMMA_3_4B

from edgellm.engines.building.checks import choose_limits
from edgellm.engines.errors import BuildError
from edgellm.engines.families import decoder_config
from edgellm.engines.families.vision_config import read_vision_config
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.prefill import prompt_chunks

CONFIG, VISION = decoder_config(GEMMA_3_4B), read_vision_config(GEMMA_3_4B)


def random_spans(rng: np.random.Generator, tokens: int, count: int) -> list[tuple[int, int]]:
    """Places of images in a text, at least a token between two."""
    spans, place = [], int(rng.integers(0, 200))
    while place + tokens <= count:
        spans.append((place, tokens))
        place += tokens + int(rng.choice((1, 4, 30, 700)))
    return spans


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("step", [None, 1, 64])
@pytest.mark.parametrize(
    ("tokens", "chunk"), [(256, 2048), (256, 512), (256, 256), (256, 400), (16, 16), (16, 48), (81, 128), (9, 2048)]
)
def test_no_chunk_has_a_part_of_an_image(tokens: int, chunk: int, step: int | None, packed: bool) -> None:
    rng = np.random.default_rng(tokens + chunk)
    limits = EngineLimits(1, chunk, 4096, packed=packed)
    for _ in range(60):
        count = int(rng.choice((int(rng.integers(tokens + 1, 4095)), 4095)))
        spans = random_spans(rng, tokens, count)
        if rng.random() < 0.3:  # the prompt ends with an image
            spans = [*(span for span in spans if sum(span) < count - tokens), (count - tokens, tokens)]
        reusable = [0, count - 1, *(place for span in spans for place in (span[0], sum(span)))]
        first = int(rng.choice([at for at in reusable if at < count and not inside(spans, at)]))
        place = first
        for taken, size in prompt_chunks(limits, step, first, count, (), spans):
            assert 0 < taken <= size <= chunk and place + size <= limits.kv_rows
            assert size == taken if step == 1 else size in limits.prefill_chunks or (step and size % step == 0)
            place += taken
            assert not inside(spans, place)
        assert place == count


def inside(spans: list[tuple[int, int]], place: int) -> bool:
    return any(start < place < start + tokens for start, tokens in spans)


def test_texts_are_cut_as_without_images() -> None:
    limits = EngineLimits(1, 512, 4096)
    for count in (1, 40, 500, 513, 3000):
        assert list(prompt_chunks(limits, None, 0, count, (), ())) == list(prompt_chunks(limits, None, 0, count))


def test_chunks_of_a_step_are_padded_by_less_than_it_but_short_ones() -> None:
    limits = EngineLimits(1, 512, 4096)
    for count in (*range(1, 700, 7), 3000, 4096):
        chunks = list(prompt_chunks(limits, 64, 0, count))
        assert sum(taken for taken, _ in chunks) == count
        (*whole, (taken, size)) = chunks
        short = count % 512 <= 128
        assert short or (whole == [(512, 512)] * (count // 512) and (size % 64 == 0 and size - taken < 64))
        if short:
            assert chunks == list(prompt_chunks(limits, None, 0, count))


def test_an_image_costs_one_chunk_and_what_is_around_it_few() -> None:
    limits = EngineLimits(1, 2048, 4096)
    spans = [(20, 256), (280, 256)]
    assert list(prompt_chunks(limits, None, 0, 570, (), spans)) == [(280, 512), (290, 512)]
    assert list(prompt_chunks(limits, None, 0, 300, (), spans[:1])) == [(300, 512)]
    assert list(prompt_chunks(limits, 1, 0, 570, (), spans)) == [(570, 570)]
    short = EngineLimits(1, 256, 4096)
    assert list(prompt_chunks(short, None, 0, 570, (), spans)) == [
        (20, 128),
        (256, 256),
        (4, 16),
        (256, 256),
        (34, 128),
    ]


def test_a_chunk_holds_an_image_or_the_build_says_so() -> None:
    """Where there are vision engines: a language model alone takes any chunk."""
    assert VISION is not None and choose_limits(CONFIG, vision=VISION).prefill_chunk == 2048
    for chunk in (256, 272, 512):
        assert choose_limits(CONFIG, prefill_chunk=chunk, vision=VISION).image_problem(CONFIG) is None
    words = "--prefill-chunk is 240, expected at least 256: an image has so many tokens, each of which sees all of them"
    with pytest.raises(BuildError, match=words):
        choose_limits(CONFIG, prefill_chunk=240, vision=VISION)
    with pytest.raises(BuildError, match="--prefill-chunk is 128, expected at least 256"):
        choose_limits(CONFIG, kv_capacity=128, vision=VISION)
    assert choose_limits(CONFIG, prefill_chunk=240).prefill_chunk == 240
    assert choose_limits(CONFIG, prefill_chunk=240, vision=VISION, max_image_patches=0).image_rows == ()


def test_an_image_whose_padding_does_not_fit_behind_the_context_is_refused() -> None:
    config = replace(CONFIG, image_tokens=1024)
    assert EngineLimits(1, 1024, 4096).image_problem(config) is None
    problem = EngineLimits(1, 2048, 4096).image_problem(config)
    assert problem is not None and "--prefill-chunk is 2048, expected 1024: an image of 1024 tokens would be" in problem


def test_windows_hold_a_step_that_has_an_image() -> None:
    """What a chunk writes beside the window, the image that it has included, is in the rings' size already."""
    limits = choose_limits(CONFIG, prefill_chunk=256, kv_capacity=32768, vision=VISION)
    assert limits.window_rows >= 1024 + 256 and limits.window_problem(CONFIG) is None
