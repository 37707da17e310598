"""Names as people have them from elsewhere: addresses, tags of quantizations, names that were changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Edgellm
from hub_server import HubServer

from edgellm.errors import HubError
from edgellm.hub.directories import checkpoint_of, local_directory
from edgellm.hub.names import HubName, stands_for

NAME = "robots/tiny"


def downloaded(name: str | Path) -> Path:
    return checkpoint_of(name, None, False, lambda stage, done, total: None)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"hf.co/{NAME}", HubName(NAME)),
        (f"hf.co/{NAME}:Q8_0", HubName(NAME, "Q8_0")),
        (f"{NAME}:latest", HubName(NAME)),
        (f"huggingface.co/{NAME}/", HubName(NAME)),
        (f"https://huggingface.co/{NAME}/tree/v1?x=y#z", HubName(NAME, revision="v1")),
        (f"https://hf.co/{NAME}/commit/01234567", HubName(NAME, revision="01234567")),
        (Path(f"https://huggingface.co/{NAME}/blob/main/Q4/a%20b.gguf"), HubName(NAME, "Q4/a b.gguf")),
        (
            f"https://www.huggingface.co/{NAME}/resolve/refs%2Fpr%2F1/a.gguf?download=true",
            HubName(NAME, "a.gguf", "refs/pr/1"),
        ),
        (
            f"https://huggingface.co/{NAME}/blob/main/Q4/a-00002-of-00003.gguf",
            HubName(NAME, "Q4/a-00001-of-00003.gguf"),
        ),
        (f"example.com/{NAME}", None),
    ],
)
def test_addresses_are_names(text: str | Path, expected: HubName | None) -> None:
    assert HubName.of(text) == expected
    assert expected is None or HubName.of(text, "v2") == HubName(NAME, expected.file, "v2")


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        (f"https://huggingface.co/{NAME}/blob/main/model.safetensors", f"Write {NAME}, or {NAME}:FILE.gguf"),
        (f"https://huggingface.co/{NAME}/tree/main/Q4", f"Write {NAME}, or"),
        (f"https://huggingface.co/datasets/{NAME}", "no address of a model, .* Write ORG/NAME, or"),
        (f"https://huggingface.co/datasets/{NAME}/tree/main", "Write ORG/NAME"),
        ("https://huggingface.co/robots", "Write ORG/NAME"),
        (f"https://huggingface.co/{NAME}/resolve/main/../../x.gguf", "Write ORG/NAME"),
        (f"https://example.com/{NAME}", "no address of the hub"),
    ],
)
def test_other_addresses_say_what_to_write(edgellm: Edgellm, hub: HubServer, address: str, advice: str) -> None:
    with pytest.raises(HubError, match=advice):
        HubName.of(address)
    code, _, err = edgellm("generate", "-m", address, "Hello")
    assert code == 1 and "Write " in err and not hub.requests


def test_a_tag_is_a_file(edgellm: Edgellm, hub: HubServer) -> None:
    files = {
        "imatrix_tiny.gguf": b"GGUF i",
        "mmproj-Q4_K_M.gguf": b"GGUF m",
        "tiny-BF16.gguf": b"GGUF b",
        "tiny-F16.gguf": b"GGUF f",
        "tiny-Q4_K_M.gguf": b"GGUF 4",
        "UD-IQ4_XS/tiny-UD-IQ4_XS-00001-of-00002.gguf": b"GGUF 1",
        "UD-IQ4_XS/tiny-UD-IQ4_XS-00002-of-00002.gguf": b"GGUF 2",
    }
    hub.repository(NAME).commit(files)
    for tag, file in {"q4_k_m": "tiny-Q4_K_M.gguf", "F16": "tiny-F16.gguf", "IQ4_XS": list(files)[5]}.items():
        path = downloaded(f"hf.co/{NAME}:{tag}")
        assert path.read_bytes() == files[file] and path.as_posix().endswith(f"/{file}")
    assert hub.downloads() == ["tiny-Q4_K_M.gguf", "tiny-F16.gguf", *list(files)[5:]]
    hub.requests.clear()
    assert downloaded(f"{hub.url}/{NAME}/blob/main/tiny-F16.gguf").read_bytes() == b"GGUF f"
    assert downloaded(f"{NAME}:q4_k_m").read_bytes() == b"GGUF 4" and hub.downloads() == []
    with pytest.raises(HubError, match=r"(?s)has no model Q9\..*tiny-F16\.gguf") as raised:
        downloaded(f"{NAME}:Q9")
    assert "imatrix" not in str(raised.value)
    assert edgellm("list")[1].count("tiny-F16.gguf") == 1
    assert edgellm("remove", f"{NAME}:Q4_K_M")[0] == 0
    assert "Q4_K_M" not in edgellm("list")[1] and "IQ4_XS" in edgellm("list")[1]
    assert not stands_for("Q4_K", "tiny-Q4_K_M.gguf")


def test_one_model_beside_what_is_none(hub: HubServer) -> None:
    hub.repository(NAME).commit({"tiny-Q8_0.gguf": b"GGUF 8", "imatrix.gguf": b"GGUF i", "mmproj-f16.gguf": b"GGUF m"})
    assert downloaded(NAME).read_bytes() == b"GGUF 8"


def test_parts_that_are_missing_are_named(hub: HubServer) -> None:
    hub.repository(NAME).commit({"Q8/t-Q8_0-00001-of-00003.gguf": b"GGUF", "Q8/t-Q8_0-00003-of-00003.gguf": b"GGUF"})
    with pytest.raises(HubError, match=r"lacks 1 of the 3 files of its weights: Q8/t-Q8_0-00002-of-00003\.gguf"):
        downloaded(f"{NAME}:Q8_0")


def test_a_repository_that_was_renamed(hub: HubServer, tiny_checkpoint: Path) -> None:
    hub.repository(NAME).commit_folder(tiny_checkpoint)
    hub.moved["robots/old"] = NAME
    directory = local_directory("robots/old")
    assert (directory / "model.safetensors").read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    hub.requests.clear()
    assert local_directory("robots/old") == directory and not hub.requests
