"""Models are opened by their names on the hub: asked once, built once, opened later without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Edgellm
from http_server import running
from hub_server import TOKEN, HubServer

from edgellm import LLM, RequestError
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.hub.directories import local_directory
from edgellm.hub.downloads import Download, _note_revision

NAME = "robots/tiny"
QUESTION = ("--backend", "numpy", "Hello", "--raw", "--max-tokens", "4")


def generated(edgellm: Edgellm, *arguments: object) -> tuple[int, str, str]:
    return edgellm("generate", "--model", NAME, *QUESTION, *arguments)


def test_a_name_answers_as_its_checkpoint_does(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path, tiny_engines: Path
) -> None:
    commit = hub.repository(NAME).commit_folder(
        tiny_checkpoint,
        **{"README.md": b"#", "pytorch_model.bin": b"pickled", "logo.png": b"PNG", "flax_model.msgpack": b"flax"},
    )
    code, out, err = generated(edgellm)
    assert code == 0, err
    assert "asking the hub: done\n" in err and "download: done" in err and "weights: done" in err
    expected = edgellm("generate", "--model", tiny_engines, *QUESTION)[1]
    assert out == expected and out.strip()
    wanted = {path.name for path in tiny_checkpoint.iterdir()}
    assert set(hub.downloads()) <= wanted and {"config.json", "tokenizer.json", "model.safetensors"} <= {
        *hub.downloads()
    }
    # Later starts ask nobody.
    hub.requests.clear()
    assert generated(edgellm)[:2] == (0, expected) and not hub.requests
    (directory,) = (EngineDirectory.open(path.parent) for path in Path("cache").rglob("edgellm.json"))
    assert directory.source is not None
    assert (directory.source.repository, directory.source.revision, directory.source.commit) == (NAME, "main", commit)
    assert directory.path.name == commit[:12] and directory.path.parent.name == "robots--tiny"
    assert (directory.path / "model.safetensors").is_symlink()
    code, out, _ = edgellm("info", NAME)
    assert code == 0 and f"{NAME}, revision main, commit {commit}" in out
    assert json.loads(edgellm("info", NAME, "--json")[1])["source"]["commit"] == commit


def test_a_moved_revision_is_taken_with_update_alone(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    repository = hub.repository(NAME)
    first = repository.commit_folder(tiny_checkpoint, "main", "v1")
    old = local_directory(NAME)
    second = repository.commit_folder(tiny_checkpoint, **{"system_prompt.txt": b"You are Pip."})
    hub.requests.clear()
    assert local_directory(NAME) == old and not hub.requests
    new = local_directory(NAME, update=True)
    assert EngineDirectory.read(new).source.commit == second and EngineDirectory.read(old).source.commit == first
    assert (new / "system_prompt.txt").read_text() == "You are Pip."
    assert hub.downloads() == ["system_prompt.txt"]  # the cache has the others, under another commit
    # The revision stays where it was found last; others have their own.
    hub.requests.clear()
    assert local_directory(NAME) == new and not hub.requests
    assert local_directory(NAME, revision="v1") == old
    assert local_directory(NAME, revision=second) == new
    assert f"commit {second}" in edgellm("info", NAME)[1]
    assert f"commit {first}" in edgellm("info", f"hf.co/{NAME}/tree/v1")[1]
    local_directory(NAME, build={"kv_capacity": 64})
    code, _, err = edgellm("info", NAME)
    assert code == 1 and "2 directories" in err and str(new) in err and str(old) not in err
    code, _, err = generated(edgellm, "--update")
    assert code == 0, err


def test_options_of_a_build_make_a_directory_of_their_own(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path
) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    plain = local_directory(NAME)
    hub.requests.clear()
    made = local_directory(NAME, build={"kv_capacity": 64, "max_batch": 2, "kv_cache": "int8", "head": None})
    assert made != plain and made.name == f"{plain.name},kv_cache=int8,kv_capacity=64,max_batch=2"
    limits = EngineDirectory.read(made).limits
    assert (limits.kv_capacity, limits.max_batch, limits.kv_cache) == (64, 2, "int8")
    code, _, err = generated(edgellm, "--kv-capacity", 64, "--head", "int8")
    assert code == 0, err
    assert not hub.requests
    packed = plain.with_name(f"{plain.name},head=int8,kv_capacity=64")
    assert EngineDirectory.read(packed).config.head == "int8"
    Path("config.yaml").write_text(f"model: {NAME}\nbuild: {{kv_capacity: 64, revision: main}}\n")
    assert edgellm("generate", "--config", "config.yaml", *QUESTION, "--head", "int8")[0] == 0
    assert len([*plain.parent.glob("*/edgellm.json")]) == 3
    for text in ("build: {kv: 3}", "build: {kv_capacity: many}", "build: {revision: 3}"):
        Path("config.yaml").write_text(f"model: {NAME}\n{text}\n")
        code, _, err = edgellm("generate", "--config", "config.yaml", *QUESTION)
        assert code == 1 and "config.yaml" in err and "expected" in err


def test_a_python_program_opens_a_name(hub: HubServer, tiny_checkpoint: Path) -> None:
    commit = hub.repository(NAME).commit_folder(tiny_checkpoint, "main", "v2")
    steps: list[tuple[int, int]] = []
    with LLM(
        NAME, backend="numpy", revision="v2", build={"kv_capacity": 48}, progress=lambda *step: steps.append(step)
    ) as llm:
        assert llm.context_length == 48 and llm.directory.name == NAME and llm.directory.source.commit == commit
        assert len(llm.generate("Hello", max_tokens=3).token_ids) == 3
    total = sum(path.stat().st_size for path in tiny_checkpoint.iterdir())
    assert (total, total) in steps
    for wrong, expected in (
        ({"build": {"kv_capacty": 48}}, "did you mean kv_capacity"),
        ({"build": {"kv_capacity": "48"}}, "expected a whole number"),
        ({"build": [48]}, "expected arguments of a build by name"),
        ({"update": 1}, "expected True or False"),
        ({"revision": 2}, "expected a branch"),
    ):
        with pytest.raises(RequestError, match=expected):
            LLM(NAME, backend="numpy", **wrong)


def test_build_takes_a_name_and_a_draft_by_name(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path, tiny_draft: Path
) -> None:
    commit = hub.repository(NAME).commit_folder(tiny_checkpoint, "v1")
    hub.repository("robots/tiny-eagle").commit_folder(tiny_draft)
    trees = ("--draft-top-k", 4, "--draft-steps", 3, "--verify-tree-size", 12)
    code, out, err = edgellm("build", NAME, "own", "--revision", "v1", "--draft", "robots/tiny-eagle", *trees)
    assert code == 0, err
    assert f"revision v1, commit {commit}" in out
    built = EngineDirectory.open("own")
    assert built.draft is not None and not (built.path / "model.safetensors").is_symlink()
    shutil.rmtree("hf")  # it is whole by itself
    assert edgellm("generate", "-m", "own", *QUESTION)[0] == 0
    drafted = local_directory(NAME, revision="v1", build={"draft": "robots/tiny-eagle"})
    assert EngineDirectory.open(drafted).draft is not None and "draft=robots-tiny-eagle@" in drafted.name


def test_shards_are_those_of_the_index(hub: HubServer, sharded_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(sharded_checkpoint, **{"model-00009-of-00009.safetensors": b"of another export"})
    directory = EngineDirectory.open(local_directory(NAME))
    assert len(directory.weight_files) == 2
    assert "model-00009-of-00009.safetensors" not in hub.downloads()


def test_a_path_that_exists_wins(edgellm: Edgellm, hub: HubServer, tiny_engines: Path, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    Path("robots").mkdir()
    code, _, err = generated(edgellm)
    assert code == 1 and "robots/tiny does not exist" in err and "--revision main" in err and not hub.requests
    code, _, err = generated(edgellm, "--revision", "main")  # now it can only be a name
    assert code == 0, err
    Path("robots/tiny").symlink_to(tiny_engines)
    hub.requests.clear()
    assert generated(edgellm)[0] == 0 and not hub.requests
    for option in (("--revision", "main"), ("--update",), ("--kv-capacity", 64), ("--draft-checkpoint", "mtp")):
        code, _, err = generated(edgellm, *option)
        assert code == 2 and option[0] in err and "ORG/NAME" in err
    with pytest.raises(RequestError, match="kv_capacity: given for robots/tiny, which is a path"):
        local_directory(NAME, build={"kv_capacity": 64})
    code, _, err = edgellm("build", tiny_checkpoint, "own", "--revision", "main")
    assert code == 1 and "revision: given for" in err


def test_a_cache_that_lost_files_is_mended(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    commit = hub.repository(NAME).commit_folder(tiny_checkpoint)
    directory = local_directory(NAME)
    shutil.rmtree("hf")
    hub.repository(NAME).commit({"config.json": b"{}"})  # which is not asked for
    code, _, err = generated(edgellm)
    assert code == 0, err
    assert EngineDirectory.open(directory).source.commit == commit
    (directory / "config.json").write_text("{}")
    assert generated(edgellm)[0] == 0
    EngineDirectory.open(directory, verify=True)


def test_offline_takes_what_the_cache_has(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    commit = hub.repository(NAME).commit_folder(tiny_checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = generated(edgellm)
    assert code == 1 and "is not in the hub's cache" in err and "HF_HUB_OFFLINE" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(NAME, allow_patterns=["*.json"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = generated(edgellm)
    assert code == 1 and "neither model.safetensors" in err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    code, _, err = generated(edgellm)
    assert code == 0, err
    assert (
        not hub.requests and EngineDirectory.read(next(Path("cache").rglob(f"{commit[:12]}"))).source.commit == commit
    )


def test_a_revision_is_found_offline_in_the_hubs_cache_alone(
    hub: HubServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this program, whose own cache is another one, and by others."""
    from huggingface_hub import constants, snapshot_download

    commit = hub.repository(NAME).commit_folder(tiny_checkpoint, "main", "v1")
    for revision in ("main", "v1"):
        local_directory(NAME, revision=revision)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("EDGELLM_CACHE_DIR", "other")
    hub.requests.clear()
    for revision in ("main", "v1"):
        assert local_directory(NAME, revision=revision).name == commit[:12]
        assert Path(snapshot_download(NAME, revision=revision)).name == commit
    assert not hub.requests
    found = Download(NAME, commit, "", Path("storage"), {})
    for revision in ("../../outside", str(Path("outside").absolute()), commit, "refs/pr/1"):
        _note_revision(found, revision)
    assert [*filter(Path.is_file, Path("storage").rglob("*"))] == [Path("storage/refs/refs/pr/1")]
    assert not Path("outside").exists()


def test_a_name_is_served_and_measured_under_it(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    local_directory(NAME, build={"kv_capacity": 64})
    with running(NAME, "--kv-capacity", 64) as server:
        assert [each["id"] for each in server.get("/v1/models")[1]["data"]] == [NAME]
        assert server.get(f"/v1/models/{NAME}")[1]["id"] == NAME
        status, answer, _ = server.ask("POST", "/v1/completions", {"model": NAME, "prompt": "Hi", "max_tokens": 3})
        assert status == 200 and answer["model"] == NAME
    Path("prompts.txt").write_text("Where?\n")
    options = ("--prompts", "prompts.txt", "--repeat", 1, "--max-tokens", 2, "--configurations", "suffix")
    code, _, err = edgellm(
        "bench", NAME, "--backend", "numpy", *options, "--output", "speeds.json", "--kv-capacity", 64
    )
    assert code == 0, err
    assert json.loads(Path("speeds.json").read_text())["model"] == NAME
    assert len([*Path("cache").rglob("edgellm.json")]) == 1
    Path("text.txt").write_text("The red cup is on the table. " * 8)
    code, out, err = edgellm("eval", NAME, "--kv-capacity", 64, "--reference", NAME, "--text", "text.txt")
    assert code == 0 and "perplexity" in out, err


def test_the_environment_names_hub_cache_and_token(hub: HubServer, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """In a process of its own, as users start it; the second start does not even load what would ask."""
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    hub.repository(NAME).access = "token"
    hub.cuts["model.safetensors"] = [50_000]
    command = [sys.executable, "-X", "importtime", "-m", "edgellm", "generate", "-m", NAME, *QUESTION]
    environment = {**os.environ, "EDGELLM_CONFIG": os.devnull, "HF_TOKEN": TOKEN}
    first = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert first.returncode == 0, first.stderr[-2000:]
    assert "Error while downloading" not in first.stderr  # it goes on by itself, and progress stays a line
    assert "huggingface_hub" in first.stderr and [*(tmp_path / "hf" / "hub").glob("models--robots--tiny")]
    hub.requests.clear()
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "huggingface_hub" not in second.stderr and not hub.requests
