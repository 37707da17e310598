"""Who gives up, by whatever way, leaves nothing behind: no answer that grows, no thread, no slot that is taken."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from edgellm import LLM, AsyncLLM, Request, SamplingParams, SpecDecodeRuntime
from edgellm.serving.thread import EngineThread

LONG = SamplingParams(max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
Slow = Callable[[LLM], None]


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_session_goes_on_after_an_answer_that_was_cancelled_or_let_go(served: LLM, slowed: Slow) -> None:
    slowed(served)
    session = served.create_session(params=LONG)
    generation = session.stream("one")
    first = generation.next_chunk()
    generation.cancel()
    assert session.send("two", SHORT).finish_reason == "length"
    assert session.messages[0] == said("one")
    assert session.messages[1]["content"].startswith(first.text)
    session.replace(())
    for _ in session.stream("three"):
        break
    assert session.send("four", SHORT).finish_reason == "length"
    assert served.metrics()["requests"]["finished"] == {"cancelled": 2, "length": 2}


def test_a_session_does_not_wait_for_the_turn_of_what_was_let_go(served: LLM, paused: Callable[[LLM], object]) -> None:
    session = served.create_session(params=SHORT)
    with paused(served):
        for text in ("one", "two"):
            session.stream(text)  # nobody keeps the answer
        last = session.stream("three")
        assert served.metrics()["requests_waiting"] == 1
    assert last.result().finish_reason == "length"
    assert session.messages[0] == said("three")


def test_an_interrupt_while_waiting_cancels_the_answer(
    served: LLM, slowed: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(served)
    session = served.create_session(params=LONG)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("edgellm.generation.RequestState.wait", interrupted)
        for ask in (lambda: session.send("one"), lambda: served.generate("x", LONG), lambda: served.chat([said("x")])):
            with pytest.raises(KeyboardInterrupt):
                ask()
    assert session.send("two", SHORT).finish_reason == "length"
    assert served.metrics()["requests"]["finished"] == {"cancelled": 3, "length": 1}


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "edgellm-engine"]


def test_a_model_that_nobody_holds_closes_itself(serving_engines: Path) -> None:
    before = engine_threads()
    llm = LLM(serving_engines, backend="numpy", drafting=None)
    (thread,) = [each for each in engine_threads() if each not in before]
    generation = llm.stream("hello", SHORT)
    session = llm.create_session()
    del llm
    gc.collect()
    assert generation.result().finish_reason == "length"  # who holds an answer holds the model
    del generation
    assert session.send("hello", SHORT).finish_reason == "length"
    del session
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_who_gives_up_while_a_model_loads_leaves_nothing(
    serving_engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    class SlowRuntime(SpecDecodeRuntime):
        def __init__(self, *args: object, **options: object) -> None:
            go_on.wait()
            super().__init__(*args, **options)

    monkeypatch.setattr("edgellm.llm.SpecDecodeRuntime", SlowRuntime)
    opened: list[EngineThread] = []

    async def enter(llm: AsyncLLM) -> None:
        opened.append(llm._thread)
        async with llm:
            pytest.fail("it cannot be open")

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(enter(AsyncLLM(serving_engines, backend="numpy")), 0.05)

    asyncio.run(give_up())
    go_on.set()
    opened[0].closed.result(10)
    assert opened[0].opened.exception() is None


@pytest.mark.parametrize("awaited", [True, False])
def test_a_session_goes_on_after_tasks_that_gave_up_at_any_time(
    serving_engines: Path, slowed: Slow, awaited: bool
) -> None:
    """Also where the next message follows in the same turn of the event loop, before the task knows."""

    async def give_up(task: asyncio.Task[object]) -> None:
        with pytest.raises(asyncio.CancelledError):
            await task

    class AtOnce(ThreadPoolExecutor):
        def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
            """The quickest of threads: the message is said before the event loop goes on."""
            said: Future[Any] = Future()
            try:
                said.set_result(call(*arguments))
            except BaseException as error:
                said.set_exception(error)
            return said

    async def talk() -> dict[str, int]:
        if not awaited:
            asyncio.get_running_loop().set_default_executor(AtOnce())
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            slowed(llm.served)
            session = llm.create_session(params=LONG)
            for seconds in (0.0, 0.001, 0.01, 0.03):
                task = asyncio.create_task(session.send("one"))
                await asyncio.sleep(seconds)
                task.cancel()
                if awaited:
                    await give_up(task)
                assert (await session.send("two", SHORT)).finish_reason == "length"
                await give_up(task)
                session.replace(())
            generation = await session.stream("one")
            reading = asyncio.create_task(generation.result())
            await asyncio.sleep(0)
            reading.cancel()
            if awaited:
                await give_up(reading)
            assert (await session.send("two", SHORT)).finish_reason == "length"
            return llm.served.metrics()["requests"]["finished"]

    finished = asyncio.run(talk())
    assert finished["length"] == 5 and 1 <= finished["cancelled"] <= 5


def test_an_interrupted_runtime_has_all_its_slots_again(serving_engines: Path) -> None:
    """Ctrl-C reaches the thread that computes where the program has no other."""
    with SpecDecodeRuntime(serving_engines, backend="numpy") as runtime:
        expected = runtime.handle_request(Request("hello", params=SHORT)).token_ids
        counted = runtime.metrics.round

        def interrupt() -> None:
            counted()
            os.kill(os.getpid(), signal.SIGINT)

        runtime.metrics.round = interrupt
        slots = runtime.directory.limits.max_batch
        with pytest.raises(KeyboardInterrupt):
            runtime.handle_request([Request("hello", params=LONG)] * slots)
        runtime.metrics.round = counted
        assert not runtime._open_runner().base._state.active.any()
        answers = runtime.handle_request([Request("hello", params=SHORT)] * slots)
    assert {answer.token_ids for answer in answers} == {expected}


def test_a_closed_model_and_an_answer_that_are_held_hold_no_backend() -> None:
    """What was made on a device is freed by the thread that made it, not by whoever lets go of the model later."""
    with LLM() as model:
        answer = model.stream_chat([said("Hello!")], SHORT)
        assert answer.result().token_ids
        backend = weakref.ref(model._runtime._open_runner().backend)
        assert backend() is not None
    gc.collect()
    assert backend() is None and model.directory.path
