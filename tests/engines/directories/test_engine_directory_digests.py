"""Digests of files: against hashlib on the whole file, and what is remembered of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from edgellm.engines.formats.digests import (
    BLOCK_BYTES,
    SECTION_BYTES,
    SMALL_FILE_BYTES,
    FileDigest,
    copy_hashed,
    current_digest,
    hash_file,
    is_known_finite,
    recall_digest,
    remember_digest,
    remember_finite,
)
from edgellm.kernels.atomic_write import write_atomically


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGELLM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "large.safetensors"
    path.write_bytes(np.random.default_rng(1).bytes(SMALL_FILE_BYTES + 5))
    return path


def change_unseen(path: Path) -> None:
    """Flip one byte and restore the modification time, as programs do that copy a file over another."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_hash_is_sha256_of_the_content(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == FileDigest(hashlib.sha256(content).hexdigest(), size)


@pytest.mark.parametrize("more", [1, pytest.param(SECTION_BYTES, marks=pytest.mark.slow)])
def test_large_files_are_hashed_in_sections(tmp_path: Path, more: int) -> None:
    path, size = tmp_path / "file", SECTION_BYTES + more
    with path.open("wb") as file:  # a hole, but for a few bytes of each section
        file.truncate(size)
        file.write(b"first")
        file.seek(size - 1)
        file.write(b"x")
    content = path.read_bytes()
    parts = [hashlib.sha256(content[start : start + SECTION_BYTES]).digest() for start in (0, SECTION_BYTES)]
    expected = FileDigest(hashlib.sha256(b"".join(parts)).hexdigest(), size, SECTION_BYTES)
    whole = FileDigest(hashlib.sha256(content).hexdigest(), size)
    assert copy_hashed(path, tmp_path / "copy") == expected
    assert current_digest(path) == expected
    assert current_digest(path, section=0) == whole
    assert (recall_digest(path), recall_digest(path, 0)) == (expected, whole)  # one does not push out the other


def test_digest_of_an_unchanged_large_file_is_remembered(large_file: Path) -> None:
    assert recall_digest(large_file) is None
    first = current_digest(large_file)
    assert recall_digest(large_file) == first == hash_file(large_file)


def test_memory_is_trusted_only_where_asked(large_file: Path) -> None:
    remember_digest(large_file, first := FileDigest("0" * 64, large_file.stat().st_size))  # as if the disk had failed
    assert current_digest(large_file) == first
    assert current_digest(large_file, trust_memory=False) == hash_file(large_file) != first


@pytest.mark.parametrize("change", ["time", "content", "size", "inode", "path"])
def test_any_change_is_hashed_again(large_file: Path, tmp_path: Path, change: str) -> None:
    current_digest(large_file)
    status = large_file.stat()
    path = large_file
    if change == "time":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    if change == "content":
        change_unseen(path)
    if change == "size":
        with path.open("ab") as file:
            file.write(b"x")
    if change == "inode":
        content = path.read_bytes()
        path.rename(tmp_path / "kept")  # keeps the inode from being used again
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    if change == "path":
        path = path.rename(tmp_path / "moved.safetensors")
    assert recall_digest(path) is None
    assert current_digest(path) == hash_file(path)


def test_link_shares_the_memory_of_its_target(large_file: Path, tmp_path: Path) -> None:
    digest = current_digest(large_file)
    link = tmp_path / "link.safetensors"
    link.symlink_to(large_file)
    assert recall_digest(link) == digest


def test_small_files_are_hashed_every_time(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_bytes(b"{}" * 100)
    first = current_digest(path)
    change_unseen(path)
    assert current_digest(path) != first


@pytest.mark.parametrize("record", [b"", b"[]", b'{"file": 1}', b'{"file": {}, "sha256": 5}'])
def test_damaged_memory_is_ignored(large_file: Path, own_cache: Path, record: bytes) -> None:
    current_digest(large_file)
    (stored,) = (own_cache / "digests").iterdir()
    stored.write_bytes(record)
    assert recall_digest(large_file) is None
    assert current_digest(large_file) == hash_file(large_file)


def known(path: Path, *tensors: str) -> bool:
    return is_known_finite(path, path.stat(), tensors)


def test_what_was_found_is_remembered_of_each_set_of_tensors(large_file: Path) -> None:
    remember_finite(large_file, large_file.stat(), ["a", "b"])
    assert not known(large_file, "a", "b")  # without a digest there is nothing to remember it with
    current_digest(large_file)
    remember_finite(large_file, large_file.stat(), ["a", "b"])
    remember_finite(large_file, large_file.stat(), ["c"])
    remember_finite(large_file, large_file.stat(), ["a", "b"])
    assert known(large_file, "b", "a") and known(large_file, "c")
    assert not known(large_file, "a") and not known(large_file, "a", "b", "c")
    assert recall_digest(large_file) == hash_file(large_file)


@pytest.mark.parametrize("change", ["time", "content"])
def test_what_was_found_holds_for_a_content(large_file: Path, change: str) -> None:
    current_digest(large_file)
    before = large_file.stat()
    remember_finite(large_file, before, ["a"])
    if change == "content":
        change_unseen(large_file)
    os.utime(large_file)
    assert not known(large_file, "a")
    remember_finite(large_file, before, ["a"])  # of the file as it was
    assert not known(large_file, "a")
    current_digest(large_file)
    assert known(large_file, "a") == (change == "time")


@pytest.mark.parametrize("finite", ["no list", [5], {"a": 1}, None])
def test_damaged_findings_are_none(large_file: Path, own_cache: Path, finite: object) -> None:
    current_digest(large_file)
    (stored,) = (own_cache / "digests").iterdir()
    stored.write_text(json.dumps(json.loads(stored.read_text()) | {"finite": finite}))
    assert not known(large_file, "a")
    assert current_digest(large_file) == hash_file(large_file)


def test_cache_that_cannot_be_written_costs_only_time(large_file: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where a folder should be")
    remember_digest(large_file, hash_file(large_file))
    assert recall_digest(large_file) is None
    assert current_digest(large_file) == hash_file(large_file)


def test_atomic_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "cache"] == ["file"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def test_failed_atomic_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken", b"data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_an_atomic_write_replaces_files_alone(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, b"data")
    assert os.read(reader, 10) == b"data"
    os.close(reader)
    assert pipe.is_fifo() and [entry.name for entry in tmp_path.iterdir()] == ["pipe"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
