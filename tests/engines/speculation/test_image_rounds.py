"""Drafting for prompts with images: the tokens of plain decoding, and rows that do not depend on how they came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fixed_shape_backend import host_view
from mtp_checkpoints import add_head
from runner_steps import take_step
from tiny_multimodal import FAMILIES, IMAGE_TOKEN, prompt_with_images, tiny_image

from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.limits import EngineLimits
from edgellm.engines.runners.media import MediaEmbeddings, PromptMedia, place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import DraftPlan, chain, tree
from edgellm.engines.speculation.runner import DecodingRunner

LIMITS = EngineLimits(max_batch=2, prefill_chunk=16, kv_capacity=96, draft_top_k=4, draft_steps=4, verify_tree_size=16)
GREEDY, SAMPLED = SamplingValues(), SamplingValues(0.8, 40, 0.9, 0.01, seed=77)
COUNT = 12
MROPE = {family: FAMILIES[family]["rope_scaling"] for family in ("qwen2_5_vl", "qwen3_vl")}
MROPE["qwen3_5"] = MROPE["qwen3_vl"]  # a head rotates all of its elements


@pytest.fixture(scope="module")
def make_multimodal_engines(
    make_tiny_pair: Callable[..., tuple[Path, Path]],
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., EngineDirectory]:
    """(family, generation, agreeing, **changes of the head's config.json) to an engine directory without plans. Of the
    generation "mtp" the head is inside the checkpoint."""
    made: dict[tuple, EngineDirectory] = {}

    def make(family: str, generation: int | str, agreeing: bool, **changes: object) -> EngineDirectory:
        key = family, generation, agreeing, repr(sorted(changes.items()))
        if key not in made:
            folder, head = tmp_path_factory.mktemp("seeing"), None
            target = folder / "engines"
            if generation == "mtp":
                changed = {"tie_word_embeddings": False} | _untied(family)
                base = add_head(make_checkpoint(folder / "base", **changed), agreeing)
            else:
                base, head = make_tiny_pair(generation, agreeing, changes, **_untied(family))
            build_engine_directory(base, target, LIMITS, [], draft=head)
            made[key] = EngineDirectory.open(target)
        return made[key]

    return make


def _untied(family: str) -> dict:
    changes = dict(FAMILIES[family])
    if "text_config" in changes:
        changes["text_config"] = changes["text_config"] | {"tie_word_embeddings": False}
    return changes


def prompts_of(runner: DecodingRunner, seed: int = 1) -> list:
    """Two prompts with images, which straddle chunks of 16, and one of text."""
    images = [tiny_image(runner.backend, runner.config, grid, seed) for seed, grid in enumerate([(4, 6), (8, 4)])]
    if runner.config.family == "llava":
        images = [tiny_image(runner.backend, runner.config, (3, 3), seed) for seed in range(2)]
    text = [(7 * index) % 250 for index in range(19)]
    both = prompt_with_images(runner.config, images, seed, 7)
    return [both, prompt_with_images(runner.config, images[1:]), (text, None)]


def answers(runner: DecodingRunner, prompts: list, sampling: SamplingValues, plan: DraftPlan | None) -> tuple:
    """The first tokens of each prompt, and how many steps they took."""
    found = [runner.start(slot, ids, 0, sampling, images).wait().tolist() for slot, (ids, images) in enumerate(prompts)]
    steps = 0
    while min(map(len, found)) < COUNT:
        for tokens, emitted in zip(found, take_step(runner, len(prompts), plan).wait(), strict=True):
            tokens.extend(emitted)
        steps += 1
    for slot in range(len(prompts)):
        runner.stop(slot)
    return [tokens[:COUNT] for tokens in found], steps


@pytest.mark.parametrize(
    ("family", "generation", "agreeing", "backend"),
    [
        (family, *((3, True, "fixed"), (1, False, "numpy"), (1, True, "fixed"))[number % 3])
        for number, family in enumerate(FAMILIES)
    ],
)
def test_rounds_give_the_tokens_of_plain_decoding(
    make_multimodal_engines: Callable[..., EngineDirectory],
    open_eagle: Callable[..., object],
    family: str,
    generation: int,
    agreeing: bool,
    backend: str,
) -> None:
    scaling = {"rope_scaling": MROPE[family]} if family in MROPE else {}
    assert_drafted_is_plain(
        make_multimodal_engines(family, generation, agreeing, **scaling), open_eagle, backend, agreeing
    )


@pytest.mark.parametrize(("agreeing", "backend"), [(False, "numpy"), (True, "fixed")])
def test_rounds_of_a_head_inside_the_checkpoint(
    make_multimodal_engines: Callable[..., EngineDirectory],
    open_eagle: Callable[..., object],
    agreeing: bool,
    backend: str,
) -> None:
    directory = make_multimodal_engines("qwen3_5", "mtp", agreeing)
    assert directory.draft.config.image_embeddings and directory.draft.config.decoder.mrope_section == (2, 1, 1)
    assert_drafted_is_plain(directory, open_eagle, backend, agreeing)


def assert_drafted_is_plain(
    directory: EngineDirectory, open_eagle: Callable[..., object], backend: str, agreeing: bool
) -> None:
    """Chains and trees, one prompt and two, greedy and drawn."""
    with open_eagle(directory, backend) as runner:
        both = prompts_of(runner)
        for prompts, sampling, plan in (
            (both[:1], GREEDY, chain(4)),
            (both[:1], SAMPLED, tree(4, 4, 16)),
            (both[1:], GREEDY, tree(4, 4, 16)),
        ):
            plain, plain_steps = answers(runner, prompts, sampling, None)
            drafted, steps = answers(runner, prompts, sampling, plan)
            assert drafted == plain
            if agreeing and plan.top_k == 1:
                assert steps < 0.8 * plain_steps


@pytest.mark.parametrize(
    ("family", "scaled", "backend"),
    [("qwen2_5_vl", False, "numpy"), ("qwen3_vl", True, "numpy"), ("llava", False, "fixed")],
)
def test_rows_of_prefill_and_of_rounds_are_the_same(
    make_multimodal_engines: Callable[..., EngineDirectory],
    open_eagle: Callable[..., object],
    family: str,
    scaled: bool,
    backend: str,
) -> None:
    """The rows that rounds leave behind equal those of a prefill of prompt and answer at once: positions included."""
    scaling = {"rope_scaling": MROPE[family]} if scaled and family in MROPE else {}
    with open_eagle(make_multimodal_engines(family, 3, False, **scaling), backend) as runner:
        ids, images = prompts_of(runner, seed=2)[0]
        tokens = runner.start(0, ids, 0, GREEDY, images).wait().tolist()
        while len(tokens) < COUNT:
            tokens += take_step(runner, 1, tree(4, 4, 16)).wait()[0]
        take_step(runner, 1, tree(4, 4, 16)).wait()
        rows = len(ids) + COUNT - 1
        grown = [cache[0, :, : rows - 1].copy() for cache in host_caches(runner)]
        runner.stop(0)
        longer = ids + tokens[: COUNT - 1]
        runner.start(0, longer, 0, GREEDY, extended(images, len(longer))).wait()
        for before, cache in zip(grown, host_caches(runner), strict=True):
            np.testing.assert_allclose(before, cache[0, :, : rows - 1], atol=2e-4)


def host_caches(runner: DecodingRunner) -> list[np.ndarray]:
    """Keys and values of base and draft."""
    caches = [*runner.base.states.tensors.values(), *runner.draft.states.tensors.values()]
    return [cache if isinstance(cache, np.ndarray) else host_view(cache) for cache in caches]


def extended(images: PromptMedia, tokens: int) -> PromptMedia:
    """The images in a prompt that goes on with text."""
    if images.positions is None:
        return images
    following = np.arange(images.positions.shape[1], tokens) + images.position_delta
    return replace(images, positions=np.concatenate([images.positions, np.tile(following, (3, 1))], 1).astype(np.int32))


@pytest.mark.parametrize(
    ("family", "generation", "backend"),
    [*((family, 3, "fixed") for family in FAMILIES), ("llava", 3, "numpy"), ("qwen3_5", "mtp", "fixed")],
)
def test_images_of_embeddings_are_text(
    make_multimodal_engines: Callable[..., EngineDirectory],
    open_eagle: Callable[..., object],
    family: str,
    generation: int | str,
    backend: str,
) -> None:
    """Images that are rows of the embedding table, at the positions of text, leave the rows, and the recurrent states,
    of a text: in base and draft, wherever chunks cut and reuse begins. Of a head for multi-token prediction that
    settles what it sees at an image's tokens, the image one token ahead, and at which positions."""
    scaling = {"rope_scaling": MROPE[family]} if family in MROPE else {}
    # An image of one token stands where a text's token would; without M-RoPE an image of several does, too.
    sizes = (
        {3: 1, 4: 1, 9: 1, 14: 4, 29: 7} if family == "llava" else dict.fromkeys((3, 4, 9, 15, 16, 17, 31, 32, 38), 1)
    )
    text = [(11 * index + 5) % 200 for index in range(40)]
    ids = list(text)
    with open_eagle(make_multimodal_engines(family, generation, False, **scaling), backend) as runner:
        base, merge, images = runner.base, runner.config.spatial_merge_size, []
        for place, count in sizes.items():
            first = text[place]
            text[place : place + count] = range(first, first + count)
            ids[place : place + count] = [IMAGE_TOKEN] * count
            zeros = [runner.backend.zeros((count, base.config.hidden_size), "compute")] * base.config.deepstack_layers
            rows = base.tables(slice(0, 1)).embedding[first : first + count]
            images.append(MediaEmbeddings(rows, tuple(zeros), f"image at {place}", (1, merge, count * merge)))
        placed = place_media(ids, {base.config.media["image"]: images}, base.config)
        runner.start(0, text, 0, GREEDY).wait()
        expected = [cache[0, :, : len(text) - 1].copy() for cache in host_caches(runner)]
        reusable = (0,) if base.states.is_recurrent else (0, 4, 15, 16, 30, 39)  # a state is of one place
        for reused in reusable:
            for cache in host_caches(runner):
                cache[0, :, reused:] = 0
            runner.start(0, ids, reused, GREEDY, placed).wait()
            for rows, cache in zip(expected, host_caches(runner), strict=True):
                np.testing.assert_allclose(cache[0, :, : len(text) - 1], rows, atol=2e-5)


def test_a_text_only_head_sees_the_image_token(
    make_multimodal_engines: Callable[..., EngineDirectory], open_eagle: Callable[..., object]
) -> None:
    """By what its config.json says: it embeds image tokens as it does any other, and its tokens stand at their rows."""
    directory = make_multimodal_engines("qwen2_5_vl", 3, False, eagle_image_embeddings=False)
    assert not directory.draft.config.image_embeddings
    seeing = make_multimodal_engines("qwen2_5_vl", 3, False)
    assert seeing.draft.config.image_embeddings
    with open_eagle(directory) as runner, open_eagle(seeing) as other:
        ids, images = prompts_of(runner)[0]
        for each in (runner, other):
            each.start(0, ids, 0, GREEDY, images).wait()
        start, count = images.spans[0].start, images.spans[0].tokens
        keys, others = (each.draft.states.tensors["k_cache_0"][0] for each in (runner, other))
        np.testing.assert_array_equal(keys[:, : start - 1], others[:, : start - 1])
        assert np.abs(keys[:, start - 1 : start + count - 1] - others[:, start - 1 : start + count - 1]).max() > 0.1
        plain, _ = answers(runner, [(ids, images)], GREEDY, None)
        assert answers(runner, [(ids, images)], GREEDY, tree(4, 4, 16))[0] == plain
