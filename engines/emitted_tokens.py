"""The tokens that decode steps emit, in memory that the host sees."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.engines.backends.base import Backend, Readback

#: Places of the ring that a sequence's tokens are emitted to: how many may be unread at a time.
_PLACES = 8


class EmittedTokens:
    """The tokens that a step emits: for each of n sequences the one at its place of its ring."""

    def __init__(self, ring: Readback, places: Sequence[int]) -> None:
        """`ring` reads [n, E] int32."""
        self._ring, self._places = ring, tuple(places)

    def wait(self) -> np.ndarray:
        """[n] int32, once the step is done."""
        return self._ring.wait()[np.arange(len(self._places)), self._places]


class EmittedRings:
    """A ring of emitted tokens for each slot: `tokens` [S, E] int32, which kernels write at the places `index` [S]."""

    def __init__(self, backend: Backend, slots: int) -> None:
        self._backend = backend
        self.index = backend.zeros((slots,), "int32")
        self.tokens = backend.host_visible((slots, _PLACES), "int32")
        self._next_places = [0] * slots  # the values of `index`

    def read(self, slots: slice, advanced: slice) -> EmittedTokens:
        """Read what a step that advanced the slots `advanced` emitted for `slots`."""
        emitted = EmittedTokens(self._backend.read(self.tokens[slots]), self._next_places[slots])
        for slot in range(advanced.start, advanced.stop):
            self._next_places[slot] = (self._next_places[slot] + 1) % _PLACES
        return emitted
