"""The asynchronous twins of `Generation` and `Session`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from edgellm.generation import Generation
from edgellm.requests import Chunk, Response, StopWhen
from edgellm.sampling_params import SamplingParams
from edgellm.sessions import Content, Session


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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


class AsyncSession:
    """See `Session`: a conversation that remembers what was said."""

    def __init__(self, session: Session, open_model: Callable[[], Awaitable[object]]) -> None:
        """`open_model` waits until the model is open, before the first message."""
        self._session, self._open_model = session, open_model

    @property
    def messages(self) -> list[dict[str, Any]]:
        """See `Session.messages`."""
        return self._session.messages

    def replace(self, messages: Sequence[dict[str, Any]]) -> None:
        """See `Session.replace`."""
        self._session.replace(messages)

    @property
    def system(self) -> Any:
        """See `Session.system`."""
        return self._session.system

    @system.setter
    def system(self, content: Any) -> None:
        self._session.system = content

    @property
    def params(self) -> SamplingParams | None:
        """See `Session.params`."""
        return self._session.params

    @params.setter
    def params(self, params: SamplingParams | None) -> None:
        self._session.params = params

    @property
    def adapter(self) -> str | None:
        """See `Session.adapter`."""
        return self._session.adapter

    @adapter.setter
    def adapter(self, adapter: str | None) -> None:
        self._session.adapter = adapter

    @property
    def priority(self) -> int:
        """See `Session.priority`."""
        return self._session.priority

    @priority.setter
    def priority(self, priority: int) -> None:
        self._session.priority = priority

    @property
    def tool_choice(self) -> Any:
        """See `Session.tool_choice`."""
        return self._session.tool_choice

    @tool_choice.setter
    def tool_choice(self, tool_choice: Any) -> None:
        self._session.tool_choice = tool_choice

    @property
    def warn(self) -> Callable[[str], object]:
        """See `Session.warn`; it is called in the thread that reads."""
        return self._session.warn

    @warn.setter
    def warn(self, warn: Callable[[str], object]) -> None:
        self._session.warn = warn

    def trim(self, turns: int) -> int:
        """See `Session.trim`."""
        return self._session.trim(turns)

    def undo(self) -> list[dict[str, Any]]:
        """See `Session.undo`."""
        return self._session.undo()

    def take_in(self) -> None:
        """See `Session.take_in`."""
        self._session.take_in()

    def retry(
        self,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
    ) -> AsyncGeneration:
        """See `Session.retry`. It is asked when the answer is first iterated, awaited or entered."""
        return AsyncGeneration(lambda: self._asked(self._session._retry, params, deadline, stop_when))

    def stream(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
    ) -> AsyncGeneration:
        """See `Session.stream`. It is said when the answer is first iterated, awaited or entered."""
        params = self._session._asked_params(params, structure, response_format)
        return AsyncGeneration(lambda: self._asked(self._session._say, content, params, deadline, stop_when))

    async def send(
        self,
        content: Content,
        params: SamplingParams | None = None,
        deadline: float | None = None,
        *,
        stop_when: StopWhen | None = None,
        structure: Any = None,
        response_format: Any = None,
    ) -> Response:
        """See `Session.send`."""
        return await self.stream(
            content, params, deadline, stop_when=stop_when, structure=structure, response_format=response_format
        ).result()

    def __await__(self) -> Generator[Any, None, AsyncSession]:
        """Wait until the model is open, which the first message does otherwise; gives this again."""
        yield from self._open_model().__await__()
        return self

    def __repr__(self) -> str:
        return repr(self._session).replace("Session", "AsyncSession", 1)

    async def _asked(self, ask: Callable[..., Generation], *arguments: Any) -> Generation:
        await asyncio.sleep(0)  # a task that was cancelled in this turn gives its message up first
        await self._open_model()
        given_up = threading.Event()
        try:
            return await asked_in_thread(ask, *arguments, given_up)
        except BaseException:  # a cancellation, too, after which the thread goes on
            given_up.set()
            raise


async def asked_in_thread(ask: Callable[..., Generation], *arguments: Any) -> Generation:
    """What `ask` gives, called in a thread, which would keep its result for a while behind the call: an answer that is
    let go of ends when nobody holds it."""
    asked: list[Generation] = []
    await asyncio.to_thread(lambda: asked.append(ask(*arguments)))
    return asked.pop()
