"""Rows of prompts with images are reused for the same images only: in a slot, from memory and from disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from kept_snapshots import forget, keep
from tiny_multimodal import FAMILIES, IMAGE_TOKEN, prompt_with_images, tiny_image

from edgellm.commands.cache_prompts import with_cached_prompt
from edgellm.commands.settings import Settings
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import RequestError, SnapshotError
from edgellm.requests import Request, Response
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.binding import NONE, encoder_digest, images_digest, snapshot_binding
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import check_binding, read_snapshot, write_snapshot
from edgellm.snapshots.kept_on_host import StateKeeper
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore
from edgellm.snapshots.system_prompt import PromptRecord
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

Slots = tuple[DecodingRunner, EngineDirectory]
GREEDY = SamplingValues()


@pytest.fixture(scope="module")
def multimodal_engines(
    make_checkpoint: Callable[..., Path], make_draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A family to an engine directory with a draft and without plans."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("seeing")
            base, draft = make_checkpoint(folder / "base", 0, **FAMILIES[family]), make_draft(folder / "draft")
            limits = EngineLimits(2, 16, 128, draft_top_k=4, draft_steps=3, verify_tree_size=12)
            build_engine_directory(base, folder / "engines", limits, [], draft=draft)
            made[family] = folder / "engines"
        return made[family]

    return make


@pytest.fixture(params=[(family, draft) for family in FAMILIES for draft in (False, True)], ids=str)
def slots(
    request: pytest.FixtureRequest, open_slots: Callable[..., object], multimodal_engines: Callable[[str], Path]
) -> Iterator[Slots]:
    family, draft = request.param
    with open_slots(multimodal_engines(family), draft) as opened:
        yield opened


def images_of(runner: DecodingRunner, count: int = 3) -> list[MediaEmbeddings]:
    """Different images of one size, whose prompts have the same token ids."""
    config = runner.base.config
    grid = (4, 4) if config.spatial_merge_size == 2 else (2, 2)
    return [tiny_image(runner.backend, config, grid, seed) for seed in range(count)]


def logits_of(runner: DecodingRunner, ids: Sequence[int], reused: int, images: PromptMedia | None) -> np.ndarray:
    """The logits after a prompt."""
    runner.start(0, ids, reused, GREEDY, images).wait()
    logits = runner.base.logits(0)
    runner.stop(0)
    return logits


def missing_rows(runner: DecodingRunner) -> int:
    """Rows of a known prefix that a draft, or a recurrent state before its last token, lets nobody reuse."""
    return int(runner.draft.has_model or runner.base.states.is_recurrent)


def kept_states(runner: DecodingRunner) -> StateKeeper | None:
    """At places that short prompts have; None for a model without recurrent layers."""
    if not runner.base.states.is_recurrent:
        return None
    states = StateKeeper(runner)
    states.every, states.tail, states.least = 8, 1, 1
    return states


def loop_of(runner: DecodingRunner) -> DecodingLoop:
    """A loop whose slots hold nothing."""
    states = kept_states(runner)
    contents = [KVContents(states) for _ in range(runner.limits.max_batch)]
    return DecodingLoop(SlotTable(runner, contents, states=states))


def test_contents_tell_images_apart(slots: Slots) -> None:
    runner, _ = slots
    first, second, _ = images_of(runner)
    ids, seen = prompt_with_images(runner.base.config, [first])
    same_ids, other = prompt_with_images(runner.base.config, [second])
    assert ids == same_ids
    contents = KVContents()
    contents.replace(seen.identities(ids), None)
    assert contents.reusable(seen.identities([*ids, 7])) == len(ids)
    assert contents.reusable(other.identities([*ids, 7])) == ids.index(IMAGE_TOKEN)
    assert contents.reusable([*ids, 7]) == ids.index(IMAGE_TOKEN)  # nor are they a text's


def question_of(slots: Slots, ids: Sequence[int], images: Sequence[MediaEmbeddings]) -> DecodingSequence:
    """A request with images that wants six tokens."""
    runner, directory = slots
    tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    placed = place_media(ids, {runner.base.config.media["image"]: images}, runner.base.config)
    return DecodingSequence(ids, GREEDY, OutputText(tokenizer.detokenizer(), max_tokens=6), max_tokens=6, media=placed)


def test_a_follow_up_question_reuses_the_image_and_another_image_does_not(slots: Slots) -> None:
    runner, _ = slots
    first, second, _ = images_of(runner)
    ids, _ = prompt_with_images(runner.base.config, [first])
    loop = loop_of(runner)
    list(answered(loop, [question_of(slots, ids, [first])]))
    next_ids = [*ids, 44, 45, 46]
    again = question_of(slots, next_ids, [first])
    list(answered(loop, [again]))
    assert again.reused_tokens >= len(ids) - missing_rows(runner)
    fresh = loop_of(runner)
    forget(runner)
    alone = question_of(slots, next_ids, [first])
    list(answered(fresh, [alone]))
    assert alone.reused_tokens == 0
    assert alone.answer.token_ids == again.answer.token_ids
    other = question_of(slots, next_ids, [second])
    list(answered(fresh, [other]))
    assert other.reused_tokens <= ids.index(IMAGE_TOKEN)


@pytest.mark.parametrize("place", ["memory", "disk", "file"])
def test_a_snapshot_with_an_image_changes_no_logit(slots: Slots, tmp_path: Path, place: str) -> None:
    runner, directory = slots
    first, second, third = images_of(runner)
    config = runner.base.config
    ids, images = prompt_with_images(config, [first, second])
    cut = len(prompt_with_images(config, [first])[0])
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    expected = logits_of(runner, ids, 0, images)
    system, shown = prompt_with_images(config, [first])
    made = snapshots.compute(0, system, KVContents(), "with an image", media=shown)
    bound = snapshot_binding(directory, "numpy", "float32", runner.draft.has_model)
    assert made.facts.binding == replace(bound, images=images_digest(shown.digests, encoder_digest(directory)))
    keep(snapshots, made, place, tmp_path)
    forget(runner)
    contents = KVContents(kept_states(runner))
    reused = snapshots.restore(0, ids, contents, None, images)
    assert reused == cut - missing_rows(runner) == contents.reusable(images.identities(ids))
    np.testing.assert_allclose(logits_of(runner, ids, reused, images), expected, atol=1e-5)
    other_ids, others = prompt_with_images(config, [third, second])
    assert other_ids == ids
    assert snapshots.restore(0, other_ids, KVContents(), None, others) == 0
    text = [token for token in ids if token != IMAGE_TOKEN]
    assert snapshots.restore(0, text, KVContents()) == 0


def test_the_snapshot_with_more_in_common_is_taken(slots: Slots, tmp_path: Path) -> None:
    """Of one of the text before the images, one of the first image, and one of both that cuts the second."""
    runner, _ = slots
    first, second, third = images_of(runner)
    config = runner.base.config
    ids, images = prompt_with_images(config, [first, second, third])
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    lost = missing_rows(runner)
    start, count = images.spans[1].start, images.spans[1].tokens
    for stop in (4, images.spans[0].start + 2, start - 1, start + count // 2, start + count + 2):
        shown = None if stop == 4 else place_media(ids, {config.media["image"]: [first, second, third]}, config)
        snapshot = snapshots._unfilled(ids[:stop], "part", None, shown, None)
        runner.start(0, ids, 0, GREEDY, images, stops={stop - 1: partial(snapshots._fill, 0, snapshot, True)}).wait()
        runner.stop(0)
        snapshots._fill(0, snapshot)
        snapshots.store.put(snapshot)
        forget(runner)
        contents = KVContents(kept_states(runner))
        assert snapshots.restore(0, ids, contents, None, images) == stop - lost
        assert contents.reusable(images.identities(ids)) == stop - lost


def test_images_are_named_where_a_file_is_refused(slots: Slots, tmp_path: Path) -> None:
    runner, _ = slots
    ids, images = prompt_with_images(runner.base.config, images_of(runner, 1))
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    write_snapshot(tmp_path / "x", snapshots.compute(0, ids, KVContents(), "an image", media=images))
    with pytest.raises(SnapshotError, match=r"the images are [0-9a-f]{16}\.\.\., expected none"):
        check_binding(tmp_path / "x", read_snapshot(tmp_path / "x"), snapshots.binding())
    found = read_snapshot(tmp_path / "x").facts.binding
    assert replace(found, images=NONE) == snapshots.binding()


def test_a_system_prompt_may_show_an_image(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """From pixels: its rows serve conversations that begin with the same picture, and no other."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", 0, **FAMILIES["qwen2_5_vl"])
    build_engine_directory(checkpoint, tmp_path / "engines", EngineLimits(1, 16, 192, image_rows=(64,)), [])
    attached_image, other = np.random.default_rng(0).integers(0, 256, (2, 24, 16, 3), np.uint8)

    def system(pixels: np.ndarray) -> list[dict]:
        return [{"type": "image", "image": pixels}, {"type": "text", "text": "This is the workshop."}]

    def response(runtime: SpecDecodeRuntime, pixels: np.ndarray) -> Response:
        messages = [{"role": "system", "content": system(pixels)}, {"role": "user", "content": "Where?"}]
        return runtime.handle_request(Request(messages=messages, params=SamplingParams(max_tokens=8, ignore_eos=True)))

    with SpecDecodeRuntime(tmp_path / "engines", backend="numpy") as runtime:
        expected = response(runtime, attached_image)
        assert expected.usage.reused_tokens == 0
    with SpecDecodeRuntime(tmp_path / "engines", backend="numpy") as runtime:
        kept = runtime.generate_and_save_system_prompt_kv_cache(system(attached_image), path=tmp_path / "kept")
        assert kept.token_ids.count(IMAGE_TOKEN) == 6
    record = read_snapshot(tmp_path / "kept").prompt
    assert record is not None and PromptRecord.from_json(record.to_json()) == record
    shown = [part for part in record.content if part["type"] == "image"]
    assert len(shown) == 1 and re.fullmatch("[0-9a-f]{64}", shown[0]["digest"])
    with pytest.raises(RequestError, match="is of a prompt with images or several parts"):
        with_cached_prompt(Settings(system_cache=str(tmp_path / "kept")))
    with SpecDecodeRuntime(tmp_path / "engines", backend="numpy", snapshots=[tmp_path / "kept"]) as runtime:
        assert response(runtime, other).usage.reused_tokens <= kept.token_ids.index(IMAGE_TOKEN)
        found = response(runtime, attached_image)
        assert found.usage.reused_tokens == kept.tokens
        assert found.token_ids == expected.token_ids


def test_frames_leave_nothing_behind(slots: Slots, tmp_path: Path) -> None:
    """Prompts with ever new images find no snapshot, and nothing of them is kept."""
    runner, _ = slots
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    image = images_of(runner, 1)[0]
    for number in range(50):
        frame = replace(image, digest=f"frame {number}")
        ids, images = prompt_with_images(runner.base.config, [frame])
        assert snapshots.restore(0, ids, KVContents(), None, images) == 0
    assert snapshots.store.snapshots() == []
