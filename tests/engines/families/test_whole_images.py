"""Gemma 3 with images, whose tokens see all of their image: logits and text of transformers, chunks, reuse, trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from golden_files import largest_difference
from golden_images import TOLERANCE, WHOLE_IMAGES, GoldenModel, assert_close
from runner_steps import take_step

from edgellm.engines.backends.numpy_backend import NumpyBackend
from edgellm.engines.backends.numpy_operations import NumpyOperations
from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import load_numpy_weights
from edgellm.engines.errors import EngineError
from edgellm.engines.model.config import DecoderConfig, MediaKind
from edgellm.engines.model.decoder import EMBEDDING, decoder_program, decoder_weights
from edgellm.engines.model.graph import ProgramGraph
from edgellm.engines.model.limits import EngineLimits, EngineShape
from edgellm.engines.model.rotary import rotary_table
from edgellm.engines.runners.base_runner import BaseEngineRunner
from edgellm.engines.runners.media import MediaEmbeddings, MediaSpan, PromptMedia, before_span, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import given
from edgellm.engines.speculation.round import GivenTree
from edgellm.engines.speculation.runner import DecodingRunner

GREEDY = SamplingValues()
IMAGE_TOKENS = 9


@pytest.fixture(params=WHOLE_IMAGES)
def golden(request: pytest.FixtureRequest) -> GoldenModel:
    return GoldenModel(request.param)


def limits(config: DecoderConfig, chunk: int, capacity: int = 96, kv_cache: str = "compute") -> EngineLimits:
    """Rings are as short as they may be."""
    made = EngineLimits(max_batch=2, prefill_chunk=chunk, kv_capacity=capacity, kv_cache=kv_cache)
    assert config.window is not None
    return replace(made, window_rows=config.window + made.window_step)


def runner_of(golden: GoldenModel, chunk: int, **changes: object) -> BaseEngineRunner:
    return replaced(golden, **changes).runner(limits(golden.config, chunk))


def replaced(golden: GoldenModel, **changes: object) -> GoldenModel:
    """The same model with another configuration."""
    other = GoldenModel(golden.path.name)
    other.config = replace(golden.config, **changes)
    return other


def all_logits(golden: GoldenModel, config: DecoderConfig) -> np.ndarray:
    """The logits [T, V] behind every token of the prompt, taken in one step."""
    ids, images = np.array(golden.token_ids), golden.placed()
    tokens = len(ids)
    shape = EngineShape("prefill", 1, tokens, tokens, tokens, tokens, window_rows=tokens)
    program = decoder_program(config, shape)
    with Checkpoint.open(golden.path) as checkpoint:
        weights = load_numpy_weights(checkpoint, decoder_weights(config))
    embeddings = weights[EMBEDDING][ids]
    for start, count, rows in ((span.start, span.tokens, span.embeddings.rows) for span in images.spans):
        embeddings[start : start + count] = rows
    bound = {
        "inputs_embeds": embeddings[None],
        "rope_rotary_cos_sin": np.ascontiguousarray(rotary_table(config, tokens, tokens)[None, :tokens]),
        "attention_mask": np.tri(tokens, dtype=np.bool_)[None, None],
        "kvcache_start_index": np.zeros(1, np.int32),
        "last_seen": images.last_seen(0, tokens)[None],
    }
    bound |= {name: np.zeros(size, np.float32) for name, (size, _) in program.states.items()}
    ProgramGraph(NumpyOperations(bound, weights), program).run()
    return bound["logits"][0]


def test_the_goldens_show_mistakes(golden: GoldenModel) -> None:
    """A window shorter than an image and a longer one; a causal mask gives other logits, within images and behind."""
    config, tokens = golden.config, golden.config.image_tokens
    assert tokens == IMAGE_TOKENS and [len(image.rows) for image in golden.images] == [tokens, tokens]
    assert {config.window} == {6 if golden.path.name.endswith("_6") else 24}
    assert "attention" in config.layer_kinds and config.dtype == "bfloat16"
    assert np.nanstd(golden.expected["logits"]) > 1 and len(set(golden.expected["greedy"].tolist())) > 7
    causal = all_logits(golden, replace(config, image_tokens=0))
    difference = np.nanmax(np.abs(causal - golden.expected["logits"]), axis=1)
    first = golden.placed().spans[0].start
    assert (difference[:first] <= TOLERANCE).all() and (difference[first:] > 0.01).all()


def test_every_token_of_the_prompt_has_the_logits_of_transformers(golden: GoldenModel) -> None:
    assert_close(all_logits(golden, golden.config), golden.expected["logits"])


def test_every_prefix_that_ends_in_no_image_has_them(golden: GoldenModel) -> None:
    runner, whole = runner_of(golden, 64), golden.placed()
    for stop in range(1, len(golden.token_ids) + 1):
        if whole.inside(stop) is not None:
            continue
        token = runner.start(0, golden.token_ids[:stop], 0, GREEDY, golden.placed_before(stop)).wait()
        assert_close(runner.logits(0), golden.expected["logits"][stop - 1])
        assert token[0] == runner.logits(0).argmax()


@pytest.mark.parametrize("chunk", [9, 14, 48])
def test_chunks_equal_the_whole(golden: GoldenModel, chunk: int) -> None:
    runner = runner_of(golden, chunk)
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    assert_close(runner.logits(0), golden.expected["logits"][-1])


@pytest.mark.parametrize("chunk", [9, 48])
def test_greedy_tokens_are_those_of_transformers(golden: GoldenModel, chunk: int) -> None:
    """Also of a second text in the slot, over rings that were written over, and beside another sequence."""
    runner, expected = runner_of(golden, chunk), golden.expected["greedy"].tolist()
    assert len(expected) == 20
    for others in (0, 0, 1):
        if others:
            runner.start(1, golden.token_ids[:3], 0, GREEDY).wait()
        found = [int(runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()[0])]
        while len(found) < len(expected):
            found.append(int(runner.decode(1 + others).wait()[0]))
        assert found == expected
        runner.stop(0)
    causal = runner_of(golden, chunk, image_tokens=0)
    causal.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    assert largest_difference(causal.logits(0), golden.expected["logits"][-1]) > 0.1


def test_every_place_outside_of_images_can_be_reused_and_none_inside(golden: GoldenModel) -> None:
    """Rows of an image are written at once: with every other place the prompt goes on as if it were new."""
    runner, images = runner_of(golden, 14), golden.placed()
    outside = 0
    for reused in range(len(golden.token_ids)):
        if images.inside(reused) is not None:
            with pytest.raises(EngineError, match=rf"{reused} of 31 .* end in image span [12], tokens"):
                runner.start(0, golden.token_ids, reused, GREEDY, images)
            continue
        for cache in runner.states.tensors.values():
            cache[...] = np.nan
        if reused:
            runner.start(0, golden.token_ids[:reused], 0, GREEDY, golden.placed_before(reused)).wait()
        runner.start(0, golden.token_ids, reused, GREEDY, images).wait()
        assert_close(runner.logits(0), golden.expected["logits"][-1])
        outside += 1
    assert outside == 31 - 2 * (IMAGE_TOKENS - 1)


@pytest.mark.parametrize("kv_cache", ["compute", "int8"])
def test_trees_give_the_tokens_of_plain_decoding(golden: GoldenModel, kv_cache: str) -> None:
    """Candidates of the host behind a prompt with images, right and wrong ones, image tokens among them."""
    config = golden.config
    with Checkpoint.open(golden.path) as checkpoint:
        own = limits(config, 14, 160, kv_cache)
        runner = DecodingRunner(NumpyBackend(config), config, own, checkpoint)
    plain = runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait().tolist()
    while len(plain) < 90:
        plain += take_step(runner, 1, None).wait()[0]
    runner.stop(0)
    said, rounds = runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait().tolist(), 0
    rng = np.random.default_rng(3)
    while len(said) < 80:
        depth = int(rng.integers(1, 8))
        path = plain[len(said) : len(said) + depth]
        wrong = int(rng.integers(0, depth + 1))
        if wrong < depth:
            path[wrong] = config.image_token_id if path[wrong] != config.image_token_id else 5
        tree = GivenTree([*path, *rng.integers(0, 90, 2).tolist()], [*range(-1, depth - 1), -1, 0])
        said += runner.round(1, given(len(tree.tokens), 16), None, [tree]).wait()[0]
        rounds += 1
    assert said[:80] == plain[:80] and rounds < 60
    runner.close()


def test_a_text_alone_is_computed_as_ever(golden: GoldenModel) -> None:
    text = [token for token in golden.token_ids if token != golden.config.image_token_id]
    runner, causal = runner_of(golden, 12), runner_of(golden, 12, image_tokens=0)
    runner.start(0, golden.token_ids, 0, GREEDY, golden.placed()).wait()
    for each in (runner, causal):
        each.start(0, text, 0, GREEDY).wait()
    assert_close(runner.logits(0), causal.logits(0))


def test_images_must_be_as_the_model_takes_them(golden: GoldenModel) -> None:
    config, image = golden.config, golden.images[0]
    few = replace(image, rows=image.rows[:4])
    ids = [5, *[config.image_token_id] * 4, 6]
    with pytest.raises(EngineError, match="image 1 has 4 tokens, this language model takes images of 9"):
        place_media(ids, {config.media["image"]: [few]}, config)
    ids = [5, *[config.image_token_id] * 18, 6]
    with pytest.raises(EngineError, match="the images 1 and 2 follow each other without a token between them"):
        place_media(ids, {config.media["image"]: golden.images}, config)


def test_a_chunk_that_is_too_short_for_an_image_is_refused_by_name(golden: GoldenModel) -> None:
    runner = runner_of(golden, 8)
    with pytest.raises(EngineError, match="--prefill-chunk is 8, expected at least 9: an image has so many tokens"):
        runner.start(0, golden.token_ids, 0, GREEDY, golden.placed())
    runner.start(0, golden.token_ids[:3], 0, GREEDY).wait()  # a text alone is none of its business


def images_at(*spans: tuple[int, int]) -> PromptMedia:
    kind = MediaKind("image", 90, 3)
    images = [MediaEmbeddings(np.zeros((0, 1)), (), str(index)) for index in range(len(spans))]
    placed = zip(spans, images, strict=True)
    places = ((range(start, start + tokens), image) for (start, tokens), image in placed)
    return PromptMedia(tuple(MediaSpan(kind, number, *each) for number, each in enumerate(places, 1)), None)


@pytest.mark.parametrize(
    ("first", "stop", "seen"),
    [(0, 12, [0, 1, 2, 5, 5, 5, 6, 7, 10, 10, 10, 11]), (3, 8, [5, 5, 5, 6, 7]), (4, 5, [5]), (6, 8, [6, 7])],
)
def test_the_last_token_that_each_sees(first: int, stop: int, seen: Sequence[int]) -> None:
    images = images_at((3, 3), (8, 3))
    assert images.last_seen(first, stop).tolist() == seen
    inside = [found and found.number for found in map(images.inside, range(12))]
    assert inside == [None] * 4 + [1, 1] + [None] * 3 + [2, 2, None]
    tokens = images.identities(range(12))
    assert [before_span(tokens, place) for place in range(13)] == [0, 1, 2, 3, 3, 3, 6, 7, 8, 8, 8, 11, 12]
