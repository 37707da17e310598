"""Files of `torch.save`, memory-mapped and read without PyTorch and without trust.

Since PyTorch 1.6 such a file is a zip archive: NAME/data.pkl describes the tensors, NAME/data/KEY holds a storage's
bytes, stored without compression, NAME/byteorder says "little" or "big". Files of earlier releases, and archives that
were packed anew with compression, are refused.
"""

from __future__ import annotations

import re
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.torch_pickle import LARGEST_PICKLE, TensorView, read_pickle
from edgellm.engines.closing import Closing
from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.safetensors_file import COPY_AGAIN, mapped_file

#: What all tensors may take together, as a multiple of what their storages take in the file: tensors that share a
#: storage are written as copies.
LARGEST_EXPANSION = 16

_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENTRY_NAME = re.compile(r"[^/\\:\x00-\x1f]+(/[^/\\:\x00-\x1f]+)*/?")


class TorchFile(Closing):
    """One file: `tensors` by name; `left_out` names entries beside the state dictionary, which are not weights."""

    def __init__(self, path: Path) -> None:
        """Map the file and check all of it but the values; raises CheckpointError that names file and cause."""
        self.path = path
        self._map, _ = mapped_file(path, "file of PyTorch weights")
        #: Where a storage's bytes begin in the file, and how many they are, by its key.
        self._places: dict[str, tuple[int, int]] = {}
        try:
            self.tensors, self.left_out = find_state_dictionary(path, self._read_archive())
            self._check_storages()
        except BaseException:
            self.close()
            raise

    @property
    def shared(self) -> list[str]:
        """Names of tensors that share a storage with one before them."""
        first: dict[str, str] = {}
        for name, view in self.tensors.items():
            first.setdefault(view.storage.key, name)
        return [name for name, view in self.tensors.items() if first[view.storage.key] != name]

    def elements(self, name: str) -> np.ndarray:
        """The tensor's elements in C order as unsigned integers of their size, any dtype; a view where it can be."""
        view = self.tensors[name]
        storage, item_size = view.storage, view.storage.item_size
        if 0 in view.shape:
            return np.empty(view.shape, f"<u{item_size}")
        begin, _ = self._places[storage.key]
        flat = np.frombuffer(self._map, f"<u{item_size}", storage.count, begin)[view.offset :]
        strides = tuple(stride * item_size for stride in view.strides)
        # Strides of dimensions with one element mean nothing and may be of any size.
        strides = tuple(0 if extent == 1 else stride for extent, stride in zip(view.shape, strides, strict=True))
        found = np.lib.stride_tricks.as_strided(flat, view.shape, strides, writeable=False)
        return np.asarray(found, order="C")

    def close(self) -> None:
        """Unmap the file, or leave that to the last view of it that is still in use."""
        with suppress(BufferError):
            self._map.close()

    def _damaged(self, cause: str, advice: str = COPY_AGAIN) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid file of PyTorch weights: {cause}. {advice}".rstrip())

    def _read_archive(self) -> Any:
        if self._map[:4] != _ZIP_START:
            raise self._damaged(
                "it is no zip archive, as torch.save writes it since PyTorch 1.6",
                "Load an older one with PyTorch and save it anew, as safetensors where that can be",
            )
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
        value, end = read_pickle(data, str(self.path))
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

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
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
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise self._damaged(
                f"entry {name!r:.80} is compressed, and PyTorch compresses nothing",
                "Repack the archive without (zip -0)",
            )
        return offset, info.file_size

    def _content(self, entries: dict[str, zipfile.ZipInfo], name: str, limit: int) -> bytes:
        info = entries[name]
        if info.file_size > limit:
            raise self._damaged(f"{name} has {info.file_size:,} bytes, at most {limit:,} are read", "")
        offset, size = self._place(info)
        return self._map[offset : offset + size]

    def _check_storages(self) -> None:
        total = 0
        for name, view in self.tensors.items():
            storage, place = view.storage, self._places.get(view.storage.key)
            if place is None:
                raise self._damaged(f"storage {storage.key!r:.40} of tensor {name!r:.80} is missing")
            if place[1] != storage.nbytes:
                elements = f"{storage.count:,} elements of {storage.dtype} take {storage.nbytes:,}"
                raise self._damaged(f"storage {storage.key!r:.40} has {place[1]:,} bytes, {elements}")
            total += view.nbytes
        stored = sum(storage.nbytes for storage in {view.storage for view in self.tensors.values()})
        if total > LARGEST_EXPANSION * (stored + 4096):
            raise CheckpointError(
                f"{self.path}: its tensors would take {total:,} bytes, but only {stored:,} are stored: less than a "
                f"{LARGEST_EXPANSION}th. Save it anew, with tensors that repeat the same values stored once"
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
