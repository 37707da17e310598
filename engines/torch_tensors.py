"""What a PyTorch file says of its tensors: storages, and tensors as views of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: PyTorch's classes of storages: the project's name of the dtype, and the bytes of one element.
STORAGES = {
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "UntypedStorage": ("untyped", 1),
}


@dataclass(frozen=True)
class Storage:
    """A block of `count` elements of one dtype, found under `key`; `item_size` in bytes."""

    key: str
    dtype: str
    item_size: int
    count: int

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.count * self.item_size


@dataclass(frozen=True, eq=False)
class TensorView:
    """A tensor: its place in a storage, `offset` and `strides` in elements; all of it lies within the storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size in bytes, written out."""
        return math.prod(self.shape) * self.storage.item_size

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one behind the other in C order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1 and stride != expected:
                return False
            expected *= extent
        return True
