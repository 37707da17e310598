"""Files that are no snapshot of this model: each is refused with a reason that names it, and the process goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.speculation.runner import DecodingRunner
from edgellm.errors import SnapshotError
from edgellm.snapshots.contents import KVContents
from edgellm.snapshots.file import SnapshotFolder, read_snapshot, verify_snapshot, write_snapshot
from edgellm.snapshots.slots import SlotSnapshots
from edgellm.snapshots.store import SnapshotStore

IDS = [(7 * index + 3) % 250 for index in range(20)]
Slots = tuple[DecodingRunner, EngineDirectory]


@pytest.fixture(scope="module")
def slots(open_slots: Callable[..., object], tiny_draft_engines: Path) -> Iterator[Slots]:
    with open_slots(tiny_draft_engines, draft=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def good(slots: Slots, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of 20 tokens, base and draft, on disk."""
    path = tmp_path_factory.mktemp("good") / "good.safetensors"
    write_snapshot(path, SlotSnapshots(SnapshotStore(), *slots).compute(0, IDS, KVContents(), "good"))
    return path


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(header: dict, rest: bytes) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + rest


def refusal(slots: Slots, path: Path) -> SnapshotError:
    """The error with which a runner refuses a file; it answers as before."""
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    with pytest.raises(SnapshotError) as caught:
        snapshots.load(path)
    assert snapshots.store.snapshots() == []
    assert str(path) in str(caught.value)
    contents = KVContents()
    assert snapshots.restore(0, [*IDS, 1], contents) == 0
    assert contents.reusable([*IDS, 1]) == 0
    return caught.value


def sections(data: bytes) -> list[int]:
    """Where each part of the file begins, and its end."""
    header, rest = header_of(data)
    start = len(data) - len(rest)
    offsets = {offset for name, entry in header.items() if name != "__metadata__" for offset in entry["data_offsets"]}
    return sorted({0, 8, start, *(start + offset for offset in offsets)})


def test_the_good_file_is_taken(slots: Slots, good: Path) -> None:
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    snapshots.load(good)
    assert snapshots.restore(0, [*IDS, 1], KVContents()) == len(IDS) - 1  # a draft needs the token after each row


def test_truncated_at_every_section(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    boundaries = sections(data)
    assert len(boundaries) == 13  # length, header, 6 caches of the base and 2 of the draft, ids, digest, end
    lengths = {length + change for length in boundaries for change in (-1, 0, 1)} & set(range(len(data)))
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        error = refusal(slots, path)
        assert error.reason == "damaged", (length, error)


def test_each_region_flipped(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    boundaries = sections(data)
    places = {place for start, end in pairwise(boundaries) for place in (start, (start + end) // 2, end - 1)}
    places |= set(range(8, boundaries[2], 41))  # the header
    for place in sorted(places):
        flipped = bytearray(data)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        error = refusal(slots, path)
        assert error.reason in ("damaged", "no snapshot", "future version", "old version") or error.reason.startswith(
            "other "
        ), place
        if place >= boundaries[2]:
            assert error.reason == "damaged" and "SHA-256" in str(error), place


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(good: Path, tmp_path: Path, place: int, bit: int) -> None:
    data, path = bytearray(good.read_bytes()), tmp_path / "x"
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(SnapshotError):
        verify_snapshot(path, read_snapshot(path))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200), follows=st.booleans())
def test_no_bytes_break_the_reader(tmp_path: Path, data: bytes, follows: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(len(data).to_bytes(8, "little") * follows + data)
    with pytest.raises(SnapshotError):
        read_snapshot(path)


def change_everywhere(data: bytes, tokens: int) -> bytes:
    """The file with a header that consistently claims so many tokens."""
    header, rest = header_of(data)
    facts = json.loads(header["__metadata__"]["edgellm_snapshot"])
    header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts | {"tokens": tokens})
    position = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        size = (entry["data_offsets"][1] - entry["data_offsets"][0]) // int(np.prod(entry["shape"]))
        if name == "token_ids":
            entry["shape"] = [tokens]
        elif name != "sha256":
            entry["shape"][1] = tokens - name.startswith("draft.")
        entry["data_offsets"] = [position, position + int(np.prod(entry["shape"], dtype=object)) * size]
        position = entry["data_offsets"][1]
    return with_header(header, rest)


def test_a_header_that_claims_four_thousand_million_tokens(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    path.write_bytes(change_everywhere(data, 4_000_000_000))
    error = refusal(slots, path)
    assert error.reason == "damaged" and "truncated" in str(error)
    header, rest = header_of(data)
    facts = json.loads(header["__metadata__"]["edgellm_snapshot"])
    header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts | {"tokens": 4_000_000_000})
    path.write_bytes(with_header(header, rest))
    error = refusal(slots, path)
    assert error.reason == "damaged" and "4000000000" in str(error)
    path.write_bytes((4 << 30).to_bytes(8, "little") + data[8:])
    error = refusal(slots, path)
    assert error.reason == "damaged" and "4,294,967,296" in str(error)


@pytest.mark.parametrize("version", [1, 2, 4, 99])
def test_another_version(slots: Slots, good: Path, tmp_path: Path, version: int) -> None:
    header, rest = header_of(good.read_bytes())
    facts = json.loads(header["__metadata__"]["edgellm_snapshot"]) | {"format_version": version, "new": "key"}
    header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts)
    (tmp_path / "x").write_bytes(with_header(header, rest))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == ("old version" if version < 3 else "future version")
    assert f"version {version}, this EdgeLLM reads 3" in str(error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": True}, "tokens"),
        ({"extra": 1}, "extra"),
        ({"label": 3}, "label"),
        ({"binding": {}}, "weights"),
        ({"binding": []}, "binding"),
        ({"format_version": 0}, "format_version"),
    ],
)
def test_metadata_of_other_kinds(slots: Slots, good: Path, tmp_path: Path, change: dict, named: str) -> None:
    header, rest = header_of(good.read_bytes())
    facts = json.loads(header["__metadata__"]["edgellm_snapshot"]) | change
    header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts)
    (tmp_path / "x").write_bytes(with_header(header, rest))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == "damaged" and repr(named) in str(error)


@pytest.mark.parametrize("metadata", [None, {}, {"edgellm_snapshot": "[1]"}, {"edgellm_snapshot": "{"}, {"other": "x"}])
def test_safetensors_files_of_others(slots: Slots, good: Path, tmp_path: Path, metadata: dict | None) -> None:
    header, rest = header_of(good.read_bytes())
    del header["__metadata__"]
    if metadata is not None:
        header["__metadata__"] = metadata
    (tmp_path / "x").write_bytes(with_header(header, rest))
    has_text = bool(metadata) and "edgellm_snapshot" in metadata
    assert refusal(slots, tmp_path / "x").reason == ("damaged" if has_text else "no snapshot")


def test_tensors_under_other_names(slots: Slots, good: Path, tmp_path: Path) -> None:
    data, path = good.read_bytes(), tmp_path / "x"
    for name, other in (
        ("base.k_cache_0", "base.q_cache_0"),
        ("base.k_cache_0", "base.k_cache_00"),
        ("token_ids", "tokens"),
        ("sha256", "sha512"),
    ):
        header, rest = header_of(data)
        path.write_bytes(with_header({key if key != name else other: entry for key, entry in header.items()}, rest))
        error = refusal(slots, path)
        assert error.reason == "damaged" and (name in str(error) or other in str(error))


def test_rows_of_another_number_of_layers_or_heads_are_named(
    slots: Slots, good: Path, tmp_path: Path, make_snapshot: Callable[..., object]
) -> None:
    binding = SlotSnapshots(SnapshotStore(), *slots).binding()
    write_snapshot(tmp_path / "x", make_snapshot(IDS, **vars(binding)))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == "damaged" and "'base.k_cache_0' has the shape (2, 20, 8), expected (2, 20, 16)" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("adapter", "a" * 64, "the adapter is aaaaaaaaaaaaaaaa..., expected none"),
        ("dtype", "float16", "the dtype is float16, expected float32"),
        ("backend", "tensorrt", "the backend is tensorrt, expected numpy"),
        ("arithmetic", 2, "the order of sums is number 2, expected 0"),
        ("executor", "tensorrt", "the executor is tensorrt, expected auto"),
        ("layout", "tokens-heads-size", "the layout of the rows is tokens-heads-size"),
        ("images", "b" * 64, "the images are bbbbbbbbbbbbbbbb..., expected none"),
        ("rotary_context", 4096, "for a context of 4096, expected any length"),
        ("config", "c" * 64, "the model's configuration is cccccccccccccccc..."),
        ("weights", "d" * 64, "the model's weights are dddddddddddddddd..."),
        ("draft", "none", "the draft model is none, expected"),
    ],
)
def test_another_binding(
    slots: Slots, tmp_path: Path, make_snapshot: Callable[..., object], field: str, value: object, words: str
) -> None:
    binding = SlotSnapshots(SnapshotStore(), *slots).binding()
    write_snapshot(tmp_path / "x", make_snapshot(IDS, **(vars(binding) | {field: value})))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == f"other {field.replace('_', ' ')}"
    assert words in str(error)


def test_the_snapshot_of_another_model(
    slots: Slots,
    make_checkpoint: Callable[..., Path],
    open_slots: Callable[..., object],
    tiny_engines: Path,
    tmp_path: Path,
) -> None:
    from edgellm.engines.building.builder import build_engine_directory
    from edgellm.engines.model.limits import EngineLimits

    other = tmp_path / "other"
    build_engine_directory(make_checkpoint(tmp_path / "checkpoint", 7), other, EngineLimits(1, 16, 96), [])
    with open_slots(other) as opened:
        write_snapshot(tmp_path / "x", SlotSnapshots(SnapshotStore(), *opened).compute(0, IDS, KVContents(), "other"))
    error = refusal(slots, tmp_path / "x")
    assert error.reason == "other weights" and "the draft model is none" in str(error)
    with open_slots(tiny_engines) as opened:  # the same base, without the draft
        error = refusal(opened, tmp_path / "x")
        assert "weights" in str(error) and "draft" not in str(error)


def test_what_is_no_readable_file(slots: Slots, good: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        "empty": "damaged",
        "directory": "no snapshot",
        "loop": "unreadable",
        "dangling": "unreadable",
        "pipe": "no snapshot",
        "missing": "unreadable",
    }
    assert {name: refusal(slots, tmp_path / name).reason for name in reasons} == reasons
    assert "symbolic links" in str(refusal(slots, tmp_path / "loop"))
    shutil.copy(good, tmp_path / "secret")
    (tmp_path / "secret").chmod(0)
    for name in ("", "secret"):
        with without_privileges(tmp_path):
            error = refusal(slots, tmp_path / name)
        assert error.reason == ("unreadable" if name else "no snapshot")
    assert "Permission denied" in str(error)


@contextmanager
def without_privileges(folder: Path) -> Iterator[None]:
    """Run as a user who may enter the folder but owns nothing in it; root may read every file."""
    if os.geteuid() != 0:
        yield
        return
    for parent in (folder, *folder.parents):
        if parent.stat().st_mode & 0o055 != 0o055:  # the group stays root's
            parent.chmod(parent.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_of_hostile_files_hides_no_good_one(
    slots: Slots, good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = good.read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:1000])
    (tmp_path / "b.safetensors").mkdir()
    (tmp_path / "c.safetensors").symlink_to(tmp_path / "c.safetensors")
    flipped = bytearray(change_tokens(data))
    (tmp_path / "d.safetensors").write_bytes(flipped)
    shutil.copy(good, tmp_path / "e.safetensors")
    found = SnapshotFolder(tmp_path)._files()
    assert {path.name[0] for path in found} == {"d", "e"}
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3  # once each, though they were met twice
    for file, what in (("a", "is damaged"), ("b", "is a directory"), ("c", "cannot be read")):
        assert any(f"{file}.safetensors {what}" in message for message in warned)
    snapshots = SlotSnapshots(SnapshotStore(), *slots)
    for path in found:
        snapshots.store.add_file(path)
    contents = KVContents()
    prompt = [*IDS, 200, 201, 202]  # the flipped file claims the longer prefix
    assert snapshots.restore(0, prompt, contents) == 19
    assert contents.reusable(prompt) == 19
    assert "d.safetensors is damaged" in caplog.text
    assert [stored.path.name for stored in snapshots.store.snapshots()] == ["e.safetensors"]


def change_tokens(data: bytes) -> bytes:
    """The file with other, more tokens: rows that lie about what they belong to, under the old digest."""
    header, rest = header_of(data)
    facts = json.loads(header["__metadata__"]["edgellm_snapshot"])
    header["__metadata__"]["edgellm_snapshot"] = json.dumps(facts | {"tokens": 21})
    values, position, pieces = [], 0, header.items()
    for name, entry in pieces:
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        block = rest[begin:end]
        if name == "token_ids":
            block += np.asarray([200], np.int32).tobytes()
            entry["shape"] = [21]
        elif name != "sha256":
            block += bytes(len(block) // entry["shape"][1])
            entry["shape"][1] += 1
        values.append(block)
        entry["data_offsets"] = [position, position + len(block)]
        position += len(block)
    return with_header(header, b"".join(values))
