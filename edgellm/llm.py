"""`LLM`: a model opened for use, the object that the command line and programs talk to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

from edgellm.adaptive_drafting import adaptive_drafting
from edgellm.decoding import Clock, DecodingLoop, DecodingSequence, KVContents, Runner
from edgellm.drafting import DraftingConfig, FixedDrafting, PlanChooser
from edgellm.drafting_controller import DraftingController, DraftingReport
from edgellm.drafting_presets import default_drafting
from edgellm.drafting_statistics import DraftingTally
from edgellm.engines.backend import open_backend
from edgellm.engines.eagle_runner import EagleRunner
from edgellm.engines.engine_directory import EngineDirectory
from edgellm.engines.sampling_state import SamplingValues
from edgellm.errors import RequestError
from edgellm.observer import ObservedRunner, ObservedSnapshots, Observer
from edgellm.responses import Response
from edgellm.runner_opening import open_runner, read_adapters
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.slot_snapshots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.snapshot_file import write_snapshot
from edgellm.snapshots.store import MEMORY_BUDGET, SnapshotStore
from edgellm.snapshots.system_prompt import CachedPrompt, prompt_label, system_prompt_ids
from edgellm.stream import Stream, finished_response
from edgellm.text.stop import Answer
from edgellm.text.tokenizer import Tokenizer

#: The engine directory that is installed with the package.
SHIPPED_MODEL = Path(__file__).parent / "shipped"

Messages = Sequence[dict[str, Any]]

_CLOSED = "this LLM is closed: open a new one"


class LLM:
    """A language model, opened from an engine directory (by default the one that ships with the package).

    `backend` is "auto" (TensorRT where there is a GPU, else NumPy), "numpy" or "tensorrt". `drafting` says how to
    draft; "auto" drafts where the directory has a draft model, as this machine's preset says; None loads no draft
    model. Drafting changes the speed, not the answers (but for what `DraftingConfig` calls lossy, or `sampled`).
    `adapters` are directories of LoRA adapters by name, which join those of the engine directory; a request names the
    one that it is answered with. None loads none, and nothing that applies them. One
    request runs at a time; the KV cache of the latest is kept, so that a next prompt with the same
    beginning prefills only what is new. So it does after a prompt that was kept by `cache_system_prompt`, or in one of
    the files `snapshots` (see `load_snapshot`); in memory they take up to `snapshot_budget` bytes, those used least
    recently go first. Use it as a context manager, or call `close`. Raises EdgeLLMError subclasses that say what is
    wrong.
    """

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        *,
        backend: str = "auto",
        drafting: DraftingConfig | Literal["auto"] | None = "auto",
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        snapshots: Sequence[str | Path] = (),
        snapshot_budget: int = MEMORY_BUDGET,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.directory = EngineDirectory.open(SHIPPED_MODEL if engine_directory is None else Path(engine_directory))
        self.tokenizer = Tokenizer.from_directory(self.directory.path, self.directory.config.vocab_size)
        self._busy = threading.Lock()
        self._contents = [KVContents() for _ in range(self.directory.limits.max_batch)]
        self._runner: Runner | None = None
        self._snapshots: SlotSnapshots | None = None
        self._observer: Observer | None = None
        self._choosers: dict[DraftingConfig | None, PlanChooser] = {None: FixedDrafting(None)}
        self._drafting: DraftingConfig | None = None
        loras = read_adapters(self.directory, adapters)
        opened = open_backend(backend, self.directory)
        try:
            asked = default_drafting(self.directory.limits, opened.name) if drafting == "auto" else drafting
            self._runner = open_runner(opened, self.directory, asked, loras, progress)
        except BaseException:
            opened.close()
            raise
        try:
            self._snapshots = SlotSnapshots(SnapshotStore(snapshot_budget), self._runner, self.directory)
            if asked is not None:
                self.use_drafting(asked)
            for path in snapshots:
                self.load_snapshot(path)
        except BaseException:
            self.close()
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

    def observe(self, observer: Observer) -> None:
        """Let an observer (`edgellm.tracing.Trace`, `edgellm.nvtx_ranges.NvtxRanges`) take note of all steps from the
        next request on, until the model is closed. Rounds are then not one graph each, which costs some speed.
        """
        self._acquire()
        self._observer = observer
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

    def cache_system_prompt(
        self, text: str, adapter: str | None = None, save: str | Path | None = None
    ) -> CachedPrompt:
        """Compute a system prompt now: conversations that begin with it prefill only what follows, the same answers
        come sooner (`usage.reused_tokens` tells).

        Its rows serve requests with the LoRA adapter of the name `adapter` (None: without one), which they depend on.
        They are kept in memory and, with `save`, in that file, which other LLMs of the same model can load. Raises
        RequestError, AdapterError for an unknown name, SnapshotError where the rows fit neither the memory budget nor
        are saved, or the file cannot be written.
        """
        snapshot = self.system_prompt_snapshot(text, adapter)
        path, store = None if save is None else Path(save).expanduser(), self._open_snapshots().store
        if path is not None:
            write_snapshot(path, snapshot)
        if path is not None and snapshot.nbytes > store.memory_budget:
            store.add_file(path)
        else:
            store.put(snapshot)
        return CachedPrompt(tuple(snapshot.token_ids.tolist()), snapshot.nbytes, path)

    def system_prompt_snapshot(self, text: str, adapter: str | None = None, label: str | None = None) -> Snapshot:
        """The rows of `cache_system_prompt`, kept nowhere yet; `label` is a name for people (None: the first words)."""
        snapshots = self._open_snapshots()
        token_ids = system_prompt_ids(self.tokenizer, text)
        self._check_prompt(token_ids)
        slot = self.directory.limits.max_batch - 1  # the one that requests use least
        self._acquire()
        try:
            return snapshots.compute(slot, token_ids, self._contents[slot], label or prompt_label(text), adapter)
        finally:
            self._busy.release()

    def load_snapshot(self, path: str | Path, adapters: Sequence[str | None] | None = None) -> CachedPrompt:
        """Use the snapshot of a file from now on (`edgellm cache build`, or `cache_system_prompt` with `save`).

        It must have been made for one of these `adapters`, by name (None among them: without one; by default any that
        is loaded, or none). Raises SnapshotError that names how the file differs from what it should be.
        """
        base = self._open_runner().base
        names = (None, *self.adapters) if adapters is None else adapters
        path = Path(path).expanduser()
        stored = self._open_snapshots().load(path, [base.adapter_digest(name) for name in names])
        return CachedPrompt(stored.token_ids, stored.nbytes, path)

    def close(self) -> None:
        """Free all memory; the object cannot be used afterwards."""
        if self._snapshots is not None:
            self._snapshots.close()
            self._snapshots = None
        if self._runner is not None:
            if self._observer is not None:
                self._observer.finish()
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
            raise RequestError(_CLOSED)
        return self._runner

    def _open_snapshots(self) -> SlotSnapshots:
        if self._snapshots is None:
            raise RequestError(_CLOSED)
        return self._snapshots

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams | None, adapter: str | None, clock: Clock
    ) -> Stream:
        params = (params or SamplingParams()).seeded()
        sequence = self._sequence(prompt_ids, params, adapter, clock)
        self._acquire()
        return Stream(self._loop().run([sequence]), sequence, params, self._busy.release)

    def _loop(self) -> DecodingLoop:
        chooser = self._choosers[self._drafting]
        runner, snapshots = self._open_runner(), self._open_snapshots()
        if self._observer is None:
            return DecodingLoop(runner, self._contents, chooser, snapshots)
        observed = ObservedSnapshots(snapshots, self._observer)
        return DecodingLoop(ObservedRunner(runner, self._observer), self._contents, chooser, observed)

    def _acquire(self) -> None:
        if not self._busy.acquire(blocking=False):
            raise RequestError(
                "another request of this LLM is running: finish, cancel or close its stream first, or take a "
                "ServedLLM, which answers several at once"
            )

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty: it must have at least one token")
        if len(prompt_ids) >= self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the context {self.context_length}, of which at least one "
                "is for the answer: shorten the prompt or the history, or build with a larger --kv-capacity"
            )

    def _sequence(
        self, prompt_ids: list[int], params: SamplingParams, adapter: str | None, clock: Clock
    ) -> DecodingSequence:
        """A request, checked; raises RequestError, and AdapterError for an adapter that is not loaded."""
        runner = self._open_runner()
        runner.base.adapter_digest(adapter)
        self._check_prompt(prompt_ids)
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
