"""`edgellm cache remove` among files that are no snapshots: only what is one, or was one, goes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import Edgellm
from safetensors.numpy import save_file

from edgellm.errors import SnapshotError
from edgellm.snapshots.file import read_snapshot, require_snapshot_file, write_snapshot
from edgellm.snapshots.snapshot import BEGINNING, Snapshot

MakeSnapshot = Callable[..., Snapshot]


@pytest.fixture
def folder(tmp_path: Path, make_snapshot: MakeSnapshot) -> Path:
    """A folder with the snapshots `pip` and `rob`."""
    for name, ids in (("pip", [1, 2, 3]), ("rob", [4, 5])):
        write_snapshot(tmp_path / "kept" / f"{ids[0]}{'a' * 31}.safetensors", make_snapshot(ids, label=name))
    return tmp_path / "kept"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file that has the name of a snapshot, and one whose name begins as a snapshot's."""
    place = tmp_path / "workplace"
    place.mkdir()
    (place / "pip").write_text("notes")
    (place / "1aa").write_text("more notes")
    monkeypatch.chdir(place)
    return place


def remaining(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


@pytest.mark.parametrize("name", ["pip", "1aa"])
def test_a_snapshots_name_goes_before_a_file_of_that_name(
    edgellm: Edgellm, folder: Path, workplace: Path, name: str
) -> None:
    code, out, err = edgellm("cache", "remove", name, "--folder", folder)
    assert (code, out, err) == (0, f"{folder / ('1' + 'a' * 31)}.safetensors: removed\n", "")
    assert remaining(workplace) == ["1aa", "pip"] and len(remaining(folder)) == 1


@pytest.mark.parametrize("command", ["remove", "show", "verify"])
def test_a_bare_name_is_no_file_in_the_working_folder(
    edgellm: Edgellm, tmp_path: Path, workplace: Path, command: str
) -> None:
    code, out, err = edgellm("cache", command, "pip", "--folder", tmp_path / "empty")
    assert (code, out) == (1, "")
    assert f"there is no snapshot 'pip' in {tmp_path / 'empty'} (the file of that name is written ./pip)" in err
    assert remaining(workplace) == ["1aa", "pip"]


def test_a_path_has_a_separator_or_the_ending(
    edgellm: Edgellm, folder: Path, workplace: Path, make_snapshot: MakeSnapshot
) -> None:
    for name in ("here", "there.safetensors"):
        write_snapshot(workplace / name, make_snapshot([7]))
    assert edgellm("cache", "remove", "here", "--folder", folder)[0] == 1
    assert edgellm("cache", "remove", "./here", "there.safetensors", "--folder", folder)[0] == 0
    assert remaining(workplace) == ["1aa", "pip"] and len(remaining(folder)) == 2


def test_a_label_goes_before_a_path_and_before_beginnings_of_names(
    edgellm: Edgellm, folder: Path, workplace: Path, make_snapshot: MakeSnapshot
) -> None:
    write_snapshot(workplace / "x.safetensors", make_snapshot([7]))
    write_snapshot(folder / "8.safetensors", make_snapshot([8], label="x.safetensors"))
    write_snapshot(folder / "9.safetensors", make_snapshot([9], label="1aa"))
    assert edgellm("cache", "remove", "x.safetensors", "1aa", "--folder", folder)[0] == 0
    assert remaining(folder) == [f"{start}{'a' * 31}.safetensors" for start in "14"]
    assert remaining(workplace) == ["1aa", "pip", "x.safetensors"]


def test_no_name_means_no_snapshot(edgellm: Edgellm, folder: Path) -> None:
    (folder / f"4{'a' * 31}.safetensors").unlink()
    assert edgellm("cache", "remove", "", "--folder", folder)[0] == 2
    assert len(remaining(folder)) == 1


def test_where_one_name_is_refused_nothing_is_removed(edgellm: Edgellm, folder: Path, workplace: Path) -> None:
    code, out, err = edgellm("cache", "remove", "rob", "./pip", "pip", "--folder", folder)
    assert (code, out) == (1, "")
    assert err == (
        "error: pip is no snapshot: it does not begin as one, nor as one that was damaged\nNothing was removed.\n"
    )
    assert remaining(workplace) == ["1aa", "pip"] and len(remaining(folder)) == 2


def test_all_leaves_what_is_no_snapshot_and_names_it(
    edgellm: Edgellm, folder: Path, tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    outside = tmp_path / "outside.safetensors"
    write_snapshot(outside, make_snapshot([7]))
    good = (folder / f"1{'a' * 31}.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(good[:500])
    save_file({"weight": np.ones(3, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "notes.safetensors").write_text("notes")
    (folder / "empty.safetensors").touch()
    (folder / "notes.txt").write_bytes(good)
    (folder / "folder.safetensors").mkdir()
    (folder / "folder.safetensors" / "kept.safetensors").write_bytes(good)
    (folder / "link.safetensors").symlink_to(outside)
    (folder / "nowhere.safetensors").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "two\nlines.safetensors").write_bytes(good)
    code, out, err = edgellm("cache", "remove", "--all", "--folder", folder)
    left = ["empty", "folder", "link", "model", "notes", "nowhere", "pipe"]
    assert code == 1
    assert sorted(line.split("/")[-1] for line in out.splitlines()) == [
        f"1{'a' * 31}.safetensors: removed",
        f"4{'a' * 31}.safetensors: removed",
        "cut.safetensors: removed",
        "two\\nlines.safetensors: removed",
    ]
    assert [line.split(" is ")[0] for line in err.splitlines()[:-1]] == [
        f"error: {folder / name}.safetensors" for name in left
    ]
    assert err.splitlines()[-1] == "What is named was left where it is."
    assert remaining(folder) == sorted([*(f"{name}.safetensors" for name in left), "notes.txt"])
    assert remaining(folder / "folder.safetensors") == ["kept.safetensors"]
    assert read_snapshot(outside).token_ids.tolist() == [7]


def test_all_of_a_folder_of_snapshots(edgellm: Edgellm, folder: Path) -> None:
    code, out, err = edgellm("cache", "remove", "--all", "--folder", folder)
    assert (code, out.count(": removed\n"), err, remaining(folder)) == (0, 2, "", [])


def test_a_snapshot_is_known_by_its_beginning_however_it_was_damaged(
    tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    path = tmp_path / "x"
    write_snapshot(path, make_snapshot([1, 2, 3]))
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    told = 8 + len(BEGINNING)
    for length in (told, told + 1, header - 1, header, header + 1, len(data) - 1, len(data)):
        path.write_bytes(data[:length])
        require_snapshot_file(path)
    for place in range(header):
        for bit in (1, 16):
            flipped = bytearray(data)
            flipped[place] ^= bit
            path.write_bytes(flipped)
            require_snapshot_file(path)
    path.write_bytes(bytes(told) + data[told:])
    with pytest.raises(SnapshotError, match="does not begin as one"):
        require_snapshot_file(path)
    for length in (0, 7, 8, told - 1):
        path.write_bytes(data[:length])
        with pytest.raises(SnapshotError, match="does not begin as one"):
            require_snapshot_file(path)


def test_a_snapshot_is_known_whoever_wrote_its_header_and_in_every_format(
    tmp_path: Path, make_snapshot: MakeSnapshot
) -> None:
    path = tmp_path / "x"
    write_snapshot(path, make_snapshot([1, 2, 3]))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    for version in (None, 1, 99):
        facts = json.loads(metadata["edgellm_snapshot"])
        changed = {"note": "x"} | metadata | {"edgellm_snapshot": json.dumps(facts | {"format_version": version or 2})}
        encoded = json.dumps(header | {"__metadata__": changed}, indent=1).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
        require_snapshot_file(path)
    encoded = json.dumps(header | {"__metadata__": {"note": "edgellm_snapshot"}}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
    with pytest.raises(SnapshotError, match="does not begin as one"):
        require_snapshot_file(path)


def test_what_other_programs_left_half_written_stays(tmp_path: Path) -> None:
    from edgellm.snapshots.staging import remove_abandoned

    for name in (".x.partial-0123abcd", ".download.partial-file", ".x.partial-0123abcd.txt"):
        (tmp_path / name).write_bytes(b"left")
    os.mkfifo(tmp_path / ".y.partial-0123abcd")
    remove_abandoned(tmp_path)
    assert remaining(tmp_path) == [".download.partial-file", ".x.partial-0123abcd.txt", ".y.partial-0123abcd"]
