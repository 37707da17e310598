"""Gemma 3 with images on a GPU, over rings that are written over: logits of NumPy, trees, reuse, from pixels on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_images import FOLDER, WHOLE_PROMPTS, GoldenModel
from golden_images import WHOLE_IMAGES as GOLDENS
from golden_vision import golden_checkpoint
from gpu_drafting import assert_given_trees_change_no_token
from rounded_arithmetic import Distance, open_rounded_runner
from synthetic_images import synthetic_image
from tiny_families import TOLERANCES
from tiny_multimodal import TEXT, WHOLE_IMAGES, logits_beside_a_text, prompt_with_images, stored, tiny_image

from edgellm.engines.backends.opening import open_backend
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.comparison import greedy_tokens, open_runner, teacher_forced_logits
from edgellm.engines.runners.media import PromptMedia, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from tools.demo_model.describe import describe_in_place

pytestmark = pytest.mark.gpu

GREEDY = SamplingValues()
STEPS = 40


@pytest.fixture(params=["compute", "int8"])
def directory(request, tmp_path: Path, make_checkpoint: Callable[..., Path]) -> EngineDirectory:
    """Images of 16 tokens, a window of 11. A prompt of 115 tokens is cut around them, into chunks of up to 48."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 1, **WHOLE_IMAGES["gemma3"])
    limits = EngineLimits(
        2, prefill_chunk=48, kv_capacity=256, kv_cache=request.param, window_rows=128, image_rows=(64,)
    )
    build_engine_directory(checkpoint, tmp_path / "engines", limits, None, dtype="bfloat16")
    return EngineDirectory.open(tmp_path / "engines")


def prompt_of(runner: BaseEngineRunner, seeds: tuple[int, ...] = (0, 1, 2)) -> tuple[list[int], PromptMedia]:
    """Images among text; the same numbers on every backend."""
    images = [tiny_image(runner.backend, runner.config, (4, 4), seed) for seed in seeds]
    return prompt_with_images(runner.config, images, 2, 17 if len(seeds) > 1 else 5)


def reused_logits(runner: BaseEngineRunner) -> np.ndarray:
    """The logits [2, V] after a prompt whose tokens up to an image's beginning, and its end, are there already."""
    (ids, images), found = prompt_of(runner), []
    for reused in (images.spans[1].start, images.spans[1].stop):
        runner.start(0, ids, 0, GREEDY, images).wait()
        runner.stop(0)
        runner.start(0, ids, reused, GREEDY, images).wait()
        found.append(runner.logits(0))
        runner.stop(0)
    return np.stack(found)


def measured(runner: BaseEngineRunner, answer: list[int]) -> dict[str, np.ndarray]:
    ids, images = prompt_of(runner)
    short, one = prompt_of(runner, (3,))
    return {
        "alone": teacher_forced_logits(runner, ids, answer, images),
        "one chunk": teacher_forced_logits(runner, short, answer[:3], one),
        "in a batch": logits_beside_a_text(runner, (ids, images), answer),
        "reused": reused_logits(runner),
        "text": teacher_forced_logits(runner, TEXT, [0]),
    }


def test_logits_agree_with_numpy(directory: EngineDirectory) -> None:
    """Alone, in a batch, with rows reused up to an image, and for a text after images."""
    with open_runner("numpy", directory) as runner:
        ids, images = prompt_of(runner)
        answer = greedy_tokens(runner, ids, STEPS, images)
        expected = measured(runner, answer)
    with open_runner("tensorrt", directory) as runner:
        found = measured(runner, answer)
    largest = max(np.abs(logits).max() for logits in expected.values())
    # An element of a row may be rounded to another of its 8 bits, which adds to bfloat16's own rounding.
    tolerance = TOLERANCES["bfloat16"] * (1.5 if directory.limits.kv_cache == "int8" else 1.0)
    for what, logits in expected.items():
        difference = np.abs(found[what] - logits).max() / largest
        print(f"\n{directory.limits.kv_cache} {what}: {difference:.2%}")
        assert difference <= tolerance
    np.testing.assert_array_equal(found["alone"][1:], found["in a batch"][1:])


@pytest.mark.parametrize("name", [*GOLDENS, WHOLE_PROMPTS[0]])  # the arithmetic to compare with has no caps
def test_logits_are_those_of_transformers_and_not_of_a_causal_mask(name: str, tmp_path: Path) -> None:
    """As closely as bfloat16 allows, behind two images, or a prompt that sees itself; a causal mask's are farther away
    than that."""
    golden = GoldenModel(name)
    chunk, rows = (32, 9) if name in WHOLE_PROMPTS else (16, 36)
    limits = EngineLimits(2, prefill_chunk=chunk, kv_capacity=128, image_rows=(rows,))
    directory = describe_in_place(golden_checkpoint(name, tmp_path / "model", FOLDER), limits, "bfloat16", "auto")

    def logits(runner: BaseEngineRunner) -> np.ndarray:
        images = []
        for image in golden.images:
            rows = runner.backend.empty(image.rows.shape, "compute")
            runner.backend.upload(rows, stored(image.rows, runner.backend.compute_dtype))
            images.append(replace(image, rows=rows))
        placed = place_media(golden.token_ids, {golden.config.media["image"]: images}, golden.config)
        return teacher_forced_logits(runner, golden.token_ids, golden.expected["continued"].tolist(), placed)

    expected = np.concatenate([golden.expected["logits"][-1:], golden.expected["continued_logits"][:-1]])
    with open_rounded_runner(directory) as runner:
        allowed = Distance.between(logits(runner), expected)
    causal = replace(directory.config, image_tokens=0, prefix_attention=False)
    with open_runner("numpy", replace(directory, config=causal)) as runner:
        mistaken = Distance.between(logits(runner), expected)
    with open_runner("tensorrt", directory) as runner:
        found = Distance.between(logits(runner), expected)
    print(f"\n{name}: {found}, rounding {allowed}, causal {mistaken}")
    assert found.typical <= 2 * allowed.typical < mistaken.typical


def test_trees_give_the_tokens_of_plain_decoding(directory: EngineDirectory) -> None:
    with closing(DecodingRunner.open(open_backend("tensorrt", directory), directory, drafts=False)) as runner:
        assert_given_trees_change_no_token(runner, *prompt_of(runner.base), 100)


def test_conversations_from_pixels_on(directory: EngineDirectory) -> None:
    """Encoded, placed and answered; a second turn goes on where the first ended. Answers follow what images show."""
    pixels, other = synthetic_image(48, 40), synthetic_image(30, 70)[:, ::-1]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def asked(image: np.ndarray) -> list[dict]:
        return [{"role": "user", "content": [{"type": "text", "text": "See:"}, {"type": "image", "image": image}]}]

    with SpecDecodeRuntime(directory.path, backend="tensorrt") as runtime:
        first, second = (
            runtime.handle_request(Request(messages=asked(image), params=params)) for image in (pixels, other)
        )
        assert first.token_ids != second.token_ids
        longer = [*asked(other), {"role": "assistant", "content": "A cup."}, *asked(pixels)]
        found = runtime.handle_request(Request(messages=longer, params=params))
        assert found.usage.reused_tokens > 16
        again = runtime.handle_request(Request(messages=asked(pixels), params=params))
    assert again.token_ids == first.token_ids
