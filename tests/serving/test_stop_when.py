"""`stop_when`: the caller ends an answer by its text, in the thread that reads it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from served_answers import LONG, SHORT, Slow, answer

from edgellm import LLM, AsyncLLM, Request, RequestError, Response, SamplingParams, SpecDecodeRuntime
from edgellm.drafting.config import DraftingConfig

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, logprobs=1)
ENOUGH = 12


@pytest.fixture
def llm(serving_engines: Path, drafting: DraftingConfig | None) -> LLM:
    with LLM(serving_engines, backend="numpy", drafting=drafting) as opened:
        yield opened


def enough(text: str) -> bool:
    return len(text) >= ENOUGH


def check_cut(response: Response, whole: Response) -> None:
    """It is the beginning of the whole answer, up to the piece in which there was enough."""
    assert response.finish_reason == "stop" and response.stop_match is None
    count = len(response.token_ids)
    assert 0 < count < len(whole.token_ids)
    assert response.token_ids == whole.token_ids[:count]
    assert tuple(each.token_id for each in response.logprobs) == response.token_ids
    assert response.usage.completion_tokens == count
    assert response.usage.context_left == whole.usage.context_left + len(whole.token_ids) - count
    assert whole.text.startswith(response.text) and len(response.text) >= ENOUGH


@pytest.mark.parametrize("slow", [True, False])
def test_an_answer_that_is_waited_for(llm: LLM, slowed: Slow, slow: bool) -> None:
    whole = llm.generate("hello", PARAMS)
    if slow:
        slowed(llm)  # the reader is there before the next piece
    seen: list[str] = []
    threads = set()

    def stops(text: str) -> bool:
        seen.append(text)
        threads.add(threading.current_thread())
        return enough(text)

    response = llm.generate("hello", PARAMS, stop_when=stops)
    check_cut(response, whole)
    assert threads == {threading.current_thread()}
    assert seen[-1] == response.text and all(len(text) < ENOUGH for text in seen[:-1])
    assert answer(llm.generate("hello", PARAMS, stop_when=lambda text: False)) == answer(whole)
    messages = [{"role": "user", "content": "hello"}]
    chat = llm.chat(messages, PARAMS)
    check_cut(llm.chat(messages, PARAMS, stop_when=enough), chat)


def test_it_is_asked_at_each_token_of_a_round(llm: LLM) -> None:
    """As plainly: what rules force comes many tokens at a time, and more of them than are wanted."""
    params, seen = SamplingParams(structure=["a text of which each token is forced"]), []
    whole = llm.generate("hello", params)
    response = llm.generate("hello", params, stop_when=lambda text: seen.append(text) or enough(text))
    count = next(count for count, text in enumerate(seen, 1) if enough(text))
    assert len(seen) == count == len(response.token_ids) and seen[-1] == response.text
    assert response.token_ids == whole.token_ids[:count] and len(response.text) == ENOUGH


def test_an_answer_that_is_read(llm: LLM) -> None:
    whole = llm.generate("hello", PARAMS)
    with llm.stream("hello", PARAMS, stop_when=enough) as generation:
        chunks = list(generation)
    response = generation.result()
    check_cut(response, whole)
    assert "".join(chunk.text for chunk in chunks) == response.text
    waited = llm.stream("hello", PARAMS, stop_when=enough)
    assert waited.result().finish_reason == "stop"
    assert "".join(chunk.text for chunk in waited) == waited.result().text  # what was waited for is there to read


def test_the_engine_may_be_faster_than_the_reader(llm: LLM) -> None:
    """The answer ends where its reader says all the same, also where all of it has been computed."""
    whole = llm.generate("hello", PARAMS)
    generation = llm.stream("hello", PARAMS, stop_when=enough)
    assert generation.request_state.wait(20)
    polled = generation.poll()
    check_cut(generation.result(), whole)
    assert polled.text == generation.result().text
    assert generation.poll() is None and generation.next_chunk() is None


def test_it_saves_what_is_not_wanted(llm: LLM, slowed: Slow) -> None:
    slowed(llm)
    llm.generate("hello", LONG, stop_when=lambda text: True)
    assert llm.metrics()["rounds"] < 20
    assert llm.metrics()["requests"]["finished"] == {"stop": 1}
    assert llm.generate("hello", SHORT).finish_reason == "length"


def test_what_it_raises_reaches_the_reader(llm: LLM, slowed: Slow) -> None:
    slowed(llm)

    def fails(text: str) -> bool:
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError):
        llm.generate("hello", LONG, stop_when=fails)
    generation = llm.stream("hello", LONG, stop_when=fails)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            generation.next_chunk()
        with pytest.raises(ZeroDivisionError):
            generation.result()
    results = llm.handle([Request("hello", params=LONG, stop_when=fails), Request("hello", params=SHORT)])
    assert isinstance(results[0], RequestError) and isinstance(results[0].__cause__, ZeroDivisionError)
    assert results[1].finish_reason == "length"
    assert llm.metrics()["requests"]["finished"] == {"cancelled": 3, "length": 1}


def test_several_are_stopped_as_they_grow(llm: LLM, slowed: Slow) -> None:
    """While the first is waited for, which goes on, the others end."""
    slowed(llm)
    order: list[int] = []

    def stops(index: int, text: str) -> bool:
        order.append(index)
        return index > 0

    requests = [Request("hello", params=LONG, stop_when=lambda text, each=each: stops(each, text)) for each in range(6)]
    results = llm.handle(requests)
    assert [result.finish_reason for result in results] == ["length", *["stop"] * 5]
    last = max(place for place, index in enumerate(order) if index > 0)
    assert order[last:].count(0) > 5  # the first was not over


def test_a_timeout_while_it_is_asked(llm: LLM, slowed: Slow) -> None:
    slowed(llm)
    generation = llm.stream("hello", LONG, stop_when=lambda text: False)
    with pytest.raises(TimeoutError):
        generation.result(0.03)
    with pytest.raises(TimeoutError):
        llm.stream("hello", LONG, stop_when=enough).next_chunk(0)
    generation.cancel()
    assert generation.result().finish_reason == "cancelled"


def test_a_slow_one_holds_nobody_up(llm: LLM) -> None:
    """The engine goes on while it runs."""
    go_on = threading.Event()
    slow = threading.Thread(target=lambda: llm.generate("hello", LONG, stop_when=lambda text: go_on.wait(20)))
    slow.start()
    try:
        assert llm.generate("hello", SHORT).finish_reason == "length"
    finally:
        go_on.set()
        slow.join()


def test_several_threads_read_one_answer(llm: LLM) -> None:
    """Each piece reaches one of them, and all see the end."""
    whole = llm.generate("hello", PARAMS)
    for stop_when in (None, lambda text: False, enough):
        generation, pieces = llm.stream("hello", PARAMS, stop_when=stop_when), []
        threads = [threading.Thread(target=pieces.extend, args=(generation,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        response = generation.result()
        assert sum(len(chunk.token_ids) for chunk in pieces) == len(response.token_ids)
        assert (len(response.token_ids) == len(whole.token_ids)) == (stop_when is not enough)


def test_on_an_event_loop(serving_engines: Path, drafting: DraftingConfig | None, slowed: Slow) -> None:
    def fails(text: str) -> bool:
        raise ZeroDivisionError(text)

    async def run() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=drafting) as llm:
            whole = await llm.generate("hello", PARAMS)
            check_cut(await llm.generate("hello", PARAMS, stop_when=enough), whole)
            stream = llm.stream("hello", PARAMS, stop_when=enough)
            text = "".join([chunk.text async for chunk in stream])
            check_cut(await stream.result(), whole)
            assert text == (await stream.result()).text
            slowed(llm.served)
            with pytest.raises(ZeroDivisionError):
                await llm.generate("hello", LONG, stop_when=fails)
            requests = [Request("hello", params=LONG, stop_when=stop) for stop in (lambda text: False, enough, fails)]
            first, second, third = await llm.handle(requests)
            assert (first.finish_reason, second.finish_reason) == ("length", "stop")
            assert isinstance(third.__cause__, ZeroDivisionError)

    asyncio.run(run())


def test_without_a_thread(runtime: SpecDecodeRuntime) -> None:
    """`handle_request` calls it between rounds, with and without `on_chunk`."""

    def fails(text: str) -> bool:
        raise ZeroDivisionError(text)

    def asked(stop_when: Callable[[str], bool] | None) -> Request:
        return Request("hello", params=PARAMS, stop_when=stop_when)

    whole = runtime.handle_request(asked(None))
    check_cut(runtime.handle_request(asked(enough)), whole)
    chunks: list[str] = []
    response = runtime.handle_request(asked(enough), lambda chunk: chunks.append(chunk.text))
    check_cut(response, whole)
    assert "".join(chunks) == response.text
    with pytest.raises(ZeroDivisionError):
        runtime.handle_request(asked(fails))
    results = runtime.handle_request([asked(fails), asked(enough), asked(None)])
    assert isinstance(results[0], ZeroDivisionError)
    check_cut(results[1], whole)
    assert answer(results[2]) == answer(whole)


def test_a_conversation_goes_on_with_what_stands(llm: LLM) -> None:
    """However far the engine was ahead, and whatever the session is asked before the answer is read."""
    whole = llm.create_session("").send("hello", PARAMS)
    session = llm.create_session("")
    check_cut(session.send("hello", PARAMS, stop_when=enough), whole)
    cut = session.messages[-1]["content"]
    assert ENOUGH <= len(cut) < len(whole.text) and whole.text.startswith(cut)
    again = session.retry(PARAMS, stop_when=enough)
    assert again.request_state.wait(20)
    assert session.messages[-1] == {"role": "assistant", "content": again.result().text}  # nobody has read it yet
    check_cut(again.result(), whole)
    assert "".join(chunk.text for chunk in again) == again.result().text
    with session.stream("and?", PARAMS, stop_when=lambda text: bool(session.messages) and enough(text)) as generation:
        for _ in generation:  # the session may be asked within
            pass
    assert session.messages[-1]["content"] == generation.result().text
    assert session.messages[-2]["content"] == "and?"
    with pytest.raises(RequestError, match="stop_when"):
        session.send("hello", stop_when=5)
