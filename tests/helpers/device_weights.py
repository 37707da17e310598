"""Weights of 4 to 8 bits in the layout of the kernels (`edgellm.kernels.quantization.device_layout`), and read back."""

from __future__ import annotations

import numpy as np

from edgellm.kernels.quantization.code_words import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    LANE_COLUMNS,
    STEP,
    TURNS,
    UPPER_TURNS,
    Turns,
)
from edgellm.kernels.quantization.device_layout import (
    _BYTE_FACTOR,
    _LEVEL_OFFSET,
    DeviceLayout,
    _factor,
    _scale_dtype,
    _zero_offset,
    device_layout,
    tail_bytes,
)
from edgellm.kernels.quantization.packed_weight import Codes, Levels, PackedWeight
from edgellm.kernels.quantization.scale_factors import ScaleFactors

#: Of a row in a block: lanes, and steps of columns; words that a lane reads at once.
_LANES, _STEPS, _PIECE = STEP // LANE_COLUMNS, BLOCK_COLUMNS // STEP, 4


def to_device_layout(weight: PackedWeight, dtype: str | None = None) -> tuple[DeviceLayout, np.ndarray]:
    """A weight as kernels of a compute dtype (None: the format's) read it: uint8 of `DeviceLayout.shape`.

    Behind the last row and column are zeros.
    """
    layout = device_layout(weight, dtype)
    down, along = layout.blocks
    padded = np.zeros((down * BLOCK_ROWS, along * BLOCK_COLUMNS), np.uint8)
    padded[: layout.rows, : layout.columns] = weight.codes
    result = np.empty(layout.shape, np.uint8)
    result[..., : layout.code_bytes] = code_words(padded, layout.format.codes)
    result[..., layout.code_bytes :] = tail_bytes(weight, layout)
    return layout, result


def from_device_layout(layout: DeviceLayout, data: np.ndarray) -> PackedWeight:
    """The weight that `to_device_layout` was given, without what it says of its inputs."""
    format, (down, along) = layout.format, layout.blocks
    wide, stored = layout.product == "float32", _scale_dtype(layout)
    codes = _codes_of(data[..., : layout.code_bytes], format.codes)[: layout.rows, : layout.columns]
    tails = data[..., layout.code_bytes :].copy()
    codes = np.ascontiguousarray(codes)
    if layout.kind == "levels":
        levels = _levels_of(layout, tails)
        assert format.group is not None
        products = levels.products(format.group)
        minima = products[..., 1] if format.minima else None
        return PackedWeight(format, codes, products[..., 0], minima=minima, levels=levels)
    if layout.has_factors:
        tails = tails.reshape(down, along, BLOCK_ROWS, -1)
        factors, tails = tails[..., :8].copy().view(np.float32)[:, 0].reshape(-1, 2), tails[..., 8:].copy()
    else:
        tails = tails.view({"powers": np.uint8, "wide": np.uint32}.get(layout.kind, np.uint16))
    halves = 2 if layout.scales == 8 else 1
    tails = tails.reshape(down, along, BLOCK_ROWS, halves, layout.scales // halves, -1)
    tails = tails.transpose(0, 2, 1, 4, 3, 5).reshape(down * BLOCK_ROWS, along * layout.scales, -1)
    _, firsts = np.unique(layout.groups().reshape(-1), return_index=True)
    chosen = tails[: layout.rows, firsts]
    if layout.has_factors:
        own = factors[: layout.rows] / np.float32(_factor(layout) * _BYTE_FACTOR)
        scales = _scales_of(ScaleFactors(chosen[..., 0], own[:, 0], own[:, 1]))
    elif layout.kind == "powers":
        scales = np.ldexp(np.float32(1), chosen[..., 0].astype(np.int32) - 127)
    else:
        scales = _values(chosen[..., 0], stored) / np.float32(_factor(layout))
    zeros = None
    if format.zeros:
        points = chosen[..., 1].astype(np.uint16)  # of 32 bits, the lower half
        zeros = (-_values(points, "float16" if wide else layout.product) - _zero_offset(layout)).astype(np.uint8)
    minima = np.ascontiguousarray(_values(chosen[..., 1], stored)) if format.minima else None
    return PackedWeight(format, codes, np.ascontiguousarray(scales), zeros, minima=minima)


def _levels_of(layout: DeviceLayout, tails: np.ndarray) -> Levels:
    """What `_level_tails` was given."""
    (down, along), parts, halves = layout.blocks, layout.parts, layout.scales // 4
    factors = tails[..., : 2 * BLOCK_ROWS * parts].copy().view(np.float16)
    factors = factors.reshape(down, along, BLOCK_ROWS, parts).swapaxes(1, 2).reshape(-1, along, parts)[: layout.rows]
    numbers = tails[..., 2 * BLOCK_ROWS * parts :].reshape(down, along, BLOCK_ROWS, halves, parts, 4)
    numbers = numbers.transpose(0, 2, 1, 5, 3, 4).reshape(down * BLOCK_ROWS, along * layout.scales, parts)
    groups = layout.format.groups(layout.columns)
    numbers = (numbers[: layout.rows, :groups].astype(np.int16) - _LEVEL_OFFSET).astype(np.int8)
    return Levels(np.ascontiguousarray(factors), numbers)


def _codes_of(words: np.ndarray, codes: Codes) -> np.ndarray:
    """What `code_words` was given."""
    (down, along, _), every, begin = words.shape, np.ascontiguousarray(words).view(np.uint32), 0
    lanes = np.zeros((down, along, BLOCK_ROWS, _LANES, _STEPS * LANE_COLUMNS), np.uint8)
    for turns in _tables(codes):
        count = lanes.shape[-1] // len(turns)  # words of a lane
        own = every[..., begin : begin + BLOCK_ROWS * _LANES * count]
        pieces = own.reshape(down, along, -1, BLOCK_ROWS, _LANES, min(_PIECE, count))
        lanes |= _parted(np.moveaxis(pieces, 2, 4).reshape(*lanes.shape[:-1], count), turns).reshape(lanes.shape)
        begin += own.shape[-1]
    columns = lanes.reshape(down, along, BLOCK_ROWS, _LANES, _STEPS, LANE_COLUMNS).transpose(0, 2, 1, 4, 3, 5)
    return columns.reshape(down * BLOCK_ROWS, -1)


def _parted(words: np.ndarray, turns: tuple[Turns, ...]) -> np.ndarray:
    """What `_joined` was given, uint8, but for bits that it leaves out."""
    parts = [_turned(words, -turn) & low | _turned(words, -more) & high for low, turn, high, more in turns]
    return np.stack(parts, axis=-1).astype(np.uint8)


def _scales_of(factors: ScaleFactors) -> np.ndarray:
    """float32 [N, groups]."""
    exponent, fraction = (factors.codes >> 3).astype(np.int32), (factors.codes & 7).astype(np.float64)
    values = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    products = (values * factors.second[:, None]).astype(np.float32)
    return (values * factors.first[:, None] + products).astype(np.float32)


def _values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else bits.view(np.float32)


def code_words(padded: np.ndarray, codes: Codes) -> np.ndarray:
    """Codes uint8 of whole blocks [8 D, 128 A], as bytes of blocks: uint8 [D, A, bytes]."""
    down, along = padded.shape[0] // BLOCK_ROWS, padded.shape[1] // BLOCK_COLUMNS
    columns = padded.reshape(down, BLOCK_ROWS, along, _STEPS, _LANES, LANE_COLUMNS).transpose(0, 2, 1, 4, 3, 5)
    lanes, found = columns.reshape(down, along, BLOCK_ROWS, _LANES, -1), list[np.ndarray]()
    for turns in _tables(codes):
        words = _joined(lanes.reshape(*lanes.shape[:-1], -1, len(turns)), turns)
        pieces = words.reshape(*lanes.shape[:-1], -1, min(_PIECE, words.shape[-1]))
        found.append(np.moveaxis(pieces, 4, 2).reshape(down, along, -1))
    return np.concatenate(found, axis=-1).view(np.uint8)


def _tables(codes: Codes) -> tuple[tuple[Turns, ...], ...]:
    return (TURNS[codes], UPPER_TURNS[codes]) if codes in UPPER_TURNS else (TURNS[codes],)


def _joined(columns: np.ndarray, turns: tuple[Turns, ...]) -> np.ndarray:
    """The words [...] of codes [..., columns]."""
    words, every = np.zeros(columns.shape[:-1], np.uint32), np.arange(256, dtype=np.uint32)
    for column, (low, turn, high, more) in enumerate(turns):
        if low:
            words |= (_turned(every & low, turn) | _turned(every & high, more))[columns[..., column]]
    return words


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    """Words turned to the left."""
    bits %= 32
    return words << np.uint32(bits) | words >> np.uint32(32 - bits) if bits else words
