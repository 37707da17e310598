"""Writes GGUF files, from the format's definition."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: By a type's name: its number, the elements of a block and its bytes.
NUMBERS = {
    "float32": (0, 1, 4),
    "float16": (1, 1, 2),
    "bfloat16": (30, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
    "iq4_nl": (20, 32, 18),
    "iq4_xs": (23, 256, 136),
    "int64": (27, 1, 8),
    "mxfp4": (39, 32, 17),
}


class Tensor(NamedTuple):
    """A tensor of `shape`, rows first, and the bytes of its blocks."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


class Typed(NamedTuple):
    """A value of metadata of a type that does not follow from it: its number, and what is written."""

    number: int
    data: bytes


def dense(values: np.ndarray) -> Tensor:
    """A tensor of float32, float16 or int64."""
    return Tensor(values.dtype.name, values.shape, np.ascontiguousarray(values).tobytes())


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """The type and the value: bool, int (uint32; int32 below 0), float (float32), str, or a list of one of these."""
    if isinstance(value, Typed):
        return struct.pack("<I", value.number) + value.data
    if isinstance(value, list):
        items = [value_bytes(each) for each in value]
        kind = items[0][:4] if items else struct.pack("<I", 8)
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<Ii", 5, value) if value < 0 else struct.pack("<II", 4, value)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    version: int = 3,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
) -> bytes:
    """A whole file; `offsets` are those of tensors that are to be said to be elsewhere than they are."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        number, elements, size = NUMBERS[kind]
        assert len(content) == math.prod(shape) // elements * size
        data += b"\0" * (-len(data) % alignment)
        at = (offsets or {}).get(name, len(data))
        header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, at)
        data += content
    return header + b"\0" * (-len(header) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], **options: Any) -> Path:
    """`gguf_bytes` in a file."""
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def random_blocks(kind: str, shape: tuple[int, ...], random: np.random.Generator, scale: float = 0.01) -> Tensor:
    """A tensor of random blocks, whose factors are in a bell of the deviation `scale`; of MXFP4 whole powers of two."""
    _, elements, size = NUMBERS[kind]
    blocks = random.integers(0, 256, (math.prod(shape) // elements, size), np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = random.integers(118, 124, len(blocks))
    for place in {"q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "mxfp4": ()}.get(
        kind, (0,)
    ):
        blocks[:, place : place + 2] = random.normal(0, scale, (len(blocks), 1)).astype("<f2").view(np.uint8)
    return Tensor(kind, shape, blocks.tobytes())
