"""`Stream`: an answer as it grows, and the response that it becomes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from edgellm.decoding import DecodingSequence
from edgellm.errors import RequestError
from edgellm.responses import Chunk, Response, Usage
from edgellm.sampling_params import SamplingParams


class Stream:
    """An answer as it grows: iterate over its `Chunk`s; afterwards `response` is there.

    It must be finished, cancelled or closed before the next request starts; leaving a `with` block closes it.
    """

    def __init__(
        self,
        steps: Iterator[tuple[DecodingSequence, int, str]],
        sequence: DecodingSequence,
        params: SamplingParams,
        release: Callable[[], None],
    ) -> None:
        self.params = params
        self._sequence, self._answer = sequence, sequence.answer
        self._steps, self._release = steps, release
        self._cancelled = threading.Event()
        self._open = True
        self._response: Response | None = None

    @property
    def response(self) -> Response:
        """The whole answer; raises RequestError while it is still growing, or if it failed."""
        if self._response is None:
            raise RequestError("the answer is not finished: iterate to the end, or call finish() or cancel()")
        return self._response

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if not self._open:
            raise StopIteration
        if self._cancelled.is_set():
            return self._cancelled_chunk()
        try:
            _, token, text = next(self._steps)
        except StopIteration:
            self._end()
            raise
        except Exception:
            self._end(failed=True)
            raise
        except BaseException:  # an interrupt leaves a partial answer that the caller may want
            self.close()
            raise
        return Chunk(text, (token,))

    def cancel(self) -> None:
        """End the answer at the next token with finish reason "cancelled"; may be called from any thread."""
        self._cancelled.set()

    def finish(self) -> Response:
        """Read to the end and return the response."""
        for _ in self:
            pass
        return self.response

    def close(self) -> None:
        """End the answer now, as cancelled if it was still growing."""
        if self._open:
            self._answer.finish("cancelled")
            self._end()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()

    def _cancelled_chunk(self) -> Chunk:
        """The text that was held back, as a last chunk."""
        text = self._answer.finish("cancelled")
        self._end()
        if not text:
            raise StopIteration
        return Chunk(text, ())

    def _end(self, failed: bool = False) -> None:
        self._open = False
        try:
            self._steps.close()
        finally:
            self._release()
        if failed:
            return
        self._response = finished_response(self._sequence)


def finished_response(sequence: DecodingSequence) -> Response:
    """The response to a request that has ended; one that was closed before it began took no time."""
    answer, clock = sequence.answer, sequence.clock
    if clock.started == 0.0:
        clock.started = clock.accepted
    return Response(
        answer.text,
        answer.token_ids,
        answer.finish_reason or "cancelled",
        Usage(len(sequence.prompt_ids), sequence.reused_tokens, answer.token_count),
        clock.timings(),
        answer.stop_match,
        None if sequence.tally is None else sequence.tally.statistics(),
    )
