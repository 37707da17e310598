"""Sequences with images that give way: rows kept or computed again, at M-RoPE positions, with deepstack, in drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_multimodal import FAMILIES, IMAGE_TOKEN, prompt_with_images, tiny_image

from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.drafter import FixedDrafter
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.media import place_media
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.draft_plan import tree
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.kept_on_host import RowKeeper, StateKeeper
from edgellm.text.output import OutputText
from edgellm.text.tokenizer import Tokenizer
from tools.bench.answering import answered

TOKENS = 14
SAMPLED = SamplingValues(0.9, 30, 1.0, 0.0, 1.1, 0.2, 0.1, 5)


MODELS = [(family, draft) for family in FAMILIES for draft in (False, True)]
#: Bytes that are kept, and rounds before it gives way: each with some models, and each model with one or two.
WAYS = [(budget, rounds) for rounds in (0, 1, 3) for budget in (0, 1 << 24)]
CASES = dict.fromkeys(
    [(each, *WAYS[(number + number // 2) % len(WAYS)]) for number, each in enumerate(MODELS)]
    + [(MODELS[2 * number + number % 2], *WAYS[2 + number % 2 * 3]) for number in range(len(FAMILIES))]
)


@pytest.fixture(params=MODELS, ids=str)
def runner(request: pytest.FixtureRequest, multimodal_engines: Callable[[str], Path]) -> Iterator[DecodingRunner]:
    family, drafts = request.param
    directory = EngineDirectory.open(multimodal_engines(family))
    opened = DecodingRunner.open(open_backend("numpy", directory), directory, drafts=drafts)
    opened.tokenizer = Tokenizer.from_directory(directory.path, directory.config.vocab_size)
    try:
        yield opened
    finally:
        opened.close()


def question(runner: DecodingRunner, seed: int) -> DecodingSequence:
    """A question with two images, of other sizes than the next one's."""
    config = runner.base.config
    grids = [(4, 4), (6, 4)] if config.spatial_merge_size == 2 else [(2, 2), (3, 3)]
    images = [tiny_image(runner.backend, config, grid, seed + place) for place, grid in enumerate(grids)]
    ids, _ = prompt_with_images(config, images)
    ids = [*ids, 40 + seed]
    placed = place_media(ids, {config.media["image"]: images}, config)
    answer = OutputText(runner.tokenizer.detokenizer(), max_tokens=TOKENS)
    return DecodingSequence(ids, SAMPLED, answer, max_tokens=TOKENS, media=placed)


def loop_of(runner: DecodingRunner, budget: int = 0) -> DecodingLoop:
    """A loop whose slots hold nothing."""
    plan = None if not runner.draft.has_model else FixedDrafter(tree(4, 3, 12))
    keeper = RowKeeper(runner, budget)
    states = StateKeeper(runner) if runner.base.states.is_recurrent else None
    contents = [KVContents(states) for _ in range(runner.limits.max_batch)]
    return DecodingLoop(SlotTable(runner, contents, drafter=plan, keeper=keeper, states=states))


@pytest.mark.parametrize(("runner", "budget", "rounds"), CASES, indirect=["runner"], ids=str)
def test_a_sequence_with_images_goes_on(runner: DecodingRunner, budget: int, rounds: int) -> None:
    alone = question(runner, 0)
    list(answered(loop_of(runner), [alone]))
    loop, others = loop_of(runner, budget), [question(runner, 20), question(runner, 30)]
    found = question(runner, 0)
    loop.admit(found)
    list(loop.settle())
    for _ in range(rounds):
        list(loop.advance())
    assert 0 < found.answer.token_count < TOKENS
    loop.give_way(found)
    assert (found.kept is not None) == (budget > 0) and loop.running == []
    list(answered(loop, others))  # in every slot
    loop.admit(found)
    assert found.kept is None and loop.running == [found]
    while loop.running:
        list(loop.advance())
    assert found.failure is None and found.answer.token_ids == alone.answer.token_ids
    assert found.response().timings.preemptions == 1 and found.media is None


def test_an_image_token_in_an_answer_cannot_be_computed_again(runner: DecodingRunner) -> None:
    """It would stand for an image: such a sequence stays."""
    loop, first = loop_of(runner), question(runner, 0)
    loop.admit(first)
    second = question(runner, 30)
    list(loop.settle())
    loop.admit(second)
    list(loop.settle())
    assert loop.slots.movable == [first, second]
    second.answer._token_ids[-1] = IMAGE_TOKEN
    assert loop.slots.movable == [first]
    loop.abandon()
