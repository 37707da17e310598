"""The asynchronous twin of `LLM`, for asyncio: no threads but the one that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgellm.errors import EdgeLLMError, QueueFullError, RequestError
from edgellm.generation import Generation
from edgellm.llm import LLM, ServedModel, with_others
from edgellm.requests import Messages, Request, RequestOptions, Response, request_list
from edgellm.runtime import SpecDecodeRuntime
from edgellm.serving.async_generation import AsyncGeneration, AsyncSession, asked_in_thread
from edgellm.serving.batch_handling import failure_of
from edgellm.serving.thread import EngineThread

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgellm.drafting.config import DraftingConfig
    from edgellm.drafting.controller import DraftingReport
    from edgellm.observing.observer import Observer
    from edgellm.snapshots.system_prompt import CachedPrompt, SystemPrompt, Tools


class AsyncLLM(ServedModel[AsyncGeneration, Coroutine[Any, Any, Response], AsyncSession]):
    """A language model for programs on asyncio: `async with AsyncLLM(...) as llm`.

    It has what `LLM` has, under the same names and with the same arguments; what waits there is awaited here, and
    `stream`, `stream_chat` and `AsyncSession.stream` give an `AsyncGeneration`: `async for chunk in llm.stream(...)`.
    Sessions may be made while the model is loading still: the first message waits for it.

    Opening, reading images, answering and closing leave the event loop free; prompts are tokenized in it, and a
    request's `stop_when` is called in it. The model is loaded from when this is made on: what is asked before it is
    open waits for that, and only properties of the model (`tokenizer`, `adapters`, ...) raise RequestError until then.
    """

    def _own(self, thread: EngineThread[SpecDecodeRuntime]) -> None:
        self._thread = thread
        #: The same model for threads.
        self.served = LLM.of_thread(thread)
        self._is_open = False

    async def open(self) -> AsyncLLM:
        """Wait until the model is loaded; raises what loading it raised."""
        if not self._is_open:
            await asyncio.shield(asyncio.wrap_future(self._thread.opened))
            self._is_open = True
        return self

    @property
    async def drafting_report(self) -> DraftingReport | None:
        """See `LLM.drafting_report`; `await llm.drafting_report`."""
        return await self.call(lambda runtime: runtime.drafting_report)

    async def submit(self, request: Request) -> AsyncGeneration:
        """See `LLM.submit`."""
        return await self._streamed(request)

    async def handle(self, requests: Sequence[Request]) -> list[Response | EdgeLLMError]:
        """See `LLM.handle`."""
        answers: list[asyncio.Task[Response | EdgeLLMError]] = []
        try:
            for request in request_list(requests):
                answers.append(asyncio.create_task(_result(await self._asked_when_possible(request, answers))))
            return list(await asyncio.gather(*answers))
        finally:
            for task in answers:
                task.cancel()

    async def count_tokens(self, prompt: str | Sequence[int] | Messages, **options: Unpack[RequestOptions]) -> int:
        """See `LLM.count_tokens`."""
        await self.open()
        return await asyncio.to_thread(self.served.count_tokens, prompt, **options)

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
        return await self.call(
            lambda runtime: runtime.generate_and_save_system_prompt_kv_cache(
                text, adapter, save, tools=tools, template_variables=template_variables
            )
        )

    async def load_snapshot(self, path: str | Path, adapters: Sequence[str | None] | None = None) -> CachedPrompt:
        """See `LLM.load_snapshot`."""
        return await self.call(lambda runtime: runtime.load_snapshot(path, adapters))

    async def use_drafting(self, drafting: DraftingConfig | None) -> None:
        """See `LLM.use_drafting`."""
        await self.call(lambda runtime: runtime.use_drafting(drafting))

    async def observe(self, observer: Observer | None) -> None:
        """See `LLM.observe`."""
        await self.call(lambda runtime: runtime.observe(observer))

    async def call(self, function: Callable[[SpecDecodeRuntime], Any]) -> Any:
        """See `LLM.call`; gives what the function returns."""
        await self.open()
        return await asyncio.wrap_future(self.served.call(function))

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

    @property
    def _runtime(self) -> SpecDecodeRuntime:
        """The model, which does not keep the event loop waiting."""
        if not self._thread.opened.done():
            raise RequestError("the model is not open yet: await llm.open() first, or use it in `async with`")
        return self._thread.opened.result()

    def _streamed(self, request: Request) -> AsyncGeneration:
        return AsyncGeneration(lambda: self._ask(self.served.submit, request))

    def _session(self, *arguments: Any, **options: Any) -> AsyncSession:
        return AsyncSession(self.served._submit, self.open, *arguments, **options)

    async def _answered(self, request: Request, n: int) -> Response:
        requests = request.repeated(n)
        if len(requests) > 1:
            return with_others(await self.handle(requests))
        return await self._streamed(request).result()

    async def _ask(self, ask: Callable[[Request], Generation], request: Request) -> Generation:
        """Ask when the model is open, in a thread where that reads images: it would keep the event loop waiting."""
        await self.open()
        shows_images = isinstance(request, Request) and request.shows_images
        return await asked_in_thread(ask, request) if shows_images else ask(request)

    async def _asked_when_possible(
        self, request: Request, answers: Sequence[asyncio.Task[Any]]
    ) -> AsyncGeneration | EdgeLLMError:
        """Ask, waiting for earlier requests of the same caller where the queue is full."""
        while True:
            try:
                return await AsyncGeneration(lambda: self._ask(self.served._queued, request))
            except EdgeLLMError as error:
                unfinished = [task for task in answers if not task.done()]
                if not isinstance(error, QueueFullError) or not unfinished:
                    self._thread.metrics.refused()
                    return error
                await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)


async def _result(generation: AsyncGeneration | EdgeLLMError) -> Response | EdgeLLMError:
    if isinstance(generation, EdgeLLMError):
        return generation
    try:
        return await generation.result()
    except Exception as error:
        return failure_of(error)
