"""Conversations about images with a model that has recurrent layers, and a draft head in its checkpoint: where a prompt
goes on, and that neither reuse, eviction, drafting nor giving way changes a token. Pictures of one size have the same
token ids: what tells them apart is what they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from drafted_conversations import GREEDY, SAMPLED, Cold, answering_cold, runtime, tokens_reused
from mtp_checkpoints import add_head
from tiny_multimodal import FAMILIES, IMAGE_TOKEN, VISION_END, VISION_START

from edgellm import LLM, Request, SamplingParams, SpecDecodeRuntime
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

__all__ = ["runtime"]  # a fixture

#: Three of one size, 9 tokens each, and one of 4 tokens.
PICTURES = [
    *np.random.default_rng(7).integers(0, 256, (3, 24, 24, 3), np.uint8),
    np.random.default_rng(8).integers(0, 256, (16, 16, 3), np.uint8),
]
SIZES = (9, 9, 9, 4)
#: A text of token ids and of pictures, which are told by a name.
Text = list[int | str]


@pytest.fixture(scope="module", params=["agreeing", "unlike"])
def engines(
    request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two slots, context 192; of an agreeing pair most drafts are accepted, of the other hardly one."""
    folder = tmp_path_factory.mktemp("seeing")
    base = make_checkpoint(folder / "checkpoint", **FAMILIES["qwen3_5"] | {"tie_word_embeddings": False})
    limits = EngineLimits(2, 16, 192, draft_top_k=4, draft_steps=3, verify_tree_size=12, image_rows=(64,))
    build_engine_directory(add_head(base, request.param == "agreeing"), folder / "engines", limits, [])
    return folder / "engines"


@pytest.fixture(scope="module")
def cold(engines: Path) -> Iterator[Cold]:
    with answering_cold(engines, asked) as answer:
        yield answer


def picture(index: int) -> Text:
    """A picture in a text, with the tokens around it."""
    return [VISION_START, f"picture {index}", VISION_END]


def asked(text: Text, params: SamplingParams = GREEDY) -> Request:
    """The text as a request has it: one token for each picture."""
    ids = [IMAGE_TOKEN if isinstance(each, str) else each for each in text]
    shown = [PICTURES[int(each.split()[1])] for each in text if isinstance(each, str)]
    return Request(ids, None, params, images=shown)


def count(text: Text) -> int:
    """How many tokens it has, those of its pictures included."""
    return sum(SIZES[int(each.split()[1])] if isinstance(each, str) else 1 for each in text)


def said(answer: tuple[int, ...]) -> list[int]:
    """An answer as the history has it: an image token in it would stand for a picture."""
    return [1 if token == IMAGE_TOKEN else token for token in answer]


def ask(runtime: SpecDecodeRuntime, text: Text, params: SamplingParams = GREEDY) -> tuple[tuple[int, ...], int]:
    response = runtime.handle_request(asked(text, params))
    return tuple(response.token_ids), response.usage.reused_tokens


def test_answers_tell_pictures_apart(cold: Cold) -> None:
    """So that the equalities of this file are not those of a blind model."""
    assert len({cold([*range(12), *picture(index), 5, 6], SAMPLED) for index in range(4)}) > 1


def test_where_a_prompt_goes_on(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    def reused(text: Text) -> int:
        found, tokens = ask(runtime, text)
        assert found == cold(text)
        return tokens

    begun = [(7 * index + 3) % 250 for index in range(19)]
    first = [*begun, *picture(0), *range(30, 40)]  # the picture's tokens are 20 to 28
    assert count(first) == 40 and reused(first) == 0
    assert reused(first) == 36
    turn = [*first, *said(cold(first)), *picture(1), 5, 6, 7, 8, 9, 10, 11, 12]
    drafts = runtime._open_runner().draft.has_model
    assert reused(turn) in ((49, 50, 36) if drafts else (49, 50))  # where the answer ended, if no round went beyond it
    parts, seen = 20 - drafts, 29 - drafts  # whoever has a draft knows the token behind a place, too
    assert reused([*begun, *picture(0), 9, 9, 9]) == seen  # another question about the picture
    assert reused([*begun, *picture(1), *range(30, 40)]) == 0  # the same ids, but where they part nothing was kept
    assert reused([*begun, *picture(2), *range(30, 40)]) == parts
    assert reused([*begun, *picture(1), 9, 9, 9]) == seen
    assert reused([*begun, *picture(3), *range(30, 40)]) == parts
    assert reused([*begun, *picture(1), 9, 9, 9, 5, 6, 7]) == seen  # each picture has states of its own


def test_prompts_that_run_together_part_where_their_pictures_do(runtime: SpecDecodeRuntime, cold: Cold) -> None:
    """A state is kept before the picture, not where the ids part."""
    begun = [(7 * index + 3) % 250 for index in range(19)]
    texts = [[*begun, *picture(index), *range(30, 40)] for index in range(3)]
    responses = runtime.handle_request([asked(text) for text in texts[:2]])
    assert [tuple(each.token_ids) for each in responses] == [cold(text) for text in texts[:2]]
    found, reused = ask(runtime, texts[2])
    assert found == cold(texts[2]) and reused == 20 - (runtime._open_runner().draft.has_model)


def random_texts(cold: Cold, seed: int, number: int) -> Iterator[Text]:
    """Turns of three conversations in no order: told further, edited, asked again, rendered otherwise, begun alike, and
    with another picture of the same size in the place of one."""
    random = np.random.default_rng(seed)
    system: Text = [*random.integers(0, 250, 9).tolist(), *picture(int(random.integers(0, 3)))]
    texts: list[Text] = [[*system, *random.integers(0, 250, 8).tolist()] for _ in range(3)]
    for _ in range(number):
        which = int(random.integers(0, 3))
        text = texts[which]
        kind = random.choice(["tell", "tell", "tell", "edit", "again", "render", "look", "look", "new"])
        more: Text = random.integers(0, 250, int(random.integers(1, 8))).tolist()
        if random.random() < 0.4:
            more += [*picture(int(random.integers(0, 4))), 77]
        if kind == "new" or count(text) > 110:
            text = [*system, *more]
        elif kind == "edit":
            text = [*text[: int(random.integers(1, len(text)))], *more]
        elif kind == "look":
            places = [index for index, each in enumerate(text) if isinstance(each, str)] or [0]
            place = places[int(random.integers(0, len(places)))]
            text = [*text[:place], f"picture {random.integers(0, 3)}", *text[place + 1 :]]
        elif kind in ("tell", "render"):
            text = [*text, *said(cold(text))[int(random.integers(1, 5)) if kind == "render" else 0 :], *more]
        texts[which] = text
        yield text


@pytest.mark.parametrize("budget", [4, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (None, 0))])
def test_reuse_and_eviction_change_no_token(runtime: SpecDecodeRuntime, cold: Cold, budget: int | None) -> None:
    states = runtime._states
    assert states is not None
    if budget is not None:
        states.most = budget
    total = tokens_reused(runtime, cold, random_texts(cold, 5, 20), asked)
    assert budget == 0 or total > 200


def test_a_system_prompt_with_a_picture_is_kept_on_disk(engines: Path, tmp_path: Path) -> None:
    """Its rows and states serve conversations that begin with the same picture, and no other of its size."""

    def messages(index: int, question: str = "Where?") -> list[dict]:
        shown = [{"type": "image", "image": PICTURES[index]}, {"type": "text", "text": "This is the workshop."}]
        return [{"role": "system", "content": shown}, {"role": "user", "content": question}]

    with LLM(engines, backend="numpy", drafting=None) as llm:
        expected = [llm.chat(messages(index), GREEDY).token_ids for index in range(2)]
        expected.append(llm.chat(messages(0, "Why?"), GREEDY).token_ids)
        cached = llm.cache_system_prompt(messages(0)[0]["content"], save=tmp_path / "kept")
    with LLM(engines, backend="numpy", drafting=None, snapshots=[tmp_path / "kept"]) as llm:
        found = [llm.chat(messages(index), GREEDY) for index in (1, 0)]
        found.append(llm.chat(messages(0, "Why?"), GREEDY))
        assert [each.token_ids for each in found] == [expected[1], expected[0], expected[2]]
        assert [each.usage.reused_tokens for each in found[:2]] == [0, cached.tokens - 1]
        assert found[2].usage.reused_tokens >= cached.tokens - 1
