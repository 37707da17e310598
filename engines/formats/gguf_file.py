"""GGUF files, read without trust: metadata, the table of tensors, and the tensors' bytes as they are asked for.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, the numbers of
tensors and of pieces of metadata; each of these as a key, a type and a value; each tensor's name, dimensions (columns
first), type and place; then, from the next multiple of the alignment on, their bytes. A model may be split into files
`NAME-00001-of-00003.gguf`, of which the first has the metadata.

Bytes are read at their place, not mapped: a file that somebody shortens meanwhile ends in an error, where memory that
was mapped would end the process.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.errors import CheckpointError, explained
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, LARGEST_COUNT, TYPES_OF_FILES, TensorInfo, opened_file

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: By its number: a type's name here, its elements in a block, and a block's bytes.
TYPES: dict[int, tuple[str, int, int]] = {int(kind): tuple(own) for kind, own in TYPES_OF_FILES["gguf"].items()}
#: Types that are not read, for errors.
_OTHER_TYPES = {int(kind): name for kind, name in TYPES_OF_FILES["unread gguf"].items()}
#: The types of metadata that are numbers, by their numbers, as `struct` and NumPy call them.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: In bytes; those of a vocabulary of 262,144 tokens with their merges take 20 MiB.
LARGEST_HEADER = 256 << 20
#: Far more than any model has; each costs memory of its own.
_MOST_KEYS, _MOST_TENSORS, _MOST_ELEMENTS, _MOST_FILES = 1 << 16, 1 << 17, 1 << 24, 1 << 10
_LONGEST_NAME, _LONGEST_KEY = 256, 1 << 16
_MOST_DIMENSIONS = 4
_ALIGNMENT, _ALIGNMENTS = 32, (8, 1 << 16)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
#: Bytes that are read ahead of an array of strings, whose lengths stand before each.
_READ_AHEAD = 1 << 20
#: Linux gives no more at a time.
_MOST_READ = 1 << 30


class Texts:
    """An array of strings in the metadata: a vocabulary, which few who open a file ask for. `error` is what stands for
    one of Python's."""

    def __init__(self, data: bytes, count: int, error: Callable[[UnicodeDecodeError], CheckpointError]) -> None:
        self._data, self._count, self._error = data, count, error

    def read(self) -> list[str]:
        """The strings. Raises CheckpointError for what is no UTF-8 text."""
        length_at, found, place = struct.Struct("<Q").unpack_from, list[str](), 0
        try:
            for _ in range(self._count):
                begin = place + 8
                place = begin + length_at(self._data, place)[0]
                found.append(self._data[begin:place].decode())
        except UnicodeDecodeError as error:
            raise self._error(error) from None
        return found


class GgufFile:
    """One file: `metadata` by key, arrays of strings as `Texts`; `tensors` by name with shapes rows first; `status` as
    it was when it was opened."""

    def __init__(self, path: Path) -> None:
        """Read and check everything but the tensors' bytes; raises CheckpointError that names file and cause."""
        self.path = path
        file, self.status = opened_file(path, "GGUF file")
        try:
            self.metadata, self.tensors = _Header(path, file, self.status.st_size).read()
        except BaseException:
            file.close()
            raise
        self._file: BufferedReader | None = file
        self._map: mmap.mmap | None = None
        self._is_kept = False

    def bytes_of(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The bytes `start` to `stop` of a tensor, uint8, read from the file. Raises CheckpointError once closed, and
        for a file that is not any more what was opened."""
        return self.pieces_of(info, [start], (info.nbytes if stop is None else stop) - start)[0]

    def pieces_of(self, info: TensorInfo, starts: Sequence[int], size: int) -> np.ndarray:
        """The `size` bytes of a tensor from each of the `starts` on: uint8 [n, size]. Raises as `bytes_of`."""
        if self._file is None:
            raise CheckpointError(f"{self.path} was closed: read its tensors before, or open the checkpoint again")
        data, done, descriptor = np.empty((len(starts), size), np.uint8), 0, self._file.fileno()
        with explained(f"{self.path} cannot be read", CheckpointError):
            for start, view in zip(starts, data, strict=True):
                done = 0
                while done < size:
                    count = os.preadv(descriptor, [view[done : done + _MOST_READ]], info.offset + start + done)
                    if count == 0:
                        break
                    done += count
        now = os.fstat(descriptor)
        if done < size or (now.st_size, now.st_mtime_ns) != (self.status.st_size, self.status.st_mtime_ns):
            raise CheckpointError(
                f"{self.path} was changed while it was read: it has {now.st_size:,} bytes, expected the "
                f"{self.status.st_size:,} that it had when it was opened. Leave it alone while it is used, and start "
                "again"
            )
        return data

    def view_of(self, info: TensorInfo) -> np.ndarray:
        """The bytes of a tensor, uint8, as a read-only view of the file, also once it is closed; of one that is kept a
        copy: views are for what is read soon. Raises CheckpointError as `bytes_of`."""
        if self._is_kept:
            return self.bytes_of(info)
        if self._map is None:
            self.bytes_of(info, 0, 1)  # which raises where the file was closed, or is not what was opened
            assert self._file is not None
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def keep(self) -> bool:
        """Let bytes be read also once it is closed, as long as anything has it; True."""
        if not self._is_kept and self._file is not None:
            weakref.finalize(self, self._file.close)
            self._is_kept = True
        return True

    def close(self) -> None:
        """Close the file, unless it is kept; bytes that were read stay."""
        if self._file is not None and not self._is_kept:
            self._file.close()
            self._file = None


def open_split(path: Path) -> list[GgufFile]:
    """The one file, or all of those that it is one of by its name and metadata, the first first; CheckpointError where
    they do not belong together."""
    with ExitStack() as opened:
        files = _belonging(path, lambda each: opened.enter_context(closing(GgufFile(each))))
        opened.pop_all()  # else nothing stays open
    return files


def _belonging(path: Path, opened: Callable[[Path], GgufFile]) -> list[GgufFile]:
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        file = opened(path)
        if (count := file.metadata.get("split.count", 1)) != 1:
            raise CheckpointError(
                f"{path} is one of {count} files by its metadata, but is not called so: give all their published "
                "names, as in NAME-00001-of-00003.gguf"
            )
        return [file]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MOST_FILES:
        raise CheckpointError(
            f"{path} is part {int(match[2])} of {count} by its name, expected one of 1 to {_MOST_FILES}"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.exists()]:
        raise CheckpointError(
            f"{path} is one of {count} files, of which {len(missing)} are missing: {', '.join(missing[:5])}. Put all "
            "into one folder"
        )
    files = [opened(each) for each in paths]
    names: dict[str, Path] = {}
    for number, file in enumerate(files):
        found = file.metadata.get("split.no", 0), file.metadata.get("split.count", 1)
        if found != (number, count):
            raise CheckpointError(
                f"{file.path} is part {found[0]} of {found[1]} by its metadata ('split.no', 'split.count'), expected "
                f"part {number} of {count}. {COPY_AGAIN}"
            )
        for name in file.tensors:
            if name in names:
                raise CheckpointError(f"{file.path}: tensor {name!r} is in {names[name]} too. {COPY_AGAIN}")
            names[name] = file.path
    expected = files[0].metadata.get("split.tensors.count", len(names))
    if expected != len(names):
        raise CheckpointError(
            f"{path}: the {count} files have {len(names)} tensors, by 'split.tensors.count' {expected!r} are expected. "
            "Take all files of one release"
        )
    return files


class _Header:
    """Reads what stands before the tensors."""

    def __init__(self, path: Path, file: BufferedReader, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic, version = self._take(4, "its magic"), self._number("I", "its version")
        if magic != MAGIC:
            raise self._damaged(f"it begins with {magic!r}, expected {MAGIC!r}")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                raise CheckpointError(
                    f"{self._path} is a big-endian GGUF file, expected a little-endian one. Convert it"
                )
            versions = " or ".join(map(str, _VERSIONS))
            raise CheckpointError(
                f"{self._path} is a GGUF file of version {version}, expected {versions}. Take a newer release of it"
            )
        tensors = self._count("tensors", _MOST_TENSORS, 32)
        keys = self._count("pieces of metadata", _MOST_KEYS, 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text("a key", _LONGEST_KEY)
            if key in metadata:
                raise self._damaged(f"the key {key!r:.80} occurs more than once")
            metadata[key] = self._value(key, self._number("I", f"the type of {key!r:.80}"))
        infos: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            info = self._tensor()
            if info.name in infos:
                raise self._damaged(f"tensor {info.name!r} occurs more than once")
            infos[info.name] = info
        return metadata, self._placed(infos, metadata.get("general.alignment", _ALIGNMENT))

    def _value(self, key: str, kind: int) -> Any:
        what = f"the value of {key!r:.80}"
        if kind == _STRING:
            return self._text(what, LARGEST_HEADER)
        if kind != _ARRAY:
            return self._number(self._format(key, kind), what)
        kind, count = self._number("I", what), self._number("Q", what)
        if kind == _ARRAY:
            raise self._damaged(f"{what} is an array of arrays, expected numbers or strings in it")
        form = None if kind == _STRING else self._format(key, kind)
        least = 8 if form is None else struct.calcsize(f"<{form}")
        if count > min(_MOST_ELEMENTS, (self._size - self._position) // least):
            raise self._damaged(
                f"{what} is said to have {count:,} elements, expected at most {_MOST_ELEMENTS:,}, and no more than its "
                f"{self._size:,} bytes have room for"
            )
        if form is None:
            return self._texts(what, count)
        return np.frombuffer(self._take(count * least, what), np.dtype(form).newbyteorder("<")).tolist()

    def _format(self, key: str, kind: int) -> str:
        if kind not in _NUMBERS:
            raise self._damaged(f"the value of {key!r:.80} has the type {kind}, expected one from 0 to 12")
        return _NUMBERS[kind]

    def _tensor(self) -> TensorInfo:
        name = self._text("a tensor's name", _LONGEST_NAME)
        what = f"tensor {name!r}"
        dimensions = self._number("I", what)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"{what} has {dimensions} dimensions, expected 1 to {_MOST_DIMENSIONS}")
        extents = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions, what))
        kind, offset = self._number("I", what), self._number("Q", what)
        if kind not in TYPES:
            known = ", ".join(name for name, _, _ in TYPES.values())
            raise CheckpointError(
                f"{self._path}: {what} has the type {_OTHER_TYPES.get(kind, kind)}, which is not read; read are "
                f"{known}. Take a file of another quantization of this model, such as Q4_K_M or Q8_0"
            )
        dtype, elements, block = TYPES[kind]
        count = math.prod(extents)
        if not 0 < count <= LARGEST_COUNT // block:
            raise self._damaged(
                f"{what} has the shape {list(reversed(extents))}, expected no empty one, nor one larger than any memory"
            )
        if extents[0] % elements:
            raise self._damaged(
                f"{what} has rows of {extents[0]} elements, expected a multiple of {elements} for {dtype}"
            )
        return TensorInfo(name, dtype, tuple(reversed(extents)), self._path, offset, count // elements * block)

    def _placed(self, infos: dict[str, TensorInfo], alignment: Any) -> dict[str, TensorInfo]:
        """The tensors with their places in the file."""
        least, most = _ALIGNMENTS
        if type(alignment) is not int or not least <= alignment <= most or alignment & (alignment - 1):
            raise self._damaged(
                f"'general.alignment' is {alignment!r:.80}, expected a power of 2 from {least} to {most}"
            )
        start = -(-self._position // alignment) * alignment
        placed, end, previous = dict[str, TensorInfo](), 0, "the header"
        for info in sorted(infos.values(), key=lambda info: info.offset):
            what = f"tensor {info.name!r}"
            if info.offset % alignment:
                raise self._damaged(f"{what} begins at byte {info.offset:,}, expected a multiple of {alignment}")
            if info.offset < end:
                raise self._damaged(f"{what} overlaps {previous}")
            end, previous = info.offset + info.nbytes, what
            if start + end > self._size:
                raise self._damaged(f"it is truncated: {self._size:,} bytes, but {what} ends at byte {start + end:,}")
            placed[info.name] = replace(info, offset=start + info.offset)
        return {name: placed[name] for name in infos}

    def _count(self, what: str, most: int, least: int) -> int:
        """How many of something there are, each of at least so many bytes."""
        count = self._number("Q", f"the number of {what}")
        if count > min(most, self._size // least):
            raise self._damaged(
                f"it is said to have {count:,} {what}, expected at most {most:,}, and no more than its {self._size:,} "
                "bytes have room for"
            )
        return count

    def _text(self, what: str, longest: int) -> str:
        length = self._number("Q", what)
        if length > longest:
            raise self._damaged(f"{what} is said to be {length:,} bytes long, expected at most {longest:,}")
        data = self._take(length, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._not_text(what, error) from None

    def _texts(self, what: str, count: int) -> Texts:
        """An array of strings, of which only the lengths are looked at."""
        length_at, data, place = struct.Struct("<Q").unpack_from, bytearray(), 0
        for _ in range(count):
            if place + 8 > len(data):
                self._read_on(data, place + 8, what)
            place += 8 + length_at(data, place)[0]
        if place > len(data):
            self._read_on(data, place, what)
        self._position += place
        self._file.seek(self._position)
        return Texts(bytes(memoryview(data)[:place]), count, lambda error: self._not_text(what, error))

    def _read_on(self, data: bytearray, needed: int, what: str) -> None:
        """Read to `data`, which began at the present position, until it has so many bytes, and somewhat more."""
        end = self._position + needed
        if end > LARGEST_HEADER or end > self._size:
            self._take(needed, what)  # which says what is wrong
        data += self._file.read(needed - len(data) + _READ_AHEAD)
        if len(data) < needed:
            raise self._truncated(what, end)

    def _number(self, form: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}"), what))
        return value

    def _take(self, count: int, what: str) -> bytes:
        end = self._position + count
        if end > LARGEST_HEADER:
            raise self._damaged(f"its header goes beyond {LARGEST_HEADER:,} bytes, with {what}")
        data = b"" if end > self._size else self._file.read(count)
        if len(data) < count:
            raise self._truncated(what, end)
        self._position = end
        return data

    def _truncated(self, what: str, end: int) -> CheckpointError:
        return self._damaged(f"it is truncated: {self._size:,} bytes, of which {what} would end at byte {end:,}")

    def _not_text(self, what: str, error: UnicodeDecodeError) -> CheckpointError:
        return self._damaged(f"{what} is no UTF-8 text ({error.reason} at byte {error.start})")

    def _damaged(self, cause: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a valid GGUF file: {cause}. {COPY_AGAIN}")
