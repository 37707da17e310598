"""The twins of `LLM`, `Session` and `Generation` for asyncio: no threads but the one that computes."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from edgellm.drafting.report import DraftingReport
from edgellm.embedding import EmbeddingRequest
from edgellm.errors import EdgeLLMError, QueueFullError, RequestError
from edgellm.generation import Generation
from edgellm.llm import LLM, ServedModel
from edgellm.prefilled import PrefilledStates
from edgellm.requests import Chunk, Messages, Request, RequestOptions, Response, request_list
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.serving.batch_handling import failure_of, with_others
from edgellm.serving.thread import EngineThread
from edgellm.sessions import Conversation
from edgellm.snapshots.system_prompt import CachedPrompt
from edgellm.transcription import Transcription, transcription_of, transcription_request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgellm.watching import Watch, WatchedAnswer, WatchOptions

Found = TypeVar("Found")
#: What gives such a thing when it is awaited.
Awaited = Coroutine[Any, Any, Found]


class AsyncGeneration:
    """A request on its way: `async for chunk in generation`, or `await generation.result()`.

    The model is asked when this is first iterated, awaited (which gives this again) or entered with `async with`; what
    it refuses is raised there. Reading takes whatever has come since, as one chunk. A task that is cancelled while it
    reads, leaving an `async with` block, and letting go of the object cancel the request. One task at a time reads.
    """

    def __init__(self, ask: Callable[[], Awaitable[Generation]]) -> None:
        self._ask = ask
        self._generation: Generation | None = None
        self._changed = asyncio.Event()
        self._asking = asyncio.Lock()
        self._cancelled = False

    @property
    def finished(self) -> bool:
        """Whether the answer has ended, well or not; there may be chunks to read."""
        return self._generation is not None and self._generation.finished

    def cancel(self) -> None:
        """See `Generation.cancel`."""
        self._cancelled = True
        if self._generation is not None:
            self._generation.cancel()

    async def aclose(self) -> None:
        """Cancel what is not finished."""
        if not self.finished:
            self.cancel()

    async def result(self) -> Response:
        """Wait for the whole answer. Raises what the request failed with."""
        generation = await self._begun()
        while not generation.finished:
            generation.look_ahead()
            await self._wait(generation)
        return generation.result()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        generation = await self._begun()
        while True:
            finished = generation.finished
            chunk = generation.poll()
            if chunk is not None:
                return chunk
            if finished:
                raise StopAsyncIteration
            await self._wait(generation)

    def __await__(self) -> Generator[Any, None, AsyncGeneration]:
        yield from self._begun().__await__()
        return self

    async def __aenter__(self) -> AsyncGeneration:
        return await self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _begun(self) -> Generation:
        """The request, which is asked now where it was not."""
        async with self._asking:
            if self._generation is None:
                generation = await self._ask()
                loop, changed = asyncio.get_running_loop(), self._changed

                def wake() -> None:
                    loop.call_soon_threadsafe(changed.set)

                generation.on_change(wake)
                if self._cancelled:
                    generation.cancel()
                self._generation = generation
            return self._generation

    async def _wait(self, generation: Generation) -> None:
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            generation.cancel()
            raise
        self._changed.clear()


class AsyncSession(Conversation[AsyncGeneration, Awaited[Response]]):
    """See `Session`: a conversation that remembers what was said. `warn` is called in the thread that reads."""

    _awaits = True
    #: Waits until the model is open, before the first message.
    _open_model: Callable[[], Awaitable[object]]

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        """Wait until the model is open, which the first message does otherwise; gives this again."""
        yield from self._open_model().__await__()
        return self

    def _asked(self, *turn: Any) -> AsyncGeneration:
        return AsyncGeneration(lambda: self._asked_in_turn(*turn))

    def _result(self, growing: AsyncGeneration) -> Awaited[Response]:
        return growing.result()

    def _to_its_end(self, running: Awaited[Response]) -> Awaited[Response]:
        return running

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        awaited = inspect.iscoroutinefunction(function)
        return function(**arguments) if awaited else asyncio.to_thread(function, **arguments)

    async def _asked_in_turn(self, *turn: Any) -> Generation:
        await asyncio.sleep(0)  # a task that was cancelled in this turn gives its message up first
        await self._open_model()
        given_up = threading.Event()
        try:
            return await asked_in_thread(self._ask_turn, given_up, *turn)
        except BaseException:  # a cancellation, too, after which the thread goes on
            given_up.set()
            raise


class AsyncWatch:
    """A `Watch` for asyncio: `async for answer in llm.watch(camera, question)`; `watch` is the watch itself, whose
    `question` may be set.

    A thread waits for its frames. A task that is cancelled while it waits, and leaving an `async with` block, close it.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __aiter__(self) -> AsyncIterator[WatchedAnswer]:
        return self

    async def __anext__(self) -> WatchedAnswer:
        try:
            answer = await asyncio.to_thread(next, self.watch, None)
        except asyncio.CancelledError:
            self.watch.close()
            raise
        if answer is None:
            raise StopAsyncIteration
        return answer

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.watch.close)


class AsyncLLM(
    ServedModel[
        AsyncGeneration,
        Awaited[Response],
        AsyncSession,
        Awaited[CachedPrompt],
        Awaited[DraftingReport | None],
        Awaited[PrefilledStates],
        Awaited[None],
        Awaited[np.ndarray],
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

    async def transcribe(
        self,
        source: Any,
        language: str | None = None,
        prompt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Transcription:
        """See `LLM.transcribe`."""
        family = self.directory.config.family
        request = transcription_request(family, source, language, prompt, adapter=adapter, **options)
        return transcription_of(await self._answered(request, 1), language)

    def watch(
        self,
        stream: Any,
        question: str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[WatchOptions],
    ) -> AsyncWatch:
        """See `LLM.watch`; the model must be open."""
        _ = self._runtime  # raises where it is not
        return AsyncWatch(self.served.watch(stream, question, params, adapter, **options))

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

    async def _embedded(self, request: EmbeddingRequest) -> np.ndarray:
        await self.open()
        with self._thread.metrics.counting_refusals():
            ids = await asyncio.to_thread(self._runtime.embedding_ids, request)
        return await self._vectors(request, ids)

    async def _vectors(self, request: EmbeddingRequest, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """The embeddings of a request, by the tokens of its texts; others have their turn between two of them."""
        return np.stack([await self.call(partial(SpecDecodeRuntime.embed, request=request, ids=each)) for each in ids])

    def _streamed(self, request: Request) -> AsyncGeneration:
        return AsyncGeneration(lambda: self._ask(self.served.submit, request))

    def _session(self, *arguments: Any, **options: Any) -> AsyncSession:
        session = AsyncSession(self.served._submit, *arguments, **options)
        session._open_model = self.open
        return session

    async def _answered(self, request: Request, n: int) -> Response:
        requests = request.repeated(n)
        if len(requests) > 1:
            return with_others(await self.handle(requests))
        return await self._streamed(request).result()

    async def _ask(self, ask: Callable[[Request], Generation], request: Request) -> Generation:
        """Ask when the model is open, in a thread where that reads images: it would keep the event loop waiting."""
        await self.open()
        shows_media = isinstance(request, Request) and request.shows_media
        return await asked_in_thread(ask, request) if shows_media else ask(request)

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


async def asked_in_thread(ask: Callable[..., Generation], *arguments: Any) -> Generation:
    """What `ask` gives, called in a thread, which would keep its result for a while behind the call: an answer that is
    let go of ends when nobody holds it."""
    asked: list[Generation] = []
    await asyncio.to_thread(lambda: asked.append(ask(*arguments)))
    return asked.pop()


async def _result(generation: AsyncGeneration | EdgeLLMError) -> Response | EdgeLLMError:
    if isinstance(generation, EdgeLLMError):
        return generation
    try:
        return await generation.result()
    except Exception as error:
        return failure_of(error)
