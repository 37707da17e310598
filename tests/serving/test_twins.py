"""`AsyncLLM` and `AsyncSession` have what `LLM` and `Session` have, and it does the same."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_answers import LONG, SHORT, Answers, Slow, answer

import edgellm
from edgellm import (
    LLM,
    AsyncGeneration,
    AsyncLLM,
    AsyncSession,
    Generation,
    Request,
    RequestError,
    SamplingParams,
    Session,
)
from edgellm.errors import EdgeLLMError
from edgellm.runtime import SpecDecodeRuntime
from edgellm.tracing import Trace

MESSAGES = [{"role": "user", "content": "hi"}]


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "twin", "alone", "more"),
    [
        (LLM, AsyncLLM, {"of_thread"}, {"open"}),
        (Session, AsyncSession, set(), set()),
        # Without an event loop there are other ways to wait for a piece, and to be told of one.
        (Generation, AsyncGeneration, {"look_ahead", "next_chunk", "on_change", "poll"}, {"aclose"}),
    ],
)
def test_names_and_arguments(kind: type, twin: type, alone: set[str], more: set[str]) -> None:
    """A misspelt option is one for type checkers, too: none is handed through without a name."""
    assert public_names(kind) - public_names(twin) == alone
    assert public_names(twin) - public_names(kind) == more
    names = public_names(kind) & public_names(twin)
    if kind is LLM:
        names.add("__init__")
    for name in names:
        one, other = inspect.getattr_static(kind, name), inspect.getattr_static(twin, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if not isinstance(one, property) and (kind, name) != (Generation, "result"):  # `asyncio.wait_for` has a timeout
            assert inspect.signature(one).parameters == inspect.signature(other).parameters, name


def test_what_waits_is_awaited(serving_engines: Path, tmp_path: Path) -> None:
    """All that LLM has does the same."""

    async def use(llm: AsyncLLM) -> None:
        served = llm.served
        for name in ("adapters", "backend_name", "context_length", "directory", "has_vision_model", "tokenizer"):
            assert getattr(llm, name) == getattr(served, name)
        assert await llm.count_tokens(MESSAGES) == served.count_tokens(MESSAGES)
        assert llm.drafting is None and await llm.drafting_report is None
        with pytest.raises(RequestError, match="no draft model is loaded"):
            await llm.use_drafting(edgellm.DraftingConfig())
        trace = Trace()
        await llm.observe(trace)
        await llm.generate("hello", SHORT)
        await llm.observe(None)
        assert trace.spans
        kept = await llm.cache_system_prompt("be kind", save=tmp_path / "kind.safetensors")
        assert (await llm.load_snapshot(tmp_path / "kind.safetensors")).token_ids == kept.token_ids
        assert await llm.call(lambda runtime: runtime.context_length) == llm.context_length
        assert llm.metrics()["requests"] == served.metrics()["requests"]
        assert llm.metrics_text() == served.metrics_text()

    async def run() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            await use(llm)

    asyncio.run(run())


def test_several_requests(serving_engines: Path, alone: Answers) -> None:
    """`handle`, with more requests than the queue holds, and wrong ones among them."""
    requests, expected = alone

    async def run() -> list[Any]:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None, queue_limit=2) as llm:
            results = await llm.handle([*requests[:12], Request(""), Request([5000])])
            counts = llm.metrics()["requests"]
            assert (counts["accepted"], counts["refused"], counts["failed"]) == (13, 1, 1)
            with pytest.raises(RequestError, match="requests is a Request: expected a list"):
                await llm.handle(Request("x"))  # type: ignore[arg-type]
            return results

    results = asyncio.run(run())
    assert [answer(result) for result in results[:12]] == expected[:12]
    assert [isinstance(result, EdgeLLMError) for result in results[12:]] == [True, True]


def test_handling_that_is_given_up_cancels_all(serving_engines: Path, slowed: Slow) -> None:
    async def run() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            slowed(llm.served)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(llm.handle([Request("hello", params=LONG)] * 6), 0.03)
            await llm.generate("hello", SHORT)
            finished = llm.metrics()["requests"]["finished"]
            assert finished == {"cancelled": 6, "length": 1}

    asyncio.run(run())


def test_a_session_before_the_model_is_open(serving_engines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made without waiting, iterated like any stream, and entered."""
    may_open = threading.Event()

    def opened(*given: Any, **named: Any) -> SpecDecodeRuntime:
        may_open.wait(60)
        return SpecDecodeRuntime(*given, **named)

    monkeypatch.setattr(edgellm.llm, "SpecDecodeRuntime", opened)

    async def run() -> None:
        llm = AsyncLLM(serving_engines, backend="numpy", drafting=None)
        with pytest.raises(RequestError, match=r"not open yet: await llm\.open"):
            _ = llm.tokenizer
        assert repr(llm) == "<AsyncLLM (loading)>"
        session = llm.create_session("hm", SHORT, overflow="error")
        assert session.messages == [{"role": "system", "content": "hm"}]
        may_open.set()
        said = "".join([chunk.text async for chunk in session.stream("1")])
        assert llm.context_length == 96
        async with session.stream("2", SamplingParams(max_tokens=2, ignore_eos=True)) as growing:
            async for chunk in growing:
                assert chunk.token_ids
                break
        assert growing.finished or (await growing.result()).finish_reason in ("cancelled", "length")
        unsaid = session.stream("never")
        assert not unsaid.finished
        answered = await session.send("3")
        contents = [message["content"] for message in session.messages]
        assert contents[:3] == ["hm", "1", said] and contents[-2:] == ["3", answered.text]
        assert "never" not in contents
        assert repr(session) == f"<AsyncSession: {len(contents)} messages, idle>"
        assert await llm.create_session() is not None  # awaited it waits for the model
        await llm.close()
        assert repr(llm).endswith("(closed)>")

    asyncio.run(run())


def test_what_is_cancelled_before_it_is_asked(serving_engines: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            stream = llm.stream("hello", LONG)
            stream.cancel()
            assert (await stream.result()).finish_reason == "cancelled"
            both = llm.stream("hello", SHORT)
            first, second = await asyncio.gather(both.result(), both.result())  # asked once
            assert first is second
            assert llm.metrics()["requests"]["accepted"] == 2

    asyncio.run(run())


def test_a_loop_that_is_left_lets_go(serving_engines: Path, slowed: Slow) -> None:
    """Of an answer that nobody holds."""

    async def run() -> dict[str, int]:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            slowed(llm.served)
            session = llm.create_session(params=LONG)
            async for _ in llm.stream("hello", LONG):
                break
            async for _ in session.stream("x"):
                break
            assert (await session.send("y", SHORT)).finish_reason == "length"
            return llm.metrics()["requests"]["finished"]

    assert asyncio.run(run()) == {"cancelled": 2, "length": 1}


class KeepsFutures(ThreadPoolExecutor):
    """Threads that keep what they did, as any do for a moment."""

    def __init__(self) -> None:
        super().__init__(1)
        self.kept: list[Future[Any]] = []

    def submit(self, *arguments: Any, **others: Any) -> Future[Any]:
        self.kept.append(super().submit(*arguments, **others))
        return self.kept[-1]


def test_the_thread_that_asked_holds_no_answer(serving_engines: Path, slowed: Slow) -> None:
    async def run() -> str:
        asyncio.get_running_loop().set_default_executor(KeepsFutures())
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            slowed(llm.served)
            session = llm.create_session(params=LONG)
            async for _ in session.stream("x"):
                break
            return (await session.send("y", SHORT)).finish_reason

    assert asyncio.run(run()) == "length"


def test_wrong_arguments_are_refused_at_the_call(serving_engines: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            for ask in (
                lambda: llm.stream(5),
                lambda: llm.stream_chat(MESSAGES, {"max_tokens": 3}),
                lambda: llm.create_session(5),
                lambda: llm.create_session("x").replace("x"),
            ):
                with pytest.raises(RequestError):
                    ask()
            with pytest.raises(RequestError):
                await llm.submit("hello")  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                await llm.observe(5)  # type: ignore[arg-type]
            with pytest.raises(RequestError):
                await llm.generate("x", images=[np.zeros((4, 4, 3), np.uint8)])
            assert llm.metrics()["requests"]["refused"] == 4

    asyncio.run(run())
