"""A quantized weight as every part of the house has it, whatever layout it was published in.

Readers of published layouts make it, writers and the kernels' own layout are made from it, and what `values` computes
from it is the weight that a model is said to have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, Protocol

import numpy as np

from edgellm.kernels.bfloat16 import bfloat16_bits, float32_of

#: Of what codes are: integers of 4, 5, 6 or 8 bits from 0 up, OCP 8-bit floats of 4 exponent bits (Micikevicius et al.
#: 2022), 4-bit floats of 2, or the numbers of `IQ4`.
Codes = Literal["int4", "int5", "int6", "int8", "fp8", "fp4", "iq4"]
#: What a code of 4-bit floats stands for; the highest bit is the sign.
FP4 = np.array([sign * value for sign in (1, -1) for value in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)
#: What a code of llama.cpp's IQ4_NL and IQ4_XS stands for: denser around zero, where most weights are.
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
#: How scales, and minima, are known to be stored: any numbers; of float16; `Levels`; or powers of two.
Scaling = Literal["any", "float16", "levels", "powers"]
#: Columns of a row that share the factors of `Levels`.
LEVEL_COLUMNS = 128
_BITS = {"int4": 4, "fp4": 4, "iq4": 4, "int5": 5, "int6": 6, "int8": 8, "fp8": 8}


@dataclass(frozen=True)
class WeightFormat:
    """How a weight [N, K] is quantized: its codes, and how many columns of a row share a scale (`group`; None: all).

    `zeros`: each scale has a zero point, else integers count from the middle of their range. `dtype` is that in which
    a code (less its zero point) times its scale is rounded: "float16", "bfloat16" or "float32". `permuted`: the columns
    stand in another order than those of the activations. `scaled`: the activations are multiplied by a vector before.
    `minima`: to each product the minimum of its group is added, of any value, where a zero point is a whole number.
    `scaling`: how scales and minima are known to be stored.
    """

    codes: Codes
    group: int | None
    zeros: bool
    dtype: str
    permuted: bool = False
    scaled: bool = False
    minima: bool = False
    scaling: Scaling = "any"

    def __str__(self) -> str:
        """The format in words, as in "int4, groups of 128, zero points"."""
        parts = [self.codes, "whole rows" if self.group is None else f"groups of {self.group}"]
        named = {"zero points": self.zeros, "permuted columns": self.permuted, "scaled inputs": self.scaled}
        named["minima"] = self.minima
        return ", ".join([*parts, *(name for name, is_there in named.items() if is_there)])

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return _BITS[self.codes]

    @property
    def unit(self) -> int:
        """Columns that are not parted: those of a scale, or of a factor of `Levels`."""
        return max(self.group or 1, LEVEL_COLUMNS if self.scaling == "levels" else 1)

    def groups(self, columns: int) -> int:
        """Scales of a row of so many columns."""
        return 1 if self.group is None else -(-columns // self.group)

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of codes, scales, minima and zero points, with scales of two bytes. Any numbers of float32 have four;
        powers, and the 8-bit floats by which 4-bit floats are published, one, as have `Levels` beside their factors."""
        groups, parts = rows * self.groups(columns), 2 if self.minima else 1
        scale = 1 if self.codes == "fp4" else 4 if self.dtype == "float32" else 2
        scale = {"any": scale, "float16": 2, "levels": 1, "powers": 1}[self.scaling]
        size = rows * -(-columns * self.bits // 8) + groups * scale * parts
        size += rows * -(-columns // LEVEL_COLUMNS) * 2 * parts if self.scaling == "levels" else 0
        return size + (groups * self.bits // 8 if self.zeros else 0)


class Levels(NamedTuple):
    """Scales and minima as whole numbers of groups times a factor of `LEVEL_COLUMNS` columns, exact in float32.

    `factors` float16 [N, ceil(K / 128), P], `numbers` int8 [N, groups, P]: of scales, and where P is 2 of minima.
    """

    factors: np.ndarray
    numbers: np.ndarray

    def products(self, group: int) -> np.ndarray:
        """float32 [N, groups, P], of groups of so many columns."""
        factors = np.repeat(self.factors.astype(np.float32), LEVEL_COLUMNS // group, axis=1)
        return self.numbers * factors[:, : self.numbers.shape[1]]


class ScaledWeight(Protocol):
    """What stands beside the codes of a weight, however these are stored: see `PackedWeight`."""

    @property
    def format(self) -> WeightFormat: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def scales(self) -> np.ndarray: ...
    @property
    def zeros(self) -> np.ndarray | None: ...
    @property
    def minima(self) -> np.ndarray | None: ...
    @property
    def levels(self) -> Levels | None: ...
    @property
    def order(self) -> np.ndarray | None: ...
    @property
    def input_scales(self) -> np.ndarray | None: ...


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K], on the host.

    `codes` uint8 [N, K]; `scales` float32 [N, groups], exact; `zeros` uint8 [N, groups] or None, counted as codes are.
    `order` int32 [K] or None: column k of the codes is multiplied by element order[k] of the activations; groups are of
    columns of the codes. `input_scales` float32 [K] or None: what multiplies the activations, in their own order.
    `minima` float32 [N, groups] or None, exact. Where groups have scales of their own beside one of many groups, as
    llama.cpp's K types, `scales` and `minima` are the products of `levels`.
    """

    format: WeightFormat
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    order: np.ndarray | None = None
    input_scales: np.ndarray | None = None
    minima: np.ndarray | None = None
    levels: Levels | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def dtype(self) -> str:
        """The dtype in which the values are rounded."""
        return self.format.dtype

    def rows(self, start: int, stop: int) -> PackedWeight:
        """These rows alone, as views."""
        zeros = None if self.zeros is None else self.zeros[start:stop]
        minima = None if self.minima is None else self.minima[start:stop]
        levels = self.levels and Levels(*(each[start:stop] for each in self.levels))
        codes, scales = self.codes[start:stop], self.scales[start:stop]
        return replace(self, codes=codes, scales=scales, zeros=zeros, minima=minima, levels=levels)

    def values(self) -> np.ndarray:
        """The weight as float32 [N, K], its columns in the order of the activations, without `input_scales`.

        Each is (code - zero point) * scale + minimum, rounded to nearest, ties to even, in the format's dtype. Integers
        without zero point and minimum count from the middle of their range.
        """
        format, (rows, columns) = self.format, self.codes.shape
        group = format.group or columns
        if not format.codes.startswith("int"):
            values = code_values(format.codes)[self.codes]
        else:
            values = self.codes.astype(np.float32)
            if self.zeros is not None:
                values -= np.repeat(self.zeros.astype(np.float32), group, 1)[:, :columns]
            elif self.minima is None:
                values -= np.float32(1 << format.bits - 1)
        values *= np.repeat(self.scales, group, 1)[:, :columns]
        if self.minima is not None:
            values += np.repeat(self.minima, group, 1)[:, :columns]
        values = rounded(values, format.dtype)
        if self.order is None:
            return values
        ordered = np.empty((rows, columns), np.float32)
        ordered[:, self.order] = values
        return ordered


@cache
def code_values(codes: Codes) -> np.ndarray:
    """What each code stands for, before its zero point is taken off: float32 [2 ** bits], read-only."""
    if codes in ("fp4", "iq4"):
        table = (FP4 if codes == "fp4" else IQ4).copy()
    elif codes == "fp8":
        bits = np.arange(256)
        exponent, fraction = bits >> 3 & 15, bits & 7
        size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
        size[bits & 127 == 127] = np.nan
        table = np.where(bits >> 7 == 1, -size, size).astype(np.float32)
    else:
        table = np.arange(1 << _BITS[codes], dtype=np.float32)
    table.setflags(write=False)
    return table


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 `values` as `dtype` ("float16", "bfloat16" or "float32") holds them, as float32."""
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return float32_of(bfloat16_bits(values))
    return values
