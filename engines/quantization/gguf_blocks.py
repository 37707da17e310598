"""The types of packed tensors in GGUF files: blocks of 32 or 256 columns of a row, and what they stand for.

Layouts of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). `d` and `m` are float16; "halves" are
16 bytes whose lower halves are the codes of the first 16 columns and whose upper halves those of the next 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.formats.gguf_file import TYPES
from edgellm.engines.quantization.layout import Layout, LinearTensors, Quantization, Settings, Stored
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight
from edgellm.kernels.quantization.packed_weight import LEVEL_COLUMNS, Codes, Levels, Scaling, WeightFormat


class _Blocks(NamedTuple):
    """What [N, B] blocks hold: `codes` uint8 [N, B, columns of a block], `scales` and `minima` (or None) float32 [N, B,
    groups of a block]; or as whole numbers, int8, of which each is a product with one of `factors` float16 [N, B, 1 or
    2]."""

    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None
    factors: np.ndarray | None = None


def _halves(data: np.ndarray) -> np.ndarray:
    """Codes of 4 bits, the lower halves of the last axis before its upper ones."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _floats(data: np.ndarray, first: int) -> np.ndarray:
    """The float16 at a byte of each block: float32 [N, B, 1]."""
    return np.ascontiguousarray(data[..., first : first + 2]).view("<f2").astype(np.float32)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    """16 of each bit of 4 bytes, the lowest first: uint8 [N, B, 32]."""
    return np.unpackbits(data, axis=-1, bitorder="little") << 4


def _q4_0(data: np.ndarray) -> _Blocks:
    """d, halves."""
    return _Blocks(_halves(data[..., 2:]), _floats(data, 0))


def _q4_1(data: np.ndarray) -> _Blocks:
    """d, m, halves."""
    return _Blocks(_halves(data[..., 4:]), _floats(data, 0), _floats(data, 2))


def _q5_0(data: np.ndarray) -> _Blocks:
    """d, 32 fifth bits, halves."""
    return _Blocks(_halves(data[..., 6:]) | _fifth_bits(data[..., 2:6]), _floats(data, 0))


def _q5_1(data: np.ndarray) -> _Blocks:
    """d, m, 32 fifth bits, halves."""
    return _Blocks(_halves(data[..., 8:]) | _fifth_bits(data[..., 4:8]), _floats(data, 0), _floats(data, 2))


def _q8_0(data: np.ndarray) -> _Blocks:
    """d, 32 codes as two's complements, which count from 128 here."""
    return _Blocks(data[..., 2:] ^ 128, _floats(data, 0))


def _of_eight(data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """8 scales and 8 minima of 6 bits in 12 bytes, whose last 4 have the lower bits of the second fours, int8 [N, B, 8]
    each; the factors of all, d and -m, that stand in 4 bytes before."""
    factors, packed = np.ascontiguousarray(data[..., :4]).view("<f2"), data[..., 4:16]
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, low & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, low >> 4 | second >> 6 << 4), axis=-1)
    return scales.view(np.int8), minima.view(np.int8), factors * np.array([1, -1], np.float16)


def _of_chunks(data: np.ndarray) -> np.ndarray:
    """Codes of 4 bits in chunks of 32 bytes, whose lower halves are one group and whose upper halves the next: uint8
    [N, B, 8, 32]."""
    chunks = data.reshape(*data.shape[:2], 4, 32)
    return np.stack((chunks & 15, chunks >> 4), axis=-2).reshape(*data.shape[:2], 8, 32)


def _q4_k(data: np.ndarray) -> _Blocks:
    """d, m, 8 scales and minima, 4 chunks."""
    codes = _of_chunks(data[..., 16:])
    return _Blocks(codes.reshape(*data.shape[:2], 256), *_of_eight(data))


def _q5_k(data: np.ndarray) -> _Blocks:
    """d, m, 8 scales and minima, 32 bytes with a fifth bit for each group, 4 chunks."""
    fifth = data[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _of_chunks(data[..., 48:]) | fifth << 4
    return _Blocks(codes.reshape(*data.shape[:2], 256), *_of_eight(data))


def _q6_k(data: np.ndarray) -> _Blocks:
    """Of each half of the columns 64 bytes of lower bits, then of each 32 bytes of upper ones; 16 scales as two's
    complements, d."""
    low = data[..., :128].reshape(*data.shape[:2], 2, 2, 32)
    high = data[..., 128:192].reshape(*data.shape[:2], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = np.concatenate((low & 15, low >> 4), axis=-2) | high << 4
    scales, factors = np.ascontiguousarray(data[..., 192:208]).view(np.int8), np.ascontiguousarray(data[..., 208:])
    return _Blocks(codes.reshape(*data.shape[:2], 256), scales, None, factors.view("<f2"))


def _iq4_xs(data: np.ndarray) -> _Blocks:
    """d, 2 upper bits of each of 8 scales, their 4 lower ones, 8 times halves; scales count from 32."""
    high = np.ascontiguousarray(data[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((data[..., 4:8] & 15, data[..., 4:8] >> 4), axis=-1).reshape(*data.shape[:2], 8)
    scales, factors = (low | high << 4).astype(np.int8) - np.int8(32), np.ascontiguousarray(data[..., :2])
    codes = _halves(data[..., 8:].reshape(*data.shape[:2], 8, 16))
    return _Blocks(codes.reshape(*data.shape[:2], 256), scales, None, factors.view("<f2"))


def _mxfp4(data: np.ndarray) -> _Blocks:
    """An exponent, halves; there is no negative zero."""
    codes = _halves(data[..., 1:])
    scales = np.ldexp(1.0, data[..., :1].astype(np.int32) - 127)
    return _Blocks(np.where(codes == 8, 0, codes), scales.astype(np.float32))


#: By a type's name: what codes are, whether groups have minima, how scales are stored, and what reads its blocks.
_READERS: dict[str, tuple[Codes, bool, Scaling, Callable[[np.ndarray], _Blocks]]] = {
    "q4_0": ("int4", False, "float16", _q4_0),
    "q4_1": ("int4", True, "float16", _q4_1),
    "q5_0": ("int5", False, "float16", _q5_0),
    "q5_1": ("int5", True, "float16", _q5_1),
    "q8_0": ("int8", False, "float16", _q8_0),
    "q4_k": ("int4", True, "levels", _q4_k),
    "q5_k": ("int5", True, "levels", _q5_k),
    "q6_k": ("int6", False, "levels", _q6_k),
    "iq4_nl": ("iq4", False, "float16", _q4_0),
    "iq4_xs": ("iq4", False, "levels", _iq4_xs),
    "mxfp4": ("fp4", False, "powers", _mxfp4),
}
_SIZES = {name: (elements, size) for name, elements, size in TYPES.values()}


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A linear layer or an embedding table in blocks of a type, `kind`. Its columns are in `order`: column k of the
    weight is column order[k] of the file (None: its own), whole groups together."""

    kind: str
    order: tuple[int, ...] | None = None

    scale_tensor, may_be_dense = "weight", True

    @property
    def name(self) -> str:  # type: ignore[override]
        """See `Layout`."""
        return f"GGUF {self.kind.upper()}"

    @property
    def group(self) -> int:  # type: ignore[override]
        """See `Layout`."""
        return 16 if self.kind == "q6_k" else 32

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
        """See `Layout`."""
        return {"weight": Stored.of((rows, columns), self.kind)}

    def format(self, scale_dtype: str) -> WeightFormat:
        """See `Layout`: products are those of float32, where these are exact but for the sum with a minimum."""
        codes, minima, scaling, _ = _READERS[self.kind]
        if scaling == "levels" and not self._keeps_levels:
            scaling = "any"
        return WeightFormat(codes, self.group, False, "float32", minima=minima, scaling=scaling)

    @property
    def _keeps_levels(self) -> bool:
        """Whether columns that share a factor stay together."""
        if self.order is None:
            return True
        places = np.array(self.order).reshape(-1, LEVEL_COLUMNS) // LEVEL_COLUMNS
        return bool((places == places[:, :1]).all())

    def read(self, tensors: LinearTensors) -> StoredWeight:
        """See `Layout`."""
        (rows, columns), (elements, size) = tensors.shape, _SIZES[self.kind]
        *_, reader = _READERS[self.kind]
        with np.errstate(invalid="ignore", over="ignore"):
            found = reader(tensors.blocks("weight").reshape(rows, columns // elements, size))
            codes, scales = found.codes.reshape(rows, columns), found.scales.reshape(rows, -1)
            minima, factors = None if found.minima is None else found.minima.reshape(rows, -1), None
            if found.factors is not None:
                factors = np.repeat(found.factors, elements // LEVEL_COLUMNS, axis=1)
                numbers = np.stack([scales] if minima is None else [scales, minima], axis=-1)
                products = Levels(factors, numbers).products(self.group)
                scales, minima = products[..., 0], None if minima is None else products[..., 1]
        for values in (scales, minima):
            if values is not None:
                tensors.check("weight", np.isfinite(values), values, "finite scales and minima")
        if self.order is not None:
            order = np.array(self.order).reshape(-1, self.group)
            if (order - order[:, :1] != np.arange(self.group)).any() or (order[:, 0] % self.group).any():
                raise CheckpointError(
                    f"tensor '{tensors.module}.weight' has groups of {self.group} columns, but other columns belong "
                    "together: no file of such a model is known"
                )
            groups = order[:, 0] // self.group
            codes, scales = codes.reshape(rows, -1, self.group)[:, groups].reshape(rows, columns), scales[:, groups]
            minima = None if minima is None else minima[:, groups]
            if factors is not None:
                of_factor = LEVEL_COLUMNS // self.group
                numbers, factors = numbers[:, groups], factors[:, groups[::of_factor] // of_factor]
        stored, format = StoredCodes(codes, "bytes", 8, (rows, columns)), self.format("float32")
        levels = Levels(factors, numbers) if factors is not None and format.scaling == "levels" else None
        return StoredWeight(format, (stored,), scales, minima=minima, levels=levels)


class Gguf(Quantization):
    """What is packed in GGUF files, which say of each tensor how: `layout` finds nothing beside that."""

    method = "gguf"
    notes = ("On a GPU layers that are multiplied as one are dense where one of them is not packed.",)

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Nothing is read of the settings."""

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        """See `Quantization`."""
        return None


#: The types that are packed.
PACKED_TYPES = tuple(_READERS)
