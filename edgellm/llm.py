"""`LLM`: a model opened for use, the object that the command line and programs talk to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from edgellm.decoding import Clock, KVContents, decode
from edgellm.engines.backend import open_backend
from edgellm.engines.base_runner import BaseEngineRunner
from edgellm.engines.engine_directory import EngineDirectory
from edgellm.engines.sampling_state import SamplingValues
from edgellm.errors import RequestError
from edgellm.responses import Chunk, Response, Usage
from edgellm.sampling_params import SamplingParams
from edgellm.text.stop import Answer
from edgellm.text.tokenizer import Tokenizer

#: The engine directory that is installed with the package.
SHIPPED_MODEL = Path(__file__).parent / "shipped"

Messages = Sequence[dict[str, Any]]


class LLM:
    """A language model, opened from an engine directory (by default the one that ships with the package).

    `backend` is "auto" (TensorRT where there is a GPU, else NumPy), "numpy" or "tensorrt". One request runs at a time;
    the KV cache of the latest is kept, so that a next prompt with the same beginning prefills only what is new. Use it
    as a context manager, or call `close`. Raises EdgeLLMError subclasses that say what is wrong.
    """

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        *,
        backend: str = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.directory = EngineDirectory.open(SHIPPED_MODEL if engine_directory is None else Path(engine_directory))
        config, limits = self.directory.config, self.directory.limits
        self.tokenizer = Tokenizer.from_directory(self.directory.path, config.vocab_size)
        self._busy = threading.Lock()
        self._contents = KVContents()
        self._runner: BaseEngineRunner | None = None
        opened = open_backend(backend, self.directory)
        try:
            checkpoint = self.directory.checkpoint()
            try:
                self._runner = BaseEngineRunner(opened, config, limits, checkpoint, progress)
            finally:
                checkpoint.close()
        except BaseException:
            opened.close()
            raise

    @property
    def backend_name(self) -> str:
        """ "tensorrt" or "numpy"."""
        return self._open_runner().backend.name

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer can have together."""
        return self.directory.limits.kv_capacity

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Response:
        """Complete a prompt (text, or token ids as they are) without a chat template."""
        return self.stream(prompt, params).finish()

    def chat(self, messages: Messages, params: SamplingParams | None = None) -> Response:
        """Answer a conversation: dictionaries with "role" and "content", rendered by the model's chat template."""
        return self.stream_chat(messages, params).finish()

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """As `generate`, but returns the answer as it grows."""
        clock = Clock()
        return self._stream(self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt), params, clock)

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Stream:
        """As `chat`, but returns the answer as it grows."""
        clock = Clock()
        return self._stream(self.tokenizer.encode_chat(messages), params, clock)

    def close(self) -> None:
        """Free all memory; the object cannot be used afterwards."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open_runner(self) -> BaseEngineRunner:
        if self._runner is None:
            raise RequestError("this LLM is closed: open a new one")
        return self._runner

    def _stream(self, prompt_ids: list[int], params: SamplingParams | None, clock: Clock) -> Stream:
        runner, params = self._open_runner(), (params or SamplingParams()).seeded()
        if not prompt_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        if len(prompt_ids) >= self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {self.context_length}, of which at least one "
                "is for the answer: shorten the prompt or the history, or build with a larger --kv-capacity"
            )
        answer = Answer(
            self.tokenizer.detokenizer(),
            params.stop,
            params.stop_token_ids,
            () if params.ignore_eos else self.directory.eos_token_ids,
            params.max_tokens,
        )
        sampling = SamplingValues(
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.seed or 0,
        )
        if not self._busy.acquire(blocking=False):
            raise RequestError("another request of this LLM is running: finish, cancel or close its stream first")
        reused = self._contents.reusable(prompt_ids)
        steps = decode(runner, self._contents, prompt_ids, sampling, answer, clock, params.max_tokens)
        return Stream(steps, answer, clock, len(prompt_ids), reused, params, self._busy.release)


class Stream:
    """An answer as it grows: iterate over its `Chunk`s; afterwards `response` is there.

    It must be finished, cancelled or closed before the next request starts; leaving a `with` block closes it.
    """

    def __init__(
        self,
        steps: Iterator[tuple[int, str]],
        answer: Answer,
        clock: Clock,
        prompt_tokens: int,
        reused_tokens: int,
        params: SamplingParams,
        release: Callable[[], None],
    ) -> None:
        self.params = params
        self._answer, self._clock = answer, clock
        self._prompt_tokens, self._reused_tokens = prompt_tokens, reused_tokens
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
            token, text = next(self._steps)
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
        if self._clock.started == 0.0:  # closed before it began
            self._clock.started = self._clock.accepted
        answer = self._answer
        self._response = Response(
            answer.text,
            answer.token_ids,
            answer.finish_reason or "cancelled",
            Usage(self._prompt_tokens, self._reused_tokens, answer.token_count),
            self._clock.timings(),
            answer.stop_match,
        )
