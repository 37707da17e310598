"""Rows of answers that gave way to others, kept on the host until they go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from edgellm.engines.errors import DeviceMemoryError
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
