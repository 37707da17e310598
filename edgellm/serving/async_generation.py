"""The asynchronous twins of `Generation` and `Session`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from edgellm.generation import Generation
from edgellm.requests import Chunk, Request, Response, TurnOptions
from edgellm.sampling_params import SamplingParams
from edgellm.sessions import Conversation
from edgellm.text.turns import OngoingConversation, Overflow

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


class AsyncSession(Conversation[AsyncGeneration, Coroutine[Any, Any, Response]]):
    """See `Session`: a conversation that remembers what was said. `warn` is called in the thread that reads."""

    _awaits = True

    def __init__(
        self,
        ask: Callable[[Request, OngoingConversation], Generation],
        open_model: Callable[[], Awaitable[object]],
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        overflow: Overflow = "drop_oldest",
        **options: Unpack[TurnOptions],
    ) -> None:
        """`open_model` waits until the model is open, before the first message; for the others see `Session`."""
        super().__init__(ask, system, params, adapter, overflow=overflow, **options)
        self._open_model = open_model

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        """Wait until the model is open, which the first message does otherwise; gives this again."""
        yield from self._open_model().__await__()
        return self

    def _asked(self, *asked: Any) -> AsyncGeneration:
        return AsyncGeneration(lambda: self._asked_in_turn(*asked))

    def _result(self, growing: AsyncGeneration) -> Coroutine[Any, Any, Response]:
        return growing.result()

    def _to_its_end(self, running: Coroutine[Any, Any, Response]) -> Coroutine[Any, Any, Response]:
        return running

    def _call(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        awaited = inspect.iscoroutinefunction(function)
        return function(**arguments) if awaited else asyncio.to_thread(function, **arguments)

    async def _asked_in_turn(self, *asked: Any) -> Generation:
        await asyncio.sleep(0)  # a task that was cancelled in this turn gives its message up first
        await self._open_model()
        given_up = threading.Event()
        try:
            return await asked_in_thread(self._ask_turn, given_up, *asked)
        except BaseException:  # a cancellation, too, after which the thread goes on
            given_up.set()
            raise


async def asked_in_thread(ask: Callable[..., Generation], *arguments: Any) -> Generation:
    """What `ask` gives, called in a thread, which would keep its result for a while behind the call: an answer that is
    let go of ends when nobody holds it."""
    asked: list[Generation] = []
    await asyncio.to_thread(lambda: asked.append(ask(*arguments)))
    return asked.pop()
