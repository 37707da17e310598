"""The types of packed tensors in GGUF files: blocks of 32 or 256 columns of a row, and what they stand for.

Layouts of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h): `BLOCK_CODES` says where codes are,
the readers here what else there is. `d` and `m` are float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.engines.errors import CheckpointError
from edgellm.engines.quantization.layout import Layout, LinearTensors, Quantization, Settings, Stored
from edgellm.engines.quantization.stored import StoredCodes, StoredWeight
from edgellm.kernels.quantization.block_codes import BLOCK_CODES
from edgellm.kernels.quantization.packed_weight import LEVEL_COLUMNS, Codes, Levels, Scaling, WeightFormat

#: What [N, B] blocks hold beside codes: scales, or these and minima, float32 [N, B, groups of a block]; of `Levels` the
#: numbers by which their factors are multiplied, int8.
_Scales = tuple[np.ndarray, ...]


def _halves(data: np.ndarray, first: int, count: int = 1) -> np.ndarray:
    """The float16 from a byte of each block on: [N, B, count]."""
    return np.ascontiguousarray(data[..., first : first + 2 * count]).view("<f2")


def _scale(data: np.ndarray) -> _Scales:
    return (_halves(data, 0).astype(np.float32),)


def _scale_and_minimum(data: np.ndarray) -> _Scales:
    return _halves(data, 0).astype(np.float32), _halves(data, 2).astype(np.float32)


def _of_eight(data: np.ndarray) -> _Scales:
    """Behind d and m 8 scales and 8 minima of 6 bits in 12 bytes, whose last 4 have the lower bits of the second
    fours."""
    packed = np.ascontiguousarray(data[..., 4:16])
    first, second, low = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, low & 15 | first >> 6 << 4), axis=-1)
    minima = np.concatenate((second & 63, low >> 4 | second >> 6 << 4), axis=-1)
    return scales.view(np.int8), minima.view(np.int8)


def _of_sixteen(data: np.ndarray) -> _Scales:
    """Behind the codes 16 scales as two's complements, before d."""
    return (np.ascontiguousarray(data[..., 192:208]).view(np.int8),)


def _of_upper_bits(data: np.ndarray) -> _Scales:
    """Behind d 2 upper bits of each of 8 scales, their 4 lower ones; scales count from 32."""
    high = np.ascontiguousarray(data[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((data[..., 4:8] & 15, data[..., 4:8] >> 4), axis=-1).reshape(*data.shape[:2], 8)
    return ((low | high << 4).astype(np.int8) - np.int8(32),)


def _factors(kind: str, data: np.ndarray) -> np.ndarray:
    """The factors of levels, float16 [N, B, 1 or 2]: d, or d and -m."""
    form = BLOCK_CODES[kind]
    found = _halves(data, form.factors, form.level_parts)
    return (found.view(np.uint16) ^ np.array([0, 0x8000][: form.level_parts], np.uint16)).view(np.float16)


def _exponent(data: np.ndarray) -> _Scales:
    return (np.ldexp(1.0, data[..., :1].astype(np.int32) - 127).astype(np.float32),)


#: By a type's name: what codes are, whether groups have minima, how scales are stored, and what reads them.
_READERS: dict[str, tuple[Codes, bool, Scaling, Callable[[np.ndarray], _Scales]]] = {
    "q4_0": ("int4", False, "float16", _scale),
    "q4_1": ("int4", True, "float16", _scale_and_minimum),
    "q5_0": ("int5", False, "float16", _scale),
    "q5_1": ("int5", True, "float16", _scale_and_minimum),
    "q8_0": ("int8", False, "float16", _scale),
    "q4_k": ("int4", True, "levels", _of_eight),
    "q5_k": ("int5", True, "levels", _of_eight),
    "q6_k": ("int6", False, "levels", _of_sixteen),
    "iq4_nl": ("iq4", False, "float16", _scale),
    "iq4_xs": ("iq4", False, "levels", _of_upper_bits),
    "mxfp4": ("fp4", False, "powers", _exponent),
}


@dataclass(frozen=True)
class BlockLayout(Layout):
    """A linear layer or an embedding table in blocks of a type, `kind`. Its columns are in `order`: column k of the
    weight is column order[k] of the file (None: its own), whole groups together."""

    kind: str
    order: tuple[int, ...] | None = None

    scale_tensor, may_be_dense = "weight", True

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"GGUF {self.kind.upper()}"

    @property
    def group(self) -> int:  # type: ignore[override]
        return BLOCK_CODES[self.kind].group

    def tensors(self, rows: int, columns: int) -> dict[str, Stored]:
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
        """See `Layout`; codes stay in their blocks where no columns move."""
        (rows, columns), form = tensors.shape, BLOCK_CODES[self.kind]
        *_, reader = _READERS[self.kind]
        data = tensors.blocks("weight").reshape(rows, -1)
        blocks = data.reshape(rows, -1, form.size)
        stored, levels = StoredCodes(data, self.kind, 8, (rows, columns)), None
        if form.level_parts:
            factors = _factors(self.kind, blocks)
            tensors.check("weight", np.isfinite(factors), factors, "finite scales and minima")

            def read_levels() -> Levels:
                numbers = np.stack([part.reshape(rows, -1) for part in reader(blocks)], axis=-1)
                return Levels(np.repeat(factors, form.columns // LEVEL_COLUMNS, axis=1), numbers)

            if self.order is None:  # a GPU reads them from the blocks
                return StoredWeight(self.format("float32"), (stored,), None, read_levels=read_levels)
            levels = read_levels()
            own = list(np.moveaxis(levels.products(self.group), -1, 0))
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                own = [part.reshape(rows, -1) for part in reader(blocks)]
            for values in own:
                tensors.check("weight", np.isfinite(values), values, "finite scales and minima")
        if self.order is not None:
            order = np.array(self.order).reshape(-1, self.group)
            if (order - order[:, :1] != np.arange(self.group)).any() or (order[:, 0] % self.group).any():
                raise CheckpointError(
                    f"tensor '{tensors.module}.weight' has groups of {self.group} columns, but other columns belong "
                    "together: no file of such a model is known"
                )
            groups = order[:, 0] // self.group
            codes, own = stored.unpacked().reshape(rows, -1, self.group)[:, groups], [part[:, groups] for part in own]
            stored = StoredCodes(codes.reshape(rows, columns), "bytes", 8, (rows, columns))
            if levels is not None and self._keeps_levels:
                of_factor = LEVEL_COLUMNS // self.group
                moved = Levels(levels.factors[:, groups[::of_factor] // of_factor], levels.numbers[:, groups])
                return StoredWeight(self.format("float32"), (stored,), None, read_levels=lambda: moved)
        scales, minima = (*own, None)[:2]
        return StoredWeight(self.format("float32"), (stored,), scales, own_minima=minima)


class Gguf(Quantization):
    """What is packed in GGUF files, which say of each tensor how: `layout` finds nothing beside that."""

    method = "gguf"

    def __init__(self, settings: Settings, dtype: str) -> None:
        """Nothing is read of the settings."""

    def layout(self, names: tuple[str, ...]) -> Layout | None:
        return None


#: The types that are packed.
PACKED_TYPES = tuple(_READERS)
