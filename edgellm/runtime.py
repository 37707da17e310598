"""`SpecDecodeRuntime`: a model opened for use by one thread: engines, KV caches, adapters, snapshots, drafting."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np

from edgellm.arguments import check_drafting, check_options, check_path
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.preparation import Preparation
from edgellm.decoding.runner import open_runner, read_adapters
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.drafting.config import DraftingConfig, default_drafting
from edgellm.drafting.controller import DraftingReport
from edgellm.drafting.drafters import Drafters
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import EdgeLLMError, RequestError, closed_error, require, require_kind
from edgellm.generation import RequestState
from edgellm.hub.directories import local_directory
from edgellm.kernels.made import Made
from edgellm.kernels.user_paths import user_path
from edgellm.metrics import Metrics
from edgellm.observing.observer import ObservedRunner, ObservedSnapshots, Observer
from edgellm.requests import Request, Response, check_choices, request_list, require_request
from edgellm.sampling_params import SamplingParams
from edgellm.serving.batch_handling import OnChunk, callbacks_of_each, serve_all
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import write_snapshot
from edgellm.snapshots.preempted_rows import PREEMPTION_BUDGET, RowKeeper
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.state_cache import STATE_BUDGET, StateKeeper
from edgellm.snapshots.store import MEMORY_BUDGET, SnapshotStore
from edgellm.snapshots.system_prompt import CachedPrompt, PromptRecord, SystemPrompt, Tools, prompt_label
from edgellm.text.turns import OngoingConversation
from edgellm.vision.opening import LazyVisionEncoder, open_texts, open_vision_encoder, vision_directory

if TYPE_CHECKING:
    from edgellm.vision.encoder import VisionEncoder

logger = logging.getLogger("edgellm.runtime")

#: Steps that are captured when a model is opened, or drafting changes: all of one sequence at a time, and without rules
#: all of several. The rest of more (batches of up to 8 with adapters, rules and adaptive drafting have 800) is for idle
#: moments.
CAPTURED_AT_ONCE = 256

#: The engine directory that is installed with the package.
SHIPPED_MODEL = Path(str(resources.files("edgellm"))) / "shipped"


class SpecDecodeRuntime:
    """What computes answers, for one thread; `edgellm.LLM` gives it a thread of its own and serves many.

    `engine_directory` has the model; images need vision engines, from there or from `multimodal_engine_directory`.
    `backend` is "auto" (the GPU where there is one, else NumPy), "numpy" or "tensorrt" (the GPU). `executor` says what
    runs steps on a GPU: "auto" kernels, and TensorRT what they do not take; "tensorrt" the other way round. `kv_cache`
    "int8" keeps the model's KV rows in 8 bits, "compute" in the dtype of computing (None: as the directory was built).
    `drafting` says how to draft; None, and kind "suffix", load no draft model and take no memory for it; "auto" drafts
    where the directory has a draft model, as this machine's preset says. `adapters` are directories of LoRA adapters by
    name, which join those of the engine directory; None loads none, and nothing that applies them. `snapshots` are
    files of `edgellm cache build` or `generate_and_save_system_prompt_kv_cache`; in memory they take up to
    `snapshot_budget` bytes, those used least recently go first. Rows of answers that give way to others (see `Request`)
    are kept in up to `preemption_budget` bytes of the host's memory, which is taken when it is needed; beyond that they
    are computed again. Recurrent states, of models that have such, are kept at places of texts in up to `state_budget`
    bytes of it.
    Without an `engine_directory` it is the model that ships with the package. It may be a name on the hub, ORG/NAME or
    ORG/NAME:FILE.gguf, unless that is a path here: its files are downloaded once, at the `revision` (None: main), or
    again with `update`, and opened through a directory in the user's cache, which is built with the arguments `build`
    (`kv_capacity`, `max_batch`, `head`, `draft` and others of `edgellm build`). Raises EdgeLLMError subclasses that say
    what is wrong.
    """

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        multimodal_engine_directory: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        drafting: DraftingConfig | Literal["auto"] | None = None,
        *,
        backend: str = "auto",
        executor: str = "auto",
        kv_cache: str | None = None,
        revision: str | None = None,
        update: bool = False,
        build: Mapping[str, Any] | None = None,
        snapshots: Sequence[str | Path] = (),
        snapshot_budget: int = MEMORY_BUDGET,
        preemption_budget: int = PREEMPTION_BUDGET,
        state_budget: int = STATE_BUDGET,
        progress: Callable[[int, int], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        path, vision_path = SHIPPED_MODEL if engine_directory is None else engine_directory, multimodal_engine_directory
        budgets = {
            "snapshot_budget": snapshot_budget,
            "preemption_budget": preemption_budget,
            "state_budget": state_budget,
        }
        check_options(path, vision_path, backend, executor, adapters, drafting, snapshots, budgets, progress, metrics)

        def downloading(stage: str, done: int, total: int) -> None:
            if progress is not None and stage == "download":
                progress(done, total)

        path = local_directory(path, revision, update, build, downloading, (adapters or {}).values())
        self.directory = EngineDirectory.open(path).with_kv_cache(kv_cache)
        self._multimodal_directory = vision_directory(self.directory, vision_path)
        self.tokenizer, self._defaults = open_texts(self.directory, self._multimodal_directory)
        self.context_length: int = self.directory.limits.kv_capacity
        """How many tokens prompt and answer can have together."""
        self.has_vision_model: bool = self._multimodal_directory is not None
        """Whether prompts can show images."""
        self.default_system_prompt: str = self._defaults.system_prompt
        """The system prompt of conversations without a system message (`system_prompt.txt`); "" is none."""
        self.default_image_system_prompt: str = self._defaults.image_system_prompt
        """As `default_system_prompt`, for conversations that show images: `system_prompt_image.txt`, where it is."""
        self.metrics = metrics or Metrics()
        #: What `capture_decoding_cuda_graph` could not capture, by name.
        self.uncaptured_stages: tuple[str, ...] = ()
        self._busy = threading.Lock()
        self._contents: list[KVContents] = []
        self._runner: DecodingRunner | None = None
        self._snapshots: SlotSnapshots | None = None
        self._keeper: RowKeeper | None = None
        self._states: StateKeeper | None = None
        self._vision: VisionEncoder | LazyVisionEncoder | None = None
        self._observer: Observer | None = None
        self._following: FollowingLogits | None = None
        loras = read_adapters(self.directory, adapters)
        opened = open_backend(backend, self.directory, executor)
        try:
            chosen = default_drafting(self.directory.limits, opened.name) if drafting == "auto" else drafting
            if self._multimodal_directory is not None:
                self._vision = open_vision_encoder(opened, self.directory, self._multimodal_directory, self.metrics)
            vision_memory = None if self._vision is None else self._vision.memory
            self._runner = open_runner(opened, self.directory, chosen, loras, progress, vision_memory)
            self._drafters = Drafters(self.directory, self._runner)
            self._keeper = RowKeeper(self._runner, preemption_budget)
            if self._runner.base.states.is_recurrent:
                self._states = StateKeeper(self._runner, state_budget)
            self._forget_contents()
            if self._vision is not None:
                self._vision.load(progress)
            self._preparation = Preparation(self.directory, self.tokenizer, self._vision, self._defaults)
            store = SnapshotStore(snapshot_budget)
            self._snapshots = SlotSnapshots(store, self._runner, self.directory, self._multimodal_directory)
            self.use_drafting(chosen)
            for path in snapshots:
                self.load_snapshot(path)
            logger.info("%s is open: %s", self.directory.path, opened.made)
        except BaseException:
            self.close()
            opened.close()
            raise

    @property
    def backend_name(self) -> str:
        """ "tensorrt" or "numpy"."""
        return self._open_runner().backend.name

    @property
    def has_draft_model(self) -> bool:
        """Whether a draft model is loaded."""
        return self._open_runner().draft is not None

    @property
    def made(self) -> Made:
        """What was compiled, loaded, built and captured so far."""
        return self._open_runner().backend.made

    @property
    def planned_memory(self) -> Mapping[str, int]:
        """Bytes that the model takes on its device, by what for: weights, KV caches, buffers."""
        return self._open_runner().base.memory_plan.items

    @property
    def tool_format(self) -> str | None:
        """The name of the format in which the model calls tools; None where its chat template shows none."""
        found = self._preparation.tools.format()
        return None if found is None else found.name

    @property
    def default_params(self) -> SamplingParams:
        """The sampling that the model is published with (`generation_config.json`), which a request has to ask for:
        `params=default_params`. Greedy where it recommends none. Raises EngineDirectoryError for a wrong file."""
        return self._defaults.params

    @property
    def drafting(self) -> DraftingConfig | None:
        """How requests are drafted; None: plainly."""
        return self._drafters.setting

    @property
    def drafting_report(self) -> DraftingReport | None:
        """What adaptive drafting, or drafting from what was said, chose so far, and why; else None."""
        return self._drafters.report()

    def forget_said(self) -> None:
        """Propose nothing any more of what answers have said so far."""
        if self._drafters.index is not None:
            self._drafters.index.clear()

    def use_drafting(self, drafting: DraftingConfig | None) -> None:
        """Draft otherwise, or not at all, from the next request on; what was learned for a setting is kept for it.

        Raises RequestError where no draft model is loaded that it needs, EngineError where the engines cannot serve the
        setting.
        """
        runner = self._open_runner()
        check_drafting(drafting)
        with self._exclusive():
            if self._drafters.use(drafting):
                self._forget_contents()
            if runner.backend.fixed_shapes:
                runner.forget_planned()
                runner.plan_captures(*self._drafters.plans)
                self._capture(CAPTURED_AT_ONCE)

    def _capture(self, most: int) -> int:
        """Capture up to so many steps of those that are planned; how many. Where one fails, as where memory is short,
        the rest are captured when they come up."""
        runner, count = self._open_runner(), 0
        try:
            while count < most and runner.capture_next():
                count += 1
        except EdgeLLMError as error:
            runner.forget_planned()
            logger.warning("not all steps are captured before they come up: %s", error)
        return count

    def idle(self) -> bool:
        """See `edgellm.serving.server.Engine`: it captures a step that was left for later."""
        with self._exclusive():
            return self._capture(1) > 0

    def capture_decoding_cuda_graph(self) -> bool:
        """Capture what decoding runs as CUDA graphs now, as far as opening has left it for later: for every batch size
        and key range plain steps and, with drafting, the rounds of its plans (draft proposal, draft accept, base
        verify).

        True only if every stage was captured; `uncaptured_stages` names the others, which run uncaptured, slower and no
        different. On NumPy nothing is captured.
        """
        runner = self._open_runner()
        with self._exclusive():
            if not runner.backend.fixed_shapes:
                self.uncaptured_stages = (f"all: the {runner.backend.name} backend computes at once",)
            else:
                self._capture(sys.maxsize)
                self.uncaptured_stages = tuple(runner.uncaptured)
        return not self.uncaptured_stages

    def observe(self, observer: Observer | None) -> None:
        """Let an observer (`edgellm.tracing.Trace`, `edgellm.observing.observer.NvtxRanges`) take note of all steps.

        It does so from the next request on, until another takes its place (None: nobody) or the model is closed.
        Rounds are then not one graph each, which costs some speed.
        """
        runner = self._open_runner()
        wanted = ("device_span", "host_span", "finish")
        observes = observer is None or all(callable(getattr(observer, name, None)) for name in wanted)
        require_kind(observes, "an observer", observer, f"{', '.join(wanted)}, or None")
        with self._exclusive():
            if self._observer is not None:
                self._observer.finish()
            runner.observe_stages(None)
            self._observer = observer

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the LoRA adapters that a request can choose."""
        slots = self._open_runner().base.adapters
        return () if slots is None else slots.names

    @property
    def kept_bytes(self) -> int:
        """The bytes of rows that are kept on the host for answers that gave way to others. Any thread may ask."""
        keeper = self._keeper
        return 0 if keeper is None else keeper.nbytes

    @overload
    def handle_request(self, request: Request, on_chunk: OnChunk | None = None) -> Response: ...

    @overload
    def handle_request(
        self, request: Sequence[Request], on_chunk: Sequence[OnChunk | None] | None = None
    ) -> list[Response | Exception]: ...

    def handle_request(
        self, request: Request | Sequence[Request], on_chunk: OnChunk | Sequence[OnChunk | None] | None = None
    ) -> Response | list[Response | Exception]:
        """Answer a request, which raises what it fails with; or several, as many at a time as the engines hold.

        The results of several are in their order: one that fails has its error for a result, and the others go on.

        `on_chunk` is called with each `Chunk` of the answer as it comes; for several requests it is a list with such a
        callable, or None, for each. This thread calls it between rounds, so that all wait until it returns. What it
        raises ends its request, as the error that this fails with.
        """
        requests = [request] if isinstance(request, Request) else request_list(request)
        callbacks = callbacks_of_each(on_chunk, None if isinstance(request, Request) else len(requests))
        states = [self._state_of(each) for each in requests]
        with self._exclusive():
            results = serve_all(self, self.metrics, states, callbacks)
        if not isinstance(request, Request):
            return results
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def prepare(self, request: Request, conversation: OngoingConversation | None = None) -> DecodingSequence:
        """A request, checked, as `loop` takes it; where it goes on a conversation perhaps without the oldest turns (see
        `edgellm.sessions.Session`). Any thread may call it.

        Raises RequestError, and AdapterError for an adapter that is not loaded.
        """
        return self._preparation.sequence(request, self._open_runner(), conversation, self._drafters.can_draft)

    def count_tokens(self, request: Request) -> int:
        """How many tokens a request's prompt has, those of its images included. Any thread may call it."""
        require_request(request)
        self._open_runner()
        return self._preparation.count_tokens(request)

    def loop(self) -> DecodingLoop:
        """See `edgellm.serving.server.Engine`."""
        runner, snapshots, given = self._open_runner(), self._open_snapshots(), self._drafters.given
        if self._observer is not None:
            runner = cast(DecodingRunner, ObservedRunner(runner, self._observer))
            snapshots = cast(SlotSnapshots, ObservedSnapshots(snapshots, self._observer))
        encode = None if self._vision is None else self._vision.encode
        slots = SlotTable(runner, self._contents, snapshots, encode, given, self._keeper, self._states)
        return DecodingLoop(slots, self._drafters.chooser)

    def generate_and_save_system_prompt_kv_cache(
        self,
        prompt: SystemPrompt,
        lora_name: str | None = None,
        path: str | Path | None = None,
        *,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> CachedPrompt:
        """Compute a system prompt now: conversations that begin with it prefill only what follows, the same answers
        come sooner (`usage.reused_tokens` tells). It is text, or a list of parts, images among them. `tools` and
        `template_variables` are those of the conversations, as most chat templates render them beside the prompt.

        Its rows serve requests with the LoRA adapter `lora_name` (None: without one), which they depend on. They are
        kept in memory and, with `path`, in that file, which other processes with the same model can load. Raises
        RequestError, AdapterError for an unknown name, SnapshotError where the rows fit neither the memory budget nor
        are saved, or the file cannot be written.
        """
        if path is not None:
            check_path("path", path)
        snapshot = self.system_prompt_snapshot(prompt, lora_name, None, tools, template_variables)
        path, store = None if path is None else user_path(path), self._open_snapshots().store
        if path is not None:
            write_snapshot(path, snapshot)
        if path is not None and snapshot.nbytes > store.memory_budget:
            store.add_file(path)
        else:
            store.put(snapshot)
        return CachedPrompt(tuple(snapshot.token_ids.tolist()), snapshot.nbytes, path)

    def system_prompt_snapshot(
        self,
        prompt: SystemPrompt,
        lora_name: str | None = None,
        label: str | None = None,
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """The rows of a system prompt, kept nowhere yet; `label` is a name for people (None: the first words)."""
        snapshots = self._open_snapshots()
        check_choices(None, lora_name)
        require(isinstance(label, (str, type(None))), "label", label, "text, or None")
        token_ids, prepared = self._preparation.system_prompt(prompt, tools, template_variables)
        label = label or prompt_label(prompt)
        with self._exclusive():
            slot = min(range(len(self._contents)), key=lambda slot: self._contents[slot].last_use)
            images = self._vision.encode(token_ids, prepared) if prepared and self._vision is not None else None
            digests = () if images is None else images.digests
            record = PromptRecord.of(prompt, digests, tools, template_variables)
            return snapshots.compute(slot, token_ids, self._contents[slot], label, lora_name, images, record)

    def following_logits(
        self, token_ids: Sequence[int], first: int, take: Callable[[np.ndarray], None], adapter: str | None = None
    ) -> None:
        """Let `take` see the logits that a text's tokens from number `first` (1 or more) on are drawn from, as decoding
        with the LoRA adapter `adapter` (None: without one) has them.

        They come in blocks [n, vocabulary] float32 of at most 64 tokens, each written over by the next. Nothing is
        drafted. Raises EngineError for a text that the model or its context cannot hold, RequestError for what are no
        token ids, AdapterError for an unknown name.
        """
        runner = self._open_runner()
        Request(prompt=tuple(token_ids), adapter=adapter)  # refuses what is none
        with self._exclusive():
            if self._following is None:
                self._following = FollowingLogits(runner.base)
            slot = min(range(len(self._contents)), key=lambda slot: self._contents[slot].last_use)
            self._contents[slot] = self._empty_contents()
            runner.base.set_adapter(slot, adapter)
            try:
                for block in self._following.blocks(slot, token_ids, first):
                    take(block)
            finally:
                runner.stop(slot)

    def load_snapshot(self, path: str | Path, adapters: Sequence[str | None] | None = None) -> CachedPrompt:
        """Use the snapshot of a file from now on.

        It must have been made for one of these `adapters`, by name (None among them: without one; by default any that
        is loaded, or none). Raises SnapshotError that names how the file differs from what it should be.
        """
        base = self._open_runner().base
        check_path("path", path)
        names = (None, *self.adapters) if adapters is None else adapters
        are_names = isinstance(names, (list, tuple)) and all(isinstance(name, (str, type(None))) for name in names)
        require(are_names, "adapters", adapters, "a list of names, with None for without an adapter")
        file = user_path(path)
        with self._exclusive():
            stored = self._open_snapshots().load(file, [base.adapter_digest(name) for name in names])
        return CachedPrompt(stored.token_ids, stored.nbytes, file)

    def close(self) -> None:
        """Free all memory, also where a part of that fails; the object cannot be used afterwards.

        Raises RequestError while it is in use.
        """
        is_on_a_device = self._runner is not None and not self._runner.backend.computes_at_once
        try:
            self._close()
        finally:
            if is_on_a_device:  # what goes in circles is freed by the thread that made it, as a device's memory must be
                gc.collect()

    def _close(self) -> None:
        with self._exclusive(), ExitStack() as last_first:
            for part in (self._runner, self._keeper, self._states, self._snapshots, self._vision):
                if part is not None:
                    last_first.callback(part.close)
            if self._runner is not None:
                last_first.callback(self._drafters.close)
                if self._observer is not None:
                    last_first.callback(self._observer.finish)
            self._vision = self._snapshots = self._runner = self._following = self._keeper = self._states = None

    def __enter__(self) -> SpecDecodeRuntime:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RequestError("this runtime is in use by another thread, or calls on_chunk: take an LLM for such uses")
        try:
            yield
        finally:
            self._busy.release()

    def _open_runner(self) -> DecodingRunner:
        if self._runner is None:
            raise closed_error()
        return self._runner

    def _forget_contents(self) -> None:
        """Reuse nothing of what slots hold."""
        self._contents = [self._empty_contents() for _ in range(self.directory.limits.max_batch)]

    def _empty_contents(self) -> KVContents:
        """The contents of a slot of which nothing is of use."""
        states = None if self._runner is None else self._runner.base.states
        cut = None if states is None or not states.window_reach else states.cut_windows
        return KVContents(self._states, cut, self.directory.config.image_tokens > 0)

    def _open_snapshots(self) -> SlotSnapshots:
        if self._snapshots is None:
            raise closed_error()
        return self._snapshots

    def _state_of(self, request: Request) -> RequestState | EdgeLLMError:
        """The state of a request, to be queued; or why it is refused, which the metrics count."""
        try:
            with self.metrics.counting_refusals():
                return RequestState(self.prepare(request), request.deadline, stop_when=request.stop_when)
        except EdgeLLMError as error:
            return error
