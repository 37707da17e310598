"""Tensors of which each rank holds the part that it computes with, in memory of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgellm.engines.model.sharding import Range
from edgellm.kernels.arrays import ITEM_SIZES, DeviceArray


@dataclass(frozen=True)
class RankedArray:
    """A state [S, n, C, D], of which each rank has some of the n heads, or adapters [R, N], of which it has some of the
    columns or all: `parts` are which, in one range or several, and where. It is used as `DeviceArray` is.

    Where there are fewer heads than ranks, several have the same. Of one slot a state is [n, C, D]; then a rank may
    have none of what is looked at.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[tuple[Range, ...], DeviceArray], ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes of what one GPU would hold."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]

    def __getitem__(self, leading: slice) -> RankedArray:
        """Some slots or rows, or some heads of a slot."""
        start, stop, _ = leading.indices(self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        if len(shape) != 3:
            return replace(self, shape=shape, parts=tuple((own, part[leading]) for own, part in self.parts))
        parts = []
        for ((begin, end),), part in self.parts:
            first, last = max(begin, start), min(end, stop)
            if first < last:
                parts.append((((first - start, last - start),), part[first - begin : last - begin]))
        return replace(self, shape=shape, parts=tuple(parts))

    def reshape(self, *shape: int) -> RankedArray:
        """One slot [1, n, C, D] as [n, C, D]; raises ValueError otherwise."""
        if len(self.shape) != 4 or self.shape[0] != 1 or shape != self.shape[1:]:
            raise ValueError(f"cannot view heads of several GPUs {self.shape} as {shape}")
        return replace(self, shape=shape, parts=tuple((own, part.reshape(*part.shape[1:])) for own, part in self.parts))

    def beside(self, whole: DeviceArray) -> list[tuple[DeviceArray, DeviceArray]]:
        """Of one slot [1, n, C, D], each rank's part with its place in an array of one GPU of the same shape."""
        rows = whole.reshape(*whole.shape[1:])
        return [(part, rows[begin:end]) for ((begin, end),), part in self.reshape(*self.shape[1:]).parts]
