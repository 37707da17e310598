"""Models are listed with what they take, and removed without a trace of theirs or a loss of anybody else's."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import Edgellm
from hub_server import HubServer

from edgellm.engines.directories.description import DESCRIPTION_NAME
from edgellm.hub.directories import checkpoint_of, local_directory
from edgellm.hub.inventory import built_directories, remember_built

NAME = "robots/tiny"


def listed(edgellm: Edgellm) -> list[dict[str, Any]]:
    code, out, _ = edgellm("list", "--json")
    assert code == 0
    return json.loads(out)


def files_of(folder: Path) -> dict[str, bytes]:
    """Content by path of all that is there; of a link to nowhere its target."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.exists() else b"-> nowhere"
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_what_is_there_is_listed(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    code, out, _ = edgellm("list")
    assert code == 0 and "No model was built or downloaded" in out and not Path("cache").exists()
    commit = hub.repository(NAME).commit_folder(tiny_checkpoint)
    directory = local_directory(NAME)
    assert edgellm("build", tiny_checkpoint, "own", "--kv-capacity", 64)[0] == 0
    assert edgellm("build", NAME, "named", "--weights", "link")[0] == 0
    found = {(each["kind"], each["name"], Path(each["path"]).name): each for each in listed(edgellm)}
    assert {*found} == {
        ("built", "own", "own"),
        ("built", NAME, "named"),
        ("cached", NAME, directory.name),
        ("downloaded", NAME, commit),
    }
    weights = (tiny_checkpoint / "model.safetensors").stat().st_size
    sizes = {kind: each["size"] for (kind, name, _), each in found.items() if name != "own"}
    assert sizes["downloaded"] == sum(path.stat().st_size for path in tiny_checkpoint.iterdir())
    assert sizes["cached"] < weights and sizes["built"] < weights  # they link to what was downloaded
    assert found["built", "own", "own"]["size"] > weights and found["built", "own", "own"]["commit"] == ""
    out = edgellm("list")[1]
    assert f"{NAME} at {commit[:12]}" in out and str(directory) in out and "MiB" in out
    shutil.rmtree("own")
    assert ("built", "own") not in {(each["kind"], each["name"]) for each in listed(edgellm)}


def test_builds_at_the_same_time_do_not_forget_each_other(hub: HubServer, tmp_path: Path) -> None:
    """What one links to would be removed with the name that it was downloaded for."""
    paths = [tmp_path / f"robot-{number}" for number in range(12)]
    for path in paths:
        path.mkdir()
        (path / DESCRIPTION_NAME).touch()
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(remember_built, paths))
    assert {*built_directories()} == {*paths}


def test_a_directory_is_listed_once_by_whatever_name_it_was_built(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path
) -> None:
    Path("real").mkdir()
    Path("linked").symlink_to("real")
    for name in ("real/own", "linked/own"):
        assert edgellm("build", tiny_checkpoint, name, "--kv-capacity", 64, "--no-try", "--force")[0] == 0
    assert [each["path"] for each in listed(edgellm)] == [str(Path("real/own").resolve())]


def test_remove_leaves_nothing_of_its_own(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    repository = hub.repository(NAME)
    repository.commit_folder(tiny_checkpoint)
    local_directory(NAME)
    local_directory(NAME, build={"kv_capacity": 64})
    repository.commit_folder(tiny_checkpoint, **{"system_prompt.txt": b"You are Pip."})
    local_directory(NAME, update=True)
    hub.repository("robots/other").commit({"x.gguf": b"GGUF other"})
    checkpoint_of("robots/other", None, False, lambda stage, done, total: None)
    before = files_of(Path("hf")), files_of(Path("cache/models"))
    code, out, err = edgellm("remove", NAME)
    assert code == 0 and f"{NAME}: 0." in out and "Left" not in err
    for folder, earlier in zip(("hf", "cache/models"), before, strict=True):
        others = {name: data for name, data in earlier.items() if "tiny" not in name}
        assert files_of(Path(folder)) == others and others
        assert not list(Path(folder).rglob("*tiny*"))
    code, _, err = edgellm("remove", NAME)
    assert code == 1 and f"there is nothing of {NAME}: expected one of robots/other:x.gguf" in err
    assert local_directory(NAME).is_dir()  # it can be had again


def test_what_killed_downloads_left_is_removed(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    directory = local_directory(NAME)
    blob = (directory / "model.safetensors").resolve()
    for name in (f"{blob.name}.incomplete", f"{blob.name}.1234abcd.incomplete", "1234.incomplete"):
        (blob.parent / name).write_bytes(b"half of it")
    assert edgellm("remove", NAME)[0] == 0
    assert [path.name for path in blob.parent.iterdir()] == ["1234.incomplete"]  # of somebody else


def test_a_cache_named_from_here_is_found_from_elsewhere(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.repository(NAME).commit_folder(tiny_checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "beside")  # as HF_HUB_CACHE=beside
    local_directory(NAME)
    asked = len(hub.requests)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert local_directory(NAME).is_dir() and len(hub.requests) == asked
    assert edgellm("remove", NAME)[0] == 0
    assert not list((tmp_path / "beside").rglob("*tiny*"))


def test_remove_leaves_what_it_did_not_make(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    """Decoys: files of others beside and among its own, in the cache, in the hub's cache, links out of them."""
    from huggingface_hub import hf_hub_download, snapshot_download

    repository = hub.repository(NAME)
    commit = repository.commit_folder(tiny_checkpoint, **{"notes.md": b"of somebody else"})
    theirs = Path(hf_hub_download(NAME, "tokenizer.json"))
    hf_hub_download(NAME, "notes.md")
    before = files_of(Path("hf/hub"))
    directory = local_directory(NAME)
    outside = Path("outside")
    outside.mkdir()
    (outside / "precious.txt").write_text("keep")
    decoys = [
        directory / "notes.txt",
        directory / "draft" / "model.safetensors",
        directory.parent / "my-notes" / "edgellm.json",
        directory.parent / "README",
        theirs.parent / "mine.txt",
    ]
    for decoy in decoys:
        decoy.parent.mkdir(exist_ok=True)
        decoy.write_text("keep")
    (directory / "plans").symlink_to(outside.absolute())
    (directory.parent / f"{commit[:12]},linked").symlink_to(outside.absolute())
    replaced = directory / "config.json"
    code, _, err = edgellm("remove", NAME)
    assert code == 0 and "Left where it is" in err
    assert all(decoy.read_text() == "keep" for decoy in [*decoys, outside / "precious.txt"])
    for decoy in (*decoys[:2], directory.parent / "my-notes", decoys[3]):
        assert str(decoy) in err
    assert not replaced.exists() and not (directory / "edgellm.json").exists()
    left = files_of(Path("hf/hub"))
    assert left == before | {str(decoys[-1].absolute().relative_to(Path("hf/hub").absolute())): b"keep"}
    snapshot_download(NAME)  # what is left of the hub's cache is whole for others


def test_remove_leaves_what_a_directory_of_the_users_links_to(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path
) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    assert edgellm("build", NAME, "own", "--weights", "link")[0] == 0
    code, _, err = edgellm("remove", NAME)
    assert code == 0 and "Left where it is" in err
    assert edgellm("info", "own", "--verify")[0] == 0
    assert [path.name for path in Path("hf/hub").rglob("blobs/*")] == [Path("own/model.safetensors").resolve().name]
    assert {each["kind"] for each in listed(edgellm)} == {"built", "downloaded"}
    shutil.rmtree("own")
    assert edgellm("remove", NAME)[0] == 0 and not listed(edgellm)
    assert not list(Path("hf").rglob("*tiny*")) and not list(Path("cache/models").rglob("*tiny*"))


def test_one_file_of_several_is_removed(edgellm: Edgellm, hub: HubServer) -> None:
    hub.repository(NAME).commit({"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"})
    paths = [checkpoint_of(f"{NAME}:{n}.gguf", None, False, lambda stage, done, total: None)[0] for n in "ab"]
    assert edgellm("remove", f"{NAME}:a.gguf")[0] == 0
    assert not paths[0].exists() and paths[1].read_bytes() == b"GGUF b"
    assert [each["name"] for each in listed(edgellm)] == [f"{NAME}:b.gguf"]
    hub.requests.clear()
    assert checkpoint_of(f"{NAME}:b.gguf", None, False, lambda stage, done, total: None)[0] == paths[1]
    assert not hub.requests


def test_one_commit_of_several_is_removed(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    repository = hub.repository(NAME)
    first = repository.commit_folder(tiny_checkpoint)
    local_directory(NAME)
    second = repository.commit_folder(tiny_checkpoint, **{"system_prompt.txt": b"You are Pip."})
    directory = local_directory(NAME, update=True)
    code, _, err = edgellm("remove", NAME, "--revision", "fedcba")
    assert code == 1 and f"there is nothing of {NAME} at fedcba" in err and first in err and second in err
    before = files_of(directory)
    assert edgellm("remove", NAME, "--revision", first[:12])[0] == 0
    assert {(each["kind"], each["commit"]) for each in listed(edgellm)} == {("cached", second), ("downloaded", second)}
    hub.requests.clear()
    assert local_directory(NAME) == directory and files_of(directory) == before and not hub.requests
    assert edgellm("remove", NAME, "--revision", "main")[0] == 0  # the commit that it is
    assert not listed(edgellm) and not list(Path("hf").rglob("*tiny*"))


@pytest.mark.parametrize("name", ["own", "./robots/tiny", "robots", "a/b/c", "../robots/tiny", "robots/.."])
def test_remove_takes_names_alone(edgellm: Edgellm, hub: HubServer, tiny_engines: Path, name: str) -> None:
    shutil.copytree(tiny_engines, "own")
    shutil.copytree(tiny_engines, "robots/tiny")
    before = files_of(Path())
    code, _, err = edgellm("remove", name)
    assert code == 1 and "is no name on the hub" in err and files_of(Path()) == before


def test_a_damaged_record_loses_nothing(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    directory = local_directory(NAME)
    record = directory.parent / "downloads.json"
    for text in ("", "[]", '{"revisions": {}, "downloads": [3]}', '{"downloads": []}', "[" * 100_000):
        record.write_text(text)
        assert local_directory(NAME) == directory
        assert json.loads(record.read_text())["downloads"]
    Path("cache/models/built.json").write_text("{")
    assert {each["kind"] for each in listed(edgellm)} == {"cached", "downloaded"}


def test_a_damaged_list_is_named_and_kept(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    place = Path("cache/models/built.json")
    assert edgellm("build", tiny_checkpoint, "first", "--kv-capacity", 64)[0] == 0
    [first] = json.loads(place.read_text())
    wrong = json.dumps(["a\0b", 5, "\ud800", first])
    for number, (text, others) in enumerate(((wrong, 1), (wrong[:-3], 0), ('{"a": 1}', 0), ("[" * 100_000, 0))):
        place.write_text(text)
        code, out, err = edgellm("list", "--json")
        assert code == 0 and [each["name"] for each in json.loads(out)] == ["first"] * others
        assert "built.json is damaged (" in err and "the next build keeps it" in err
        code, _, err = edgellm("build", tiny_checkpoint, f"more{number}", "--kv-capacity", 64)
        assert code == 0 and "built.json is damaged (" in err
        assert place.with_name("built.json.damaged").read_text() == text
        assert [Path(each).name for each in json.loads(place.read_text())] == ["first"] * others + [f"more{number}"]
        assert "damaged" not in edgellm("list", "--json")[2]
