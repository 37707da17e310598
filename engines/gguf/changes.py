"""How a tensor that was published becomes of those that a GGUF file has in its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from edgellm.engines.formats.gguf_file import GgufFile
from edgellm.engines.formats.safetensors_file import TensorInfo
from edgellm.engines.formats.tensors import STORAGE, as_float32
from edgellm.engines.quantization.gguf_blocks import PACKED_TYPES, BlockLayout
from edgellm.engines.quantization.layout import LinearTensors


@dataclass(frozen=True)
class Change:
    """What is done to the tensors `infos` of a file. Row i is their row `rows[i]` (None: all are as they were), columns
    likewise; then values are changed: "offsets" of whole numbers, each less its place.

    The rows of several follow each other; kernels [N, C, H, W] that are `frames` become one [N, C, frames, H, W].
    Several that are not of one type, and with `dense` those of a packed one, become float32. The result has a `shape`
    of its own, or the one that follows. With `mapped` the bytes of the `infos` are views of the file.
    """

    infos: tuple[TensorInfo, ...]
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    values: Literal["", "less 1", "logarithm", "offsets"] = ""
    frames: bool = False
    dense: bool = False
    shape: tuple[int, ...] | None = None
    mapped: bool = False

    @property
    def dtype(self) -> str:
        kinds = {info.dtype for info in self.infos}
        is_float32 = self.values in ("less 1", "logarithm") or len(kinds) > 1
        return "float32" if is_float32 or (self.dense and kinds & set(PACKED_TYPES)) else kinds.pop()

    @property
    def is_packed(self) -> bool:
        return self.dtype in PACKED_TYPES

    @property
    def _stored_rows(self) -> int:
        return sum(info.shape[0] for info in self.infos)

    def result(self, name: str) -> TensorInfo:
        """The description of the tensor that becomes of them, called `name`."""
        first, rest = self.infos[0], self.infos[0].shape[1:]
        rows = self._stored_rows if self.rows is None else len(self.rows)
        shape = self.shape or ((first.shape[0], rest[0], len(self.infos), *rest[1:]) if self.frames else (rows, *rest))
        size = sum(info.nbytes for info in self.infos) * rows // max(1, self._stored_rows)
        if self.dtype not in {info.dtype for info in self.infos}:
            size = math.prod(shape) * STORAGE[self.dtype].itemsize
        return replace(first, name=name, dtype=self.dtype, shape=shape, nbytes=size)

    def read(self, files: Mapping[Path, GgufFile]) -> np.ndarray:
        """The bytes of the result, uint8; of a packed one without its columns' order. Raises CheckpointError as
        `GgufFile.bytes_of`."""
        if self.frames:
            shape = self.infos[0].shape
            parts = [self._part(files[info.file], info).reshape(*shape[:2], 1, -1) for info in self.infos]
            return np.ascontiguousarray(np.concatenate(parts, axis=2)).reshape(-1)
        own = [self._part(files[info.file], info) for info in self.infos]
        data = own[0] if len(own) == 1 else np.concatenate(own)
        if self.rows is not None:
            data = data.reshape(self._stored_rows, -1)[self.rows].reshape(-1)
        if self.columns is not None and not self.is_packed:
            values = data.view(STORAGE[self.dtype]).reshape(-1, len(self.columns))[:, self.columns]
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        if self.values == "offsets":
            ids = data.view(np.int64)
            return (ids - np.arange(ids.size)).view(np.uint8)
        with np.errstate(invalid="ignore", divide="ignore"):  # what is no number is found where it is loaded
            if self.values == "less 1":
                return (data.view(np.float32) - np.float32(1)).view(np.uint8)
            if self.values == "logarithm":
                return np.log(-data.view(np.float32).astype(np.float64)).astype(np.float32).view(np.uint8)
        return data

    def _part(self, file: GgufFile, info: TensorInfo) -> np.ndarray:
        """The bytes of one tensor, in the dtype of the result."""
        data = file.view_of(info) if self.mapped else file.bytes_of(info)
        if info.dtype == self.dtype:
            return data
        if info.dtype in PACKED_TYPES:
            shape = math.prod(info.shape[:-1]), info.shape[-1]
            tensor = LinearTensors(info.name.removesuffix(".weight"), shape, lambda name: (info.dtype, shape, data))
            values = BlockLayout(info.dtype).read(tensor).unpacked().values()
            return np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        return as_float32(data.view(STORAGE[info.dtype]), info.dtype).view(np.uint8)
