"""Writes what a checkpoint of quantized weights consists of: compressed-tensors' layout "pack-quantized".

https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.engines.checkpoints.weight_files import INDEX_FILE
from edgellm.engines.formats.safetensors_file import element_bytes, file_header
from edgellm.engines.formats.tensors import STORAGE, convert
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: A tensor is written so many bytes at a time.
_PIECE = 4 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it: its dtype by the project's name, and its elements (bfloat16 as bits, uint16)."""

    dtype: str
    elements: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.elements.shape

    def pieces(self) -> Iterator[np.ndarray]:
        """Its bytes, uint8, one piece behind the other."""
        data = np.ascontiguousarray(self.elements).reshape(-1).view(np.uint8)
        for start in range(0, data.size, _PIECE):
            yield data[start : start + _PIECE]


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor that is made while it is written: `pieces` gives its bytes, uint8, one piece behind the other."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


def packed_tensors(module: str, weight: PackedWeight) -> dict[str, StoredTensor]:
    """The tensors of a linear layer [N, K] by their names: integers of b bits from 0 up, little end first in int32.

    `weight_packed` [N, ceil(K b / 32)], packed along K; `weight_scale` [N, groups] in the format's dtype;
    `weight_shape` int64 [2]; with zero points `weight_zero_point` [ceil(N b / 32), groups], packed along N.
    """
    dtype, bits = weight.format.dtype, weight.format.bits
    scales, _ = convert(weight.scales, "float32", dtype)
    tensors = {
        "weight_packed": StoredTensor("int32", packed_codes(weight.codes, bits)),
        "weight_scale": StoredTensor(dtype, np.asarray(scales, STORAGE[dtype])),
        "weight_shape": StoredTensor("int64", np.array(weight.codes.shape, np.int64)),
    }
    if weight.zeros is not None:
        columns = np.ascontiguousarray(weight.zeros.T)
        tensors["weight_zero_point"] = StoredTensor("int32", np.ascontiguousarray(packed_codes(columns, bits).T))
    return {f"{module}.{ending}": tensor for ending, tensor in tensors.items()}


def quantization_config(format: WeightFormat, ignored: list[str]) -> dict[str, Any]:
    """What stands under `quantization_config` of `config.json`; `ignored` are the linear layers that are dense."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("quantization_config.json").read_text("utf-8"))
    strategy = {"strategy": "channel" if format.group is None else "group", "group_size": format.group}
    found["config_groups"]["group_0"]["weights"] |= {"num_bits": format.bits, "symmetric": not format.zeros} | strategy
    return found | {"ignore": ignored}


def write_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor | StreamedTensor],
    metadata: Mapping[str, str] | None = None,
    is_kept: bool = True,
) -> None:
    """Write a safetensors file, piece by piece, with `metadata` in its header; put it on the disk if it `is_kept`.

    Raises OSError, and CheckpointError for more names than a file may have. Tensors of wider elements come first, of
    equal ones in the order of their names.
    """
    # The format asks for alignment to 8 bytes; wide dtypes first keep it without holes.
    ordered = dict(sorted(tensors.items(), key=lambda item: (-element_bytes(item[1].dtype), item[0])))
    header, _ = file_header(
        path,
        {name: (each.dtype, each.shape) for name, each in ordered.items()},
        {"format": "pt"} | dict(metadata or {}),
    )
    with path.open("wb") as file:
        file.write(header)
        for tensor in ordered.values():
            for piece in tensor.pieces():
                file.write(piece)
        file.flush()
        if is_kept:
            os.fsync(file.fileno())


def shard_names(count: int) -> list[str]:
    """What the files of a checkpoint are called that has so many."""
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def write_index(folder: Path, weight_map: Mapping[str, str], size: int) -> None:
    """Write the index of several files: each tensor's file by its name, and the bytes of all; raises OSError."""
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / INDEX_FILE, content)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file of a checkpoint that people read, too; raises OSError."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def packed_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [R, C] as int32 [R, ceil(C bits / 32)], zeros behind the last."""
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns * bits // 32) * 32 // bits), np.uint8)
    padded[:, :columns] = codes
    data = padded[:, 0::2] | padded[:, 1::2] << 4 if bits == 4 else padded
    return np.ascontiguousarray(data).view("<i4")
