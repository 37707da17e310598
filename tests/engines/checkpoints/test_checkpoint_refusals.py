"""Checkpoints that are broken, hostile or not there: what each is answered with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import INDEX, SINGLE, directory, entry, file_bytes, refusal, write, write_shards
from checkpoint_tensors import read_tensor

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError

__all__ = ["directory", "write"]  # fixtures


GOOD = entry("F16", [2], 0, 4)
DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "0 bytes"),
    "no header": (b"\x01\0\0", "3 bytes"),
    "absurd length": (file_bytes({}, length=2**63), "at most 100,000,000"),
    "length beyond the file": (file_bytes({"a": GOOD}, bytes(4), length=5000), "truncated"),
    "truncated data": (file_bytes({"a": GOOD}, bytes(3)), "truncated"),
    "bytes behind": (file_bytes({"a": GOOD}, bytes(5)), "1 bytes follow tensor 'a'"),
    "hole": (file_bytes({"a": GOOD, "b": entry("U8", [1], 5, 6)}, bytes(6)), "leaves a hole"),
    "overlap": (file_bytes({"a": GOOD, "b": entry("F16", [2], 2, 6)}, bytes(6)), "'b' overlaps tensor 'a'"),
    "not JSON": (file_bytes(b"{'a': 1}"), "not valid JSON"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "not valid JSON"),
    "too deep": (file_bytes(DEEP), "not valid JSON|described by a list"),
    "a list": (file_bytes([1]), "a JSON list"),
    "entry is no object": (file_bytes({"a": 3}), "'a' is described by a int, expected an object"),
    "name twice": (file_bytes(b'{"a": {}, "a": {}}'), "'a' occurs more than once"),
    "unknown dtype": (file_bytes({"a": GOOD | {"dtype": "F12"}}, bytes(4)), "'a' has the dtype 'F12', expected one of"),
    "dtype is a list": (file_bytes({"a": GOOD | {"dtype": [[]]}}, bytes(4)), "dtype a nested list"),
    "no dtype": (file_bytes({"a": {"shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "dtype None"),
    "size of another shape": (file_bytes({"a": entry("F16", [3], 0, 4)}, bytes(4)), "4 bytes, its shape .* takes 6"),
    "size of a smaller shape": (file_bytes({"a": entry("F16", [1], 0, 4)}, bytes(4)), "4 bytes, its shape .* takes 2"),
    "negative dimension": (file_bytes({"a": entry("F16", [-2, -1], 0, 4)}, bytes(4)), r"the shape \[-2, -1\]"),
    "fractional dimension": (file_bytes({"a": GOOD | {"shape": [2.0]}}, bytes(4)), r"the shape \[2.0\]"),
    "boolean dimension": (file_bytes({"a": GOOD | {"shape": [True, 2]}}, bytes(4)), r"the shape \[True, 2\]"),
    "huge dimensions": (file_bytes({"a": entry("F16", [10**4000] * 3, 0, 4)}, bytes(4)), "the shape"),
    "many huge dimensions": (file_bytes({"a": entry("F16", [2**62] * 32, 0, 4)}, bytes(4)), "larger than any memory"),
    "huge but empty": (file_bytes({"a": entry("F16", [0, 2**62], 0, 0)}), "larger than any memory"),
    "too many dimensions": (file_bytes({"a": entry("F16", [1] * 40 + [2], 0, 4)}, bytes(4)), "at most 32"),
    "end before begin": (file_bytes({"a": entry("F16", [2], 4, 0)}, bytes(4)), r"data_offsets \[4, 0\]"),
    "negative begin": (file_bytes({"a": entry("F16", [2], -4, 0)}, bytes(4)), r"data_offsets \[-4, 0\]"),
    "one offset": (file_bytes({"a": GOOD | {"data_offsets": [0]}}, bytes(4)), r"data_offsets \[0\]"),
    "far out of range": (file_bytes({"a": entry("F16", [2], 2**62, 2**62 + 4)}, bytes(4)), "leaves a hole"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_weight_files_are_refused_by_name_and_cause(directory: Path, case: str) -> None:
    content, cause = BROKEN_FILES[case]
    (directory / SINGLE).write_bytes(content)
    with pytest.raises(CheckpointError, match=cause) as caught:
        Checkpoint.open(directory)
    message = str(caught.value)
    assert message.startswith(str(directory / SINGLE))
    assert message.endswith("Copy the file anew from its source")
    assert len(message) < 2000


def test_damaged_bytes_never_raise_anything_else(directory: Path) -> None:
    random = np.random.default_rng(2)
    original = file_bytes({"__metadata__": {"format": "pt"}, "a": GOOD, "b": entry("F32", [1, 1], 4, 8)}, bytes(8))
    refused = 0
    for _ in range(300):
        damaged = bytearray(original)
        for position in random.integers(0, len(original), random.integers(1, 4)):
            damaged[position] = random.integers(0, 256)
        (directory / SINGLE).write_bytes(damaged[: random.integers(0, len(damaged) + 1) or None])
        try:
            with Checkpoint.open(directory) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    assert len(checkpoint.raw_bytes(name)) == info.nbytes
        except CheckpointError:
            refused += 1
    assert refused > 150


def test_a_pointer_of_git_lfs_is_called_so(directory: Path) -> None:
    (directory / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    message = refusal(directory)
    assert message.startswith(f"{directory / SINGLE} is a pointer of Git LFS") and "git lfs pull" in message


def test_weights_that_are_no_file(directory: Path) -> None:
    os.mkfifo(directory / SINGLE)
    assert "is not a regular file" in refusal(directory)
    (directory / SINGLE).unlink()
    (directory / SINGLE).mkdir()
    assert "is not a regular file" in refusal(directory)


def test_a_link_that_leads_nowhere_names_its_target(directory: Path) -> None:
    (directory / SINGLE).symlink_to(directory / "gone.safetensors")
    assert f"is a link to {directory / 'gone.safetensors'}, which does not exist" in refusal(directory)


def test_links_to_weights_are_followed(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    safetensors.numpy.save_file({"a": np.ones(2, np.float16)}, blob)
    (directory / SINGLE).symlink_to(blob)
    with Checkpoint.open(directory) as checkpoint:
        assert read_tensor(checkpoint, "a", "float32").tolist() == [1, 1]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "cannot be read: No such file"),
        (b"{", "not valid JSON"),
        (b"[]", "expected an object"),
        (b"\xff", "JSON"),
    ],
)
def test_config_must_be_there_and_valid(write: Callable[..., Path], content: bytes | None, cause: str) -> None:
    directory = write({"a": GOOD}, bytes(4))
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_bytes(content)
    message = refusal(directory)
    assert cause in message and message.startswith(str(directory / "config.json")) and "Copy it" in message


def test_unread_quantization_is_refused_by_name(write: Callable[..., Path]) -> None:
    directory = write({"a": GOOD}, bytes(4))
    (directory / "config.json").write_text('{"quantization_config": {"quant_method": "bitsandbytes"}}')
    message = refusal(directory)
    assert "quantization_config" in message and "'bitsandbytes'" in message and "unquantized checkpoint" in message
    off = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    for unpacked in (None, off):
        (directory / "config.json").write_text(json.dumps({"quantization_config": unpacked}))
        Checkpoint.open(directory).close()
    (directory / "config.json").write_text(json.dumps({"quantization_config": off | {"load_in_8bit": True}}))
    assert "'bitsandbytes'" in refusal(directory)


def test_no_directory_and_no_weights(directory: Path) -> None:
    assert "does not exist: expected a directory" in refusal(directory / "nowhere")
    assert "is a file: expected a directory" in refusal(directory / "config.json")
    assert f"has neither {SINGLE} nor {INDEX}; and no other weights" in refusal(directory)
    (directory / "adapter.safetensors").touch()
    assert "adapter.safetensors" in refusal(directory)


def test_pickled_weights_are_not_read_and_the_way_out_is_told(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    message = refusal(directory)
    assert "only pickled weights (pytorch_model.bin)" in message
    assert f"edgellm convert {directory} NEW_DIR" in message


A, B = "a.safetensors", "b.safetensors"
ONE = np.ones(2, np.float16)
BAD_SHARDS: dict[str, tuple[dict[str, dict[str, np.ndarray]], dict[str, Any], str]] = {
    "missing shard": ({A: {"x": ONE}}, {"x": A, "y": B}, "1 of 2 files are missing: b.safetensors"),
    "tensor elsewhere": ({A: {"x": ONE}, B: {"y": ONE}}, {"x": B, "y": B}, "'x' not in b.safetensors"),
    "tensor nowhere": ({A: {"x": ONE}}, {"x": A, "y": A}, "'y' not in a.safetensors"),
    "tensor twice": ({A: {"x": ONE}, B: {"x": ONE, "y": ONE}}, {"x": A, "y": B}, "'x' is in a.safetensors too"),
    "up and out": ({A: {"x": ONE}}, {"x": "../a.safetensors"}, "expected the name of a .safetensors file"),
    "absolute": ({A: {"x": ONE}}, {"x": "/etc/a.safetensors"}, "expected the name of a .safetensors file"),
    "below": ({A: {"x": ONE}}, {"x": "below/a.safetensors"}, "expected the name of a .safetensors file"),
    "backslash": ({A: {"x": ONE}}, {"x": "..\\a.safetensors"}, "expected the name of a .safetensors file"),
    "null byte": ({A: {"x": ONE}}, {"x": "a\0.safetensors"}, "expected the name of a .safetensors file"),
    "too long": ({A: {"x": ONE}}, {"x": "a" * 300 + ".safetensors"}, "expected the name of a .safetensors file"),
    "lone surrogate": ({A: {"x": ONE}}, {"x": "\ud800.safetensors"}, "half of a surrogate pair"),
    "pickle": ({A: {"x": ONE}}, {"x": "a.bin"}, "expected the name of a .safetensors file"),
    "number": ({A: {"x": ONE}}, {"x": 1}, "expected the name of a .safetensors file"),
    "nothing": ({A: {"x": ONE}}, {}, "'weight_map' is empty"),
}


@pytest.mark.parametrize("case", BAD_SHARDS)
def test_index_and_shards_must_agree(directory: Path, case: str) -> None:
    shards, weight_map, cause = BAD_SHARDS[case]
    message = refusal(write_shards(directory, shards, weight_map))
    assert cause in message and str(directory) in message
    message.encode()  # can be printed


def test_shards_that_do_not_agree_are_closed(directory: Path) -> None:
    write_shards(directory, {A: {"x": ONE}, B: {"y": ONE}}, {"x": B, "y": B})
    with pytest.raises(CheckpointError) as caught:  # whose traceback holds what was opened
        Checkpoint.open(directory)
    assert "not in" in str(caught.value) and str(directory) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_index_must_be_valid(directory: Path, content: str) -> None:
    (directory / INDEX).write_text(content)
    assert refusal(directory).startswith(str(directory / INDEX))
