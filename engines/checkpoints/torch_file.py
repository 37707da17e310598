"""Files of `torch.save`, memory-mapped and read without PyTorch and without trust.

Since PyTorch 1.6 such a file is a zip archive: NAME/data.pkl describes the tensors, NAME/data/KEY holds a storage's
bytes, stored without compression, NAME/byteorder says "little" or "big". Before, it was five pickles (a magic number, a
protocol version, facts on the machine, the tensors, the keys of the storages), then each storage: its count of elements
in 8 bytes, and its bytes.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.torch_pickle import LARGEST_PICKLE, Storage, TensorView, read_pickle
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, mapped_file

#: The largest entry that is inflated, in bytes: PyTorch compresses none, so that only repacked files have them.
LARGEST_INFLATED = 256 << 20
#: What all tensors may take together, as a multiple of what their storages take in the file: tensors that share a
#: storage are written as copies, and a repacked archive is compressed, zeros to nearly nothing.
LARGEST_EXPANSION = 16

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY_NAME = re.compile(r"[^/\\:\x00-\x1f]+(/[^/\\:\x00-\x1f]+)*/?")


@dataclass(frozen=True)
class _Place:
    """A storage's bytes in the file; `size` is what they take there, `nbytes` what they are inflated."""

    offset: int
    size: int
    nbytes: int
    is_deflated: bool = False


class TorchFile:
    """One file: `tensors` by name; `left_out` names entries beside the state dictionary, which are not weights."""

    def __init__(self, path: Path) -> None:
        """Map the file and check all of it but the values; raises CheckpointError that names file and cause."""
        self.path = path
        self._map, _ = mapped_file(path, "file of PyTorch weights")
        self._places: dict[str, _Place] = {}
        self._inflated: tuple[str, np.ndarray] | None = None
        try:
            value = self._read_archive() if self._map[:4] == _ZIP_START else self._read_legacy()
            self.tensors, self.left_out = find_state_dictionary(path, value)
            self._check_storages()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def shared(self) -> list[str]:
        """Names of tensors that share a storage with one before them."""
        seen: set[str] = set()
        found = []
        for name, view in self.tensors.items():
            if view.storage.key in seen:
                found.append(name)
            seen.add(view.storage.key)
        return found

    def elements(self, name: str) -> np.ndarray:
        """The tensor's elements in C order as unsigned integers of their size, any dtype; a view where it can be."""
        view = self.tensors[name]
        storage, item_size = view.storage, view.storage.item_size
        if 0 in view.shape:
            return np.empty(view.shape, f"<u{item_size}")
        flat = self._bytes_of(storage).view(f"<u{item_size}")[view.offset :]
        strides = tuple(stride * item_size for stride in view.strides)
        # Strides of dimensions with one element mean nothing and may be of any size.
        strides = tuple(0 if extent == 1 else stride for extent, stride in zip(view.shape, strides, strict=True))
        found = np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)
        return np.asarray(found, order="C")

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of it that is still in use."""
        self._inflated = None
        with suppress(BufferError):
            self._map.close()

    def _damaged(self, cause: str, advice: str = COPY_AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid file of PyTorch weights: {cause}. {advice}".rstrip())

    def _bytes_of(self, storage: Storage) -> np.ndarray:
        place = self._places[storage.key]
        if not place.is_deflated:
            return np.frombuffer(self._map, np.uint8, storage.nbytes, place.offset)
        if self._inflated is None or self._inflated[0] != storage.key:
            data = self._inflate(place, storage.nbytes, f"storage {storage.key!r}")
            self._inflated = storage.key, np.frombuffer(data, np.uint8)
        return self._inflated[1]

    def _inflate(self, place: _Place, size: int, what: str) -> bytes:
        decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = decompressor.decompress(self._map[place.offset : place.offset + place.size], size + 1)
        except zlib.error as error:
            raise self._damaged(f"{what} cannot be decompressed ({error})") from None
        if len(data) != size:
            more = "more than" if len(data) > size else f"{len(data):,} of"
            raise self._damaged(f"{what} inflates to {more} {size:,} bytes")
        return data

    def _read_archive(self) -> Any:
        entries = self._entries()
        roots = [name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl") or name == "data.pkl"]
        if len(roots) != 1:
            raise self._damaged(f"it is a zip archive with {len(roots)} entries data.pkl, expected one", "")
        root = roots[0]
        if f"{root}constants.pkl" in entries:
            raise CheckpointError(
                f"{self.path} is a TorchScript program, not weights alone. Take the model's state_dict() or safetensors"
            )
        order = self._content(entries, f"{root}byteorder", 16) if f"{root}byteorder" in entries else b"little"
        if order != b"little":
            raise CheckpointError(
                f"{self.path} has the byte order {order!r}, expected little: save it on such a machine"
            )
        data = self._content(entries, f"{root}data.pkl", LARGEST_PICKLE)
        value, end = read_pickle(data, 0, len(data), str(self.path))
        if end != len(data):
            raise self._damaged(f"{len(data) - end:,} bytes follow its pickle")
        prefix = f"{root}data/"
        storages = {name[len(prefix) :]: info for name, info in entries.items() if name.startswith(prefix)}
        self._places = {key: self._place(info) for key, info in storages.items()}
        return value

    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error, OverflowError) as error:
            raise self._damaged(f"its zip directory cannot be read, as in a truncated file ({error})") from None
        entries: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.filename
            if not _ENTRY_NAME.fullmatch(name) or {".", ".."} & set(name.split("/")) or name in entries:
                raise self._damaged(f"its entry {name!r:.80} leads out of the archive or is there twice", "")
            entries[name] = info
        if sum(info.compress_size for info in infos) > len(self._map):
            raise self._damaged("its entries overlap", "")
        return entries

    def _place(self, info: zipfile.ZipInfo) -> _Place:
        name = info.filename
        start = info.header_offset
        if not 0 <= start <= len(self._map) - _LOCAL_HEADER.size - 4:
            raise self._damaged(f"entry {name!r:.80} lies outside the file")
        signature, name_length, extra_length = _LOCAL_HEADER.unpack_from(self._map, start)
        offset = start + _LOCAL_HEADER.size + name_length + extra_length
        if signature != _ZIP_START or offset + info.compress_size > len(self._map):
            raise self._damaged(f"entry {name!r:.80} lies outside the file")
        if info.flag_bits & 1:
            raise self._damaged(f"entry {name!r:.80} is encrypted", "Take the file unencrypted")
        if info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size:
            return _Place(offset, info.file_size, info.file_size)
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise self._damaged(f"entry {name!r:.80} is compressed by method {info.compress_type}", "Repack it")
        if info.file_size > LARGEST_INFLATED:
            raise CheckpointError(
                f"{self.path}: entry {name!r:.80} is compressed and said to inflate to {info.file_size:,} bytes, more "
                f"than {LARGEST_INFLATED:,}. PyTorch compresses nothing: repack the archive without (zip -0)"
            )
        return _Place(offset, info.compress_size, info.file_size, is_deflated=True)

    def _content(self, entries: dict[str, zipfile.ZipInfo], name: str, limit: int) -> bytes:
        info = entries[name]
        if info.file_size > limit:
            raise self._damaged(f"{name} has {info.file_size:,} bytes, at most {limit:,} are read", "")
        place = self._place(info)
        if place.is_deflated:
            return self._inflate(place, info.file_size, name)
        return self._map[place.offset : place.offset + place.size]

    def _read_legacy(self) -> Any:
        size, described = len(self._map), str(self.path)
        if self._map[:2] not in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise self._damaged("it begins neither as a zip archive nor as a pickle")
        magic, position = read_pickle(self._map, 0, size, described)
        if magic != _MAGIC_NUMBER:
            raise CheckpointError(f"{self.path} is a pickle, but not one that torch.save wrote. Take another file")
        version, position = read_pickle(self._map, position, size, described)
        system, position = read_pickle(self._map, position, size, described)
        little = system.get("little_endian") if type(system) is dict else None
        if type(version) is not int or version != _PROTOCOL_VERSION or little is not True:
            raise CheckpointError(
                f"{self.path} was written by another format or on a big-endian machine: expected protocol "
                f"{_PROTOCOL_VERSION}, little-endian. Save it anew with PyTorch 1.6 or later"
            )
        value, position = read_pickle(self._map, position, size, described)
        keys, position = read_pickle(self._map, position, size, described)
        if type(keys) is not list or not all(type(key) is str for key in keys) or len(set(keys)) < len(keys):
            raise self._damaged("the list of its storages is not a list of different names")
        storages = {view.storage.key: view.storage for view in _walk(value)}
        for key in keys:
            if key not in storages:
                raise self._damaged(f"storage {key!r:.40} belongs to no tensor, so that its size is unknown", "")
            if position + 8 > size or (count := struct.unpack_from("<q", self._map, position)[0]) < 0:
                raise self._damaged(f"it is truncated before storage {key!r:.40}")
            nbytes, position = count * storages[key].item_size, position + 8
            if nbytes > size - position:
                raise self._damaged(f"it is truncated: storage {key!r:.40} takes {nbytes:,} bytes")
            self._places[key] = _Place(position, nbytes, nbytes)
            position += nbytes
        if position != size:
            raise self._damaged(f"{size - position:,} bytes follow its last storage")
        return value

    def _check_storages(self) -> None:
        total = 0
        for name, view in self.tensors.items():
            storage, place = view.storage, self._places.get(view.storage.key)
            if place is None:
                raise self._damaged(f"storage {storage.key!r:.40} of tensor {name!r:.80} is missing")
            if place.nbytes != storage.nbytes:
                elements = f"{storage.count:,} elements of {storage.dtype} take {storage.nbytes:,}"
                raise self._damaged(f"storage {storage.key!r:.40} has {place.nbytes:,} bytes, {elements}")
            total += view.nbytes
        stored = sum(self._places[key].size for key in {view.storage.key for view in self.tensors.values()})
        if total > LARGEST_EXPANSION * (stored + 4096):
            raise CheckpointError(
                f"{self.path}: its tensors would take {total:,} bytes, but only {stored:,} are stored, compressed or "
                f"not: less than a {LARGEST_EXPANSION}th. Save it anew, uncompressed, and tensors that repeat the same "
                "values stored once"
            )


#: Entries that begin so hold an optimizer's tensors, which are not weights.
_OPTIMIZER = "optim"


def _walk(value: Any) -> list[TensorView]:
    """All tensors in a value, at any depth; values may contain themselves."""
    found: list[TensorView] = []
    seen, waiting = set(), [value]
    while waiting:
        item = waiting.pop()
        if type(item) is TensorView:
            found.append(item)
        elif type(item) in (dict, list, tuple) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(item.values() if type(item) is dict else item)
    return found


def _is_state(value: Any) -> bool:
    return (
        type(value) is dict
        and len(value) > 0
        and all(type(name) is str and type(view) is TensorView for name, view in value.items())
    )


def find_state_dictionary(path: Path, value: Any) -> tuple[dict[str, TensorView], list[str]]:
    """The one dictionary of tensors in a file, and the names of what lies beside it; raises CheckpointError."""
    if _is_state(value):
        return value, []
    if type(value) is not dict:
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a dictionary of tensors (state_dict)")
    with_tensors = {key: entry for key, entry in value.items() if _walk(entry)}
    candidates = [key for key in with_tensors if not str(key).startswith(_OPTIMIZER)]
    if len(candidates) == 1 and _is_state(value[candidates[0]]):
        return value[candidates[0]], [str(key) for key in value if key != candidates[0]]
    listed = ", ".join(f"{key!r:.60}" for key in list(value)[:10]) or "nothing"
    raise CheckpointError(
        f"{path} does not hold one dictionary of tensors and no other: it has the keys {listed}. Which of them are the "
        "weights is unknown. Save the model's state_dict() alone"
    )
