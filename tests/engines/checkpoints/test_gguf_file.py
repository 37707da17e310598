"""GGUF files as they are written, and files that say what is not so."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writing import NUMBERS, Tensor, Typed, dense, gguf_bytes, random_blocks, text, write_gguf

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import TYPES, GgufFile, Texts, open_split

METADATA = {"general.architecture": "llama", "llama.block_count": 2, "a.float": 0.5, "a.flag": True, "a.negative": -3}
METADATA |= {"a.list": [1, 2, 3], "a.texts": ["", "é\n", "x" * 300], "a.none": []}
TENSORS = {"a": dense(np.arange(6, dtype=np.float32).reshape(2, 3)), "b": dense(np.arange(4, dtype=np.float16))}


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 8, 256])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, version: int, alignment: int) -> None:
    metadata = METADATA | ({} if alignment == 32 else {"general.alignment": alignment})
    path = write_gguf(tmp_path / "m.gguf", metadata, TENSORS, version=version, alignment=alignment)
    file = GgufFile(path)
    assert {key: each.read() if isinstance(each, Texts) else each for key, each in file.metadata.items()} == metadata
    assert {name: (info.dtype, info.shape) for name, info in file.tensors.items()} == {
        "a": ("float32", (2, 3)),
        "b": ("float16", (4,)),
    }
    for name, tensor in TENSORS.items():
        assert file.bytes_of(file.tensors[name]).tobytes() == tensor.data
    assert file.bytes_of(file.tensors["a"], 4, 12).view(np.float32).tolist() == [1, 2]
    assert file.status.st_size == path.stat().st_size
    file.close()
    with pytest.raises(CheckpointError, match="was closed"):
        file.bytes_of(file.tensors["a"])


def test_numbers_of_all_types(tmp_path: Path) -> None:
    numbers = {0: ("B", 200), 1: ("b", -7), 2: ("H", 60000), 3: ("h", -9), 10: ("Q", 1 << 60), 11: ("q", -5)}
    numbers |= {12: ("d", 1e300)}
    metadata = {f"n.{kind}": Typed(kind, struct.pack(f"<{form}", value)) for kind, (form, value) in numbers.items()}
    found = GgufFile(write_gguf(tmp_path / "m.gguf", metadata, {})).metadata
    assert found == {f"n.{kind}": value for kind, (_, value) in numbers.items()}


def test_every_type_that_is_read_has_its_size(tmp_path: Path) -> None:
    assert {name: (number, *rest) for number, (name, *rest) in TYPES.items()} == NUMBERS
    tensors = {kind: random_blocks(kind, (3, 512), np.random.default_rng(0)) for kind in NUMBERS}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", {}, tensors))
    for kind, tensor in tensors.items():
        assert file.bytes_of(file.tensors[kind]).tobytes() == tensor.data


def test_places_beyond_two_gibibytes(tmp_path: Path) -> None:
    """The file is sparse: what lies between takes no space."""
    far = (5 << 30) + 64
    path = write_gguf(tmp_path / "m.gguf", {}, TENSORS, offsets={"b": far})
    data = path.read_bytes()
    start = len(data) - 32 - len(TENSORS["b"].data)
    with path.open("r+b") as file:
        file.seek(start + far)
        file.write(TENSORS["b"].data)
    opened = GgufFile(path)
    assert opened.bytes_of(opened.tensors["b"]).tobytes() == TENSORS["b"].data
    assert opened.bytes_of(opened.tensors["a"]).tobytes() == TENSORS["a"].data


def _split(folder: Path, count: int = 3, **changed: Any) -> list[Path]:
    paths = []
    for number in range(count):
        metadata = {"split.no": number, "split.count": count, "split.tensors.count": count} | changed
        metadata |= METADATA if number == 0 else {}
        tensors = {f"t{number}": dense(np.full(3, number, np.float32))}
        paths.append(write_gguf(folder / f"m-{number + 1:05}-of-{count:05}.gguf", metadata, tensors))
    return paths


def test_split_files_are_opened_together(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    for path in paths:
        files = open_split(path)
        assert [file.path for file in files] == paths
        assert [list(file.tensors) for file in files] == [["t0"], ["t1"], ["t2"]]


def test_split_files_that_do_not_belong_together(tmp_path: Path) -> None:
    paths = _split(tmp_path)
    paths[1].rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="3 files, of which 1 are missing: m-00002-of-00003"):
        open_split(paths[0])
    paths[2].with_name("m-00002-of-00003.gguf").write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="is part 2 of 3 by its metadata"):
        open_split(paths[0])
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match=r"have 3 tensors, by 'split\.tensors\.count' 7"):
        open_split(_split(tmp_path / "other", **{"split.tensors.count": 7})[0])
    with pytest.raises(CheckpointError, match="is one of 3 files by its metadata, but is not called so"):
        open_split(paths[0].rename(tmp_path / "m.gguf"))


def test_files_that_do_not_belong_together_are_closed(tmp_path: Path) -> None:
    path = _split(tmp_path, **{"split.tensors.count": 7})[0]
    with pytest.raises(CheckpointError) as caught:  # whose traceback holds what was opened
        open_split(path)
    held = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert caught.value and not [each for each in held if each.startswith(str(tmp_path))]


HEAD = struct.pack("<IQQ", 3, 0, 1)
KEY = b"GGUF" + HEAD + text("k")


def _tensor(kind: int = 0, dimensions: tuple[int, ...] = (4,), offset: int = 0, name: str = "t") -> bytes:
    info = text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    return head + b"\0" * (-len(head) % 32 + 1024)


HOSTILE = {
    "no magic": (b"GGML" + HEAD, "it begins with b'GGML', expected b'GGUF'"),
    "short": (b"GGUF\3\0\0\0", "it is truncated"),
    "version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of version 1, expected 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "1,152,921,504,606,846,976 tensors"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "pieces of metadata, expected at most"),
    "long key": (b"GGUF" + HEAD + struct.pack("<Q", 1 << 40), "a key is said to be"),
    "long text": (KEY + struct.pack("<IQ", 8, 1 << 62), "is said to be 4,611,686,018,427,387,904 bytes long"),
    "cut text": (KEY + struct.pack("<IQ", 8, 1000), "it is truncated"),
    "no text": (KEY + struct.pack("<I", 8) + text(b"\xff"), "is no UTF-8 text"),
    "type": (KEY + struct.pack("<I", 13), "has the type 13, expected one from 0 to 12"),
    "array": (KEY + struct.pack("<IIQ", 9, 4, 1 << 61), "2,305,843,009,213,693,952 elements"),
    "array of texts": (KEY + struct.pack("<IIQ", 9, 8, 100), "100 elements"),
    "array's type": (KEY + struct.pack("<IIQ", 9, 99, 0), "has the type 99"),
    "nested": (KEY + struct.pack("<IIQ", 9, 9, 1), "an array of arrays"),
    "twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2 + bytes(64),
        "'k' occ",
    ),
    "no dimensions": (_tensor(dimensions=()), "has 0 dimensions"),
    "many dimensions": (_tensor(dimensions=(1,) * 5), "has 5 dimensions"),
    "empty": (_tensor(dimensions=(4, 0)), r"has the shape \[0, 4\], expected no empty one"),
    "huge": (_tensor(dimensions=(1 << 40, 1 << 40)), "larger than any memory"),
    "rows": (_tensor(8, (33,)), "rows of 33 elements, expected a multiple of 32"),
    "beyond": (_tensor(dimensions=(1000,)), "truncated: .* but tensor 't' ends at byte 4,"),
    "far": (_tensor(offset=1 << 62), "truncated"),
    "unaligned": (_tensor(offset=4), "begins at byte 4, expected a multiple of 32"),
    "long name": (_tensor(name="x" * 300), "a tensor's name is said to be 300 bytes long"),
    "unread type": (_tensor(10, (256,)), "has the type Q2_K, which is not read; read are float32, .*Q8_0"),
    "unknown type": (_tensor(200, (256,)), "has the type 200, which is not read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_by_what_is_wrong(tmp_path: Path, name: str) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=expected) as raised:
        GgufFile(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("alignment", [0, 3, 48, 1 << 30, "32", True])
def test_alignments_that_are_none(tmp_path: Path, alignment: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'general\.alignment' is"):
        GgufFile(write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, TENSORS))


def test_overlapping_tensors_and_one_that_is_there_twice(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'b' overlaps tensor 'a'"):
        GgufFile(write_gguf(tmp_path / "m.gguf", {}, TENSORS, offsets={"b": 0}))
    data = gguf_bytes({}, {"aa": TENSORS["a"], "ab": TENSORS["a"]})
    path = tmp_path / "twice.gguf"
    path.write_bytes(data.replace(b"ab", b"aa"))
    with pytest.raises(CheckpointError, match="tensor 'aa' occurs more than once"):
        GgufFile(path)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    data, path = gguf_bytes(METADATA, TENSORS), tmp_path / "m.gguf"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            GgufFile(path)


def test_no_changed_byte_of_a_header_does_more_than_an_error(tmp_path: Path) -> None:
    data, path = bytearray(gguf_bytes(METADATA, TENSORS)), tmp_path / "m.gguf"
    for place in range(len(data) - 64):
        for change in (1, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= change
            path.write_bytes(damaged)
            try:
                file = GgufFile(path)
            except CheckpointError:
                continue
            for info in file.tensors.values():
                file.bytes_of(info)
            file.close()


def test_a_file_that_is_shortened_or_written_while_it_is_open(tmp_path: Path) -> None:
    """Memory that was mapped would end the process."""
    path = write_gguf(tmp_path / "m.gguf", {}, {"t": Tensor("float32", (1 << 18,), bytes(1 << 20))})
    file = GgufFile(path)
    os.truncate(path, 1 << 19)
    with pytest.raises(CheckpointError, match="changed while it was read: it has 524,288 bytes"):
        file.bytes_of(file.tensors["t"])
    path = write_gguf(tmp_path / "n.gguf", {}, TENSORS)
    file = GgufFile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        file.bytes_of(file.tensors["a"])


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        GgufFile(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        GgufFile(tmp_path)
