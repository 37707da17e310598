"""The asynchronous twins of `LLM` and `Generation`, for asyncio: no threads but the one that computes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgellm.generation import Generation
from edgellm.llm import LLM, start_runtime
from edgellm.requests import Chunk, Messages, Request, Response
from edgellm.sampling_params import SamplingParams
from edgellm.serving.thread import QUEUE_LIMIT
from edgellm.sessions import Content, Session

if TYPE_CHECKING:
    from edgellm.snapshots.system_prompt import CachedPrompt, SystemPrompt, Tools


class AsyncGeneration:
    """A request on its way: `async for chunk in generation`, or `await generation.result()`.

    Reading takes whatever has come since, as one chunk. A task that is cancelled while it reads, and leaving an `async
    with` block, cancel the request. One task at a time reads.
    """

    def __init__(self, generation: Generation) -> None:
        """Belongs to the running event loop."""
        self._generation = generation
        self._changed = asyncio.Event()
        loop, changed = asyncio.get_running_loop(), self._changed

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        generation.on_change(wake)

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, well or not; there may be chunks to read."""
        return self._generation.finished

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        self._generation.cancel()

    async def result(self) -> Response:
        """Wait for the whole answer. Raises what the request failed with."""
        while not self._generation.finished:
            await self._wait()
        return self._generation.result()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            finished = self._generation.finished
            chunk = self._generation.poll()
            if chunk is not None:
                yield chunk
            elif finished:
                return
            else:
                await self._wait()

    async def __aenter__(self) -> AsyncGeneration:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.finished:
            self.cancel()

    async def _wait(self) -> None:
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._changed.clear()


class AsyncSession:
    """See `Session`: a conversation that remembers what was said."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def messages(self) -> list[dict[str, Any]]:
        """See `Session.messages`."""
        return self._session.messages

    def replace(self, messages: Messages) -> None:
        """See `Session.replace`."""
        self._session.replace(messages)

    async def stream(
        self, content: Content, params: SamplingParams | None = None, deadline: float | None = None
    ) -> AsyncGeneration:
        """See `Session.stream`."""
        await asyncio.sleep(0)  # a task that was cancelled in this turn gives its message up first
        given_up = threading.Event()
        try:
            generation = await asyncio.to_thread(self._session._say, content, params, deadline, given_up)
        except BaseException:  # a cancellation, too, after which the thread goes on
            given_up.set()
            raise
        return AsyncGeneration(generation)

    async def send(
        self, content: Content, params: SamplingParams | None = None, deadline: float | None = None
    ) -> Response:
        """See `Session.send`."""
        return await (await self.stream(content, params, deadline)).result()


class AsyncLLM:
    """A language model for programs on asyncio: `async with AsyncLLM(...) as llm`. Arguments as `LLM`'s.

    Opening, reading images, answering and closing leave the event loop free; prompts are tokenized in it.
    """

    def __init__(
        self, engine_directory: str | Path | None = None, *, queue_limit: int = QUEUE_LIMIT, **options: Any
    ) -> None:
        self._thread = start_runtime(engine_directory, queue_limit, **options)
        #: The same model for threads.
        self.served = LLM.of_thread(self._thread)
        self._is_open = False

    async def open(self) -> AsyncLLM:
        """Wait until the model is loaded; raises what loading it raised."""
        if not self._is_open:
            await asyncio.shield(asyncio.wrap_future(self._thread.opened))
            self._is_open = True
        return self

    async def submit(self, request: Request) -> AsyncGeneration:
        """See `LLM.submit`."""
        await self.open()
        if request.shows_images:  # reading them would keep the event loop waiting
            return AsyncGeneration(await asyncio.to_thread(self.served.submit, request))
        return AsyncGeneration(self.served.submit(request))

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **more: Any
    ) -> Response:
        """See `LLM.generate`."""
        return await (await self.submit(Request(prompt=prompt, params=params, **more))).result()

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **more: Any) -> Response:
        """See `LLM.chat`."""
        return await (await self.submit(Request(messages=messages, params=params, **more))).result()

    async def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **more: Any
    ) -> AsyncIterator[Chunk]:
        """`async for chunk in llm.stream(...)`; leaving the loop early cancels the request."""
        async with await self.submit(Request(prompt=prompt, params=params, **more)) as generation:
            async for chunk in generation:
                yield chunk

    async def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **more: Any
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for a conversation."""
        async with await self.submit(Request(messages=messages, params=params, **more)) as generation:
            async for chunk in generation:
                yield chunk

    async def create_session(
        self, system: str | None = None, params: SamplingParams | None = None, adapter: str | None = None
    ) -> AsyncSession:
        """See `LLM.create_session`."""
        await self.open()
        return AsyncSession(self.served.create_session(system, params, adapter))

    async def cache_system_prompt(
        self,
        text: SystemPrompt,
        adapter: str | None = None,
        save: str | Path | None = None,
        *,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> CachedPrompt:
        """See `LLM.cache_system_prompt`."""
        await self.open()
        kept = self.served.call(
            lambda runtime: runtime.generate_and_save_system_prompt_kv_cache(
                text, adapter, save, tools=tools, template_variables=template_variables
            )
        )
        return await asyncio.wrap_future(kept)

    async def close(self) -> None:
        """End all requests as cancelled and free everything."""
        await asyncio.shield(asyncio.wrap_future(self._thread.stop()))
        self._thread.close()  # at its very end already

    async def __aenter__(self) -> AsyncLLM:
        try:
            return await self.open()
        except BaseException:  # a cancellation, too: what is being loaded is closed as soon as it is there
            self._thread.stop()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
