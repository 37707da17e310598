"""PaliGemma's prompts, each token of which sees all of them, against what transformers computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_files import largest_difference
from golden_images import FOLDER, WHOLE_PROMPTS, GoldenModel, assert_close, prepared_images
from golden_vision import golden_directory, open_vision, relative_difference

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import before_span, place_media
from edgellm.engines.runners.sampling_state import SamplingValues

GREEDY = SamplingValues()


@pytest.fixture(params=WHOLE_PROMPTS)
def golden(request: pytest.FixtureRequest) -> GoldenModel:
    return GoldenModel(request.param)


def limits(golden: GoldenModel, chunk: int) -> EngineLimits:
    plain = EngineLimits(max_batch=2, prefill_chunk=chunk, kv_capacity=96)
    return replace(plain, window_rows=plain.rows_for_window(golden.config.window))


@pytest.mark.parametrize("chunk", [32, 64])
def test_the_whole_prompt_has_the_logits_of_transformers_wherever_it_ends(golden: GoldenModel, chunk: int) -> None:
    runner = golden.runner(limits(golden, chunk))
    behind = len(golden.token_ids) - len(golden.expected["logits"]) + 1
    for stop, expected in enumerate(golden.expected["logits"], behind):
        ids = golden.token_ids[:stop]
        media = place_media(ids, {golden.config.media["image"]: golden.images}, golden.config)
        runner.start(0, ids, 0, GREEDY, media).wait()
        assert_close(runner.logits(0), expected)


def test_what_is_decoded_sees_what_is_before_it(golden: GoldenModel) -> None:
    runner = golden.runner(limits(golden, 32))
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    golden.assert_continued(runner)
    # as a prompt again, such as one that gave way to another: the answer's tokens still see none behind them
    ids = [*golden.token_ids, *golden.expected["continued"].tolist()]
    runner.start(1, ids, 0, GREEDY, golden.placed().followed_by(5)).wait()
    assert_close(runner.logits(1), golden.expected["continued_logits"][-1])


def test_a_causal_mask_gives_others(golden: GoldenModel) -> None:
    golden.config = replace(golden.config, prefix_attention=False, image_tokens=0)
    runner = golden.runner(limits(golden, 32))
    images = [replace(image, rows=image.rows) for image in golden.images]
    media = place_media(golden.token_ids, {golden.config.media["image"]: images}, golden.config)
    runner.start(0, golden.token_ids, 0, GREEDY, media).wait()
    found = runner.logits(0)
    assert largest_difference(found, golden.expected["logits"][-1]) > 0.02 * np.abs(found).max()


def test_nothing_of_a_prompt_is_reused_for_another(golden: GoldenModel) -> None:
    ids, media = golden.token_ids, golden.placed()
    longer = place_media([*ids, 7], {golden.config.media["image"]: golden.images}, golden.config)
    first, second = media.identities([*ids, 7, 8]), longer.identities([*ids, 7, 8])
    assert first == media.identities([*ids, 7, 8]) and first[-2:] == [7, 8]
    assert not set(first[: len(ids)]) & set(second) and second[-1] == 8
    assert before_span(first, len(ids) - 1) == 0 and before_span(first, len(ids)) == len(ids)
    runner = golden.runner(limits(golden, 32))
    with pytest.raises(EngineError, match=rf"5 of a prompt's {len(ids)} tokens, which see each other, cannot be"):
        runner.start(0, ids, 5, GREEDY, media)
    with pytest.raises(EngineError, match="tokens that see each other are more than a chunk's"):
        runner.start(0, ids, 0, GREEDY, replace(media, prefix=33))


def test_the_encoder_gives_the_rows_of_transformers(golden: GoldenModel, tmp_path: Path) -> None:
    """Divided by what the language model multiplies by."""
    directory = golden_directory(golden.path.name, tmp_path / "engines", goldens=FOLDER)
    runner = open_vision(open_backend("numpy", directory), directory)
    for index, found in enumerate(runner.encode(prepared_images(golden))):
        expected = golden.expected[f"image{index}.rows"] / golden.config.embedding_scale
        assert relative_difference(found.rows, expected) <= 1e-4
    runner.close()
