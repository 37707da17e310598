"""Engine directories: what is read, what is refused, and how the refusal is worded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tensors import read_tensor

from edgellm.engines.building.checks import choose_limits
from edgellm.engines.directories.engine_directory import EngineDirectory
from edgellm.engines.errors import BuildError, EngineDirectoryError
from edgellm.engines.model.decoder import decoder_weights
from edgellm.engines.model.limits import EngineLimits
from tools.demo_model.describe import describe_in_place


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "edgellm.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_description_says_what_the_checkpoint_is(plain_directory: Path, limits: EngineLimits) -> None:
    directory = EngineDirectory.open(plain_directory)
    assert directory.config.family == "llama"
    assert (directory.config.num_layers, directory.config.hidden_size) == (2, 64)
    assert (directory.config.num_kv_heads, directory.config.head_dim) == (2, 16)
    assert directory.config.eos_token_ids == (1,)
    assert directory.limits == limits
    assert (directory.dtype, directory.attention) == ("float16", "auto")
    assert directory.weight_files == ("model.safetensors",)


def test_description_holds_the_sha256_and_size_of_every_file(plain_directory: Path) -> None:
    described = json.loads((plain_directory / "edgellm.json").read_text())["files"]
    present = {path.name for path in plain_directory.iterdir()} - {"edgellm.json"}
    assert set(described) == present
    for name, entry in described.items():
        content = (plain_directory / name).read_bytes()
        assert entry == {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def test_checkpoint_of_a_directory_has_the_weights(plain_directory: Path) -> None:
    directory = EngineDirectory.open(plain_directory)
    checkpoint = directory.checkpoint()
    checkpoint.check(decoder_weights(directory.config))
    assert read_tensor(checkpoint, "model.norm.weight", "float32").shape == (64,)
    checkpoint.close()


def test_describing_again_replaces_the_limits(plain_directory: Path) -> None:
    describe_in_place(plain_directory, EngineLimits(2, 32, 64))
    assert EngineDirectory.open(plain_directory).limits == EngineLimits(2, 32, 64)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("robot.gguf", b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, not the file itself"),
        ("robot.gguf", b"", "is no GGUF file: it begins with b'', expected b'GGUF'"),
        ("robot.GGUF", b"<!DOCTYPE html>", "is no GGUF file: it begins with b'<!DOCTYP'"),
        ("robot", b"?", "is not a directory. Expected an engine directory.* a GGUF file, or a model's name"),
        ("robot", None, "does not exist. Expected an engine directory.*edgellm list"),
    ],
)
def test_what_is_no_model_says_what_it_is(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EngineDirectoryError, match=said):
        EngineDirectory.open(tmp_path / name)


def test_describing_a_folder_that_cannot_be_written_says_so(own_checkpoint: Path) -> None:
    (own_checkpoint / "edgellm.json").mkdir()  # a file cannot take a folder's name
    with pytest.raises(BuildError, match=r"cannot be written"):
        describe_in_place(own_checkpoint)
    assert not list(own_checkpoint.glob(".edgellm*"))


def test_published_directory_is_not_an_engine_directory(checkpoint: Path) -> None:
    with pytest.raises(EngineDirectoryError, match=rf"edgellm build {checkpoint} ENGINE_DIR"):
        EngineDirectory.open(checkpoint)


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_other_paths_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "there"
    if kind == "empty":
        path.mkdir()
    if kind == "file":
        path.write_text("{}")
    with pytest.raises(EngineDirectoryError, match=r"edgellm build"):
        EngineDirectory.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(format_version=2), r"'format_version' is 2, this EdgeLLM .* reads 1"),
        (lambda v: v.update(format_version="1"), r"'format_version' is \"1\", expected a whole number"),
        (lambda v: v.pop("dtype"), r"'dtype' is missing"),
        (lambda v: v.update(dtype="int4"), r"'dtype' is 'int4', expected one of float16, bfloat16, float32"),
        (lambda v: v.update(attention=None), r"'attention' is null, expected a non-empty string"),
        (lambda v: v.update(flash=True), r"unknown keys 'flash'"),
        (lambda v: v["config"].pop("rotary_dim"), r"config: the key 'rotary_dim' is missing"),
        (lambda v: v["config"].update(num_layers=2.5), r"config: 'num_layers' is 2.5, expected a whole number"),
        (lambda v: v["config"].update(num_layers=True), r"config: 'num_layers' is true, expected a whole number"),
        (lambda v: v["config"].update(eos_token_ids=[1, "x"]), r"'eos_token_ids' is \[1, \"x\"\], expected a list"),
        (lambda v: v["config"].update(rope_scaling=[]), r"'rope_scaling' is \[\], expected an object or null"),
        (lambda v: v["config"].update(rms_norm_eps="1"), r"'rms_norm_eps' is \"1\", expected a number"),
        (lambda v: v["config"].update(hidden_act="relu"), r"'hidden_act' is 'relu', expected one of silu, gelu_tanh"),
        (lambda v: v["config"].update(nope_layers=[0, 3]), r"'nope_layers' is \[0, 3\], expected different layers"),
        (lambda v: v["config"].update(attention_scale="1"), r"'attention_scale' is \"1\", expected a number or null"),
        (lambda v: v["config"].update(sliding_window=8), r"'kv_capacity' is \d+, by sliding_window expected at most 8"),
        (
            lambda v: v["config"].update(mixture={"experts": 6, "chosen": 2, "size": 24}, post_norms=True),
            r"'post_norms' is (true|True), expected none of it where a 'mixture' stands for MLPs",
        ),
        (
            lambda v: v["config"].update(mixture={"experts": 6, "chosen": 2, "size": 24, "beside_mlp": True}),
            r"'post_norms' is [fF]alse, expected RMS norms, and a 'residual_scale' of 1, where experts stand",
        ),
        (lambda v: v["limits"].update(max_batch=0), r"limits: 'max_batch' is 0, expected a whole number from 1 to 8"),
        (lambda v: v["limits"].update(tree=1), r"limits: unknown keys 'tree'"),
        (lambda v: v.update(files=[]), r"'files' is \[\], expected an object"),
        (lambda v: v["files"].pop("model.safetensors"), r"at least config.json and one .safetensors file"),
        (
            lambda v: v["files"].update({"../../etc/passwd": {"sha256": "0" * 64, "size": 1}}),
            r"'../../etc/passwd' is not a plain file name",
        ),
        (lambda v: v["files"]["config.json"].update(sha256="abc"), r"'sha256' is 'abc', expected 64 hexadecimal"),
        (lambda v: v["files"]["config.json"].update(section=5), r"'section' is 5, expected 67108864"),
        (lambda v: v["files"]["config.json"].update(size=-1), r"'size' is -1, expected a whole number from 0 to 92233"),
    ],
)
def test_wrong_descriptions_name_the_key(
    plain_directory: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit(plain_directory, change)
    with pytest.raises(EngineDirectoryError, match=message) as caught:
        EngineDirectory.open(plain_directory)
    assert str(plain_directory / "edgellm.json") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": NaN}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(plain_directory: Path, content: bytes) -> None:
    (plain_directory / "edgellm.json").write_bytes(content)
    with pytest.raises(EngineDirectoryError, match=r"edgellm\.json"):
        EngineDirectory.open(plain_directory)


def test_all_differences_are_listed_at_once(plain_directory: Path) -> None:
    (plain_directory / "tokenizer_config.json").write_text("{}")
    (plain_directory / "generation_config.json").unlink()
    (plain_directory / "chat_template.jinja").write_text("{{ messages }}")
    content = bytearray((plain_directory / "config.json").read_bytes())
    content[10] ^= 1
    (plain_directory / "config.json").write_bytes(content)
    with pytest.raises(EngineDirectoryError) as caught:
        EngineDirectory.open(plain_directory)
    message = str(caught.value)
    assert "tokenizer_config.json: 2 bytes, expected" in message
    assert "generation_config.json: missing" in message
    assert "config.json: SHA-256" in message
    assert "chat_template.jinja: not described" in message
    assert "edgellm build --force" in message


@pytest.mark.parametrize("offset", [0, 1000, -1])
def test_flipped_byte_in_the_weights_is_found(plain_directory: Path, offset: int) -> None:
    path = plain_directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)
    with pytest.raises(EngineDirectoryError, match=r"model\.safetensors: SHA-256"):
        EngineDirectory.open(plain_directory)


def test_truncated_weights_are_found_without_hashing(plain_directory: Path) -> None:
    path = plain_directory / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert EngineDirectory.read(plain_directory).differences(hash_weights=False) == [
        f"model.safetensors: {path.stat().st_size:,} bytes, expected {path.stat().st_size + 1:,}"
    ]


def test_foreign_weight_file_is_found(plain_directory: Path) -> None:
    shutil.copy(plain_directory / "model.safetensors", plain_directory / "model-00002-of-00002.safetensors")
    with pytest.raises(EngineDirectoryError, match=r"model-00002-of-00002\.safetensors: not described"):
        EngineDirectory.open(plain_directory)


def test_opening_takes_milliseconds(plain_directory: Path) -> None:
    EngineDirectory.open(plain_directory)
    started = time.process_time()  # other processes do not lengthen it
    EngineDirectory.open(plain_directory)
    assert time.process_time() - started < 0.1


def test_default_limits_fit_the_model(plain_directory: Path) -> None:
    config = EngineDirectory.read(plain_directory).config  # 256 positions
    assert choose_limits(config) == EngineLimits(1, 256, 256)
    assert choose_limits(config, max_batch=4, kv_capacity=100) == EngineLimits(4, 96, 100)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_batch": 0}, r"--max-batch is 0: expected a whole number from 1 to 8"),
        ({"max_batch": 9}, r"--max-batch is 9"),
        ({"prefill_chunk": 0}, r"--prefill-chunk is 0: expected a multiple of 16 from 16 to 2048"),
        ({"prefill_chunk": 24}, r"--prefill-chunk is 24"),
        ({"prefill_chunk": 2064}, r"--prefill-chunk is 2064"),
        ({"prefill_chunk": 64, "kv_capacity": 63}, r"--kv-capacity is 63: expected a whole number from 64 .* to 256"),
        ({"kv_capacity": 300}, r"--kv-capacity is 300: .* 256 .* to 256 .*edgellm build --beyond-trained-context"),
        ({"kv_capacity": -1}, r"--kv-capacity is -1"),
    ],
)
def test_limits_out_of_range_name_option_value_and_range(
    plain_directory: Path, asked: dict[str, int], message: str
) -> None:
    config = EngineDirectory.read(plain_directory).config
    with pytest.raises(BuildError, match=message):
        choose_limits(config, **asked)


def test_more_context_than_trained_must_be_asked_for(plain_directory: Path) -> None:
    config = EngineDirectory.read(plain_directory).config
    assert choose_limits(config, kv_capacity=1000, beyond_trained_context=True).kv_capacity == 1000
