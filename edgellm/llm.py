"""`LLM`: a model with a thread of its own, which any threads ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar
from weakref import finalize

import numpy as np

from edgellm.drafting.config import DraftingConfig
from edgellm.drafting.report import DraftingReport
from edgellm.embedding import Embedding, EmbeddingRequest, Vectors
from edgellm.engines.closing import Closing
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.errors import EdgeLLMError, EngineError, require_kind
from edgellm.generation import Generation
from edgellm.metrics import Metrics
from edgellm.prefilled import PrefilledStates
from edgellm.requests import Messages, Request, RequestOptions, Response, TurnOptions
from edgellm.runtime import SpecDecodeRuntime
from edgellm.sampling_params import SamplingParams
from edgellm.serving.batch_handling import handle_requests, with_others
from edgellm.serving.thread import QUEUE_LIMIT, EngineThread
from edgellm.sessions import Answer, Growing, Session
from edgellm.snapshots.kept_on_host import PREEMPTION_BUDGET, STATE_BUDGET
from edgellm.snapshots.store import MEMORY_BUDGET
from edgellm.snapshots.system_prompt import CachedPrompt, SystemPrompt, Tools
from edgellm.text.tokenizer import Tokenizer
from edgellm.text.turns import OngoingConversation, Overflow
from edgellm.tracing import Observer
from edgellm.transcription import Transcription, transcription_of, transcription_request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from edgellm.watching import Watch, WatchOptions


#: `Session`, or `AsyncSession`.
Conversing = TypeVar("Conversing")
#: A `CachedPrompt`, a `DraftingReport` or None, a `PrefilledStates`, and None; of `AsyncLLM` what gives them when it is
#: awaited.
Cached = TypeVar("Cached")
Report = TypeVar("Report")
Prefilled = TypeVar("Prefilled")
Done = TypeVar("Done")


def _of_runtime(name: str) -> Any:
    """A property of the open model's runtime, under the same name."""
    return property(attrgetter(f"_runtime.{name}"))


class ServedModel(Embedding[Vectors], Generic[Growing, Answer, Conversing, Cached, Report, Prefilled, Done, Vectors]):
    """What `LLM` and `AsyncLLM` have in common: how they are opened and asked, what they say of their model."""

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        *,
        multimodal_engine_directory: str | Path | None = None,
        backend: str = "auto",
        executor: str = "auto",
        gpu: int | None = None,
        gpus: int = 1,
        kv_cache: str | None = None,
        hidden_layers: Sequence[int] | None = None,
        revision: str | None = None,
        update: bool = False,
        build: Mapping[str, Any] | None = None,
        mmproj: str | Path | None = None,
        drafting: DraftingConfig | Literal["auto"] | None = "auto",
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        snapshots: Sequence[str | Path] = (),
        snapshot_budget: int = MEMORY_BUDGET,
        preemption_budget: int = PREEMPTION_BUDGET,
        state_budget: int = STATE_BUDGET,
        progress: Callable[[int, int], None] | None = None,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "queue_limit")}
        metrics = Metrics()
        open_runtime = partial(SpecDecodeRuntime, **given, metrics=metrics)
        self._own(EngineThread(open_runtime, metrics, queue_limit))

    def _own(self, thread: EngineThread[SpecDecodeRuntime]) -> None:
        self._thread = thread

    @property
    def _runtime(self) -> SpecDecodeRuntime:
        return self._thread.opened.result()

    directory: EngineDirectory = _of_runtime("directory")
    """The engine directory."""
    backend_name: str = _of_runtime("backend_name")
    """"tensorrt" or "numpy"."""
    gpu: int | None = _of_runtime("gpu")
    """See `SpecDecodeRuntime.gpu`."""
    tokenizer: Tokenizer = _of_runtime("tokenizer")
    """The model's tokenizer."""
    adapters: tuple[str, ...] = _of_runtime("adapters")
    """Names of the LoRA adapters that a request can choose."""
    context_length: int = _of_runtime("context_length")
    """How many tokens prompt and answer can have together."""
    has_vision_model: bool = _of_runtime("has_vision_model")
    """Whether prompts can show images."""
    default_system_prompt: str = _of_runtime("default_system_prompt")
    """See `SpecDecodeRuntime.default_system_prompt`."""
    default_image_system_prompt: str = _of_runtime("default_image_system_prompt")
    """See `SpecDecodeRuntime.default_image_system_prompt`."""
    default_params: SamplingParams = _of_runtime("default_params")
    """See `SpecDecodeRuntime.default_params`."""
    drafting: DraftingConfig | None = _of_runtime("drafting")
    """How requests are drafted; None: plainly."""

    @property
    def drafting_report(self) -> Report:
        """See `SpecDecodeRuntime.drafting_report`; it waits until requests that came before are answered. Of `AsyncLLM`
        it is awaited, as what the methods below give."""
        return self._called(lambda runtime: runtime.drafting_report)

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        n: int = 1,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Complete a prompt (text, or token ids as they are) without a chat template; see `Request` and `chat`."""
        return self._answered(self._request(prompt, None, params, adapter, options), n)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Growing:
        """As `generate`, but gives the answer as it grows: a `Generation`, of `AsyncLLM` an `AsyncGeneration`."""
        return self._streamed(self._request(prompt, None, params, adapter, options))

    def chat(
        self,
        messages: Messages | str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        n: int = 1,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a conversation: dictionaries with "role" and "content", rendered by the model's chat template; or a
        text, the user's only message. Gives a `Response`.

        Without a system message it begins with `default_system_prompt`; see `Request`. Sampling keywords, such as
        `temperature`, take the place of those fields of `params`, or of `SamplingParams()` without. `n` answers are
        computed together, as many at a time as fit (`Response.choices`); with a seed each has its own (see
        `Request.repeated`); the first failure of one is raised.
        """
        return self._answered(self._request(None, messages, params, adapter, options), n)

    def stream_chat(
        self,
        messages: Messages | str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Growing:
        """As `chat`, but gives the answer as `stream` does."""
        return self._streamed(self._request(None, messages, params, adapter, options))

    def create_session(
        self,
        system: str | None = None,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        *,
        overflow: Overflow = "drop_oldest",
        **options: Unpack[TurnOptions],
    ) -> Conversing:
        """A conversation that remembers what was said: a `Session`, of `AsyncLLM` an `AsyncSession`.

        Its system prompt is `system` (None: `default_system_prompt`, "": none). The `options` go with every message.
        Where it outgrows the context its oldest turns leave; with the `overflow` "error" its next message raises
        ContextError.
        """
        return self._session(system, params, adapter, overflow=overflow, **options)

    def cache_system_prompt(
        self,
        text: SystemPrompt,
        adapter: str | None = None,
        save: str | Path | None = None,
        *,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Cached:
        """See `SpecDecodeRuntime.generate_and_save_system_prompt_kv_cache`; `save` is its file."""
        return self._called(
            lambda runtime: runtime.generate_and_save_system_prompt_kv_cache(
                text, adapter, save, tools=tools, template_variables=template_variables
            )
        )

    def load_snapshot(self, path: str | Path, adapters: Sequence[str | None] | None = None) -> Cached:
        """See `SpecDecodeRuntime.load_snapshot`."""
        return self._called(lambda runtime: runtime.load_snapshot(path, adapters))

    def prefill(
        self, request: Request, layers: Sequence[int] | None = None, *, hidden_states: bool = False
    ) -> Prefilled:
        """See `SpecDecodeRuntime.prefill`; requests that came before are answered first."""
        return self._called(lambda runtime: runtime.prefill(request, layers, hidden_states=hidden_states))

    def use_drafting(self, drafting: DraftingConfig | None) -> Done:
        """See `SpecDecodeRuntime.use_drafting`; requests that came before are answered as they were asked."""
        return self._called(lambda runtime: runtime.use_drafting(drafting))

    def observe(self, observer: Observer | None) -> Done:
        """See `SpecDecodeRuntime.observe`."""
        return self._called(lambda runtime: runtime.observe(observer))

    def metrics(self) -> dict[str, Any]:
        """What was done so far (`Metrics.snapshot`), and how many requests wait and run."""
        return self._thread.metrics.snapshot() | {name: value for name, (_, value) in self._gauges().items()}

    def metrics_text(self) -> str:
        """The metrics in Prometheus's text form."""
        return self._thread.metrics.prometheus(self._gauges())

    def _called(self, function: Callable[[SpecDecodeRuntime], Any]) -> Any:
        """What a function of the runtime returns, which `call` runs."""
        raise NotImplementedError

    def _streamed(self, request: Request) -> Growing:
        raise NotImplementedError

    def _answered(self, request: Request, n: int) -> Answer:
        """The first of `n` answers, with the others; raises what the first of them that failed did."""
        raise NotImplementedError

    def _session(self, *arguments: Any, **options: Any) -> Conversing:
        raise NotImplementedError

    def _request(
        self, prompt: Any, messages: Any, params: SamplingParams | None, adapter: str | None, options: RequestOptions
    ) -> Request:
        """See `Request.of`; what is refused is counted."""
        with self._thread.metrics.counting_refusals():
            return Request.of(prompt, messages, params, adapter, **options)

    def __reduce__(self) -> NoReturn:
        raise EngineError("a model is of the process that opened it, and is not pickled or copied: open one in each")

    def __repr__(self) -> str:
        """Which model, on what, in what state; it waits for nothing, and raises nothing."""
        thread, name = self._thread, type(self).__name__
        if not thread.opened.done():
            return f"<{name} (loading)>"
        if (failure := thread.opened.exception()) is not None:
            return f"<{name} (not opened: {type(failure).__name__})>"
        runtime = thread.opened.result()
        try:
            place = runtime.backend_name if runtime.gpu is None else f"{runtime.backend_name}, GPU {runtime.gpu}"
            state = f"on {place} ({thread.running} running, {thread.waiting} waiting)"
        except EdgeLLMError:
            state = "(closed)"
        return f"<{name} {runtime.directory.path} {state}>"

    def _gauges(self) -> Mapping[str, tuple[str, int]]:
        opened = self._thread.opened
        kept_bytes = opened.result().kept_bytes if opened.done() and opened.exception() is None else 0
        return {
            "requests_waiting": ("Requests that wait for a slot.", self._thread.waiting),
            "requests_running": ("Requests that are being computed.", self._thread.running),
            "requests_preempted": ("Requests that gave way to others, and wait to go on.", self._thread.preempted),
            "preempted_bytes": ("Bytes of rows that are kept on the host for them.", kept_bytes),
        }


class LLM(
    ServedModel[Generation, Response, Session, CachedPrompt, DraftingReport | None, PrefilledStates, None, np.ndarray],
    Closing,
):
    """A language model, opened from an engine directory (by default the one that ships with the package) or by its name
    on the hub.

    It has a thread of its own, which alone uses the engines; any threads may ask it. As many requests are computed
    together as the engines were built for; up to `queue_limit` wait, first come, first served, but for those of a
    higher `priority` (see `Request`), which go first. Each has its own sampling, limits, stop strings, adapter and
    deadline, and the answer that it would have alone. KV rows of earlier prompts are reused where a prompt begins
    alike.

    Drafting changes the speed, not the answers (but for what `DraftingConfig` calls lossy, or `sampled`). `progress` is
    called from the model's thread while it loads, with bytes done and in all. What else there is goes to
    `SpecDecodeRuntime`, which describes it; `drafting` is "auto" here by default.

    Requests take the keywords of `RequestOptions`, sampling among them: `llm.chat("Hello!", temperature=0.7)`.

    Use it as a context manager, or call `close`, which ends what is under way; one that nobody holds any more, nor an
    answer of it, closes itself. Raises EdgeLLMError subclasses that say what is wrong.
    """

    @classmethod
    def of_thread(cls, thread: EngineThread[SpecDecodeRuntime]) -> LLM:
        """The model of a thread, whose `opened` what is asked of it waits for."""
        llm = cls.__new__(cls)
        llm._own(thread, waits=False)
        return llm

    def _own(self, thread: EngineThread[SpecDecodeRuntime], waits: bool = True) -> None:
        self._thread = thread
        # Nobody can close what nobody holds any more: it would keep its memory until the process ends.
        finalize(self, thread.stop).atexit = False  # then the thread closes itself
        try:
            if waits:
                thread.opened.result()
        except BaseException:  # an interrupt, too: what is being loaded is closed as soon as it is there
            thread.stop()
            raise

    def submit(self, request: Request) -> Generation:
        """Queue a request; the answer comes by and by.

        Raises RequestError or AdapterError for what is wrong with it, QueueFullError, RequestError after `close`.
        """
        return self._submit(request)

    _streamed = submit

    def _submit(
        self, request: Request, conversation: OngoingConversation | None = None, client: str = ""
    ) -> Generation:
        """As `submit`, for a conversation, and for one of several clients, which take turns."""
        with self._thread.metrics.counting_refusals():
            return self._queued(request, conversation, client)

    def _queued(
        self, request: Request, conversation: OngoingConversation | None = None, client: str = ""
    ) -> Generation:
        """As `submit`, but what is refused is not counted in the metrics: the caller may try again."""
        self._thread.check()
        sequence = self._runtime.prepare(request, conversation)
        return self._thread.submit(sequence, request, self, client)

    def handle(self, requests: Sequence[Request]) -> list[Response | EdgeLLMError]:
        """Answer several requests, as many at a time as fit; the results are in their order.

        One that fails has its error for a result, and the others go on. A request's `stop_when` is called by the thread
        that waits here, as each answer grows, and ends that one alone where it returns true or raises.
        """
        return handle_requests(self._queued, self._thread.metrics, requests)

    def _called(self, function: Callable[[SpecDecodeRuntime], Any]) -> Any:
        return self.call(function).result()

    def _answered(self, request: Request, n: int) -> Response:
        requests = request.repeated(n)
        if len(requests) > 1:
            return with_others(self.handle(requests))
        with self._submit(request) as generation:  # an interrupt while waiting cancels it
            return generation.result()

    def _embedded(self, request: EmbeddingRequest) -> np.ndarray:
        with self._thread.metrics.counting_refusals():
            ids = self._runtime.embedding_ids(request)
        return np.stack(
            [self.call(partial(SpecDecodeRuntime.embed, request=request, ids=each)).result() for each in ids]
        )

    def transcribe(
        self,
        source: Any,
        language: str | None = None,
        prompt: str | None = None,
        adapter: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Transcription:
        """What is said in a sound: a path, the bytes of a file, or samples with their rate. See `transcription_request`
        for the rest, and `SpeechStream` for speech that goes on."""
        family = self.directory.config.family
        request = transcription_request(family, source, language, prompt, adapter=adapter, **options)
        return transcription_of(self._answered(request, 1), language)

    def count_tokens(self, prompt: str | Sequence[int] | Messages, **options: Unpack[RequestOptions]) -> int:
        """How many prompt tokens a request for this prompt, or conversation, would cost: `usage.prompt_tokens`.

        All that the chat template adds counts, and all tokens of images, which are read for it but not encoded. A
        prompt of more tokens than `context_length` is counted, too. Any thread may ask, while answers are computed.
        """
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            return self._runtime.count_tokens(Request.of(None, prompt, **options))
        return self._runtime.count_tokens(Request.of(prompt, **options))  # type: ignore[arg-type]

    def watch(
        self,
        stream: Any,
        question: str,
        params: SamplingParams | None = None,
        adapter: str | None = None,
        **options: Unpack[WatchOptions],
    ) -> Watch:
        """Ask about the newest frame of a stream again and again: an iterator of answers, described with `Watch`."""
        from edgellm.watching import Watch

        return Watch(self, stream, question, params, adapter, **options)

    def _session(self, *arguments: Any, **options: Any) -> Session:
        return Session(self._submit, *arguments, **options)

    def call(self, function: Callable[[SpecDecodeRuntime], Any]) -> Future[Any]:
        """Run a function of the runtime in its thread, in turn, when no request is being computed."""
        require_kind(callable(function), "a call", function, "a function that takes the runtime")
        return self._thread.call(function)

    def close(self) -> None:
        """End all requests as cancelled and free everything."""
        self._thread.close()
