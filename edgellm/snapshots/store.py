"""Keeps snapshots in memory and on disk within budgets, and finds the one that helps a prompt most."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgellm.errors import SnapshotError
from edgellm.snapshots.binding import SnapshotBinding, binding_key
from edgellm.snapshots.file import read_snapshot, write_snapshot
from edgellm.snapshots.prefix_index import PrefixIndex, token_key
from edgellm.snapshots.snapshot import Snapshot, SnapshotFacts
from edgellm.snapshots.staging import (
    SUFFIX,
    delete_file,
    file_identity,
    last_used,
    remove_abandoned,
    same_content,
    touch,
)

logger = logging.getLogger("edgellm.snapshots")

MEMORY_BUDGET = 1 << 30
DISK_BUDGET = 8 << 30
#: Maps of verified files that are kept open, so that their content is not hashed again.
_MOST_MAPS = 32


@dataclass(eq=False)
class StoredSnapshot:
    """One snapshot of a store: in memory, on disk, or both. `nbytes` is its size in bytes.

    `has_states`: it is of use as a whole only, all of its tokens but the last.
    """

    facts: SnapshotFacts
    key: bytes = field(repr=False)
    nbytes: int
    has_states: bool = False
    memory: Snapshot | None = None
    path: Path | None = None
    #: the map of the file and what file it was
    mapped: Snapshot | None = field(default=None, repr=False)
    identity: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that it holds rows of."""
        return tuple(np.frombuffer(self.key, ">u4").tolist())


@dataclass(frozen=True)
class Match:
    """A stored snapshot, and how many tokens of a prompt it can give rows for (N, or fewer)."""

    stored: StoredSnapshot
    common: int


class SnapshotStore:
    """Thread-safe. Each budget is in bytes; what was used least recently goes first.

    Files in `folder` (None: none are kept) are found when the store is made and by `scan`; several processes may share
    it. Files that cannot be used are in `refused` with the reason, and otherwise ignored.
    """

    def __init__(
        self, memory_budget: int = MEMORY_BUDGET, folder: Path | None = None, disk_budget: int = DISK_BUDGET
    ) -> None:
        self.memory_budget, self.folder, self.disk_budget = memory_budget, folder, disk_budget
        self.refused: dict[Path, SnapshotError] = {}
        self._refused_files: dict[Path, tuple[int, ...] | None] = {}
        self._lock = threading.RLock()
        self._indexes: dict[SnapshotBinding, PrefixIndex[StoredSnapshot]] = {}
        # By use, the least recent first.
        self._memory: OrderedDict[StoredSnapshot, None] = OrderedDict()
        self._maps: OrderedDict[StoredSnapshot, None] = OrderedDict()
        # Of files, which other processes use as well, the files themselves say when that was.
        self._disk: dict[StoredSnapshot, None] = {}
        if folder is not None:
            remove_abandoned(folder)
            self.scan()

    def scan(self) -> None:
        """Look for files that other processes have added to the folder, and for those that are gone."""
        if self.folder is None:
            return
        with self._lock:
            known = {stored.path: stored for stored in self._disk}
        paths = sorted(self.folder.glob(f"*{SUFFIX}"), key=last_used)
        for path in [path for path in known if path not in paths]:
            self._forget_file(known[path])
        for path in [
            path for path in self.refused if path not in paths or self._refused_files[path] != file_identity(path)
        ]:
            del self.refused[path]
        for path in paths:
            if path not in known and path not in self.refused:
                try:
                    self.add_file(path, counted=True)
                except SnapshotError as error:
                    logger.warning("%s", error)
                    self._refuse(path, error)

    def put(self, snapshot: Snapshot) -> StoredSnapshot:
        """Keep a snapshot in memory; SnapshotError where it is larger than the whole budget."""
        if snapshot.nbytes > self.memory_budget:
            raise _too_large(snapshot, "memory", self.memory_budget)
        with self._lock:
            stored = self._stored(snapshot)
            stored.memory = snapshot
            self._memory[stored] = None
            self._memory.move_to_end(stored)
            while self.memory_bytes > self.memory_budget:
                evicted, _ = self._memory.popitem(last=False)
                logger.info("snapshot %r leaves the memory: its budget is used up", evicted.facts.label)
                evicted.memory = None
                self._forget_if_gone(evicted)
            return stored

    def path_of(self, snapshot: Snapshot) -> Path:
        """The file of the folder that `save` writes; SnapshotError where the store has no folder."""
        if self.folder is None:
            raise SnapshotError("the store has no folder to write snapshots to", "not written")
        return self.folder / f"{binding_key(snapshot.facts.binding, token_key(snapshot.token_ids))}{SUFFIX}"

    def save(self, snapshot: Snapshot, replaced: Sequence[Path] = ()) -> tuple[Path, list[Path]]:
        """Write a snapshot into the folder; its path, and those of files that were removed to make room.

        It is on the disk and read back when this returns; only then the files that are `replaced` by it are deleted.
        Raises SnapshotError.
        """
        path = self.path_of(snapshot)
        if snapshot.nbytes > self.disk_budget:
            raise _too_large(snapshot, "disk", self.disk_budget)
        write_snapshot(path, snapshot)
        touch(path)
        for old in replaced:
            if old != path:
                delete_file(old)
        with self._lock:
            stored = self._stored(snapshot)
            self._close_map(stored)
            stored.path = path
            self._disk[stored] = None
            self.scan()
            return path, self._make_room(stored)

    def add_file(self, path: Path, counted: bool = False) -> StoredSnapshot:
        """Use a snapshot that lies anywhere; where it is `counted`, for the disk budget, it is one of the folder.

        Raises SnapshotError.
        """
        snapshot = read_snapshot(path)
        with self._lock:
            stored = self._stored(snapshot)
            if counted and stored in self._disk and stored.path != path:
                raise SnapshotError(f"{path} holds the same snapshot as {stored.path}: remove one", "duplicate")
            if counted or stored.path is None:
                self._close_map(stored)
                stored.path = path
            if counted:
                self._disk[stored] = None
            return stored

    def find(
        self, binding: SnapshotBinding, prompt_ids: Sequence[int], cut: Callable[[int, int], int] | None = None
    ) -> Match | None:
        """What shares the longest prefix with a prompt; None where nothing does.

        One that cannot be `cut` there (see `LayerState.cut`; None: each can) is none; then what a prompt begins with as
        a whole is of use. A snapshot with states of recurrent layers is of use only as a whole, and its states are
        those before its last token.
        """
        prompt = token_key(prompt_ids)
        with self._lock:
            index = self._indexes.get(binding)
            if index is None:
                return None
            common, found = index.longest(prompt)
            if cut is not None:
                found = [stored for stored in found if cut(stored.facts.tokens, common)]
            if not found or found[0].has_states:
                common, found = index.longest_whole(prompt)
            if not found:
                return None
            return Match(next((stored for stored in found if stored.memory is not None), found[0]), common)

    def open(self, stored: StoredSnapshot) -> Snapshot:
        """The snapshot, from memory or mapped; it now counts as used. A file that was verified once, and has not
        changed since, is verified still. Raises SnapshotError.
        """
        with self._lock:
            if stored.memory is not None:
                self._memory.move_to_end(stored)
                return stored.memory
            if stored.path is None:
                raise SnapshotError(f"the snapshot {stored.facts.label!r} is no longer there", "missing")
            identity = file_identity(stored.path)
            if stored.mapped is None or identity is None or stored.identity != identity:
                mapped = read_snapshot(stored.path)
                if (mapped.facts.binding, token_key(mapped.token_ids)) != (stored.facts.binding, stored.key):
                    raise SnapshotError(f"{stored.path} holds another snapshot than before", "replaced")
                stored.mapped = mapped
            stored.identity = touch(stored.path)
            if identity is None or stored.identity is None or not same_content(stored.identity, identity):
                self._close_map(stored)
                raise SnapshotError(f"{stored.path} changed while it was opened", "replaced")
            self._maps[stored] = None
            self._maps.move_to_end(stored)
            while len(self._maps) > _MOST_MAPS:
                self._close_map(next(iter(self._maps)))
            return stored.mapped

    def discard(self, stored: StoredSnapshot, error: SnapshotError | None = None) -> None:
        """Use a snapshot no more; its file stays where it is, refused until it changes if there was an `error`."""
        with self._lock:
            if error is not None and stored in self._disk and stored.path is not None:
                self._refuse(stored.path, error)
            stored.memory = None
            self._memory.pop(stored, None)
            self._forget_file(stored)

    def forget_memory(self, binding: SnapshotBinding) -> None:
        """Let go of a binding's snapshots in memory; those that have files stay usable."""
        with self._lock:
            for stored in [stored for stored in self._memory if stored.facts.binding == binding]:
                del self._memory[stored]
                stored.memory = None
                self._forget_if_gone(stored)

    def remove(self, stored: StoredSnapshot) -> None:
        """Take a snapshot out of memory and delete its file. Raises SnapshotError."""
        with self._lock:
            path = stored.path
            self.discard(stored)
        if path is not None:
            delete_file(path)

    def snapshots(self) -> list[StoredSnapshot]:
        """All that can be used."""
        with self._lock:
            return [stored for index in self._indexes.values() for stored in index]

    @property
    def memory_bytes(self) -> int:
        """What is in memory."""
        with self._lock:
            return sum(stored.nbytes for stored in self._memory)

    @property
    def disk_bytes(self) -> int:
        """What usable files in the folder take."""
        with self._lock:
            return sum(stored.nbytes for stored in self._disk)

    def _refuse(self, path: Path, error: SnapshotError) -> None:
        self.refused[path] = error
        self._refused_files[path] = file_identity(path)

    def _stored(self, snapshot: Snapshot) -> StoredSnapshot:
        """The entry of a snapshot's binding and tokens, new or not."""
        binding, key = snapshot.facts.binding, token_key(snapshot.token_ids)
        index = self._indexes.setdefault(binding, PrefixIndex())
        stored = index.get(key)
        if stored is None:
            stored = StoredSnapshot(snapshot.facts, key, snapshot.nbytes, bool(snapshot.states))
            index.add(key, stored)
        else:
            stored.facts, stored.nbytes = snapshot.facts, snapshot.nbytes
        return stored

    def _make_room(self, kept: StoredSnapshot) -> list[Path]:
        """Delete files, the least recently used first, until the rest fits the budget; `kept` always stays."""
        removed = []
        while self.disk_bytes > self.disk_budget and len(self._disk) > 1:
            files = {stored: stored.path for stored in self._disk if stored is not kept and stored.path is not None}
            evicted = min(files, key=lambda stored: last_used(files[stored]))
            logger.info("snapshot %r is deleted: the disk budget is used up", evicted.facts.label)
            removed.append(files[evicted])
            self._forget_file(evicted)
            with suppress(SnapshotError):
                delete_file(removed[-1])
        return removed

    def _forget_file(self, stored: StoredSnapshot) -> None:
        with self._lock:
            self._disk.pop(stored, None)
            self._close_map(stored)
            stored.path = None
            self._forget_if_gone(stored)

    def _forget_if_gone(self, stored: StoredSnapshot) -> None:
        if stored.memory is None and stored.path is None:
            index = self._indexes.get(stored.facts.binding)
            if index is not None and index.get(stored.key) is stored:
                index.remove(stored.key)
                if not len(index):  # a binding for each set of images would add up
                    del self._indexes[stored.facts.binding]

    def _close_map(self, stored: StoredSnapshot) -> None:
        """Let go of a file's map; who uses it still keeps it alive."""
        self._maps.pop(stored, None)
        stored.mapped = stored.identity = None


def _too_large(snapshot: Snapshot, kind: str, budget: int) -> SnapshotError:
    return SnapshotError(
        f"the snapshot {snapshot.facts.label!r} takes {snapshot.nbytes:,} bytes, more than the whole {kind} budget of "
        f"{budget:,}: shorten the prompt or raise the budget",
        "too large",
    )
