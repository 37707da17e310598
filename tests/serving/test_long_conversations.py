"""Conversations that outgrow the context, on a tiny model with random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, ContextError, Request, RequestError, Response, SamplingParams, Session
from edgellm.drafting.config import DraftingConfig
from edgellm.engines.building.builder import build_engine_directory
from edgellm.engines.model.limits import EngineLimits

CONTEXT = 256
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
ROOMY = SamplingParams(max_tokens=40, ignore_eos=True)
SYSTEM = "Be brief."
LONGER = "And now, what do you say to that?"


@pytest.fixture(scope="module")
def engines(tiny_checkpoint: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint and its draft: two sequences at a time, context 256 tokens."""
    target = tmp_path_factory.mktemp("engines") / "talk"
    limits = EngineLimits(2, 32, CONTEXT, draft_top_k=4, draft_steps=3, verify_tree_size=12)
    build_engine_directory(tiny_checkpoint, target, limits, [], draft=tiny_draft)
    return target


@pytest.fixture
def llm(engines: Path) -> Iterator[LLM]:
    with LLM(engines, backend="numpy", drafting=None) as opened:
        yield opened


@pytest.fixture
def cold(engines: Path) -> Iterator[Callable[[list[dict[str, Any]], SamplingParams], Response]]:
    """Answers messages plainly, with nothing of them in the KV cache."""
    with LLM(engines, backend="numpy", drafting=None) as opened:

        def answer(messages: list[dict[str, Any]], params: SamplingParams) -> Response:
            opened.handle([Request(prompt=[slot], params=SamplingParams(max_tokens=1)) for slot in (7, 8)])
            response = opened.chat(messages, params)
            assert response.usage.reused_tokens < 2
            return response

        yield answer


def tokens(llm: LLM, messages: list[dict[str, Any]]) -> int:
    return len(llm.tokenizer.encode_chat(messages))


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def filled(llm: LLM, **options: Any) -> Session:
    """A session of short turns, in whose context `LONGER` has no room for an answer."""
    session = llm.create_session(SYSTEM, ROOMY, **options)
    history = [{"role": "system", "content": SYSTEM}]
    while tokens(llm, history) < CONTEXT - 60:
        history += [said(f"question {len(history)}"), {"role": "assistant", "content": "yes"}]
    session.replace(history)
    return session


def test_a_conversation_goes_on_for_ever(engines: Path, drafting: DraftingConfig | None, cold: Callable) -> None:
    prompt_tokens = reused_tokens = dropped = 0
    with LLM(engines, backend="numpy", drafting=drafting) as llm:
        session = llm.create_session(SYSTEM)
        for number in range(40):
            sampled = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9 * (number % 2), seed=number)
            before = session.messages
            response = session.send(f"number {number}", sampled)
            *kept, question, answer = session.messages
            assert response.finish_reason == "length"
            assert kept == [before[0], *before[1 + response.dropped_messages :]]
            assert response.dropped_messages == 2 * response.dropped_turns
            assert question == said(f"number {number}") and answer["content"] == response.text
            assert response.usage.context_left == CONTEXT - response.usage.prompt_tokens - 6
            assert response.usage.context_left >= 0
            expected = cold([*kept, question], sampled)
            assert (response.token_ids, response.text) == (expected.token_ids, expected.text)
            prompt_tokens += response.usage.prompt_tokens
            reused_tokens += response.usage.reused_tokens
            dropped += response.dropped_turns
    assert dropped > 20
    assert reused_tokens > 0.6 * prompt_tokens  # 256 tokens are nine turns, some of which leave each third turn


def test_a_conversation_that_drops_turns_takes_no_other_ones_rows(
    engines: Path, drafting: DraftingConfig | None
) -> None:
    """It needs its own slot's rows no more, which are used later than the other's."""
    with LLM(engines, backend="numpy", drafting=drafting) as llm:
        other, session = (llm.create_session(SYSTEM, SHORT) for _ in range(2))
        for number in range(3):
            last = other.send(f"other {number}")
        while session.send("number").dropped_turns == 0:
            pass
        assert session.send("number").usage.reused_tokens > 80
        assert other.send("goes on").usage.reused_tokens > last.usage.prompt_tokens - 2


def test_room_is_kept_for_max_tokens(llm: LLM) -> None:
    for max_tokens in (100, 150):
        session = filled(llm)
        response = session.send(LONGER, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert (response.finish_reason, response.usage.completion_tokens) == ("length", max_tokens)
        assert response.dropped_turns > 0
        assert session.messages[0]["content"] == SYSTEM


def test_an_answer_that_fills_the_rest_ends_and_the_next_turn_works(llm: LLM) -> None:
    session = llm.create_session(SYSTEM)
    session.replace([*session.messages, said("one"), {"role": "assistant", "content": "two"}])
    endless = session.send("three", SamplingParams(ignore_eos=True))
    assert (endless.finish_reason, endless.dropped_turns, endless.usage.context_left) == ("context", 0, 0)
    assert endless.usage.completion_tokens > CONTEXT // 4
    following = session.send("four", SHORT)
    assert (following.finish_reason, following.dropped_turns, following.dropped_messages) == ("length", 2, 4)
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant"]


def test_a_long_system_prompt_leaves_what_room_it_can(llm: LLM) -> None:
    """Where a quarter cannot be kept, the answer gets a part of the rest."""
    session = llm.create_session("x" * 200)
    for number in range(6):
        response = session.send(str(number), SamplingParams(ignore_eos=True))
        assert response.finish_reason == "context"
        assert response.usage.completion_tokens > 6


@pytest.mark.parametrize("overflow", ["drop_oldest", "error"])
def test_a_message_that_cannot_fit_changes_nothing(llm: LLM, overflow: Any) -> None:
    session = filled(llm, overflow=overflow)
    known, long = session.messages, "x" * 300
    alone = [known[0], said(long)] if overflow == "drop_oldest" else [*known, said(long)]
    for _ in range(2):
        with pytest.raises(ContextError, match=r"the prompt has \d+ tokens.* and the context 256.*--kv-capacity") as no:
            session.send(long)
        assert (no.value.needed, no.value.limit) == (tokens(llm, alone) + 1, CONTEXT)
        assert session.messages == known
    session.trim(1)
    assert session.send("shorter", SHORT).finish_reason == "length"


def test_nothing_leaves_where_that_is_an_error(llm: LLM) -> None:
    session = llm.create_session(SYSTEM, SHORT, overflow="error")
    with pytest.raises(ContextError) as raised:
        for number in range(40):
            assert session.send(f"number {number}").dropped_turns == 0
    known = session.messages
    assert len(known) == 1 + 2 * number > 10
    assert raised.value.needed > raised.value.limit == CONTEXT
    with pytest.raises(ContextError):
        session.send("again")
    assert session.messages == known
    session.undo()
    assert session.send("less", SamplingParams(max_tokens=1)).usage.context_left < 40
    with pytest.raises(RequestError, match="overflow is 'never': expected 'drop_oldest' or 'error'"):
        llm.create_session(overflow="never")


def test_single_requests_never_drop(llm: LLM) -> None:
    messages = [*filled(llm).messages, said("x" * 80)]
    for ask in (
        lambda: llm.chat(messages, SHORT),
        lambda: llm.stream_chat(messages, SHORT),
        lambda: llm.submit(Request(messages=messages)),
        lambda: llm.generate("x" * 300),
    ):
        with pytest.raises(ContextError, match="the prompt has"):
            ask()
    short_of_room = llm.chat([*filled(llm).messages, said("x")], SamplingParams(ignore_eos=True))
    assert (short_of_room.finish_reason, short_of_room.dropped_turns) == ("context", 0)
    assert short_of_room.usage.completion_tokens < CONTEXT // 4


def test_turns_leave_with_their_tool_messages(llm: LLM, cold: Callable) -> None:
    turn = [
        said("Please look at the table."),
        {"role": "assistant", "content": "look()"},
        {"role": "tool", "content": "a cup"},
        {"role": "assistant", "content": "I see a cup on a table."},
    ]
    session = llm.create_session(SYSTEM, SHORT)
    session.replace([*session.messages, *turn, *turn, said("hi"), {"role": "assistant", "content": "hello"}])
    response = session.send("What is it?", ROOMY)
    assert (response.dropped_turns, response.dropped_messages) == (2, 8)
    kept = session.messages
    assert [message["content"] for message in kept[:4]] == [SYSTEM, "hi", "hello", "What is it?"]
    assert response.token_ids == cold(kept[:-1], ROOMY).token_ids


def test_what_was_not_answered_dropped_nothing(llm: LLM, paused: Callable[[LLM], Any]) -> None:
    session = filled(llm)
    known = session.messages
    with paused(llm):
        growing = session.stream(LONGER)
        assert session.messages == known
        growing.cancel()
    assert growing.result().dropped_turns > 0
    assert session.messages == known
    assert session.send(LONGER).finish_reason == "length"
    assert len(session.messages) < len(known)


def test_a_turn_is_taken_back(llm: LLM) -> None:
    session = llm.create_session(SYSTEM, SHORT)
    first = session.send("one")
    known = session.messages
    session.send("two")
    turn = session.undo()
    assert turn[0] == said("two") and turn[1]["role"] == "assistant"
    assert session.messages == known
    session.undo()
    assert session.messages == known[:1]
    with pytest.raises(RequestError, match="nothing was said yet"):
        session.undo()
    assert session.send("one").token_ids == first.token_ids


def test_the_last_message_is_answered_again(llm: LLM, paused: Callable[[LLM], Any]) -> None:
    session = llm.create_session(SYSTEM, SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.2))
    with pytest.raises(RequestError, match="nothing was asked yet"):
        session.retry()
    session.send("one")
    first = session.send("two")
    known = session.messages
    again = [session.retry().result() for _ in range(4)]
    assert len({answer.text for answer in [first, *again]}) > 1  # the seed is another one each time
    assert session.messages == [*known[:-1], {"role": "assistant", "content": again[-1].text}]
    assert again[-1].usage.prompt_tokens == first.usage.prompt_tokens
    known = session.messages
    with paused(llm):
        session.retry().cancel()  # the answer before it stays
    assert session.messages == known
    assert session.retry(SHORT).result().usage.completion_tokens == 6


def test_all_but_the_last_turns_are_forgotten(llm: LLM) -> None:
    session = filled(llm)
    known = session.messages
    count = (len(known) - 1) // 2
    assert session.trim(count + 5) == 0 and session.messages == known
    assert session.trim(2) == count - 2 and session.messages == [known[0], *known[-4:]]
    assert session.trim(0) == 2 and session.messages == known[:1]
    for wrong in (-1, "2", True, 1.5):
        with pytest.raises(RequestError, match=r"turns is .*: expected how many to keep"):
            session.trim(wrong)


def test_the_system_prompt_of_a_session_is_exchanged(llm: LLM) -> None:
    session = llm.create_session(params=SHORT)
    assert session.system is None
    session.send("one")
    behind = session.messages
    session.system = SYSTEM
    assert session.system == SYSTEM and session.messages[1:] == behind
    session.system = "Be loud."
    assert [message["content"] for message in session.messages[:2]] == ["Be loud.", "one"]
    session.system = None
    assert session.messages == behind


def test_nothing_changes_while_an_answer_grows(llm: LLM, paused: Callable[[LLM], Any]) -> None:
    session = filled(llm)
    with paused(llm):
        growing = session.stream(LONGER)
        for change in (session.undo, session.retry, lambda: session.trim(0), lambda: setattr(session, "system", "x")):
            with pytest.raises(RequestError, match="still being answered"):
                change()
    assert growing.result().finish_reason == "length"


@pytest.mark.parametrize("overflow", ["drop_oldest", "error"])
def test_a_context_that_is_nearly_full_is_warned_of(llm: LLM, overflow: Any, caplog: pytest.LogCaptureFixture) -> None:
    session = llm.create_session(SYSTEM, overflow=overflow)
    used = tokens(llm, [*session.messages, said("one")])
    with caplog.at_level(logging.WARNING, "edgellm.sessions"):
        session.send("one", SamplingParams(max_tokens=230 - used, ignore_eos=True))  # 230 of 256 are not nine tenths
        assert not caplog.records
        session.replace(session.messages[:1])
        session.send("one", SamplingParams(max_tokens=231 - used, ignore_eos=True))
    (record,) = caplog.records
    soon = {"drop_oldest": "its oldest turns leave soon", "error": "messages will not fit soon"}[overflow]
    assert record.getMessage() == f"the conversation fills 231 of the 256 tokens of the context: {soon}"
    warnings: list[str] = []
    session.warn = warnings.append
    session.replace(session.messages[:1])
    session.stream("one", SamplingParams(max_tokens=240 - used, ignore_eos=True)).result()
    assert not warnings
    session.take_in()
    assert len(warnings) == 1
    session.warn = lambda _: session.trim(0)
    session.replace(session.messages[:1])
    session.send("one", SamplingParams(max_tokens=240 - used, ignore_eos=True))
    assert session.messages == [{"role": "system", "content": SYSTEM}]


def test_counting_renders_a_prompt_once_where_nothing_leaves(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    encode = llm.tokenizer.encode_chat
    monkeypatch.setattr(
        llm.tokenizer, "encode_chat", lambda *given, **more: rendered.append(1) or encode(*given, **more)
    )
    session = llm.create_session(SYSTEM, SHORT)
    session.send("one")
    assert len(rendered) == 1
    session = filled(llm)
    rendered.clear()
    assert session.send(LONGER).dropped_turns > 0
    assert len(rendered) <= 6
