"""What can go wrong between a name and its files: each is refused by name, with what to do, and nothing wrong stays."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import Edgellm
from hub_server import TOKEN, HubServer

from edgellm.errors import CheckpointError, HubError
from edgellm.hub.directories import checkpoint_of, local_directory
from edgellm.hub.downloads import repository_folder
from edgellm.kernels.gpu import GPU

NAME = "robots/tiny"
GGUF = b"GGUF\x03\0\0\0" + bytes(64)


def refusal(model: str = NAME, **options: object) -> str:
    with pytest.raises(HubError) as error:
        local_directory(model, **options)
    return str(error.value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library waits a second before it takes up a download that was cut."""
    import time

    from huggingface_hub import file_download

    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))


def test_a_cut_download_goes_on_where_it_was_cut(
    hub: HubServer, tiny_checkpoint: Path, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # of 10 MB, which this model has not
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    hub.cuts["model.safetensors"] = [50_000, 30_000]
    directory = local_directory(NAME)
    assert (directory / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    ranges = [span for method, path, span in hub.requests if path.endswith("model.safetensors") and method == "GET"]
    assert ranges == ["", "bytes=50000-", "bytes=80000-"]


def test_a_download_that_fails_goes_on_later_and_takes_up_whole_files(
    edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path, impatient: None
) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    hub.cuts["model.safetensors"] = [0] * 6
    code, _, err = edgellm("chat", NAME)
    assert code == 1 and f"{NAME} was not loaded from {hub.url}" in err and "HF_HUB_OFFLINE" in err
    hub.requests.clear()
    assert local_directory(NAME).is_dir()
    assert hub.downloads() == ["model.safetensors"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_what_is_not_as_its_digest_says_is_removed(hub: HubServer, tiny_checkpoint: Path, file: str) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    wrong = bytearray((tiny_checkpoint / file).read_bytes())
    wrong[-5] ^= 1
    hub.wrong[file] = bytes(wrong)
    error = refusal()
    assert f"{file} of {NAME} has the digest" in error and "It was removed: try again" in error
    assert not [path for path in Path("hf").rglob("*") if path.name == file]
    assert not [path for path in Path("hf").rglob("*") if path.is_file() and path.read_bytes() == wrong]
    assert refusal() == error  # nothing of it is taken for whole
    hub.wrong.clear()
    assert (local_directory(NAME) / file).read_bytes() == (tiny_checkpoint / file).read_bytes()


@pytest.mark.parametrize(
    ("file", "served"), [("model.safetensors", -100), ("model.safetensors", 0), ("config.json", 7)]
)
def test_a_wrong_size_is_refused(
    hub: HubServer, tiny_checkpoint: Path, file: str, served: int, impatient: None
) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    data = (tiny_checkpoint / file).read_bytes()
    hub.wrong[file] = data[:served] if served < 0 else data + bytes(served)
    hub.said_sizes[file] = len(data) + 50 if not served else len(hub.wrong[file])
    error = refusal()
    assert NAME in error and ("size" in error or f"the hub said {len(data):,}" in error)
    assert not [path for path in Path("hf").rglob(file) if path.is_file()]
    hub.wrong.clear(), hub.said_sizes.clear()
    assert (local_directory(NAME) / file).read_bytes() == data


def test_what_was_in_the_cache_before_is_refused_and_left(hub: HubServer, tiny_checkpoint: Path) -> None:
    from huggingface_hub import snapshot_download

    hub.repository(NAME).commit_folder(tiny_checkpoint)
    edited = Path(snapshot_download(NAME)) / "config.json"
    text = edited.read_text()
    edited.write_text(text.replace("1", "2"))
    assert len(edited.read_text()) == len(text)
    error = refusal()
    assert "was in the hub's cache before" in error and str(edited) in error
    assert edited.read_text() != text


def test_who_may_not_read_is_told_what_to_do(
    hub: HubServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = hub.repository(NAME)
    repository.commit_folder(tiny_checkpoint)
    for model in (NAME, "robots/nothing"):
        repository.access = "token"
        error = refusal(model)
        assert f"{model} is neither a path here nor" in error and "HF_TOKEN" in error and "hf auth login" in error
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = refusal()
    assert "token is refused (401)" in error and "HF_TOKEN" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "robots/nothing is neither" in refusal("robots/nothing")  # 404
    assert local_directory(NAME).is_dir()
    repository.access = "gated"
    repository.commit({"config.json": b"{}", "model.safetensors": b"-"})
    error = refusal(update=True)
    assert f"{NAME} is gated" in error and f"Accept them at {hub.url}/{NAME}" in error and "HF_TOKEN" in error


def test_a_revision_that_is_none(edgellm: Edgellm, hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint, "v1")
    assert f"{NAME} has no revision main" in refusal() and "--revision" in refusal()
    code, _, err = edgellm("serve", NAME, "--revision", "v2", "--port", 0)
    assert code == 1 and "has no revision v2" in err


def test_a_name_that_is_none_leaves_nothing(hub: HubServer) -> None:
    """It removes what it made and nothing else: neither a file that stood in the way, nor what is beside it."""
    models = repository_folder(NAME).parent
    assert NAME in refusal()
    assert [*models.iterdir()] == []
    for decoy in (models / "my--notes" / ".lock", repository_folder(NAME) / ".lock"):
        decoy.parent.mkdir()
        decoy.write_text("keep")
    assert NAME in refusal()
    assert [path.read_text() for path in models.rglob(".lock")] == ["keep", "keep"]


def test_a_hub_that_is_none(hub: HubServer) -> None:
    hub.repository(NAME).revisions["main"] = "no commit"
    hub.repository(NAME).commits["no commit"] = {"model.safetensors": b"-"}
    assert f"what {hub.url} says of {NAME} is no commit" in refusal()


def test_a_hub_that_is_not_there(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.server_close()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    error = refusal()
    assert f"{NAME} was not loaded from http://127.0.0.1:9" in error and "refused" in error and "Try again" in error


def test_the_disk_is_asked_first(hub: HubServer, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=16 << 20))
    error = refusal()
    assert "16 MiB free" in error and NAME in error and "HF_HOME" in error
    assert not hub.downloads()


def test_repositories_without_a_model(hub: HubServer, tiny_checkpoint: Path) -> None:
    repository = hub.repository(NAME)
    repository.commit({"config.json": b"{}", "pytorch_model.bin": b"pickled"})
    error = refusal()
    assert "only pickled weights (pytorch_model.bin)" in error and "edgellm convert" in error
    repository.commit({"adapter_model.safetensors": b"-"})
    assert "it has adapter_model.safetensors" in refusal(update=True)
    repository.commit({"README.md": b"-"})
    assert "no other weights" in refusal(update=True)
    shards = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    repository.commit({"model.safetensors.index.json": shards, "model-00001-of-00002.safetensors": b"-"})
    error = refusal(update=True)
    assert "lacks 1 of the 3 files of its weights: model-00002-of-00002.safetensors" in error
    repository.commit({"model.safetensors.index.json": b'{"weight_map": {"a": "../../x.safetensors"}}'})
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*expected the name of a \.safetensors file"):
        local_directory(NAME, update=True)


def test_gguf_files_are_listed_with_what_fits(
    edgellm: Edgellm, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tiny-Q4_K_M.gguf": 3 << 20, "tiny-Q8_0.gguf": 7 << 20, "mmproj-tiny-F16.gguf": 1 << 10}
    files = {name: bytes(size) for name, size in sizes.items()}
    parts = {f"big-{n:05d}-of-00002.gguf": bytes(6 << 20) for n in (1, 2)}
    hub.repository(NAME).commit(files | parts)
    gpu = GPU("NVIDIA Robot", "sm_87", (13, 0), 10 << 20, "sm_87", 8, 99 << 10, False, False)
    monkeypatch.setattr("edgellm.hub.names.find_gpu", lambda: gpu)
    code, _, err = edgellm("chat", NAME)
    assert (
        code == 1 and "has 3 GGUF files: name one, as in robots/tiny:tiny-Q4_K_M.gguf" in err and "NVIDIA Robot" in err
    )
    listed = [line.split(maxsplit=2) for line in err.splitlines() if line.endswith(".gguf")]
    assert [" ".join(words) for words in listed] == [
        "3.0 MiB fits          tiny-Q4_K_M.gguf",
        "7.0 MiB fits          tiny-Q8_0.gguf",
        "12.0 MiB does not fit  big-00001-of-00002.gguf",
    ]
    assert not hub.downloads()
    monkeypatch.setattr("edgellm.hub.names.find_gpu", lambda: None)
    assert "the memory of this machine" in refusal()
    assert "has no model tiny-Q4_0.gguf" in refusal(f"{NAME}:tiny-Q4_0.gguf")
    assert "has no model Q5_K_M" in refusal(f"{NAME}:Q5_K_M")


def test_a_gguf_file_is_downloaded_and_handed_on(edgellm: Edgellm, hub: HubServer) -> None:
    """One file where there is one, the file that is named, all parts of a split one; what they hold is not a model."""
    commit = hub.repository(NAME).commit({"tiny-Q8_0.gguf": GGUF, "README.md": b"-", "config.json": b"{}"})
    parts = {f"q4/big-{n:05d}-of-00002.gguf": GGUF + bytes(n) for n in (1, 2)}
    hub.repository("robots/more").commit({**parts, "other.gguf": GGUF + b"-"})
    path, origin = checkpoint_of(NAME, None, False, lambda stage, done, total: None)
    assert path.read_bytes() == GGUF and hub.downloads() == ["tiny-Q8_0.gguf"]
    assert origin is not None and (origin.commit, origin.file) == (commit, "tiny-Q8_0.gguf")
    hub.requests.clear()
    named = f"{NAME}:tiny-Q8_0.gguf"
    assert checkpoint_of(named, None, False, lambda stage, done, total: None)[0] == path and not hub.downloads()
    first, _ = checkpoint_of("robots/more:q4/big-00001-of-00002.gguf", None, False, lambda stage, done, total: None)
    assert first.is_file() and first.with_name("big-00002-of-00002.gguf").is_file()
    assert hub.downloads() == list(parts)
    for command in (("build", named, "own"), ("generate", "--model", named, "Hello")):
        code, _, err = edgellm(*command)
        assert code == 1 and "tiny-Q8_0.gguf" in err and not Path("own").exists()


def test_two_processes_download_and_build_once(hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    command = [sys.executable, "-m", "edgellm", "generate", "-m", NAME, "--backend", "numpy", "--raw", "Hi", "--json"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert len(hub.downloads()) == len({*hub.downloads()})
    assert len([*Path("cache").rglob("edgellm.json")]) == 1
