"""Which slot's KV rows a request takes: conversations find their own again, whatever ran in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm import LLM, Request, SamplingParams
from edgellm.drafting.config import DraftingConfig
from edgellm.snapshots.contents import KVContents, SlotChoice, choose_slot
from edgellm.text.template import ChatTemplate
from edgellm.text.turns import OngoingConversation

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
SYSTEM = [200, 201, 202, 203]


def slots(*held: list[int]) -> list[KVContents]:
    """Slots with these tokens, used in this order; an empty list is an unused slot."""
    contents = [KVContents() for _ in held]
    for each, tokens in zip(contents, held, strict=True):
        each.replace(tokens)
    return contents


def test_the_longest_common_prefix_is_taken_and_the_oldest_given_up() -> None:
    contents = slots([1, 2, 3, 4], [1, 2, 9], [5, 6])
    assert choose_slot(contents, range(3), [1, 2, 3, 4, 7], None) == SlotChoice(0)
    assert choose_slot(contents, range(3), [1, 2, 9, 7], None) == SlotChoice(1)
    assert choose_slot(contents, range(1, 3), [1, 2, 3, 4, 7], None) == SlotChoice(1)  # slot 0 is running
    assert choose_slot(contents, range(3), [8, 8], None) == SlotChoice(0)
    assert choose_slot(slots([1], [], [2]), range(3), [8, 8], None) == SlotChoice(1)


def test_another_conversation_that_begins_alike_is_left_as_it_is() -> None:
    long = [*SYSTEM, *range(20)]
    contents = slots([7, 7], long)
    assert choose_slot(contents, range(2), [*SYSTEM, 99, 98], None) == SlotChoice(0, copied=1)
    assert choose_slot(contents, range(1, 2), [*SYSTEM, 99, 98], None) == SlotChoice(1)  # there is no other
    assert choose_slot(slots(long, [7, 7]), range(2), [*SYSTEM, 99], None) == SlotChoice(0)  # it is the oldest itself


def test_what_all_conversations_of_an_agent_begin_with_makes_none_of_them_another() -> None:
    """A long system prompt with tools is most of each conversation: what goes on is told by what is behind it."""
    system = list(range(100, 200))
    first, second = [*system, 1, 2, 3], [*system, 4, 5]
    assert choose_slot(slots(first, []), range(2), second, None) == SlotChoice(0)
    assert choose_slot(slots(first, []), range(2), second, None, None, 100) == SlotChoice(1, copied=0)
    for held in (first[:102], first, [*first, 9], [*first[:102], 8]):  # an answer, and another question
        assert choose_slot(slots(held, []), range(2), [*first, 7], None, None, 100) == SlotChoice(0)
    assert choose_slot(slots(system[:50], []), range(2), second, None, None, 100) == SlotChoice(0)  # nothing is lost
    other = [*system[:90], 0, *range(12)]
    assert choose_slot(slots(other, []), range(2), second, None, None, 100) == SlotChoice(1, copied=0)
    alike = slots(first, [*system, 6, 6, 6], [7])  # as much in two of them: the older is given up
    assert choose_slot(alike, range(3), second, None, None, 100) == SlotChoice(0)
    alike[0].replace(first)
    assert choose_slot(alike, range(2), second, None, None, 100) == SlotChoice(1)


def test_a_conversation_that_was_shortened_takes_its_own_slot() -> None:
    mine = OngoingConversation()
    contents = slots([*SYSTEM, *range(20)], [*SYSTEM, *range(30, 50)], [*SYSTEM, 60])
    contents[1].conversation = mine
    prompt = [*SYSTEM, 40, 41]
    assert choose_slot(contents, range(3), prompt, None).taken != 1
    assert choose_slot(contents, range(3), prompt, None, mine) == SlotChoice(1)
    assert choose_slot(contents, range(3), prompt, None, OngoingConversation()).taken != 1
    contents[1].bind("json")  # of no use for the prompt, but of no other use either
    contents[1].conversation = mine
    contents[2].replace([*SYSTEM, *range(60, 80)])
    assert choose_slot(contents, range(3), prompt, None, mine) == SlotChoice(1, copied=0)
    assert choose_slot(contents, range(2, 3), prompt, None, mine) == SlotChoice(2)  # its slot is running


def test_rows_of_another_adapter_are_of_no_use() -> None:
    contents = slots([1, 2, 3], [4, 5])
    contents[0].bind("json")
    contents[0].replace([1, 2, 3])
    assert choose_slot(contents, range(2), [1, 2, 3, 4], None) == SlotChoice(1)
    assert choose_slot(contents, range(2), [1, 2, 3, 4], "json") == SlotChoice(0)


@pytest.fixture
def llm(serving_engines: Path, drafting: DraftingConfig | None) -> Iterator[LLM]:
    with LLM(serving_engines, backend="numpy", drafting=drafting) as opened:
        yield opened


@pytest.fixture
def fresh(serving_engines: Path) -> Iterator[LLM]:
    """A model without its draft, whose rows are forgotten before each question."""
    with LLM(serving_engines, backend="numpy", drafting=None) as opened:
        yield opened


def answer_alone(fresh: LLM, prompt: list[int]) -> tuple[int, ...]:
    def forget(runtime: object) -> None:
        for each in runtime._contents:
            each.replace(())

    fresh.call(forget).result()
    response = fresh.generate(prompt, PARAMS)
    assert response.usage.reused_tokens == 0
    return response.token_ids


def missing(llm: LLM) -> int:
    """How many of the tokens that were there before a turn must be computed again, at most: the last one, which has no
    row, and with a draft those that it had not taken in."""
    return 1 if llm.drafting is None else 2 + llm.drafting.draft_steps


def test_four_conversations_in_turns_each_find_their_own_rows(llm: LLM, fresh: LLM) -> None:
    """They begin alike, and other requests run between them: one at a time, and all four at once."""
    talks = [[*SYSTEM, index, index + 1, index + 2] for index in (10, 20, 30, 40)]
    for turn in range(4):
        asked = [Request(talk, None, PARAMS) for talk in talks]
        order = (0, 1, 2, 3) if turn % 2 else (2, 0, 3, 1)
        if turn == 2:
            responses = llm.handle(asked)
        else:
            found = {index: llm.handle([asked[index]])[0] for index in order}
            responses = [found[index] for index in range(4)]
        for talk, response in zip(talks, responses, strict=True):
            assert response.token_ids == answer_alone(fresh, talk)
            if turn:
                assert response.usage.reused_tokens >= len(talk) - 2 - missing(llm)
            talk += [*response.token_ids, 50 + turn, 51]


def test_a_conversation_survives_strangers_up_to_the_number_of_slots(llm: LLM, fresh: LLM) -> None:
    talk = [*SYSTEM, 1, 2, 3, 4, 5, 6]
    llm.generate(talk, PARAMS)
    for stranger in range(3):
        llm.generate([100 + stranger, 3, 4], PARAMS)
    again = llm.generate([*talk, 7], PARAMS)
    assert again.usage.reused_tokens >= len(talk) - missing(llm)
    for stranger in range(4):
        llm.generate([100 + stranger, 3, 4, 5], PARAMS)
    assert llm.generate([*talk, 8], PARAMS).usage.reused_tokens == 0  # the least recently used had to go
    assert again.token_ids == answer_alone(fresh, [*talk, 7])


def test_an_edited_history_keeps_what_comes_before_the_edit(llm: LLM, fresh: LLM) -> None:
    """As where the user changes a message, or the template drops earlier thoughts."""
    talk = [*SYSTEM, *range(1, 25)]
    llm.generate(talk, PARAMS)
    llm.generate([90, 91], PARAMS)
    for kept in (20, 12, 6):
        edited = [*talk[:kept], 77, 78]
        response = llm.generate(edited, PARAMS)
        assert response.usage.reused_tokens >= kept - (0 if llm.drafting is None else 1)
        assert response.token_ids == answer_alone(fresh, edited)
    whole = llm.generate([*talk, 79], PARAMS)  # the version before the edits is still there
    assert whole.token_ids == answer_alone(fresh, [*talk, 79])


def test_a_template_that_drops_earlier_thoughts(llm: LLM, fresh: LLM) -> None:
    """The first half of each earlier answer, which stands for its thoughts: what comes before it is reused."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{{ m.content[(m.content|length) // 2:] }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}[assistant]"
    )
    for each in (llm, fresh):
        each.tokenizer.chat_template = ChatTemplate({"default": source}, "a test's template")
    session = llm.create_session(params=SamplingParams(max_tokens=12, ignore_eos=True))
    before: list[dict[str, str]] = []
    for turn, text in enumerate(("hello", "and?", "why")):
        with_question = [*session.messages, {"role": "user", "content": text}]
        prompt = llm.tokenizer.encode_chat(with_question)
        response = session.send(text, PARAMS)
        assert response.token_ids == answer_alone(fresh, prompt)
        if turn:
            shared = llm.tokenizer.encode_chat(before)  # up to the latest answer, which is cut now
            assert response.usage.reused_tokens >= len(shared) - missing(llm)
        before = with_question
        llm.generate([100 + turn, 3, 4], PARAMS)
