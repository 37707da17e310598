"""Ranks that compute the parts of a program together, each in a thread of its own, and what passes between them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np

from edgellm.engines.errors import DeviceLostError


class Exchange:
    """Where `ranks` threads lay down what they have, and take what all have."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = Barrier(ranks)
        # By turns: the first lays down for the next one while others still take of the last; nobody is two ahead.
        self._places: tuple[list[Any], list[Any]] = [None] * ranks, [None] * ranks
        self._failed: tuple[int, BaseException] | None = None

    def all(self, rank: int, turn: int, own: np.ndarray) -> Sequence[np.ndarray]:
        """What all have, in the order of ranks, once all have laid it down; nobody may change it."""
        places = self._places[turn % 2]
        places[rank] = own
        self._barrier.wait()
        return tuple(places)

    def fail(self, rank: int, error: BaseException) -> None:
        """A rank has ended: nobody waits for it any more, and the first that did so is to blame."""
        if self._failed is None and not isinstance(error, BrokenBarrierError):
            self._failed = rank, error
        self._barrier.abort()

    def check(self) -> None:
        """Raise DeviceLostError that names a rank which has ended."""
        if self._failed is not None:
            rank, error = self._failed
            said = str(error) or type(error).__name__
            raise DeviceLostError(f"rank {rank} of {self.ranks} failed: {said}. Open the model anew") from error


class Rank:
    """One of those that share an `exchange`; it counts its turns, as the others do."""

    def __init__(self, number: int, exchange: Exchange) -> None:
        self.number, self._exchange, self._turn = number, exchange, 0

    def all(self, own: np.ndarray) -> Sequence[np.ndarray]:
        """See `Exchange.all`."""
        if self._exchange.ranks == 1:
            return (own,)
        self._turn += 1
        return self._exchange.all(self.number, self._turn, own)
