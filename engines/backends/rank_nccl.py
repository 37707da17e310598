"""NCCL between ranks on GPUs that do not reach each other's memory, and what watches that nobody waits in vain."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from edgellm.engines.backends.cuda_device import CudaDevice
from edgellm.engines.errors import EngineError
from edgellm.engines.model.memory_plan import MEBIBYTE
from edgellm.kernels.arrays import DeviceArray
from edgellm.kernels.ranks.launcher import INBOX_BYTES
from edgellm.kernels.ranks.nccl import Communicators, NcclRank

logger = logging.getLogger("edgellm.cuda")

_Found = TypeVar("_Found")
#: What the first gathers may take, for which NCCL makes what it needs.
_FIRST_SECONDS = 30.0


class NcclRanks:
    """Brings what ranks have from one to the other, each on a GPU of its own: `ranks` are for `CudaRank`.

    What NCCL allocates (`nbytes` on each GPU) is in use from then on, before a model's memory is planned.
    """

    def __init__(self, devices: Sequence[CudaDevice], inboxes: Sequence[DeviceArray], seconds: float) -> None:
        """A rank may wait so many `seconds` for another. Raises MissingDependencyError without NCCL, EngineError where
        it brings nothing, KernelError with what else it says."""
        self._devices, self._seconds = devices, seconds
        free = self._each(lambda device: device.free_memory()[0])
        self.communicators = Communicators([device.gpu.index for device in devices])
        streams = [device.stream.handle for device in devices]
        self.ranks: list[NcclRank] = [self.communicators.rank(*each) for each in enumerate(streams)]
        for nbytes in (16, 1 << 18, INBOX_BYTES):  # what it makes at the first of a size is not made in a capture
            with self.communicators.group():
                for number, (rank, inbox) in enumerate(zip(self.ranks, inboxes, strict=True)):
                    rank.gather(inbox.pointer + nbytes * number, inbox.pointer, nbytes)
            with self.communicators.group():
                for rank, inbox in zip(self.ranks, inboxes, strict=True):
                    rank.broadcast(0, inbox.pointer, nbytes)
        self._await_first()
        left = self._each(lambda device: device.free_memory()[0])
        self.nbytes = [max(0, before - now) for before, now in zip(free, left, strict=True)]
        logger.info("GPUs add by %s, which takes %.0f MiB", self, max(self.nbytes) / MEBIBYTE)
        self._closed, self._watching = threading.Event(), threading.Thread()

    def __str__(self) -> str:
        return f"NCCL {self.communicators.library.version} ({self.communicators.library.path})"

    def _each(self, find: Callable[[CudaDevice], _Found]) -> list[_Found]:
        found = []
        for device in self._devices:
            with device.current():
                found.append(find(device))
        return found

    def _await_first(self) -> None:
        end = time.monotonic() + _FIRST_SECONDS
        while not all(self._each(lambda device: device.stream.is_done())):
            if time.monotonic() > end:
                threading.Thread(target=self.communicators.abort, name="edgellm-nccl", daemon=True).start()
                raise EngineError(
                    f"{self} brought nothing from GPU to GPU in {_FIRST_SECONDS:g} s: NCCL_DEBUG=INFO shows "
                    "what it tries; with NCCL_P2P_DISABLE=1 it goes through the host's memory"
                )
            time.sleep(0.001)

    def watch(
        self, progress: np.ndarray, fail: Callable[[int, Exception], object], missed: Callable[[int, int], None]
    ) -> None:
        """From now on look, in a thread, at `progress` [ranks, 2] uint32: sums that each has begun and ended. Where a
        rank has failed, or another waits for it for too long (`missed`), that is told, and all that waits is ended."""
        watching = partial(self._watch, progress, fail, missed)
        self._watching = threading.Thread(target=watching, name="edgellm-nccl-watch", daemon=True)
        self._watching.start()

    def _watch(self, progress: np.ndarray, fail: Callable[..., object], missed: Callable[..., None]) -> None:
        seen, since = progress.copy(), time.monotonic()
        while not self._closed.wait(min(1.0, self._seconds / 8)):
            now = progress.copy()
            if (failed := self.communicators.failure()) is not None:
                fail(failed[0], EngineError(failed[1]))
            elif (now[:, 0] == now[:, 1]).all() or not np.array_equal(now, seen):
                seen, since = now, time.monotonic()
                continue
            elif time.monotonic() - since < self._seconds:
                continue
            else:
                missed(*late_and_waiting(now))
            self.communicators.abort()
            return

    def close(self) -> None:
        """End the communicators. What was captured with them should be gone; else they go with it, later."""
        self._closed.set()
        if self._watching.ident is not None:
            self._watching.join(5.0)
        self.communicators.close()


def late_and_waiting(progress: np.ndarray) -> tuple[int, int]:
    """Of [ranks, 2] uint32 sums begun and ended the rank that is behind, and the first other one that waits."""
    behind = (progress - progress[0]).view(np.int32)  # they count on beyond 2 ** 32
    late = min(range(len(progress)), key=lambda rank: tuple(behind[rank]))
    waits = (rank for rank, (begun, ended) in enumerate(progress) if begun != ended and rank != late)
    return late, next(waits, late)
