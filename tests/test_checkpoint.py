"""Checkpoints: what is read, and what each broken or hostile file is answered with."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from edgellm.engines.checkpoint import Checkpoint
from edgellm.engines.decoder_config import WeightSpec
from edgellm.engines.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file put together by hand; `header` is JSON to be or bytes, `length` a false header length."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with config.json and no weights yet."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return tmp_path


@pytest.fixture
def write(directory: Path) -> Callable[..., Path]:
    """Writes `model.safetensors` from bytes; see `file_bytes`."""

    def write_file(*arguments: Any, **keywords: Any) -> Path:
        (directory / SINGLE).write_bytes(file_bytes(*arguments, **keywords))
        return directory

    return write_file


def write_shards(directory: Path, shards: dict[str, dict[str, np.ndarray]], weight_map: dict[str, Any]) -> Path:
    for name, tensors in shards.items():
        safetensors.numpy.save_file(tensors, directory / name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return str(caught.value)


# --- what is read ---------------------------------------------------------------------------------------------------


def test_files_of_the_safetensors_library_are_read(directory: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        "half": random.standard_normal((3, 5)).astype(np.float16),
        "single": random.standard_normal((2, 2, 2)).astype(np.float32),
        "scalar": np.array(2.5, np.float32),
        "empty": np.empty((0, 4), np.float16),
        "one": np.ones(1, np.float16),
        "counter": np.arange(3),
    }
    safetensors.numpy.save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with Checkpoint.open(str(directory)) as checkpoint:
        assert checkpoint.path == directory
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
        assert checkpoint.files == [directory / SINGLE]
        assert set(checkpoint.tensors) == set(tensors)
        for name in ("half", "single", "scalar", "empty"):
            values, info = checkpoint.raw(name), checkpoint.tensors[name]
            assert values.dtype == tensors[name].dtype == info.dtype
            assert values.shape == tensors[name].shape == info.shape
            np.testing.assert_array_equal(values, tensors[name])
            stored = (directory / SINGLE).read_bytes()[info.offset : info.offset + info.nbytes]
            assert stored == tensors[name].tobytes()
        assert checkpoint.tensors["counter"].dtype == "int64"
        # 36 bytes of float32 in two tensors, 32 of float16 in three; what is not computed in does not count
        assert checkpoint.dtype == "float32"
        with pytest.raises(CheckpointError, match="'counter' has the dtype int64"):
            checkpoint.raw("counter")
        with pytest.raises(CheckpointError, match="no tensor 'absent'"):
            checkpoint.read("absent", "float32")
        with pytest.raises(ValueError, match="int8"):
            checkpoint.read("half", "int8")


def test_raw_is_a_read_only_view_of_the_map_even_where_it_is_not_aligned(write: Callable[..., Path]) -> None:
    first, second = np.arange(3, dtype=np.uint16), np.arange(4, dtype=np.float32)
    header = json.dumps({"a": entry("BF16", [3], 0, 6), "b": entry("F32", [2, 2], 6, 22)}).encode()
    header += b" " * (len(header) % 2 + 1)  # an odd start of the data
    directory = write(header, first.tobytes() + second.tobytes())
    with Checkpoint.open(directory) as checkpoint:
        a, b = checkpoint.raw("a"), checkpoint.raw("b")
        assert checkpoint.tensors["a"].offset % 2 == 1
        assert b.ctypes.data - a.ctypes.data == 6
        assert not a.flags.writeable and not a.flags.owndata
        np.testing.assert_array_equal(a, first)
        np.testing.assert_array_equal(b, second.reshape(2, 2))
        np.testing.assert_array_equal(checkpoint.read("b", "float16"), second.reshape(2, 2).astype(np.float16))


def test_shards_are_one_checkpoint(directory: Path) -> None:
    a, b = np.ones((2, 2), np.float16), np.full((3,), 2, np.float16)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_shards(directory, {one: {"a": a}, two: {"b": b}}, {"a": one, "b": two})
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.files == [directory / one, directory / two]
        assert [checkpoint.tensors[name].file.name for name in ("a", "b")] == [one, two]
        np.testing.assert_array_equal(checkpoint.read("a", "float32"), a)
        np.testing.assert_array_equal(checkpoint.read("b", "float32"), b)
        assert checkpoint.generation_config is None


def test_views_outlive_the_checkpoint(directory: Path) -> None:
    values = np.arange(1000, dtype=np.float16)
    safetensors.numpy.save_file({"a": values, "b": values}, directory / SINGLE)
    checkpoint = Checkpoint.open(directory)
    view = checkpoint.raw("a")
    checkpoint.close()
    checkpoint.close()
    np.testing.assert_array_equal(view, values)
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.raw("b")


# --- conversions ----------------------------------------------------------------------------------------------------


def bfloat16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def nearest_bfloat16(value: float) -> int:
    """The bits of the nearest bfloat16 of a finite float32, by distance in float64; ties to the even bits."""
    lower = struct.unpack("<I", struct.pack("<f", abs(value)))[0] >> 16
    below, above = bfloat16_value(lower), bfloat16_value(lower + 1)
    above = 2.0**128 if math.isinf(above) else above
    down, up = abs(value) - below, above - abs(value)
    chosen = lower + (up < down or (up == down and lower % 2 == 1))
    return chosen | (0x8000 if math.copysign(1, value) < 0 else 0)


def test_every_half_and_every_bfloat16_becomes_the_float32_of_its_value(write: Callable[..., Path]) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    directory = write(
        {"half": entry("F16", [256, 256], 0, 1 << 17), "brain": entry("BF16", [1 << 16], 1 << 17, 1 << 18)},
        bits.tobytes() * 2,
    )
    with Checkpoint.open(directory) as checkpoint:
        half, brain = checkpoint.read("half", "float32"), checkpoint.read("brain", "float32")
        assert half.shape == (256, 256) and half.dtype == brain.dtype == np.float32
        np.testing.assert_array_equal(half.reshape(-1), struct.unpack("<65536e", bits.tobytes()))
        np.testing.assert_array_equal(brain, [bfloat16_value(int(pattern)) for pattern in bits])
        np.testing.assert_array_equal(checkpoint.read("brain", "bfloat16"), bits)
        nan = (bits & 0x7FFF) > 0x7C00
        as_brain = checkpoint.read("half", "bfloat16").reshape(-1)
        assert np.array_equal(((as_brain & 0x7FFF) > 0x7F80), nan)


def test_float32_is_rounded_to_nearest_even(directory: Path) -> None:
    random = np.random.default_rng(1)
    tie = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]  # between two halves, between two bfloat16
    special = [0.0, -0.0, 1e-8, 2**-24, 2**-25, 3 * 2**-25, 65504.0, 65519.996, 1e-40, -1e-45, *tie]
    values = np.concatenate([special, random.standard_normal(2000) * 10.0 ** random.uniform(-9, 3, 2000)])
    values = values.astype(np.float32)
    safetensors.numpy.save_file({"w": values}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        half, brain = checkpoint.read("w", "float16"), checkpoint.read("w", "bfloat16")
    assert half.dtype == np.float16 and brain.dtype == np.uint16
    assert half.tobytes() == b"".join(struct.pack("<e", value) for value in values.tolist())
    assert brain.tolist() == [nearest_bfloat16(value) for value in values.tolist()]


def test_infinity_and_every_kind_of_nan_stay_what_they_are(directory: Path) -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32)
    safetensors.numpy.save_file({"w": bits.view(np.float32)}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        half, brain = checkpoint.read("w", "float16"), checkpoint.read("w", "bfloat16")
    assert half[:2].tolist() == [math.inf, -math.inf] and np.isnan(half[2:]).all()
    assert brain[:2].tolist() == [0x7F80, 0xFF80] and ((brain[2:] & 0x7FFF) > 0x7F80).all()
    assert (brain[2:] >> 15).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("value", [65520.0, -1e6])
def test_finite_values_beyond_half_are_an_error(directory: Path, value: float) -> None:
    safetensors.numpy.save_file({"big": np.array([1, value, value], np.float32)}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        with pytest.raises(CheckpointError, match=r"2 values of tensor 'big' \(float32\).*--dtype bfloat16"):
            checkpoint.read("big", "float16")
        assert checkpoint.read("big", "bfloat16").tolist()[1] == nearest_bfloat16(value)


# --- check ----------------------------------------------------------------------------------------------------------

SPECS = [
    WeightSpec("model.embed_tokens.weight", (4, 2), (("model.embed_tokens.weight", (4, 2)),)),
    WeightSpec("qkv", (4, 2), (("q", (2, 2)), ("k", (1, 2)), ("v", (1, 2)))),
]


def fitting_tensors() -> dict[str, np.ndarray]:
    parts = (part for spec in SPECS for part in spec.parts)
    return {name: np.full(shape, 1 + index, np.float16) for index, (name, shape) in enumerate(parts)}


def check(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        checkpoint.check(SPECS)


def test_fitting_weights_and_harmless_extras_pass(directory: Path) -> None:
    tensors = fitting_tensors()
    extras = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    check(directory, tensors)
    check(directory, tensors | extras)


def test_every_difference_is_listed_at_once(directory: Path) -> None:
    tensors = fitting_tensors()
    del tensors["q"]
    tensors |= {"k": np.ones((3, 2), np.float16), "v": np.ones((1, 2), np.int8), "extra\n": np.ones(1, np.float16)}
    with pytest.raises(CheckpointError) as caught:
        check(directory, tensors)
    message = str(caught.value)
    assert "4 differences" in message
    for part in (
        "missing: q [2, 2]",
        "wrong shape: k is [3, 2], expected [1, 2]",
        "wrong dtype: v is int8",
        "unknown: 'extra\\n' [1]",
        "Take config.json and weights of one and the same model",
    ):
        assert part in message


def test_a_head_that_is_not_the_tied_embedding_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        check(directory, fitting_tensors() | {"lm_head.weight": np.zeros((4, 2), np.float16)})


# --- broken and hostile files ---------------------------------------------------------------------------------------

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
        assert checkpoint.read("a", "float32").tolist() == [1, 1]


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


def test_quantized_weights_are_refused_by_name(write: Callable[..., Path]) -> None:
    directory = write({"a": GOOD}, bytes(4))
    (directory / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    message = refusal(directory)
    assert "'quantization_config'" in message and "'gptq'" in message and "unquantized checkpoint" in message
    (directory / "config.json").write_text('{"quantization_config": null}')
    Checkpoint.open(directory).close()


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
    "lone surrogate": ({A: {"x": ONE}}, {"x": "\ud800.safetensors"}, "expected the name of a .safetensors file"),
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


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}'])
def test_index_must_be_valid(directory: Path, content: str) -> None:
    (directory / INDEX).write_text(content)
    assert refusal(directory).startswith(str(directory / INDEX))
