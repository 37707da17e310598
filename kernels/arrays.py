"""What kernels take as arguments: NumPy arrays in the reference, `DeviceArray` on the GPU."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

#: Bytes of one element, by the project's name of a dtype. NumPy has no bfloat16; on the host its bits are uint16.
ITEM_SIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}
_C_TYPES = {"void*": "c_void_p"}


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous C-ordered array in device memory.

    `pointer` is the device address, `shape` in elements, `dtype` a key of `ITEM_SIZES`; `owner` keeps the allocation
    alive for as long as any view of it lives.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    owner: Any = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * ITEM_SIZES[self.dtype]

    def reshape(self, *shape: int) -> DeviceArray:
        """The same memory under another shape with as many elements; raises ValueError otherwise.

        One size may be -1, as with NumPy: what the others leave.
        """
        if shape.count(-1) == 1:
            known = -math.prod(shape)
            shape = tuple(self.size // known if size == -1 and known else size for size in shape)
        if math.prod(shape) != self.size or min(shape, default=0) < 0:
            raise ValueError(f"cannot view {self.shape} ({self.size} elements) as {shape}")
        return DeviceArray(self.pointer, tuple(shape), self.dtype, self.owner)

    def __getitem__(self, leading: slice) -> DeviceArray:
        """A view of rows `start:stop` of the first axis (step 1), contiguous like the whole."""
        start, stop, step = leading.indices(self.shape[0])
        if step != 1:
            raise ValueError("a device array is sliced along its first axis with step 1 only")
        row_bytes = math.prod(self.shape[1:]) * ITEM_SIZES[self.dtype]
        rows = max(0, stop - start)
        return DeviceArray(self.pointer + start * row_bytes, (rows, *self.shape[1:]), self.dtype, self.owner)


#: Either kind: a kernel set works on the one that its backend allocates.
Array = np.ndarray | DeviceArray
#: One of the kind that the reader works on, where a field serves both: only who reads it knows which.
OwnArray: TypeAlias = Any


def leading(buffer: Array, shape: tuple[int, ...]) -> Array:
    """The first elements of a flat buffer, in another shape."""
    return buffer[: math.prod(shape)].reshape(*shape)


def members(*declared: str) -> list[tuple[str, Any]]:
    """`_fields_` of a structure that kernels take: "int rows columns" declares two members. Types are those of ctypes,
    and void*."""
    parts = (line.split() for line in declared)
    return [(name, getattr(ctypes, _C_TYPES.get(kind, f"c_{kind}"))) for kind, *names in parts for name in names]
