"""Weights from a checkpoint into the buffers that engines take."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoint_tensors import read_tensor

from edgellm.engines.checkpoints.checkpoint import Checkpoint
from edgellm.engines.checkpoints.weights import iterate_weight_parts, load_numpy_weights
from edgellm.engines.errors import CheckpointError
from edgellm.engines.families import decoder_config
from edgellm.engines.model.config import WeightSpec
from edgellm.engines.model.decoder import decoder_weights

HOST_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}

SPECS = [
    WeightSpec("norm", (3,), (("norm", (3,)),)),
    WeightSpec("qkv", (7, 3), (("q", (4, 3)), ("k", (2, 3)), ("v", (1, 3)))),
    WeightSpec("bias", (7,), (("q.bias", (4,)), ("k.bias", (2,)), ("v.bias", (1,)))),
]


def save(directory: Path, tensors: dict[str, np.ndarray]) -> Checkpoint:
    """Write the tensors with the safetensors library and open the directory."""
    (directory / "config.json").write_text("{}")
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return Checkpoint.open(directory)


def random_tensors(dtype: type[np.generic], specs: Sequence[WeightSpec] = SPECS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {name: random.standard_normal(shape).astype(dtype) for spec in specs for name, shape in spec.parts}


def joined(tensors: dict[str, np.ndarray], spec: WeightSpec) -> np.ndarray:
    return np.concatenate([tensors[name] for name, _ in spec.parts])


def buffers_filled_by_parts(checkpoint: Checkpoint, specs: Sequence[WeightSpec], dtype: str) -> dict[str, np.ndarray]:
    """Copy each part's bytes to its offset, as a GPU backend does, and see that every byte is written once."""
    host = np.dtype(HOST_DTYPES[dtype])
    buffers = {spec.name: np.zeros(spec.shape, host) for spec in specs}
    written = {name: np.zeros(buffer.nbytes, np.uint8) for name, buffer in buffers.items()}
    for spec, offset, values in iterate_weight_parts(checkpoint, specs, dtype):
        assert values.dtype == host and values.ndim == 1 and values.flags.c_contiguous
        place = slice(offset, offset + values.nbytes)
        buffers[spec.name].reshape(-1).view(np.uint8)[place] = np.frombuffer(values.tobytes(), np.uint8)
        written[spec.name][place] += 1
    assert all((counts == 1).all() for counts in written.values())
    return buffers


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_buffers_are_the_parts_one_behind_the_other_in_float32(tmp_path: Path, dtype: type[np.generic]) -> None:
    tensors = random_tensors(dtype)
    with save(tmp_path, tensors) as checkpoint:
        weights = load_numpy_weights(checkpoint, SPECS)
    assert list(weights) == [spec.name for spec in SPECS]
    for spec in SPECS:
        values = weights[spec.name]
        assert values.shape == spec.shape and values.dtype == np.float32
        assert values.flags.c_contiguous and values.flags.writeable and values.ctypes.data % 64 == 0
        np.testing.assert_array_equal(values, joined(tensors, spec))


def test_loading_is_reported_in_bytes_up_to_all_of_them(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    with save(tmp_path, random_tensors(np.float16)) as checkpoint:
        weights = load_numpy_weights(checkpoint, SPECS, lambda done, total: reports.append((done, total)))
    total = sum(values.nbytes for values in weights.values())
    assert len(reports) == sum(len(spec.parts) for spec in SPECS)
    assert reports == sorted(reports) and reports[0][0] > 0
    assert {each for _, each in reports} == {total} and reports[-1][0] == total


def test_bfloat16_parts_are_read_from_shards(tmp_path: Path) -> None:
    exact = random_tensors(np.float32)
    bits = {name: (values.view(np.uint32) >> 16).astype(np.uint16) for name, values in exact.items()}
    shards = {"a.safetensors": ["norm", "q", "v", "k.bias"], "b.safetensors": ["k", "q.bias", "v.bias"]}
    for shard, names in shards.items():
        header, data = {}, b""
        for name in names:
            place = [len(data), len(data) + bits[name].nbytes]
            header[name] = {"dtype": "BF16", "shape": bits[name].shape, "data_offsets": place}
            data += bits[name].tobytes()
        encoded = json.dumps(header).encode()
        (tmp_path / shard).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.dtype == "bfloat16"
        weights = load_numpy_weights(checkpoint, SPECS)
        parts = buffers_filled_by_parts(checkpoint, SPECS, "bfloat16")
    for spec in SPECS:
        expected = joined(
            {name: (values.astype(np.uint32) << 16).view(np.float32) for name, values in bits.items()}, spec
        )
        np.testing.assert_array_equal(weights[spec.name], expected)
        np.testing.assert_array_equal(parts[spec.name], joined(bits, spec))


@pytest.mark.parametrize("stored", [np.float16, np.float32])
@pytest.mark.parametrize("dtype", HOST_DTYPES)
def test_parts_fill_every_buffer_once(tmp_path: Path, stored: type[np.generic], dtype: str) -> None:
    with save(tmp_path, random_tensors(stored)) as checkpoint:
        buffers = buffers_filled_by_parts(checkpoint, SPECS, dtype)
        for spec in SPECS:
            expected = np.concatenate([read_tensor(checkpoint, name, dtype) for name, _ in spec.parts])
            np.testing.assert_array_equal(buffers[spec.name], expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_weight_of_a_dtype_of_its_own_keeps_it(tmp_path: Path, dtype: str) -> None:
    specs = [replace(SPECS[2], dtype="float32"), SPECS[1]]
    with save(tmp_path, random_tensors(np.float32)) as checkpoint:
        parts = list(iterate_weight_parts(checkpoint, specs, dtype))
        assert [(offset, values.dtype) for spec, offset, values in parts if spec == specs[0]] == [
            (place, np.float32) for place in (0, 16, 24)
        ]
        joined = np.concatenate([values for spec, _, values in parts if spec == specs[0]])
        np.testing.assert_array_equal(joined, load_numpy_weights(checkpoint, specs)["bias"])
        assert {values.dtype for spec, _, values in parts if spec == specs[1]} == {np.dtype(HOST_DTYPES[dtype])}


def test_parts_that_need_no_conversion_are_views_of_the_map(tmp_path: Path) -> None:
    with save(tmp_path, random_tensors(np.float16)) as checkpoint:
        start = checkpoint.raw("norm").ctypes.data - checkpoint.tensors["norm"].offset
        names = [name for spec in SPECS for name, _ in spec.parts]
        views = [values for _, _, values in iterate_weight_parts(checkpoint, SPECS, "float16")]
        assert [view.ctypes.data - start for view in views] == [checkpoint.tensors[name].offset for name in names]
        assert not any(view.flags.writeable for view in views)


def test_large_tensors_are_converted_piece_by_piece(tmp_path: Path) -> None:
    rows = 5_000_000
    values = np.arange(rows, dtype=np.float32) % 2048
    specs = [WeightSpec("whole", (rows + 2,), (("head", (2,)), ("tail", (rows,))))]
    with save(tmp_path, {"head": np.array([7, 9], np.float32), "tail": values}) as checkpoint:
        sizes = [part.size for _, _, part in iterate_weight_parts(checkpoint, specs, "float16")]
        assert len(sizes) == 3 and max(sizes) < rows
        whole = buffers_filled_by_parts(checkpoint, specs, "float16")["whole"]
    np.testing.assert_array_equal(whole[:2], [7, 9])
    np.testing.assert_array_equal(whole[2:], values)


def test_too_large_values_name_their_tensor(tmp_path: Path) -> None:
    tensors = random_tensors(np.float32)
    tensors["k"][1, 2] = 1e5
    with save(tmp_path, tensors) as checkpoint:
        with pytest.raises(CheckpointError, match="1 values of tensor 'k'"):
            list(iterate_weight_parts(checkpoint, SPECS, "float16"))
        assert load_numpy_weights(checkpoint, SPECS)["qkv"][5, 2] == np.float32(1e5)


def test_missing_and_mis_shaped_tensors_and_unknown_dtypes(tmp_path: Path) -> None:
    tensors = random_tensors(np.float16)
    del tensors["v.bias"]
    tensors["k"] = np.ones((3, 2), np.float16)
    with save(tmp_path, tensors) as checkpoint:
        for read in (load_numpy_weights, lambda *arguments: list(iterate_weight_parts(*arguments, "float16"))):
            with pytest.raises(CheckpointError, match=r"'k' has the shape \[3, 2\], expected \[2, 3\]"):
                read(checkpoint, SPECS[1:2])
            with pytest.raises(CheckpointError, match=r"no tensor 'v\.bias'"):
                read(checkpoint, SPECS[2:])


def test_weights_of_a_whole_decoder(tiny_checkpoint: Path) -> None:
    stored = safetensors.numpy.load_file(tiny_checkpoint / "model.safetensors")
    with Checkpoint.open(tiny_checkpoint) as checkpoint:
        specs = decoder_weights(decoder_config(checkpoint.config, checkpoint.generation_config))
        checkpoint.check(specs)
        weights = load_numpy_weights(checkpoint, specs)
        parts = buffers_filled_by_parts(checkpoint, specs, checkpoint.dtype)
    for spec in specs:
        np.testing.assert_array_equal(weights[spec.name], joined(stored, spec))
        np.testing.assert_array_equal(parts[spec.name], joined(stored, spec))
