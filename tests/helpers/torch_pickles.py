"""Files as PyTorch writes them, and pickles of one tensor put together by hand, for tests."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from golden_files import golden_folder

from edgellm.engines.checkpoints.torch_file import TorchFile
from edgellm.engines.errors import CheckpointError


@pytest.fixture(scope="module")
def folder() -> Path:
    return golden_folder("torch_files")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        TorchFile(path)
    message = str(caught.value)
    assert str(path) in message
    return message


# A pickle of one tensor "w", assembled from its parts. PyTorch writes the same instructions.


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    encoded = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def numbers(values: tuple[Any, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str = "0", count: int = 6, kind: bytes = b"ctorch\nFloatStorage\n", tag: str = "storage") -> bytes:
    return b"(" + text(tag) + kind + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(place: bytes, offset: int = 0, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1)) -> bytes:
    rest = number(offset) + numbers(shape) + numbers(strides) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + rest + b"tR"


def state(value: bytes) -> bytes:
    return b"\x80\x02}" + text("w") + value + b"s."


GOOD_STATE = state(tensor(storage()))
VALUES = struct.pack("<6f", *range(6))


def archive(path: Path, data: bytes, entries: dict[str, bytes] | None = None, compression: int = 0) -> Path:
    with zipfile.ZipFile(path, "w", compression) as packed:
        packed.writestr("m/data.pkl", data)
        for name, content in ({"m/data/0": VALUES} if entries is None else entries).items():
            packed.writestr(name, content)
    return path
