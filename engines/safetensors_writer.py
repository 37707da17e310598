"""Safetensors files written tensor by tensor from PyTorch's files, and read back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.engines.errors import CheckpointError
from edgellm.engines.checkpoints.safetensors_file import DTYPES, LARGEST_HEADER, SafetensorsFile
from edgellm.engines.checkpoints.torch_file import TorchFile

_BLOCK_BYTES = 4 << 20
_SAFETENSORS_NAMES = {name: key for key, (name, _) in DTYPES.items()}


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of an open file; `nbytes` and `item_size` in bytes."""

    name: str
    source: TorchFile

    @property
    def dtype(self) -> str:
        """The project's name of the dtype."""
        return self.source.tensors[self.name].storage.dtype

    @property
    def item_size(self) -> int:
        """Bytes of one element."""
        return self.source.tensors[self.name].storage.item_size

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        return self.source.tensors[self.name].shape

    @property
    def nbytes(self) -> int:
        """The size in bytes, written out."""
        return self.source.tensors[self.name].nbytes


def write_safetensors(path: Path, tensors: Sequence[SourceTensor], advance: Callable[[int], None]) -> dict[str, str]:
    """Write one file, tensor by tensor; SHA-256 of each tensor's bytes by name. Raises OSError, CheckpointError."""
    # The format asks for alignment to 8 bytes; wide dtypes first keep it without holes.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.item_size, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in ordered:
        offsets = [position, position + tensor.nbytes]
        dtype = _SAFETENSORS_NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > LARGEST_HEADER:
        raise CheckpointError(
            f"The names and shapes take {len(encoded):,} bytes, safetensors allows {LARGEST_HEADER:,}"
        )
    digests = {}
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered:
            digest = hashlib.sha256()
            for block in _blocks(tensor):
                file.write(block)
                digest.update(block)
                advance(len(block))
            digests[tensor.name] = digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
    return digests


def verify_safetensors(
    path: Path, tensors: Sequence[SourceTensor], digests: Mapping[str, str], advance: Callable[[int], None]
) -> None:
    """Read a file back and compare every tensor with its digest from the source; raises CheckpointError."""
    file = SafetensorsFile(path)
    try:
        for tensor in tensors:
            info = file.tensors.get(tensor.name)
            if info is None or (info.dtype, info.shape) != (tensor.dtype, tensor.shape):
                raise _not_read_back(tensor.name)
            digest, data = hashlib.sha256(), file.bytes_of(info)
            for start in range(0, info.nbytes, _BLOCK_BYTES):
                digest.update(data[start : start + _BLOCK_BYTES])
            if digest.hexdigest() != digests[tensor.name]:
                raise _not_read_back(tensor.name)
            advance(info.nbytes)
        if len(file.tensors) != len(tensors):
            raise _not_read_back("another tensor")
    finally:
        file.close()


def _not_read_back(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name!r:.80} did not read back as it was written, and nothing was left behind: check disk and memory"
    )


def _blocks(tensor: SourceTensor) -> Iterator[memoryview]:
    if tensor.nbytes == 0:
        return
    flat = memoryview(tensor.source.elements(tensor.name).reshape(-1)).cast("B")
    for start in range(0, len(flat), _BLOCK_BYTES):
        yield flat[start : start + _BLOCK_BYTES]
