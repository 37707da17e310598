"""The layout in which kernels read weights of 4 bits: a pure function of a `PackedWeight`, and back.

A block is 8 rows times 128 columns: 512 bytes of codes, 16 for each lane of a warp, then what belongs to the groups of
the 8 rows. Lane i has of row i / 4 columns 8 (i % 4) to + 7 of each of four steps of 32 columns, a word a step. In a
word, the code of column j begins at bit `CODE_BITS[j]` and goes round: decode/packed_copies.cuh says why. Of each row
and group in a block follows the scale in the compute dtype; where there are zero points, behind each scale what takes
the zero point off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgellm.kernels.arrays import OwnArray
from edgellm.kernels.bfloat16 import bfloat16_bits
from edgellm.kernels.errors import KernelError
from edgellm.kernels.quantization.packed_weight import PackedWeight, WeightFormat

#: Rows and columns of a block, columns of a step and of a lane in it, and bytes of a block's codes.
BLOCK_ROWS, BLOCK_COLUMNS, STEP, LANE_COLUMNS, CODE_BYTES = 8, 128, 32, 8, 512
#: Where a column's code begins in a word.
CODE_BITS = (6, 22, 2, 18, 14, 30, 10, 26)
#: By which small scales of float16 are stored times; the largest that stays finite.
SMALL_FACTOR = 2.0**18
SMALL_SCALE = 65504 / SMALL_FACTOR
#: By compute dtype, what is added to a zero point: what its codes stand behind.
_ZERO_OFFSETS = {"float16": 16, "bfloat16": 32}


@dataclass(frozen=True)
class DeviceLayout:
    """What kernels know of a weight [rows, columns] of 4 bits when they are compiled.

    Its format, and whether its scales are `small` (of float16, symmetric, and finite times 2^18), which saves
    instructions and changes no bit.
    """

    format: WeightFormat
    rows: int
    columns: int
    small: bool = False

    @property
    def scales(self) -> int:
        """Of a row in a block."""
        group = self.format.group
        return BLOCK_COLUMNS // group if group is not None and group < BLOCK_COLUMNS else 1

    @property
    def block_bytes(self) -> int:
        """Of codes, scales and zero points."""
        return CODE_BYTES + BLOCK_ROWS * 2 * self.scales * (2 if self.format.zeros else 1)

    @property
    def blocks(self) -> tuple[int, int]:
        """Down the rows, and along the columns."""
        return -(-self.rows // BLOCK_ROWS), -(-self.columns // BLOCK_COLUMNS)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the array of bytes."""
        return (*self.blocks, self.block_bytes)

    def groups(self) -> np.ndarray:
        """The group of each scale of a row: int [blocks, scales]."""
        columns = np.arange(self.blocks[1] * self.scales) * (BLOCK_COLUMNS // self.scales)
        return (np.minimum(columns, self.columns - 1) // (self.format.group or self.columns)).reshape(-1, self.scales)


@dataclass(frozen=True)
class PackedMatrix:
    """A weight in the kernels' layout: `data` uint8 of `layout.shape`, in the memory of the device."""

    layout: DeviceLayout
    data: OwnArray

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.layout.rows, self.layout.columns

    @property
    def dtype(self) -> str:
        """In which its values are rounded."""
        return self.layout.format.dtype

    @property
    def pointer(self) -> int:
        """Of the data."""
        return self.data.pointer


def layout_refusal(format: WeightFormat, dtype: str) -> str | None:
    """Why the kernels of a compute dtype do not take weights of a format; None if they do."""
    if format.codes != "int4":
        return f"kernels take codes of int4, not of {format.codes}"
    if format.group not in (None, 32, 64) and format.group % BLOCK_COLUMNS:
        return f"kernels take groups of 32, 64, multiples of 128 and whole rows, not of {format.group}"
    if format.dtype != dtype or dtype not in _ZERO_OFFSETS:
        return f"kernels that compute in {dtype} take weights that are rounded in it, not in {format.dtype}"
    if format.permuted or format.scaled:
        return "kernels take activations in their own order and scale"
    return None


def device_layout(weight: PackedWeight) -> DeviceLayout:
    """The layout of a weight, of whose scales it depends whether they are small. Raises KernelError for a format that
    kernels do not take, and for scales that are not numbers of its dtype."""
    format = weight.format
    reason = layout_refusal(format, format.dtype)
    if reason is not None:
        raise KernelError(reason)
    if not np.array_equal(_values(_bits(weight.scales, format.dtype), format.dtype), weight.scales):
        raise KernelError(f"scales are no numbers of {format.dtype}, in which the weight is rounded")
    small = format.dtype == "float16" and not format.zeros and bool(np.abs(weight.scales).max(initial=0) <= SMALL_SCALE)
    return DeviceLayout(format, *weight.shape, small)


def to_device_layout(weight: PackedWeight) -> tuple[DeviceLayout, np.ndarray]:
    """A weight as kernels read it: uint8 of `DeviceLayout.shape`. Behind the last row and column are zeros."""
    layout = device_layout(weight)
    down, along = layout.blocks
    padded = np.zeros((down * BLOCK_ROWS, along * BLOCK_COLUMNS), np.uint32)
    padded[: layout.rows, : layout.columns] = weight.codes
    steps, lanes = BLOCK_COLUMNS // STEP, STEP // LANE_COLUMNS
    columns = padded.reshape(down, BLOCK_ROWS, along, steps, lanes, LANE_COLUMNS)
    words = np.zeros(columns.shape[:-1], np.uint32)
    for column, bit in enumerate(CODE_BITS):
        words |= _turned(columns[..., column], bit)
    result = np.empty(layout.shape, np.uint8)
    result[..., :CODE_BYTES] = words.transpose(0, 2, 1, 4, 3).copy().view(np.uint8).reshape(down, along, CODE_BYTES)
    result[..., CODE_BYTES:] = tail_bytes(weight, layout)
    return layout, result


def tail_bytes(weight: PackedWeight, layout: DeviceLayout) -> np.ndarray:
    """What follows the codes of each block: uint8 [down, along, `block_bytes` - 512]."""
    parts = [_padded(weight.scales * np.float32(SMALL_FACTOR if layout.small else 1), layout)]
    if weight.zeros is not None:
        parts.append(_padded(-(weight.zeros.astype(np.float32) + _ZERO_OFFSETS[layout.format.dtype]), layout))
    bits = np.stack([_bits(part, layout.format.dtype) for part in parts], axis=-1)
    return bits.view(np.uint8).reshape(*layout.blocks, -1)


def from_device_layout(layout: DeviceLayout, data: np.ndarray) -> PackedWeight:
    """The weight that `to_device_layout` was given."""
    down, along = layout.blocks
    steps, lanes = BLOCK_COLUMNS // STEP, STEP // LANE_COLUMNS
    words = data[..., :CODE_BYTES].copy().view(np.uint32).reshape(down, along, BLOCK_ROWS, lanes, steps)
    words = words.transpose(0, 2, 1, 4, 3)
    codes = np.stack([(_turned(words, 32 - bit) & 15).astype(np.uint8) for bit in CODE_BITS], axis=-1)
    codes = codes.reshape(down * BLOCK_ROWS, -1)[: layout.rows, : layout.columns]
    format, parts = layout.format, 2 if layout.format.zeros else 1
    bits = data[..., CODE_BYTES:].copy().view(np.uint16).reshape(down, along, BLOCK_ROWS, layout.scales, parts)
    values = _values(bits, format.dtype).transpose(0, 2, 1, 3, 4).reshape(down * BLOCK_ROWS, -1, parts)
    _, firsts = np.unique(layout.groups().reshape(-1), return_index=True)
    chosen = values[: layout.rows, firsts]
    scales = chosen[..., 0] / np.float32(SMALL_FACTOR if layout.small else 1)
    zeros = (-chosen[..., 1] - _ZERO_OFFSETS[format.dtype]).astype(np.uint8) if format.zeros else None
    return PackedWeight(format, np.ascontiguousarray(codes), np.ascontiguousarray(scales), zeros)


def _padded(values: np.ndarray, layout: DeviceLayout) -> np.ndarray:
    """Of groups [N, groups], as blocks have them: [down, along, rows, scales]."""
    down, along = layout.blocks
    rows = np.zeros((down * BLOCK_ROWS, values.shape[1]), np.float32)
    rows[: layout.rows] = values
    return rows[:, layout.groups()].reshape(down, BLOCK_ROWS, along, layout.scales).swapaxes(1, 2)


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    """Words turned to the left."""
    return words << np.uint32(bits) | words >> np.uint32(32 - bits) if bits % 32 else words


def _bits(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16) if dtype == "float16" else bfloat16_bits(values)


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
