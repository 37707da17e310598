"""Snapshots that a runtime has made or loaded, in memory within a budget; a prompt finds the one that helps it most."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edgellm.errors import SnapshotError
from edgellm.snapshots.binding import SnapshotBinding, token_key
from edgellm.snapshots.file import read_snapshot, too_large
from edgellm.snapshots.snapshot import Snapshot, SnapshotFacts
from edgellm.snapshots.staging import file_identity, same_content, touch

logger = logging.getLogger("edgellm.snapshots")

MEMORY_BUDGET = 1 << 30
#: Maps of verified files that are kept open, so that their content is not hashed again.
_MOST_MAPS = 32
#: Of a token in a key.
_KEY_BYTES = 4


def common_tokens(first: bytes, second: bytes) -> int:
    """How many tokens two keys have in common from their beginning."""
    longest = min(len(first), len(second)) // _KEY_BYTES
    one, other = (np.frombuffer(key, np.uint32, longest) for key in (first, second))
    differs = one != other
    return int(np.argmax(differs)) if differs.any() else longest


@dataclass(eq=False)
class StoredSnapshot:
    """One snapshot of a store: in memory, on disk, or both. `nbytes` is its size in bytes. `has_states`: it is of use
    as a whole only, all of its tokens but the last."""

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
        return tuple(np.frombuffer(self.key, ">u4").tolist())


@dataclass(frozen=True)
class Match:
    """A stored snapshot, and how many tokens of a prompt it can give rows for (N, or fewer)."""

    stored: StoredSnapshot
    common: int


class SnapshotStore:
    """In memory are up to `memory_budget` bytes; what was used least recently goes first. A snapshot that has a file is
    of use without. Belongs to one thread."""

    def __init__(self, memory_budget: int = MEMORY_BUDGET) -> None:
        self.memory_budget = memory_budget
        #: By binding and the tokens' key.
        self._known: dict[SnapshotBinding, dict[bytes, StoredSnapshot]] = {}
        # By use, the least recent first.
        self._memory: OrderedDict[StoredSnapshot, None] = OrderedDict()
        self._maps: OrderedDict[StoredSnapshot, None] = OrderedDict()

    def put(self, snapshot: Snapshot) -> StoredSnapshot:
        """Keep a snapshot in memory; SnapshotError where it is larger than the whole budget."""
        if snapshot.nbytes > self.memory_budget:
            raise too_large(snapshot, "memory", self.memory_budget)
        stored = self._stored(snapshot)
        stored.memory = snapshot
        self._memory[stored] = None
        self._memory.move_to_end(stored)
        while self.memory_bytes > self.memory_budget:
            evicted = next(iter(self._memory))
            logger.info("snapshot %r leaves the memory: its budget is used up", evicted.facts.label)
            self._forget_memory(evicted)
        return stored

    def add_file(self, path: Path) -> StoredSnapshot:
        """Use the snapshot of a file, which stays where it is. Raises SnapshotError."""
        stored = self._stored(read_snapshot(path))
        stored.path = stored.path or path
        return stored

    def find(
        self, binding: SnapshotBinding, prompt_ids: Sequence[int], cut: Callable[[int, int], int] | None = None
    ) -> Match | None:
        """What shares the longest prefix with a prompt; None where nothing does.

        One that cannot be `cut` there (see `LayerState.cut`; None: each can) is none; then what a prompt begins with as
        a whole is of use. A snapshot with states of recurrent layers is of use only as a whole, and its states are
        those before its last token.
        """
        prompt, known, common = token_key(prompt_ids), self._known.get(binding, {}), 0
        for key in sorted(known, key=len, reverse=True):  # the longest leave little for others to share
            if key.startswith(prompt[: _KEY_BYTES * (common + 1)]):
                common = common_tokens(key, prompt)
        if common == 0:
            return None
        found = [stored for key, stored in known.items() if key.startswith(prompt[: _KEY_BYTES * common])]
        if cut is not None:
            found = [stored for stored in found if cut(stored.facts.tokens, common)]
        if not found or found[0].has_states:
            wholes = [stored for key, stored in known.items() if prompt.startswith(key)]
            if not wholes:
                return None
            found = [max(wholes, key=lambda stored: stored.facts.tokens)]
            common = found[0].facts.tokens
        return Match(next((stored for stored in found if stored.memory is not None), found[0]), common)

    def open(self, stored: StoredSnapshot) -> Snapshot:
        """The snapshot, from memory or mapped; it now counts as used. A file that was verified once, and has not
        changed since, is verified still. Raises SnapshotError.
        """
        if stored.memory is not None:
            self._memory.move_to_end(stored)
            return stored.memory
        assert stored.path is not None  # or it would not be known any more
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

    def discard(self, stored: StoredSnapshot) -> None:
        """Use a snapshot no more; its file stays where it is."""
        self._close_map(stored)
        stored.path = None
        self._forget_memory(stored)

    def forget_memory(self) -> None:
        """Let go of what is in memory; snapshots that have files stay usable."""
        for stored in list(self._memory):
            self._forget_memory(stored)

    def snapshots(self) -> list[StoredSnapshot]:
        return [stored for known in self._known.values() for stored in known.values()]

    @property
    def memory_bytes(self) -> int:
        return sum(stored.nbytes for stored in self._memory)

    def _stored(self, snapshot: Snapshot) -> StoredSnapshot:
        """The entry of a snapshot's binding and tokens, new or not."""
        binding, key = snapshot.facts.binding, token_key(snapshot.token_ids)
        new = StoredSnapshot(snapshot.facts, key, snapshot.nbytes, bool(snapshot.states))
        stored = self._known.setdefault(binding, {}).setdefault(key, new)
        stored.facts, stored.nbytes = snapshot.facts, snapshot.nbytes
        return stored

    def _forget_memory(self, stored: StoredSnapshot) -> None:
        """Let go of what is in memory of a snapshot, and of all of it where it has no file."""
        self._memory.pop(stored, None)
        stored.memory = None
        known = self._known.get(stored.facts.binding, {})
        if stored.path is None and known.get(stored.key) is stored:
            del known[stored.key]
            if not known:  # a binding for each set of images would add up
                del self._known[stored.facts.binding]

    def _close_map(self, stored: StoredSnapshot) -> None:
        """Let go of a file's map; who uses it still keeps it alive."""
        self._maps.pop(stored, None)
        stored.mapped = stored.identity = None
