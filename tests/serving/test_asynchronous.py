"""The asynchronous twins."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from served_answers import Answers

from edgellm import SamplingParams
from edgellm.asynchronous import AsyncLLM
from edgellm.drafting.config import DraftingConfig
from edgellm.errors import EngineError, RequestError
from edgellm.requests import Request

LONG = SamplingParams(max_tokens=80, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


def test_many_tasks_without_threads(serving_engines: Path, alone: Answers, drafting: DraftingConfig | None) -> None:
    requests, expected = (each[:24] for each in alone)

    async def ask_all() -> None:
        before = {*threading.enumerate()}  # of which those of earlier tests may end meanwhile
        async with AsyncLLM(serving_engines, backend="numpy", drafting=drafting) as llm:

            async def ask(request: Request) -> tuple[tuple[int, ...], str, str]:
                generation = await llm.submit(request)
                chunks = [chunk async for chunk in generation]
                response = await generation.result()
                assert tuple(token for chunk in chunks for token in chunk.token_ids) == response.token_ids
                return response.token_ids, "".join(chunk.text for chunk in chunks), response.finish_reason

            tasks = [asyncio.create_task(ask(request)) for request in requests]
            await asyncio.sleep(0)
            own = [each.name for each in {*threading.enumerate()} - before]
            assert [name for name in own if "rank" not in name] == ["edgellm-engine"]
            assert await asyncio.gather(*tasks) == expected
        assert not {*threading.enumerate()} - before

    asyncio.run(ask_all())


def test_streams_errors_and_the_loop_staying_free(serving_engines: Path) -> None:
    async def talk() -> None:
        async with AsyncLLM(serving_engines, backend="numpy", drafting=None) as llm:
            expected = await llm.generate("hello", LONG)
            go_on = threading.Event()
            llm.served.call(lambda _: go_on.wait(20))  # the model waits for the event loop

            async def beat() -> None:
                for _ in range(4):
                    await asyncio.sleep(0.001)
                go_on.set()

            heart = asyncio.create_task(beat())
            text = "".join([chunk.text async for chunk in llm.stream("hello", LONG)])
            assert (text, heart.done()) == (expected.text, True)
            messages = [{"role": "user", "content": "hi"}]
            chat = await llm.chat(messages, SHORT)
            assert "".join([chunk.text async for chunk in llm.stream_chat(messages, SHORT)]) == chat.text
            with pytest.raises(EngineError, match=r"0\.\.319"):
                await llm.generate([5000])
            with pytest.raises(RequestError, match="empty"):
                await llm.generate("")
            assert (await llm.generate("hello", LONG, deadline=0.005)).finish_reason == "deadline"

    asyncio.run(talk())


def test_use_after_close_and_an_event_loop_that_ends_first(serving_engines: Path) -> None:
    llm = AsyncLLM(serving_engines, backend="numpy", drafting=None)

    async def begin() -> object:
        await llm.open()
        generation = await llm.submit(Request(prompt="hello", params=LONG))
        return generation._generation

    generation = asyncio.run(begin())
    assert generation.result().finish_reason in ("cancelled", "length")

    async def end() -> None:
        await llm.close()
        with pytest.raises(RequestError, match="closed"):
            await llm.generate("hello")

    asyncio.run(end())


def test_a_model_that_cannot_be_opened(tmp_path: Path) -> None:
    async def open_it() -> None:
        with pytest.raises(Exception, match=str(tmp_path)):
            await AsyncLLM(tmp_path).open()

    asyncio.run(open_it())
