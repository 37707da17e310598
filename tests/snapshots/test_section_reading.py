"""Parts of a file read and hashed by threads: bytes and digests are the file's, and nothing outlives a stop."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.errors import SnapshotError
from edgellm.snapshots import snapshot
from edgellm.snapshots.transfer import Part, SectionReader

SIZE, COUNT = 1000, 40


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    data = np.random.default_rng(3).integers(0, 256, SIZE * COUNT, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    with (tmp_path / "x").open("rb") as opened:
        yield opened.fileno(), data


@pytest.fixture(params=[1, 3, 16])
def reader(request: pytest.FixtureRequest) -> Iterator[SectionReader]:
    reader = SectionReader(request.param)
    reader.reserve()
    yield reader
    reader.close()


def test_a_process_that_may_have_no_more_threads_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, [2]

    def start_two(thread: threading.Thread) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    reader = SectionReader(4)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="new thread"):
        patched.setattr(threading.Thread, "start", start_two)
        reader.reserve()
    reader.close()


@pytest.mark.parametrize("is_hashed", [False, True])
def test_every_part_has_its_bytes(reader: SectionReader, file: tuple[int, bytes], is_hashed: bool) -> None:
    descriptor, data = file
    memory = np.zeros((COUNT, 1, SIZE), np.uint8)
    reading = reader.read(descriptor, [Part(memory[i], i * SIZE, SIZE) for i in range(COUNT)], is_hashed)
    for number in (5, 0, COUNT - 1):
        reading.wait_for(number)
        assert memory[number].tobytes() == data[number * SIZE :][:SIZE]
    digests = [found.digest for found in reading.findings()]
    assert memory.tobytes() == data
    expected = [hashlib.sha256(data[i * SIZE :][:SIZE]).digest() if is_hashed else b"" for i in range(COUNT)]
    assert digests == expected


def test_lines_of_a_part_may_lie_apart(reader: SectionReader, file: tuple[int, bytes]) -> None:
    descriptor, data = file
    memory = np.zeros((4, 7), np.uint8)
    reader.read(descriptor, [Part(memory, 30, 100)], False).findings()
    assert [line.tobytes() for line in memory] == [data[30 + 100 * i :][:7] for i in range(4)]


def test_a_file_that_ends_too_early(reader: SectionReader, file: tuple[int, bytes]) -> None:
    descriptor, data = file
    memory = np.zeros((3, 1, SIZE), np.uint8)
    reading = reader.read(descriptor, [Part(memory[i], len(data) - 2500 + i * SIZE, SIZE) for i in range(3)], True)
    with pytest.raises(SnapshotError, match="shorter than it was"):
        reading.findings()
    reading.stop()


def test_a_descriptor_that_cannot_be_read(reader: SectionReader, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    reading = reader.read(descriptor, [Part(np.zeros((1, 5), np.uint8), 0, 5)], False)
    with pytest.raises(SnapshotError, match="cannot be read") as caught:
        reading.wait_for(0)
    assert caught.value.reason == "unreadable"
    reading.stop()
    os.close(descriptor)


def test_nothing_is_read_after_a_stop(
    reader: SectionReader, file: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, _ = file
    memory = np.zeros((COUNT, 1, SIZE), np.uint8)
    begun = []
    digest = snapshot.section_digest
    monkeypatch.setattr(snapshot, "section_digest", lambda part: begun.append(1) or digest(part))
    reading = reader.read(descriptor, [Part(memory[i], i * SIZE, SIZE) for i in range(COUNT)], True)
    reading.wait_for(0)
    reading.stop()
    assert all(worker.done() for worker in reading.workers)
    read = len(begun)
    later = reader.read(descriptor, [Part(memory[0], 0, SIZE)], True)
    later.wait_for(0)
    assert len(begun) == read + 1
