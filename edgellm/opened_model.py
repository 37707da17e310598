"""A model's parts on this machine: opened and closed together, and their steps captured."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from edgellm.arguments import check_drafting, check_options, check_path
from edgellm.decoding.preparation import Preparation
from edgellm.decoding.runner import open_runner, read_adapters
from edgellm.decoding.slot_table import HeldSlots
from edgellm.drafting.config import DraftingConfig, default_drafting
from edgellm.drafting.drafters import Drafters
from edgellm.drafting.report import DraftingReport
from edgellm.engines.backends.opening import open_backend
from edgellm.engines.closing import Closing
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import DeviceLostError, EdgeLLMError, RequestError, closed_error, require, require_kind
from edgellm.hub.directories import local_directory
from edgellm.kernels.made import Made
from edgellm.kernels.user_paths import user_path
from edgellm.media.encoders import MediaEncoders
from edgellm.media.opening import open_encoders, open_texts, vision_directory
from edgellm.metrics import Metrics
from edgellm.prefilled import HiddenStates
from edgellm.sampling_params import SamplingParams
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.kept_on_host import PREEMPTION_BUDGET, STATE_BUDGET, RowKeeper, StateKeeper
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import MEMORY_BUDGET, SnapshotStore
from edgellm.snapshots.system_prompt import CachedPrompt
from edgellm.tracing import Observer

logger = logging.getLogger("edgellm").getChild("runtime")

#: Steps that are captured when a model is opened, or drafting changes: all of one sequence at a time, and without rules
#: all of several. The rest of more (batches of up to 8 with adapters, rules and adaptive drafting have 800) is for idle
#: moments.
CAPTURED_AT_ONCE = 256

#: The engine directory that is installed with the package.
SHIPPED_MODEL = Path(str(resources.files("edgellm"))) / "shipped"


def _of_runner(name: str) -> Any:
    """A property of the open runner, under that name there."""
    return property(lambda model: attrgetter(name)(model._open_runner()))


class OpenedModel(Closing):
    """What `SpecDecodeRuntime` answers with: engines, KV caches, adapters, snapshots, drafters, a vision encoder."""

    def __init__(
        self,
        engine_directory: str | Path | None = None,
        multimodal_engine_directory: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = MappingProxyType({}),
        drafting: DraftingConfig | Literal["auto"] | None = None,
        *,
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
        snapshots: Sequence[str | Path] = (),
        snapshot_budget: int = MEMORY_BUDGET,
        preemption_budget: int = PREEMPTION_BUDGET,
        state_budget: int = STATE_BUDGET,
        progress: Callable[[int, int], None] | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        check_options(locals())

        def downloading(stage: str, done: int, total: int) -> None:
            if progress is not None and stage == "download":
                progress(done, total)

        if mmproj is not None:
            require(isinstance(mmproj, (str, Path)), "mmproj", mmproj, "a GGUF file, or none")
            build = {} if build is None else build
            build = {**build, "mmproj": str(mmproj)} if isinstance(build, Mapping) else build
        model = SHIPPED_MODEL if engine_directory is None else engine_directory
        path = local_directory(model, revision, update, build, downloading, (adapters or {}).values())
        self.directory = EngineDirectory.open(path).with_kv_cache(kv_cache).with_hidden_layers(hidden_layers)
        self._multimodal_directory = vision_directory(self.directory, multimodal_engine_directory)
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
        self._held = HeldSlots()
        self._runner: DecodingRunner | None = None
        self._snapshots: SlotSnapshots | None = None
        self._keeper: RowKeeper | None = None
        self._states: StateKeeper | None = None
        self._media: MediaEncoders | None = None
        self._observer: Observer | None = None
        self._hidden: HiddenStates | None = None
        self._following: FollowingLogits | None = None
        loras = read_adapters(self.directory, adapters)
        opened = open_backend(backend, self.directory, executor, None if gpu is None else int(gpu), int(gpus))
        try:
            limits, index = self.directory.limits, opened.gpu_index
            chosen = default_drafting(limits, opened.name, index) if drafting == "auto" else drafting
            media = self._media = open_encoders(
                opened, self.directory, self._multimodal_directory, self.metrics, self.tokenizer
            )
            memory = dict(media.memory)
            if hidden_layers is not None:
                self._hidden = HiddenStates(opened, self.directory.config, limits, hidden_layers)
                memory |= self._hidden.memory
            self._runner = open_runner(opened, self.directory, chosen, loras, progress, memory)
            if self._hidden is not None:
                self._hidden.allocate()
            self._drafters = Drafters(self.directory, self._runner)
            self._keeper = RowKeeper(self._runner, preemption_budget)
            if self._runner.base.states.is_recurrent:
                self._states = StateKeeper(self._runner, state_budget)
            self._forget_contents()
            media.load(progress)
            self._preparation = Preparation(self.directory, self.tokenizer, media, self._defaults)
            store = SnapshotStore(snapshot_budget)
            self._snapshots = SlotSnapshots(store, self._runner, self.directory, self._multimodal_directory)
            self.use_drafting(chosen)
            for snapshot in snapshots:
                self.load_snapshot(snapshot)
            logger.info("%s is open: %s", self.directory.path, opened.made)
        except BaseException:
            self.close()
            opened.close()
            raise

    backend_name: str = _of_runner("backend.name")
    """"tensorrt" or "numpy"."""
    gpu: int | None = _of_runner("backend.gpu_index")
    """The index of the GPU that computes, among those that the driver shows; None on NumPy."""
    has_draft_model: bool = _of_runner("draft.has_model")
    """Whether a draft model is loaded."""
    made: Made = _of_runner("backend.made")
    """What was compiled, loaded, built and captured so far."""
    planned_memory: Mapping[str, int] = _of_runner("base.memory_plan.items")
    """Bytes that the model takes on its device, by what for: weights, KV caches, buffers."""

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
    def media_tokens(self) -> frozenset[int]:
        """The ids of the tokens that stand for media in prompts."""
        return frozenset() if self._media is None else self._media.token_ids

    @property
    def drafting(self) -> DraftingConfig | None:
        """How requests are drafted; None: plainly."""
        return self._drafters.setting

    @property
    def drafting_report(self) -> DraftingReport | None:
        """What adaptive drafting, or drafting from what was said, chose so far, and why; else None."""
        return self._drafters.report()

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
            self._drafters.use(drafting)
            if runner.backend.fixed_shapes and not self.directory.config.is_embedding:
                runner.forget_planned()
                drafter = self._drafters.drafter
                runner.plan_captures(drafter.plans, drafter.forced_plans)
                self._capture(CAPTURED_AT_ONCE)

    def _capture(self, most: int, prepare: Callable[[], bool] = lambda: False) -> int:
        """Capture up to so many steps of those that are planned, then `prepare` more; how many. Where one fails, as
        where memory is short, the rest are captured when they come up."""
        runner, count = self._open_runner(), 0
        try:
            while count < most and (runner.capture_next() or prepare()):
                count += 1
        except EdgeLLMError as error:
            runner.forget_planned()
            logger.warning("not all steps are captured before they come up: %s", error)
        return count

    def lost(self) -> DeviceLostError | None:
        return self._open_runner().backend.lost()

    def idle(self) -> bool:
        """See `edgellm.serving.server.Engine`: it captures a step that was left for later, or prepares prompts."""
        with self._exclusive():
            return self._capture(1, self._open_runner().base.prepare_prompt) > 0

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
        """Let an observer (`edgellm.tracing.Trace`, `edgellm.tracing.NvtxRanges`) take note of all steps.

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
            for part in (self._runner, self._keeper, self._states, self._snapshots, self._media):
                if part is not None:
                    last_first.callback(part.close)
            if self._runner is not None:
                last_first.callback(self._drafters.close)
                if self._observer is not None:
                    last_first.callback(self._observer.finish)
            self._media = self._snapshots = self._runner = self._following = self._keeper = self._states = None
            self._hidden = None

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

    def _open_snapshots(self) -> SlotSnapshots:
        if self._snapshots is None:
            raise closed_error()
        return self._snapshots

    def _forget_contents(self) -> None:
        self._contents = [self._empty_contents() for _ in range(self.directory.limits.max_batch)]

    def _empty_contents(self) -> KVContents:
        """The contents of a slot of which nothing is of use."""
        states = None if self._runner is None else self._runner.base.states
        cut = None if states is None or not states.window_reach else states.cut_windows
        return KVContents(self._states, cut, self.directory.config.has_whole_media)

    def _least_used_slot(self) -> int:
        """The slot whose contents were used longest ago, of those that are not held."""
        return min(range(self._held.usable(self._open_runner())), key=lambda slot: self._contents[slot].last_use)
