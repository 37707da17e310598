"""Places in memory, the calls of kernels on them, and how buffers of an encoder's program share scratch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgellm.engines.model.steps import Linear

#: Bytes at whose multiples buffers begin.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Place:
    """An array in memory: of a tensor at the edge, by name, or of a buffer, by number.

    `dtype` is "compute" where it is the model's; `first` elements stand before it.
    """

    memory: str | int
    shape: tuple[int, ...]
    dtype: str
    first: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Call(NamedTuple):
    """A kernel, by its method's name, or a plan, and what it gets: places, linear layers, names, numbers."""

    kernel: str
    arguments: tuple[Any, ...]

    @property
    def memory(self) -> frozenset[str | int]:
        """Tensors and buffers that it reads or writes."""
        found: set[str | int] = {each.memory for each in self.arguments if isinstance(each, Place)}
        for linear in (each for each in self.arguments if isinstance(each, Linear)):
            found |= {spec.name for spec in (linear.weight, linear.bias) if spec is not None}
        return frozenset(found)


def laid_out(calls: list[Call], sizes: list[int]) -> tuple[list[int], int]:
    """Where each buffer begins, in bytes, and the bytes of all.

    Two share memory where one's last use comes before the other's first.
    """
    used: dict[str | int, tuple[int, int]] = {}  # its first and its last call; tensors have theirs, too
    for number, call in enumerate(calls):
        used |= {each: (used.get(each, (number,))[0], number) for each in call.memory}
    begins, placed, total = [0] * len(sizes), list[int](), 0
    for buffer in sorted(range(len(sizes)), key=lambda each: used[each][0]):
        size = -(-sizes[buffer] // _ALIGNMENT) * _ALIGNMENT
        beside = [other for other in placed if used[other][1] >= used[buffer][0]]
        begin = 0
        for first, end in sorted((begins[other], begins[other] + sizes[other]) for other in beside):
            if first - begin >= size:
                break
            begin = max(begin, -(-end // _ALIGNMENT) * _ALIGNMENT)
        begins[buffer] = begin
        placed.append(buffer)
        total = max(total, begin + size)
    return begins, total
