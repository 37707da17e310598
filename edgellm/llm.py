"""`LLM`: a model opened for use, the object that the command line and programs talk to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from edgellm.adaptive_drafting import adaptive_drafting
from edgellm.decoding import Clock, DecodingLoop, DecodingSequence, KVContents, PlainRunner, Runner
from edgellm.drafting import DraftingConfig, FixedDrafting, PlanChooser
from edgellm.drafting_controller import DraftingController, DraftingReport
from edgellm.drafting_presets import default_drafting
from edgellm.drafting_statistics import DraftingTally
from edgellm.engines.backend import Backend, open_backend
from edgellm.engines.base_runner import BaseEngineRunner
from edgellm.engines.eagle_runner import EagleRunner
from edgellm.engines.engine_directory import EngineDirectory
from edgellm.engines.lora_adapter import LoraAdapter
from edgellm.engines.lora_slots import require_adapters
from edgellm.engines.sampling_state import SamplingValues
from edgellm.errors import RequestError
from edgellm.responses import Response
from edgellm.sampling_params import SamplingParams
from edgellm.stream import Stream, finished_response
from edgellm.text.stop import Answer
from edgellm.text.tokenizer import Tokenizer

#: The engine directory that is installed with the package.
SHIPPED_MODEL = Path(__file__).parent / "shipped"

Messages = Sequence[dict[str, Any]]


class LLM:
    """A language model, opened from an engine directory (by default the one that ships with the package).

    `backend` is "auto" (TensorRT where there is a GPU, else NumPy), "numpy" or "tensorrt". `drafting` says how to
    draft; "auto" drafts where the directory has a draft model, as this machine's preset says; None loads no draft
    model. Drafting changes the speed, not the answers (but for what `DraftingConfig` calls lossy, or `sampled`).
    `adapters` are directories of LoRA adapters by name, which join those of the engine directory; a request names the
    one that it is answered with. None loads none, and nothing that applies them. One
    request runs at a time; the KV cache of the latest is kept, so that a next prompt with the same
    beginning prefills only what is new. Use it as a context manager, or call `close`. Raises EdgeLLMError subclasses
    that say what is wrong.
    """

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        *,
        backend: str = "auto",
        drafting: DraftingConfig | Literal["auto"] | None = "auto",
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.directory = EngineDirectory.open(SHIPPED_MODEL if engine_directory is None else Path(engine_directory))
        self.tokenizer = Tokenizer.from_directory(self.directory.path, self.directory.config.vocab_size)
        self._busy = threading.Lock()
        self._contents = [KVContents() for _ in range(self.directory.limits.max_batch)]
        self._runner: Runner | None = None
        self._choosers: dict[DraftingConfig | None, PlanChooser] = {None: FixedDrafting(None)}
        self._drafting: DraftingConfig | None = None
        loras = _read_adapters(self.directory, adapters)
        opened = open_backend(backend, self.directory)
        try:
            asked = default_drafting(self.directory.limits, opened.name) if drafting == "auto" else drafting
            self._runner = _open_runner(opened, self.directory, asked, loras, progress)
            if asked is not None:
                self.use_drafting(asked)
        except BaseException:
            opened.close()
            raise

    @property
    def backend_name(self) -> str:
        """ "tensorrt" or "numpy"."""
        return self._open_runner().backend.name

    @property
    def drafting(self) -> DraftingConfig | None:
        """How requests are drafted; None: plainly."""
        return self._drafting

    @property
    def drafting_report(self) -> DraftingReport | None:
        """What adaptive drafting chose so far, and why; None where drafting is not adaptive."""
        chooser = self._choosers[self._drafting]
        return chooser.report() if isinstance(chooser, DraftingController) else None

    def use_drafting(self, drafting: DraftingConfig | None) -> None:
        """Draft otherwise, or not at all, from the next request on; what was learned for a setting is kept for it.

        Raises RequestError while a request runs or where no draft model is loaded, EngineError where the engines
        cannot serve the setting.
        """
        runner = self._open_runner()
        if drafting is not None and not isinstance(runner, EagleRunner):
            raise RequestError("no draft model is loaded: open the LLM with drafting, on a directory that has one")
        self._acquire()
        try:
            if drafting not in self._choosers:
                plan = drafting.plan(self.directory.limits)
                adaptive = drafting.adaptive
                if adaptive:  # measuring costs uses all slots
                    self._contents = [KVContents() for _ in self._contents]
                self._choosers[drafting] = (
                    adaptive_drafting(drafting, self.directory, runner) if adaptive else FixedDrafting(plan)
                )
            self._drafting = drafting
        finally:
            self._busy.release()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that a request can choose."""
        slots = self._open_runner().base.adapters
        return () if slots is None else slots.names

    @property
    def context_length(self) -> int:
        """How many tokens prompt and answer can have together."""
        return self.directory.limits.kv_capacity

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, adapter: str | None = None
    ) -> Response:
        """Complete a prompt (text, or token ids as they are) without a chat template, with the LoRA adapter of the name
        `adapter` (None: without one)."""
        return self.stream(prompt, params, adapter).finish()

    def chat(self, messages: Messages, params: SamplingParams | None = None, adapter: str | None = None) -> Response:
        """Answer a conversation: dictionaries with "role" and "content", rendered by the model's chat template."""
        return self.stream_chat(messages, params, adapter).finish()

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, adapter: str | None = None
    ) -> Stream:
        """As `generate`, but returns the answer as it grows."""
        clock = Clock()
        prompt_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._stream(prompt_ids, params, adapter, clock)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, adapter: str | None = None
    ) -> Stream:
        """As `chat`, but returns the answer as it grows."""
        clock = Clock()
        return self._stream(self.tokenizer.encode_chat(messages), params, adapter, clock)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Response]:
        """Complete several prompts, as many at a time as the engines were built for; each as `generate` would.

        `adapters` names the LoRA adapter of each prompt; those that find no place wait until others are finished.
        """
        params = (params or SamplingParams()).seeded()
        encoded = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        names = [None] * len(encoded) if adapters is None else list(adapters)
        if len(names) != len(encoded):
            raise RequestError(
                f"{len(names)} adapters are named for {len(encoded)} prompts: name one (or None) for each"
            )
        sequences = [
            self._sequence(prompt_ids, params, name, Clock()) for prompt_ids, name in zip(encoded, names, strict=True)
        ]
        self._acquire()
        try:
            for _ in self._loop().run(sequences):
                pass
        finally:
            self._busy.release()
        return [finished_response(sequence) for sequence in sequences]

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

    def _open_runner(self) -> Runner:
        if self._runner is None:
            raise RequestError("this LLM is closed: open a new one")
        return self._runner

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams | None, adapter: str | None, clock: Clock
    ) -> Stream:
        params = (params or SamplingParams()).seeded()
        sequence = self._sequence(prompt_ids, params, adapter, clock)
        self._acquire()
        return Stream(self._loop().run([sequence]), sequence, params, self._busy.release)

    def _loop(self) -> DecodingLoop:
        return DecodingLoop(self._open_runner(), self._contents, self._choosers[self._drafting])

    def _acquire(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RequestError("another request of this LLM is running: finish, cancel or close its stream first")

    def _sequence(
        self, prompt_ids: list[int], params: SamplingParams, adapter: str | None, clock: Clock
    ) -> DecodingSequence:
        """A request, checked; raises RequestError, and AdapterError for an adapter that is not loaded."""
        runner = self._open_runner()
        runner.base.adapter_digest(adapter)
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
        tally = DraftingTally(lambda: runner.stage_seconds) if isinstance(runner, EagleRunner) else None
        return DecodingSequence(prompt_ids, sampling, answer, clock, params.max_tokens, tally, adapter)


def _open_runner(
    backend: Backend,
    directory: EngineDirectory,
    drafting: DraftingConfig | None,
    adapters: Mapping[str, LoraAdapter] | None,
    progress: Callable[[int, int], None] | None,
) -> Runner:
    """A runner with the directory's draft model if there is `drafting`; RequestError where it has none."""
    config, limits = directory.config, directory.limits
    if drafting is None:
        with closing(directory.checkpoint()) as checkpoint:
            return PlainRunner(BaseEngineRunner(backend, config, limits, checkpoint, progress, adapters=adapters))
    if directory.draft is None:
        raise RequestError(
            f"drafting is asked for, but {directory.path} has no draft model: build one with it (edgellm build "
            "CHECKPOINT ENGINE_DIR --draft DRAFT_CHECKPOINT), or leave drafting out"
        )
    drafting.plan(directory.limits)  # refused before anything is loaded
    return EagleRunner.open(backend, directory, progress, adapters)


def _read_adapters(
    directory: EngineDirectory, sources: Mapping[str, str | Path] | None
) -> dict[str, LoraAdapter] | None:
    """The directory's adapters and those of `sources`, or None where none is wanted, or the engines take none."""
    if sources is None or not (directory.limits.has_lora or sources):
        return None
    require_adapters(directory.limits)
    described = {name: adapter.path for name, adapter in directory.adapters.items()}
    return {name: LoraAdapter.read(path, directory.config) for name, path in (described | dict(sources)).items()}
