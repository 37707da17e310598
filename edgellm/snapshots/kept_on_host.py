"""What is kept on the host of slots: rows of answers that gave way to others, until they go on, and recurrent states at
chosen places of texts, so that texts which begin alike go on from there.

KV rows can be cut to any prefix; a recurrent state is of one place alone. So a prompt goes on from the latest place of
the prefix that it shares with a slot's rows at which there is a state: where the slot itself is now (the end of an
answer, which is kept when a next turn goes on from it), or a kept one. As a prompt is computed `chosen_places` chooses:

- where it parts from other texts, which is the end of a system prompt that conversations share;
- behind its last image, of which something else may be asked;
- a few tokens before its end, where the next turn departs: chat templates render what they ask the model with (the
  beginning of the answer, or of its reasoning) otherwise, or not at all, once the answer is history;
- every so many tokens of a long one.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engines.errors import DeviceMemoryError
from edgellm.engines.runners.media import TokenIdentity
from edgellm.engines.runners.states import SlotRows
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.snapshots.snapshot import NUMPY_DTYPES
from edgellm.snapshots.transfer import RowCopy, Uploader

logger = logging.getLogger("edgellm.snapshots")

#: Bytes of host memory for kept rows where nobody says otherwise; it is taken when it is needed.
PREEMPTION_BUDGET = 256 << 20
#: What the memory plan calls it.
KEPT_ROWS = "rows of answers that give way"
#: Tensors begin at a multiple of it, in bytes.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class KeptRows:
    """What a slot held of a sequence: `rows` of the base and `draft_rows` of the draft (None: there is none), in
    `memory` [n] uint8, tensor by tensor."""

    rows: int
    draft_rows: int | None
    memory: np.ndarray


class RowKeeper:
    """Keeps what slots of a runner hold, in up to `budget` bytes on the host. Used from the runner's thread.

    Memory that was let go of is used again: pinning takes milliseconds. Copies follow the runner's other work, in
    order: nothing is waited for.
    """

    def __init__(self, runner: DecodingRunner, budget: int = PREEMPTION_BUDGET) -> None:
        self.budget = budget
        runner.base.memory_plan.host[KEPT_ROWS] = budget
        #: What is kept.
        self.nbytes = 0
        self._runner, self._backend = runner, runner.backend
        self._uploader = Uploader(runner.backend)
        self._free: list[np.ndarray] = []

    def keep(self, slot: int, rows: int, draft_rows: int | None) -> KeptRows | None:
        """Keep what a slot holds, of so many rows; None where the budget, or the machine's memory, has no room."""
        held = list(self._runner.held(slot, rows, draft_rows))
        memory = self._memory(sum(map(padded_bytes, held)))
        if memory is None:
            return None
        for copy in copies_in(held, memory):
            self._backend.download_rows(copy.cache, copy.values, copy.rows, copy.first)
        self.nbytes += memory.nbytes
        return KeptRows(rows, draft_rows, memory)

    def put_back(self, slot: int, kept: KeptRows) -> None:
        """Let an idle slot hold what was kept; what is enqueued from now on waits for it."""
        held = self._runner.held(slot, kept.rows, kept.draft_rows)
        transfers = [transfer for _, transfer in self._uploader.upload(copies_in(held, kept.memory))]
        self._backend.wait_for(transfers[-1])  # they end in their order

    def release(self, kept: KeptRows) -> None:
        """Let go of rows, once: what is kept next may take their memory."""
        self.nbytes -= kept.memory.nbytes
        self._free.append(kept.memory)

    def close(self) -> None:
        """Let go of everything; call it before the runner is closed."""
        self._backend.synchronize()
        self._uploader.close()
        self._free.clear()

    def _memory(self, nbytes: int) -> np.ndarray | None:
        """Memory for `nbytes` bytes, perhaps more; None where there is no room for it."""
        room = self.budget - self.nbytes
        if nbytes > room:
            return None
        most = min(room, 2 * nbytes)
        fitting = [(each.nbytes, place) for place, each in enumerate(self._free) if nbytes <= each.nbytes <= most]
        if fitting:
            return self._free.pop(min(fitting)[1])
        if sum(each.nbytes for each in self._free) + nbytes > room:
            self._backend.synchronize()  # nothing is copied from or to it any more
            self._free.clear()
        try:
            return self._backend.host_memory(nbytes)
        except DeviceMemoryError as error:
            logger.warning("rows of an answer that gives way are not kept, they will be computed again: %s", error)
            return None


def padded_bytes(held: SlotRows) -> int:
    """The bytes of what a keeper holds of a slot's tensor, with what aligns the next one."""
    groups, _, size = held.memory.shape
    nbytes = groups * held.rows * size * NUMPY_DTYPES[str(held.memory.dtype)].itemsize
    return math.ceil(nbytes / _ALIGNMENT) * _ALIGNMENT


def copies_in(held: Iterable[SlotRows], memory: np.ndarray) -> Iterator[RowCopy]:
    """Copies between what slots hold and its place in `memory`; one by one, so that the first is on its way while the
    others are being made."""
    place = 0
    for each in held:
        groups, _, size = each.memory.shape
        values = memory[place : place + padded_bytes(each)].view(NUMPY_DTYPES[str(each.memory.dtype)])
        values = values[: groups * each.rows * size].reshape(groups, each.rows, size)
        yield RowCopy(each.name, each.memory, values, each.rows, each.first)
        place += padded_bytes(each)


#: Bytes of host memory for kept states where nobody says otherwise; it is taken when it is needed.
STATE_BUDGET = 256 << 20
#: What the memory plan calls it.
KEPT_STATES = "states at places of texts"
#: Of a long prompt a state is kept every so many tokens; before the end of every prompt one is so many tokens before
#: it, as many as kernels compute at once; places are at least so far from each other, since less is not worth a copy.
EVERY, TAIL, LEAST = 1024, 16, 64
#: The part of the budget that one prompt's places of every so many tokens take at most.
_SHARE = 4

#: An adapter's digest (None: no adapter), and a digest of the tokens before the place.
_Key = tuple[str | None, bytes]


class StateKeeper:
    """Keeps recurrent states of a runner's slots in up to `budget` bytes on the host; what was used least recently goes
    first. Used from the runner's thread.

    A state is that of a place in a text: of the tokens before it, computed with an adapter (its digest, or None). All
    take as much memory, so that what goes leaves its own to what comes. Copies follow the runner's other work, in
    order: nothing is waited for.
    """

    every, tail, least = EVERY, TAIL, LEAST

    def __init__(self, runner: DecodingRunner, budget: int = STATE_BUDGET) -> None:
        self._states, self._backend = runner.base.states, runner.backend
        self._has_draft = runner.draft.has_model
        #: What one state takes, and how many there may be.
        self.size = sum(map(padded_bytes, self._states.recurrent_of_slot(0)))
        self.most = budget // self.size
        runner.base.memory_plan.host[KEPT_STATES] = budget
        #: By use, the least recent first: how many tokens are before the place, and the state.
        self._kept: OrderedDict[_Key, tuple[int, np.ndarray]] = OrderedDict()
        self._looked_up: tuple[Sequence[TokenIdentity], str | None, dict[int, _Key]] | None = None

    @property
    def nbytes(self) -> int:
        return len(self._kept) * self.size

    def latest(self, tokens: Sequence[TokenIdentity], adapter: str | None, limit: int) -> int:
        """The latest place of a text, at most `limit`, at which a state is kept; 0 where there is none."""
        return max((place for place in self._places(tokens, adapter) if place <= limit), default=0)

    def keep(self, slot: int, tokens: Sequence[TokenIdentity], place: int, adapter: str | None) -> None:
        """Keep the state of a slot, which has taken the first `place` tokens of a text; it counts as used."""
        key = (adapter, next(_prefix_digests(tokens, [place])))
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        memory = self._memory()
        if memory is None:
            return
        for copy in copies_in(self._states.recurrent_of_slot(slot), memory):
            self._backend.download_rows(copy.cache, copy.values, copy.rows)
        self._kept[key], self._looked_up = (place, memory), None

    def put_back(self, slot: int, tokens: Sequence[TokenIdentity], place: int, adapter: str | None) -> None:
        """Let a slot have the state that is kept of a place of a text (see `latest`)."""
        places = self._places(tokens, adapter)
        self._kept.move_to_end(places[min(places)])  # the beginning that most share
        self._kept.move_to_end(places[place])
        for copy in copies_in(self._states.recurrent_of_slot(slot), self._kept[places[place]][1]):
            self._backend.upload_rows(copy.cache, copy.values, copy.rows)

    def chosen(
        self, tokens: Sequence[TokenIdentity], reused: int, shared: Iterable[int], adapter: str | None
    ) -> list[int]:
        """The places of a prompt to keep states at, where its first `reused` tokens are not computed; see
        `chosen_places`. With a draft the token behind a place belongs to what can be reused there, too."""
        known = self._places(tokens, adapter)
        places, distances = (place - self._has_draft for place in shared), (self.every, self.tail, self.least)
        wanted = chosen_places(len(tokens), reused, places, self.most // _SHARE, distances)
        return [place for place in wanted if place not in known] if self.most else []

    def close(self) -> None:
        """Let go of everything; call it before the runner is closed."""
        self._backend.synchronize()
        self._kept.clear()
        self._looked_up = None

    def _places(self, tokens: Sequence[TokenIdentity], adapter: str | None) -> dict[int, _Key]:
        """The places of a text at which states are kept. Several slots are compared with one text: it is looked up
        once."""
        latest = self._looked_up
        if latest is None or latest[0] is not tokens or latest[1] != adapter:
            places = sorted({place for place, _ in self._kept.values() if place <= len(tokens)})
            digests = zip(places, _prefix_digests(tokens, places), strict=True)
            found = {place: key for place, digest in digests if (key := (adapter, digest)) in self._kept}
            latest = self._looked_up = tokens, adapter, found
        return latest[2]

    def _memory(self) -> np.ndarray | None:
        """Memory for one more; None where there is no room for any."""
        if len(self._kept) < self.most:
            try:
                return self._backend.host_memory(self.size)
            except DeviceMemoryError as error:
                logger.warning("states of texts are kept at fewer places: %s", error)
                self.most = len(self._kept)
        if not self.most:
            return None
        self._looked_up = None
        return self._kept.popitem(last=False)[1][1]


def chosen_places(
    count: int, reused: int, shared: Iterable[int], most: int, distances: tuple[int, int, int] = (EVERY, TAIL, LEAST)
) -> list[int]:
    """Where to keep states of a prompt of `count` tokens, of which the first `reused` are not computed; ascending.

    `shared` are places where it parts from other texts, the more certain first, `most` how many of every so many tokens
    there may be: they are farther from each other where these are too few. `distances` are those of `EVERY`, `TAIL` and
    `LEAST`.
    """
    every, tail, least = distances
    while most and (count - reused) // every > most:
        every *= 2
    regular = range((reused // every + 1) * every, count, every) if most else ()
    found: list[int] = []
    for place in (*shared, count - tail, *regular):
        if reused + least <= place <= count - tail and all(abs(place - other) >= least for other in found):
            found.append(place)
    return sorted(found)


def _prefix_digests(tokens: Sequence[TokenIdentity], places: Iterable[int]) -> Iterator[bytes]:
    """The SHA-256 of the tokens before each of the places, which ascend: of int64, ids as they are, tokens of images as
    negative numbers that their contents make."""
    digest, done = hashlib.sha256(), 0
    for place in places:
        numbers = [_number(*token) if isinstance(token, tuple) else token for token in tokens[done:place]]
        digest.update(np.asarray(numbers, np.int64).tobytes())
        yield digest.digest()
        done = place


def _number(image: str, index: int) -> int:
    digest = hashlib.sha256(f"{image} {index}".encode()).digest()
    return -1 - int.from_bytes(digest[:7], "little")
