"""Language models of multimodal families with images in the prompt, against what transformers computed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_images import FOLDER, NAMES, GoldenModel, assert_close
from safetensors.numpy import load_file, save_file

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import EngineError
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import mrope_positions
from edgellm.engines.runners.sampling_state import SamplingValues

GREEDY = SamplingValues()


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> GoldenModel:
    return GoldenModel(request.param)


def limits(chunk: int) -> EngineLimits:
    return EngineLimits(max_batch=2, prefill_chunk=chunk, kv_capacity=96)


def test_every_prefix_has_the_logits_of_transformers(golden: GoldenModel) -> None:
    runner = golden.runner(limits(64))
    for stop in range(1, len(golden.token_ids) + 1):
        token = runner.start(0, golden.token_ids[:stop], 0, GREEDY, golden.placed_before(stop)).wait()
        assert_close(runner.logits(0), golden.expected["logits"][stop - 1])
        assert token[0] == runner.logits(0).argmax()


def test_stacks_of_experts_may_be_turned_as_published(tmp_path: Path) -> None:
    """[E, H, 2 I] and [E, I, H], where transformers 5 writes [E, 2 I, H] and [E, H, I]."""
    golden = GoldenModel("qwen3_vl_moe")
    shutil.copytree(golden.path, tmp_path / "turned")
    tensors = load_file(golden.path / "model.safetensors")
    stacks = [name for name in tensors if ".experts." in name]
    assert len(stacks) == 2 * 2
    for name in stacks:
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, tmp_path / "turned" / "model.safetensors")
    golden.path = tmp_path / "turned"
    with Checkpoint.open(golden.path) as checkpoint:
        for part in (0, 1):
            name = f"model.layers.2.mlp.experts.5.{('gate_proj', 'up_proj')[part]}.weight"
            stack = tensors["model.language_model.layers.2.mlp.experts.gate_up_proj"]
            np.testing.assert_array_equal(checkpoint.raw(name), stack[5, :, part * 24 : (part + 1) * 24].T)
    runner = golden.runner(limits(64))
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])


@pytest.mark.parametrize("chunk", [1, 3, 5, 16])
def test_chunks_equal_the_whole_wherever_they_cut_images(golden: GoldenModel, chunk: int) -> None:
    runner = golden.runner(limits(chunk))
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])


def test_every_prefix_can_be_reused_even_half_an_image(golden: GoldenModel) -> None:
    runner, images = golden.runner(limits(6)), golden.placed()
    for reused in range(len(golden.token_ids) - 1, -1, -3):
        for cache in runner.states.tensors.values():
            cache[...] = 0
        if reused:
            runner.start(0, golden.token_ids[:reused], 0, GREEDY, golden.placed_before(reused)).wait()
        runner.start(0, golden.token_ids, reused, GREEDY, images).wait()
        assert_close(runner.logits(0), golden.expected["logits"][-1])


def test_decoding_goes_on_at_the_positions_after_the_images(golden: GoldenModel) -> None:
    runner = golden.runner(limits(16))
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    golden.assert_continued(runner)


def test_a_text_after_a_prompt_with_images_is_not_displaced(golden: GoldenModel) -> None:
    text = [token for token in golden.token_ids if token != golden.config.image_token_id]
    alone, after = golden.runner(limits(16)), golden.runner(limits(16))
    after.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    for runner in (alone, after):
        runner.start(0, text, 0, GREEDY).wait()
        runner.decode(1).wait()
    np.testing.assert_array_equal(after.logits(0), alone.logits(0))


def test_slots_of_one_batch_keep_their_own_positions(golden: GoldenModel) -> None:
    runner = golden.runner(limits(16))
    text = [token for token in golden.token_ids if token != golden.config.image_token_id]
    runner.start(0, text, 0, GREEDY).wait()
    runner.start(1, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    golden.assert_continued(runner, slot=1)
    following = int(runner.logits(1).argmax())
    runner.stop(0)
    runner.move(1, 0)
    runner.force_token(0, following)
    runner.decode(1).wait()
    other = golden.runner(limits(16))
    other.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    for token in [*golden.expected["continued"], following]:
        other.force_token(0, int(token))
        other.decode(1).wait()
    assert_close(runner.logits(0), other.logits(0))


def test_images_and_image_tokens_must_match(golden: GoldenModel) -> None:
    runner, images = golden.runner(limits(16)), golden.placed()
    with pytest.raises(EngineError, match="but no images"):
        runner.start(0, golden.token_ids, 0, GREEDY)
    with pytest.raises(EngineError, match="place the images for this very prompt"):
        runner.start(0, [5, *golden.token_ids], 0, GREEDY, images)
    with pytest.raises(EngineError, match="place the images for this very prompt"):
        runner.start(0, [5, 6, 7], 0, GREEDY, images)
    assert runner.lengths == [0, 0]


def test_the_device_counts_the_rows_that_it_inserts(golden: GoldenModel) -> None:
    """Rows that got lost on the way to the device are noticed with the first token."""
    runner, images = golden.runner(limits(16)), golden.placed()
    *others, last = images.spans
    short = replace(last.embeddings, rows=last.embeddings.rows[:-1])
    damaged = replace(images, spans=(*others, replace(last, embeddings=short)))
    first = runner.start(0, golden.token_ids, 0, GREEDY, damaged)
    with pytest.raises(EngineError, match="1 rows of the prompt's media did not reach their tokens"):
        first.wait()
    runner.start(0, golden.token_ids, 0, GREEDY, images).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])


@pytest.mark.parametrize(("name", "count"), [("qwen2_5_vl", 24), ("qwen3_vl", 24), ("qwen3_5", 6)])
def test_positions_equal_get_rope_index(name: str, count: int) -> None:
    with np.load(FOLDER / "positions.npz") as file:
        read = {key.removeprefix(f"{name}."): file[key] for key in file.files}
    tokens, images = read["tokens"], read["images"]
    assert len(tokens) == len(images) == count
    for case, merge in enumerate(read["merge_size"].tolist()):
        own = slice(tokens[:case].sum(), tokens[: case + 1].sum())
        token_ids = read["token_ids"][own].tolist()
        grids = read["grids"][images[:case].sum() : images[: case + 1].sum()].tolist()
        spans, place = [], 0
        for _, height, width in grids:
            start, taken = token_ids.index(90, place), height * width // merge**2
            spans.append((start, taken))
            place = start + taken
        positions, delta = mrope_positions(len(token_ids), spans, grids, merge, [None] * len(grids))
        assert positions.dtype == np.int32
        np.testing.assert_array_equal(positions, read["positions"][:, own])
        assert delta == read["delta"][case]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_vl_old", "qwen3_vl", "qwen3_5"])
def test_placed_images_have_the_positions_of_transformers(name: str) -> None:
    golden = GoldenModel(name)
    images = golden.placed()
    np.testing.assert_array_equal(images.positions, golden.expected["positions"])
    assert images.position_delta == golden.expected["delta"][0]
