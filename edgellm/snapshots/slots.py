"""Snapshots of a runner's slots: taken from one, and given to one before its prompt is computed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from weakref import WeakSet

import numpy as np

from edgellm.engines.backends.base import Transfer
from edgellm.engines.directories.description import edgellm_version
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.model.states import Edge, is_recurrent
from edgellm.engines.runners.media import PromptMedia, before_span
from edgellm.engines.runners.sampling_state import SamplingValues
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError, number_of
from edgellm.snapshots.binding import NONE, SnapshotBinding, encoder_digest, images_digest, snapshot_binding
from edgellm.snapshots.contents import KVContents, reusable_rows
from edgellm.snapshots.file import NOT_FINITE, check_binding, damaged, read_snapshot, verify_snapshot
from edgellm.snapshots.snapshot import FORMAT_VERSION, STATE_PREFIX, TOKEN_IDS, Findings, Snapshot, SnapshotFacts
from edgellm.snapshots.staging import file_identity, opened_unchanged
from edgellm.snapshots.store import Match, SnapshotStore, StoredSnapshot
from edgellm.snapshots.system_prompt import PromptRecord
from edgellm.snapshots.transfer import RowCopy, Uploader

logger = logging.getLogger("edgellm.snapshots")


class SlotSnapshots:
    """Snapshots for one runner, kept in its `store`. Used from the runner's thread. An `adapter` is meant by its digest
    unless it is said to be a name; None is no adapter."""

    def __init__(
        self,
        store: SnapshotStore,
        runner: DecodingRunner,
        directory: EngineDirectory,
        vision_directory: EngineDirectory | None = None,
    ) -> None:
        """`vision_directory` has the vision encoder, if it is another than the model's own."""
        self.store = store
        self._runner, self._backend = runner, runner.backend
        self._states = {"base": runner.base.states, **runner.draft.models}
        self._has_draft = runner.draft.has_model
        self._checked: WeakSet[Snapshot] = WeakSet()
        self._taken: dict[int, StoredSnapshot] = {}
        self._uploader = Uploader(runner.backend)
        config = directory.config
        self._model = f"{config.family}, {config.num_layers} layers of {config.hidden_size}"
        backend = runner.backend
        computed = backend.name, backend.compute_dtype
        self._unadapted = snapshot_binding(directory, *computed, self._has_draft, executor=backend.executor)
        self._encoder = encoder_digest(directory, vision_directory)
        self._whole_media = config.has_whole_media
        self._takes_media = bool(config.media or directory.vision or vision_directory)

    def binding(self, adapter: str | None = None, images: str = NONE) -> SnapshotBinding:
        """What this runner's rows are bound to where they are computed with an adapter, and with images by their
        `images_digest`."""
        return replace(self._unadapted, adapter=adapter or NONE, images=images)

    def restore(
        self,
        slot: int,
        prompt_ids: Sequence[int],
        contents: KVContents,
        adapter: str | None = None,
        media: PromptMedia | None = None,
    ) -> int:
        """Put the rows of the snapshot that shares the longest prefix with the prompt into an idle slot.

        Only snapshots that were made with the `adapter` are looked at; `contents` must be bound to it. A snapshot with
        images is of use where these are the first of the prompt's `media`. Nothing is done where the slot's own
        contents are as good. `contents` then say what the slot holds, and how many rows are reused is the result (0:
        none of a snapshot). A snapshot that proves damaged is dropped, with a warning, and the next best is taken.
        """
        while self.store.snapshots() and (match := self._best_match(prompt_ids, adapter, media)) is not None:
            tokens = prompt_ids if media is None else media.identities(prompt_ids)
            held, states = match.stored.facts.tokens, self._states["base"]
            common = states.cut(held, match.common)
            rows = reusable_rows(common, len(prompt_ids), self._draft_rows(common))
            rows = states.cut_windows(held, before_span(tokens, rows) if self._whole_media else rows)
            place = common - 1 if match.stored.has_states else common
            rows = min(rows, place)
            if rows <= contents.reusable(tokens):
                return 0
            contents.replace((), 0 if self._has_draft else None)  # what a failure leaves behind
            try:
                self._write(slot, match.stored, common)
            except SnapshotError as error:
                logger.warning("%s", error)
                self.store.discard(match.stored)
                continue
            contents.replace(tokens[:common], self._draft_rows(common), place, held)
            self._taken[slot] = match.stored
            return rows
        return 0

    def prove(self, slot: int, logits: np.ndarray) -> None:
        """See that the first logits [..., V] behind the rows that a slot got by `restore` are numbers: each of these
        can be finite, and their products not. Raises SnapshotError, and uses that snapshot no more."""
        stored = self._taken.pop(slot)
        if not np.isfinite(logits.max()):  # of NaN it is NaN; what rules forbid is minus infinity
            error = SnapshotError(
                f"the snapshot {stored.path or repr(stored.facts.label)} cannot be used: behind its rows the model's "
                "logits are infinite or NaN, so that values in it are far too large. Build it anew, or leave it out",
                NOT_FINITE,
            )
            self.store.discard(stored)
            raise error

    def _best_match(self, prompt_ids: Sequence[int], adapter: str | None, media: PromptMedia | None) -> Match | None:
        """The best match of snapshots with none, one, ... of the prompt's images: the one that shares the longest
        prefix with it."""
        digests, cut = () if media is None else media.digests, self._states["base"].cut_windows
        bindings = [
            self.binding(adapter, images_digest(digests[:count], self._encoder)) for count in range(len(digests) + 1)
        ]
        found = [match for binding in bindings if (match := self.store.find(binding, prompt_ids, cut)) is not None]
        return max(found, key=lambda match: match.common, default=None)

    def compute(
        self,
        slot: int,
        token_ids: Sequence[int],
        contents: KVContents,
        label: str,
        adapter_name: str | None = None,
        media: PromptMedia | None = None,
        prompt: PromptRecord | None = None,
    ) -> Snapshot:
        """Compute the rows of `token_ids` [N] in an idle slot, with the adapter of a name, and take a snapshot of them.

        `prompt` is what the tokens were rendered from, for the snapshot to keep.
        Raises AdapterError for an unknown name, EngineError where the runner cannot take so many tokens, or
        DeviceMemoryError.
        """
        base = self._runner.base
        base.set_adapter(slot, adapter_name)
        adapter = base.adapter_digest(adapter_name)
        contents.bind(adapter)
        contents.replace((), 0 if self._has_draft else None)
        snapshot = self._unfilled(token_ids, label, adapter, media, prompt)
        stops = {len(token_ids) - 1: partial(self._fill, slot, snapshot, of_states=True)} if snapshot.states else None
        try:
            self._runner.start(slot, token_ids, 0, SamplingValues(), media, stops=stops).wait()
        except BaseException:
            base.set_adapter(slot, None)  # the slot stays idle: it must not keep an adapter's place
            raise
        self._runner.stop(slot)
        self._fill(slot, snapshot)
        tokens = token_ids if media is None else media.identities(token_ids)
        contents.replace(tokens, self._draft_rows(len(token_ids)), len(token_ids))
        return snapshot

    def _unfilled(
        self,
        token_ids: Sequence[int],
        label: str,
        adapter: str | None,
        media: PromptMedia | None,
        prompt: PromptRecord | None,
    ) -> Snapshot:
        """A snapshot of tokens without what a slot holds of them; recurrent states are those before the first."""
        shown = () if media is None else media.digests[: len(media.within(0, len(token_ids)))]
        facts = SnapshotFacts(
            FORMAT_VERSION,
            len(token_ids),
            self.binding(adapter, images_digest(shown, self._encoder)),
            label,
            self._model,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            edgellm_version(),
            self._states["base"].window_reach,
            self._backend.gpus,
        )
        tensors = {name: (dtype, shape) for name, (shape, dtype) in self._saved(facts.tokens).items()}
        snapshot = Snapshot.allocate(facts, tensors, self._backend.host_memory, prompt)
        np.copyto(snapshot.tensor(TOKEN_IDS), np.asarray(token_ids, np.int32))
        for name in snapshot.states:
            snapshot.tensor(name)[...] = 0
        return snapshot

    def _fill(self, slot: int, snapshot: Snapshot, of_states: bool = False) -> None:
        """Take the rows of a slot into its snapshot, or its recurrent states."""
        self._runner.base.await_rows()
        copies = self._copies(slot, snapshot, snapshot.facts.tokens)
        wanted = [copy for copy in copies if copy.name.startswith(STATE_PREFIX) == of_states]
        download = self._backend.download_rows
        for transfer in [download(each.cache, each.values, each.rows, each.first) for each in wanted]:
            transfer.wait()

    def load(self, path: Path, adapters: Sequence[str | None] = (None,)) -> StoredSnapshot:
        """Use the snapshot of a file from now on: verified, and from memory unless it is larger than that budget.

        It must have been made with one of the `adapters`. Raises SnapshotError that names what is wrong with the file,
        or how it differs from what this runner needs.
        """
        identity = file_identity(path)
        mapped = read_snapshot(path)
        made_with = None if mapped.facts.binding.adapter == NONE else mapped.facts.binding.adapter
        shown = mapped.facts.binding.images if self._takes_media else NONE
        expected = self.binding(made_with if made_with in adapters else adapters[0], shown)
        check_binding(path, mapped, expected)
        self._check(path, mapped)
        if (made_by := mapped.facts.gpus) != self._backend.gpus:
            made_on, own = number_of(made_by, "GPU"), self._backend.gpus
            logger.warning("%s was made on %s: on %d its rows may differ in bits", path, made_on, own)
        if mapped.nbytes > self.store.memory_budget:
            verify_snapshot(path, mapped)
            self._uploader.reserve(mapped.nbytes)  # before a request waits for it
            return self.store.add_file(path)
        snapshot = mapped.unread(self._backend.host_memory)
        try:
            with opened_unchanged(path, identity) as descriptor:
                verify_snapshot(path, snapshot, self._uploader.read(descriptor, snapshot))
        except SnapshotError as error:
            if error.reason != "replaced" or file_identity(path) == identity:
                raise
            return self.load(path, adapters)  # as another process has made it meanwhile
        self.store.add_file(path)
        return self.store.put(snapshot)

    def close(self) -> None:
        """Let go of memory that belongs to the backend; call it before the runner is closed."""
        self._backend.synchronize()
        self._uploader.close()
        self.store.forget_memory()

    def _write(self, slot: int, stored: StoredSnapshot, tokens: int) -> None:
        """Put the rows of the first `tokens` tokens into a slot; raises SnapshotError, and the rows are then anything.
        The content of a file is hashed while it is copied, unless that was done and the file is still the same."""
        snapshot = self.store.open(stored)
        self._check(stored.path, snapshot)
        copies = self._copies(slot, snapshot, tokens)
        found: list[Findings] = []
        if not snapshot.is_mapped:
            transfers = self._uploader.upload(copies)
        elif snapshot.is_verified:
            transfers = self._from_file(stored, snapshot, copies, None)
        else:  # damage is to be known before anything is computed
            transfers = iter(list(self._from_file(stored, snapshot, copies, found)))
        named = ((name.removeprefix(STATE_PREFIX).removeprefix("base."), transfer) for name, transfer in transfers)
        self._runner.base.expect_rows(named)
        if found:
            verify_snapshot(stored.path, snapshot, found[0])

    def _from_file(
        self, stored: StoredSnapshot, snapshot: Snapshot, copies: Iterable[RowCopy], findings: list[Findings] | None
    ) -> Iterator[tuple[str, Transfer]]:
        assert stored.path is not None  # which it is a map of
        with opened_unchanged(stored.path, stored.identity) as descriptor:
            yield from self._uploader.upload_file(descriptor, snapshot, copies, findings)

    def _check(self, path: Path | None, snapshot: Snapshot) -> None:
        """Raise SnapshotError unless the snapshot holds what this runner's states take."""
        if snapshot in self._checked:
            return
        expected = {name: shape for name, (shape, _) in self._saved(snapshot.facts.tokens).items()}
        found = {name: snapshot.places[name].shape for name in (*snapshot.rows, *snapshot.states)}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                cause = f"the tensor {name!r} has the shape {found.get(name)}, expected {expected.get(name)}"
                raise damaged(path or snapshot.facts.label, cause)
        self._checked.add(snapshot)

    def _copies(self, slot: int, snapshot: Snapshot, tokens: int) -> Iterator[RowCopy]:
        """One by one, so that the first is on its way while the others are being made."""
        for model, states in self._states.items():
            held = _tokens_of(model, snapshot.facts.tokens)
            for each in states.of_slot(slot, _tokens_of(model, tokens), held):
                name = _saved_name(model, each.name)
                yield RowCopy(name, each.memory, snapshot.tensor(name), each.rows, each.first)

    def _saved(self, tokens: int) -> Edge:
        """What a snapshot of so many tokens holds: a tensor's shape and dtype by its name."""
        return {
            _saved_name(model, name): kind
            for model, states in self._states.items()
            for name, kind in states.saved(_tokens_of(model, tokens)).items()
        }

    def _draft_rows(self, tokens: int) -> int | None:
        return tokens - 1 if self._has_draft else None


def _saved_name(model: str, name: str) -> str:
    return f"{STATE_PREFIX}{name}" if is_recurrent(name) else f"{model}.{name}"


def _tokens_of(model: str, tokens: int) -> int:
    """How many of a prompt's tokens a model has rows of: a draft's pair each with the next one."""
    return tokens - 1 if model == "draft" else tokens
