"""`SpecDecodeRuntime`: a model opened for use by one thread, and what it answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast, overload
from weakref import finalize

import numpy as np

from edgellm.arguments import check_path
from edgellm.decoding.loop import DecodingLoop
from edgellm.decoding.sequence import DecodingSequence
from edgellm.decoding.slot_table import SlotTable
from edgellm.embedding import EmbeddingRequest, require_embeddings
from edgellm.engines.runners.following_logits import FollowingLogits
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import EdgeLLMError, EngineError, is_whole, require
from edgellm.generation import RequestState
from edgellm.kernels.user_paths import user_path
from edgellm.media.encoders import PreparedMedia
from edgellm.opened_model import OpenedModel
from edgellm.prefilled import PrefilledStates
from edgellm.requests import Request, Response, check_choices, request_list, require_request
from edgellm.serving.batch_handling import OnChunk, callbacks_of_each, serve_all
from edgellm.snapshots.file import write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.system_prompt import CachedPrompt, PromptRecord, SystemPrompt, Tools, prompt_label
from edgellm.text.messages import media_of_prompt
from edgellm.text.turns import OngoingConversation
from edgellm.tracing import ObservedRunner, ObservedSnapshots


class _Reader:
    """Lives as long as somebody reads the rows of a slot."""


class SpecDecodeRuntime(OpenedModel):
    """What computes answers, for one thread; `edgellm.LLM` gives it a thread of its own and serves many.

    `engine_directory` has the model; images need vision engines, from there or from `multimodal_engine_directory`.
    `backend` is "auto" (the GPU where there is one, else NumPy), "numpy" or "tensorrt" (the GPU). `executor` says what
    runs steps on a GPU: "auto" kernels, and TensorRT what they do not take; "tensorrt" the other way round. `gpu` is
    the index of the GPU among those that the driver shows (None: the first), and `gpus` how many share the model,
    from that one on; on NumPy ranks that are threads. `kv_cache` "int8" keeps the model's KV rows in 8 bits, "compute"
    in the dtype of computing (None: as the directory was built). `hidden_layers` are those whose hidden states
    `prefill` can hand out, as they enter a layer (the number of layers: behind the final norm); steps then keep these.
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
    (`kv_capacity`, `max_batch`, `head`, `draft` and others of `edgellm build`). So is a GGUF file, whose vision encoder
    is the file or name `mmproj` ("none": texts alone; None: the file mmproj*.gguf beside it that fits). Raises
    EdgeLLMError subclasses that say what is wrong.
    """

    def prepare(self, request: Request, conversation: OngoingConversation | None = None) -> DecodingSequence:
        """A request, checked, as `loop` takes it; where it goes on a conversation perhaps without the oldest turns (see
        `edgellm.sessions.Session`). Any thread may call it.

        Raises RequestError, and AdapterError for an adapter that is not loaded.
        """
        return self._preparation.sequence(request, self._open_runner(), conversation, self._drafters.can_draft)

    def prompt_ids(self, request: Request) -> list[int]:
        """The tokens of a request's prompt, which fits the context. Any thread may call it."""
        self._open_runner()
        return self._preparation.prompt_ids(request)

    def prepare_image(self, image: Any, channels: str) -> PreparedMedia:
        """An image, prepared, which messages take in its place. Any thread may call it."""
        self._open_runner()
        assert self._media is not None  # of an open model
        part = {"type": "image", "image": image, "channels": channels}
        return self._media.prepare(media_of_prompt("image", [part]))[0]

    def count_tokens(self, request: Request) -> int:
        """How many tokens a request's prompt has, those of its images included. Any thread may call it."""
        require_request(request)
        self._open_runner()
        return self._preparation.count_tokens(request)

    def embedding_ids(self, request: EmbeddingRequest) -> list[list[int]]:
        """See `EmbeddingRequest.token_ids`. Any thread may call it."""
        self._open_runner().base.adapter_digest(request.adapter)
        return request.token_ids(self.directory, self.tokenizer)

    def embed(self, request: EmbeddingRequest, ids: Sequence[int]) -> np.ndarray:
        """The embedding [D] float32 of one text of a request, by its tokens, as `embedding_ids` gives them.

        Raises RequestError for a model that embeds nothing, EngineError for tokens that do not fit it.
        """
        runner, began = self._open_runner(), time.perf_counter()
        require_embeddings(self.directory)
        with self._exclusive():
            slot = self._least_used_slot()
            self._contents[slot] = self._empty_contents()
            runner.base.set_adapter(slot, request.adapter)
            try:
                state = runner.base.last_hidden_state(slot, ids)
            finally:
                runner.stop(slot)
        self.metrics.staged("embedding", texts=1, tokens=len(ids), seconds=time.perf_counter() - began)
        return request.vector(state)

    def loop(self) -> DecodingLoop:
        runner, snapshots, drafter = self._open_runner(), self._open_snapshots(), self._drafters.drafter
        if self._observer is not None:
            runner = cast(DecodingRunner, ObservedRunner(runner, self._observer))
            snapshots = cast(SlotSnapshots, ObservedSnapshots(snapshots, self._observer))
        encode = None if self._media is None else self._media.encode
        slots = SlotTable(runner, self._contents, snapshots, encode, drafter, self._keeper, self._states, self._held)
        return DecodingLoop(slots)

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
        with self._exclusive():
            if path is None or snapshot.nbytes <= store.memory_budget:
                store.put(snapshot)
            else:
                store.add_file(path)
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
            slot = self._least_used_slot()
            media = self._media.encode(token_ids, prepared) if prepared and self._media is not None else None
            record = PromptRecord.of(prompt, [piece.digest for piece in prepared], tools, template_variables)
            return snapshots.compute(slot, token_ids, self._contents[slot], label, lora_name, media, record)

    def prefill(
        self, request: Request, layers: Sequence[int] | None = None, *, hidden_states: bool = False
    ) -> PrefilledStates:
        """Compute a request's prompt, as far as it is not known, and hand out its keys and values in some layers (None:
        in all that keep some).

        With `hidden_states` those of the `hidden_layers` that the model was opened with are handed out, too (perhaps
        alone, with `layers` []): all of the prompt is then computed. Nothing is drawn: the request's sampling is of no
        matter. A slot holds what is handed out; where the model has several, it is one of the last, to which the rows
        move. Raises what `prepare` does, EngineError where no slot is free, for a layer without keys and values, rows
        of int8, and prompts that are longer than a layer's window.
        """
        sequence, runner, count = self.prepare(request), self._open_runner(), self.directory.config.num_layers
        layers = runner.base.states.attention_layers if layers is None else layers
        are_layers = isinstance(layers, Sequence) and all(is_whole(each, 0, count - 1) for each in layers)
        are_layers = are_layers and (len(layers) > 0 or hidden_states)
        require(are_layers, "layers", layers, f"a list of whole numbers from 0 to {count - 1}")
        hidden = self._hidden if hidden_states else None
        expected = "False for a model that was opened without hidden_layers: name them there, as in hidden_layers=[12]"
        require(hidden is not None or hidden_states is False, "hidden_states", hidden_states, expected)
        with self._exclusive():
            slots, last = self.loop().slots, self._held.usable(runner) - 1
            sequence.is_fresh, sequence.needs_all_rows = hidden is not None, True
            slot = None if sequence.is_fresh else slots.holding(sequence)
            if slot is None:
                slot = 0
                with nullcontext() if hidden is None else hidden.filled(runner.base, last):
                    self._compute_prompt(slots, sequence)
            else:
                sequence.reused_tokens = len(sequence.prompt_ids)
            if slot != last:
                runner.swap_rows(slot, last)
                self._contents[slot], self._contents[last] = self._contents[last], self._contents[slot]
            runner.backend.synchronize()
            reader, ids = _Reader(), tuple(sequence.prompt_ids)
            pairs = [runner.base.states.shared_rows(last, layer, len(ids), reader) for layer in layers]
            keys, values = zip(*pairs, strict=True) if pairs else ((), ())
            states = () if hidden is None else hidden.shared(last, len(ids), reader)
            finalize(reader, self._held.hold(last)).atexit = False
            return PrefilledStates(ids, sequence.reused_tokens, tuple(layers), keys, values, states)

    def _compute_prompt(self, slots: SlotTable, sequence: DecodingSequence) -> None:
        """Let slot 0, which is idle before and after, hold the rows of a prompt."""
        if not slots.has_place(sequence):
            raise EngineError("no slot can take the adapter of a prefill: ask again later")
        computed = slots.admit(sequence)
        try:
            assert computed is not None  # as it never gave way
            computed.wait()
            if sequence.is_unproven:
                slots.prove(0, self._open_runner().base.logits(0)[np.newaxis])
        except BaseException:
            slots.release(0, keep_rows=False)
            raise
        slots.release(0)

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
            slot = self._least_used_slot()
            self._contents[slot] = self._empty_contents()
            runner.base.set_adapter(slot, adapter)
            try:
                for block in self._following.blocks(slot, token_ids, first):
                    take(block)
            finally:
                runner.stop(slot)

    def _state_of(self, request: Request) -> RequestState | EdgeLLMError:
        """The state of a request, to be queued; or why it is refused, which the metrics count."""
        try:
            with self.metrics.counting_refusals():
                return RequestState(self.prepare(request), request.deadline, stop_when=request.stop_when)
        except EdgeLLMError as error:
            return error
