"""A long conversation with the shipped model, in its context of 1,024 tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from edgellm.llm import LLM
from edgellm.opened_model import SHIPPED_MODEL
from edgellm.requests import Response
from edgellm.sampling_params import SamplingParams
from edgellm.sessions import Session

OBJECTS = ("red cup", "blue cup", "white bowl", "yellow banana", "green apple", "wooden spoon", "screwdriver")
FORMS = (
    "Where is the {}?",
    "Pick up the {}.",
    "What is left of the {}?",
    "Is the {} on the table?",
    "Put the {} back, please.",
    "What colour is the {}?",
    "What is behind the {}?",
    "Can you see the {} from where you are?",
)
QUESTIONS = ("What can you do?", "What is your battery level?", "Who are you?", "What do you see?", "Thank you!")


@pytest.fixture(scope="module")
def cold() -> Iterator[LLM]:
    """The model without its draft, for answers that nothing was computed of before."""
    with LLM(backend="numpy", drafting=None) as opened:
        yield opened


def questions(count: int) -> Iterator[tuple[str, SamplingParams]]:
    """What people ask in a kitchen, one in three of them answered greedily."""
    chosen = random.Random(14)
    for number in range(count):
        form = chosen.choice((*FORMS, *QUESTIONS))
        temperature = 0.8 if number % 3 else 0.0
        yield form.format(chosen.choice(OBJECTS)), SamplingParams(temperature=temperature, seed=number)


class Totals(NamedTuple):
    """Of a conversation: prompt tokens, those of them that were reused, turns that left, answers compared."""

    prompt: int
    reused: int
    dropped: int
    compared: int


def converse(llm: LLM, cold: LLM, turns: int, compare_every: int) -> Totals:
    """Ask one question after the other; every so many answers, and each one before which turns left, are compared."""
    session = llm.create_session((SHIPPED_MODEL / "system_prompt.txt").read_text(encoding="utf-8").strip())
    totals = Totals(0, 0, 0, 0)
    for number, (question, params) in enumerate(questions(turns)):
        response = session.send(question, params)
        assert response.finish_reason == "stop", number
        usage, compared = response.usage, number % compare_every == 0 or response.dropped_turns > 0
        assert usage.prompt_tokens + 256 <= llm.context_length
        if compared:
            found, expected = _fresh(llm, cold, session, params)
            assert response.token_ids == expected.token_ids, number
            assert session.messages == found.messages
        new = (usage.prompt_tokens, usage.reused_tokens, response.dropped_turns, compared)
        totals = Totals(*(sum(both) for both in zip(totals, new, strict=True)))
    return totals


def _fresh(llm: LLM, cold: LLM, session: Session, params: SamplingParams) -> tuple[Session, Response]:
    """A new session that was given what stayed of another, and its answer to the last question."""
    *kept, question, _ = session.messages
    cold.generate([5], SamplingParams(max_tokens=1))  # nothing of the conversation is in the KV cache then
    fresh = cold.create_session()
    fresh.replace(kept)
    response = fresh.send(question["content"], params)
    assert (response.usage.reused_tokens, response.dropped_turns) == (0, 0)
    return fresh, response


@pytest.mark.parametrize("drafting", [pytest.param(None, id="plain", marks=pytest.mark.slow), "auto"])
@pytest.mark.parametrize(
    ("turns", "compare_every"), [(24, 7), pytest.param(200, 1, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_conversation_never_jams_and_reuses_what_it_computed(
    cold: LLM, turns: int, compare_every: int, drafting: Any
) -> None:
    with LLM(backend="numpy", drafting=drafting) as llm:
        totals = converse(llm, cold, turns, compare_every)
    share = totals.reused / totals.prompt
    print(
        f"\n{turns} turns {'plainly' if drafting is None else 'drafted'}: {totals.reused} of {totals.prompt} prompt "
        f"tokens reused ({share:.1%}), {totals.dropped} turns left, {totals.compared} answers equal a fresh session's"
    )
    assert share >= 0.8
    assert totals.dropped > turns // 4
