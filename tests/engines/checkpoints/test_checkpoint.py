"""Checkpoints: what is read of them, and whether it fits a model."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_files import SINGLE, directory, entry, write, write_shards
from checkpoint_tensors import read_tensor

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.errors import CheckpointError
from edgellm.engines.model.config import WeightSpec

__all__ = ["directory", "write"]  # fixtures


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
            checkpoint.info("absent")


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
        np.testing.assert_array_equal(read_tensor(checkpoint, "b", "float16"), second.reshape(2, 2).astype(np.float16))


def test_shards_are_one_checkpoint(directory: Path) -> None:
    a, b = np.ones((2, 2), np.float16), np.full((3,), 2, np.float16)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_shards(directory, {one: {"a": a}, two: {"b": b}}, {"a": one, "b": two})
    with Checkpoint.open(directory) as checkpoint:
        assert checkpoint.files == [directory / one, directory / two]
        assert [checkpoint.tensors[name].file.name for name in ("a", "b")] == [one, two]
        np.testing.assert_array_equal(read_tensor(checkpoint, "a", "float32"), a)
        np.testing.assert_array_equal(read_tensor(checkpoint, "b", "float32"), b)
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
        half, brain = read_tensor(checkpoint, "half", "float32"), read_tensor(checkpoint, "brain", "float32")
        assert half.shape == (256, 256) and half.dtype == brain.dtype == np.float32
        np.testing.assert_array_equal(half.reshape(-1), struct.unpack("<65536e", bits.tobytes()))
        np.testing.assert_array_equal(brain, [bfloat16_value(int(pattern)) for pattern in bits])
        np.testing.assert_array_equal(read_tensor(checkpoint, "brain", "bfloat16"), bits)
        nan = (bits & 0x7FFF) > 0x7C00
        as_brain = read_tensor(checkpoint, "half", "bfloat16").reshape(-1)
        assert np.array_equal(((as_brain & 0x7FFF) > 0x7F80), nan)


def test_float32_is_rounded_to_nearest_even(directory: Path) -> None:
    random = np.random.default_rng(1)
    tie = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]  # between two halves, between two bfloat16
    special = [0.0, -0.0, 1e-8, 2**-24, 2**-25, 3 * 2**-25, 65504.0, 65519.996, 1e-40, -1e-45, *tie]
    values = np.concatenate([special, random.standard_normal(2000) * 10.0 ** random.uniform(-9, 3, 2000)])
    values = values.astype(np.float32)
    safetensors.numpy.save_file({"w": values}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        half, brain = read_tensor(checkpoint, "w", "float16"), read_tensor(checkpoint, "w", "bfloat16")
    assert half.dtype == np.float16 and brain.dtype == np.uint16
    assert half.tobytes() == b"".join(struct.pack("<e", value) for value in values.tolist())
    assert brain.tolist() == [nearest_bfloat16(value) for value in values.tolist()]


def test_infinity_and_every_kind_of_nan_stay_what_they_are(directory: Path) -> None:
    bits = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], np.uint32)
    safetensors.numpy.save_file({"w": bits.view(np.float32)}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        half, brain = read_tensor(checkpoint, "w", "float16"), read_tensor(checkpoint, "w", "bfloat16")
    assert half[:2].tolist() == [math.inf, -math.inf] and np.isnan(half[2:]).all()
    assert brain[:2].tolist() == [0x7F80, 0xFF80] and ((brain[2:] & 0x7FFF) > 0x7F80).all()
    assert (brain[2:] >> 15).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("value", [65520.0, -1e6])
def test_finite_values_beyond_half_are_an_error(directory: Path, value: float) -> None:
    safetensors.numpy.save_file({"big": np.array([1, value, value], np.float32)}, directory / SINGLE)
    with Checkpoint.open(directory) as checkpoint:
        with pytest.raises(CheckpointError, match=r"2 values of tensor 'big' \(float32\).*--dtype bfloat16"):
            read_tensor(checkpoint, "big", "float16")
        assert read_tensor(checkpoint, "big", "bfloat16").tolist()[1] == nearest_bfloat16(value)


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
        "vision_tower.vision_model.embeddings.position_ids": np.arange(2),
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
        "unknown: extra\\n [1]",
        "Take config.json and weights of one and the same model",
    ):
        assert part in message


def test_a_tied_embedding_may_be_there_by_the_name_of_the_head(directory: Path) -> None:
    """So safetensors' `save_model` leaves it; a draft, which has no `model.norm`, has a head of its own."""
    tensors = fitting_tensors()
    tensors |= {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
    with pytest.raises(CheckpointError, match=r"missing: model\.embed_tokens\.weight"):
        check(directory, tensors)
    with pytest.raises(CheckpointError, match=r"1 differences\):\n  unknown: model\.norm\.weight"):
        check(directory, tensors | {"model.norm.weight": np.ones(2, np.float16)})


def test_a_head_that_is_not_the_tied_embedding_is_refused(directory: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*: set that to false where"
    ):
        check(directory, fitting_tensors() | {"lm_head.weight": np.zeros((4, 2), np.float16)})
