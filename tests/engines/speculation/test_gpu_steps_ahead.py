"""On a GPU: steps in flight behind and before rounds of what was said give the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from drafted_conversations import ask_freely

from edgellm import LLM, DraftingConfig, Request, SamplingParams
from edgellm.drafting import learner, own_plans

pytestmark = pytest.mark.gpu

SENTENCES = [
    "Push the red cup to the left.",
    "Push the blue cup to the left.",
    "What is on the table?",
    "Say this again: the cup is red, the cup is red, the cup is red.",
]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    with ExitStack() as opened:
        settings = None, DraftingConfig(kind="suffix")
        yield tuple(opened.enter_context(LLM(backend="tensorrt", drafting=each)) for each in settings)


@pytest.mark.parametrize("goes_on", [False, True])
def test_answers_are_those_of_plain_decoding(
    llms: tuple[LLM, LLM], goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is proposed is verified; with a plain step behind each round, and without."""
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    monkeypatch.setattr(learner.Learner, "waits_for", lambda *_: goes_on)
    ask_freely(monkeypatch)
    plain, drafted = llms
    ids = [plain.tokenizer.encode_chat([{"role": "user", "content": sentence}]) for sentence in SENTENCES]
    rounds = steps = 0
    for params in (GREEDY, SAMPLED):
        expected = [plain.generate(prompt, params).token_ids for prompt in ids]
        for _ in range(2):  # the second time all was said before
            alone = [drafted.generate(prompt, params) for prompt in ids]
            together = drafted.handle([Request(prompt, None, params) for prompt in ids])
            for found in (alone, together):
                assert [each.token_ids for each in found] == expected
            rounds += sum(each.drafting.rounds for each in alone)
            steps += sum(each.drafting.plain_steps for each in alone)
    assert rounds > 20 and (goes_on or steps > 20)


def test_an_answer_cancelled_with_a_step_behind_a_round(llms: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "GAIN", 0.0)
    monkeypatch.setattr(own_plans, "MOST_REST", 0)
    monkeypatch.setattr(learner.Learner, "waits_for", lambda *_: False)
    ask_freely(monkeypatch)
    plain, drafted = llms
    prompt = plain.tokenizer.encode_chat([{"role": "user", "content": SENTENCES[3]}])
    whole = plain.generate(prompt, GREEDY).token_ids
    for count in range(1, 6):
        with drafted.stream(prompt, GREEDY) as generation:
            for _ in range(count):
                generation.next_chunk()
        taken = generation.result().token_ids
        assert taken == whole[: len(taken)]
        assert drafted.generate(prompt, GREEDY).token_ids == whole
