"""The layout in which kernels read weights of 4 to 8 bits: a pure function of a `PackedWeight`.

A block is 8 rows times 128 columns: the codes as words of lanes (`code_words`), 512 bytes of 4 bits; then what belongs
to the groups of the 8 rows. Of each row and group in a block follows the scale, and where there are zero points or
minima, behind each scale what takes the zero point off, or the minimum: of 16 bits, or of 32. Or the row's two factors
of float32, then its scales as 8-bit floats (`scale_factors`). Or of all rows the factors of `Levels`, then of each row
the whole numbers, of four groups the scales', then the minima's. Or of each scale its exponent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.code_words import BLOCK_COLUMNS, BLOCK_ROWS, TURNS
from edgellm.kernels.quantization.packed_weight import ScaledWeight, WeightFormat, rounded
from edgellm.kernels.quantization.scale_factors import scale_factors

#: By which small scales of float16 are stored times; the largest that stays finite.
SMALL_FACTOR = 2.0**18
SMALL_SCALE = 65504 / SMALL_FACTOR
#: By codes and the dtype of products: what is added to a zero point, which is what its codes stand behind.
_ZERO_OFFSETS = {
    **{(codes, product): 16 for codes in ("int4", "int5", "int6") for product in ("float16", "float32")},
    **{("int8", product): 1024 for product in ("float16", "float32")},
    ("int4", "bfloat16"): 32,
}
#: By codes and the dtype of products: what scales are stored times, because codes become so much less.
_FACTORS = {
    ("fp8", "float16"): 2.0**8,
    ("fp8", "bfloat16"): 2.0**120,
    ("fp8", "float32"): 2.0**8,
    ("fp4", "float32"): 2.0**14,
}
#: What the factors of scales of 8 bits are stored times, because these become so much less.
_BYTE_FACTOR = 2.0**8
#: What scales may be, as the kernels number them (KIND of decode/packed_codes.cuh).
_KINDS = ("narrow", "wide", "factored", "float16", "levels", "powers")
#: What the whole numbers of `Levels` are stored more by.
_LEVEL_OFFSET = 128
#: The bits of the smallest normal float16 and the largest, as float32.
_HALVES = 0x38800000, 0x477FE000
#: The compute dtypes, as the kernels number them from 1 on.
_COMPUTED = ("float16", "bfloat16")


@dataclass(frozen=True)
class DeviceLayout:
    """What kernels know of a packed weight [rows, columns] when they are compiled.

    Its format; whether its scales are `small` (of float16, of symmetric int4, and finite times 2^18), which saves
    instructions and changes no bit; the compute `dtype` of the kernels (None: the format's); the dtype that codes are
    `multiplied` in, in which scales are exact (None: the format's, or float32 for 4-bit floats); whether scales are
    `factored` as `ScaleFactors` (None: those of 4-bit floats in groups of 16 are). A weight's value is that of
    `PackedWeight.values`, rounded to the compute dtype.
    """

    format: WeightFormat
    rows: int
    columns: int
    small: bool = False
    dtype: str | None = None
    multiplied: str | None = None
    factored: bool | None = None

    @property
    def runs(self) -> tuple[DeviceLayout, ...]:
        """Itself, where others have several (`RunsLayout`)."""
        return (self,)

    @property
    def compute(self) -> str:
        """The compute dtype of the kernels."""
        return self.dtype or self.format.dtype

    @property
    def product(self) -> str:
        """The dtype of a code times its scale: float32, or that of the scales, in which it is rounded once."""
        return self.multiplied or ("float32" if self.format.codes == "fp4" else self.format.dtype)

    @property
    def scales(self) -> int:
        """Scales of a row in a block."""
        return 1 if self.format.group is None else BLOCK_COLUMNS // math.gcd(self.format.group, BLOCK_COLUMNS)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK_ROWS * BLOCK_COLUMNS * self.format.bits // 8

    @property
    def has_factors(self) -> bool:
        """Whether scales are `ScaleFactors`."""
        is_usual = (self.format.codes, self.format.group) == ("fp4", 16)
        return is_usual if self.factored is None else self.factored

    @property
    def kind(self) -> str:
        """What scales are: one of `_KINDS`."""
        if self.has_factors:
            return "factored"
        if self.product != "float32":
            return "narrow"
        return "wide" if self.format.scaling == "any" else self.format.scaling

    @property
    def parts(self) -> int:
        """Numbers that each scale consists of: itself, and a zero point or minimum."""
        return 2 if self.format.zeros or self.format.minima else 1

    @property
    def block_bytes(self) -> int:
        """Bytes of codes, scales, zero points and minima."""
        scales, parts = self.scales, self.parts
        own = {"wide": 4 * scales * parts, "factored": 8 + scales, "levels": (2 + scales) * parts, "powers": scales}
        return self.code_bytes + BLOCK_ROWS * own.get(self.kind, 2 * scales * parts)

    @property
    def blocks(self) -> tuple[int, int]:
        """Down the rows, and along the columns."""
        return -(-self.rows // BLOCK_ROWS), -(-self.columns // BLOCK_COLUMNS)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the array of bytes."""
        return (*self.blocks, self.block_bytes)

    @property
    def mode(self) -> int:
        """The number by which the kernels know the format: MODE of decode/packed_codes.cuh."""
        scaling = 3 if self.format.minima else 2 if self.format.zeros else int(self.small)
        between = self.format.dtype if self.product == "float32" else self.product
        rounded_to = 0 if between in (self.compute, "float32") else 1 + _COMPUTED.index(between)
        codes, kind = list(TURNS).index(self.format.codes), _KINDS.index(self.kind)
        return scaling + 4 * codes + 32 * rounded_to + 128 * kind

    def groups(self) -> np.ndarray:
        """The group of each scale of a row, in the order of columns: int [blocks, scales]."""
        columns = np.arange(self.blocks[1] * self.scales) * (BLOCK_COLUMNS // self.scales)
        return (np.minimum(columns, self.columns - 1) // (self.format.group or self.columns)).reshape(-1, self.scales)


class InputPermutation(NamedTuple):
    """How activations become what a packed weight's columns are multiplied by: column k is element `order[k]` times
    `scales[k]`, rounded to the compute dtype.

    `order` int32 [K], None: their own; `scales` float32 [K], None: ones. Not both are None.
    """

    order: OwnArray | None
    scales: OwnArray | None

    @classmethod
    def of(cls, weight: ScaledWeight) -> InputPermutation | None:
        """What a weight says of its inputs, on the host; None where it takes them as they are."""
        order, scales = weight.order, weight.input_scales
        if order is None and scales is None:
            return None
        return cls(order, scales if order is None or scales is None else scales[order])


@dataclass(frozen=True)
class PackedMatrix:
    """A weight in the kernels' layout: `data` uint8 of `layout.shape`, in the memory of the device.

    `inputs`: its activations are arranged before; the norm before it does so (`CudaDecodeKernels.norm`), or another.
    """

    layout: DeviceLayout
    data: OwnArray
    inputs: InputPermutation | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.layout.rows, self.layout.columns

    @property
    def dtype(self) -> str:
        """The compute dtype of the kernels that it is for."""
        return self.layout.compute

    @property
    def pointer(self) -> int:
        """The address of the data."""
        return self.data.pointer


def layout_refusal(format: WeightFormat, dtype: str) -> str | None:
    """Why the kernels of a compute dtype do not take weights of a format; None if they do."""
    if format.codes not in TURNS or (format.codes == "fp4" and format.group != 16 and format.scaling != "powers"):
        return f"kernels take no {format}"
    if format.scaling in ("levels", "powers") and format.group not in (16, 32):
        return f"kernels take scales in {format.scaling} of groups of 16 and 32, not of {format.group}"
    if format.group is not None and format.group % 16:
        return f"kernels take groups of multiples of 16 columns and whole rows, not of {format.group}"
    if dtype not in _COMPUTED:
        return f"kernels take packed weights to compute in {' or '.join(_COMPUTED)}, not in {dtype}"
    return None


def device_layout(weight: ScaledWeight, dtype: str | None = None) -> DeviceLayout:
    """The layout of a weight for kernels of a compute dtype (None: the format's), which depends on its scales.

    Products are of 16 bits where these hold the scales and round products once, as `PackedWeight.values` does. Raises
    KernelError for a format that kernels do not take.
    """
    format = weight.format
    compute = dtype or format.dtype
    if (reason := layout_refusal(format, compute)) is not None:
        raise KernelError(reason)
    product = compute if format.dtype == "float32" else format.dtype
    in_float32 = format.codes == "fp4" or format.minima or format.scaling in ("levels", "powers")
    if in_float32 or (format.codes in ("int5", "int6", "iq4") and product == "bfloat16"):
        product = "float32"
    else:
        factor, scales = _FACTORS.get((format.codes, product), 1), weight.scales
        stored = scales if factor == 1 else scales * np.float64(factor)
        with np.errstate(over="ignore"):
            exact = _are_of(product, stored) or np.array_equal(
                rounded(stored.astype(np.float32, copy=False), product), stored
            )
        product = product if exact else "float32"
    small = (format.codes, product, format.zeros) == ("int4", "float16", False)
    small = small and bool(np.abs(weight.scales).max(initial=0) <= SMALL_SCALE)
    factored = (format.codes, format.group) == ("fp4", 16) and scale_factors(weight.scales) is not None
    return DeviceLayout(format, *weight.shape, small, compute, product, factored)


def tail_bytes(weight: ScaledWeight, layout: DeviceLayout) -> np.ndarray:
    """What follows the codes of each block: uint8 [down, along, `block_bytes` - `code_bytes`]."""
    if layout.has_factors:
        return _factored_tails(weight, layout)
    if layout.kind == "levels":
        return _level_tails(weight, layout)
    if layout.kind == "powers":
        exponents = (weight.scales.view(np.uint32) >> 23).astype(np.uint8)
        return _placed(exponents, layout).reshape(*layout.blocks, -1)
    wide, stored = layout.product == "float32", _scale_dtype(layout)
    parts = [_placed(_bits(weight.scales * np.float32(_factor(layout)), stored), layout)]
    if weight.minima is not None:
        parts.append(_placed(_bits(weight.minima, stored), layout))
    if weight.zeros is not None:
        points = np.arange(1 << layout.format.bits, dtype=np.float32) + _zero_offset(layout)
        zeros = _bits(-points, "float16" if wide else layout.product)[weight.zeros]
        parts.append(_placed(zeros.astype(np.uint32) * 0x10001 if wide else zeros, layout))
    # Copied here, whole numbers at a time: stacked parts keep the order of their memory.
    return np.ascontiguousarray(np.stack(parts, axis=-1)).view(np.uint8).reshape(*layout.blocks, -1)


def _level_tails(weight: ScaledWeight, layout: DeviceLayout) -> np.ndarray:
    assert weight.levels is not None  # as the format says
    down, along = layout.blocks
    factors = np.zeros((down * BLOCK_ROWS, along, layout.parts), np.float16)
    factors[: layout.rows] = weight.levels.factors
    numbers = (weight.levels.numbers.astype(np.int16) + _LEVEL_OFFSET).astype(np.uint8)
    placed = np.stack([_placed(numbers[..., part], layout) for part in range(layout.parts)], axis=-1)
    placed = placed.reshape(down, along, -1, 4, layout.parts).swapaxes(-1, -2).reshape(down, along, -1)
    of_blocks = factors.reshape(down, BLOCK_ROWS, along, -1).swapaxes(1, 2).copy()
    return np.concatenate((of_blocks.view(np.uint8).reshape(down, along, -1), placed), axis=-1)


def _factored_tails(weight: ScaledWeight, layout: DeviceLayout) -> np.ndarray:
    found = scale_factors(weight.scales)
    assert found is not None  # as when the layout was made
    (down, along), large = layout.blocks, np.float32(_factor(layout) * _BYTE_FACTOR)
    factors = np.zeros((down * BLOCK_ROWS, 2), np.float32)
    factors[: layout.rows] = np.stack(found[1:], axis=-1) * large
    of_blocks = np.broadcast_to(factors.view(np.uint8).reshape(down, 1, BLOCK_ROWS, 8), (down, along, BLOCK_ROWS, 8))
    return np.concatenate((of_blocks, _placed(found.codes, layout)), axis=-1).reshape(down, along, -1)


def _scale_dtype(layout: DeviceLayout) -> str:
    """The dtype of scales and minima, where they are no `Levels`, factors or powers."""
    return "float16" if layout.kind == "float16" else layout.product


def _factor(layout: DeviceLayout) -> float:
    return SMALL_FACTOR if layout.small else _FACTORS.get((layout.format.codes, layout.product), 1.0)


def _zero_offset(layout: DeviceLayout) -> int:
    return _ZERO_OFFSETS.get((layout.format.codes, layout.product), 0)


def _placed(values: np.ndarray, layout: DeviceLayout) -> np.ndarray:
    """Values of groups [N, groups], as blocks have them: [down, along, rows, scales]."""
    down, along = layout.blocks
    rows, groups = values, layout.groups()
    if layout.rows % BLOCK_ROWS:
        rows = np.zeros((down * BLOCK_ROWS, values.shape[1]), values.dtype)
        rows[: layout.rows] = values
    order = np.arange(8).reshape(4, 2).T.reshape(-1) if layout.scales == 8 else slice(None)
    once = groups.size == values.shape[1]  # each group stands in one place: nothing is gathered
    placed = rows.reshape(-1, *groups.shape)[..., order] if once else rows[:, groups[:, order]]
    return placed.reshape(down, BLOCK_ROWS, along, layout.scales).swapaxes(1, 2)


def _are_of(dtype: str, values: np.ndarray) -> bool:
    """Whether finite values are seen at once to be of a dtype of 16 bits: they are of float32 and set no bits that it
    does not have; of float16 they are positive and normal, too."""
    if values.dtype != np.float32 or not values.size:
        return False
    bits = values.view(np.uint32)
    used = int(np.bitwise_or.reduce(bits, axis=None))
    if dtype == "bfloat16":
        return not used & 0xFFFF
    return not used & 0x1FFF and bool(_HALVES[0] <= bits.min() and bits.max() <= _HALVES[1])


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of float32 values in a dtype, rounded: for scales, which mostly need no rounding, in a fifth of the time
    that it takes."""
    if dtype == "float32":
        return values.view(np.uint32)
    if _are_of(dtype, values):
        lower, bias = (16, 0) if dtype == "bfloat16" else (13, 127 - 15)
        bits = values.view(np.uint32) >> lower
        bits -= bias << 10
        return bits.astype(np.uint16)
    return values.astype(np.float16).view(np.uint16) if dtype == "float16" else bfloat16_bits(values)
