"""The answers to one request on their way: read as they come, and cancelled together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from edgellm.asynchronous import AsyncGeneration
from edgellm.http.answers import AnswerReader, Writer
from edgellm.http.errors import HTTPError, later
from edgellm.requests import Chunk, Response
from edgellm.tool_calls.calls import all_deltas


class AnswersUnderWay:
    """Answers of the model in the form of an endpoint. Where one fails, or nobody reads on, all are cancelled."""

    def __init__(self, generations: Sequence[AsyncGeneration], readers: Sequence[AnswerReader], writer: Writer) -> None:
        self._generations, self._readers, self._writer = generations, readers, writer

    async def whole(self) -> dict[str, Any] | str:
        """All answers, when they have ended. Raises what one of them failed with."""
        try:
            responses = [await self._ended(index) for index in range(len(self._generations))]
        except BaseException:
            self._cancel()
            raise
        pieces = []
        for reader, each in zip(self._readers, responses, strict=True):
            calls = all_deltas(each.tool_calls)
            pieces.append(reader.read(Chunk(each.text, each.token_ids, (), each.logprobs or (), calls)))
        return self._writer.whole(pieces, responses)

    async def begin(self, told: Callable[[Exception], HTTPError]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, of which the first piece has come. Raises what an answer fails with until then; what
        one fails with later is the last event, as the error that it is `told` as."""
        chunks = self._chunks()
        try:
            return self._events(await anext(chunks), chunks, told)
        except BaseException:
            self._cancel()
            raise

    async def _events(
        self,
        first: tuple[int, Chunk | None],
        chunks: AsyncGenerator[tuple[int, Chunk | None], None],
        told: Callable[[Exception], HTTPError],
    ) -> AsyncGenerator[bytes, None]:
        """The events; each time all that has come since, however slowly they are taken."""
        try:
            for each in self._writer.begin():
                yield each
            index, chunk = first
            responses: dict[int, Response] = {}
            while True:
                if chunk is None:
                    responses[index] = await self._ended(index)
                    found = self._writer.ended(index, responses[index])
                else:
                    found = self._writer.piece(index, self._readers[index].read(chunk))
                if events := b"".join(found):
                    yield events
                if len(responses) == len(self._generations):
                    break
                index, chunk = await anext(chunks)
            yield b"".join(self._writer.end([responses[index] for index in sorted(responses)]))
        except Exception as error:
            for each in self._writer.failure(told(error)):
                yield each
        finally:
            await chunks.aclose()
            self._cancel()

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk | None], None]:
        """The chunks of all answers, by their indices, as they come; None is the end of one."""
        waiting = {asyncio.ensure_future(anext(each, None)): index for index, each in enumerate(self._generations)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index, chunk = waiting.pop(task), task.result()
                    if chunk is not None:
                        waiting[asyncio.ensure_future(anext(self._generations[index], None))] = index
                    yield index, chunk
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _ended(self, index: int) -> Response:
        """An answer that has ended, if nothing has cut it off: HTTPError for one that the server's end has."""
        response = await self._generations[index].result()
        if response.finish_reason == "cancelled":
            raise later(503, "the server has ended before the answer was complete", "ending", 5)
        return response

    def _cancel(self) -> None:
        for each in self._generations:
            each.cancel()  # of no account where it is finished
