"""Gemma 3 with images through the whole runtime, on a tiny model with random weights: its images see themselves, so
neither a chunk nor a place of reuse may cut one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_snapshots import taken
from rendered_chats import rendered_chat
from synthetic_images import synthetic_image
from tiny_multimodal import MARKERS, VISION_END, VISION_START, prompt_with_images, tiny_image

from edgellm.decoding.sequence import DecodingSequence
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.media import place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import CheckpointError, EngineDirectoryError
from edgellm.multimodal.image_processor import open_image_processor
from edgellm.requests import Request
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingValues(0.9, 30, 1.0, 0.0, 1.1, 0.2, 0.1, 5)
GREEDY = SamplingValues()
PIXELS, OTHER = synthetic_image(48, 40), synthetic_image(30, 70)[:, ::-1]
TOKENS = 16


@pytest.fixture(scope="module")
def engines(multimodal_engines: Callable[[str], Path]) -> Path:
    return multimodal_engines("gemma3")


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    """A message of texts and images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": role, "content": content}


def chat(runtime: SpecDecodeRuntime, *messages: dict[str, Any]) -> list[int]:
    """The ids of an answer."""
    return list(runtime.handle_request(Request(messages=messages, params=PARAMS)).token_ids)


def test_a_prompt_has_the_text_that_the_processor_writes(engines: Path) -> None:
    """For each marker two line feeds, the token before an image, its tokens, the one behind it, two line feeds."""
    with SpecDecodeRuntime(engines, backend="numpy") as runtime:
        tokenizer, shown = runtime.tokenizer, message("See ", PIXELS, "\n and", OTHER, PIXELS)
        start, image, end = MARKERS
        written = f"\n\n{start}{image * TOKENS}{end}\n\n"
        text = rendered_chat(tokenizer, [shown]).replace(start, written)
        assert text.count(image) == 3 * TOKENS
        expected = tokenizer.encode(text, add_special_tokens=False)
        sequence = runtime.prepare(Request(messages=[shown], params=PARAMS))
        assert list(sequence.prompt_ids) == expected
        assert expected.count(VISION_START) == expected.count(VISION_END) == 3
        for raw in (rendered_chat(tokenizer, [shown]), text.replace(image * TOKENS, image)):
            asked = Request(raw, params=PARAMS, images=[PIXELS, OTHER, PIXELS])
            assert list(runtime.prepare(asked).prompt_ids) == expected


def test_a_tokenizer_without_these_tokens_is_refused(engines: Path, tmp_path: Path) -> None:
    shutil.copytree(engines, tmp_path / "engines")
    path = tmp_path / "engines" / "edgellm.json"
    described = json.loads(path.read_text())
    described["vision"]["config"]["vision_end_token_id"] = 300
    path.write_text(json.dumps(described))
    with pytest.raises(EngineDirectoryError, match="the tokenizer has not the tokens 258, 259, 300, which stand for"):
        SpecDecodeRuntime(tmp_path / "engines", backend="numpy")


def test_preprocessing_that_the_model_is_not_made_for_is_refused(engines: Path, tmp_path: Path) -> None:
    vision = EngineDirectory.open(engines).vision
    published = json.loads((engines / "preprocessor_config.json").read_text())
    for change, error, words in (
        (
            {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 0},
            CheckpointError,
            "crops is 0, expected a whole number",
        ),
        ({"image_seq_length": 256}, CheckpointError, "image_seq_length is 256, expected 16, as config.json has it"),
        ({"size": {"height": 64, "width": 64}}, CheckpointError, "expected images of 32 x 32 pixels"),
    ):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(published | change))
        with pytest.raises(error, match=words):
            open_image_processor(tmp_path, vision.config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(published | {"do_pan_and_scan": None}))
    image = open_image_processor(tmp_path, vision.config).prepare(PIXELS)
    assert (image.tokens, image.grid, image.layout.resample) == (TOKENS, (1, 8, 8), 2)


@pytest.mark.parametrize("drafting", [None, "auto"])
def test_answers_are_the_same_drafted_or_not_reused_or_not(engines: Path, drafting: str | None) -> None:
    """Conversations that go on, are edited, have another image, or end with one."""
    turns = [
        message("First.", PIXELS, "What is it?"),
        message("A cup.", role="assistant"),
        message("And what are these?", OTHER, "and", PIXELS),
    ]
    asked = [
        turns[:1],
        turns,
        [turns[0], message("A bowl.", role="assistant"), turns[2]],
        [message("First.", OTHER, "What is it?")],
        turns[:1],
        [message("First.", PIXELS)],
        [message("First.", PIXELS, PIXELS)],
    ]
    expected, reused = [], []
    for messages in asked:
        with SpecDecodeRuntime(engines, backend="numpy") as fresh:
            expected.append(chat(fresh, *messages))
    with SpecDecodeRuntime(engines, backend="numpy", drafting=drafting) as runtime:
        for messages, tokens in zip(asked, expected, strict=True):
            response = runtime.handle_request(Request(messages=messages, params=PARAMS))
            assert list(response.token_ids) == tokens
            reused.append(response.usage.reused_tokens)
    assert reused[1] > 40 and reused[2] > 30 and 0 < reused[3] < 30
    assert len({tuple(tokens) for tokens in expected}) > 3


def sequence_of(runner: DecodingRunner, ids: list[int], seeds: tuple[int, ...], count: int = 14) -> DecodingSequence:
    images = [tiny_image(runner.backend, runner.base.config, (4, 4), seed) for seed in seeds]
    placed = place_media(ids, {runner.base.config.media["image"]: images}, runner.base.config)
    answer = OutputText(runner.tokenizer.detokenizer(), max_tokens=count)
    return DecodingSequence(ids, SAMPLED, answer, max_tokens=count, media=placed)


def prompt_ids(runner: DecodingRunner, count: int) -> list[int]:
    images = [tiny_image(runner.backend, runner.base.config, (4, 4), seed) for seed in range(count)]
    return prompt_with_images(runner.base.config, images, 4)[0]


@pytest.fixture(params=[False, True], ids=["plain", "drafted"])
def runner(request: pytest.FixtureRequest, engines: Path) -> Iterator[DecodingRunner]:
    directory = EngineDirectory.open(engines)
    opened = DecodingRunner.open(open_backend("numpy", directory), directory, drafts=request.param)
    opened.tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    yield opened
    opened.close()


def logits_of(runner: DecodingRunner, ids: list[int], reused: int, seeds: tuple[int, ...]) -> np.ndarray:
    """The logits after a prompt."""
    runner.start(0, ids, reused, GREEDY, sequence_of(runner, ids, seeds).media).wait()
    logits = runner.base.logits(0)
    runner.stop(0)
    return logits


def test_reuse_of_snapshots_and_of_cut_slots_ends_before_an_image(runner: DecodingRunner, engines: Path) -> None:
    """Of snapshots that end anywhere, and of slots that were cut there: what is reused ends in no image, and changes no
    logit."""
    ids, seeds, lost = prompt_ids(runner, 2), (0, 1), int(runner.draft.has_model)
    images = sequence_of(runner, ids, seeds).media
    identities = images.identities(ids)
    expected = logits_of(runner, ids, 0, seeds)
    seen = set()
    for stop in range(2, len(ids) + 1):
        outside = stop - lost - (stop == len(ids) and not lost)
        while images.inside(outside) is not None:
            outside -= 1
        logits_of(runner, ids, 0, seeds)
        slots = SlotSnapshots(SnapshotStore(), runner, EngineDirectory.open(engines))
        slots.store.put(taken(slots, 0, ids[:stop], "part", None, images))
        contents = KVContents(None, runner.base.states.cut_windows, whole_media=True)
        contents.replace(identities[:stop], None if not runner.draft.has_model else stop - 1, held=len(ids))
        assert contents.reusable(identities) == outside
        empty = KVContents(None, runner.base.states.cut_windows, whole_media=True)
        if lost:
            empty.replace((), 0)
        restored = slots.restore(0, ids, empty, None, images)
        assert restored == outside == (empty.reusable(identities) if outside else 0)
        if outside:
            np.testing.assert_allclose(logits_of(runner, ids, outside, seeds), expected, atol=1e-4)
        seen.add(outside)
    assert len(seen) < len(ids) - 2 * (TOKENS - 2)
