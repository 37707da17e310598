"""`ServedLLM`: a model that many threads ask at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from edgellm.decoding import Clock, DecodingLoop
from edgellm.engine_thread import QUEUE_LIMIT, EngineThread
from edgellm.errors import EdgeLLMError, QueueFullError, RequestError
from edgellm.generation import Generation
from edgellm.llm import LLM, Messages
from edgellm.responses import Response
from edgellm.sampling_params import SamplingParams
from edgellm.sessions import Session

if TYPE_CHECKING:
    from edgellm.drafting import DraftingConfig
    from edgellm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """What is asked of a model: a `prompt` (text, or token ids as they are) or a conversation (`messages`, rendered by
    the chat template), with its sampling and limits, the LoRA adapter's name, and a deadline in seconds."""

    prompt: str | Sequence[int] | None = None
    messages: Messages | None = None
    params: SamplingParams | None = None
    adapter: str | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("a request has either a prompt or messages: give one of them")


class ServedLLM:
    """A language model with a thread of its own, which any threads ask at once.

    Takes the arguments of `LLM`. As many requests are computed together as the engines were built for; up to
    `queue_limit` wait, first come, first served. Each has its own sampling, limits, stop strings, adapter and deadline,
    and the answer that it would have alone. Use it as a context manager, or call `close`, which ends what is under way.
    """

    def __init__(
        self, engine_directory: str | Path | None = None, *, queue_limit: int = QUEUE_LIMIT, **options: Any
    ) -> None:
        self._thread = start_engine(engine_directory, queue_limit, options)
        self._llm = self._thread.opened.result().llm

    @classmethod
    def of_thread(cls, thread: EngineThread[OpenedLLM]) -> ServedLLM:
        """The model of a thread that has opened it."""
        served = cls.__new__(cls)
        served._thread, served._llm = thread, thread.opened.result().llm
        return served

    @property
    def backend_name(self) -> str:
        """ "tensorrt" or "numpy"."""
        return self._llm.backend_name

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._llm.tokenizer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that a request can choose."""
        return self._llm.adapters

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer can have together."""
        return self._llm.context_length

    def submit(self, request: Request) -> Generation:
        """Queue a request; the answer comes by and by.

        Raises RequestError or AdapterError for what is wrong with it, QueueFullError, RequestError after `close`.
        """
        self._thread.check()
        clock, params = Clock(), (request.params or SamplingParams()).seeded()
        sequence = self._llm._sequence(self._prompt_ids(request), params, request.adapter, clock)
        return self._thread.submit(sequence, request.deadline)

    def handle(self, requests: Sequence[Request]) -> list[Response | EdgeLLMError]:
        """Answer several requests, as many at a time as fit; the results are in their order.

        One that fails has its error for a result, and the others go on.
        """
        asked: list[Generation | EdgeLLMError] = []
        unfinished: deque[Generation] = deque()
        try:
            for request in requests:
                asked.append(self._submit_when_possible(request, unfinished))
            return [_result(each) for each in asked]
        finally:
            for generation in unfinished:
                if not generation.finished:
                    generation.cancel()

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **more: Any) -> Response:
        """Complete a prompt without a chat template; `more` are `adapter` and `deadline` (see `Request`)."""
        return self.stream(prompt, params, **more).result()

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None, **more: Any) -> Generation:
        """As `generate`, but returns the answer as it grows."""
        return self.submit(Request(prompt=prompt, params=params, **more))

    def chat(self, messages: Messages, params: SamplingParams | None = None, **more: Any) -> Response:
        """Answer a conversation; `more` are `adapter` and `deadline` (see `Request`)."""
        return self.stream_chat(messages, params, **more).result()

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None, **more: Any) -> Generation:
        """As `chat`, but returns the answer as it grows."""
        return self.submit(Request(messages=messages, params=params, **more))

    def create_session(
        self, system: str | None = None, params: SamplingParams | None = None, adapter: str | None = None
    ) -> Session:
        """A conversation that remembers what was said, with an optional system prompt."""
        return Session(self.stream_chat, system, params, adapter)

    def cache_system_prompt(self, text: str, adapter: str | None = None, save: str | Path | None = None) -> Any:
        """See `LLM.cache_system_prompt`; waits until requests that came before are answered."""
        return self.call(lambda llm: llm.cache_system_prompt(text, adapter, save)).result()

    def use_drafting(self, drafting: DraftingConfig | None) -> None:
        """See `LLM.use_drafting`; requests that came before are answered as they were asked."""
        self.call(lambda llm: llm.use_drafting(drafting)).result()

    def call(self, function: Callable[[LLM], Any]) -> Future[Any]:
        """Run a function of the `LLM` in its thread, in turn, when no request is being computed."""
        return self._thread.call(lambda opened: function(opened.llm))

    def metrics(self) -> dict[str, Any]:
        """What was done so far (`Metrics.snapshot`), and how many requests wait and run."""
        return self._thread.metrics.snapshot() | {name: value for name, (_, value) in self._gauges().items()}

    def metrics_text(self) -> str:
        """The metrics in Prometheus's text form."""
        return self._thread.metrics.prometheus(self._gauges())

    def close(self) -> None:
        """End all requests as cancelled and free everything."""
        self._thread.close()

    def __enter__(self) -> ServedLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prompt_ids(self, request: Request) -> list[int]:
        if request.messages is not None:
            return self.tokenizer.encode_chat(request.messages)
        return self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else list(request.prompt or ())

    def _submit_when_possible(self, request: Request, unfinished: deque[Generation]) -> Generation | EdgeLLMError:
        """Submit a request, waiting for earlier ones of the same caller where the queue is full."""
        while True:
            try:
                generation = self.submit(request)
            except QueueFullError as error:
                if not unfinished:
                    return error
                _result(unfinished.popleft())
            except EdgeLLMError as error:
                return error
            else:
                unfinished.append(generation)
                return generation

    def _gauges(self) -> Mapping[str, tuple[str, int]]:
        return {
            "requests_waiting": ("Requests that wait for a slot.", self._thread.waiting),
            "requests_running": ("Requests that are being computed.", self._thread.running),
        }


class OpenedLLM:
    """An `LLM` as the engine of a thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def loop(self) -> DecodingLoop:
        """See `Engine`."""
        return self.llm._loop()

    def close(self) -> None:
        """See `Engine`."""
        self.llm.close()


def start_engine(
    engine_directory: str | Path | None, queue_limit: int, options: Mapping[str, Any]
) -> EngineThread[OpenedLLM]:
    """A thread that opens an `LLM`, on which all work with the GPU is done."""
    return EngineThread(lambda: OpenedLLM(LLM(engine_directory, **options)), queue_limit)


def _result(asked: Generation | EdgeLLMError) -> Response | EdgeLLMError:
    if isinstance(asked, EdgeLLMError):
        return asked
    try:
        return asked.result()
    except EdgeLLMError as error:
        return error
    except Exception as error:
        failure = RequestError(f"the request failed with {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
