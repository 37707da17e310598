"""The asynchronous twin of `LLM`, for asyncio: no threads but the one that computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.drafting.controller import DraftingReport
from edgellm.errors import EdgeLLMError, QueueFullError, RequestError
from edgellm.generation import Generation
from edgellm.llm import LLM, ServedModel, with_others
from edgellm.requests import Messages, Request, RequestOptions, Response, request_list
from edgellm.runtime import SpecDecodeRuntime
from edgellm.serving.async_generation import AsyncGeneration, AsyncSession, asked_in_thread
from edgellm.serving.batch_handling import failure_of
from edgellm.serving.thread import EngineThread
from edgellm.snapshots.system_prompt import CachedPrompt

if TYPE_CHECKING:
    from typing_extensions import Unpack

Found = TypeVar("Found")
#: What gives such a thing when it is awaited.
Awaited = Coroutine[Any, Any, Found]


class AsyncLLM(
    ServedModel[
        AsyncGeneration,
        Awaited[Response],
        AsyncSession,
        Awaited[CachedPrompt],
        Awaited[DraftingReport | None],
        Awaited[None],
    ]
):
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

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def _runtime(self) -> SpecDecodeRuntime:
        """The model, which does not keep the event loop waiting."""
        if not self._thread.opened.done():
            raise RequestError("the model is not open yet: await llm.open() first, or use it in `async with`")
        return self._thread.opened.result()

    def _called(self, function: Callable[[SpecDecodeRuntime], Any]) -> Any:
        return self.call(function)

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
