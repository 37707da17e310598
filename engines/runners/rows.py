"""What slots hold, exchanged and copied between them: KV rows, and where the next of them is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgellm.engines.backends.base import Backend
from edgellm.kernels.arrays import Array, leading


class SlotRows:
    """Arrays with the slots as first axis: KV caches, and the row that an idle slot's part in a step writes.

    Both change places together, so that a step of the slots before it never writes over the rows of an idle one.
    """

    def __init__(self, backend: Backend, caches: Sequence[Array], starts: Array) -> None:
        """`caches` [S, H, C, D] are of one dtype, `starts` [S] int32."""
        self._backend, self._arrays = backend, (*caches, starts)
        self._spare: dict[str, Array] = {}
        if starts.shape[0] > 1:
            largest = max(math.prod(cache.shape[1:]) for cache in caches)
            self._spare = {"int32": backend.empty((1,), "int32"), "compute": backend.empty((largest,), "compute")}

    def swap(self, first: int, second: int) -> None:
        """Exchange what two slots hold."""
        for array in self._arrays:
            one, other = array[first : first + 1], array[second : second + 1]
            spare = leading(self._spare["compute" if len(array.shape) > 1 else "int32"], tuple(one.shape))
            for target, source in ((spare, one), (one, other), (other, spare)):
                self._backend.copy(target, source)

    def copy(self, source: int, target: int) -> None:
        """Let slot `target` hold what `source` holds."""
        for array in self._arrays:
            self._backend.copy(array[target : target + 1], array[source : source + 1])
