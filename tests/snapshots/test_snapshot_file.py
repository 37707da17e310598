"""Snapshots as files: what is written is read again; safetensors, SHA-256 and the order of writing are as said."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kept_snapshots import flip_what_is_written
from safetensors import safe_open

from edgellm.errors import SnapshotError
from edgellm.snapshots import snapshot as digests
from edgellm.snapshots.file import read_snapshot, verify_snapshot, write_snapshot
from edgellm.snapshots.snapshot import Snapshot
from edgellm.snapshots.staging import StagedFile, remove_abandoned

MakeSnapshot = Callable[..., Snapshot]


def content_of(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: snapshot.tensor(name).tobytes() for name in (*snapshot.rows, *snapshot.states, "token_ids")}


def verified(path: Path) -> Snapshot:
    snapshot = read_snapshot(path)
    assert not snapshot.is_verified
    verify_snapshot(path, snapshot)
    assert snapshot.is_verified
    return snapshot


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("draft", ["none", "d" * 64])
def test_a_written_snapshot_is_read_as_it_was(
    make_snapshot: MakeSnapshot, tmp_path: Path, dtype: str, draft: str
) -> None:
    made = make_snapshot([5, 2**31 - 1, 0], dtype=dtype, draft=draft, label="a name, ünïcode \U0001f916")
    path = tmp_path / "new folder" / "x.safetensors"
    write_snapshot(path, made)
    found = verified(path)
    assert found.facts == made.facts
    assert found.token_ids.tolist() == [5, 2**31 - 1, 0]
    assert content_of(found) == content_of(made)
    assert (len(found.rows), found.nbytes) == (2 if draft == "none" else 4, path.stat().st_size)
    assert found.is_mapped and not found.tensor(found.rows[0]).flags.writeable
    assert [file.name for file in path.parent.iterdir()] == ["x.safetensors"]


def test_one_token_leaves_a_draft_without_rows(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    write_snapshot(tmp_path / "x", make_snapshot([7], draft="d" * 64))
    assert verified(tmp_path / "x").tensor("draft.k_cache_0").shape == (2, 0, 8)


def test_there_is_room_for_states_of_recurrent_layers(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    states = {"base.state.delta_matrix_1": (3, 4, 5), "base.state.conv_columns_1": (1, 3, 7)}
    made = make_snapshot([1, 2, 3], states=states)
    write_snapshot(tmp_path / "x", made)
    found = verified(tmp_path / "x")
    assert sorted(found.states) == sorted(states)
    assert content_of(found) == content_of(made)


def test_the_file_is_safetensors_to_others(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    made = make_snapshot([1, 2, 3], dtype="float16")
    write_snapshot(tmp_path / "x.safetensors", made)
    with safe_open(tmp_path / "x.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["edgellm_snapshot"])["tokens"] == 3
        for name in made.rows:
            assert file.get_tensor(name).tobytes() == made.tensor(name).tobytes()
        assert file.get_tensor("token_ids").tolist() == [1, 2, 3]


@pytest.mark.parametrize("tokens", [3, 40_000])
def test_the_digest_is_that_of_the_list_of_sections(make_snapshot: MakeSnapshot, tmp_path: Path, tokens: int) -> None:
    """The header, then each tensor: whole, or by its heads of 1,280,000 bytes where two are more than 2 MiB."""
    write_snapshot(tmp_path / "x", make_snapshot(range(tokens)))
    data = (tmp_path / "x").read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    rows = tokens * 8 * 4
    sizes = [head, *([2 * rows] * 2 if tokens == 3 else [rows] * 4), tokens * 4]
    ends = np.cumsum(sizes)
    assert ends[-1] == len(data) - 32
    sections = [data[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    expected = hashlib.sha256(b"".join(hashlib.sha256(section).digest() for section in sections)).digest()
    assert data[-32:] == expected


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 200), st.integers(1, 9))
def test_the_digest_does_not_depend_on_threads(size: int, block: int) -> None:
    content = np.arange(size, dtype=np.uint8)
    sections = [digests.Section(start, min(block, size - start)) for start in range(0, size, block)]
    expected = hashlib.sha256(
        b"".join(hashlib.sha256(content[start : start + block]).digest() for start in range(0, size, block))
    ).digest()
    assert digests.content_digest(content, sections) == expected


def test_the_disk_has_the_content_before_the_name_and_the_name_before_success(
    make_snapshot: MakeSnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, rename = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append("renamed")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_rename)
    write_snapshot(tmp_path / "x", make_snapshot([1]))
    assert [event if isinstance(event, str) else event.is_dir() for event in events] == [False, "renamed", True]
    assert events[0].name.startswith(".x.partial-") and events[2] == tmp_path


def test_a_disk_that_gives_back_something_else_is_noticed_and_the_old_file_stays(
    make_snapshot: MakeSnapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_snapshot(path, make_snapshot([1, 2]))
    before = path.read_bytes()
    flip_what_is_written(monkeypatch)
    with pytest.raises(SnapshotError, match="did not read back") as caught:
        write_snapshot(path, make_snapshot([1, 2, 3]))
    assert caught.value.reason == "not written"
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(make_snapshot: MakeSnapshot, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for target in (tmp_path / "file" / "x", tmp_path / "folder", tmp_path / "pipe", Path("/proc/nowhere/x")):
        with pytest.raises(SnapshotError, match=f"{target}.* cannot be written") as caught:
            write_snapshot(target, make_snapshot([1]))
        assert caught.value.reason == "not written"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    (tmp_path / ".x.partial-0123abcd").write_bytes(b"left")
    (tmp_path / ".y.partial-0123abcd").write_bytes(b"left")
    with StagedFile(tmp_path / "x") as first:
        with StagedFile(tmp_path / "x") as second:
            assert first.path.exists() and second.path.exists()
            second.file.write(b"second")
            second.sync()
            second.commit()
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([first.path.name, "x"])
    assert (tmp_path / "x").read_bytes() == b"second"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
