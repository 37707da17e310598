"""Safetensors files, memory-mapped and read without trust.

The format (https://github.com/huggingface/safetensors): the header's length in bytes as 8 bytes, little-endian; the
header, a JSON object that gives each tensor's dtype, shape and place; then the tensors' bytes, without holes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from edgellm.engines.errors import CheckpointError

#: The dtypes of file formats, by their own names or numbers.
TYPES_OF_FILES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("dtypes.json").read_text("utf-8"))
#: The project's name of a dtype and the bytes of one element, by safetensors' name.
DTYPES: dict[str, tuple[str, int]] = {name: tuple(own) for name, own in TYPES_OF_FILES["safetensors"].items()}

#: The format's own bound on the header, in bytes.
LARGEST_HEADER = 100_000_000

#: What NumPy takes as dimensions, in every release.
_LARGEST_RANK = 32
LARGEST_COUNT = (1 << 63) - 1

_LENGTH_BYTES = 8
COPY_AGAIN = "Copy the file anew from its source"
#: How a file begins that Git LFS leaves in place of a large one, and what to do with it.
LFS_POINTER = b"version https://git-lfs"
FETCH_FILE = "is a pointer of Git LFS, not the file itself. Fetch that: git lfs pull in the folder that was cloned"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` in bytes from the start of `file`, `nbytes` long, C-ordered.

    `dtype` is the project's name: "float16", "bfloat16", "float32", or one that models are not computed in. With
    `turned` a matrix [N, K] is the transpose of N columns of what lies there, which has rows of so many; `offset` is
    that of the first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    turned: int = 0

    def part(self, number: int, shape: tuple[int, ...], rows: str) -> TensorInfo:
        """The tensor of a `shape` that lies in this one behind `number` others like it; `rows` says where, in words."""
        size = self.nbytes * math.prod(shape) // max(1, math.prod(self.shape))
        return replace(self, name=f"{self.name}[{rows}]", shape=shape, offset=self.offset + number * size, nbytes=size)


#: Safetensors' name of a dtype by the project's.
_NAMES = {name: key for key, (name, _) in DTYPES.items()}


def element_bytes(dtype: str) -> int:
    """The bytes of one element of a dtype, by the project's name of it."""
    return DTYPES[_NAMES[dtype]][1]


def file_header(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    metadata: Mapping[str, str],
    alignment: int = _LENGTH_BYTES,
) -> tuple[bytes, dict[str, TensorInfo]]:
    """What a file begins with that has these tensors, each of a dtype and a shape, one behind the other, and their
    places in it; the first begins at a multiple of `alignment` bytes. Raises CheckpointError for more names than a file
    may have."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    infos, end = list[TensorInfo](), 0
    for name, (dtype, shape) in tensors.items():
        infos.append(TensorInfo(name, dtype, tuple(shape), path, end, math.prod(shape) * element_bytes(dtype)))
        begin, end = end, end + infos[-1].nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(len(encoded) + _LENGTH_BYTES) % alignment)
    if (size := len(encoded)) > LARGEST_HEADER:
        raise CheckpointError(f"The names and shapes take {size:,} bytes, safetensors allows {LARGEST_HEADER:,}")
    places = {info.name: replace(info, offset=_LENGTH_BYTES + size + info.offset) for info in infos}
    return size.to_bytes(_LENGTH_BYTES, "little") + encoded, places


class SafetensorsFile:
    """One file, memory-mapped: `tensors` by name and their bytes; `status` as it was when it was opened; `metadata` is
    what the header has under `__metadata__`, unchecked, None for nothing."""

    def __init__(self, path: Path) -> None:
        """Map the file and check its whole header; raises CheckpointError that names file and cause."""
        self.path = path
        mapped, self.status = mapped_file(path, "safetensors file")
        try:
            self.metadata, self.tensors = _parse_header(path, mapped, len(mapped))
        except BaseException:
            mapped.close()
            raise
        self._map: mmap.mmap | None = mapped

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes [nbytes] uint8: a read-only view of the map. Raises CheckpointError once closed."""
        if self._map is None:
            raise CheckpointError(f"{self.path} was closed: read its tensors before, or open the checkpoint again")
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of it that is still in use."""
        mapped, self._map = self._map, None
        if mapped is not None:
            with suppress(BufferError):  # a view exists; it keeps the map alive and frees it with itself
                mapped.close()


def mapped_file(path: Path, kind: str) -> tuple[mmap.mmap, os.stat_result]:
    """A file of at least 8 bytes, mapped for reading, and its status as it was then; CheckpointError calls it a file of
    this `kind`."""
    file, status = opened_file(path, kind)
    with file, _explained(path):
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), status


def opened_file(path: Path, kind: str) -> tuple[BufferedReader, os.stat_result]:
    """A file of at least 8 bytes, opened for reading, and its status as it was then; raises as `mapped_file` does."""
    with _explained(path):
        if path.exists() and not path.is_file():  # opening a pipe would wait for ever
            raise CheckpointError(f"{path} is not a regular file. {COPY_AGAIN}")
        file = path.open("rb")
        status = os.fstat(file.fileno())
        if status.st_size < _LENGTH_BYTES:
            file.close()
            raise CheckpointError(
                f"{path} is not a valid {kind}: it has {status.st_size} bytes, none has less than 8 bytes. {COPY_AGAIN}"
            )
        if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
            file.close()
            raise CheckpointError(f"{path} {FETCH_FILE}")
        return file, status


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise CheckpointError for a file that cannot be opened."""
    try:
        yield
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {path.readlink()}, which does not exist. Put the file back there, or in place of "
                "the link"
            ) from None
        raise CheckpointError(f"{path} does not exist. {COPY_AGAIN}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror or error}. Make it readable for this user"
        ) from error


def _damaged(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a valid safetensors file: {cause}. {COPY_AGAIN}")


def _parse_header(path: Path, data: mmap.mmap, size: int) -> tuple[Any, dict[str, TensorInfo]]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > LARGEST_HEADER:
        raise _damaged(path, f"its header is said to be {length:,} bytes long, at most {LARGEST_HEADER:,} are allowed")
    if length > size - _LENGTH_BYTES:
        raise _damaged(path, f"it is truncated: {size:,} bytes, of which the header alone takes {length:,}")
    try:
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length].decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, f"its header is a JSON {type(header).__name__}, expected an object")
    metadata = header.pop("__metadata__", None)
    start = _LENGTH_BYTES + length
    tensors = {name: _parse_tensor(path, name, entry, start) for name, entry in header.items()}
    _check_places(path, list(tensors.values()), start, size)
    return metadata, tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{', '.join(map(repr, repeated[:5]))} occurs more than once")
    return values


def _parse_tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise _damaged(path, f"tensor {name!r} is described by a {type(entry).__name__}, expected an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damaged(path, f"tensor {name!r} has the dtype {brief(dtype)}, expected one of {', '.join(DTYPES)}")
    if not are_counts(shape):
        raise _damaged(
            path,
            f"tensor {name!r} has the shape {brief(shape)}, expected a list of at most {_LARGEST_RANK} whole numbers",
        )
    if not are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor {name!r} has the data_offsets {brief(offsets)}, expected [begin, end]")
    dtype, item_size = DTYPES[dtype]
    if math.prod(max(1, extent) for extent in shape) * item_size > LARGEST_COUNT:  # an empty tensor could be
        raise _damaged(path, f"tensor {name!r} has the shape {brief(shape)}, larger than any memory")
    nbytes, expected = offsets[1] - offsets[0], math.prod(shape) * item_size
    if nbytes != expected:
        raise _damaged(path, f"tensor {name!r} has {nbytes:,} bytes, its shape {shape} of {dtype} takes {expected:,}")
    return TensorInfo(name, dtype, tuple(shape), path, start + offsets[0], nbytes)


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value that a file holds is a whole number that can count elements."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def are_counts(values: Any, kind: type[Sequence[int]] = list) -> TypeGuard[Sequence[int]]:
    """Whether a value is a list, or what `kind` says, of numbers that can be a shape."""
    return isinstance(values, kind) and len(values) <= _LARGEST_RANK and all(map(is_count, values))


def brief(value: Any) -> str:
    """A value for a message; nested ones by their type alone, which may be of any depth."""
    nested = isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value)
    return f"a nested {type(value).__name__}" if nested or isinstance(value, dict) else f"{value!r:.80}"


def _check_places(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """The tensors must fill the rest of the file, one behind the other."""
    position, previous = start, "the header"
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            relation = "overlaps" if info.offset < position else "leaves a hole behind"
            raise _damaged(path, f"tensor {info.name!r} {relation} {previous}")
        position, previous = info.offset + info.nbytes, f"tensor {info.name!r}"
        if position > size:
            raise _damaged(path, f"it is truncated: {size:,} bytes, but {previous} ends at byte {position:,}")
    if position != size:
        raise _damaged(path, f"{size - position:,} bytes follow {previous}, where the file should end")
