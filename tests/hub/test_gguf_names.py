"""GGUF files by their names on the hub, and files of one's own: opened alike, with the options of a build."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Edgellm
from gguf_encoders import tiny_files
from gguf_models import byte_pairs, write_model
from hub_server import HubServer
from tokenizers import Tokenizer

from edgellm import LLM
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError
from edgellm.hub.directories import local_directory

NAME = "robots/tiny-GGUF"
QUESTION = ("--backend", "numpy", "Hello", "--raw", "--max-tokens", "4")


def written(checkpoint: Path, target: Path) -> Path:
    """The checkpoint as a GGUF file with its tokenizer."""
    keys = byte_pairs(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), "gpt-2")
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return write_model(checkpoint, target, metadata | {"tokenizer.ggml.eos_token_id": 1})


def test_a_file_of_a_repository_is_opened_without_a_network_later(
    edgellm: Edgellm, hub: HubServer, checkpoint: Path
) -> None:
    data = written(checkpoint, Path("own.gguf")).read_bytes()
    commit = hub.repository(NAME).commit({"tiny-F16.gguf": data, "tiny-Q4_0.gguf": b"GGUF", "mmproj.gguf": b"GGUF"})
    expected = edgellm("generate", "-m", "own.gguf", *QUESTION)[1]
    named = f"{NAME}:tiny-F16.gguf"
    code, out, err = edgellm("generate", "-m", named, *QUESTION)
    assert (code, out) == (0, expected) and out.strip(), err
    assert hub.downloads() == ["tiny-F16.gguf"]
    hub.requests.clear()
    assert edgellm("generate", "-m", named, *QUESTION, "--kv-capacity", 64)[:2] == (0, expected)
    assert edgellm("build", named, "robot")[0] == 0 and not hub.requests
    source = EngineDirectory.open("robot").source
    assert source is not None and (source.commit, source.file) == (commit, "tiny-F16.gguf")
    found = {(each["kind"], each["name"]) for each in json.loads(edgellm("list", "--json")[1])}
    assert {("cached", named), ("downloaded", named), ("cached", str(Path("own.gguf").absolute()))} <= found
    assert edgellm("remove", named)[0] == 0
    assert edgellm("info", "robot", "--verify")[0] == 0  # it links to what was downloaded, which therefore stays


def test_options_of_a_build_are_taken_where_a_file_is_opened(
    edgellm: Edgellm, hub: HubServer, checkpoint: Path
) -> None:
    file = written(checkpoint, Path("own.gguf"))
    with LLM(file, backend="numpy", build={"kv_capacity": 48, "max_batch": 2}) as llm:
        assert llm.context_length == 48 and llm.directory.limits.max_batch == 2
    code, _, err = edgellm("generate", "-m", file, *QUESTION, "--kv-capacity", 48, "--max-batch", 2)
    assert code == 0 and len([*Path("cache/gguf").glob("*/edgellm.json")]) == 1, err
    assert edgellm("generate", "-m", file, *QUESTION, "--head", "int8")[0] == 0
    assert len([*Path("cache/gguf").glob("*/edgellm.json")]) == 2
    tokenizer = Path("published")
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tokenizer)
    file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-9"))
    code, _, err = edgellm("generate", "-m", file, *QUESTION)
    assert code == 1 and "'tokenizer.ggml.pre' is 'gpt-9'" in err
    assert edgellm("generate", "-m", file, *QUESTION, "--tokenizer", tokenizer)[0] == 0
    code, _, err = edgellm("generate", "-m", file, *QUESTION, "--revision", "main")
    assert code == 1 and "revision: given for own.gguf" in err
    assert not hub.requests


def test_the_encoder_beside_a_file_on_the_hub(
    edgellm: Edgellm, hub: HubServer, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    texts, encoder = (path.read_bytes() for path in tiny_files(make_checkpoint, tmp_path))
    repository = hub.repository("robots/tiny-VL-GGUF")
    repository.commit({"tiny-F16.gguf": texts, "mmproj-F16.gguf": encoder, "other/mmproj.gguf": b"GGUF"})

    def takes_images(name: str, **options: str) -> bool:
        with LLM(name, backend="numpy", build={"kv_capacity": 160, "max_batch": 1}, **options) as llm:
            return llm.has_vision_model

    assert takes_images("robots/tiny-VL-GGUF:tiny-F16.gguf")
    assert sorted(hub.downloads()) == ["mmproj-F16.gguf", "tiny-F16.gguf"]
    hub.requests.clear()
    assert takes_images("robots/tiny-VL-GGUF:tiny-F16.gguf") and not hub.requests
    code, _, err = edgellm("build", "robots/tiny-VL-GGUF:tiny-F16.gguf", "robot", "--no-try")
    assert code == 0 and EngineDirectory.open("robot").vision is not None, err
    several = hub.repository("robots/several")
    several.commit({"tiny-F16.gguf": texts, "mmproj-F16.gguf": encoder, "mmproj-F32.gguf": encoder})
    with pytest.raises(BuildError, match=r"several:mmproj-F16\.gguf, robots/several:mmproj-F32\.gguf\. Name one"):
        takes_images("robots/several:tiny-F16.gguf")
    code, _, err = edgellm("build", "robots/several:tiny-F16.gguf", "second", "--no-try")
    assert code == 1 and "--mmproj robots/several:mmproj-F16.gguf" in err
    assert takes_images("robots/several:tiny-F16.gguf", mmproj="robots/several:mmproj-F32.gguf")
    assert not takes_images("robots/several:tiny-F16.gguf", mmproj="none")


def test_what_was_made_of_files_is_listed_and_removed(edgellm: Edgellm, hub: HubServer, checkpoint: Path) -> None:
    files = [written(checkpoint, Path(f"{name}.gguf")) for name in ("own", "other", "third")]
    for file in files:
        local_directory(file)
    local_directory(files[0], build={"kv_capacity": 48})
    code, _, err = edgellm("build", files[2], "linked", "--weights", "link")
    assert code == 0, err
    places = [str(file.absolute()) for file in files]
    assert json.loads(edgellm("info", "own.gguf", "--json")[1])["file"] == places[0]
    assert f"source      {places[2]}" in edgellm("info", "linked")[1]
    files[0].unlink()
    files[2].unlink()
    found = json.loads(edgellm("list", "--json")[1])
    assert sorted((each["kind"], each["file"], each["gone"]) for each in found) == sorted(
        [
            *(("cached", place, gone) for place, gone in zip(places, (True, False, True), strict=True)),
            ("cached", places[0], True),
            ("built", places[2], True),
        ]
    )
    out = edgellm("list")[1]
    assert out.count(f"{places[0]}, which is gone (edgellm remove --gone)") == 2
    assert f"linked of {places[2]}, which is gone  " in out
    code, out, err = edgellm("remove", "--gone")
    assert code == 0 and out.count("MiB removed") == 2 and "Left" not in err
    assert [each["file"] for each in json.loads(edgellm("list", "--json")[1])] == [places[2], places[1]]
    code, out, _ = edgellm("remove", "other.gguf")
    assert code == 0 and out.startswith(f"{places[1]}: ") and files[1].exists()
    assert not [each for each in json.loads(edgellm("list", "--json")[1]) if each["kind"] == "cached"]
    assert "No file is gone" in edgellm("remove", "--gone")[1]
    code, _, err = edgellm("remove", files[1].absolute())
    assert code == 1 and "nor a GGUF file of which there is something in the cache" in err
    for given in ([], ["robots/tiny", "--gone"], ["--gone", "--revision", "main"]):
        code, _, err = edgellm("remove", *given)
        assert code != 0 and "--gone alone" in err
