"""Checkpoints of a few bytes, put together by hand, for tests."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from golden_files import Tensors as Tensors
from golden_files import read_tensors as read_tensors
from golden_files import write_tensors as write_tensors

from edgellm.engines.checkpoints.checkpoint import Checkpoint
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
